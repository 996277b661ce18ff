"""keras-rs' bags of embeddings, clipped exactly: known by name, since keras-rs need not be installed.

With ids i_t and weights v_t of one example, E the table, a bag is

    z = Σ_t v_t E[i_t] / d,    d = 1 ("sum"),  Σ_t v_t ("mean"),  √(Σ_t v_t²) ("sqrtn"),   z = 0 where d is 0

What is watched are the rows E[i_t], before weights and divisor; their gradients are those of a lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import rules
from tfdp_rec.clipping.ids import no_length
from tfdp_rec.refused import NotPrivate


class EmbedReduceRule(rules.EmbeddingRule):
    """Rows of a table by id, added up for each example: a lookup, whatever is done with the rows."""

    way = "by row, put together by example"

    def run(self, call: rules.Call, original: Callable[..., Any], hooks: rules.Hooks) -> Any:
        ids, weights = self._given(call)
        for tensor in (ids, weights):
            if why := no_length(call.layer, tensor):
                raise NotPrivate(why)
        rows = super().run(call, original, hooks)
        weights = None if weights is None else tf.convert_to_tensor(weights)
        return _combined(rows, weights, call.layer.combiner)  # type: ignore[attr-defined]

    @staticmethod
    def _given(call: rules.Call) -> tuple[Any, Any]:
        named = dict(zip(("inputs", "weights"), call.args)) | call.kwargs
        return named["inputs"], named.get("weights")


def _combined(rows: tf.Tensor, weights: tf.Tensor | None, combiner: str) -> tf.Tensor:
    """Rows `[batch, width]` or `[batch, T, width]`, as the layer puts them together."""
    alone = rows.shape.rank == 2  # nothing to divide by: a mean of one is that one
    if weights is None or (alone and combiner != "sum"):
        weights = tf.ones(tf.shape(rows)[:-1], rows.dtype)
    common = keras.backend.result_type(rows.dtype, weights.dtype)
    rows, weights = tf.cast(rows, common), tf.cast(weights, common)
    for _ in range(rows.shape.rank - weights.shape.rank):
        weights = weights[..., None]
    if alone:
        return rows * weights
    total = tf.reduce_sum(rows * weights, axis=1)
    if combiner == "sum":
        return total
    divisor = tf.reduce_sum(weights if combiner == "mean" else tf.square(weights), axis=1)
    return tf.math.divide_no_nan(total, divisor if combiner == "mean" else tf.sqrt(divisor))


rules.register("keras_rs.EmbedReduce", EmbedReduceRule())
