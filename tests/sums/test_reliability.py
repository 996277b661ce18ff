"""Reliability of predictions: one unit moves the counts by at most 1, and scale and offset undo what they should."""

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import tfdp_rec
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.privacy import Accountant, PoissonSampling, private_reliability
from tfdp_rec.sums.fixed_point import ONE
from tfdp_rec.sums.reliability import LABEL, Reliability, grid_counts

ROW = st.tuples(
    st.sampled_from([0.0, 0.1, 0.3, -7.9, 50.0, np.inf, -np.inf, np.nan]), st.integers(0, 1), st.integers(0, 3)
)


def columns(rows):
    logits, clicks, users = zip(*rows) if rows else ((), (), ())
    return np.array(logits, float), np.array(clicks, int) == 1, np.array(users, int)


@settings(deadline=None)
@given(st.lists(ROW, max_size=30), st.integers(0, 3))
def test_one_user_more_moves_the_counts_by_at_most_one(rows, user):
    logits, clicks, users = columns(rows)
    others = users != user
    moved = grid_counts(logits, clicks, users) - grid_counts(logits[others], clicks[others], users[others])
    assert sum(int(step) ** 2 for step in moved) <= ONE**2
    assert (moved >= 0).all()


@given(st.lists(ROW, min_size=1, max_size=30), st.integers(0, 29))
def test_one_row_more_moves_the_counts_by_one_or_not_at_all(rows, at):
    at %= len(rows)
    moved = grid_counts(*columns(rows)[:2]) - grid_counts(*columns(rows[:at] + rows[at + 1 :])[:2])
    assert sorted(moved)[-1] == (0 if np.isnan(rows[at][0]) else ONE) and np.abs(moved).sum() <= ONE


def test_a_user_of_many_rows_uses_what_there_is():
    rng = np.random.default_rng(0)
    weights = grid_counts(rng.normal(size=1000), rng.random(1000) < 0.5, np.zeros(1000, int))
    assert 0.99 < np.linalg.norm(weights / ONE) <= 1


@pytest.mark.parametrize("scale, offset", [(0.05, 0.2), (0.3, 0.0), (1.0, -1.0), (2.0, 0.5)])
@pytest.mark.parametrize("by_user", [False, True])
def test_scale_and_offset_are_those_of_the_labels(scale, offset, by_user):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=200_000) * (1.5 if scale > 0.1 else 20.0)  # far beyond what a probability can show
    clicks = rng.random(logits.size) < special.expit(scale * logits + offset)
    unit = np.arange(logits.size) // 4 if by_user else None
    found = private_reliability(logits, clicks, noise_multiplier=30.0, unit=unit, words=seeded(3))
    assert found.scale == pytest.approx(scale, rel=0.1) and found.offset == pytest.approx(offset, abs=0.08)
    near = logits[np.abs(logits) < 64][:9]
    np.testing.assert_allclose(found.corrected(near), found.scale * near + found.offset)
    assert np.isfinite(found.corrected([-np.inf, np.inf])).all()


def test_noise_is_there_and_where_it_hides_all_rows_nothing_is_corrected():
    logits, clicks = np.zeros(50), np.arange(50) % 2
    one, other = (private_reliability(logits, clicks, noise_multiplier=20.0) for _ in range(2))
    assert (one.clicks != other.clicks).mean() > 0.9
    assert np.std(np.concatenate([one.clicks, one.others, other.clicks, other.others])) == pytest.approx(20, rel=0.3)
    assert (one.scale, one.offset) == (1.0, 0.0) and not one.clear.any()


def test_cells_that_are_mostly_noise_do_not_bend_the_line():
    # All rows near 0: the far cells hold noise alone, and have a long lever.
    rng = np.random.default_rng(2)
    logits = rng.normal(size=20_000)
    clicks = rng.random(logits.size) < special.expit(logits)
    found = [private_reliability(logits, clicks, noise_multiplier=30.0, words=seeded(k)).scale for k in range(20)]
    assert np.mean(found) == pytest.approx(1.0, abs=0.05) and np.std(found) < 0.1


