"""Dense variables: the same noisy step under every mechanism, of SGD or of `dense_optimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.keras_internals import resource
from tfdp_rec.optimizers.step import Step


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
