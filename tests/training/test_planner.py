"""Suggestions of a plan: within ε, on the frontier, of public numbers alone."""

import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.calibration import calibrate_noise
from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.schemes import PoissonSampling, RandomAllocation
from tfdp_rec.training import planner, signal
from tfdp_rec.training.planner import Candidate, choose
from tfdp_rec.training.signal import candidates, share_of_signal

UNITS, EPSILON, DELTA = 36_000, 4.0, 1e-6


class Private(np.ndarray):
    """An array that may not be looked at."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("a row was looked at")

    __getitem__ = __iter__ = __array_ufunc__ = __array_function__ = __array__ = tolist = tobytes = max = min = refuse


def click_model():
    user, item = keras.Input([], dtype="int32"), keras.Input([], dtype="int32")
    tables = [keras.layers.Embedding(50, 4)(user), keras.layers.Embedding(30, 4)(item)]
    model = keras.Model([user, item], keras.layers.Dot(1)(tables))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


@pytest.fixture
def timed(monkeypatch):
    """Steps of a known price in place of a clock: 0.02 s and 10 µs a unit, 10^9 bytes and 1,000 a unit."""
    asked = []

    def measure(prepare, plan):
        size = plan.sampling.expected_batch_size
        asked.append(size)
        return 0.02 + 1e-5 * size, 1e9 + 1e3 * size

    monkeypatch.setattr(planner, "_measure", measure)
    return asked


@pytest.fixture
def few(monkeypatch):
    """Fewer candidates, for less time."""
    monkeypatch.setattr(signal, "_CANDIDATES", (4, 20))


def suggest(**more):
    rows = [tf.TensorSpec([None], tf.int32)] * 2, tf.TensorSpec([None, 1], tf.float32)
    given = {"num_units": UNITS, "epsilon": EPSILON, "delta": DELTA, "accountant": "rdp", "verbose": 0, **more}
    return tfdp_rec.PrivatePlan.suggest(click_model(), rows, **given)


def test_no_suggestion_costs_more_than_epsilon_with_what_else_is_spent(timed, few):
    spent = [(GaussianDpEvent(2.0), "popularity counts")]
    found = suggest(spent=spent, l2_norm_clip="auto")
    assert found
    for row in found:
        plan = row.plan
        fresh = Accountant(GaussianDpEvent(plan.noise_multiplier), plan.sampling, DELTA, "rdp")
        fresh.spend(*spent[0])
        assert 0.99 * EPSILON < fresh.epsilon(plan.steps) <= EPSILON
        assert plan.l2_norm_clip == "auto" and row.numbers["epsilon"] == EPSILON


@pytest.mark.slow
def test_by_the_tight_accountant_too(timed, few):
    for row in suggest(accountant="pld"):
        fresh = Accountant(GaussianDpEvent(row.plan.noise_multiplier), row.plan.sampling, DELTA, "pld")
        assert 0.99 * EPSILON < fresh.epsilon(row.plan.steps) <= EPSILON


@pytest.mark.slow
def test_rows_get_dearer_and_better_and_no_setting_of_a_grid_beats_one(timed):
    found = suggest()
    told = [row.numbers for row in found]
    assert len(found) == 3
    for less, more in itertools.pairwise(told):
        assert less["seconds"] <= 0.8 * more["seconds"] and less["share_of_signal"] < more["share_of_signal"]
    for row in told:
        seconds, memory = (0.02 + 1e-5 * row["batch_size"]) * row["steps"], 1e9 + 1e3 * row["batch_size"]
        assert row["seconds"] == pytest.approx(seconds) and row["memory"] == pytest.approx(memory, rel=1e-6)
    # Every batch size from tiny to the largest that is allowed, by both samplings, of at least as many steps.
    for epochs, steps_an_epoch in itertools.product((1, 2, 4, 7, 12, 20, 35, 60), (5, 8, 13, 30, 100, 400)):
        if epochs * steps_an_epoch < 400:
            continue
        size = math.ceil(UNITS / steps_an_epoch)
        for sampling in (PoissonSampling(UNITS, size), RandomAllocation(UNITS, steps_an_epoch)):
            steps = epochs * steps_an_epoch
            noise = calibrate_noise(EPSILON, DELTA, sampling, steps, "rdp")
            share = share_of_signal(sampling, steps, noise, EPSILON, DELTA)
            seconds = steps * (0.02 + 1e-5 * sampling.expected_batch_size)
            for row in told:  # a thousandth: that is how near the noise is to the least
                assert not (share > 1.001 * row["share_of_signal"] and seconds <= row["seconds"]), (epochs, sampling)
                assert not (share >= 1.001 * row["share_of_signal"] and seconds < row["seconds"]), (epochs, sampling)


def test_the_smallest_and_the_largest_batch_are_timed(timed, few):
    suggest()
    sizes = [math.ceil(sampling.expected_batch_size) for sampling, _ in candidates(UNITS, 3, "example")]
    assert timed == [min(sizes), max(sizes)]


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_brute_force(seed):
    """All of a random cloud: what is shown is dominated by nothing, and each of the three is the best of its kind."""
    rng = np.random.default_rng(seed)
    cloud = [Candidate(None, 1, share, seconds) for share, seconds in np.round(rng.random([60, 2]), 1 + seed % 3) + 0.1]
    rows = choose(cloud)
    assert rows == sorted(rows, key=lambda each: each.seconds) and 1 <= len(rows) <= 3
    for row in rows:
        for each in cloud:
            better = (each.share, -each.seconds) != (row.share, -row.seconds)
            assert not (better and each.share >= row.share and each.seconds <= row.seconds)
    largest = max(each.share for each in cloud)
    assert rows[-1].seconds == min(each.seconds for each in cloud if each.share >= 0.95 * largest)
    assert rows[0].share >= largest / 3
    for less, more in itertools.pairwise(rows):
        assert less.seconds <= 0.8 * more.seconds


def test_three_are_shown_where_there_are_three():
    far = (0.2, 1), (0.4, 2), (0.7, 4), (0.7, 3), (0.9, 8), (0.91, 99)
    cloud = [Candidate(None, 1, share, seconds) for share, seconds in far]
    assert [each.seconds for each in choose(cloud)] == [2, 3, 8]
    near = [Candidate(None, 1, share, seconds) for share, seconds in ((0.5, 7), (0.9, 8))]
    assert [each.seconds for each in choose(near)] == [8]


@pytest.mark.slow
def test_shapes_alone_are_looked_at_and_steps_are_timed_on_made_up_rows(few):
    rows = [np.zeros(UNITS, "int32").view(Private)] * 2, np.zeros([UNITS, 1], "float32").view(Private)
    model = click_model()
    before = [each.numpy() for each in model.weights]
    found = tfdp_rec.PrivatePlan.suggest(
        model, rows, num_units=400, epsilon=EPSILON, delta=1e-4, unit="user", accountant="rdp", verbose=0
    )
    assert 1 <= len(found) <= 3
    for row in found:
        assert 0 < row.seconds < math.inf and 2**26 < row.memory < 2**40
        assert row.plan.accountant.steps == 0 and row.plan.sampling.unit == "user"
    assert all((now.numpy() == then).all() for now, then in zip(model.weights, before))
    with pytest.raises(AssertionError, match="looked at"):
        rows[1][0]


def test_the_table_has_a_line_for_each_row(timed, few):
    found = suggest()
    head, *lines = str(found).splitlines()
    if len(found) < 3:
        assert lines.pop().startswith("There are no more rows")
    assert len(lines) == len(found) and head.split()[:2] == ["sampling", "batch"]
    for line, row in zip(lines, found):
        assert line.split()[0] == type(row.plan.sampling).__name__
        assert f"{row.plan.share_of_signal:.0%}" in line.split()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epsilon": 0.0}, "epsilon must be positive"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"delta": 0.5}, "above 1 / num_units"),
        ({"num_units": 0}, "num_units must be"),
        ({"num_units": 2.5}, "num_units"),
        ({"accountant": "moments"}, "accountant"),
        ({"spent": [(GaussianDpEvent(0.01), "a count")]}, "No noise multiplier"),
    ],
)
def test_bad_input_is_said_before_any_step_is_timed(timed, wrong, words):
    with pytest.raises(ValueError, match=words):
        suggest(**wrong)
    assert not timed


@pytest.mark.parametrize("rows", [None, np.zeros(3), (np.zeros(3),)])
def test_other_rows_and_models_are_refused(rows):
    for model in (click_model(), keras.Sequential([keras.layers.Dense(1)]), keras.Model()):
        with pytest.raises(ValueError, match="models of layers"):
            tfdp_rec.PrivatePlan.suggest(model, rows, num_units=100, epsilon=1.0, delta=1e-4)
