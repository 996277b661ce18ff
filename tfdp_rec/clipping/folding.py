"""Factors of a call on [B·k, ...]: k rows an example, put together to one example's gradient.

A layer that is called on merged axes (ids flattened to [B·T]) gives factors of B·k pseudo-examples. One example's
gradient is the sum of its k: positions of one example, or formed gradients added up.
"""

from __future__ import annotations

import tensorflow as tf

from tfdp_rec.clipping.factors import Factor, Outer, PerExample, Rows
from tfdp_rec.refused import NotPrivate


def folded(factor: Factor, batch_size: tf.Tensor, name: str) -> Factor:
    """The factor of `batch_size` examples that a factor of a multiple of as many rows stands for.

    Args:
        factor: with B·k rows, example-major.
        batch_size: B.
        name: of the layer.

    Raises:
        NotPrivate: for a kind of factor whose rows cannot be put together.
    """
    if isinstance(factor, PerExample):
        return PerExample(tf.reduce_sum(_by_example(factor.values, batch_size), axis=1))
    if isinstance(factor, Rows):
        ids, g = (_by_example(t, batch_size) for t in (factor.ids, factor.g))
        return Rows(_one_run(ids), _one_run(g), factor.shape)
    if isinstance(factor, Outer):
        x, g = (_by_example(t, batch_size) for t in (factor.x, factor.g))
        x, g = (t if t.shape.rank == 3 else _one_run(t) for t in (x, g))
        return Outer(x, g, factor.assemble)
    raise NotPrivate(
        f"Layer '{name}' is called on several rows an example in one long axis, which its clipping rule cannot tell "
        "apart; call it on [batch, T, ...] instead."
    )


def _by_example(tensor: tf.Tensor, batch_size: tf.Tensor) -> tf.Tensor:
    """`[B·k, ...]` as `[B, k, ...]`; a batch of no examples has k = 0."""
    shape = tf.shape(tensor)
    each = shape[0] // tf.maximum(batch_size, 1)
    split = tf.reshape(tensor, tf.concat([[batch_size, each], shape[1:]], axis=0))
    return tf.ensure_shape(split, [None, None, *tensor.shape[1:]])


def _one_run(tensor: tf.Tensor) -> tf.Tensor:
    """`[B, k, T, ...]` as `[B, k·T, ...]`."""
    shape = tf.shape(tensor)
    run = tf.reshape(tensor, tf.concat([[shape[0], shape[1] * shape[2]], shape[3:]], axis=0))
    return tf.ensure_shape(run, [None, None, *tensor.shape[3:]])
