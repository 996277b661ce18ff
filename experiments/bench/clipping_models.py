"""What `clipping` trains: the same layers as a plain Keras model and as a private one, without noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp_rec
from experiments.bench import models
from experiments.bench.baselines import compare_by
from tfdp_rec.models.dlrm import DLRMLayers
from tfdp_rec.noise import NoiseSource, Request

TABLES = 26


class Silence(NoiseSource):
    """No noise, so that clipping is timed alone."""

    def draw(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        return [tf.zeros([tf.size(r.rows), r.draws, r.width], tf.float64) for r in requests]


class ClippedSGD(tfdp_rec.DPSGD):
    """SGD with the clipped sum, tables by their touched rows alone. Not private: for timing."""

    def step_tables(self, step: Any) -> None:
        for table in self.tables.values():
            move = step.move(table)
            table.step(move.indices, move.values, step.learning_rate)


def _dlrm(rows: int, batch_size: int) -> tuple[type, dict[str, Any], str, tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    dense = rng.normal(size=[batch_size, 13]).astype("float32")
    ids = rng.integers(0, rows, size=[batch_size, TABLES])
    labels = rng.integers(0, 2, size=[batch_size, 1]).astype("float32")
    return DLRMLayers, {"table_sizes": [rows] * TABLES}, "binary_crossentropy", ({"dense": dense, "ids": ids}, labels)


def _one_table(rows: int, batch_size: int) -> tuple[type, dict[str, Any], str, tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, size=[batch_size, 1]).astype("float32")
    ids = rng.integers(0, rows, size=[batch_size])
    return models.OneTableLayers, {"rows": rows}, "binary_crossentropy", (ids, labels)


def _transformer(rows: int, batch_size: int) -> tuple[type, dict[str, Any], Any, tuple[Any, Any]]:
    tokens = np.random.default_rng(0).integers(0, rows, size=[batch_size, models.TOKENS + 1])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return models.Transformer, {"rows": rows}, loss, (tokens[:, :-1], tokens[:, 1:])


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
    if private:
        model = models.private(kind, **arguments)
        optimizer = ClippedSGD(
            models.LEARNING_RATE, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=batch_size,
            noise=Silence(),
        )  # fmt: skip
        forms = name in ("reweighted", "per_example")
        model.compile(optimizer, loss)
        compare_by(model, name, models.MICROBATCH if forms else None)
    else:
        model = models.plain(kind, sparse=name == "sparse-sgd" and workload != "transformer", **arguments)
        model.compile(keras.optimizers.SGD(models.LEARNING_RATE), loss, jit_compile=False)
    data = tf.data.Dataset.from_tensors(batch).repeat()
    model(tf.nest.map_structure(lambda v: v[:2], batch[0]))
    if private:
        model.prepare(data.element_spec)
    model.make_train_function()
    iterator, train = iter(data), model.train_function
    return lambda: train(iterator)
