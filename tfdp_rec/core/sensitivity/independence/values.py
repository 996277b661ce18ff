"""Abstract values: the statements that a reading makes about the tensors of a traced loss.

===========  ========================================================================================================
`Shared`     independent of the batch, even of its number of examples: weights, constants, shared inputs
`Sized`      a function of shared tensors and the number of examples: shapes, and arithmetic with them
`ByExample`  an axis of length B · inner on which the entry i · inner + j is a function of example i, shared tensors,
             and noise of example i's own; the other axes have shared lengths
`Seed`       the state of a random layer: independent of the batch, secret, and different at every draw
`Handle`     a variable or lookup table
`ListOf`     a list of tensors in a loop: what was written into it is of one value and of the same lengths
`Nothing`    no value yet: an entry of a list that was never written
`Mixed`      none of the above: entries may depend on several examples
===========  ========================================================================================================

Beside its value a tensor may have *refined facts*: the whole numbers in it (`numbers`) and the lengths of its axes
(`Walk.sizes`), by which a reshape is judged. An operation forgets both, unless its rule is registered with
`numbers=True`, or gives lengths to `At.give`; such a rule says why the fact still holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdp_rec.core.sensitivity.independence.sizes import BATCH, ONE, Size, SizeArray

Lengths = tuple[Size | None, ...]


class Value:
    """The statement about a tensor."""


@dataclasses.dataclass(frozen=True)
class Shared(Value):
    """Independent of the batch; with `numbers` for a small tensor of whole numbers."""

    numbers: SizeArray | None = None


@dataclasses.dataclass(frozen=True)
class Sized(Value):
    """A function of the number of examples, and of nothing else of the batch."""

    numbers: SizeArray | None = None


@dataclasses.dataclass(frozen=True)
class ByExample(Value):
    """Entry i · inner + j along `axis` is example i's; tensors meet entry by entry only if they agree in `inner`."""

    axis: int
    inner: Size = ONE

    @property
    def is_plain(self) -> bool:
        """Whether the axis has exactly one entry an example."""
        return self.inner == ONE

    def move_to(self, axis: int) -> ByExample:
        """The same on another axis."""
        return ByExample(axis, self.inner)


@dataclasses.dataclass(frozen=True)
class Seed(Value):
    """Read from the state of random layers; `draws` identifies the reads."""

    draws: frozenset[Any]
    next: bool = False  # whether it is the state after this one, which a later read draws from


@dataclasses.dataclass(frozen=True)
class Handle(Value):
    """A resource: `key` is the same for all its handles; `lengths` of a variable's contents, if known."""

    key: Any
    lengths: Lengths | None = None


@dataclasses.dataclass(frozen=True)
class ListOf(Value):
    """A list of tensors: the value and lengths of what was written into it."""

    element: Value
    lengths: Lengths | None = None
    written: bool = False  # whether it has no entries but written ones: those that it was made with are zeros
    shape: SizeArray | None = None  # that of the zeros, as the list was made, -1 for any length


@dataclasses.dataclass(frozen=True)
class Nothing(Value):
    """No value yet."""


@dataclasses.dataclass(frozen=True)
class Mixed(Value):
    """The operation at fault, and the reason, a key of `refusals.REASONS`."""

    operation: Any = dataclasses.field(compare=False)
    reason: str
    detail: str = ""


def value_of_numbers(numbers: SizeArray) -> Value:
    """The value of a small tensor of whole numbers: sized if B is in it, otherwise shared."""
    return Sized(numbers) if numbers.has_batch else Shared(numbers)


def value_of_lengths(lengths: Sequence[Size]) -> ByExample | None:
    """The value of a tensor that has the examples along its only axis of a length with B; None if it has none such."""
    axes = [axis for axis, length in enumerate(lengths) if length.has_batch]
    inner = lengths[axes[0]].divide_by(BATCH) if len(axes) == 1 else None
    return None if inner is None or inner.has_batch or not inner.is_whole else ByExample(axes[0], inner)


def forget_numbers(value: Value) -> Value:
    """The same value without numbers, in a list too."""
    if isinstance(value, ListOf):
        return dataclasses.replace(value, element=forget_numbers(value.element))
    return type(value)() if isinstance(value, (Shared, Sized)) and value.numbers is not None else value


def join(one: Value, other: Value, operation: Any) -> Value:
    """The value of a tensor that is one or the other, by a shared choice."""
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
        shape = one.shape if one.shape == other.shape else None
        return ListOf(join(one.element, other.element, operation), lengths, one.written and other.written, shape)
    # The choice is shared, so two shared values give a shared one, whose numbers are unknown. In other pairs that
    # differ, one example's entries may be at the place of another's.
    kinds = {type(one), type(other)}
    if kinds == {Shared}:
        return Shared()
    if kinds <= {Shared, Sized}:
        return Sized()
    return Mixed(operation, "branches")


def join_lengths(one: Lengths | None, other: Lengths | None) -> Lengths | None:
    """The lengths of a tensor that is one or the other: None where they differ."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other))
