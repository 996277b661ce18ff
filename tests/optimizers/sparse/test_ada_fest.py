"""AdaFEST as an optimizer: what moves, by how much, what it costs, and what never has a table's shape."""

import inspect
import math

import dp_accounting
import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from scipy import stats

import tfdp_rec
from tfdp_rec.clipping import ClippedSum, Reads
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.optimizers import AdaFEST, Preselection
from tfdp_rec.sparse.draws import BucketSpace
from tfdp_rec.sparse.fest import sum_at

SILENT = dict(noise_multiplier=1e-12, contribution_noise_multiplier=1e-9)  # chooses by the counts alone


def ada_fest(**changes):
    arguments = dict(
        learning_rate=0.5,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        contribution_clip=1.0,
        contribution_noise_multiplier=1.0,
        threshold=2.0,
        expected_batch_size=10.0,
        noise=KeyedNoise(3),
    )
    return AdaFEST(**{**arguments, **changes})


def variable(rows, width, name):
    return keras.Variable(np.zeros([rows, width], "float32"), name=name)


def clipped_sum(reads, widths, dense=(), clip=1.0):
    """A hand-made clipped sum: table -> [(example, id, gradient value)], and dense gradients of ones."""
    gradients = dict(dense)
    found = {}
    for path, rows in reads.items():
        examples, ids, values = (np.array(column) for column in zip(*rows)) if rows else (np.zeros(0),) * 3
        slices = np.repeat(values.astype("float32")[:, None], widths[path], axis=1)
        gradients[path] = tf.IndexedSlices(tf.constant(slices), tf.constant(ids.astype(np.int64)))
        nobody = tf.zeros([0], tf.int64)
        found[path] = Reads(tf.constant(examples.astype(np.int64)), tf.constant(ids.astype(np.int64)), nobody)
    empty = tf.zeros([0])
    return ClippedSum(gradients, empty, tf.constant(clip), empty, found)


def stepped(optimizer, variables, clipped, tables=None):
    optimizer.build(variables, {v.path: None for v in variables} if tables is None else tables)
    optimizer.apply(clipped)
    return [np.array(v) for v in variables]


# What moves


def test_rows_with_enough_readers_take_the_gradient_and_others_stay():
    a = variable(6, 2, "a")
    reads = {a.path: [(0, 1, 3.0), (1, 1, 5.0), (2, 4, 7.0)]}
    (after,) = stepped(ada_fest(**SILENT, threshold=1.5), [a], clipped_sum(reads, {a.path: 2}))
    expected = np.zeros([6, 2])
    expected[1] = -0.5 * 8.0 / 10.0
    np.testing.assert_allclose(after, expected, atol=1e-8)
    assert (after[[0, 2, 3, 4, 5]] == 0).all()


@pytest.mark.parametrize("threshold, survives", [(0.49, True), (0.51, False)])
def test_the_vote_of_an_example_is_clipped_over_all_tables_together(threshold, survives):
    tables = [variable(5, 1, name) for name in "abcd"]
    reads = {t.path: [(0, 2, 1.0), (0, 2, 1.0)] for t in tables}  # one row in each of four tables, read twice
    after = stepped(ada_fest(**SILENT, threshold=threshold), tables, clipped_sum(reads, dict.fromkeys(reads, 1)))
    assert [bool(values[2, 0]) for values in after] == [survives] * 4


@pytest.mark.parametrize("per_value, survive", [(False, [True, True]), (True, [True, False])])
def test_a_wide_table_needs_more_votes_for_a_row_if_values_count(per_value, survive):
    narrow, wide = variable(5, 1, "narrow"), variable(5, 3, "wide")
    reads = {t.path: [(example, 2, 1.0) for example in range(4)] for t in (narrow, wide)}  # 4 / √2 = 2.83 votes each
    optimizer = ada_fest(**SILENT, threshold=2.0, per_value=per_value)  # thresholds 1 and 3, or 2
    after = stepped(optimizer, [narrow, wide], clipped_sum(reads, {narrow.path: 1, wide.path: 3}))
    assert [bool(values[2, 0]) for values in after] == survive
    assert optimizer.get_config()["per_value"] is per_value


def test_an_empty_batch_is_a_step_like_any_other():
    a, dense = variable(2000, 3, "a"), variable(4, 2, "w")
    optimizer = ada_fest(threshold=1.0)
    optimizer.build([a, dense], {a.path: None})
    optimizer.apply(clipped_sum({a.path: []}, {a.path: 3}))
    moved = (np.array(a) != 0).any(axis=1)
    assert stats.binomtest(int(moved.sum()), 2000, stats.norm.sf(1.0)).pvalue > 1e-4
    assert (np.array(dense) != 0).all()
    assert optimizer.updated_values == 3 * moved.sum()


