"""A small transformer with random weights, for where no pre-trained text encoder may be fetched."""

from __future__ import annotations

import keras
from keras import ops

from tfdp_rec.models.news.layers import unit_table


def tiny_transformer(
    vocabulary_size: int, max_length: int, width: int = 64, num_heads: int = 4, num_layers: int = 1
) -> keras.Model:
    """A functional transformer encoder with the inputs and the output of a keras-hub backbone.

    Args:
        vocabulary_size: Number of token ids, padding included.
        max_length: Number of positions.
        width: Width of a token state.
        num_heads: Attention heads.
        num_layers: Blocks.

    Example:
        >>> tiny_transformer(30, 5, width=8).output_shape
        (None, 5, 8)
    """
    tokens = keras.Input((max_length,), dtype="int32", name="token_ids")
    mask = keras.Input((max_length,), dtype="bool", name="padding_mask")
    positions = keras.layers.Embedding(max_length, width, name="positions")(ops.arange(max_length))
    states = unit_table(vocabulary_size, width, "tokens")(tokens) + positions
    for _ in range(num_layers):
        pairs = ops.expand_dims(mask, 1)
        attend = keras.layers.MultiHeadAttention(num_heads, max(1, width // num_heads))
        mixed = attend(states, states, attention_mask=pairs)
        states = keras.layers.LayerNormalization()(states + mixed)
        hidden = keras.layers.Dense(2 * width, activation="gelu")(states)
        states = keras.layers.LayerNormalization()(states + keras.layers.Dense(width)(hidden))
    return keras.Model({"token_ids": tokens, "padding_mask": mask}, states, name="tiny_transformer")
