"""Functions, branches and loops, and the lists of tensors that loops keep.

A function is read with the values of its arguments. A branch is taken, and a loop runs on, by something shared, or
nothing can be said of the outcome; what comes out of two branches is both. A loop is read until a further turn changes
nothing of what is known of its variables: they only ever become less known, so that this ends.
"""

from __future__ import annotations

from tfdp_rec.clipping.independence.reading import At, Walk, rule
from tfdp_rec.clipping.independence.rules.shapes import of_shape
from tfdp_rec.clipping.independence.sizes import Numbers, Size, letter
from tfdp_rec.clipping.independence.values import (
    ByExample,
    Handle,
    ListOf,
    Mixed,
    Nothing,
    Seed,
    Shared,
    Sized,
    Value,
    join,
)
from tfdp_rec.keras_internals import function_graph

_TURNS = 20


@rule("PartitionedCall", "StatefulPartitionedCall", places=True, sizes=True, mixed=True)
def call(at: At) -> list[Value]:
    """A function's body, with these arguments."""
    return _body(at, at.attr("f").name, at.values, [at.sizes(n) for n in range(len(at.values))])


@rule("If", "StatelessIf", places=True, sizes=True, mixed=True)
def branch(at: At) -> list[Value]:
    """Either of two."""
    return _either(at, [at.attr("then_branch").name, at.attr("else_branch").name])


@rule("Case", "StatelessCase", places=True, sizes=True, mixed=True)
def case(at: At) -> list[Value]:
    """One of several."""
    return _either(at, [b.name for b in at.attr("branches")])


def _either(at: At, names: list[str]) -> list[Value]:
    sizes = [at.sizes(n) for n in range(1, len(at.values))]
    found = [_body(at, name, at.values[1:], sizes) for name in names]
    if not isinstance(at.values[0], Shared):
        return [_undecided(at, at.values[0])] * len(at.op.outputs)
    outcome = list(found[0])
    for other in found[1:]:
        outcome = [join(a, b, at.op) for a, b in zip(outcome, other)]
    return outcome


def _undecided(at: At, decider: Value) -> Value:
    return decider if isinstance(decider, Mixed) else at.mixed("size" if isinstance(decider, Sized) else "decides")


@rule("While", "StatelessWhile", places=True, sizes=True, mixed=True)
def loop(at: At) -> list[Value]:
    """The same again and again."""
    at.reading.turns += 1
    try:
        return _turns(at)
    finally:
        at.reading.turns -= 1


def _turns(at: At) -> list[Value]:
    known = list(at.values)
    names = at.attr("cond").name, at.attr("body").name
    for _ in range(_TURNS):
        at.reading.unwritten = False
        lengths = _lengths(at, names[1], known)
        (decider,) = _body(at, names[0], known, lengths)
        if not isinstance(decider, Shared):
            return [_undecided(at, decider)] * len(known)
        after = _body(at, names[1], known, lengths)
        wider = [join(a, b, at.op) for a, b in zip(known, after)]
        if wider == known:
            return known if not at.reading.unwritten else [at.mixed("unknown")] * len(known)
        known = wider
    return [at.mixed("branches")] * len(known)


def _lengths(at: At, body: str, known: list[Value]) -> list[tuple[Size, ...] | None]:
    """Lengths that hold at every turn: those that the body declares, and the examples' axis."""
    found: list[tuple[Size, ...] | None] = []
    for number, (tensor, value) in enumerate(zip(function_graph(at.walk.graph, body).inputs, known)):
        before = at.sizes(number)
        if tensor.shape.rank is None or not isinstance(value, ByExample) or before is None:
            found.append(None)
        elif len(before) != tensor.shape.rank:
            found.append(None)
        else:
            unknown = [letter(f"{at.op.name}:{number}[{a}]") for a in range(len(before))]
            kept = [a == value.axis or n is not None for a, n in enumerate(tensor.shape)]
            found.append(tuple(s if k else u for s, k, u in zip(before, kept, unknown)))
    return found


