"""Variables that are no tables: their noise, and the step of SGD or of `dense_optimizer`, under every mechanism."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import HOST
from tfdp_rec.core.ground.keras_internals import resource
from tfdp_rec.core.mechanism.noise.base import Request
from tfdp_rec.core.mechanism.noise.meeting import grid_of


@dataclasses.dataclass(frozen=True)
class Dense:
    """A variable that is no table, its velocity if SGD has one, and its number; no tuple, which Keras would save."""

    number: int
    variable: keras.Variable
    velocity: keras.Variable | None


def step_dense(optimizer: Any, step: Any, regularization: Mapping[str, tf.Tensor]) -> None:
    """Makes the step of all dense variables of an optimizer; `regularization` by path, as in its `apply`."""
    gradients, noisy = _add_noise(optimizer, step), []
    for path, dense in optimizer.dense.items():
        gradient = gradients[path]
        if path in regularization:
            gradient += tf.cast(regularization[path], tf.float32)
        if optimizer.dense_optimizer is not None:
            noisy.append((tf.cast(gradient, dense.variable.dtype), dense.variable))
            continue
        if optimizer.recursion.is_plain and dense.variable.dtype == "float32":  # in one pass
            handle = resource(dense.variable).handle
            tf.raw_ops.ResourceApplyGradientDescent(var=handle, alpha=step.learning_rate, delta=gradient)
        else:
            move = -step.learning_rate * gradient
            kept = [dense.variable] if dense.velocity is None else [dense.variable, dense.velocity]
            before = tuple(tf.cast(resource(variable), tf.float32) for variable in kept)
            moved = optimizer.recursion.step(before, move, step.learning_rate)
            for variable, value in zip(kept, moved, strict=True):
                resource(variable).assign(tf.cast(value, variable.dtype))
        if dense.variable.constraint is not None:
            dense.variable.assign(dense.variable.constraint(dense.variable))
    if noisy:
        optimizer.dense_optimizer.apply_gradients(noisy)


def _add_noise(optimizer: Any, step: Any) -> dict[str, tf.Tensor]:
    """Gradients of all dense variables with their noise, in their shapes."""
    one, grid, wanted = tf.zeros([1], tf.int64), grid_of(step.stddev), []
    with tf.device(HOST):
        share = 1.0 / step.batch_size
    for path, dense in optimizer.dense.items():
        size = int(tf.TensorShape(dense.variable.shape).num_elements())
        onto: tuple[tf.Tensor, ...] = ()
        if path in step.clipped.gradients:
            mean = tf.convert_to_tensor(step.clipped.scaled(path, share))
            onto = (tf.reshape(tf.cast(mean, tf.float32), [1, size]),)
        wanted.append((path, Request(dense.number, one, size, step.stddev, onto, grid)))
    made = optimizer.meet(wanted, optimizer.step_number) if wanted else []
    shapes = [dense.variable.shape for dense in optimizer.dense.values()]
    return {path: tf.reshape(each, shape) for (path, _), (each, _), shape in zip(wanted, made, shapes, strict=True)}
