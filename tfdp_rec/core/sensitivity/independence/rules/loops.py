"""Functions, loops, and the lists of tensors in loops.

A function is read with the values and lengths of its arguments, anew for each call. A loop must run on by a shared
condition, otherwise its outputs are mixed. It is read until a further turn changes no value of its variables. Values
only become less known, so this ends. Facts that differ from turn to turn are forgotten: an unknown length has a letter
of one reading of the body, which no other turn has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdp_rec.core.ground.keras_internals import function_graph
from tfdp_rec.core.sensitivity.independence.reading import At, Settled, Walk, rule
from tfdp_rec.core.sensitivity.independence.sizes import SizeArray, size
from tfdp_rec.core.sensitivity.independence.values import (
    ByExample,
    Handle,
    Lengths,
    ListOf,
    Mixed,
    Nothing,
    Shared,
    Sized,
    Value,
    forget_numbers,
    join,
    join_lengths,
    value_of_numbers,
)

_TURNS = 20


@rule("PartitionedCall", "StatefulPartitionedCall", sizes=True, mixed=True, numbers=True, apart=True)
def call(at: At) -> list[Value]:
    """A function: its body is read with these arguments."""
    values, lengths = _body(at, at.attr("f").name, at.values, _all_lengths(at))
    return _give_all(at, values, lengths)


@rule("While", "StatelessWhile", sizes=True, mixed=True, numbers=True, apart=True)
def loop(at: At) -> list[Value]:
    """A loop: a value that holds before every turn holds after the last."""
    outer = at.reading.unwritten
    at.reading.turns += 1
    try:
        return _turns(at)
    finally:
        at.reading.turns -= 1
        at.reading.unwritten = outer


def _turns(at: At) -> list[Value]:
    known, lengths = list(at.values), _all_lengths(at)
    condition, body = at.attr("cond").name, at.attr("body").name
    for _ in range(_TURNS):
        at.reading.unwritten = False
        (decider,), _ = _body(at, condition, known, lengths)
        if not isinstance(decider, Shared):
            why = _explain_decider(at, decider)
            # The body is read for what it writes and does, which is refused whatever decides about its turns.
            _body(at, body, [value if isinstance(value, Handle) else why for value in known], lengths)
            return [why] * len(known)
        after, lengths_after = _body(at, body, known, lengths)
        wider = [join(a, b, at.op) for a, b in zip(known, after)]
        longer = [join_lengths(a, b) for a, b in zip(lengths, lengths_after)]
        if wider == known and longer == lengths:
            return [at.mixed("unknown")] * len(known) if at.reading.unwritten else _give_all(at, known, lengths)
        known, lengths = wider, longer
    return [at.mixed("branches")] * len(known)


def _explain_decider(at: At, decider: Value) -> Value:
    return decider if isinstance(decider, Mixed) else at.mixed("size" if isinstance(decider, Sized) else "decides")


def _all_lengths(at: At) -> list[Lengths | None]:
    return [at.sizes(number) for number in range(len(at.values))]


def _give_all(at: At, values: list[Value], lengths: Sequence[Lengths | None]) -> list[Value]:
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


# Lists of tensors. An entry that was never written is zeros, of the shape that the list was made with and that is asked
# for when it is read. So no data may decide either, and both must fit the lengths of what is written.


@rule("TensorListReserve", sizes=True, arguments=(0, 1))
def reserve_list(at: At) -> Value:
    """A list without written entries; its length must not depend on the number of examples."""
    if not isinstance(at.values[1], Shared):
        return at.mixed("size")
    return ListOf(Nothing(), shape=at.numbers(0))


@rule("EmptyTensorList", sizes=True, arguments=(0, 1))
def empty_list(at: At) -> Value:
    """A list without entries."""
    return ListOf(Nothing(), written=True, shape=at.numbers(0))


@rule("TensorListFromTensor", sizes=True, arguments=(1,))
def list_of_slices(at: At) -> Value:
    """Slices along the first axis."""
    value, sizes = at.values[0], at.sizes(0)
    each = None if sizes is None else sizes[1:]
    if isinstance(value, ByExample) and value.axis:
        return ListOf(value.move_to(value.axis - 1), each, True, at.numbers(1))
    return ListOf(Shared(), each, True, at.numbers(1)) if isinstance(value, Shared) else at.mixed()


@rule("TensorListStack", sizes=True, arguments=(1,))
def stack_list(at: At) -> Value:
    """The list as a tensor, its entries along a new first axis."""
    element, lengths, shared = _entry(at, 1)
    if isinstance(element, ByExample):
        count = int(at.attr("num_elements"))  # TensorFlow checks it
        first = size(count) if count >= 0 else None
        return at.give(element.move_to(element.axis + 1), None if lengths is None else [first, *lengths])
    return Shared() if isinstance(element, Shared) or shared else at.mixed("branches")


@rule("TensorListGetItem", sizes=True, arguments=(1, 2))
def item(at: At) -> Value:
    """One entry; zeros if it was never written."""
    if not isinstance(at.values[1], Shared):
        return at.mixed("size")
    return _one_entry(at, 2, 0)


@rule("TensorListPopBack", sizes=True, numbers=True, arguments=(1,))
def pop(at: At) -> list[Value]:
    """The list without its last entry, and that entry, with the numbers that `join` found in all entries."""
    return [at.values[0], _one_entry(at, 1, 1)]


def _one_entry(at: At, asked: int, output: int) -> Value:
    element, lengths, _ = _entry(at, asked)
    if isinstance(element, Nothing):
        if not at.reading.turns:
            return at.mixed("unknown")
        at.reading.unwritten = True  # it may be written in a later turn
    return at.give(element, lengths, output)


def _entry(at: At, asked: int) -> tuple[Value, Lengths | None, bool]:
    """The value and lengths of a list's entries, and whether nothing is written and zeros are of a shared shape."""
    held = at.values[0]
    if not isinstance(held, ListOf):
        raise Settled(at.mixed("unknown"))
    element, lengths, shapes = held.element, held.lengths, (held.shape, at.numbers(asked))
    shared = not any(shape is None or shape.has_batch for shape in shapes)
    if isinstance(element, Nothing) or held.written or all(_fits(shape, lengths) for shape in shapes):
        return element, lengths, shared and isinstance(element, Nothing)
    if isinstance(element, Shared) and shared:
        return element, None, False
    raise Settled(at.mixed("unknown"))