def moved_by_one_step(seed, **changes):
    """A step on 3000 rows of width 8, the first 500 read by many; gradient 0, so what is left is noise."""
    a = variable(3000, 8, "a")
    reads = {a.path: [(100 * row + i, row, 0.0) for row in range(500) for i in range(9)]}
    clip = tf.constant(2.0)
    clipped = clipped_sum(reads, {a.path: 8}, clip=clip)
    optimizer = ada_fest(noise=KeyedNoise(seed), noise_multiplier=0.7, threshold=1.3, **changes)
    (after,) = stepped(optimizer, [a], clipped)
    return after


def test_all_survivors_get_the_noise_they_should_and_only_they():
    noise = []
    for seed in range(12):
        after = moved_by_one_step(seed)
        chosen = (after != 0).any(axis=1)
        assert (after[~chosen] == 0).all()
        assert chosen[:500].all() and 0.05 < chosen[500:].mean() < 0.15  # p = 0.097
        noise.append(after[chosen])
    for error, accepted in ((1.0, True), (0.97, False), (1.03, False)):
        values = np.concatenate(noise).reshape(-1) / (error * 0.5 * 0.7 * 2.0 / 10.0)
        assert (stats.kstest(values[::2], "norm").pvalue > 1e-4) or not accepted
        assert (abs(np.mean(values**2) - 1) < 5 * math.sqrt(2 / len(values))) == accepted


def test_rows_shared_by_the_batch_are_known_and_always_move():
    a = variable(50, 2, "a")
    clipped = clipped_sum({a.path: [(0, 3, 1.0)]}, {a.path: 2})
    clipped.reads[a.path] = clipped.reads[a.path]._replace(shared=tf.constant([7, 3, 9], tf.int64))
    (after,) = stepped(ada_fest(threshold=30.0), [a], clipped)
    assert np.flatnonzero(after[:, 0]).tolist() == [3, 7, 9]


def test_a_table_whose_readers_are_unknown_is_refused():
    a = variable(5, 1, "a")
    clipped = clipped_sum({a.path: [(0, 1, 1.0)]}, {a.path: 1})
    clipped.reads.clear()
    with pytest.raises(ValueError, match="does not say which examples read 'a'"):
        stepped(ada_fest(), [a], clipped)


@pytest.mark.parametrize("ids, wanted", [([4, 4, 1, 0], [0, 2, 4]), ([], [3]), ([1, 2], []), ([5] * 4, [5])])
def test_sum_at_adds_what_is_wanted(ids, wanted):
    values = np.arange(2.0 * len(ids), dtype="float32").reshape(len(ids), 2)
    dense = np.zeros([6, 2])
    np.add.at(dense, np.array(ids, int), values)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant(ids, tf.int64))
    found = sum_at(slices, tf.constant(wanted, tf.int64))
    np.testing.assert_allclose(found.numpy(), dense[np.array(wanted, int)])


# Two mechanisms in one: AdaFEST within a choice made before


def test_within_all_rows_nothing_changes():
    def run(preselection):
        tables = [variable(40, 2, "a"), variable(30, 3, "b")]
        reads = {t.path: [(i, i % 7, 1.0) for i in range(30)] for t in tables}
        optimizer = ada_fest(preselection=preselection, threshold=1.0)
        return stepped(optimizer, tables, clipped_sum(reads, {"a": 2, "b": 3}))

    everything = Preselection({"a": np.arange(40), "b": np.arange(30)})
    for one, other in zip(run(None), run(everything)):
        np.testing.assert_array_equal(one, other)


def test_rows_outside_the_choice_neither_move_nor_vote():
    a = variable(2000, 2, "a")
    inside = np.arange(0, 2000, 5)
    reads = {a.path: [(i, i, 1.0) for i in range(2000)] + [(0, 1, 1.0), (0, 2, 1.0), (0, 3, 1.0)]}
    optimizer = ada_fest(preselection=Preselection({"a": inside}, noise_multiplier=10.0), threshold=1.0)
    (after,) = stepped(optimizer, [a], clipped_sum(reads, {"a": 2}))
    moved = np.flatnonzero(after[:, 0])
    assert np.isin(moved, inside).all()
    # Each of the 400 has one reader with the whole vote, so its coin is fair: the three ids outside took nothing.
    assert stats.binomtest(len(moved), 400, 0.5).pvalue > 1e-4
    assert optimizer.space.size == 400


