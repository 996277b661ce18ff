"""Data flow in a graph: the tensors and variables that depend on given values.

The reading in `independence/` says how the values of a loss depend on the batch. Data flow asks less of a larger graph:
whether a value depends on given others at all, through operations, called functions, branches, and variables that are
written and read again. Writes of this package's own step are clipped and noised, and are skipped (`ours`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import function_graph, resource_key
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.independence.reading import find_functions, is_ours, outermost
from tfdp_rec.core.sensitivity.independence.refusals import is_librarys_check, users_line

_READS = frozenset(
    """
    ReadVariableOp ResourceGather ResourceGatherNd VariableShape VarIsInitializedOp DisableCopyOnRead LookupTableFindV2
    LookupTableSizeV2 IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional WriteSummary WriteScalarSummary
    WriteHistogramSummary WriteImageSummary WriteRawProtoSummary
    """.split()
)
"""Operations that do not change their resource; summaries are among them, since like metrics they are not released."""
_KEEPS_NOTHING = frozenset(
    """
    RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal ParameterizedTruncatedNormal Multinomial
    RandomGamma RandomPoissonV2 RandomShuffle DeepCopy CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop
    CudnnRNNBackpropV2 CudnnRNNBackpropV3 DatasetToSingleElement TensorSliceDataset TextLineDataset
    """.split()
)
"""Operations that TensorFlow calls stateful, and of which nothing is left that a file or another program could hold."""
_OUT = {**dict.fromkeys(("PyFunc", "EagerPyFunc", "PyFuncStateless"), "Python code"), "Assert": "an assertion"}
"""Operations by which something leaves the graph; an assertion tells it by ending the training."""


class DataFlow:
    """The tensors that depend on some values of a graph, and `writes` of such: (operation, handle or None)."""

    def __init__(
        self, graph: Any, start: int, tensors: Iterable[Any] | None = (), variables: Iterable[Any] = ()
    ):
        self._reached = {id(tensor) for tensor in tensors or ()}
        self._variables = {resource_key(handle) for handle in variables}
        self.writes: list[tuple[Any, Any]] = []
        # `tensors` None: everything. A variable may be read before it is written: repeat until nothing is added.
        before = None
        while before != (len(self._reached), len(self._variables)):
            before = len(self._reached), len(self._variables)
            self.writes = []
            self._walk(graph, start, {}, tensors is None)

    def reaches(self, tensor: Any) -> bool:
        """Whether a tensor depends on the values."""
        return id(tensor) in self._reached

    def _walk(self, graph: Any, start: int, given: dict[int, Any], always: bool) -> None:
        """One pass over a graph; `always` if the values decide whether, or how often, it runs."""
        handles = {id(inner): outermost(tensor) for tensor, inner in getattr(graph, "captures", ())} | given
        for operation in graph.get_operations()[start:]:
            inputs, mine = list(operation.inputs), is_ours(operation)
            resources = [handles.get(id(t)) for t in inputs if t.dtype == tf.resource]
            reached = always or any(id(t) in self._reached for t in inputs)
            functions = [] if mine else _functions_of(graph, operation)
            for called, arguments in functions:
                self._call(operation, called, arguments, handles, always)
            if resources and operation.type in _READS:
                reached |= any(resource_key(handle) in self._variables for handle in resources)
            elif reached and not functions and not mine:
                self._note(operation, resources)
            if reached and (always or not functions):
                self._reached.update(id(t) for t in operation.outputs)

    def _call(self, operation: Any, called: Any, arguments: list[Any], handles: dict[int, Any], always: bool) -> None:
        """One pass over a called function, with the operation's arguments and outputs."""
        loops, branches = operation.type in _LOOPS, operation.type in _BRANCHES
        decide = arguments if loops else operation.inputs[:1] if branches else []
        always = always or any(id(t) in self._reached for t in decide)
        self._reached.update(id(inner) for inner, t in zip(called.inputs, arguments) if id(t) in self._reached)
        same = len(called.outputs) == len(operation.outputs)  # false for the condition of a loop
        if loops and same:  # the outputs of a turn are the inputs of the next
            self._reached.update(id(i) for i, o in zip(called.inputs, called.outputs) if id(o) in self._reached)
        given = {id(inner): handles.get(id(t), t) for inner, t in zip(called.inputs, arguments)}
        self._walk(called, 0, given, always)
        if same:
            self._reached.update(id(o) for o, t in zip(operation.outputs, called.outputs) if id(t) in self._reached)

    def _note(self, operation: Any, resources: list[Any]) -> None:
        """Notes a write, if the operation is one; its variable depends on the values from then on."""
        if is_write(operation):
            self.writes.append((operation, resources[0] if resources else None))
            self._variables.update(resource_key(handle) for handle in resources[:1] if handle is not None)


