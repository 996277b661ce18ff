"""Bags: rows of a table that a model only adds up, each example its own.

    z_b = Σ_t c_bt E[i_bt]        has, with q_b = ∂L/∂z_b, the gradient        Σ_t c_bt e(i_bt) q_bᵀ

All rows of an example have one gradient, times a number each. TensorFlow writes it down once for each row, which is
most of a step's numbers where bags are long. So where a model only adds its rows up, the loss is differentiated by z,
and the factor of the table is made of ids, c and q (`factors.BagRows`).

Whether it only adds them up is found in the graph of the forward pass. A mistake there would cost accuracy, not
privacy: the norm and the sum are of the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp_rec.core.sensitivity.factors import spread

_OF_SHAPES = ("Shape", "ShapeN", "Size", "Rank")  # operations that look at no number
_UNCHANGED = ("Cast", "Identity", "EnsureShape")


class Bag(NamedTuple):
    """What rows `[batch, T, width]` are added up to, and what each of them is multiplied by before."""

    total: tf.Tensor  # `[batch, width]`, or `[batch, 1, width]`
    coefficients: tf.Tensor  # `[batch, T]`
    divisor: int  # T where the total is a mean
    gradient: tf.Tensor | None = None  # of the sum, `[batch, width]`
    of_rows: tf.Tensor | None = None  # the gradient of the rows, `[batch, T, width]`, which is not computed if not used

    def add_gradient(self, of_total: tf.Tensor) -> Bag:
        """The same with gradients."""
        gradient = tf.cast(tf.reshape(of_total, [-1, of_total.shape[-1]]), self.coefficients.dtype)
        # Of a bag without rows the gradient may be undefined, as that of a length is at zero, and concerns no row.
        has_rows = tf.reduce_any(tf.not_equal(self.coefficients, 0), axis=1, keepdims=True)
        gradient = tf.where(has_rows, gradient / self.divisor, tf.zeros([], gradient.dtype))
        return self._replace(gradient=gradient, of_rows=spread(self.coefficients, gradient))


def find_bag(rows: tf.Tensor) -> Bag | None:
    """What rows are added up to, if a model makes nothing else of them."""
    if tf.executing_eagerly() or rows.shape.rank != 3 or rows.shape[0] is not None or None in rows.shape[1:]:
        return None
    dtype = tf.float64 if rows.dtype == tf.float64 else tf.float32
    coefficients = tf.ones(tf.shape(rows)[:2], dtype)
    for tensor, user in _follow(rows):
        if user.type in ("Sum", "Mean"):
            axes = tf.get_static_value(user.inputs[1])
            if axes is None or [int(axis) % 3 for axis in axes.reshape(-1)] != [1]:
                return None
            coefficients = tf.ensure_shape(coefficients, rows.shape[:2])
            return Bag(user.outputs[0], coefficients, rows.shape[1] if user.type == "Mean" else 1)
        if user.type in ("Mul", "SelectV2"):
            by = next(each for each in user.inputs if each is not tensor)  # of a selection the mask
            if by.shape.rank != 3 or by.shape[1:] != [rows.shape[1], 1]:
                return None
            kept = ~by if user.type == "SelectV2" and user.inputs[2] is tensor else by
            coefficients *= tf.cast(kept[:, :, 0], dtype)
        elif user.type not in _UNCHANGED:
            return None
    return None


def _follow(rows: tf.Tensor) -> Iterator[tuple[tf.Tensor, Any]]:
    """(tensor, the operation that alone uses it), from the rows on, as long as there is one of the same shape."""
    tensor, shape = rows, rows.shape[1:]
    while tensor.dtype.is_floating and tensor.shape[1:] == shape:
        users = [user for user in tensor.consumers() if user.type not in _OF_SHAPES and _is_used(user)]
        if len(users) != 1 or sum(each is tensor for each in users[0].inputs) != 1:
            return
        yield tensor, users[0]
        tensor = users[0].outputs[0]


def _is_used(operation: Any) -> bool:
    # Keras takes a row to ask for its type.
    return any(output.consumers() for output in operation.outputs)
