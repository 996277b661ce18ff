"""The gradient of a lookup of each example among its own rows: `tf.gather(x, ids, batch_dims=1)`.

    y[b, k] = x[b, ids[b, k]]         has the gradient         x̄[b, t] = Σ_k [ids[b, k] = t] ȳ[b, k]

TensorFlow adds these up in one long axis of all rows, at ids[b, k] + b T, where an id out of range is a row of another
example. So a private step takes the sum above literally, by a product with one-hot rows: an id out of range is a row of
zeros, without a check that a graph optimizer could prune.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import override_gradient


@contextlib.contextmanager
def own_rows() -> Iterator[None]:
    """Differentiates lookups among an example's own rows example by example, for the length of the block."""
    with override_gradient("GatherV2", _sum_by_example):
        yield


def _sum_by_example(op: Any, gradient: Any, otherwise: Callable[..., Any]) -> Any:
    """The gradients of a gather's inputs; TensorFlow's own if lengths beside the batch are unknown."""
    rows, ids, axis = op.inputs
    fits = op.get_attr("batch_dims") == 1 and tf.get_static_value(axis) == 1 and isinstance(gradient, tf.Tensor)
    if not fits or rows.shape.rank is None or ids.shape.rank is None or None in (*rows.shape[1:], *ids.shape[1:]):
        return otherwise(op, gradient)
    length, width, count = int(rows.shape[1]), rows.shape[2:].num_elements(), ids.shape[1:].num_elements()
    found = tf.one_hot(tf.reshape(ids, [-1, count]), length, dtype=gradient.dtype)
    total = tf.matmul(found, tf.reshape(gradient, [-1, count, width]), transpose_a=True)
    return [tf.reshape(total, [-1, *rows.shape[1:]]), None, None]
