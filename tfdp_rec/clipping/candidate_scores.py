"""Scores of candidates that the whole batch shares: the private way to train with sampled negatives.

In-batch negatives make one example's gradient depend on the others, so that clipping no longer bounds what one example
can do. Here the negatives are ids [S] that depend on no example: drawn uniformly from the public catalogue in the data
pipeline. With q the query of an example and E the table,

    logit_0 = q · E[positive],    logit_s = q · E[negative_s]

and the gradient of E for one example is d_0 e(positive) qᵀ + Σ_s d_s e(negative_s) qᵀ, whose norm has a closed form
(`factors.Scores`): neither [batch, S, width] nor the table's shape is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import factors, rules

_FAR_BELOW = -1e9  # a logit that takes no part in a softmax


@keras.saving.register_keras_serializable(package="tfdp_rec")
class CandidateScores(keras.layers.Layer):
    """Logits of one positive an example and of negatives shared by the batch, from a table of candidates.

    Args:
        vocabulary_size: rows of the candidate table.
        width: length of a row, that of the query.
        embeddings_initializer: of the table.
        remove_accidental_hits: a negative equal to the example's own positive takes no part.

    Call arguments:
        query: `[batch, width]`.
        positives: ids `[batch]`.
        negatives: ids `[S]`, independent of the data; the same for every example.

    Returns:
        Logits `[batch, 1 + S]`, the positive first.

    Example:
        >>> import tensorflow as tf
        >>> layer = CandidateScores(vocabulary_size=100, width=8)
        >>> layer(tf.ones([4, 8]), tf.constant([1, 2, 3, 4]), tf.constant([7, 9])).shape
        TensorShape([4, 3])
    """

    def __init__(
        self,
        vocabulary_size: int,
        width: int,
        embeddings_initializer: Any = "uniform",
        remove_accidental_hits: bool = True,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.vocabulary_size, self.width = vocabulary_size, width
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.remove_accidental_hits = remove_accidental_hits
        self.embeddings = self.add_weight(
            shape=(vocabulary_size, width), initializer=self.embeddings_initializer, name="embeddings"
        )
        self.built = True

    def raw_logits(self, query: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
        """The logits before accidental hits are taken out."""
        table = rules.resource(self.embeddings)
        positive_rows = tf.cast(tf.gather(table, positives), query.dtype)
        negative_rows = tf.cast(tf.gather(table, negatives), query.dtype)
        own = tf.reduce_sum(query * positive_rows, axis=1, keepdims=True)
        return tf.concat([own, tf.matmul(query, negative_rows, transpose_b=True)], axis=1)

    def call(self, query: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
        return self.without_hits(self.raw_logits(query, positives, negatives), positives, negatives)

    def without_hits(self, logits: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
        """Each example's logits with the negatives that are its own positive taken out."""
        if not self.remove_accidental_hits:
            return logits
        hit = tf.equal(tf.cast(positives, tf.int64)[:, None], tf.cast(negatives, tf.int64)[None, :])
        never = tf.zeros_like(hit[:, :1])
        return tf.where(tf.concat([never, hit], axis=1), tf.constant(_FAR_BELOW, logits.dtype), logits)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "width": self.width,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "remove_accidental_hits": self.remove_accidental_hits,
        }


class CandidateScoresRule(rules.Rule):
    """Closed form for the shared candidates, rows for the positives."""

    way = "by row, shared candidates in closed form"

    @staticmethod
    def _inputs(call: rules.Call) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        named = dict(zip(("query", "positives", "negatives"), call.args)) | call.kwargs
        return named["query"], named["positives"], named["negatives"]

    def run(self, call: rules.Call, original: Callable[..., Any], hooks: rules.Hooks) -> Any:
        query, positives, negatives = self._inputs(call)
        layer: Any = call.layer
        positives, negatives = (rules.of_rows(ids, layer, layer.embeddings) for ids in (positives, negatives))
        for path, ids in self.tables(call).items():
            assert path == layer.embeddings.path
            hooks.before_read(layer.embeddings, ids)
        logits = hooks.watch(layer.raw_logits(query, positives, negatives))
        return layer.without_hits(logits, positives, negatives)

    def factors(self, call: rules.Call, gradients: list[tf.Tensor]) -> Iterator[tuple[keras.Variable, factors.Factor]]:
        query, positives, negatives = self._inputs(call)
        (d,), table = gradients, call.layer.embeddings
        own = d[:, :1] * query
        yield table, factors.Rows(tf.cast(positives, tf.int64)[:, None], own[:, None, :], table.shape)
        yield table, factors.Scores(negatives, d[:, 1:], query, table.shape)

    def tables(self, call: rules.Call) -> dict[str, tf.Tensor]:
        _, positives, negatives = self._inputs(call)
        ids = tf.concat([tf.cast(positives, tf.int64), tf.cast(negatives, tf.int64)], axis=0)
        return {call.layer.embeddings.path: ids}


rules.register(CandidateScores, CandidateScoresRule())
