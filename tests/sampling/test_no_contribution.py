"""Neighbours differ in one unit that contributes nothing: no gradient, no loss, no vote, and no row less."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import dense_gradients

import tfdp_rec
from experiments.removal import __main__ as terms
from tfdp_rec.data import Interactions, NextItemExamples, padded
from tfdp_rec.datasets.shared_timelines import SharedTimelines
from tfdp_rec.models import SASRec, TwoTower
from tfdp_rec.privacy import BoundedStream, FixedOrder, PoissonSampling
from tfdp_rec.sparse import draws
from tfdp_rec.training.batch import Batch

SETTINGS = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4}


def compiled(model, optimizer=None, **options):
    model.compile(optimizer or tfdp_rec.DPSGD(0.1, **SETTINGS), **options)
    return model


def sum_of(model, drawn):
    """The step's clipped sum of a batch, as `fit` computes it."""
    model.prepare(drawn)
    return model.private_step.clipped_sum(Batch.from_data(drawn, model.shared_inputs), tf.constant(1.0))


def distance(model, one, other):
    one, other = (dense_gradients(model, each) for each in (one, other))
    return np.sqrt(sum(np.sum(np.square(one[path] - other[path])) for path in one))


def ada_fest():
    return tfdp_rec.AdaFEST(
        0.1, contribution_clip=1.0, contribution_noise_multiplier=1e-6, threshold=0.1, **SETTINGS
    )  # fmt: skip


def votes(model, clipped):
    """The votes of a batch: {row of the tables, as AdaFEST numbers them: its count}."""
    optimizer = model.optimizer
    found = draws.contribution_counts(*optimizer.find_touches(clipped), optimizer.space.size, 1.0)
    return dict(zip(found.touched.numpy().tolist(), found.counts.numpy().tolist()))


# Streams: who finds no seat leaves a row.


class WideModel(tfdp_rec.PrivateTraining, terms.Wide):
    """Gradients are rounding error alone, which depends on the number of rows."""

    def per_example_loss(self, data, training=True):
        return terms.Wide.per_example_loss(self, data)


@pytest.mark.parametrize("size", [49, 113])
def test_a_user_without_a_seat_moves_the_sum_by_a_clip_at_most(size):
    """1,008 terms: a batch with one row less was 81.8 C away at 113 seats on one processor, 31 C at 49 on another. Here
    one user's event is that of another user, who has a seat already.
    """
    model, out = compiled(WideModel(1008, 128, False, "float32")), size // 2
    rows = model.batch(size)
    sums = []
    for user in (out, 0):
        users = np.where(np.arange(size) == out, user, np.arange(size))
        stream = BoundedStream(size, size, separation=1)
        (drawn,) = stream.batches(lambda: iter([{"user": users, **rows}]), "user")  # noqa: B023
        assert {len(leaf) for leaf in drawn.batch.values()} == {size}
        sums.append(sum_of(model, drawn))
    assert 0.9 < distance(model, *sums) <= 1


def test_an_empty_seat_holds_nothing_of_the_event_and_is_in_its_place():
    kinds = {
        "user": np.array(["a", "b", "a", "c"]), "text": np.array(["v", "w", "x", "y"]), "number": np.arange(4) + 5.0,
        "bytes": np.array([b"v", b"w", b"x", b"y"], object), "id": np.arange(8, dtype="int32").reshape(4, 2) + 1,
    }  # fmt: skip
    (drawn,) = BoundedStream(4, 4, separation=1).batches(lambda: iter([kinds]), "user")
    assert drawn.draw.present.numpy().tolist() == [True, True, False, True] and int(drawn.draw.size) == 4
    assert [word.decode() for word in drawn.batch["text"].numpy()] == ["v", "w", "", "y"]
    assert [word.decode() for word in drawn.batch["bytes"].numpy()] == ["v", "w", "", "y"]
    assert drawn.batch["number"].numpy().tolist() == [5, 6, 0, 8]
    assert drawn.batch["id"].numpy().tolist() == [[1, 2], [3, 4], [0, 0], [7, 8]]


