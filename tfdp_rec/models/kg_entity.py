"""KGEntity: entity embeddings from activity timelines (EANA paper, section 4.2).

A dual encoder. The context is T activities, newest first, each with up to V values of three features; 0 is
padding. With one table for each feature f, and m(·) the mean over the values that are there,

    x_t = Σ_f m(E_f[ids_{t,f}]) + P[t],     query = W · mean over present t of Transformer(x)_t + b.

The label is an entity, looked up in a table of its own and scored against negatives drawn uniformly from the
M labels of the public catalogue, the same for the whole batch. With S of them, the softmax adds log(M / S) to
each negative's logit, which makes it an estimate of the softmax over all labels.

Reference:
    Berlowitz et al., EANA: Reducing Privacy Risk on Large-scale Recommendation Models, RecSys 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
import tensorflow_recommenders as tfrs

from tfdp_rec.layers.candidate_scores import CandidateScores
from tfdp_rec.layers.negatives import read_batch
from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.training.model import PrivateTraining

FEATURES = ("entities", "unigrams", "bigrams")


@keras.saving.register_keras_serializable(package="tfdp_rec")
class EncoderBlock(SavedByArguments, keras.layers.Layer):
    """One pre-normalised transformer block: attention among present places, or earlier ones, then a hidden layer."""

    def __init__(self, width: int, num_heads: int, hidden: int, causal: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.hidden, self.causal = hidden, causal
        self.before_attention = keras.layers.LayerNormalization(name="before_attention")
        self.attention = keras.layers.MultiHeadAttention(num_heads, width // num_heads, name="attention")
        self.before_hidden = keras.layers.LayerNormalization(name="before_hidden")
        self.expand = keras.layers.Dense(hidden, activation="gelu", name="expand")
        self.contract = keras.layers.Dense(width, name="contract")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.before_attention.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.before_hidden.build(input_shape)
        self.expand.build(input_shape)
        self.contract.build((*input_shape[:-1], self.hidden))
        self.built = True

    def call(self, x: tf.Tensor, present: tf.Tensor | None = None) -> tf.Tensor:
        normal, mask = self.before_attention(x), None if present is None else present[:, None, :]
        x = x + self.attention(normal, normal, attention_mask=mask, use_causal_mask=self.causal)
        return x + self.contract(self.expand(self.before_hidden(x)))


@keras.saving.register_keras_serializable(package="tfdp_rec")
class KGEntity(SavedByArguments, PrivateTraining, tfrs.Model):
    """Context tower of three features and a transformer; label tower a lookup.

    A batch is a dict of `entities`, `unigrams`, `bigrams` `[batch, T, V]`, `label` `[batch]` and `negatives`
    `[S]`, ids from 1 with 0 as padding.

    Args:
        vocabulary_sizes: Feature name -> rows of its table, padding included.
        num_labels: Number of rows of the label table, padding included.
        width: Width of every embedding and of the query.
        context_length: Number T of activities in a context.
        num_blocks: Number of transformer blocks.
        num_heads: Number of attention heads of each block; must divide `width`.
        hidden: Units of each block's hidden layer; four times `width` if left out.

    Raises:
        ValueError: a feature has no vocabulary size, or `num_heads` does not divide `width`.

    Example:
        >>> import numpy as np
        >>> model = KGEntity({"entities": 1001, "unigrams": 1001, "bigrams": 1001}, num_labels=1001, width=16)
        >>> batch = {feature: np.ones([3, 20, 2], "int32") for feature in ("entities", "unigrams", "bigrams")}
        >>> model(batch).shape
        TensorShape([3, 16])
    """

    shared_inputs = ("negatives", "expected")

    def __init__(
        self,
        vocabulary_sizes: Mapping[str, int],
        num_labels: int,
        width: int = 64,
        context_length: int = 20,
        num_blocks: int = 2,
        num_heads: int = 4,
        hidden: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if missing := set(FEATURES) - set(vocabulary_sizes):
            raise ValueError(f"vocabulary_sizes lacks {sorted(missing)}.")
        if width % num_heads:
            raise ValueError(f"num_heads must divide width, got {num_heads} heads and width {width}.")
        self.num_labels, self.width, self.context_length = num_labels, width, context_length
        small = keras.initializers.RandomNormal(stddev=1 / math.sqrt(width))
        self.tables = {
            f: keras.layers.Embedding(vocabulary_sizes[f], width, embeddings_initializer=small, name=f)
            for f in FEATURES
        }
        self.positions = keras.layers.Embedding(context_length, width, name="positions")
        self.blocks = [
            EncoderBlock(width, num_heads, hidden or 4 * width, name=f"block_{i}") for i in range(num_blocks)
        ]
        self.final_norm = keras.layers.LayerNormalization(name="final_norm")
        self.to_query = keras.layers.Dense(width, name="to_query")
        self.labels = CandidateScores(num_labels, width, embeddings_initializer=small, name="labels")
        # All weights exist from the start: loading and clipping both need them before the first batch.
        for table in (*self.tables.values(), self.positions):
            table.build((None, None))
        for layer in (*self.blocks, self.final_norm, self.to_query):
            layer.build((None, self.context_length, self.width))
        self.built = True

    def call(self, batch: Mapping[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        """Queries `[batch, width]` for a batch's contexts. An empty context gives the same query for everyone."""
        ids = [tf.convert_to_tensor(batch[feature]) for feature in FEATURES]
        present = tf.reduce_any(tf.concat([i > 0 for i in ids], axis=2), axis=2)
        place = tf.range(self.context_length, dtype=ids[0].dtype)[None, :] + tf.zeros_like(ids[0][:, :, 0])
        x = sum((_mean_of_values(self.tables[f](i), i > 0) for f, i in zip(FEATURES, ids)), self.positions(place))
        for block in self.blocks:
            x = block(x, present)
        shares = _shares(present, x.dtype)
        return self.to_query(tf.reduce_sum(self.final_norm(x) * shares[:, :, None], axis=1))

    def per_example_loss(self, data: Mapping[str, tf.Tensor], training: bool = True) -> tf.Tensor:
        """Sampled softmax over the label and the shared negatives, `[batch]`.

        Args:
            data: A batch with `label` and `negatives`.
            training: Whether the model trains, as in Keras.
        """
        query = self.call(data, training=training)
        negatives, corrections = read_batch(data, self.num_labels - 1)
        return self.labels.cross_entropy(query, data["label"], negatives, offsets=(None, corrections))

    def top_k(self, batch: Mapping[str, Any], k: int) -> tuple[tf.Tensor, tf.Tensor]:
        """The k labels with the best scores for each context, settled weights first.

        Args:
            batch: Contexts; each takes memory for a score of every label.
            k: Number of labels in an answer.

        Returns:
            Scores and ids, both `[batch, k]`, best first.
        """
        query = self({feature: tf.convert_to_tensor(batch[feature]) for feature in FEATURES})
        scores = tf.matmul(query, self.labels.embeddings.value, transpose_b=True)[:, 1:]  # label 0 is padding
        best, places = tf.math.top_k(scores, min(k, self.num_labels - 1))
        return best, tf.cast(places, tf.int64) + 1


def _mean_of_values(vectors: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    """Mean over the values that are there, zero where none is: `[batch, T, V, width]` -> `[batch, T, width]`."""
    return tf.reduce_sum(vectors * _shares(present, vectors.dtype)[..., None], axis=2)


def _shares(present: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Weights that make a sum over the last axis a mean over what is present there."""
    counted = tf.cast(present, dtype)
    return counted / tf.maximum(tf.reduce_sum(counted, axis=-1, keepdims=True), 1)