def test_the_space_of_buckets_is_a_bijection():
    rng = np.random.default_rng(1)
    chosen = {"a": rng.choice(50, 20, replace=False), "b": np.zeros(0, np.int64), "c": np.array([8])}
    space = BucketSpace({"a": 50, "b": 10, "c": 9}, chosen)
    rows = space.rows(tf.range(space.size, dtype=tf.int64))
    for path, ids in chosen.items():
        assert sorted(rows[path].numpy()) == sorted(ids)
    numbers = [space.numbers(path, rows[path]).numpy() for path in chosen]
    assert sorted(np.concatenate(numbers)) == list(range(21))
    outside = np.setdiff1d(np.arange(50), chosen["a"])
    assert (space.numbers("a", tf.constant(outside)).numpy() == -1).all()


@pytest.mark.parametrize(
    "rows, complaint", [({"a": [1], "b": [2]}, "tables"), ({"a": [1, 1]}, "twice"), ({"a": [5]}, "between 0 and 4")]
)
def test_a_choice_that_does_not_fit_the_tables_is_refused(rows, complaint):
    with pytest.raises(ValueError, match=complaint):
        BucketSpace({"a": 5}, rows)


# What it costs


@pytest.mark.slow
def test_a_step_costs_what_one_gaussian_would():
    sampling = tfdp_rec.data.PoissonSampling(num_units=50_000, expected_batch_size=500)
    split = AdaFEST.with_total_noise(
        0.1,
        noise_multiplier=0.9,
        selection_fraction=0.1,
        l2_norm_clip=1.0,
        contribution_clip=1.0,
        threshold=9.0,
        expected_batch_size=500,
    )
    whole = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.9, expected_batch_size=500)
    assert split.noise_multiplier == pytest.approx(0.9 / math.sqrt(0.9))
    assert split.contribution_noise_multiplier == pytest.approx(0.9 / math.sqrt(0.1))
    for kind in ("rdp", "pld"):
        one, other = (
            tfdp_rec.privacy.Accountant(o.dp_event(), sampling, delta=1e-6, accountant=kind).epsilon(steps=300)
            for o in (split, whole)
        )
        assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("silent", ["noise_multiplier", "contribution_noise_multiplier"])
def test_without_noise_nothing_is_claimed(silent):
    assert ada_fest(**{silent: 0.0}).dp_event() == dp_accounting.NonPrivateDpEvent()


@pytest.mark.slow
def test_the_budget_callback_charges_the_choice_once():
    inputs = keras.Input([2], dtype="int32")
    items = keras.layers.Embedding(20, 4, name="items")
    rows = keras.layers.Flatten()(items(inputs))
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(rows))
    chosen, before = Preselection({items.embeddings.path: [1, 2, 3]}, noise_multiplier=4.0), np.array(items.embeddings)
    model.compile(ada_fest(preselection=chosen, noise=None), loss="mse")
    sampling = tfdp_rec.data.PoissonSampling(num_units=100, expected_batch_size=10)
    ids = np.random.default_rng(0).integers(0, 20, [100, 2]).astype("int32")
    batches = sampling.batches(lambda i: (ids[i], np.zeros([len(i), 1], "float32")))
    accountant = tfdp_rec.privacy.Accountant(
        model.optimizer.dp_event(), sampling, delta=1e-4, accountant="rdp", allow_large_delta=True
    )
    budget = tfdp_rec.callbacks.PrivacyBudget(accountant, target_epsilon=50.0)
    for _ in range(2):
        model.fit(batches, steps_per_epoch=2, verbose=0, callbacks=[budget])
    assert accountant.spent_besides == [(dp_accounting.GaussianDpEvent(4.0), chosen.label)]
    assert accountant.steps == 4
    changed = (np.array(items.embeddings) != before).any(axis=1)
    assert set(np.flatnonzero(changed)) <= {1, 2, 3}


# A Keras optimizer


def arguments_of(cls):
    names = set()
    for base in cls.__mro__:
        if base in (keras.optimizers.Optimizer, object):
            break
        names |= set(inspect.signature(base.__init__).parameters)
    return names - {"self", "settings", "kwargs", "args"} | {"plan"}


def test_config_holds_every_argument_and_rebuilds_the_optimizer():
    chosen = Preselection({"a": [3, 1]}, noise_multiplier=7.0)
    optimizer = ada_fest(preselection=chosen, noise=None, dense_optimizer="adam", threshold=4.5)
    config = optimizer.get_config()
    assert set(config) == arguments_of(AdaFEST)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert isinstance(again, AdaFEST) and again.threshold == 4.5
    assert again.preselection.rows["a"].tolist() == [3, 1] and again.preselection.noise_multiplier == 7.0
    assert again.events_before_training() == optimizer.events_before_training()
    assert again.get_config()["dense_optimizer"] == config["dense_optimizer"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"threshold": 0.0},
        {"threshold": -1.0},
        {"contribution_clip": 0.0},
        {"contribution_noise_multiplier": -1.0},
        {"clipnorm": 1.0},
    ],
)
def test_what_it_cannot_do_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ada_fest(**wrong)