@pytest.mark.slow
def test_a_batch_in_which_nobody_finds_a_seat_trains():
    row = keras.Input([], dtype="int64")
    model = tfdp_rec.PrivateModel(row, keras.layers.Dense(1)(keras.layers.Embedding(9, 3)(row)))
    compiled(model, tfdp_rec.LazyDPSGD(0.1, **{**SETTINGS, "noise_multiplier": 0.0}), loss="mse", metrics=["mae"])
    events = {"user": np.ones(8, int), "row": np.arange(8)}  # one of the first four has a seat, and none after it
    batches = BoundedStream(4, 4, separation=9).batches(
        lambda: iter([events]), "user", map=lambda rows: (rows["row"], tf.ones_like(rows["row"], tf.float32)[:, None])
    )
    seen = [model.get_weights()]
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(model.get_weights()))
    model.fit(batches, epochs=2, steps_per_epoch=1, verbose=0, callbacks=[keep])
    assert int(model.optimizer.iterations) == 2
    assert any(np.any(old != new) for old, new in zip(*seen[:2]))
    assert all(np.array_equal(old, new) for old, new in zip(*seen[1:]))


# Any sampling: rows of units without data.


class OwnLoss(tfdp_rec.PrivateTraining, keras.Model):
    """A loss that knows nothing of absent units, a table and a dense layer, and a kernel of its own gradient."""

    def __init__(self, blows_up=False):
        super().__init__()
        self.table, self.out, self.blows_up = keras.layers.Embedding(6, 3), keras.layers.Dense(1), blows_up

    def per_example_loss(self, data, training=True):
        out = self.out(self.table(data["id"]))[:, 0]

        @tf.custom_gradient
        def something_for_nothing(value):
            return value, lambda upstream: tf.ones_like(upstream)

        out = something_for_nothing(out) if self.blows_up else out
        return tf.square(out * data["x"] - 1.0)


UNITS = {"id": np.array([1, 2, 3, 4]), "x": np.array([1.0, 2.0, 3.0, 4.0], "float32")}
HELD = {"nothing": (0, 0.0), "a huge number": (5, 1e30), "NaN": (5, np.nan), "infinity": (5, np.inf), "data": (3, 3.0)}


def batch_of(present, held=None, sampling=None, **options):
    """One batch of all four units; the third holds something else than in `UNITS`."""
    units = {key: column.copy() for key, column in UNITS.items()}
    if held is not None:
        units["id"][2], units["x"][2] = held
    sampling = sampling or FixedOrder(4, 4)
    fetch = lambda indices: {key: column[indices] for key, column in units.items()}  # noqa: E731
    return next(iter(sampling.batches(fetch, present=present, **options)))


def absent(indices):
    return np.asarray(indices) != 2


@pytest.mark.parametrize(
    "blows_up, part", [(False, None), (True, 3), pytest.param(False, 1, marks=pytest.mark.slow)]
)
def test_a_row_without_data_contributes_nothing_whatever_it_holds(blows_up, part):
    """Neither to the sum, its norms and losses, nor to the votes: as if three units stood in four rows."""
    model = compiled(OwnLoss(blows_up), ada_fest(), microbatch_size=part)
    expected = sum(
        dense_gradients(model, sum_of(model, batch_of(lambda i, one=one: np.asarray(i) == one)))[model.out.kernel.path]
        for one in (0, 1, 3)
    )
    whole = sum_of(model, batch_of(None))
    for name, held in HELD.items():
        found = sum_of(model, batch_of(absent, held))
        assert found.norms.shape == found.losses.shape == [3], name
        gradient = dense_gradients(model, found)[model.out.kernel.path]
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7, err_msg=name)
        assert votes(model, found) == {1: 1.0, 2: 1.0, 4: 1.0}, name
        assert 0.9 < distance(model, found, whole) <= 1, name


