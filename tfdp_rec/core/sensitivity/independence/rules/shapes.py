"""Shapes, and arithmetic with them: followed as numbers, so that a reshape can be judged.

The number of examples may take part. A result without it (B · T / B) is shared again; a result with it is admitted in
shapes, and refused where it enters values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec.core.sensitivity.independence.reading import At, rule
from tfdp_rec.core.sensitivity.independence.rules.elementwise import elementwise, line_up
from tfdp_rec.core.sensitivity.independence.rules.reductions import reduction
from tfdp_rec.core.sensitivity.independence.sizes import BATCH, ONE, Size, SizeArray, product, size
from tfdp_rec.core.sensitivity.independence.values import (
    Mixed,
    Seed,
    Shared,
    Sized,
    Value,
    value_of_lengths,
    value_of_numbers,
)


@rule("Const", numbers=True)
def constant(at: At) -> Value:
    """A constant, with its numbers if they may be a shape."""
    shape = tf.TensorShape(at.attr("value").tensor_shape)
    value = Shared()
    if at.op.outputs[0].dtype.is_integer and (shape.num_elements() or 0) <= SizeArray.LIMIT:
        numbers = SizeArray.from_integers(tf.make_ndarray(at.attr("value")))
        value = Shared(None if None in numbers.sizes else numbers)
    return at.give(value, [size(n) for n in shape])


@rule("Shape", "ShapeN", "Size", "TensorListLength", sizes=True, mixed=True, numbers=True, apart=True)
def shape_of(at: At) -> Value | list[Value]:
    """The lengths of a tensor's axes; of a tensor that mixes examples they may be private themselves."""
    found = [_shape(at, number) for number in range(len(at.values))]
    return found if at.op.type == "ShapeN" else found[0]


def _shape(at: At, number: int) -> Value:
    value, sizes = at.values[number], at.sizes(number)
    if at.op.type == "TensorListLength":
        return value if isinstance(value, Mixed) else Shared()
    known = sizes is not None and all(length.plain is not None for length in sizes)
    if isinstance(value, Mixed) and not known:
        return value
    if sizes is None:
        return Sized() if not isinstance(value, Shared) else Shared()
    return value_of_numbers(SizeArray.scalar(product(sizes)) if at.op.type == "Size" else SizeArray.row(sizes))


