"""Building blocks of news recommenders.

    additive attention   a_t = softmax_t( w^T tanh(W x_t + c) ),   output Σ_t a_t x_t
    private attention    α = softmax(u b^T / (τ √d)),   clip = α * min(1, θ / ‖α‖_2),   u' = Σ_i α'_i b_i

Masks are honoured: a masked position gets no weight, so the output does not depend on how far a text was
padded. Only where *every* position is masked (the anonymous news, an empty history) all are read instead: the
padding embedding itself is then what is encoded.

The basis vectors b (B x d) are public. No layer adds noise: the client does, outside the graph, with
`AttentionMechanism`, so that no random state can end up in a saved model.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from tfdp_rec.core.ground.refused import refuse_below
from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.models.news.bert import BertLayer


def token_mask(tokens: Any) -> Any:
    """Which positions of int tokens [..., T] are read: those not 0, or all where all are 0."""
    return or_all(ops.not_equal(tokens, 0))


def or_all(mask: Any) -> Any:
    """The mask [..., T] itself, or all positions where it has none."""
    return ops.logical_or(mask, ops.logical_not(ops.any(mask, axis=-1, keepdims=True)))


def unit_table(size: int, dim: int, name: str) -> keras.layers.Embedding:
    """A table that starts with vectors as long as pre-trained ones are: N(0, 1) a coordinate."""
    # From Keras' own start (uniform within 0.05) news vectors are a thirtieth as long, all readers get the same
    # attention over the basis vectors, and PrivateRec learns what is popular, not what a reader likes.
    return keras.layers.Embedding(
        size, dim, embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0), name=name
    )


@keras.saving.register_keras_serializable(package="tfdp_rec")
class AdditiveAttention(SavedByArguments, keras.layers.Layer):
    """Pools positions with learned weights."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        refuse_below(1, units=units)
        self.units = units
        self.supports_masking = True
        self.hidden = keras.layers.Dense(units, activation="tanh", name="hidden")
        self.score = keras.layers.Dense(1, use_bias=False, name="score")

    def build(self, input_shape: Any) -> None:
        self.hidden.build(input_shape)
        self.score.build((*input_shape[:-1], self.units))

    def call(self, inputs: Any, mask: Any = None) -> Any:
        """[B, T, d] -> [B, d]."""
        scores = self.score(self.hidden(inputs))[..., 0]
        if mask is not None:
            scores = ops.where(mask, scores, -1e9)
        return ops.sum(ops.softmax(scores, axis=-1)[..., None] * inputs, axis=-2)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        return None


@keras.saving.register_keras_serializable(package="tfdp_rec")
class SelfAttentionPooling(SavedByArguments, keras.layers.Layer):
    """Multi-head self-attention, then additive attention: the block NRMS uses for titles and for histories."""

    def __init__(
        self, num_heads: int, head_dim: int, units: int, dim: int, dropout: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.dim = dim
        self.supports_masking = True
        self.heads = keras.layers.MultiHeadAttention(num_heads, head_dim, output_shape=dim, name="heads")
        self.pool = AdditiveAttention(units, name="pool")
        self.drop = keras.layers.Dropout(dropout)

    def build(self, input_shape: Any) -> None:
        self.heads.build(input_shape, input_shape)
        self.pool.build((*input_shape[:-1], self.dim))

    def call(self, inputs: Any, mask: Any = None, training: bool = False) -> Any:
        """[B, T, d] -> [B, dim]."""
        pairs = None if mask is None else mask[:, None, :]
        inputs = self.drop(inputs, training=training)
        mixed = self.heads(inputs, inputs, attention_mask=pairs, training=training)
        return self.pool(self.drop(mixed, training=training), mask=mask)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        return None


@keras.saving.register_keras_serializable(package="tfdp_rec")
class PrivateAttention(SavedByArguments, keras.layers.Layer):
    """Clipped attention weights of a user embedding over B basis vectors."""

    def __init__(self, num_basis: int, clip_norm: float = 1.0, temperature: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        refuse_below(2, num_basis=num_basis)
        if not clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {clip_norm}.")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        self.num_basis = num_basis
        self.temperature = temperature
        self.clip_norm = clip_norm

    def build(self, input_shape: Any) -> None:
        self.basis = self.add_weight(name="basis", shape=(self.num_basis, input_shape[-1]))

    def call(self, users: Any) -> Any:
        """Clipped weights [..., B] of user embeddings [..., d]."""
        scale = self.temperature * math.sqrt(self.basis.shape[-1])
        scores = ops.matmul(users, ops.transpose(self.basis)) / scale
        weights = ops.softmax(scores, axis=-1)
        norms = ops.sqrt(ops.sum(ops.square(weights), axis=-1, keepdims=True))
        return weights * ops.minimum(1.0, self.clip_norm / norms)

    def reconstruct(self, weights: Any) -> Any:
        """The server's user embedding: the weighted sum of the basis vectors."""
        return ops.matmul(weights, self.basis)


def tiny_transformer(vocabulary_size: int, max_length: int, width: int = 64, num_heads: int = 4) -> keras.Model:
    """A transformer of one layer with random weights: the inputs and the output are those of a keras-hub backbone.

    Args:
        vocabulary_size: Number of token ids, padding included.
        max_length: Number of positions.
        width: Width of a token state.
        num_heads: Attention heads.

    Example:
        >>> tiny_transformer(30, 5, width=8).output_shape
        (None, 5, 8)
    """
    tokens = keras.Input((max_length,), dtype="int32", name="token_ids")
    mask = keras.Input((max_length,), dtype="bool", name="padding_mask")
    positions = keras.layers.Embedding(max_length, width, name="positions")(ops.arange(max_length))
    states = unit_table(vocabulary_size, width, "tokens")(tokens) + positions
    states = BertLayer(num_heads, 2 * width, epsilon=1e-3)(states, mask)
    return keras.Model({"token_ids": tokens, "padding_mask": mask}, states, name="tiny_transformer")
