"""What `bench clipping` trains: the same layers as a plain Keras model and as a private one, without noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdp_rec
from experiments.bench.baselines import compare_by
from experiments.bench.contestants import GatheredEmbedding
from tfdp_rec.models.dlrm import DLRMLayers
from tfdp_rec.noise import NoiseSource, Request
from tfdp_rec.training.model import PrivateTraining

LEARNING_RATE = 0.05
MICROBATCH = 32  # of the strategies that form every example's gradient
TABLES, WIDTH, LENGTH = 26, 128, 32


class Silence(NoiseSource):
    """No noise, so that clipping is timed alone."""

    def draw(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        return [tf.zeros([tf.size(r.rows), r.draws, r.width]) for r in requests]


class ClippedSGD(tfdp_rec.DPSGD):
    """SGD with the clipped sum, tables by their touched rows alone. Not private: for timing."""

    def step_tables(self, step: Any) -> None:
        for table in self.tables.values():
            move = step.mean(table, -step.learning_rate)
            table.step(move.indices, move.values, step.learning_rate)


class OneTable:
    """A table of rows of 128 and one dense layer."""

    embedding_layer: type[layers.Embedding] = layers.Embedding

    def __init__(self, rows: int):
        super().__init__()
        self.table = self.embedding_layer(rows, WIDTH, embeddings_initializer="zeros", name="table")
        self.logit = layers.Dense(1, activation="sigmoid", name="logit")
        self.table.build()
        self.logit.build((None, WIDTH))
        self.built = True

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.logit(self.table(inputs))


class Transformer:
    """Two encoder layers over token ids; the token table gives the logits too."""

    embedding_layer: type[layers.Embedding] = layers.ReversibleEmbedding

    def __init__(self, rows: int):
        super().__init__()
        self.table = self.embedding_layer(rows, WIDTH, name="tokens")
        self.positions = layers.Embedding(LENGTH, WIDTH, name="positions")
        self.blocks = [_block(i) for i in range(2)]
        self.parts = [layer for block in self.blocks for layer in block]

    def call(self, tokens: tf.Tensor) -> tf.Tensor:
        places = tf.zeros_like(tokens) + tf.range(LENGTH, dtype=tokens.dtype)
        h = self.table(tokens) + self.positions(places)
        for attention, first, up, down, second in self.blocks:
            h = first(h + attention(h, h, use_causal_mask=True))
            h = second(h + down(up(h)))
        return self.table(h, reverse=True)


def _block(number: int) -> list[layers.Layer]:
    return [
        layers.MultiHeadAttention(4, WIDTH // 4, name=f"attention_{number}"),
        layers.LayerNormalization(name=f"first_{number}"),
        layers.Dense(4 * WIDTH, activation="relu", name=f"up_{number}"),
        layers.Dense(WIDTH, name=f"down_{number}"),
        layers.LayerNormalization(name=f"second_{number}"),
    ]


def _dlrm(rows: int, batch_size: int) -> tuple[type, dict[str, Any], str, tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=[batch_size, 13]).astype("float32")
    ids = rng.integers(0, rows, size=[batch_size, TABLES])
    labels = rng.integers(0, 2, size=[batch_size, 1]).astype("float32")
    return DLRMLayers, {"table_sizes": [rows] * TABLES}, "binary_crossentropy", ({"dense": dense, "ids": ids}, labels)


def _one_table(rows: int, batch_size: int) -> tuple[type, dict[str, Any], str, tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, size=[batch_size, 1]).astype("float32")
    return OneTable, {"rows": rows}, "binary_crossentropy", (rng.integers(0, rows, size=[batch_size]), labels)


def _transformer(rows: int, batch_size: int) -> tuple[type, dict[str, Any], Any, tuple[Any, Any]]:
    tokens = np.random.default_rng(0).integers(0, rows, size=[batch_size, LENGTH + 1])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return Transformer, {"rows": rows}, loss, (tokens[:, :-1], tokens[:, 1:])


WORKLOADS = {"dlrm": _dlrm, "one-table": _one_table, "transformer": _transformer}


def stepper(workload: str, name: str, batch_size: int, rows: int) -> Callable[[], Any]:
    """A training step of one contestant; what it trains on does not change from step to step.

    Args:
        workload: one of `WORKLOADS`.
        name: `sparse-sgd`, `keras-sgd` or a clipping strategy.
        batch_size: examples a step.
        rows: of each table.
    """
    kind, arguments, loss, batch = WORKLOADS[workload](rows, batch_size)
    private = not name.endswith("sgd")
    bases = (kind, PrivateTraining, keras.Model) if private else (kind, keras.Model)
    sparse = {"embedding_layer": GatheredEmbedding} if name == "sparse-sgd" and workload != "transformer" else {}
    model = type("Contestant", bases, sparse)(**arguments)
    if private:
        optimizer = ClippedSGD(
            LEARNING_RATE, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=batch_size, noise=Silence()
        )
        forms = name in ("reweighted", "per_example")
        model.compile(optimizer, loss)
        compare_by(model, name, MICROBATCH if forms else None)
    else:
        model.compile(keras.optimizers.SGD(LEARNING_RATE), loss, jit_compile=False)
    data = tf.data.Dataset.from_tensors(batch).repeat()
    model(tf.nest.map_structure(lambda v: v[:2], batch[0]))
    if private:
        model.prepare(data.element_spec)
    model.make_train_function()
    iterator, train = iter(data), model.train_function
    return lambda: train(iterator)
