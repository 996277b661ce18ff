"""What values of a graph have a say in: which tensors, and which variables that the graph writes.

The reading in `independence/` is of a loss, and says how a value depends on the batch. Here it is asked of a whole
graph, whatever is in it, only whether a value depends on some others at all: through any operation, any function that
is called, a branch that is taken, and a variable that is written and read again. What this package's own step writes is
clipped and noised, and is passed over (`ours`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdp_rec.independence.refusals import users_line
from tfdp_rec.keras_internals import function_graph
from tfdp_rec.refused import NotPrivate

_OURS = "_tfdp_rec_ours"
_READS = frozenset(
    """
    ReadVariableOp ResourceGather ResourceGatherNd VariableShape VarIsInitializedOp DisableCopyOnRead LookupTableFindV2
    LookupTableSizeV2 IteratorGetNext IteratorGetNextSync IteratorGetNextAsOptional WriteSummary WriteScalarSummary
    WriteHistogramSummary WriteImageSummary WriteRawProtoSummary RngReadAndSkip StatefulUniformInt
    """.split()
)
"""Operations on a resource that leave it as it was; summaries are for the eyes of those who train, as metrics are."""
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """What is made within is this package's own step, whose writes are clipped and noised."""
    if tf.executing_eagerly():
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    yield
    for operation in graph.get_operations()[start:]:
        setattr(operation, _OURS, True)


class DataFlow:
    """Where some values of a graph go.

    Args:
        graph: a `FuncGraph`.
        start: the number of the operation to begin with.
        tensors: of the graph, whose influence it is; None for everything's.
        variables: handles of variables whose contents have the same.

    Attributes:
        writes: (operation, handle) of every write of a value that they have a say in; the handle is None if unknown.
    """

    def __init__(
        self, graph: Any, start: int, tensors: Iterable[Any] | None = (), variables: Iterable[Any] = ()
    ):
        self._reached = {id(tensor) for tensor in tensors or ()}
        self._variables = {id(handle) for handle in variables}
        self.writes: list[tuple[Any, Any]] = []
        before = None
        while before != (len(self._reached), len(self._variables)):  # a variable may be read ahead of its write
            before = len(self._reached), len(self._variables)
            self.writes = []
            self._walk(graph, start, {}, tensors is None)

    def reaches(self, tensor: Any) -> bool:
        """Whether the values have a say in a tensor."""
        return id(tensor) in self._reached

    def _walk(self, graph: Any, start: int, given: dict[int, Any], always: bool) -> None:
        """One pass over a graph; `always` where it runs, or how often, is itself decided by the values."""
        handles = {id(inner): _outermost(tensor) for tensor, inner in getattr(graph, "captures", ())} | given
        for operation in graph.get_operations()[start:]:
            inputs, mine = list(operation.inputs), getattr(operation, _OURS, False)
            resources = [handles.get(id(t)) for t in inputs if t.dtype == tf.resource]
            reached = always or any(id(t) in self._reached for t in inputs)
            functions = [] if mine else _functions_of(graph, operation)
            for called, arguments in functions:
                self._call(operation, called, arguments, handles, always)
            if resources and operation.type in _READS:
                reached |= any(id(handle) in self._variables for handle in resources)
            elif reached and not functions and not mine:
                self._note(operation, resources)
            if reached and (always or not functions):
                self._reached.update(id(t) for t in operation.outputs)

    def _call(self, operation: Any, called: Any, arguments: list[Any], handles: dict[int, Any], always: bool) -> None:
        """A function that an operation calls: what it writes, and what of its outputs is reached."""
        loops, branches = operation.type in _LOOPS, operation.type in _BRANCHES
        decide = arguments if loops else operation.inputs[:1] if branches else []
        always = always or any(id(t) in self._reached for t in decide)
        self._reached.update(id(inner) for inner, t in zip(called.inputs, arguments) if id(t) in self._reached)
        same = len(called.outputs) == len(operation.outputs)  # not so the condition of a loop
        if loops and same:  # what a turn gives, the next is given
            self._reached.update(id(i) for i, o in zip(called.inputs, called.outputs) if id(o) in self._reached)
        given = {id(inner): handles.get(id(t), t) for inner, t in zip(called.inputs, arguments)}
        self._walk(called, 0, given, always)
        if same:
            self._reached.update(id(o) for o, t in zip(operation.outputs, called.outputs) if id(t) in self._reached)

    def _note(self, operation: Any, resources: list[Any]) -> None:
        """A write, if it is one; its variable then holds what the values had a say in."""
        if operation.type in _PYTHON:
            self.writes.append((operation, None))
        elif resources and operation.op_def.is_stateful:
            self.writes.append((operation, resources[0]))
            self._variables.update(id(handle) for handle in resources[:1] if handle is not None)


_LOOPS = ("While", "StatelessWhile")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")


def _functions_of(graph: Any, operation: Any) -> list[tuple[Any, list[Any]]]:
    """(graph, arguments) of every function that an operation calls."""
    several = [one for value in operation.node_def.attr.values() for one in (value.func, *value.list.func)]
    arguments = list(operation.inputs)[operation.type in _BRANCHES :]
    return [(function_graph(graph, one.name), arguments) for one in several if one.name]


def _outermost(tensor: Any) -> Any:
    """The resource that a placeholder stands for, through however many graphs."""
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        outside = {id(inner): outer for outer, inner in getattr(tensor.graph, "captures", ())}
        if id(tensor) not in outside:
            return tensor
        tensor = outside[id(tensor)]
    return tensor


def refuse_writes(
    subject: str,
    graph: Any,
    start: int,
    tensors: Iterable[Any] | None,
    allowed: Iterable[Any],
    names: dict[int, str],
) -> None:
    """Refuses a train step that keeps something of its batch past the clip and the noise.

    Args:
        subject: what is read, for the sentence.
        graph: that it is in.
        start: the number of its first operation.
        tensors: of the batch; None if nothing may be written at all.
        allowed: handles of the variables of metrics, which may keep what they are given and are never saved.
        names: id of a handle -> the variable's path.

    Raises:
        NotPrivate: with the variable and the line that writes it.
    """
    may = {id(handle): handle for handle in allowed}
    for operation, handle in DataFlow(graph, start, tensors, may.values()).writes:
        if id(handle) in may:
            continue
        name = names.get(id(handle))
        what = "Python code" if operation.type in _PYTHON else f"'{name}'" if name else "a variable"
        line = users_line(operation) or operation.name
        raise NotPrivate(
            f"{subject} gives {what} something that was computed from the batch ({line}), past the clip and the "
            "noise, and it stays when training ends. Leave it out; or, for your eyes alone, keep it in a "
            "keras.metrics.Metric of the model, which no file holds."
        )


def refuse_metrics_read(graph: Any, start: int, outputs: Iterable[Any], metrics: Iterable[Any]) -> None:
    """Refuses predictions that depend on what metrics counted from training data.

    Args:
        graph: in which they are made.
        start: the number of the first operation of theirs.
        outputs: the predictions.
        metrics: handles of the variables of metrics.

    Raises:
        NotPrivate: with the way out.
    """
    influence = DataFlow(graph, start, variables=metrics)
    if any(influence.reaches(tensor) for tensor in outputs):
        raise NotPrivate(
            "What the model predicts depends on one of its metrics, which holds what was counted from training data "
            "without clipping or noise. Predict without it; a public or released statistic may stand in a weight with "
            "trainable=False."
        )
