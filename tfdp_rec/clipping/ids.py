"""What ids of a table must be, for a rule to keep examples apart by them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.demands import demand


def of_rows(ids: tf.Tensor, layer: keras.layers.Layer, table: keras.Variable) -> tf.Tensor:
    """`ids`, and an error if one is not a row of the table: a GPU reads zeros for such an id, and says nothing.

    The clipping tells (example, id) pairs apart by one number, in which an id beyond the table would be a neighbour's.
    So what goes on is row 0 in its place, which concerns the example alone that gave the id.
    """
    known = (ids >= 0) & (ids < table.shape[0])
    message = f"Layer '{layer.name}' was given ids outside its table of {table.shape[0]} rows; map them into it first."
    with tf.control_dependencies(demand(known, message)):
        return tf.where(known, ids, tf.constant(0, ids.dtype))


def no_length(layer: keras.layers.Layer, given: Any) -> str:
    """Why what a layer is given is no tensor of a fixed length, or "" if it is one."""
    if not isinstance(given, (tf.RaggedTensor, tf.SparseTensor)):
        return ""
    return (
        f"Layer '{layer.name}' is given a {type(given).__name__}, whose rows no axis keeps apart; give it ids of one "
        "fixed length, padded with any id, and weights that are 0 for what is padded."
    )
