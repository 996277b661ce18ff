"""The table of docs/your-model.md, line by line: each works, clipped as by the oracle, or is refused in words."""

import contextlib
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, assert_matches_oracle, double_precision
from keras import layers

import tfdp_rec
from tfdp_rec.clipping import clipped_sum

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "your-model.md"
RNG = np.random.default_rng(0)
SIZE, ROWS, LENGTH = 4, 6, 3
IDS, X = RNG.integers(0, ROWS, [SIZE, LENGTH]), RNG.normal(size=[SIZE, LENGTH, 4]).astype("float32")
WEIGHT = np.linspace(0.5, 2.0, SIZE).astype("float32")
SHARED = {"negatives": np.array([3, 3, 5, 1])}


def table(width=4, **options):
    return layers.Embedding(ROWS, width, embeddings_initializer="normal", **options)


class WithBias(Scored):
    """Has a bias for all users and items of its own."""

    def __init__(self, parts, forward):
        super().__init__(parts, lambda p, b: forward(p, b) + self.bias)
        self.bias = self.add_weight(shape=[], name="bias", initializer="ones")


class TableAndScale(layers.Layer):
    """A table, and a weight beside it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table, self.scale = table(), self.add_weight(shape=[4], name="scale", initializer="ones")

    def call(self, ids):
        return self.table(ids) * self.scale


class InOneAxis(layers.Layer):
    """Drops entries of [batch * T, n]."""

    def build(self, shape):
        self.drop, self.scale = layers.Dropout(0.5), self.add_weight(shape=[4], name="scale")

    def call(self, x):
        return tf.reshape(self.drop(tf.reshape(x, [-1, 4]) * self.scale, training=True), [-1, LENGTH, 4])


class Adding(layers.Layer):
    """Adds a penalty on what it passes on."""

    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x


def built_table():
    made = table()
    made.build(None)
    return made


def sampled(parts, batch):
    user, item = parts[0](batch["x"][:, 0]), tf.cast(batch["x"][:, 1:2], tf.int64)
    return tf.nn.sampled_softmax_loss(parts[1].embeddings.value, tf.zeros([ROWS]), item, user, 3, ROWS)


def convolved(parts, batch):
    edges = tf.sparse.from_dense(tf.ones([ROWS, ROWS]))
    return tf.gather(tf.sparse.sparse_dense_matmul(edges, parts[0].embeddings.value), batch["x"][:, 0])


def chain(parts, batch):
    h = batch["x"]
    for part in parts:
        h = part(h)
    return h


def bag(parts, batch):
    return tf.reduce_sum(parts[0](batch["x"]), axis=1)


def distributed():
    keras_rs = pytest.importorskip("keras_rs")
    feature = keras_rs.layers.FeatureConfig("ids", keras_rs.layers.TableConfig("t", ROWS, 4), (SIZE, LENGTH), (SIZE, 4))
    return keras_rs.layers.DistributedEmbedding({"ids": feature}, table_stacking=None)


def frozen():
    normal = layers.BatchNormalization()
    normal.trainable = False
    return normal


def deep(parts, batch):
    """The candidate tower on what all examples share, as it stands in most two-tower models."""
    h = parts[1](batch["negatives"])
    for part in parts[2:]:
        h = part(h)
    return tf.matmul(parts[0](batch["x"][:, 0]), h, transpose_b=True)


def deep_kit():
    tower = keras.Sequential([table(), layers.Dense(3, activation="relu"), layers.Dense(4)])
    return [table(), tfdp_rec.TowerScores(tower, np.arange(ROWS), negatives=5)]


WORKS = {
    "DistributedEmbedding, off TPU": (
        lambda: [distributed()], lambda p, b: p[0]({"ids": b["x"]})["ids"], IDS
    ),
    "a global bias of the model": (lambda: [table(1)], bag, IDS),
    "frozen BatchNormalization": (lambda: [layers.Dense(4), frozen(), layers.Dense(2)], chain, X[:, 0]),
    "a BatchNormalization that is never called": (
        lambda: [layers.Dense(4), layers.BatchNormalization()], lambda p, b: p[0](b["x"]), X[:, 0]
    ),
    "positions on range(T)": (
        lambda: [table(), layers.Embedding(LENGTH, 4)], lambda p, b: p[0](b["x"]) + p[1](tf.range(LENGTH)), IDS
    ),
    "full softmax over a table": (
        lambda: [layers.ReversibleEmbedding(ROWS, 4)], lambda p, b: tf.nn.log_softmax(p[0](p[0](b["x"]), reverse=True)),
        IDS,
    ),
    "ids flattened to [B·T]": (
        lambda: [table()], lambda p, b: tf.reshape(p[0](tf.reshape(b["x"], [-1])), [-1, LENGTH, 4]), IDS
    ),
    "a deep candidate tower, by TowerScores": (
        deep_kit, lambda p, b: tf.nn.log_softmax(p[1](p[0](b["x"][:, 0]), b["x"][:, 1])), IDS
    ),
    "Conv1D(groups=)": (lambda: [layers.Dense(4), layers.Conv1D(6, 2, groups=2)], chain, X),
    "float64 tables": (lambda: [table(dtype="float64")], bag, IDS),
    "a custom layer that holds a table": (lambda: [Holds(), layers.Dense(2)], chain, IDS),
    "embeddings_regularizer=keras.regularizers.L2(...)": (  # what it does: tests/training/test_regularizers.py
        lambda: [table(embeddings_regularizer=keras.regularizers.L2(0.1))], bag, IDS
    ),
}  # fmt: skip


class Holds(layers.Layer):
    """A table, and a dense layer beside it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table, self.dense = table(), layers.Dense(3)

    def call(self, ids):
        return self.dense(self.table(ids))


