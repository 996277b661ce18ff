"""Small models of the kinds people train, each with a batch: name -> () -> (model, batch of 5 examples)."""

import keras
import numpy as np
import seeding
import tensorflow as tf
from helpers import Scored
from keras import layers

import tfdp_rec

SIZE = 5


def _ids(seed, below, *shape):
    return np.random.default_rng(seed).integers(0, below, size=[SIZE, *shape])


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=[SIZE, *shape])


def mlp():
    parts = [layers.Dense(4, activation="relu"), layers.Dropout(0.5), layers.Dense(3, activation="tanh")]
    return Scored(parts, lambda p, b: p[2](p[1](p[0](b["x"]), training=False))), {"x": _normal(0, 3)}


def two_tower():
    """Context bag with padding, hidden layer, shared negatives on the label table."""
    parts = [
        layers.Embedding(9, 3, mask_zero=True),
        layers.GlobalAveragePooling1D(),
        layers.Dense(3, activation="relu"),
    ]
    parts.append(tfdp_rec.CandidateScores(9, 3))

    def forward(p, b):
        return tf.nn.log_softmax(p[3](p[2](p[1](p[0](b["context"]))), b["label"], b["negatives"]))

    context = _ids(1, 9, 4)
    context[:, 0] = 1
    batch = {"context": context, "label": _ids(2, 9), "negatives": np.array([3, 3, 7, 1])}
    return Scored(parts, forward, ("negatives",)), batch


def dlrm():
    """Bottom and top MLP around pairwise products of three tables' rows."""
    tables = [layers.Embedding(6, 3) for _ in range(3)]
    parts = [layers.Dense(3, activation="relu"), layers.Dense(4, activation="relu"), layers.Dense(1), *tables]

    def forward(p, b):
        rows = [p[0](b["numbers"])] + [table(b["ids"][:, i]) for i, table in enumerate(p[3:])]
        stacked = tf.stack(rows, axis=1)
        products = tf.reshape(tf.matmul(stacked, stacked, transpose_b=True), [-1, 16])
        return p[2](p[1](tf.concat([rows[0], products], axis=1)))

    return Scored(parts, forward), {"numbers": _normal(3, 2), "ids": _ids(4, 6, 3)}


class Positions(layers.Layer):
    """Learned positions: the same for every example, read once an example."""

    def build(self, shape):
        self.table = layers.Embedding(shape[1], shape[2], name="table")

    def call(self, x):
        return x + self.table(tf.zeros_like(x[:, :, 0], tf.int32) + tf.range(tf.shape(x)[1]))


def transformer():
    """Two encoder layers over token ids; the table gives the logits too."""
    table, width = layers.ReversibleEmbedding(7, 4), 4
    blocks = []
    for _ in range(2):
        attention, norms = layers.MultiHeadAttention(2, 2), [layers.LayerNormalization() for _ in range(2)]
        blocks.append((attention, *norms, layers.Dense(6, activation="relu"), layers.Dense(width)))

    def forward(p, b):
        h = p[1](p[0](b["tokens"]))
        for attention, first, second, up, down in blocks:
            h = first(h + attention(h, h, use_causal_mask=True))
            h = second(h + down(up(h)))
        return tf.nn.log_softmax(p[0](h, reverse=True))

    parts = [table, Positions(), *(part for block in blocks for part in block)]
    return Scored(parts, forward), {"tokens": _ids(5, 7, 4)}


def text():
    """Convolution over embedded words, then attention."""
    parts = [layers.Embedding(8, 3), layers.Conv1D(4, 3, padding="same", activation="relu")]
    parts += [layers.MultiHeadAttention(2, 2), layers.GlobalMaxPooling1D(), layers.Dense(2)]

    def forward(p, b):
        h = p[1](p[0](b["words"]))
        return p[4](p[3](p[2](h, h)))

    return Scored(parts, forward), {"words": _ids(6, 8, 6)}


def gru():
    parts = [layers.Embedding(8, 2), layers.GRU(2), layers.Dense(2)]
    return Scored(parts, lambda p, b: p[2](p[1](p[0](b["words"])))), {"words": _ids(7, 8, 3)}


ZOO = {f.__name__: f for f in (mlp, two_tower, dlrm, transformer, text, gru)}


def built(name, seed=0):
    """A model of the zoo with random weights, and its batch, in Keras' float type."""
    seeding.seed(seed)
    model, batch = ZOO[name]()
    batch["weight"] = np.random.default_rng(seed).uniform(0.1, 2.0, size=[SIZE])
    kind = keras.config.floatx()
    batch = {k: v.astype(kind) if v.dtype == np.float64 else v for k, v in batch.items()}
    model.per_example_loss(batch)
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape) * 0.5)
    return model, batch


def examples(batch, numbers, shared=()):
    """The examples of those numbers, in that order."""
    return {k: v if k in shared else v[numbers] for k, v in batch.items()}