def test_losses_metrics_and_figures_do_not_see_it():
    one = keras.Input([1])
    model = tfdp_rec.PrivateModel(one, keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)(one))
    compiled(model, loss="mse", metrics=["mae"], diagnostics=True)
    rows = np.array([[1.0], [2.0], [1e9], [3.0]], "float32")
    batches = FixedOrder(4, 4).batches(lambda indices: (rows[indices], 0 * rows[indices]), present=absent)
    logs = model.fit(batches, steps_per_epoch=1, verbose=0).history
    assert (logs["loss"][0], logs["mae"][0]) == pytest.approx((14 / 3, 2.0))
    assert (logs["clipped_share"][0], logs["dropped_examples"][0]) == pytest.approx((1.0, 0))


def test_it_stays_so_through_the_look_ahead_and_for_the_workers_of_a_cluster():
    model = compiled(OwnLoss(), tfdp_rec.LazyDPSGD(0.1, **SETTINGS))
    fetch = lambda indices: {key: tf.gather(column, indices) for key, column in UNITS.items()}  # noqa: E731
    everybody = PoissonSampling(4, 4)
    for dataset in (
        everybody.graph_batches(fetch, present=lambda indices: indices != 2),
        PoissonSampling(4, 4).batches(lambda i: {k: v[i] for k, v in UNITS.items()}, present=absent),
    ):
        element = next(iter(tfdp_rec.data.lookahead(dataset, model)))
        expected = np.where(element.batch.batch["id"].numpy() == 3, False, True)
        assert Batch.from_draw(element, (), 4).present.numpy().tolist() == expected.tolist() and not expected.all()


@pytest.mark.parametrize("wrong", [lambda indices: [True], lambda indices: np.ones([len(indices), 2], bool)])
def test_an_answer_of_another_length_is_refused(wrong):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError, tfdp_rec.NotPrivate)):
        sum_of(compiled(OwnLoss()), batch_of(wrong))


# The package's own readers.


def log_of(kept=True):
    """Four users, of whom user 2 may have no row of an item that the model knows."""
    users, items, times = np.array([[0, 1, 1], [1, 2, 1], [2, 3, 1], [2, 4, 2], [3, 4, 1], [3, 1, 2], [0, 2, 2]]).T
    rows = {"user": users, "item": np.where((users != 2) | kept, items, 99), "time": times}
    return Interactions.read(rows, user="user", item="item", time="time", items=[1, 2, 3, 4])


class NextOf(tfdp_rec.PrivateTraining, keras.Model):
    """A model of one's own, to which 0 is a label like any other."""

    def __init__(self):
        super().__init__()
        self.table, self.out = keras.layers.Embedding(5, 3, name="items"), keras.layers.Dense(5)

    def per_example_loss(self, data, training=True):
        logits = self.out(tf.reduce_mean(self.table(data["context"]), axis=1))
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(data["label"], tf.int32), logits)


MODELS = {
    "TwoTower": (lambda: TwoTower([1, 2, 3, 4], width=3, hidden=4, history_length=3, ks=(1,)), False, False),
    "SASRec": (lambda: SASRec([1, 2, 3, 4], width=4, history_length=3, num_heads=1), True, False),
    "one's own": (NextOf, False, True),
}


@pytest.mark.fast_cases("one's own")
@pytest.mark.parametrize("name", MODELS)
def test_a_user_without_items_contributes_nothing(name):
    """The two models of the package by their loss, too: whoever forgets present= has the same sum."""
    made, every_place, must_be_told = MODELS[name]
    sums = []
    model = compiled(made(), ada_fest())
    for weight in model.weights:  # at their first values, most gradients are zero
        weight.assign(tf.random.stateless_normal(weight.shape, [1, 2]))
    examples = NextItemExamples(log_of(kept=False), history=3, negatives=2, every_place=every_place, seed=0)
    shared = (lambda: {"negatives": np.array([1, 2], np.int32)}) if model.shared_inputs else None
    for present in (examples.present, None):
        drawn = next(iter(FixedOrder(4, 4).batches(examples.fetch, shared=shared, present=present)))
        sums.append(sum_of(model, drawn))
    told, untold = sums
    assert examples.present([0, 2, 3]).tolist() == [True, False, True]
    assert must_be_told or (distance(model, told, untold) == 0 and votes(model, told) == votes(model, untold))
    others = {key: leaf.numpy() for key, leaf in drawn.batch.items()}
    others = {key: leaf if key in model.shared_inputs else leaf[[0, 1, 3]] for key, leaf in others.items()}
    alone = sum_of(model, others)
    assert distance(model, told, alone) < 1e-5 and votes(model, told) == votes(model, alone)
    assert (distance(model, untold, alone) > 0.5) == must_be_told