def test_it_is_paid_for_before_it_is_read():
    accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10), delta=1e-5)
    found = private_reliability([0.0, 1.0], [0, 1], noise_multiplier=5.0, accountant=accountant)
    alone = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10), delta=1e-5)
    alone.spend(GaussianDpEvent(5.0), "the same")
    assert accountant.epsilon() == alone.epsilon() > 0 and found.event == GaussianDpEvent(5.0)
    assert "reliability of predictions" in accountant.statement()


@pytest.mark.parametrize(
    "change, words",
    [({"noise_multiplier": 0.0}, "noise_multiplier"), ({"clicks": [0]}, "one number"), ({"unit": [1]}, "one id"),
     ({"clicks": ["0", "1"]}, "one number")],
)  # fmt: skip
def test_bad_arguments_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        private_reliability(**{"logits": [0.0, 1.0], "clicks": [0, 1], "noise_multiplier": 1.0, **change})


ROWS, ITEMS = 4000, 20
IDS = np.random.default_rng(0).integers(0, ITEMS, ROWS)
CLICKS = (np.random.default_rng(1).random(ROWS) < 0.2 + 0.6 * IDS / ITEMS).astype("float32")
SETTINGS = {"epsilon": 8.0, "batch_size": 400, "epochs": 3, "accountant": "rdp"}


def click_model(from_logits):
    ends = [] if from_logits else ["sigmoid"]
    model = keras.Sequential([keras.layers.Embedding(ITEMS, 4), keras.layers.Dense(1, *ends)])
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=from_logits))
    return model


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("from_logits", [True, False])
def test_a_private_fit_corrects_its_predictions_within_its_budget(from_logits):
    private = tfdp_rec.make_private(click_model(from_logits), (IDS, CLICKS[:, None]), reliability=10.0, **SETTINGS)
    assert 0 < private.plan.accountant.epsilon() < 1  # paid ahead
    history = private.fit(verbose=0)
    assert history.history["epsilon"][-1] <= 8.0 and "reliability of predictions" in private.statement()
    assert int(private.model.optimizer.iterations) == private.plan.steps == 30  # the noise leaves room for it
    spent = private.plan.accountant.epsilon()
    found = private.reliability()
    assert private.reliability() is found and private.plan.accountant.epsilon() == spent
    for again in (dataclasses.replace(private), copy.copy(private)):
        assert again.reliability() is found
    predicted = private.model.predict(np.arange(ITEMS), verbose=0)[:, 0]
    logits = predicted if from_logits else special.logit(predicted.astype("float64"))
    wanted = 0.2 + 0.6 * np.arange(ITEMS) / ITEMS
    before, after = (np.square(special.expit(z) - wanted).mean() for z in (logits, found.corrected(logits)))
    assert after < max(before, 0.003)


def test_a_private_fit_by_user_counts_by_user():
    users = np.arange(ROWS) % 200  # 20 rows each: 4,000 by row; a user gives between 1 and √20
    settings = SETTINGS | {"epsilon": 40.0, "batch_size": 50, "epochs": 1}
    private = tfdp_rec.make_private(click_model(True), (IDS, CLICKS[:, None]), unit=users, reliability=1.0, **settings)
    private.fit(verbose=0)
    found = private.reliability()
    counted, noise = found.clicks.sum() + found.others.sum(), 172**0.5  # of the cells of both
    assert 200 - 8 * noise < counted < 200 * 20**0.5 + 8 * noise


def test_copies_made_before_the_release_share_it():
    private = tfdp_rec.make_private(click_model(True), (IDS, CLICKS[:, None]), reliability=10.0, **SETTINGS)
    copies = [dataclasses.replace(private), copy.copy(private)]
    release = copy.deepcopy(private._release)
    with pytest.raises(ValueError, match="no step"):
        private.reliability()
    private.fit(verbose=0, epochs=1, steps_per_epoch=1)
    assert all(one.reliability() is private.reliability() for one in copies)
    assert release.of(private.model) is private.reliability()
    with pytest.raises(TypeError, match="release it again"):
        pickle.dumps(private._release)


@pytest.mark.slow
def test_threads_share_one_release():
    private = tfdp_rec.make_private(click_model(True), (IDS, CLICKS[:, None]), reliability=10.0, **SETTINGS)
    private.fit(verbose=0, epochs=1, steps_per_epoch=1)
    with ThreadPoolExecutor(4) as pool:
        assert len({id(one) for one in pool.map(lambda _: private.reliability(), range(8))}) == 1