def is_write(operation: Any) -> bool:
    """Whether an operation may leave something behind in a variable, a file or elsewhere; screens are not looked at."""
    if operation.type == "PrintV2":
        return operation.get_attr("output_stream").startswith(b"file:")
    stays = operation.op_def.is_stateful and operation.type not in _READS | _KEEPS_NOTHING
    return (stays or operation.type in _OUT) and not is_librarys_check(operation)


def find_write(graph: Any, operations: Iterable[Any]) -> Any:
    """The first operation that may leave something behind, in the functions that are called too; None if none does."""
    for operation in operations:
        bodies = [function_graph(graph, name) for name in find_functions(operation)]
        found = (find_write(body, body.get_operations()) for body in bodies)
        write = next((each for each in found if each is not None), None) if bodies else operation
        if write is not None and (bodies or is_write(write)) and not is_ours(operation):
            return write
    return None


_LOOPS = ("While", "StatelessWhile")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


def _functions_of(graph: Any, operation: Any) -> list[tuple[Any, list[Any]]]:
    """(graph, arguments) of every function that an operation calls."""
    arguments = list(operation.inputs)[operation.type in _BRANCHES :]
    return [(function_graph(graph, name), arguments) for name in find_functions(operation)]


def refuse_writes(
    subject: str,
    graph: Any,
    start: int,
    tensors: Iterable[Any] | None,
    allowed: Iterable[Any],
    names: dict[Any, str],
) -> None:
    """Raises `NotPrivate` if values of the batch (`tensors`; None for all) are written to variables not `allowed`."""
    # Metrics may be written: they are never saved. Their contents are private, so they are followed like the batch.
    may = {resource_key(handle): handle for handle in allowed}
    for operation, handle in DataFlow(graph, start, tensors, may.values()).writes:
        if resource_key(handle) in may:
            continue
        name = names.get(resource_key(handle))
        what = _OUT.get(operation.type, f"'{name}'" if name else "a variable")
        line = users_line(operation) or operation.name
        raise NotPrivate(
            f"{subject} gives {what} something that was computed from the batch ({line}), past the clip and the "
            "noise, and it stays when training ends. Leave it out, or, for monitoring, store it in a "
            "keras.metrics.Metric of the model, which is never saved."
        )


def refuse_metrics_read(graph: Any, start: int, outputs: Iterable[Any], metrics: Iterable[Any]) -> None:
    """Raises `NotPrivate` if predictions depend on metrics, which count training data."""
    flow = DataFlow(graph, start, variables=metrics)
    if any(flow.reaches(tensor) for tensor in outputs):
        raise NotPrivate(
            "The model's predictions depend on one of its metrics, whose contents were counted from training data "
            "without clipping or noise. Predict without it; store public or released statistics in a weight with "
            "trainable=False."
        )


def refuse_data_read(
    subject: str, function: Callable[..., Any], given: Sequence[Any], allowed: Iterable[Any] = ()
) -> None:
    """Raises `NotPrivate` if a function depends on more than tensors of `given` specs and `allowed` variables."""
    graph: Any = tf.function(function, autograph=False).get_concrete_function(*given).graph
    captured = [(outermost(tensor), inner) for tensor, inner in graph.captures]
    # Apart from variables and constants, what it captures is a tensor of the step around it. Of variables the allowed
    # ones are named, not the metrics: a metric may stand anywhere, and one given to compile is in no list at first.
    constants = tf.__internal__.EagerTensor
    step = [inner for t, inner in captured if t.dtype != tf.resource and not isinstance(t, constants)]
    may = {resource_key(handle) for handle in allowed}
    others = [t for t, _ in captured if t.dtype == tf.resource and resource_key(t) not in may]
    flow = DataFlow(graph, 0, step, others)
    if flow.writes or any(flow.reaches(tensor) for tensor in graph.outputs):
        raise NotPrivate(
            f"{subject} depends on the batch, on a metric or on another variable that may hold data, and moves the "
            "weights without clipping or noise. Compute it from the weight itself, the step's number and constants."
        )