def _divide(one: Size, other: Size) -> Size | None:
    if one.plain is not None and other.plain:
        return size(one.plain // other.plain)
    quotient = one.divide_by(other)
    return quotient if quotient is not None and quotient.is_whole else None


def _follow_seed(at: At) -> Value:
    """A seed times 1, or below a number so large that all seeds remain, is a seed; plus a number, the next one."""
    seeds = [v for v in at.values if isinstance(v, Seed)]
    others = [n for n, v in enumerate(at.values) if isinstance(v, Shared)]
    if len(seeds) != 1 or len(others) != 1:
        return at.mixed("seed")
    plain = at.plain(others[0]) or []
    if at.op.type == "AddV2" and min(plain, default=-1) >= 0 and any(plain):
        return Seed(seeds[0].draws, next=True)
    remains = {
        "Mul": bool(plain) and all(n == 1 for n in plain),
        "FloorMod": others == [1] and bool(plain) and all(n >= 1 << 30 for n in plain),
    }
    return seeds[0] if remains.get(at.op.type) else at.mixed("seed")


def _plain(function: Callable[[int, int], int]) -> Callable[[Size, Size], Size | None]:
    def combine(one: Size, other: Size) -> Size | None:
        return None if one.plain is None or other.plain is None else size(function(one.plain, other.plain))

    return combine


def _add(one: Size, other: Size) -> Size | None:
    for a, b in ((one, other), (other, one)):
        if not a.number:
            return b
    if one.letters == other.letters:
        total = one.number + other.number
        return Size(total, one.letters if total else ())
    return None


def _subtract(one: Size, other: Size) -> Size | None:
    return _add(one, Size(-other.number, other.letters))


def _larger(one: Size, other: Size) -> Size | None:
    """The larger length; that of 1 (or less) and c B is c B: in an empty batch nothing depends on it."""
    if one.letters == other.letters:
        return one if one.number >= other.number else other
    for a, b in ((one, other), (other, one)):
        if a.plain is not None and a.plain <= 1 and b.number >= 1 and b.is_whole and b.letters == BATCH.letters:
            return b
    return None


_ARITHMETIC: dict[str, Callable[[Size, Size], Size | None]] = {
    "Mul": lambda a, b: a * b,
    "AddV2": _add,
    "Sub": _subtract,
    "FloorDiv": _divide,
    "Maximum": _larger,
    "Minimum": _plain(min),
    "FloorMod": _plain(lambda a, b: a % b if b else 0),
}


@rule(*_ARITHMETIC, "RealDiv", "Neg", "Square", sizes=True, numbers=True)
def arithmetic(at: At) -> Value:
    """Arithmetic of followed numbers; otherwise entry by entry."""
    if any(isinstance(v, Seed) for v in at.values):
        return _follow_seed(at)
    if any(isinstance(v, Sized) for v in at.values) or all(isinstance(v, Shared) for v in at.values):
        function = _ARITHMETIC.get(at.op.type)
        return at.follow(lambda *arrays: None if function is None else _each(function, *arrays))
    return line_up(at, range(len(at.values)))


def _each(function: Callable[[Size, Size], Size | None], *arrays: np.ndarray) -> np.ndarray:
    """A function of two lengths, entry by entry; an unknown one makes an unknown one."""
    one, other = np.broadcast_arrays(*arrays)
    found = np.empty(one.shape, object)
    for place in np.ndindex(one.shape):
        a, b = one.item(place), other.item(place)
        found[place] = None if a is None or b is None else function(a, b)
    return found


_COMPARISONS = (
    "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "LogicalNot"
)  # fmt: skip


@rule(*_COMPARISONS, sizes=True)
def comparison(at: At) -> Value:
    """Entry by entry; of sizes and shared values alone, a value made of sizes."""
    return _compare_sizes(at) or elementwise(at)


@rule("All", "Any", sizes=True, arguments=(1,))
def quantifier(at: At) -> Value:
    """A reduction; of sizes and shared values alone, a value made of sizes."""
    return _compare_sizes(at) or reduction(at)


def _compare_sizes(at: At) -> Value | None:
    if not any(isinstance(v, Sized) for v in at.values):
        return None
    return Sized() if all(isinstance(v, (Shared, Sized)) for v in at.values) else at.mixed("size")


@rule("Prod", "Max", sizes=True, numbers=True, arguments=(1,))
def product_or_largest(at: At) -> Value:
    """The number of entries of a shape, or the largest of equal lengths; otherwise a reduction."""
    numbers, axes, keep = at.numbers(0), at.plain(1), at.attr("keep_dims")
    if numbers is not None and numbers.array.ndim == 1 and axes in ([0], [-1]) and None not in numbers.sizes:
        if at.op.type == "Prod":
            total = product(numbers.sizes)  # type: ignore[arg-type]
            return value_of_numbers(SizeArray.row([total]) if keep else SizeArray.scalar(total))
        if numbers.has_batch and not keep and len(set(numbers.sizes)) == 1:
            return value_of_numbers(SizeArray.scalar(numbers.sizes[0]))
    return Sized() if any(isinstance(v, Sized) for v in at.values) else reduction(at)


@rule("Range", sizes=True, numbers=True, arguments=(0, 1, 2))
def count(at: At) -> Value:
    """0, 1, 2, ... up to a shared limit. Up to the number of examples, these are places in the batch: mixed."""
    if any(isinstance(v, Sized) for v in at.values):
        return at.mixed("position")
    return at.follow(_range)


def _range(start: np.ndarray, stop: np.ndarray, step: np.ndarray) -> np.ndarray | None:
    found = range(start.item(), stop.item(), step.item())
    return np.array(found, np.int64) if len(found) <= SizeArray.LIMIT else None


@rule("BroadcastGradientArgs", sizes=True, numbers=True, arguments=(0, 1))
def broadcast_axes(at: At) -> Any:
    """The axes over which a gradient is summed: those along which broadcasting repeated an operand."""
    one, other = at.numbers(0), at.numbers(1)
    if one is None or other is None or any(_may_be_one(length) for length in (*one.sizes, *other.sizes)):
        return Shared() if all(isinstance(v, Shared) for v in at.values) else at.mixed("unknown length")
    rank = max(len(one.sizes), len(other.sizes))
    several = [(*[ONE] * (rank - len(numbers.sizes)), *numbers.sizes) for numbers in (one, other)]
    # Equal shapes have no such axes, not even those of length one.
    pairs = list(zip(*several))
    unlike = len(one.sizes) != len(other.sizes) or any(ONE in pair and pair[0] != pair[1] for pair in pairs)
    if one != other and not unlike and (ONE, ONE) in pairs:
        return at.follow(lambda *_: None)
    axes = [[n for n in range(rank) if sizes[n] == ONE and one != other] for sizes in several]
    return [Shared(SizeArray.from_integers(np.array(found, np.int64))) for found in axes]


def _may_be_one(length: Size | None) -> bool:
    """Whether a length that is not known to be 1 may be; a batch of one has nothing to mix."""
    return length is None or length.letters not in ((), BATCH.letters)


@rule("DynamicStitch", sizes=True, numbers=True)
def stitch(at: At) -> Value:
    """Numbers put into places: part of the shape of a reduction's gradient."""
    half = len(at.values) // 2
    places = [at.plain(n) or [] for n in range(half)]
    named = {place for several in places for place in several}
    if not named or named != set(range(len(named))):  # a place without a number holds what was in memory before
        return at.mixed("unknown")

    def fill_places(*arrays: np.ndarray) -> np.ndarray | None:
        if any(numbers.ndim > 1 for numbers in arrays[half:]):
            return None
        found: dict[int, Any] = {}
        for several, numbers in zip(places, arrays[half:]):
            found.update(zip(several, numbers.flat))
        return SizeArray.row([found[place] for place in range(len(named))]).array

    return at.follow(fill_places)


@rule("InvertPermutation", numbers=True, arguments=(0,))
def inverse(at: At) -> Value:
    """The permutation that undoes one."""
    return at.follow(np.argsort)


@rule("ConcatOffset", sizes=True, numbers=True)
def offsets(at: At) -> Any:
    """Where each part of a concatenation begins."""
    axis = at.plain(0)

    def begins(_: np.ndarray, *shapes: np.ndarray) -> list[np.ndarray] | None:
        start, found = size(0), []
        for shape in shapes:
            row = np.full(len(shape), size(0), object)
            row[axis[0]] = start  # type: ignore[index]
            found.append(row)
            start = None if start is None or shape[axis[0]] is None else _add(start, shape[axis[0]])  # type: ignore[assignment,index]
        return found

    return at.follow(lambda *arrays: None if axis is None else begins(*arrays))


@rule("Fill", sizes=True, numbers=True, arguments=(0,))
def fill(at: At) -> Value:
    """One shared value everywhere: by example along the axis that has the batch's length."""
    if not isinstance(at.values[1], Shared):
        return at.mixed("size" if isinstance(at.values[1], Sized) else "mixes")
    return fill_shape(at, at.numbers(0), isinstance(at.values[0], Shared), numbers=at.numbers(1))


def fill_shape(at: At, shape: SizeArray | None, shared: bool, numbers: SizeArray | None = None) -> Value:
    """The value of a constant or of noise in a tensor of this shape: by example along the axis with B."""
    if shared:
        plain = None if shape is None else shape.plain
        if numbers is not None and plain is not None and np.prod(plain) <= SizeArray.LIMIT:
            return Shared(SizeArray([numbers.sizes[0]] * int(np.prod(plain)), plain.tolist()))
        return at.give(Shared(), shape.sizes if shape is not None else None)
    found = None if shape is None or None in shape.sizes else value_of_lengths(shape.sizes)  # type: ignore[arg-type]
    return at.mixed("size") if found is None else at.give(found, shape.sizes)  # type: ignore[union-attr]