REFUSED = {
    "a custom layer with a table and a weight of its own": (
        lambda: [TableAndScale()], chain, IDS, "beside an Embedding"
    ),
    "dropout in TimeDistributed": (
        lambda: [layers.TimeDistributed(keras.Sequential([layers.Dropout(0.5), layers.Dense(2)]))], chain, X,
        "in place of TimeDistributed",
    ),
    "a dropout mask over batch times length, within a layer of your own": (
        lambda: [InOneAxis()], chain, X, r"Call Dropout on \[batch, T, n\]"
    ),
    "tf.nn.sampled_softmax_loss": (lambda: [table(), built_table()], sampled, IDS, "CandidateScores"),
    "a sparse graph of all users' edges": (lambda: [built_table()], convolved, IDS, "every user's edges"),
    "add_loss": (lambda: [Adding(), layers.Dense(2)], chain, X, "add_loss"),
    "LSTM, GRU with dropout": (lambda: [layers.GRU(2, dropout=0.5)], chain, X, "has dropout inside"),
    "full softmax by layer.embeddings": (
        lambda: [table()], lambda p, b: tf.matmul(p[0](b["x"][:, 0]), p[0].embeddings, transpose_b=True), IDS,
        "read outside a layer call",
    ),
    "ragged ids": (
        lambda: [table()], lambda p, b: p[0](tf.RaggedTensor.from_tensor(b["x"])), IDS, "Ragged|ragged"
    ),
    "sparse ids": (lambda: [table()], lambda p, b: p[0](tf.sparse.from_dense(b["x"])), IDS, "Sparse|sparse"),
    "activity_regularizer": (lambda: [layers.Dense(2, activity_regularizer="l2")], chain, X, "activity_regularizer"),
    "a deep candidate tower on shared negatives": (
        lambda: [table(), table(), layers.Dense(4, activation="relu")], deep, IDS, "that all examples share"
    ),
    "two layers of one name": (
        lambda: [layers.Dense(4, name="d"), layers.Dense(4, name="d")], chain, X, "distinct names"
    ),
}  # fmt: skip


def model_of(name, parts, forward, x):
    model = (WithBias if name == "a global bias of the model" else Scored)(parts(), forward, *SHARED_OF.get(name, ()))
    batch = {"x": x, "weight": WEIGHT, **(SHARED if name in SHARED_OF else {})}
    return model, batch


SHARED_OF = {"a deep candidate tower on shared negatives": [("negatives",)]}


@pytest.mark.fast_cases("positions on range(T)", "full softmax over a table", "a custom layer that holds a table")
@pytest.mark.parametrize("name", WORKS)
def test_it_works(name):
    parts, forward, x = WORKS[name]
    model, batch = model_of(name, parts, forward, x)
    model.per_example_loss(batch)
    if "TowerScores" in name:  # what it draws, it draws anew
        tfdp_rec.clipping.check(model, batch, examples=1)
        return
    with double_precision() if name == "float64 tables" else contextlib.nullcontext():
        assert_matches_oracle(model, batch, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    parts, forward, x, match = REFUSED[name]
    model, batch = model_of(name, parts, forward, x)
    if name in ("ragged ids", "sparse ids"):
        model.parts[0].build(None)
    else:
        model.per_example_loss(batch)
    with pytest.raises(tfdp_rec.NotPrivate, match=match) as refused:
        clipped_sum(model, batch, 1.0)
    assert len(str(refused.value)) < 500


def test_embeddings_regularizer_other_than_l2_is_refused_with_what_does_the_same():
    ids = keras.Input([LENGTH], dtype="int32")
    model = tfdp_rec.PrivateModel(ids, table(embeddings_regularizer="l1")(ids))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=SIZE), "mse")
    (refusal,) = tfdp_rec.validate(model, (IDS, X)).refusals
    assert "use keras.regularizers.L2, which is a decay, or the optimizer's weight_decay" in refusal


def test_the_page_tells_of_all_of_it():
    lines = re.findall(r"^\| (.*?) \| (works|refused)\b", PAGE.read_text(encoding="utf-8"), re.M)
    told = {line.replace("`", ""): verdict for line, verdict in lines}
    refused = dict.fromkeys([*REFUSED, "embeddings_regularizer other than L2"], "refused")
    assert told == {**dict.fromkeys(WORKS, "works"), **refused}


@pytest.mark.slow
def test_a_model_that_was_trained_lazily_is_checked_and_read():
    """A sum withholds the rows that it reads: the loss beside it, and what came after, was refused."""
    ids = keras.Input([2], dtype="int32")
    layer = keras.layers.Embedding(9, 3)
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(layer(ids))))
    model.compile(tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse")
    batch = np.arange(8, dtype="int32").reshape(4, 2), np.ones([4, 1], "float32")
    model.train_on_batch(*batch)
    tfdp_rec.clipping.check(model, batch, examples=1)
    assert np.isfinite(layer.embeddings.numpy()).all()