def _fits(shape: SizeArray | None, lengths: Lengths | None) -> bool:
    """Whether zeros of a shape, with -1 for any length, can have no other lengths than these."""
    if shape is None or shape.array.ndim == 0:
        return shape is not None
    known = lengths is not None and len(shape.sizes) == len(lengths)
    return known and all(asked in (size(-1), length) for asked, length in zip(shape.sizes, lengths or ()))


@rule("TensorListSetItem", sizes=True, numbers=True, arguments=(1,))
def set_item(at: At) -> Value:
    """The list with one entry written; beyond its end, if it may grow, with unwritten ones before that."""
    held = at.values[0]
    if isinstance(held, ListOf) and at.attr("resize_if_index_out_of_bounds"):
        held = dataclasses.replace(held, written=False)
    return _write_entry(at, held, 2) if isinstance(at.values[1], Shared) else at.mixed("size")


@rule("TensorListPushBack", sizes=True, mixed=True, numbers=True)
def push(at: At) -> Value:
    """The list with one entry more."""
    return _write_entry(at, at.values[0], 1)


def _write_entry(at: At, held: Value, number: int) -> Value:
    value = at.values[number]
    if not isinstance(held, ListOf):
        return held if isinstance(held, Mixed) else at.mixed("unknown")
    if not held.written:
        value = forget_numbers(value)  # an entry that is not written is zeros
    return join(held, ListOf(value, at.sizes(number), held.written, held.shape), at.op)


@rule("TensorListElementShape", sizes=True, numbers=True)
def shape_of_elements(at: At) -> Value:
    """The shape that a list was made with."""
    held = at.values[0]
    if not isinstance(held, ListOf):
        return at.mixed("unknown")
    return Sized() if held.shape is None else value_of_numbers(held.shape)
