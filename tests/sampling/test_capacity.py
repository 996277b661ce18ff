"""Batches of one public number of rows: what is drawn, and rows that contribute nothing; overflow is paid."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent
from scipy import stats

import tfdp_rec
from tfdp_rec.core.claim.events import split_failures
from tfdp_rec.data import PoissonSampling, RandomAllocation
from tfdp_rec.privacy import Accountant, Ledger, Snapshot, epsilon_of

IDS = np.arange(60) % 7


def fetch(indices):
    return {"unit": np.asarray(indices), "x": IDS[np.asarray(indices)]}


def batches_of(sampling, kind):
    if kind == "graph":
        return sampling.graph_batches(lambda units: {"unit": units, "x": tf.gather(IDS, units)})
    return sampling.batches(fetch)


@pytest.mark.parametrize("kind", ["poisson", "graph", "allocation"])
def test_each_batch_has_as_many_rows_and_those_that_were_drawn_are_present(kind):
    sampling = RandomAllocation(60, 6, capacity=25) if kind == "allocation" else PoissonSampling(60, 10, capacity=25)
    batches = batches_of(sampling, kind)
    spec = batches.element_spec.batch["x"]
    assert spec.shape == [25]
    numbers = []
    for drawn in batches.take(300):
        there, units = drawn.draw.present.numpy(), drawn.batch["unit"].numpy()
        assert len(units) == 25 == int(drawn.draw.size) and (units[~there] == 0).all()
        assert len(np.unique(units[there])) == there.sum() and (np.diff(there.astype(int)) <= 0).all()
        numbers.append(there.sum())
    assert np.mean(numbers) == pytest.approx(10, abs=0.8) and max(numbers) <= 25
    if kind == "allocation":
        assert [sum(numbers[first : first + 6]) for first in range(0, 300, 6)] == [60] * 50


def test_rows_of_files_are_padded_with_zeros_and_empty_texts():
    rows = [(np.arange(1, 31), np.array(["ab"] * 30, object), np.ones([30, 2], np.float32))]
    batches = RandomAllocation(30, 10, unit="row", capacity=12).file_batches(rows)
    assert [each.shape.as_list() for each in batches.element_spec.batch] == [[12], [12], [12, 2]]
    for drawn in batches.take(20):
        there, (ids, texts, vectors) = drawn.draw.present.numpy(), drawn.batch
        assert (ids.numpy()[there] > 0).all() and (ids.numpy()[~there] == 0).all()
        assert set(texts.numpy()[there]) <= {b"ab"} and set(texts.numpy()[~there]) <= {b""}
        assert (vectors.numpy().sum(axis=1) == 2 * there).all()


def overflow_of(size, units, capacity, draws=200_000):
    """The share of draws in which a unit's others fill the batch, by drawing."""
    others = np.random.default_rng(0).binomial(units - 1, size / units, draws)
    return (others >= capacity).mean()


@pytest.mark.parametrize("units, size, capacity", [(60, 10, 14), (1000, 50, 60), (60, 10, 10)])
def test_overflow_is_the_chance_that_the_others_fill_a_batch(units, size, capacity):
    found = PoissonSampling(units, size, capacity=capacity).overflow
    assert found == pytest.approx(overflow_of(size, units, capacity), rel=0.05)
    assert found == pytest.approx(stats.binom.sf(capacity - 1, units - 1, size / units), rel=0.01)


def test_a_full_batch_is_cut_and_no_unit_is_twice(monkeypatch):
    sampling = PoissonSampling(60, 10, capacity=10)
    for drawn in sampling.batches(fetch).take(50):
        assert len(drawn.batch["unit"]) == 10 and len(np.unique(drawn.batch["unit"][drawn.draw.present])) == int(
            tf.reduce_sum(tf.cast(drawn.draw.present, tf.int32))
        )


def test_auto_is_the_least_that_overflows_hardly_ever():
    auto = PoissonSampling(110_794, 1024, capacity="auto")
    assert 1200 < auto.capacity < 1300 and auto.overflow <= 1.001e-12
    assert PoissonSampling(110_794, 1024, capacity=auto.capacity - 1).overflow > 1e-12
    assert PoissonSampling(5, 4, capacity="auto").capacity == 5
    assert PoissonSampling(5, 4, capacity=5).overflow == 0 == PoissonSampling(5, 4).overflow


