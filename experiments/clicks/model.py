"""The click models: a weight for each category, or a vector for each and dense layers on them.

For a row of categories i_1 ... i_F with numbers x

    logistic   logit = b + Σ_f w[i_f] + u · x
    deep       logit = MLP(v[i_1], ..., v[i_F], x)

The deep model has no weights beside its vectors: the noise of a weight goes into the logit as it is, that of a vector
through what the dense layers make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import tfdp_rec


class ClickModel(tfdp_rec.PrivateTraining, keras.Model):
    """Logits `[units, rows]` of batches {"ids": [units, rows, columns], "numbers": [units, rows, numbers]}.

    They are added to "offset" `[units, rows]`, if a batch has it.

    Args:
        rows: Number of rows of the table: all categories of all columns.
        columns: Number of categories of a row.
        numbers: Number of numbers of a row.
        width: Width of the vectors; 0 for the logistic model.
        hidden: Widths of the deep model's dense layers.
        bias: First value of the logit.
    """

    def __init__(
        self, rows: int, columns: int, numbers: int, width: int = 8, hidden: Sequence[int] = (32,), bias: float = 0.0
    ):
        super().__init__()
        self.width = width
        first = keras.initializers.RandomNormal(stddev=0.1) if width else "zeros"
        self.table = keras.layers.Embedding(rows, width or 1, embeddings_initializer=first, name="categories")
        self.table.build()
        self.dense = [keras.layers.Dense(size, activation="relu", name=f"hidden_{k}") for k, size in enumerate(hidden)]
        kernel = "glorot_uniform" if width else "zeros"
        begin = keras.initializers.Constant(bias)
        self.out = keras.layers.Dense(1, kernel_initializer=kernel, bias_initializer=begin, name="out")
        inputs = columns * width + numbers
        for layer in [*self.dense, self.out]:
            layer.build((None, None, inputs))
            inputs = layer.units
        self.built = True

    def call(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        ids, x = inputs["ids"], inputs["numbers"]
        rows = self.table(ids)
        if self.width:
            ends = tf.concat([tf.shape(ids)[:2], [ids.shape[2] * self.width]], axis=0)
            x = tf.concat([x, tf.reshape(rows, ends)], axis=-1)
        for layer in self.dense:
            x = layer(x)
        logit = self.out(x)[..., 0] + inputs.get("offset", 0.0)
        return logit if self.width else logit + tf.reduce_sum(rows[..., 0], axis=-1)

    def per_example_loss(self, data: Any, training: bool = True) -> tf.Tensor:
        """The mean of the cross-entropies of a unit's rows."""
        inputs, labels, there = data
        each = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=self(inputs, training=training))
        return tf.reduce_sum(there * each, axis=1) / tf.reduce_sum(there, axis=1)
