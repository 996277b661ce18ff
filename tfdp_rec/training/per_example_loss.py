"""A compiled Keras loss, example by example.

Keras averages a loss over everything at once. Here each example gets its own: the loss's values averaged (or summed, if
the loss says so) over that example's own axes, with its own mask and sample weight, so that no loss depends on another
example. Over a batch without masks the mean of these is Keras' own loss.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import mask_of

_SEVERAL = (list, tuple, dict)
_ENTRY_BY_ENTRY = frozenset(
    """
    mean_squared_error mean_absolute_error mean_absolute_percentage_error mean_squared_logarithmic_error huber log_cosh
    poisson binary_crossentropy binary_focal_crossentropy hinge squared_hinge
    """.split()
)
"""Keras' losses that compare targets with predictions entry by entry."""


def per_example_loss(loss: Any, loss_weights: Any, y: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
    """Each example's loss, `[batch]`, of a loss as `compile` takes it."""
    outputs, targets = _split_by_output(y_pred, y_pred), _split_by_output(y, y_pred)
    losses, weights, samples = (_list_for_outputs(given, y_pred) for given in (loss, loss_weights, sample_weight))
    # Keras sums the weighted losses of the outputs.
    total = None
    for one, target, output, weight, sample in zip(losses, targets, outputs, weights, samples):
        if one is None:
            continue
        values = _one_output(one, target, output, sample)
        values = values if weight is None else values * tf.cast(weight, values.dtype)
        total = values if total is None else total + values
    if total is None:
        raise ValueError("compile() was given no loss.")
    return total


def _list_for_outputs(given: Any, y_pred: Any) -> list[Any]:
    # One that is for all outputs, or one entry per output.
    if isinstance(given, _SEVERAL):
        return _split_by_output(given, y_pred)
    return [given] * (len(y_pred) if isinstance(y_pred, _SEVERAL) else 1)


def _split_by_output(structure: Any, y_pred: Any) -> list[Any]:
    # `structure` as a list with one entry per output of the model.
    if isinstance(y_pred, dict):
        if not isinstance(structure, dict) or set(structure) - set(y_pred):
            raise ValueError(f"The model's outputs are {sorted(y_pred)}; losses, targets and weights need those keys.")
        return [structure.get(name) for name in y_pred]
    if isinstance(y_pred, (list, tuple)):
        if not isinstance(structure, (list, tuple)) or len(structure) != len(y_pred):
            raise ValueError(
                f"The model gives a list of {len(y_pred)} outputs; losses, targets and weights are lists as long."
            )
        return list(structure)
    if isinstance(structure, _SEVERAL):
        if len(structure) != 1:
            raise ValueError(f"The model has one output; losses, targets and weights have one entry, not {structure}.")
        return list(structure.values() if isinstance(structure, dict) else structure)
    return [structure]


def _one_output(loss: Any, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None) -> tf.Tensor:
    loss = keras.losses.get(loss)
    mask = mask_of(y_pred)
    y = tf.convert_to_tensor(y)
    # Same rank by static shape only: a squeeze would drop the batch axis of a batch of one.
    if y.shape.rank == y_pred.shape.rank - 1 and y_pred.shape[-1] == 1:
        y = y[..., None]
    _refuse_stretching(loss, y, y_pred)
    if isinstance(loss, keras.losses.Loss):
        _refuse_shared_weight(loss)
        values, total = loss.call(y, y_pred), loss.reduction == "sum"
    else:
        values, total = tf.convert_to_tensor(loss(y, y_pred)), False
        _refuse_one_number(loss, values)
    return _reduce_own_axes(values, mask, sample_weight, total)


def _refuse_stretching(loss: Any, y: tf.Tensor, y_pred: tf.Tensor) -> None:
    # Arrays are aligned by their last axes: of too few, the first one of y, the batch, meets an axis of an example.
    if getattr(getattr(loss, "fn", loss), "__name__", "") in _ENTRY_BY_ENTRY and y.shape.rank < y_pred.shape.rank:
        of_y, of_predictions = (", ".join(["batch", *map(str, each.shape[1:])]) for each in (y, y_pred))
        raise ValueError(
            f"The targets have shape [{of_y}] and the predictions [{of_predictions}], which the compiled loss would "
            "stretch to each other across the examples. Give both one shape: ids of shape [batch] for one id an "
            "example, x[:, 0]; keras.layers.Flatten() before the last layer; or targets of the predictions' shape."
        )


def _refuse_shared_weight(loss: keras.losses.Loss) -> None:
    if loss.reduction == "mean_with_sample_weight":
        raise ValueError(
            f"Loss '{loss.name}' divides by the sum of the batch's sample weights, so one loss depends on the "
            "rest; use reduction='sum_over_batch_size'."
        )


def _refuse_one_number(loss: Any, values: tf.Tensor) -> None:
    if values.shape.rank == 0:
        raise ValueError(
            f"The loss function {getattr(loss, '__name__', loss)} given to compile() returns one number for the batch, "
            "its mean or sum: let it return one loss an example, of shape [batch]. Take the mean over other axes only: "
            "tf.reduce_mean(values, axis=-1)."
        )


def _reduce_own_axes(values: tf.Tensor, mask: Any, sample_weight: Any, total: bool) -> tf.Tensor:
    # The mean (or sum) over every axis but the first; masked positions are neither summed nor counted.
    counted = tf.ones_like(values) if mask is None else _fit_shape(mask, values)
    if sample_weight is not None:
        values = values * _fit_shape(sample_weight, values)
    axes = list(range(1, values.shape.rank))
    if not axes:
        return values * counted
    summed = tf.reduce_sum(values * counted, axis=axes)
    return summed if total else tf.math.divide_no_nan(summed, tf.reduce_sum(counted, axis=axes))


def _fit_shape(weights: Any, values: tf.Tensor) -> tf.Tensor:
    # Weights by example or position, with axes of 1 up to the rank of `values`.
    weights = tf.cast(weights, values.dtype)
    if weights.shape.rank == values.shape.rank + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    missing = values.shape.rank - weights.shape.rank
    shape = tf.concat([tf.shape(weights), tf.ones([missing], tf.int32)], axis=0)
    return tf.broadcast_to(tf.reshape(weights, shape), tf.shape(values))