def test_the_timelines_of_a_cluster_say_who_has_none(tmp_path):
    examples = NextItemExamples(log_of(kept=False), negatives=0)
    drawn = next(iter(SharedTimelines(examples, tmp_path / "held").batches(PoissonSampling(4, 4))))
    assert drawn.draw.present.numpy().tolist() == [True, True, False, True]


# Votes: what is read and makes nothing.


class Bags(tfdp_rec.PrivateTraining, keras.Model):
    """Weighted bags of ids, and each example's own weight."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(9, 2, embeddings_initializer="ones")

    def per_example_loss(self, data, training=True):
        return data["weight"] * tf.reduce_sum(self.table(data["ids"]) * data["by"][..., None], axis=[1, 2])


def test_neither_padding_nor_an_example_of_no_loss_votes():
    """An absent unit as an empty bag, or as a row of weight zero, voted for row 0: 1.41 C1 away from no vote."""
    model = compiled(Bags(), ada_fest())
    ids, by = padded([[7, 5], [], [1, 2, 3], [4]], 3)
    batch = {"ids": ids, "by": by, "weight": np.array([1, 1, 1, 0], "float32")}
    found = votes(model, sum_of(model, batch))
    assert found == pytest.approx({7: 0.5**0.5, 5: 0.5**0.5, 1: 3**-0.5, 2: 3**-0.5, 3: 3**-0.5})


@pytest.mark.parametrize("selecting", ["AdaFEST", "ExponentialSelectionSGD"])
def test_masked_positions_do_not_vote(selecting):
    ids = keras.Input([4], dtype="int64")
    table = keras.layers.Embedding(9, 2, mask_zero=True)
    mean = keras.layers.GlobalAveragePooling1D()(table(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(mean))
    optimizer = ada_fest() if selecting == "AdaFEST" else tfdp_rec.optimizers.ExponentialSelectionSGD(
        0.1, num_survivors=2, selection_epsilon=1.0, **SETTINGS
    )  # fmt: skip
    compiled(model, optimizer, loss="mse")
    batch = np.array([[3, 4, 0, 0], [5, 0, 0, 0]]), np.ones([2, 1], "float32"), np.array([1, 0], "float32")
    assert set(votes(model, sum_of(model, batch))) == {3, 4}


@pytest.mark.fast_cases("nan", "1000.0")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1e3])
def test_an_example_that_is_dropped_does_not_vote(value):
    """A loss of no labels is often 0 / 0; the square of 1e30 is no float32."""
    model = compiled(Bags(), ada_fest())
    batch = {"ids": np.array([[1], [2]]), "by": np.ones([2, 1], "float32"), "weight": np.array([value, 1], "float32")}
    assert set(votes(model, sum_of(model, batch))) == ({1, 2} if value == 1e3 else {2})


# Words.


def test_one_definition_in_the_statement_and_on_the_pages():
    import pathlib

    from tfdp_rec.core.claim import schemes

    said = "contributes nothing"
    root = pathlib.Path(tfdp_rec.__file__).parents[1]
    pages = [(root / "docs" / name).read_text() for name in ("privacy.md", "assumptions.md", "privacy-adafest.md")]
    event = tfdp_rec.DPSGD(0.1, **SETTINGS).dp_event()
    accountant = tfdp_rec.privacy.Accountant(event, PoissonSampling(9, 3), delta=1e-5)
    statement = " ".join(accountant.statement(steps=1).split())
    for text in (statement, schemes.__doc__, *pages):
        assert said in text and "count as empty" not in text and "an empty row" not in text
