"""What is known of a tensor: the abstract values that a reading gives to the tensors of a traced loss.

===========  ========================================================================================================
`Shared`     decided by nothing of the batch, not even by how many examples it has: weights, constants, shared inputs
`Sized`      decided by how many examples the batch has, and by nothing else of it: shapes, and what is made of them
`ByExample`  an axis of length outer · B · inner on which the entry (o · B + i) · inner + j is decided by example i,
             by what is shared, and by noise of example i's own; the other axes have lengths that are shared
`Places`     `ByExample`, and entry i is i · step: the example's number in the batch, good for looking up its own row
`Tuples`     `ByExample`, and along the last axis the first entry is the example's number: what `gather_nd` takes
`Within`     `ByExample`, whole numbers from 0 to below `below`: the places that a search along an axis found
`Flat`       `ByExample`, numbers of example i's own entries in a tensor of [B, below]: from i · below
`Seed`       the state of a random layer: decided by nothing of the batch, and different at every draw
`Handle`     a variable or lookup table
`ListOf`     a list of tensors, as loops keep them, each of the value given
`Nothing`    no value yet: an entry of a list that nobody wrote
`Mixed`      nothing of the above: what one example decides is in it where another's should be
===========  ========================================================================================================
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp_rec.clipping.independence.sizes import ONE, Numbers, Size


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
        return dataclasses.replace(self, axis=axis)


@dataclasses.dataclass(frozen=True)
class Places(ByExample):
    """The number of each example in its batch, times `step`."""

    step: Size = ONE


@dataclasses.dataclass(frozen=True)
class Tuples(ByExample):
    """Indices whose first component is the example's number."""


@dataclasses.dataclass(frozen=True)
class Within(ByExample):
    """Whole numbers from 0 to below `below`."""

    below: Size = ONE


@dataclasses.dataclass(frozen=True)
class Flat(ByExample):
    """Numbers of an example's own entries, `below` an example, in a tensor that is laid out by example."""

    below: Size = ONE


@dataclasses.dataclass(frozen=True)
class Seed(Value):
    """Read from the state of random layers: `draws` tells which reads."""

    draws: frozenset[Any]


@dataclasses.dataclass(frozen=True)
class Handle(Value):
    """A resource: `key` is the same for all handles to one."""

    key: Any


@dataclasses.dataclass(frozen=True)
class ListOf(Value):
    """A list of tensors."""

    element: Value


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
        return ListOf(join(one.element, other.element, operation))
    if isinstance(one, Seed) and isinstance(other, Seed):
        return Seed(one.draws | other.draws)
    kinds = {type(one), type(other)}
    if kinds == {Shared}:
        return Shared()
    if kinds <= {Shared, Sized}:
        return Sized()
    return Mixed(operation, "branches")
