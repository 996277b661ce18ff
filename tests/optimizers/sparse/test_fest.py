"""FEST and the choice of rows before training."""

import json

import dp_accounting
import keras
import numpy as np
import pytest
import seeding
from scipy import stats

import tfdp_rec
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.optimizers import FEST, Preselection, noisy_frequencies
from tfdp_rec.privacy import Accountant, PoissonSampling
from tfdp_rec.sparse import preselection
from tfdp_rec.sums.fixed_point import ONE


def model_of(optimizer, rows=60):
    seeding.seed(0)
    inputs = keras.Input([3], dtype="int64")
    table = keras.layers.Embedding(rows, 4, name="ids")
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(table(inputs))))
    model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def batches_of(num_batches, rows=60):
    rng = np.random.default_rng(0)
    for _ in range(num_batches):
        ids = rng.integers(0, rows, [20, 3])
        yield ids, (ids[:, :1] < rows // 2).astype("float32")


# The optimizer


@pytest.mark.slow
def test_confined_to_all_rows_it_is_dp_sgd_number_for_number():
    everything = Preselection({"ids/embeddings": np.random.default_rng(0).permutation(60)})
    arguments = dict(l2_norm_clip=0.7, noise_multiplier=0.4, expected_batch_size=20.0)
    fest = model_of(FEST(0.3, preselection=everything, noise=KeyedNoise(2), **arguments))
    dp_sgd = model_of(tfdp_rec.DPSGD(0.3, noise=KeyedNoise(2), **arguments))
    for ids, labels in batches_of(5):
        fest.train_on_batch(ids, labels)
        dp_sgd.train_on_batch(ids, labels)
    for one, other in zip(fest.get_weights(), dp_sgd.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_chosen_rows_move_at_every_step_and_others_never():
    chosen = np.arange(0, 60, 4)
    optimizer = FEST(
        0.3,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        expected_batch_size=20.0,
        preselection=Preselection({"ids/embeddings": chosen}),
    )
    model = model_of(optimizer)
    table = model.layers[1].embeddings
    first = np.array(table)
    for ids, labels in [*batches_of(3), (np.zeros([0, 3], int), np.zeros([0, 1], "float32"))]:
        before = np.array(table)
        model.train_on_batch(ids, labels)
        assert np.flatnonzero((np.array(table) != before).all(axis=1)).tolist() == chosen.tolist()
    others = np.setdiff1d(np.arange(60), chosen)
    np.testing.assert_array_equal(np.array(table)[others], first[others])
    assert optimizer.updated_values == 4 * len(chosen) * 4


def test_its_event_is_dp_sgds_and_the_choice_is_apart():
    chosen = Preselection({"ids/embeddings": [4]}, noise_multiplier=30.0)
    optimizer = FEST(0.3, l2_norm_clip=1.0, noise_multiplier=1.25, expected_batch_size=20.0, preselection=chosen)
    assert optimizer.dp_event() == dp_accounting.GaussianDpEvent(1.25)
    assert optimizer.events_before_training() == [(dp_accounting.GaussianDpEvent(30.0), chosen.label)]
    public = Preselection({"ids/embeddings": [4]})
    assert public.dp_event() == dp_accounting.NoOpDpEvent()
    assert (
        FEST(
            0.3, l2_norm_clip=1.0, noise_multiplier=1.25, expected_batch_size=20.0, preselection=public
        ).events_before_training()
        == []
    )


def test_a_choice_is_in_the_history_before_the_first_step(tmp_path):
    chosen = Preselection({"ids/embeddings": [4]}, noise_multiplier=3.0)
    basics = {"l2_norm_clip": 1.0, "noise_multiplier": 1.25, "expected_batch_size": 20.0}
    model = model_of(FEST(0.3, preselection=chosen, **basics))
    model.prepare(next(batches_of(1)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        accountant = Accountant(dp_accounting.GaussianDpEvent(1.25), PoissonSampling(100, 20), 1e-3)
        accountant.follow(each)
        assert accountant.spent_besides == [(dp_accounting.GaussianDpEvent(3.0), chosen.label)]
    with pytest.raises(AttributeError):
        model.optimizer.preselection = None


def test_a_label_is_of_one_look_and_kept_with_it():
    rows = {"a": np.array([2, 1])}
    looks = [Preselection(rows, noise_multiplier=1.0) for _ in range(2)]
    looks += [
        Preselection.from_frequencies({"a": np.array([0.0, 3.0, 3.0])}, 2, noise_multiplier=1.0) for _ in range(2)
    ]
    assert len({look.label for look in looks}) == 4, "whatever the rows"
    for look in looks:
        saved = json.loads(json.dumps(look.get_config()))
        assert Preselection.from_config(saved).label == Preselection(**saved).label == look.label


def test_each_private_look_at_the_data_is_paid_once(tmp_path):
    """Two looks that choose the same rows were one payment: the label was a hash of the rows."""
    sampling, path = tfdp_rec.data.PoissonSampling(num_units=200, expected_batch_size=20), tmp_path / "ledger.jsonl"
    one, other = (
        Preselection.from_frequencies({"ids/embeddings": -np.arange(60.0)}, 10, noise_multiplier=20.0) for _ in range(2)
    )
    for chosen in (one, one, other):  # the second time from a file
        optimizer = FEST(0.3, l2_norm_clip=1.0, noise_multiplier=1.25, expected_batch_size=20.0, preselection=chosen)
        if path.exists():
            optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        model = model_of(optimizer)
        event = model.optimizer.dp_event()
        accountant = tfdp_rec.privacy.Accountant(event, sampling, 1e-3, "rdp", ledger=path)
        data = sampling.batches(lambda indices: (np.ones([len(indices), 3], int), np.ones([len(indices), 1], "f4")))
        budget = tfdp_rec.callbacks.PrivacyBudget(accountant, target_epsilon=8.0)
        model.fit(data, steps_per_epoch=1, verbose=0, callbacks=[budget])
        accountant.close()
    paid = [entry.label for entry in read(path).paid if entry.label.startswith("pre-selection")]
    assert paid == [one.label, other.label]


def test_without_rows_it_is_refused():
    with pytest.raises(ValueError, match="preselection"):
        FEST(0.3, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=20.0, preselection=None)
    with pytest.raises(TypeError, match="Preselection"):
        FEST(0.3, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=20.0, preselection={"a": [1]})
    with pytest.raises(ValueError, match="model has"):
        model_of(
            FEST(
                0.3,
                l2_norm_clip=1.0,
                noise_multiplier=1.0,
                expected_batch_size=20.0,
                preselection=Preselection({"other": [1]}),
            )
        ).train_on_batch(*next(batches_of(1)))


def test_it_serializes():
    chosen = Preselection({"ids/embeddings": [4, 2]}, noise_multiplier=30.0)
    optimizer = FEST(0.3, l2_norm_clip=1.0, noise_multiplier=1.25, expected_batch_size=20.0, preselection=chosen)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(again, FEST) and again.preselection.label == chosen.label


# The choice


def slow_histogram(bags, rows, clip):
    total = np.zeros(rows)
    for bag in bags:
        distinct = sorted({i for i in bag if i >= 0})
        if distinct:
            total[distinct] += min(1.0, clip / np.sqrt(len(distinct)))
    return total


def test_frequencies_are_clipped_example_by_example_over_all_tables():
    rng = np.random.default_rng(3)
    a, b = rng.integers(-1, 10, [200, 4]), rng.integers(0, 5, 200)
    bags = [[*row] + [100 + other] for row, other in zip(a, b)]
    expected = slow_histogram([[i if i < 100 else i - 90 for i in bag] for bag in bags], 15, 1.5)
    batches = [{"a": a[i : i + 60], "b": b[i : i + 60]} for i in range(0, 200, 60)]
    found = noisy_frequencies(batches, {"a": 10, "b": 5}, noise_multiplier=1e-9, contribution_clip=1.5)
    np.testing.assert_allclose(np.concatenate([found["a"], found["b"]]), expected, rtol=1e-5)


def can_come_of(count, released, noise_multiplier):
    """Whether a count and some float32 Gaussian give the released float32 numbers, if the noise is added to it."""
    found = np.zeros(released.shape, bool)
    likely = ((released.astype("float64") - count) / noise_multiplier).astype("float32")
    for towards in (-np.inf, np.inf):
        unit = likely
        for _ in range(3):  # others are too far away to round to the number
            found |= (count + noise_multiplier * unit.astype("float64")).astype("float32") == released
            unit = np.nextafter(unit, np.float32(towards))
    return found


def test_the_lowest_bits_of_a_frequency_do_not_tell_the_count():
    """Noise with gaps between its numbers, added to a count, leaves gaps that move with it: 43% of zeros were told."""
    rows, noise_multiplier = 20_000, 1.0
    unit = np.random.default_rng(0).standard_normal(rows, dtype="float32")
    rounded = (0.0 + noise_multiplier * unit.astype("float64")).astype("float32")
    assert can_come_of(0.0, rounded, noise_multiplier).all()
    assert np.mean(~can_come_of(1.0, rounded, noise_multiplier)) > 0.4, "the attack works on such noise"
    read = {"a": np.arange(rows // 2)}  # by one example, whose weight is in steps of the grid as well
    for batches in ([], [read], [{"a": np.zeros([3, 1], int)}]):
        found = noisy_frequencies(batches, {"a": rows}, noise_multiplier=noise_multiplier)["a"].astype("float64")
        assert ((found * ONE) % 1 == 0).all(), "numbers of one grid, whatever the count"
        assert (((found - 1.0) * ONE) % 1 == 0).all() and len(np.unique(found)) > rows * 0.99


@pytest.mark.parametrize("reads", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("clip", [0.3, 1.0, 1.5, 7.1, 1000.0])
def test_an_example_moves_the_frequencies_by_the_clip_at_most(reads, clip):
    """In whole numbers, with no rounding that could exceed it."""
    found = preselection._sum_contributions([{"a": np.arange(reads)[None], "b": [[0]]}], {"a": 1000, "b": 2}, clip)
    moved = np.concatenate([found["a"], found["b"]])
    assert moved.dtype == np.int64 and sum(int(each) ** 2 for each in moved) <= ONE**2
    weight = min(1.0, clip / np.sqrt(reads + 1))
    assert np.count_nonzero(moved) == reads + 1 and moved.max() * clip / ONE == pytest.approx(weight, rel=1e-3)


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.97, False), (1.03, False)])
def test_every_row_gets_the_noise_it_should(error, accepted):
    found = noisy_frequencies(
        [{"a": np.array([0])}], {"a": 60_000}, noise_multiplier=3.0, contribution_clip=2.0, words=seeded(4)
    )
    scaled = found["a"][1:] / (error * 6.0)
    assert (stats.kstest(scaled, "norm").pvalue > 1e-3) or not accepted
    assert (abs(np.mean(scaled**2) - 1) < 4 * np.sqrt(2 / len(scaled))) == accepted


def test_the_most_frequent_rows_are_chosen():
    frequencies = {"a": np.array([5.0, 1.0, 9.0, 7.0]), "b": np.array([2.0, 3.0])}
    chosen = Preselection.from_frequencies(frequencies, num_rows=2, noise_multiplier=None)
    with pytest.raises(AttributeError):
        chosen.noise_multiplier = 20.0
    assert {path: rows.tolist() for path, rows in chosen.rows.items()} == {"a": [2, 3], "b": [0, 1]}
    some = Preselection.from_frequencies(frequencies, num_rows={"a": 1, "b": 0}, noise_multiplier=2.0)
    assert {path: rows.tolist() for path, rows in some.rows.items()} == {"a": [2], "b": []}


def test_days_add_up_to_a_stream():
    days = [{"a": np.full(50, day)} for day in range(3)]
    noisy = [
        noisy_frequencies([day], {"a": 5}, noise_multiplier=0.01, words=seeded(i))["a"] for i, day in enumerate(days)
    ]
    running = np.cumsum(noisy, axis=0)
    chosen = [set(Preselection.from_frequencies({"a": run}, 3, noise_multiplier=0.01).rows["a"]) for run in running]
    assert all(day in rows for day, rows in enumerate(chosen)) and running[2] == pytest.approx(
        [50, 50, 50, 0, 0], abs=0.1
    )


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": 2.0**20}, "noise_multiplier"),
        ({"contribution_clip": -1.0}, "contribution_clip"),
        ({"contribution_clip": 1025.0}, "contribution_clip"),
        ({"batches": [{"a": np.array([5])}]}, "5 rows, but an example reads row 5"),
    ],
)
def test_impossible_frequencies_are_refused(wrong, complaint):
    arguments = {"batches": [{"a": np.array([0])}], "sizes": {"a": 5}, "noise_multiplier": 1.0, **wrong}
    with pytest.raises(ValueError, match=complaint):
        noisy_frequencies(**arguments)


def test_public_rows_need_no_noise_and_wrong_noise_is_refused():
    with pytest.raises(ValueError, match="None for public rows"):
        Preselection({"a": [1]}, noise_multiplier=0.0)
