"""Numbers of rows and bytes of the tables that get a gradient, beside those that dense noise would update.

A step of a dense mechanism updates every row of every table; a sparse or lazy one those that its batch gave a gradient
to (and, under LazyDPSGD, as many again that the next batch will read). The callback counts the first of these, in the
slices that each step hands to the optimizer.

The counts are computed from private data without noise: how many rows a batch touches can reveal its examples. They
are for comparing mechanisms on public data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import resource
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.sensitivity.engine import ClippedSum


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Updates of some steps, summed over tables.

    Attributes:
        steps: Number of steps.
        rows: Distinct rows with a gradient, summed over steps.
        bytes: Bytes of these rows.
        dense_rows: Rows of all tables, times steps.
        dense_bytes: Bytes of these rows.
    """

    steps: int
    rows: int
    bytes: int
    dense_rows: int
    dense_bytes: int

    @property
    def reduction(self) -> float:
        """Bytes of a dense update, divided by those of a sparse one."""
        return self.dense_bytes / self.bytes if self.bytes else float("inf")


class GradientSparsity(keras.callbacks.Callback):
    """Counts updated rows and bytes, and adds `updated_rows`, `updated_bytes` (a step) and `reduction` to epoch logs.

    Attributes:
        total: A `Sparsity` over all steps of this callback's life.

    Raises:
        TypeError: In `fit`, the model was not compiled with a mechanism of this package.

    Example:
        >>> Sparsity(steps=10, rows=50, bytes=1600, dense_rows=1000, dense_bytes=32000).reduction
        20.0
    """

    keeps_off_weights = True

    def __init__(self) -> None:
        super().__init__()
        self._counts: tf.Variable | None = None
        self._epoch_start: Sparsity | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = self.model.optimizer
        if not isinstance(optimizer, PrivateOptimizer):
            raise TypeError(f"GradientSparsity needs a private optimizer such as tfdp_rec.EANA, got {optimizer!r}.")
        if self._counts is None:
            self._counts = tf.Variable(tf.zeros([3], tf.int64), trainable=False)  # steps, rows, bytes
        self._listen(self._observe)

    def on_train_end(self, logs: Any = None) -> None:
        self._listen()

    def _listen(self, *observers: Any) -> None:
        optimizer = self.model.optimizer
        optimizer.observers = (*(o for o in optimizer.observers if o != self._observe), *observers)
        self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch_start = self.total

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        start, end = self._epoch_start, self.total
        if logs is None or start is None or end.steps == start.steps:
            return
        before, after = dataclasses.astuple(start), dataclasses.astuple(end)
        epoch_only = Sparsity(*(b - a for a, b in zip(before, after)))
        logs["updated_rows"] = epoch_only.rows / epoch_only.steps
        logs["updated_bytes"] = epoch_only.bytes / epoch_only.steps
        logs["reduction"] = epoch_only.reduction

    @property
    def total(self) -> Sparsity:
        """Updates of all steps so far."""
        if self._counts is None:
            return Sparsity(0, 0, 0, 0, 0)
        steps, rows, size = (int(value) for value in self._counts.numpy())
        tables = list(self.model.optimizer.tables.values()) if self.model.optimizer.built else []
        dense = sum(table.rows for table in tables)
        dense_bytes = sum(table.rows * _row_bytes(table) for table in tables)
        return Sparsity(steps, rows, size, steps * dense, steps * dense_bytes)

    def _observe(self, clipped: ClippedSum) -> None:
        steps, rows, size = (tf.constant(n, tf.int64) for n in (1, 0, 0))
        for path, table in self.model.optimizer.tables.items():
            found = clipped.gradients.get(path)
            if isinstance(found, tf.IndexedSlices):
                touched = tf.reduce_any(tf.not_equal(found.values, 0), axis=1)
                count = tf.size(tf.unique(tf.boolean_mask(found.indices, touched))[0], tf.int64)
                rows, size = rows + count, size + count * _row_bytes(table)
        self._counts.assign_add(tf.stack([steps, rows, size]))  # type: ignore[union-attr]


def _row_bytes(table: Any) -> int:
    return table.width * resource(table.variable).dtype.size