def test_raw_gradients_are_refused():
    with pytest.raises(tfdp_rec.NotPrivate, match="raw gradients"):
        ada_fest().apply_gradients([(tf.zeros([2]), variable(1, 2, "a"))])


def test_a_threshold_in_the_noise_warns():
    with pytest.warns(UserWarning, match="hardly sparse"):
        ada_fest(threshold=0.5).build([variable(50, 1, "a")], {"a": None})


# Inside a model


def click_model(rows, optimizer, width=8):
    inputs = keras.Input([3], dtype="int64")
    table = keras.layers.Embedding(rows, width, embeddings_initializer="zeros", name="ids")
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Flatten()(table(inputs)))
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(hidden))
    model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
def test_training_learns_and_rows_nobody_chose_stay():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, [4000, 3])
    labels = (ids[:, :1] < 10).astype("float32")
    model = click_model(5000, ada_fest(learning_rate=1.0, expected_batch_size=400, threshold=8.0))
    sampling = tfdp_rec.data.PoissonSampling(num_units=4000, expected_batch_size=400)
    batches = sampling.batches(lambda i: (ids[i], labels[i]), seed=0)
    history = model.fit(batches, steps_per_epoch=40, epochs=2, verbose=0)
    assert history.history["loss"][-1] < 0.5
    table = np.array(model.layers[1].embeddings)
    assert (table[20:] == 0).all() and (table[:20] != 0).all()
    # At the first step the table is zeros, and relu has no gradient at 0: no example votes for a row.
    assert model.optimizer.updated_values == 79 * 20 * 8


@pytest.mark.slow
def test_ways_of_running_agree():
    ids = np.random.default_rng(1).integers(0, 50, [160, 3])
    labels = (ids[:, :1] < 25).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(40)

    def trained(**options):
        seeding.seed(0)
        model = click_model(50, ada_fest(noise=KeyedNoise(5), threshold=3.0))
        model.compile(model.optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True), **options)
        model.fit(batches, verbose=0)
        return model.get_weights()

    one = trained()
    for options in ({"steps_per_execution": 4}, {"run_eagerly": True}, {"microbatch_size": 16}):
        for weight, other in zip(one, trained(**options), strict=True):
            np.testing.assert_allclose(weight, other, atol=1e-5, err_msg=str(options))


class TwoTables(tfdp_rec.PrivateTraining, keras.Model):
    """Neither table has a variable before the first step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Embedding(30, 2), keras.layers.Embedding(20, 2)
        self.logit = keras.layers.Dense(1)

    def call(self, ids):
        return self.logit(tf.concat([self.first(ids[:, 0]), self.second(ids[:, 1])], axis=1))


@pytest.mark.slow
def test_tables_that_are_not_built_yet_are_found():
    model = TwoTables()
    model.compile(ada_fest(noise=None, threshold=2.0), loss="mse")
    model.train_on_batch(np.zeros([4, 2], int), np.zeros([4, 1], "float32"))
    assert [table.rows for table in model.optimizer.tables.values()] == [30, 20]


@pytest.mark.slow
def test_saved_models_carry_the_mechanism(tmp_path):
    chosen = Preselection({"ids/embeddings": np.arange(0, 50, 2)}, noise_multiplier=5.0)
    model = click_model(50, ada_fest(preselection=chosen, threshold=1.0))
    ids = np.random.default_rng(1).integers(0, 50, [40, 3])
    model.train_on_batch(ids, (ids[:, :1] < 25).astype("float32"))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, AdaFEST) and again.optimizer.preselection.label == chosen.label
    np.testing.assert_array_equal(again.predict(ids, verbose=0), model.predict(ids, verbose=0))
    assert again.optimizer.updated_values == model.optimizer.updated_values > 0
    again.train_on_batch(ids, (ids[:, :1] < 25).astype("float32"))


def test_no_operation_of_a_step_has_the_tables_shape():
    rows = 77_777
    model = click_model(rows, ada_fest(threshold=9.0, noise=None))
    ids = tf.zeros([40, 3], tf.int64)
    model.prepare((ids, tf.zeros([40, 1])))
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    graph = step.get_concrete_function(tf.TensorSpec([None, 3], tf.int64), tf.TensorSpec([None, 1])).graph
    graphs = [graph] + [f.graph for f in graph._functions.values() if hasattr(f, "graph")]
    shapes = [out.shape for g in graphs for op in g.get_operations() for out in op.outputs]
    assert len(shapes) > 200
    large = [s for s in shapes if s.rank and s[0] is not None and s[0] >= rows]
    assert not large
