"""Building blocks of news encoders: masked additive attention, masked self-attention.

    additive attention:  a_t = softmax_t( w^T tanh(W x_t + c) ),  output Σ_t a_t x_t

Masks are honoured: a masked position gets no weight, so the output does not depend on how far a text was
padded. Only where *every* position is masked (the anonymous news, an empty history) all are read instead: the
padding embedding itself is then what is encoded.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


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
class AdditiveAttention(keras.layers.Layer):
    """Pool positions with learned weights.

    Args:
        units: Width of the hidden layer that scores a position.

    Example:
        >>> import numpy as np
        >>> AdditiveAttention(4)(np.ones((2, 5, 3), "float32"), mask=np.ones((2, 5), bool)).shape
        TensorShape([2, 3])
    """

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if units < 1:
            raise ValueError(f"units must be at least 1, got {units}.")
        self.units = units
        self.supports_masking = True
        self.hidden = keras.layers.Dense(units, activation="tanh", name="hidden")
        self.score = keras.layers.Dense(1, use_bias=False, name="score")

    def build(self, input_shape: Any) -> None:
        """Build the two scoring layers."""
        self.hidden.build(input_shape)
        self.score.build((*input_shape[:-1], self.units))

    def call(self, inputs: Any, mask: Any = None) -> Any:
        """[B, T, d] -> [B, d]."""
        scores = self.score(self.hidden(inputs))[..., 0]
        if mask is not None:
            scores = ops.where(mask, scores, -1e9)
        return ops.sum(ops.softmax(scores, axis=-1)[..., None] * inputs, axis=-2)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """None: the positions are gone."""
        return None

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """[B, d]."""
        return (*input_shape[:-2], input_shape[-1])

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return super().get_config() | {"units": self.units}


@keras.saving.register_keras_serializable(package="tfdp_rec")
class SelfAttentionPooling(keras.layers.Layer):
    """Multi-head self-attention, then additive attention: the block NRMS uses for titles and for histories.

    Args:
        num_heads: Attention heads.
        head_dim: Width of a head.
        units: Width of the pooling's hidden layer.
        dim: Width of the output.
        dropout: Share of the inputs dropped in training.

    Example:
        >>> import numpy as np
        >>> SelfAttentionPooling(2, 4, 8, 6)(np.ones((2, 5, 3), "float32")).shape
        TensorShape([2, 6])
    """

    def __init__(
        self, num_heads: int, head_dim: int, units: int, dim: int, dropout: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads, self.head_dim, self.units, self.dim = num_heads, head_dim, units, dim
        self.dropout = dropout
        self.supports_masking = True
        self.heads = keras.layers.MultiHeadAttention(num_heads, head_dim, output_shape=dim, name="heads")
        self.pool = AdditiveAttention(units, name="pool")
        self.drop = keras.layers.Dropout(dropout)

    def build(self, input_shape: Any) -> None:
        """Build the two stages."""
        self.heads.build(input_shape, input_shape)
        self.pool.build((*input_shape[:-1], self.dim))

    def call(self, inputs: Any, mask: Any = None, training: bool = False) -> Any:
        """[B, T, d] -> [B, dim]."""
        pairs = None if mask is None else mask[:, None, :]
        inputs = self.drop(inputs, training=training)
        mixed = self.heads(inputs, inputs, attention_mask=pairs, training=training)
        return self.pool(self.drop(mixed, training=training), mask=mask)

    def compute_mask(self, inputs: Any, mask: Any = None) -> None:
        """None: the positions are gone."""
        return None

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """[B, dim]."""
        return (*input_shape[:-2], self.dim)

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return super().get_config() | {
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "units": self.units,
            "dim": self.dim,
            "dropout": self.dropout,
        }