def _body(at: At, name: str, values: list[Value], sizes: list[tuple[Size, ...] | None]) -> list[Value]:
    graph = function_graph(at.walk.graph, name)
    walk = Walk(at.reading, graph)
    for tensor, value, lengths in zip(graph.inputs, values, sizes):
        fits = lengths is not None and (tensor.shape.rank is None or tensor.shape.rank == len(lengths))
        walk.set(tensor, value, lengths if fits else None)
    walk.read()
    return [walk.value(t) for t in graph.outputs]


# Lists of tensors.


@rule("TensorListReserve", "EmptyTensorList", sizes=True, mixed=True)
def empty_list(at: At) -> Value:
    """A list in which nothing was written. Its length must not tell how many examples there are."""
    if at.op.type == "TensorListReserve" and not isinstance(at.values[1], Shared):
        return Mixed(at.op, "size")
    return ListOf(Nothing())


@rule("TensorListFromTensor", sizes=True)
def list_of_slices(at: At) -> Value:
    """Slices along the first axis."""
    value = at.values[0]
    if isinstance(value, ByExample):
        return ListOf(value.at(value.axis - 1)) if value.axis else at.mixed("mixes")
    return ListOf(Shared()) if isinstance(value, Shared) else at.mixed("size")


@rule("TensorListStack", sizes=True)
def stacked_list(at: At) -> Value:
    """The list as a tensor, its entries along a new first axis."""
    value = at.values[0]
    if not isinstance(value, ListOf):
        return at.mixed("unknown")
    element = value.element
    if isinstance(element, ByExample):
        return element.at(element.axis + 1)
    return Shared() if isinstance(element, (Shared, Nothing)) else at.mixed("branches")


@rule("TensorListGetItem", sizes=True)
def item(at: At) -> Value:
    """One entry; zeros, where nothing was written."""
    return _element(at) if isinstance(at.values[1], Shared) else at.mixed("position")


def _element(at: At) -> Value:
    value = at.values[0]
    if not isinstance(value, ListOf):
        return at.mixed("unknown")
    if isinstance(value.element, Nothing):
        if not at.reading.turns:
            return at.mixed("unknown")
        at.reading.unwritten = True  # it may be written in a later turn
    return value.element


@rule("TensorListSetItem", places=True, sizes=True)
def with_item(at: At) -> Value:
    """The list with one entry written."""
    if not isinstance(at.values[1], Shared):
        return at.mixed("position")
    return _with(at, at.values[2])


@rule("TensorListPushBack", places=True, sizes=True, mixed=True)
def pushed(at: At) -> Value:
    """The list with one entry more."""
    return _with(at, at.values[1])


def _with(at: At, value: Value) -> Value:
    held = at.values[0]
    if not isinstance(held, ListOf):
        return held if isinstance(held, Mixed) else at.mixed("unknown")
    return ListOf(join(held.element, value, at.op))


@rule("TensorListPopBack", sizes=True)
def popped(at: At) -> list[Value]:
    """The list without its last entry, and that entry."""
    return [at.values[0], _element(at)]


@rule("TensorListResize", "TensorListElementShape", sizes=True)
def about_a_list(at: At) -> Value:
    """A list of another length; or the shape of what is in one."""
    if at.op.type == "TensorListResize":
        return at.values[0] if isinstance(at.values[1], Shared) else at.mixed("size")
    value = at.values[0]
    element = value.element if isinstance(value, ListOf) else None
    return Shared() if isinstance(element, (Shared, Nothing)) else Sized()


@rule("TensorListConcatV2", "TensorListSplit", "TensorListGather", "TensorListScatterV2", "TensorListPushBackBatch")
def other_lists(at: At) -> Value:
    """Ragged ways to use a list."""
    return at.mixed("unknown") if not all(isinstance(v, Shared) for v in at.values) else Shared()


__all__ = ["Handle", "Numbers", "Seed", "of_shape"]
