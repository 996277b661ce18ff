"""DLRM: click prediction from dense features and many embedding tables.

A bottom tower turns the dense features into a vector z_0 of the tables' width d; table i gives z_i, the sum of the
rows that its bag of P ids names. With T tables the interaction is every inner product of two of these vectors,

    x = [z_0, z_i · z_j for 0 ≤ j < i ≤ T],

and the top tower turns x into a logit. The interaction has no weights.

`DLRM(table_sizes)` is MLPerf's configuration at whatever table sizes fit.

Reference:
    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019;
    MLPerf Training 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.training.model import PrivateTraining


@keras.saving.register_keras_serializable(package="tfdp_rec")
class DotInteraction(keras.layers.Layer):
    """The inner products of all pairs among several vectors of each example, `[batch, n (n - 1) / 2]`."""

    def call(self, vectors: Sequence[tf.Tensor]) -> tf.Tensor:
        stacked = tf.stack(vectors, axis=1)
        products = tf.matmul(stacked, stacked, transpose_b=True)
        count = len(vectors)
        row, column = np.tril_indices(count, -1)
        return tf.gather(tf.reshape(products, [-1, count * count]), row * count + column, axis=1)


class DLRMLayers(SavedByArguments):
    """The layers and the forward pass of DLRM; `DLRM` adds a Keras model that can train privately."""

    embedding_layer: type[keras.layers.Embedding] = keras.layers.Embedding

    def __init__(
        self,
        table_sizes: Sequence[int],
        width: int = 128,
        dense_features: int = 13,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (1024, 1024, 512, 256),
        pooling: int = 1,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        sizes = {"dense_features": [dense_features], "bottom": bottom, "top": top, "pooling": [pooling]}
        _refuse_bad_sizes({"table_sizes": table_sizes, "width": [width], **sizes})
        self.tables = [_table(self.embedding_layer, i, size, width) for i, size in enumerate(table_sizes)]
        self.bottom = _tower("bottom", dense_features, (*bottom, width), "relu")
        self.interaction = DotInteraction(name="interaction")
        vectors = len(table_sizes) + 1
        self.top = _tower("top", width + vectors * (vectors - 1) // 2, top, "relu")
        self.logit = _dense("logit", top[-1], 1, "sigmoid")
        self.built = True

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        """The probability of a click, `[batch, 1]`."""
        vector = tf.cast(inputs["dense"], self.compute_dtype)  # type: ignore[attr-defined]
        for layer in self.bottom:
            vector = layer(vector)
        # A GPU takes a tensor of float64 apart at once, of whole numbers a column at a time, of int32 on its host.
        columns = tf.unstack(tf.bitcast(tf.cast(inputs["ids"], tf.int64), tf.float64), len(self.tables), axis=1)
        several = (tf.bitcast(column, tf.int64) for column in columns)
        vectors = [vector, *(self._pool(table, ids) for table, ids in zip(self.tables, several, strict=True))]
        x = tf.concat([vector, self.interaction(vectors)], axis=1)
        for layer in self.top:
            x = layer(x)
        return self.logit(x)

    @staticmethod
    def _pool(table: keras.layers.Embedding, ids: tf.Tensor) -> tf.Tensor:
        rows = table(ids)
        return rows if ids.shape.rank == 1 else tf.reduce_sum(rows, axis=1)


@keras.saving.register_keras_serializable(package="tfdp_rec")
class DLRM(DLRMLayers, PrivateTraining, keras.Model):
    """DLRM; MLPerf's configuration by default.

    A batch's inputs are a dict of `dense` `[batch, dense_features]` and `ids` `[batch, tables]`, or
    `[batch, tables, pooling]` for bags. Compile with `loss="binary_crossentropy"`.

    Args:
        table_sizes: Number of rows of each table.
        width: Width of the tables' rows.
        dense_features: Number of dense features.
        bottom: Units of the bottom tower's layers before the last, which has `width`.
        top: Units of the top tower's layers before the last, which has one.
        pooling: Number of ids in each bag, whose rows are summed.

    Raises:
        ValueError: for sizes that are not positive.

    Example:
        >>> import tensorflow as tf, tfdp_rec
        >>> model = DLRM([10, 20], width=4, dense_features=3, bottom=[8], top=[8])
        >>> optimizer = tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=2)
        >>> model.compile(optimizer, loss="binary_crossentropy")
        >>> model({"dense": tf.ones([2, 3]), "ids": tf.constant([[1, 2], [9, 19]])}).shape
        TensorShape([2, 1])
    """


def _dense(name: str, inputs: int, units: int, activation: str) -> keras.layers.Dense:
    layer = keras.layers.Dense(units, activation=activation, name=name)
    layer.build((None, inputs))
    return layer


def _tower(name: str, inputs: int, units: Sequence[int], activation: str) -> list[keras.layers.Dense]:
    sizes = (inputs, *units)
    return [_dense(f"{name}_{i}", a, b, activation) for i, (a, b) in enumerate(zip(sizes, sizes[1:]))]


def _table(kind: type[keras.layers.Embedding], number: int, rows: int, width: int) -> keras.layers.Embedding:
    bound = float(1 / np.sqrt(rows))
    initializer = keras.initializers.RandomUniform(-bound, bound)
    layer = kind(rows, width, embeddings_initializer=initializer, name=f"table_{number}")
    layer.build()
    return layer


def _refuse_bad_sizes(sizes: Mapping[str, Sequence[int]]) -> None:
    if not sizes["table_sizes"] or not sizes["top"]:
        raise ValueError("table_sizes and top must not be empty.")
    for name, values in sizes.items():
        if any(int(value) != value or value < 1 for value in values):
            raise ValueError(f"{name} must be positive, got {values}.")
