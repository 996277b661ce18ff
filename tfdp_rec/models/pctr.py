"""Predicted click-through rate on Criteo's schema: 26 tables, 13 numbers, four wide layers, one logit.

  x = [E_1[b_1], ..., E_26[b_26], numbers],    width of E_f = floor(2 V_f^(1/4)),    logit = MLP(x)

With the bucket counts of `KAGGLE_BUCKETS` and hidden layers of 598 this is the model on which sparsity-preserving
private training was studied: 340 thousand rows, 10 million table weights.

Reference:
    C. Denison et al., Private Ad Modeling with DP-SGD, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.training.model import PrivateTraining

NUM_NUMERIC = 13

# How many buckets each category of the Kaggle data is given in the study of sparsity-preserving training.
KAGGLE_BUCKETS = (
    1472, 577, 82741, 18940, 305, 23, 1172, 633, 3, 9090, 5918, 64300, 3207,
    27, 1550, 44262, 10, 5485, 2161, 3, 56473, 17, 15, 27360, 104, 12934,
)  # fmt: skip


@keras.saving.register_keras_serializable(package="tfdp_rec")
class PCTR(SavedByArguments, PrivateTraining, keras.Model):
    """The click model. Input: a dict of `numeric` [batch, numbers] and `categorical` [batch, features].

    Compile with a loss on logits: `keras.losses.BinaryCrossentropy(from_logits=True)`.

    Args:
        buckets: Number of buckets of each categorical feature.
        hidden: Widths of the hidden layers.
        embedding_scale: Factor c in width = floor(c V^(1/4)).
        num_numeric: Number of numeric features.

    Raises:
        ValueError: for bucket counts or widths that are not positive.

    Example:
        >>> import numpy as np
        >>> model = PCTR(buckets=[100, 10], hidden=[8])
        >>> features = {"numeric": np.zeros([3, 13], "float32"), "categorical": np.zeros([3, 2], "int32")}
        >>> model(features).shape, model.embedding_widths
        (TensorShape([3, 1]), [6, 3])
    """

    def __init__(
        self,
        buckets: Sequence[int] = KAGGLE_BUCKETS,
        hidden: Sequence[int] = (598, 598, 598, 598),
        embedding_scale: float = 2.0,
        num_numeric: int = NUM_NUMERIC,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if not buckets or min(buckets) < 1 or (hidden and min(hidden) < 1):
            raise ValueError(f"bucket counts and hidden widths must be positive, got {buckets!r} and {hidden!r}.")
        self.buckets, self.hidden = list(buckets), list(hidden)
        self.embedding_scale, self.num_numeric = embedding_scale, num_numeric
        self.embedding_widths = [max(1, math.floor(embedding_scale * size**0.25)) for size in buckets]
        self.tables = [
            keras.layers.Embedding(size, width, name=f"table_{i}")
            for i, (size, width) in enumerate(zip(buckets, self.embedding_widths))
        ]
        self.mlp = [keras.layers.Dense(width, activation="relu", name=f"hidden_{i}") for i, width in enumerate(hidden)]
        self.logit = keras.layers.Dense(1, name="logit")
        self.build()

    def build(self, input_shape: Any = None) -> None:
        for table in self.tables:
            table.build()
        width = sum(self.embedding_widths) + self.num_numeric
        for layer in [*self.mlp, self.logit]:
            layer.build((None, width))
            width = layer.units

    @property
    def table_paths(self) -> list[str]:
        """The tables' variable paths, in the order of the features: the names by which rows are pre-selected."""
        return [table.embeddings.path for table in self.tables]

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        columns = tf.unstack(inputs["categorical"], num=len(self.tables), axis=1)
        x = tf.concat([table(ids) for table, ids in zip(self.tables, columns)] + [inputs["numeric"]], axis=1)
        for layer in self.mlp:
            x = layer(x)
        return self.logit(x)
