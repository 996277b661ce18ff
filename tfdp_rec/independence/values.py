"""What is known of a tensor: the abstract values that a reading gives to the tensors of a traced loss.

===========  ========================================================================================================
`Shared`     decided by nothing of the batch, not even by how many examples it has: weights, constants, shared inputs
`Sized`      decided by how many examples the batch has, and by nothing else of it: shapes, and what is made of them
`ByExample`  an axis of length outer · B · inner on which the entry (o · B + i) · inner + j is decided by example i,
             by what is shared, and by noise of example i's own; the other axes have lengths that are shared
`Seed`       the state of a random layer: decided by nothing of the batch, secret, and different at every draw
`Handle`     a variable or lookup table
`ListOf`     a list of tensors, as loops keep them, each of the value and the lengths given
`Nothing`    no value yet: an entry of a list that was never written
`Mixed`      nothing of the above: what one example decides is in it where another's should be
===========  ========================================================================================================

Beside its value a tensor may have *refined facts*: the whole numbers in it (`numbers`) and the lengths of its axes
(`Walk.sizes`). They are what a reshape is judged by. An operation forgets both, unless its rule is registered with
`numbers=True`, or hands lengths to `At.give`; such a rule says why the fact still holds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp_rec.independence.sizes import ONE, Numbers, Size

Lengths = tuple[Size | None, ...]


class Value:
    """What is known of a tensor."""


@dataclasses.dataclass(frozen=True)
class Shared(Value):
    """Decided by nothing of the batch; `numbers` if it is a small tensor of whole numbers."""

    numbers: Numbers | None = None


@dataclasses.dataclass(frozen=True)
class Sized(Value):
    """Decided by the number of examples alone."""

    numbers: Numbers | None = None


@dataclasses.dataclass(frozen=True)
class ByExample(Value):
    """Entry (o · B + i) · inner + j along `axis` is example i's."""

    axis: int
    outer: Size = ONE
    inner: Size = ONE

    @property
    def layout(self) -> tuple[Size, Size]:
        """How the axis is laid out; two tensors may meet only if they agree in it."""
        return self.outer, self.inner

    @property
    def is_plain(self) -> bool:
        """Whether the axis has one entry an example."""
        return self.outer == ONE and self.inner == ONE

    def at(self, axis: int) -> ByExample:
        """The same on another axis."""
        return ByExample(axis, *self.layout)


@dataclasses.dataclass(frozen=True)
class Seed(Value):
    """Read from the state of random layers: `draws` tells which reads."""

    draws: frozenset[Any]


@dataclasses.dataclass(frozen=True)
class Handle(Value):
    """A resource: `key` is the same for all handles to one; `lengths` of what a variable holds, if known."""

    key: Any
    lengths: Lengths | None = None


@dataclasses.dataclass(frozen=True)
class ListOf(Value):
    """A list of tensors.

    Attributes:
        element: What is known of each of them.
        lengths: Lengths of the axes of each of them, None where they differ or are not known.
        written: Whether it holds nothing but what was written: a list that was made with entries begins with zeros.
    """

    element: Value
    lengths: Lengths | None = None
    written: bool = False


@dataclasses.dataclass(frozen=True)
class Nothing(Value):
    """No value yet."""


@dataclasses.dataclass(frozen=True)
class Mixed(Value):
    """Why a tensor does not split by example: the operation that mixed it, and how (a key of `refusals.REASONS`)."""

    operation: Any = dataclasses.field(compare=False)
    reason: str
    detail: str = ""


def numbered(numbers: Numbers) -> Value:
    """A small tensor of whole numbers: shared, unless the length of the batch is in it."""
    return Sized(numbers) if numbers.of_batch else Shared(numbers)


def without_numbers(value: Value) -> Value:
    """The same value, the numbers in it forgotten."""
    return type(value)() if isinstance(value, (Shared, Sized)) and value.numbers is not None else value


def join(one: Value, other: Value, operation: Any) -> Value:
    """What is known of a tensor that is the one or the other, decided by something shared."""
    if one == other or isinstance(other, Nothing):
        return one
    if isinstance(one, Nothing):
        return other
    for value in (one, other):
        if isinstance(value, Mixed):
            return value
    if isinstance(one, ListOf) and isinstance(other, ListOf):
        known = [each.lengths for each in (one, other) if not isinstance(each.element, Nothing)]
        lengths = known[0] if len(known) == 1 else join_lengths(one.lengths, other.lengths)
        return ListOf(join(one.element, other.element, operation), lengths, one.written and other.written)
    kinds = {type(one), type(other)}
    if kinds == {Shared}:
        return Shared()
    if kinds <= {Shared, Sized}:
        return Sized()
    return Mixed(operation, "branches")


def join_lengths(one: Lengths | None, other: Lengths | None) -> Lengths | None:
    """The lengths that both have: those of a tensor that is the one or the other."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other))
