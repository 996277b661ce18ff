"""What a mechanism may know of one step, and the step of dense variables: the same under every mechanism."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import ClippedSum
from tfdp_rec.keras_internals import resource
from tfdp_rec.optimizers.tables import Table
from tfdp_rec.sampling.sampling_proof import NO_SAMPLING, Source


@dataclasses.dataclass(frozen=True)
class Step:
    """What a mechanism may know of a step when it updates its tables."""

    # `batch_size` is B and `stddev` s = σ C / B, both float64; moves are multiples of `pace`: η, or 1 where a rule
    # takes gradients themselves.

    clipped: ClippedSum
    batch_size: tf.Tensor
    stddev: tf.Tensor
    learning_rate: tf.Tensor
    upcoming: Mapping[str, tf.Tensor]
    source: Source = NO_SAMPLING
    pace: tf.Tensor | None = None
    _moves: dict[str, tf.IndexedSlices] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @property
    def noise_scale(self) -> tf.Tensor:
        """−η s: what a unit Gaussian moves a weight by, float32."""
        return tf.cast(-self._pace * self.stddev, tf.float32)

    def move(self, table: Table) -> tf.IndexedSlices:
        """−η ĝ of a table, an id standing once, added up when first asked for; nothing, if no layer read the table."""
        if table.path not in self._moves:
            self._moves[table.path] = self._move(table)
        return self._moves[table.path]

    @property
    def _pace(self) -> tf.Tensor:
        return tf.cast(self.learning_rate if self.pace is None else self.pace, tf.float64)

    def _move(self, table: Table) -> tf.IndexedSlices:
        if table.path not in self.clipped.gradients:
            return tf.IndexedSlices(tf.zeros([0, table.width]), tf.zeros([0], tf.int64))
        found = self.clipped.scaled(table.path, -self._pace / self.batch_size)
        if not isinstance(found, tf.IndexedSlices):
            raise ValueError(f"'{table.path}' is a table, but the clipped sum has a gradient of its whole shape.")
        return found


@dataclasses.dataclass(frozen=True)
class Dense:
    """A variable that is no table, its velocity if SGD has one, and its number; no tuple, which Keras would save."""

    number: int
    variable: keras.Variable
    velocity: keras.Variable | None


def step_dense(
    optimizer: Any, step: Step, regularization: Mapping[str, tf.Tensor], noise: Mapping[str, tf.Tensor]
) -> None:
    """Makes the step of all variables that are no tables; `noise` holds unit Gaussians by path."""
    noisy: list[tuple[tf.Tensor, keras.Variable]] = []
    for path, dense in optimizer.dense.items():
        variable, velocity = dense.variable, dense.velocity
        gradient = tf.cast(step.stddev, tf.float32) * noise[path]
        if path in step.clipped.gradients:
            gradient += tf.convert_to_tensor(step.clipped.scaled(path, 1.0 / step.batch_size))
        if path in regularization:
            gradient += tf.cast(regularization[path], tf.float32)
        if optimizer.dense_optimizer is not None:
            noisy.append((tf.cast(gradient, variable.dtype), variable))
            continue
        before = tf.cast(resource(variable), tf.float32)
        state = None if velocity is None else tf.convert_to_tensor(resource(velocity))
        weight, moved = optimizer.recursion.step(before, state, -step.learning_rate * gradient, step.learning_rate)
        resource(variable).assign(tf.cast(weight, variable.dtype))
        if velocity is not None:
            resource(velocity).assign(moved)
    if optimizer.dense_optimizer is not None and noisy:
        optimizer.dense_optimizer.apply_gradients(noisy)
    elif optimizer.dense_optimizer is None:
        for dense in optimizer.dense.values():
            if dense.variable.constraint is not None:
                dense.variable.assign(dense.variable.constraint(dense.variable))
