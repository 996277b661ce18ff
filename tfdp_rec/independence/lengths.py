"""Lengths of what an operation makes, by TensorFlow's own shape functions: from lengths that are known, not declared.

The static shape of a tensor may have been declared: `set_shape` is believed by TensorFlow, and checked by nothing. So a
reading takes no static shape for granted but those of the batch, which a step's signature checks, of constants and of
variables. Each operation is made once more, in a graph of its own, with inputs of the lengths that the reading has
found; what the shape function of the operation then tells is true of its outputs if those lengths are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Shape = tuple[int | None, ...] | None
_NOT_MADE_ANEW = ("Placeholder", "PlaceholderWithDefault", "TensorListGetItem", "TensorListStack", "TensorListPopBack")
"""Operations whose shape function repeats what their attributes or arguments declare."""


def lengths_of_outputs(operation: Any, shapes: Sequence[Shape], numbers: Sequence[Any]) -> tuple[Shape, ...]:
    """The shapes of an operation's outputs, None for one of which not even the rank is known.

    Args:
        operation: An operation of a graph.
        shapes: Shapes of its inputs.
        numbers: The whole numbers that its inputs hold, as nested tuples; None where they are not known.
    """
    declared = operation.type in _NOT_MADE_ANEW or any(
        attr.HasField("func") or attr.list.func for attr in operation.node_def.attr.values()
    )
    if declared:
        return (None,) * len(operation.outputs)
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(operation.node_def)
    for name in [name for name in node.attr if name.startswith("_")]:
        del node.attr[name]
    node.name = "operation"
    del node.input[:]
    node.device = ""
    node.input.extend(f"given_{n}" for n in range(len(shapes)))
    kinds = tuple(tensor.dtype for tensor in operation.inputs)
    return _inferred(node.SerializeToString(deterministic=True), kinds, tuple(shapes), tuple(numbers))


@functools.lru_cache(maxsize=1 << 14)
def _inferred(node: bytes, kinds: tuple[Any, ...], shapes: tuple[Shape, ...], numbers: tuple[Any, ...]) -> Any:
    if any(length is not None and length < 0 for shape in shapes for length in shape or ()):
        return ()  # it cannot run
    definition = tf.compat.v1.GraphDef()
    definition.versions.producer = tf.version.GRAPH_DEF_VERSION
    definition.node.add().ParseFromString(node)
    with tf.Graph().as_default() as graph:
        given = {}
        for n, (kind, shape, known) in enumerate(zip(kinds, shapes, numbers)):
            if known is None:
                given[f"given_{n}"] = tf.compat.v1.placeholder(kind, shape)
            else:
                given[f"given_{n}"] = tf.constant(np.asarray(known, kind.as_numpy_dtype))
        try:
            tf.graph_util.import_graph_def(definition, input_map=given, name="")
        except ValueError:  # it cannot run
            return ()
        made = graph.get_operation_by_name("operation").outputs
    return tuple(None if t.shape.rank is None else tuple(t.shape.as_list()) for t in made)
