"""BERT's encoder, to be filled with published weights.

    x_t ← LN(word_t + place_t)
    x   ← LN(x + heads(x)),   x ← LN(x + W' act(W x + b) + b')         in each layer: the norm comes after the sum

Nothing is dropped out. What is frozen stays so when it is saved and loaded.

Reference:
    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", NAACL 2019.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

_GELU_BY_TANH = functools.partial(ops.gelu, approximate=True)
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": functools.partial(ops.gelu, approximate=False),
    "gelu_new": _GELU_BY_TANH,
    "gelu_pytorch_tanh": _GELU_BY_TANH,
    "relu": ops.relu,
}
"""By the names that configurations have for them."""


@keras.saving.register_keras_serializable(package="tfdp_rec")
class BertEmbeddings(keras.layers.Layer):
    """Vectors of words and places, normalised."""

    def __init__(self, vocabulary_size: int, length: int, width: int, epsilon: float = 1e-12, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocabulary_size, self.length, self.width, self.epsilon = vocabulary_size, length, width, epsilon
        self.words = keras.layers.Embedding(vocabulary_size, width, name="words")
        self.norm = keras.layers.LayerNormalization(epsilon=epsilon, name="norm")

    def build(self, input_shape: Any) -> None:
        """Build both tables and the norm."""
        self.words.build(input_shape)
        self.places = self.add_weight(name="places", shape=(self.length, self.width), initializer="zeros")
        self.norm.build((*input_shape, self.width))
        _freeze_with(self, self.words, self.norm)

    def call(self, tokens: Any) -> Any:
        """Token ids [N, T] -> [N, T, width]."""
        return self.norm(self.words(tokens) + self.places)

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return super().get_config() | {
            "vocabulary_size": self.vocabulary_size,
            "length": self.length,
            "width": self.width,
            "epsilon": self.epsilon,
        }


@keras.saving.register_keras_serializable(package="tfdp_rec")
class BertLayer(keras.layers.Layer):
    """One layer of the encoder."""

    def __init__(
        self, num_heads: int, inner: int, activation: str = "gelu", epsilon: float = 1e-12, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
        self.num_heads, self.inner, self.activation, self.epsilon = num_heads, inner, activation, epsilon
        self.wide = keras.layers.Dense(inner, activation=ACTIVATIONS[activation], name="wide")
        self.mixed_norm = keras.layers.LayerNormalization(epsilon=epsilon, name="mixed_norm")
        self.norm = keras.layers.LayerNormalization(epsilon=epsilon, name="norm")

    def build(self, states_shape: Any, padding_mask_shape: Any) -> None:
        """Build the heads, the two dense layers and the norms, as wide as the states."""
        width = states_shape[-1]
        self.heads = keras.layers.MultiHeadAttention(self.num_heads, width // self.num_heads, name="heads")
        self.narrow = keras.layers.Dense(width, name="narrow")
        self.heads.build(states_shape, states_shape)
        for layer in (self.mixed_norm, self.wide, self.norm):
            layer.build(states_shape)
        self.narrow.build((*states_shape[:-1], self.inner))
        _freeze_with(self, self.heads, self.mixed_norm, self.wide, self.narrow, self.norm)

    def call(self, states: Any, padding_mask: Any) -> Any:
        """[N, T, h], and which places are read [N, T] -> [N, T, h]."""
        mixed = self.heads(states, states, attention_mask=padding_mask[:, None, :])
        states = self.mixed_norm(states + mixed)
        return self.norm(states + self.narrow(self.wide(states)))

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return super().get_config() | {
            "num_heads": self.num_heads,
            "inner": self.inner,
            "activation": self.activation,
            "epsilon": self.epsilon,
        }


def _freeze_with(whole: keras.layers.Layer, *parts: keras.layers.Layer) -> None:
    """A layer that is made frozen, as a loaded one is, does not by itself freeze the parts that it makes later."""
    for part in parts:
        part.trainable = whole.trainable
