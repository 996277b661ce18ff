"""What a mechanism is told of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import ClippedSum
from tfdp_rec.optimizers.tables import Table


@dataclasses.dataclass(frozen=True)
class Step:
    """What a mechanism may know of a step when it updates its tables.

    Attributes:
        clipped: the clipped sum of the batch.
        batch_size: B, float64.
        stddev: s = σ C / B, float64.
        learning_rate: η, float32.
        upcoming: table path -> ids that the next batch will read, if known.
    """

    clipped: ClippedSum
    batch_size: tf.Tensor
    stddev: tf.Tensor
    learning_rate: tf.Tensor
    upcoming: Mapping[str, tf.Tensor]

    @property
    def noise_scale(self) -> tf.Tensor:
        """−η s: what a unit Gaussian moves a weight by, float32."""
        return tf.cast(-tf.cast(self.learning_rate, tf.float64) * self.stddev, tf.float32)

    def mean(self, table: Table, times: Any = 1.0) -> tf.IndexedSlices:
        """ĝ of a table, times a scalar, which costs nothing; an id stands once.

        Nothing, if no layer read the table this time.
        """
        if table.path not in self.clipped.gradients:
            return tf.IndexedSlices(tf.zeros([0, table.width]), tf.zeros([0], tf.int64))
        found = self.clipped.scaled(table.path, tf.cast(times, tf.float64) / self.batch_size)
        if not isinstance(found, tf.IndexedSlices):
            raise ValueError(f"'{table.path}' is a table, but the clipped sum has a gradient of its whole shape.")
        return found


@dataclasses.dataclass(frozen=True)
class Dense:
    """A variable that is no table, its velocity if SGD has one, and its number; no tuple, which Keras would save."""

    number: int
    variable: keras.Variable
    velocity: keras.Variable | None