def releases(private):
    return [event for event, label in private.plan.accountant.spent_besides if label.startswith(LABEL)]


@pytest.mark.slow
def test_what_was_released_of_a_model_before_is_spent(tmp_path):
    model = click_model(True)
    first = tfdp_rec.make_private(model, (IDS, CLICKS[:, None]), reliability=10.0, **SETTINGS)
    first.fit(verbose=0)
    found, larger = first.reliability(), SETTINGS | {"epsilon": 20.0}
    second = tfdp_rec.make_private(model, (IDS, CLICKS[:, None]), reliability=10.0, **larger)
    second.fit(verbose=0)
    assert second.reliability() is not found
    assert releases(second) == [GaussianDpEvent(10.0)] * 2
    second.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    third = tfdp_rec.make_private(loaded, (IDS, CLICKS[:, None]), **(SETTINGS | {"epsilon": 40.0}))
    third.fit(verbose=0)
    assert releases(third) == [GaussianDpEvent(10.0)] * 2


def test_two_reliabilities_of_one_noise_are_two_uses():
    data = (IDS, CLICKS[:, None])
    fits = [tfdp_rec.make_private(click_model(True), data, reliability=10.0, **SETTINGS) for _ in range(2)]
    both = Accountant(GaussianDpEvent(1.0), PoissonSampling(ROWS, 400), delta=1e-5, accountant="rdp")
    for _ in range(2):  # each by itself is counted once
        for private in fits:
            both.follow(private.model)
    assert both.spent_besides == [(GaussianDpEvent(10.0), LABEL)] * 2


def test_arrays_that_change_later_do_not_change_whose_rows_count_together():
    users = np.arange(ROWS) % 50
    settings = SETTINGS | {"batch_size": 20, "epochs": 1}
    private = tfdp_rec.make_private(click_model(True), (IDS, CLICKS[:, None]), unit=users, reliability=10.0, **settings)
    private.fit(verbose=0)
    users[:] = np.arange(ROWS)
    found = private.reliability()
    assert found.clicks.sum() + found.others.sum() < 50 * 80**0.5 + 1000


@pytest.mark.slow
def test_text_is_predicted_as_it_was_trained():
    words = np.array([f"w{n}" for n in IDS])
    lookup = keras.layers.StringLookup(vocabulary=[f"w{n}" for n in range(ITEMS)])
    model = keras.Sequential([lookup, keras.layers.Embedding(ITEMS + 1, 4), keras.layers.Dense(1)])
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    private = tfdp_rec.make_private(model, (words, CLICKS[:, None]), reliability=10.0, **SETTINGS)
    private.fit(verbose=0)
    assert private.reliability().tells


class Centred(keras.layers.Layer):
    def call(self, x, training=False):
        return x if training else x - keras.ops.mean(x)


class Counting(keras.layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if not training:
            self.seen.assign_add(keras.ops.sum(x))
        return x + self.seen


@pytest.mark.parametrize("layer, words", [(Centred, "puts several examples"), (Counting, "was computed from")])
def test_a_prediction_that_depends_on_other_rows_is_refused_before_the_training(layer, words):
    model = keras.Sequential([keras.layers.Embedding(ITEMS, 4), keras.layers.Dense(1), layer()])
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    with pytest.raises(NotPrivate, match=words):
        tfdp_rec.make_private(model, (IDS, CLICKS[:, None]), reliability=10.0, **SETTINGS)


@pytest.mark.slow
def test_what_is_released_is_what_was_read_and_not_a_prediction_step_of_ones_own():
    class Own(tfdp_rec.PrivateModel):
        def predict_step(self, data):
            return keras.ops.zeros_like(super().predict_step(data)) + keras.ops.mean(super().predict_step(data))

    inputs = keras.Input([], dtype="int32")
    model = Own(inputs, keras.layers.Dense(1)(keras.layers.Embedding(ITEMS, 4)(inputs)))
    model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=True))
    private = tfdp_rec.make_private(model, (IDS, CLICKS[:, None]), reliability=10.0, **SETTINGS)
    private.fit(verbose=0)
    assert private.reliability().tells  # of logits that differ: a mean is one cell


