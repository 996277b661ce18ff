"""Functions, loops, and the lists of tensors in loops.

A function is read with the values and lengths of its arguments, anew for each call. A loop must run on by a shared
condition, otherwise its outputs are mixed. It is read until a further turn changes no value of its variables. Values
only become less known, so this ends. Facts that differ from turn to turn are forgotten: an unknown length has a letter
of one reading of the body, which no other turn has.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdp_rec.independence.reading import At, Walk, rule
from tfdp_rec.independence.sizes import size
from tfdp_rec.independence.values import (
    ByExample,
    Lengths,
    ListOf,
    Mixed,
    Nothing,
    Shared,
    Sized,
    Value,
    join,
    join_lengths,
    without_numbers,
)
from tfdp_rec.keras_internals import function_graph

_TURNS = 20


@rule("PartitionedCall", "StatefulPartitionedCall", sizes=True, mixed=True, numbers=True, apart=True)
def call(at: At) -> list[Value]:
    """A function: its body is read with these arguments."""
    values, lengths = _body(at, at.attr("f").name, at.values, _all_lengths(at))
    return _given(at, values, lengths)


@rule("While", "StatelessWhile", sizes=True, mixed=True, numbers=True, apart=True)
def loop(at: At) -> list[Value]:
    """A loop: a value that holds before every turn holds after the last."""
    at.reading.turns += 1
    try:
        return _turns(at)
    finally:
        at.reading.turns -= 1


def _turns(at: At) -> list[Value]:
    known, lengths = list(at.values), _all_lengths(at)
    condition, body = at.attr("cond").name, at.attr("body").name
    for _ in range(_TURNS):
        at.reading.unwritten = False
        (decider,), _ = _body(at, condition, known, lengths)
        if not isinstance(decider, Shared):
            return [_undecided(at, decider)] * len(known)
        after, lengths_after = _body(at, body, known, lengths)
        wider = [join(a, b, at.op) for a, b in zip(known, after)]
        longer = [join_lengths(a, b) for a, b in zip(lengths, lengths_after)]
        if wider == known and longer == lengths:
            return [at.mixed("unknown")] * len(known) if at.reading.unwritten else _given(at, known, lengths)
        known, lengths = wider, longer
    return [at.mixed("branches")] * len(known)


def _undecided(at: At, decider: Value) -> Value:
    return decider if isinstance(decider, Mixed) else at.mixed("size" if isinstance(decider, Sized) else "decides")


def _all_lengths(at: At) -> list[Lengths | None]:
    return [at.sizes(number) for number in range(len(at.values))]


def _given(at: At, values: list[Value], lengths: Sequence[Lengths | None]) -> list[Value]:
    return [at.give(value, several, n) for n, (value, several) in enumerate(zip(values, lengths))]


def _body(
    at: At, name: str, values: Sequence[Value], lengths: Sequence[Lengths | None]
) -> tuple[list[Value], list[Lengths | None]]:
    graph = function_graph(at.walk.graph, name)
    walk = Walk(at.reading, graph)
    for tensor, value, several in zip(graph.inputs, values, lengths):
        walk.set(tensor, value, several)
    walk.read()
    return [walk.value(t) for t in graph.outputs], [walk.sizes(t) for t in graph.outputs]


# Lists of tensors.


@rule("TensorListReserve", "EmptyTensorList", sizes=True, mixed=True)
def empty_list(at: At) -> Value:
    """A list without written entries; its length must not depend on the number of examples."""
    if at.op.type == "TensorListReserve" and not isinstance(at.values[1], Shared):
        return Mixed(at.op, "size")
    return ListOf(Nothing(), written=at.op.type == "EmptyTensorList")


@rule("TensorListFromTensor", sizes=True)
def list_of_slices(at: At) -> Value:
    """Slices along the first axis."""
    value, sizes = at.values[0], at.sizes(0)
    each = None if sizes is None else sizes[1:]
    if isinstance(value, ByExample):
        return ListOf(value.at(value.axis - 1), each, True) if value.axis else at.mixed("mixes")
    return ListOf(Shared(), each, True) if isinstance(value, Shared) else at.mixed("size")


@rule("TensorListStack", sizes=True)
def stacked_list(at: At) -> Value:
    """The list as a tensor, its entries along a new first axis."""
    value = at.values[0]
    if not isinstance(value, ListOf):
        return at.mixed("unknown")
    element = value.element
    if isinstance(element, ByExample):
        count = int(at.attr("num_elements"))  # TensorFlow checks it
        lengths = None if value.lengths is None else [size(count) if count >= 0 else None, *value.lengths]
        return at.give(element.at(element.axis + 1), lengths)
    return Shared() if isinstance(element, (Shared, Nothing)) else at.mixed("branches")


@rule("TensorListGetItem", sizes=True)
def item(at: At) -> Value:
    """One entry; zeros if it was never written."""
    return _element(at, 0) if isinstance(at.values[1], Shared) else at.mixed("position")


def _element(at: At, output: int) -> Value:
    value = at.values[0]
    if not isinstance(value, ListOf):
        return at.mixed("unknown")
    if isinstance(value.element, Nothing):
        if not at.reading.turns:
            return at.mixed("unknown")
        at.reading.unwritten = True  # it may be written in a later turn
    return at.give(value.element, value.lengths, output)


@rule("TensorListSetItem", sizes=True)
def with_item(at: At) -> Value:
    """The list with one entry written."""
    if not isinstance(at.values[1], Shared):
        return at.mixed("position")
    return _with(at, 2)


@rule("TensorListPushBack", sizes=True, mixed=True)
def pushed(at: At) -> Value:
    """The list with one entry more."""
    return _with(at, 1)


def _with(at: At, number: int) -> Value:
    held, value = at.values[0], at.values[number]
    if not isinstance(held, ListOf):
        return held if isinstance(held, Mixed) else at.mixed("unknown")
    if not held.written:
        value = without_numbers(value)  # an entry that is not written is zeros
    return join(held, ListOf(value, at.sizes(number), held.written), at.op)


@rule("TensorListPopBack", sizes=True, numbers=True)
def popped(at: At) -> list[Value]:
    """The list without its last entry, and that entry, with the numbers that `join` found in all entries."""
    return [at.values[0], _element(at, 1)]


@rule("TensorListElementShape", sizes=True)
def shape_of_elements(at: At) -> Value:
    """The shape of what is in a list."""
    value = at.values[0]
    element = value.element if isinstance(value, ListOf) else None
    return Shared() if isinstance(element, (Shared, Nothing)) else Sized()
