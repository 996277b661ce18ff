"""A small transformer encoder over token ids, for sentence classification.

  x_t = E[token_t] + P[t],    n blocks of  x + Attention(LN(x)),  x + MLP(LN(x)),    logits = W mean_t x_t

Token 0 is padding: it is neither attended to nor averaged. Only E is a table; positions, attention and the rest
are dense variables. A sentence reads each token's row once in the eyes of a mechanism that counts, however often the
token occurs.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.models.kg_entity import EncoderBlock
from tfdp_rec.training.model import PrivateTraining


@keras.saving.register_keras_serializable(package="experiments")
class TextClassifier(SavedByArguments, PrivateTraining, keras.Model):
    """The classifier. Input: token ids [batch, length], 0 for padding. Output: logits [batch, classes].

    Compile with `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`.

    Args:
        vocabulary_size: Number of token ids, padding included.
        max_length: Length of the longest sentence, in tokens.
        width: Width of the token vectors; a multiple of `heads`.
        heads: Number of attention heads.
        blocks: Number of transformer blocks.
        num_classes: Number of classes.

    Raises:
        ValueError: for a width that the heads do not divide.

    Example:
        >>> import numpy as np
        >>> model = TextClassifier(vocabulary_size=100, max_length=8, width=16, heads=2, blocks=1)
        >>> model(np.array([[5, 7, 5, 0]])).shape
        TensorShape([1, 2])
    """

    def __init__(
        self,
        vocabulary_size: int,
        max_length: int = 64,
        width: int = 64,
        heads: int = 4,
        blocks: int = 2,
        num_classes: int = 2,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads, got {width} and {heads}.")
        self.max_length, self.width = max_length, width
        self.tokens = keras.layers.Embedding(vocabulary_size, width, name="tokens")
        self.positions = _Positions(max_length, name="positions")
        self.encoders = [EncoderBlock(width, heads, 2 * width, name=f"block_{i}") for i in range(blocks)]
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.logits = keras.layers.Dense(num_classes, name="logits")
        self.build()

    def build(self, input_shape: Any = None) -> None:
        """Makes all variables; called by the constructor, since all shapes are known."""
        shape = (None, self.max_length, self.width)
        self.tokens.build()
        for layer in [self.positions, *self.encoders, self.norm]:
            layer.build(shape)
        self.logits.build((None, shape[-1]))

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        ids = tf.convert_to_tensor(inputs)
        real = tf.not_equal(ids, 0)
        x = self.positions(self.tokens(ids))
        for block in self.encoders:
            x = block(x, real)
        weights = tf.cast(real, x.dtype)[..., None]
        mean = tf.math.divide_no_nan(tf.reduce_sum(weights * self.norm(x), axis=1), tf.reduce_sum(weights, axis=1))
        return self.logits(mean)


class _Positions(keras.layers.Layer):
    """Adds a learnt vector to each position."""

    def __init__(self, max_length: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.max_length = max_length

    def build(self, input_shape: Any) -> None:
        self.vectors = self.add_weight(
            shape=(self.max_length, input_shape[-1]),
            initializer=keras.initializers.RandomNormal(stddev=0.02),
            name="vectors",
        )

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.convert_to_tensor(self.vectors)[None, : tf.shape(x)[1]]
