"""Lengths of axes as products: 3, B, 4·B·T. Arithmetic with shapes in a graph is followed in these.

B, the number of examples in the batch, is unknown while a graph is traced: it is the letter `batch`. Any other length
that is unknown while tracing, and does not depend on the batch's contents, is a letter named by its origin. Products
and quotients of such lengths are again such lengths. What is no product, such as the sum of two letters, is forgotten.

A graph computes with 32 bits, where 2³¹ is negative. So a number is followed only if it stays below 2³¹ in a batch of
at most 2¹⁶ examples: c without letters up to 2³¹, c B up to c = 2¹⁵, and an unknown length T alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import ClassVar

import numpy as np


@dataclasses.dataclass(frozen=True)
class Size:
    """`number` times the product of `letters`."""

    number: Fraction = Fraction(1)
    letters: tuple[str, ...] = ()

    @property
    def has_batch(self) -> bool:
        """Whether B is a factor."""
        return "batch" in self.letters

    @property
    def plain(self) -> int | None:
        """The length as an integer, None if it has letters."""
        return int(self.number) if not self.letters and self.number.denominator == 1 else None

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole number for all values of its letters."""
        return self.number.denominator == 1

    @property
    def is_held(self) -> bool:
        """Whether 32 bits hold it, by the bounds above."""
        kinds = len(self.letters), self.has_batch
        # Without letters it may be negative: -1 is an axis, or any length.
        return kinds in _HELD and abs(self.number) < _HELD[kinds] and (self.number >= 0 or not self.letters)

    def __mul__(self, other: Size) -> Size:
        if not self.number * other.number:
            return Size(Fraction(0))
        return Size(self.number * other.number, tuple(sorted(self.letters + other.letters)))

    def divide_by(self, other: Size) -> Size | None:
        """The quotient, or None if it is no product of letters."""
        if not other.number:
            return None
        left = Counter(self.letters)
        left.subtract(other.letters)
        if any(count < 0 for count in left.values()):
            return None
        return Size(self.number / other.number, tuple(sorted(left.elements())))

    def __str__(self) -> str:
        return "·".join([str(self.number), *self.letters])


_HELD = {(0, False): 2**31, (1, True): 2**15, (1, False): 2}
"""Bounds of the coefficient, by the number of letters and whether B is one of them."""

ONE = Size()
BATCH = Size(letters=("batch",))


def size(number: int) -> Size:
    """A known length."""
    return Size(Fraction(int(number)))


def letter(name: str) -> Size:
    """An unknown length that does not depend on the contents of the batch."""
    return Size(letters=(name,))


def product(sizes: Iterable[Size]) -> Size:
    """The product of all."""
    total = ONE
    for one in sizes:
        total = total * one
    return total


@dataclasses.dataclass(frozen=True)
class SizeArray:
    """The whole numbers of a small tensor: all entries in order, None for one that is unknown or too large."""

    LIMIT: ClassVar = 64
    sizes: tuple[Size | None, ...]
    shape: tuple[int, ...]

    def __init__(self, entries: Iterable[Size | None], shape: Iterable[int]):
        kept = (entry if entry is None or entry.is_held else None for entry in entries)
        object.__setattr__(self, "sizes", tuple(kept))
        object.__setattr__(self, "shape", tuple(shape))

    @classmethod
    def from_integers(cls, values: object) -> SizeArray:
        """An array of plain integers."""
        plain = np.asarray(values)
        return cls(map(size, plain.flat), plain.shape)

    @classmethod
    def row(cls, sizes: Sequence[Size | None]) -> SizeArray:
        """A vector."""
        return cls(sizes, [len(sizes)])

    @classmethod
    def scalar(cls, value: Size | None) -> SizeArray:
        """A single number."""
        return cls([value], [])

    @property
    def array(self) -> np.ndarray:
        """The entries as an array of objects."""
        found = np.empty(len(self.sizes), object)
        found[:] = self.sizes
        return found.reshape(self.shape)

    @property
    def has_batch(self) -> bool:
        """Whether an entry may depend on B."""
        return any(entry is None or entry.has_batch for entry in self.sizes)

    @property
    def plain(self) -> np.ndarray | None:
        """The array as integers, None if an entry is unknown or has letters."""
        found = [None if entry is None else entry.plain for entry in self.sizes]
        return None if any(n is None for n in found) else np.array(found, np.int64).reshape(self.shape)
