"""The graph of a bundle, as the phone runs it: read first, so that it can remember nothing.

A bundle is the word of a server. A graph with a variable, a file, a random state or a Python function could carry one
answer's clicks into a later answer, which pays for other clicks. So there is a list of what a graph may be made of, the
operations of our exported user encoders, and all else is refused: no functions, no loops, no resources. What is left is
a function of the window alone. Its sizes are known before it runs, so the memory that it takes reveals nothing either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Encoder = Callable[[NDArray[np.float32], NDArray[np.bool_]], NDArray[np.float32]]

OPERATIONS = frozenset(
    "AddV2 BatchMatMulV2 BiasAdd Const Einsum ExpandDims Fill Identity LogicalAnd MatMul Minimum Mul Placeholder "
    "RealDiv Reshape SelectV2 Softmax Sqrt Square StridedSlice Sum Tanh Transpose".split()
)
LITE_OPERATIONS = frozenset(
    "ADD BATCH_MATMUL EXPAND_DIMS FULLY_CONNECTED LOGICAL_AND MINIMUM MUL RESHAPE RSQRT SELECT_V2 SOFTMAX SQUARE "
    "STRIDED_SLICE SUM TANH TRANSPOSE".split()
)
MOST_NUMBERS = 100_000_000


def encoder(content: bytes, length: int, width: int, num_basis: int) -> Encoder:
    """The attention of a TensorFlow graph: vectors [1, H, d] and mask [1, H] in, attention [1, B] out."""
    import tensorflow as tf

    graph = tf.compat.v1.GraphDef()
    try:
        graph.ParseFromString(content)
    except Exception as problem:
        raise ValueError("The bundle's graph cannot be read: export the bundle anew.") from problem
    for node in graph.node:
        node.device = ""
        for name in [name for name in node.attr if name.startswith("_")]:
            del node.attr[name]  # hints to TensorFlow's optimizers, kernels and placers
    _refuse_operations({node.op for node in graph.node} | {"a function" for _ in graph.library.function}, OPERATIONS)
    try:
        wrapped = tf.compat.v1.wrap_function(lambda: tf.compat.v1.import_graph_def(graph, name=""), [])
        run = wrapped.prune(["vectors:0", "mask:0"], ["attention:0"])
    except Exception as problem:
        raise ValueError("The bundle's graph is not that of an attention: export the bundle anew.") from problem
    tensors = [tensor for operation in wrapped.graph.get_operations() for tensor in operation.outputs]
    _refuse_sizes([tuple(t.shape) if t.shape.rank is not None else (None,) for t in tensors])
    found = [tuple(tensor.shape) for tensor in (*run.inputs, *run.outputs)]
    types = [tensor.dtype for tensor in (*run.inputs, *run.outputs)]
    _refuse_other(found, types == [tf.float32, tf.bool, tf.float32], length, width, num_basis)
    return lambda vectors, mask: run(tf.constant(vectors), tf.constant(mask))[0].numpy()


def lite_encoder(content: bytes, length: int, width: int, num_basis: int) -> Encoder:
    """The same of a TensorFlow Lite file."""
    import tensorflow as tf

    from tfdp_rec.core.ground.keras_internals import lite_model

    try:
        model, used = lite_model(content)
        _refuse_operations(used, LITE_OPERATIONS)  # none of them calls another subgraph
        _refuse_unwritten(model)
        tensors = model.subgraphs[0].tensors
        _refuse_sizes([tuple(s) for t in tensors for s in (t.shape, t.shapeSignature) if s is not None])
        # Without delegates, which would leave the sizes that the file claims where others are computed.
        kernels = tf.lite.experimental.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        interpreter = tf.lite.Interpreter(model_content=content, experimental_op_resolver_type=kernels)
        interpreter.allocate_tensors()
    except _Refused:
        raise
    except Exception as problem:
        raise ValueError("The bundle's TensorFlow Lite file cannot be read: export the bundle anew.") from problem
    _refuse_sizes([tuple(tensor["shape"]) for tensor in interpreter.get_tensor_details()])
    ends = [*interpreter.get_input_details(), *interpreter.get_output_details()]
    types = [end["dtype"] for end in ends] == [np.float32, np.bool_, np.float32]
    _refuse_other([tuple(end["shape"]) for end in ends], types, length, width, num_basis)

    def run(vectors: NDArray[np.float32], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        for end, value in zip(ends, (vectors, mask)):
            interpreter.set_tensor(end["index"], value)
        interpreter.invoke()
        return interpreter.get_tensor(ends[2]["index"])

    return run


class _Refused(ValueError):
    pass


def _refuse_unwritten(model: Any) -> None:
    """Refuses a TensorFlow Lite model unless each tensor is written once in a run, before it is read."""
    # Otherwise an operation reads what an earlier run, or any other use of the memory, has left there.
    graph = model.subgraphs[0]
    contents = [model.buffers[tensor.buffer].data for tensor in graph.tensors]
    written = {i for i, content in enumerate(contents) if content is not None and len(content)} | set(graph.inputs)
    operations = [(set(operation.inputs) - {-1}, set(operation.outputs)) for operation in graph.operators]
    for reads, writes in [*operations, (set(graph.outputs), set[int]())]:  # -1: an input that is left out
        if not reads <= written or writes & written:
            _refuse_operations({"tensors that are read before they are written, or written twice"}, LITE_OPERATIONS)
        written |= writes


def _refuse_operations(found: Iterable[str], allowed: frozenset[str]) -> None:
    other = sorted(set(found) - allowed)
    if other:
        raise _Refused(
            f"The bundle's graph holds {', '.join(other[:5])}, which a phone does not run: what is not on its list may "
            "remember what it has seen, or fail for some clicks. Export a user encoder without; the list is in "
            "docs/federated.md."
        )


def _refuse_sizes(shapes: list[tuple[Any, ...]]) -> None:
    unknown = any(size is None or size < 0 for shape in shapes for size in shape)
    if unknown or sum(math.prod(map(int, shape)) for shape in shapes) > MOST_NUMBERS:
        raise _Refused(
            f"The bundle's graph has tensors of unknown size, or of more than {MOST_NUMBERS:,} numbers together: what "
            "a phone computes must fit whatever was clicked. Export a smaller user encoder of fixed shapes."
        )


def _refuse_other(found: list[tuple[Any, ...]], typed: bool, length: int, width: int, num_basis: int) -> None:
    if found != [(1, length, width), (1, length), (1, num_basis)] or not typed:
        raise _Refused(
            f"The bundle's graph is of other sizes than its settings (window {length}, vectors of {width}, {num_basis} "
            "basis vectors): export the bundle anew."
        )
