"""Lengths of axes as products: 3, B, 4·B·T. What a graph computes with shapes is followed in these.

B, the number of examples in the batch, is not known while a graph is traced. It is the letter `batch` here; any other
length that is not known while tracing, but is the same whatever the batch holds, is a letter named by where it came
from. Products and quotients of such lengths are again such lengths; a sum is, if the batch takes no part in it.

A graph computes with 32 bits, where 2³¹ is negative. So a number is followed only while it cannot reach that in a batch
of at most 2¹⁶ examples: c without letters up to 2³¹, c B up to c = 2¹⁵, c T up to c = 2⁷ (T below 2²⁴). Others are
unknown.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Size:
    """`number` times the product of `letters`."""

    number: Fraction = Fraction(1)
    letters: tuple[str, ...] = ()

    @property
    def of_batch(self) -> bool:
        """Whether the length of the batch is in it."""
        return "batch" in self.letters

    @property
    def is_linear(self) -> bool:
        """Whether it is the length of the batch, exactly once, times something."""
        return self.letters.count("batch") == 1

    @property
    def plain(self) -> int | None:
        """The number, if it is known."""
        return int(self.number) if not self.letters and self.number.denominator == 1 else None

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole number whatever its letters stand for."""
        return self.number.denominator == 1

    @property
    def is_held(self) -> bool:
        """Whether 32 bits hold it, as far as can be known."""
        kinds = len(self.letters), self.of_batch
        return kinds in _HELD and abs(self.number) < _HELD[kinds]

    def __mul__(self, other: Size) -> Size:
        if not self.number * other.number:
            return Size(Fraction(0))
        return Size(self.number * other.number, tuple(sorted(self.letters + other.letters)))

    def over(self, other: Size) -> Size | None:
        """The quotient, or None where it is no product of letters."""
        if not other.number:
            return None
        left = Counter(self.letters)
        left.subtract(other.letters)
        if any(count < 0 for count in left.values()):
            return None
        return Size(self.number / other.number, tuple(sorted(left.elements())))

    def combined(self, sign: str, other: Size) -> Size | None:
        """The outcome of another operation: a letter of its own, unless the batch takes part (then unknown)."""
        if self.of_batch or other.of_batch:
            return None
        return Size(letters=(f"({self}{sign}{other})",))

    def __str__(self) -> str:
        return "·".join([str(self.number), *self.letters])


_HELD = {(0, False): 2**31, (1, True): 2**15, (1, False): 2**7}
"""Below what a coefficient must stay, by how many letters there are and whether the batch is one of them."""

ONE = Size()
BATCH = Size(letters=("batch",))


def size(number: int) -> Size:
    """A known length."""
    return Size(Fraction(int(number)))


def letter(name: str) -> Size:
    """A length that is not known, and is the same whatever the batch holds."""
    return Size(letters=(name,))


def product(sizes: tuple[Size, ...] | list[Size]) -> Size:
    """All of them multiplied."""
    total = ONE
    for one in sizes:
        total = total * one
    return total


class Numbers:
    """A small tensor of whole numbers, followed while tracing: an array of `Size`, None where one is unknown.

    An entry that is None may depend on the length of the batch. Entries that 32 bits might not hold are None.
    """

    LIMIT = 64

    def __init__(self, array: np.ndarray):
        self.array = np.empty(np.shape(array), object)
        for place in np.ndindex(self.array.shape):
            entry: Any = np.asarray(array, object)[place]
            self.array[place] = entry if entry is None or entry.is_held else None

    @classmethod
    def of(cls, values: object) -> Numbers:
        """Numbers from plain integers."""
        plain = np.asarray(values)
        array = np.empty(plain.shape, object)
        for place in np.ndindex(plain.shape):
            array[place] = size(plain.item(place))
        return cls(array)

    @classmethod
    def row(cls, sizes: Sequence[Size | None]) -> Numbers:
        """A vector."""
        array = np.empty([len(sizes)], object)
        array[:] = list(sizes)
        return cls(array)

    @classmethod
    def scalar(cls, value: Size | None) -> Numbers:
        """A single number."""
        array = np.empty([], object)
        array[()] = value
        return cls(array)

    @property
    def of_batch(self) -> bool:
        """Whether the length of the batch decides any of it."""
        return any(entry is None or entry.of_batch for entry in self.array.flat)

    @property
    def plain(self) -> np.ndarray | None:
        """The numbers, if all are known."""
        found = [None if entry is None else entry.plain for entry in self.array.flat]
        return None if any(n is None for n in found) else np.array(found, np.int64).reshape(self.array.shape)

    @property
    def sizes(self) -> tuple[Size | None, ...]:
        """All entries, in order."""
        return tuple(self.array.flat)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self.array.shape == other.array.shape and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash((self.array.shape, self.sizes))