@pytest.mark.parametrize("capacity, words", [(9, "at least the expected"), ("big", "at least the"), (10.5, "positive")])
def test_wrong_capacities_are_refused(capacity, words):
    with pytest.raises(ValueError, match=words):
        PoissonSampling(60, 10, capacity=capacity)


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("kind", [PoissonSampling, RandomAllocation])
def test_the_chance_of_overflow_is_paid_in_delta(kind, steps):
    sampling = kind(60, 10 if kind is PoissonSampling else 6, capacity=25)
    bare = kind(60, 10 if kind is PoissonSampling else 6)
    event, lost = split_failures(sampling.compose(GaussianDpEvent(2.0), steps))
    together = steps if kind is PoissonSampling else 6 * -(-steps // 6)
    assert lost == pytest.approx(together * sampling.overflow) and lost > 0
    delta = 1e-3
    assert epsilon_of(sampling.compose(GaussianDpEvent(2.0), steps), delta) == pytest.approx(
        epsilon_of(bare.compose(GaussianDpEvent(2.0), steps), delta - lost), rel=1e-6
    )
    assert epsilon_of(sampling.compose(GaussianDpEvent(2.0), steps), lost / 2) == np.inf
    assert f"25 rows a batch, more with a chance of {sampling.overflow:.2g}" in sampling.describe()


def test_the_price_holds_between_neighbours_where_batches_overflow():
    """Three units, batches of one row: all coins counted, the sums of what is in the batch on a line."""
    noise, q, capacity = 1.0, 1 / 3, 1
    x, width = np.linspace(-9, 9, 20_001, retstep=True)

    def density(own):
        found = 0.0
        for coins in range(8):
            drawn = [unit for unit in range(3) if coins >> unit & 1]
            chance = q ** len(drawn) * (1 - q) ** (3 - len(drawn))
            kept = sum([own, 1.0, -1.0][unit] for unit in drawn[:capacity])
            found = found + chance * stats.norm.pdf(x, kept, noise)
        return found

    sampling = PoissonSampling(3, 1, capacity=capacity)
    for epsilon in (0.1, 0.5, 1.0):
        for p, q_ in ((density(1.0), density(0.0)), (density(0.0), density(1.0))):
            delta = np.maximum(p - np.exp(epsilon) * q_, 0).sum() * width
            assert epsilon_of(sampling.compose(GaussianDpEvent(noise), 1), float(delta) + 1e-9) >= epsilon - 1e-6


def make_model(plan):
    inputs = {"unit": keras.Input((), dtype="int64", name="unit"), "x": keras.Input((), dtype="int64", name="x")}
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Embedding(7, 2)(inputs["x"])))
    model.compile(tfdp_rec.LazyDPSGD(0.1, plan=plan), loss=keras.losses.MeanSquaredError())
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PoissonSampling, RandomAllocation])
def test_a_fit_under_a_ledger_on_one_shape_and_the_same_entry_in_the_file(kind, tmp_path):
    sampling = kind(60, 10 if kind is PoissonSampling else 6, unit="row", capacity=28)
    plan = tfdp_rec.PrivatePlan(
        sampling=sampling, epsilon=3.0, delta=1e-3, steps=12, ledger=tmp_path / "ledger.jsonl"
    )
    model = make_model(plan)
    labelled = lambda units: (fetch(units), np.ones([len(units), 1], np.float32))  # noqa: E731
    history = model.fit(plan.batches(labelled), steps_per_epoch=12, verbose=0, callbacks=[plan.budget()])
    assert history.history["epsilon"][-1] <= 3.0 and int(model.optimizer.iterations) == 12
    plan.accountant.close()
    ledger = Ledger(tmp_path / "ledger.jsonl", "row", Snapshot(60, "row"), sampling.adjacency)
    again = Accountant(model.optimizer.dp_event(), type(sampling).from_state(sampling.get_state()), 1e-3, ledger=ledger)
    assert again.steps == 12 and again.epsilon() == pytest.approx(plan.accountant.epsilon())


def test_rows_that_were_not_drawn_change_nothing():
    """The same draws with and without room: equal weights but for the sums' rounding, by noise that is keyed."""
    from tfdp_rec.noise import KeyedNoise

    weights = []
    for capacity in (None, 40):
        keras.utils.set_random_seed(0)
        sampling = PoissonSampling(60, 10, unit="row", capacity=capacity)
        inputs = {"unit": keras.Input((), dtype="int64", name="unit"), "x": keras.Input((), dtype="int64", name="x")}
        model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Embedding(7, 2)(inputs["x"])))
        optimizer = tfdp_rec.DPSGD(  # lazy noise of a row that is read oftener is drawn in other pieces
            0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=10, noise=KeyedNoise(3)
        )
        model.compile(optimizer, loss=keras.losses.MeanSquaredError())
        labelled = lambda units: (fetch(units), np.ones([len(units), 1], np.float32))  # noqa: E731
        model.fit(sampling.batches(labelled, seed=5), steps_per_epoch=6, verbose=0)
        weights.append([np.array(each) for each in model.get_weights()])
    for one, other in zip(*weights):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_capacity_is_fixed_once_it_has_drawn_batches():
    """Entries are priced by the sampling as it was when they were begun."""
    for first, then in ((None, 12), (25, 12), (25, None)):
        sampling = PoissonSampling(60, 10, capacity=first)
        sampling.batches(fetch)
        with pytest.raises(AttributeError, match="capacity of a PoissonSampling is fixed"):
            sampling.capacity = then