def test_an_accountant_of_users_is_not_charged_for_rows():
    accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(20, 2, unit="user"), delta=1e-5)
    logits = np.zeros(1000)
    for unit in (None, np.arange(1000)):
        with pytest.raises(ValueError, match="give unit="):
            private_reliability(logits, logits, noise_multiplier=5.0, accountant=accountant, unit=unit)
    people = Accountant(GaussianDpEvent(1.0), PoissonSampling(5000, 2, unit="individual"), delta=1e-5)
    with pytest.raises(ValueError, match="give unit="):
        private_reliability(logits, logits, noise_multiplier=5.0, accountant=people)
    assert accountant.epsilon() == people.epsilon() == 0
    private_reliability(logits, logits, noise_multiplier=5.0, accountant=accountant, unit=np.arange(1000) % 20)
    assert accountant.epsilon() > 0


def test_the_likelihood_is_at_its_least_where_steps_of_newton_overshoot():
    cells, rows = private_reliability([], [], noise_multiplier=1.0).logits, np.zeros(86)
    rows[8:10] = 1e6  # just below -8
    clicks = rows * special.expit(0.36 * cells + 2.85)
    found = Reliability(cells, clicks, rows - clicks, 30.0, GaussianDpEvent(30.0))
    predicted = special.expit(found.corrected(cells[8:10]))
    np.testing.assert_allclose(predicted, (clicks / np.maximum(rows, 1))[8:10], atol=0.01)


@pytest.mark.parametrize("mean, rows", [(0, 1000), (-5, 20_000), (-7, 100_000), (-9, 200_000), (-50, 100_000)])
def test_a_model_that_is_right_is_not_made_much_worse(mean, rows):
    rng, truth = np.random.default_rng(4), None
    worst = 0.0
    for seed in range(30):
        logits = rng.normal(mean, 1.0, rows)
        clicks = rng.random(rows) < special.expit(logits)
        found = private_reliability(logits, clicks, noise_multiplier=30.0, words=seeded(seed))
        assert 0 <= found.scale < 2.5
        truth = special.expit(logits)
        z = found.corrected(logits)
        before, after = (float(np.mean(np.logaddexp(0, each) - truth * each)) for each in (logits, z))
        worst = max(worst, after / before)
    assert worst < 1.2


def test_what_is_released_stays_as_it_is():
    one, other = (private_reliability([0.0], [1], noise_multiplier=1.0) for _ in range(2))
    for array in (one.logits, one.clicks, one.others):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 3.0
    assert one.logits is other.logits


def test_without_its_share_of_the_budget_it_is_refused():
    private = tfdp_rec.make_private(click_model(True), (IDS, CLICKS[:, None]), **SETTINGS)
    with pytest.raises(ValueError, match="reliability=30"):
        private.reliability()
    mse = click_model(True)
    mse.compile(loss="mse")
    with pytest.raises(ValueError, match="BinaryCrossentropy"):
        tfdp_rec.make_private(mse, (IDS, CLICKS[:, None]), reliability=30.0, **SETTINGS)
    with pytest.raises(ValueError, match="from_logits=True"):
        wrong = click_model(True)
        wrong.compile(loss="binary_crossentropy")
        tfdp_rec.make_private(wrong, (IDS, CLICKS[:, None]), reliability=30.0, **SETTINGS)
    with pytest.raises(ValueError, match="without weights"):
        tfdp_rec.make_private(click_model(True), (IDS, CLICKS[:, None], CLICKS), reliability=30.0, **SETTINGS)
    with pytest.raises(ValueError, match="noise_multiplier"):
        tfdp_rec.make_private(click_model(True), (IDS, CLICKS[:, None]), reliability=2.0**21, **SETTINGS)
    with pytest.raises(ValueError, match="one click"):
        tfdp_rec.make_private(click_model(True), (IDS, CLICKS[:, None] / 2), reliability=30.0, **SETTINGS)
    with pytest.raises(ValueError, match="one click"):
        tfdp_rec.make_private(click_model(True), (IDS, np.stack([CLICKS] * 2, 1)), reliability=30.0, **SETTINGS)
