"""What ids of a table must be, for a rule to keep examples apart by them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.demands import demand


def of_rows(ids: tf.Tensor, layer: keras.layers.Layer, table: keras.Variable) -> tf.Tensor:
    """`ids`, once they are known to be rows of the table: a GPU reads zeros for others, and says nothing.

    The clipping tells (example, id) pairs apart by one number, in which an id beyond the table would be a neighbour's.
    """
    message = f"Layer '{layer.name}' was given ids outside its table of {table.shape[0]} rows; map them into it first."
    with tf.control_dependencies(demand((ids >= 0) & (ids < table.shape[0]), message)):
        return tf.identity(ids)


def no_length(layer: keras.layers.Layer, given: Any) -> str:
    """Why what a layer is given is no tensor of a fixed length, or "" if it is one."""
    if not isinstance(given, (tf.RaggedTensor, tf.SparseTensor)):
        return ""
    return (
        f"Layer '{layer.name}' is given a {type(given).__name__}, whose rows no axis keeps apart; give it ids of one "
        "fixed length, padded with any id, and weights that are 0 for what is padded."
    )
