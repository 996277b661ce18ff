"""Shapes, and arithmetic with them: followed as numbers, so that a reshape can be judged.

The number of examples may take part. A result without it (B · T / B) is shared again; a result with it is admitted in
shapes, and refused where it enters values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec.independence.reading import At, rule
from tfdp_rec.independence.rules.elementwise import elementwise, lined_up
from tfdp_rec.independence.rules.reductions import reduction
from tfdp_rec.independence.sizes import ONE, Size, SizeArray, product, size
from tfdp_rec.independence.values import (
    ByExample,
    Mixed,
    Seed,
    Shared,
    Sized,
    Value,
    numbered,
)


@rule("Const", numbers=True)
def constant(at: At) -> Value:
    """A constant, with its numbers if they may be a shape."""
    shape = tf.TensorShape(at.attr("value").tensor_shape)
    value = Shared()
    if at.op.outputs[0].dtype.is_integer and (shape.num_elements() or 0) <= SizeArray.LIMIT:
        numbers = SizeArray.of_integers(tf.make_ndarray(at.attr("value")))
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
    return numbered(SizeArray.scalar(product(sizes)) if at.op.type == "Size" else SizeArray.row(sizes))


def _over(one: Size, other: Size) -> Size | None:
    if one.plain is not None and other.plain:
        return size(one.plain // other.plain)
    quotient = one.over(other)
    return quotient if quotient is not None and quotient.is_whole else one.combined("//", other)


def _of_a_seed(at: At) -> Value:
    """A seed plus something shared, times 1, or below a number so large that all seeds remain, is a seed."""
    seeds = [v for v in at.values if isinstance(v, Seed)]
    others = [n for n, v in enumerate(at.values) if isinstance(v, Shared)]
    if len(seeds) != 1 or len(others) != 1:
        return at.mixed("seed")
    plain = at.plain(others[0]) or []
    remains = {
        "AddV2": True,
        "Mul": bool(plain) and all(n == 1 for n in plain),
        "FloorMod": others == [1] and bool(plain) and all(n >= 1 << 30 for n in plain),
    }
    return seeds[0] if remains.get(at.op.type) else at.mixed("seed")


def _plain(sign: str, function: Callable[[int, int], int]) -> Callable[[Size, Size], Size | None]:
    def combine(one: Size, other: Size) -> Size | None:
        if one.plain is not None and other.plain is not None:
            return size(function(one.plain, other.plain))
        return one.combined(sign, other)

    return combine


def _add(one: Size, other: Size) -> Size | None:
    for a, b in ((one, other), (other, one)):
        if not a.number:
            return b
    if one.letters == other.letters:
        total = one.number + other.number
        return Size(total, one.letters if total else ())
    return one.combined("+", other)


def _subtract(one: Size, other: Size) -> Size | None:
    if one.letters == other.letters or not other.number:
        return _add(one, Size(-other.number, other.letters))
    return one.combined("-", other)


def _larger(one: Size, other: Size) -> Size | None:
    """The larger length; that of 1 (or less) and another is the other: in an empty batch nothing depends on it."""
    if one.letters == other.letters:
        return one if one.number >= other.number else other
    for a, b in ((one, other), (other, one)):
        if a.plain is not None and a.plain <= 1 and b.number >= 1 and b.is_whole:
            return b
    return one.combined("max", other)


_ARITHMETIC: dict[str, Callable[[Size, Size], Size | None]] = {
    "Mul": lambda a, b: a * b,
    "AddV2": _add,
    "Sub": _subtract,
    "FloorDiv": _over,
    "Maximum": _larger,
    "Minimum": _plain("min", min),
    "FloorMod": _plain("mod", lambda a, b: a % b if b else 0),
}


@rule(*_ARITHMETIC, "RealDiv", "Neg", "Square", sizes=True, numbers=True)
def arithmetic(at: At) -> Value:
    """Arithmetic of followed numbers; otherwise entry by entry."""
    if any(isinstance(v, Seed) for v in at.values):
        return _of_a_seed(at)
    if all(isinstance(v, (Shared, Sized)) for v in at.values):
        return _followed(at)
    if any(isinstance(v, Sized) for v in at.values):
        return at.mixed("size")
    return lined_up(at, range(len(at.values)))


def _followed(at: At) -> Value:
    several = [at.numbers(n) for n in range(len(at.values))]
    function = _ARITHMETIC.get(at.op.type)
    if function is not None and all(n is not None for n in several):
        one, other = np.broadcast_arrays(*(n.array for n in several))  # type: ignore[union-attr]
        found = np.empty(one.shape, object)
        for place in np.ndindex(one.shape):
            a, b = one.item(place), other.item(place)
            found[place] = None if a is None or b is None else function(a, b)
        return numbered(SizeArray(found))
    return Sized() if any(isinstance(v, Sized) for v in at.values) else Shared()


_COMPARISONS = (
    "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "LogicalNot"
)  # fmt: skip


@rule(*_COMPARISONS, sizes=True)
def comparison(at: At) -> Value:
    """Entry by entry; of sizes and shared values alone, a value made of sizes."""
    return _of_sizes(at) or elementwise(at)


@rule("All", "Any", sizes=True)
def quantifier(at: At) -> Value:
    """A reduction; of sizes and shared values alone, a value made of sizes."""
    return _of_sizes(at) or reduction(at)


def _of_sizes(at: At) -> Value | None:
    if not any(isinstance(v, Sized) for v in at.values):
        return None
    return Sized() if all(isinstance(v, (Shared, Sized)) for v in at.values) else at.mixed("size")


@rule("Prod", sizes=True, numbers=True)
def product_of(at: At) -> Value:
    """The number of entries of a shape; otherwise a reduction."""
    numbers, axes = at.numbers(0), at.plain(1)
    if numbers is not None and numbers.array.ndim == 1 and axes in ([0], [-1]):
        sizes = numbers.sizes
        total = None if any(s is None for s in sizes) else product(sizes)  # type: ignore[arg-type]
        found = SizeArray.scalar(total) if not at.attr("keep_dims") else SizeArray.row([total])
        return numbered(found)
    if isinstance(at.values[0], Sized) or isinstance(at.values[1], Sized):
        return Sized()
    return reduction(at)


@rule("Max", sizes=True, numbers=True)
def extreme(at: At) -> Value:
    """The largest of several equal sizes; otherwise a reduction."""
    numbers, axes = at.numbers(0), at.plain(1)
    row = numbers is not None and numbers.array.ndim == 1 and axes in ([0], [-1])
    if row and numbers.of_batch and not at.attr("keep_dims"):  # type: ignore[union-attr]
        return numbered(SizeArray.scalar(numbers.sizes[0])) if len(set(numbers.sizes)) == 1 else Sized()  # type: ignore[union-attr]
    return Sized() if any(isinstance(v, Sized) for v in at.values) else reduction(at)


@rule("Range", sizes=True, numbers=True)
def counting(at: At) -> Value:
    """0, 1, 2, ... up to a shared limit. Up to the number of examples, these are places in the batch: mixed."""
    if all(isinstance(v, Shared) for v in at.values):
        plain = [at.plain(n) for n in range(3)]
        if all(p is not None for p in plain):
            start, stop, step = (p[0] for p in plain)  # type: ignore[index]
            if step and len(range(start, stop, step)) <= SizeArray.LIMIT:
                return Shared(SizeArray.of_integers(list(range(start, stop, step))))
        return Shared()
    return at.mixed("position")


@rule("BroadcastGradientArgs", sizes=True, numbers=True)
def summed_axes(at: At) -> list[Value]:
    """The axes over which a gradient is summed: those along which broadcasting repeated an operand."""
    one, other = at.numbers(0), at.numbers(1)
    if one is None or other is None or None in (*one.sizes, *other.sizes):
        kind = Sized() if any(isinstance(v, Sized) for v in at.values) else Shared()
        return [kind, kind]
    rank = max(len(one.sizes), len(other.sizes))
    a, b = (_filled_up(n, rank, None) for n in (one, other))
    repeated: tuple[list[int], list[int]] = ([], [])
    for axis in range(rank):
        for mine, axes in ((a[axis], repeated[0]), (b[axis], repeated[1])):
            if mine is None or mine == ONE:
                axes.append(axis)
    return [Shared(SizeArray.of_integers(np.array(axes, np.int64))) for axes in repeated]


def _filled_up(numbers: SizeArray, rank: int, missing: Size | None) -> list[Size | None]:
    return [*[missing] * (rank - len(numbers.sizes)), *numbers.sizes]


@rule("DynamicStitch", sizes=True, numbers=True)
def stitched(at: At) -> Value:
    """Numbers put into places: part of the shape of a reduction's gradient."""
    half = len(at.values) // 2
    places, several = [at.numbers(n) for n in range(half)], [at.numbers(n) for n in range(half, 2 * half)]
    if not all(isinstance(v, (Shared, Sized)) for v in at.values):
        return at.mixed()
    if any(p is None or p.plain is None for p in places) or any(n is None or n.array.ndim > 1 for n in several):
        return Sized() if any(isinstance(v, Sized) for v in at.values) else Shared()
    found: dict[int, Any] = {}
    for place, numbers in zip(places, several):
        found.update(zip((int(i) for i in place.plain.flat), numbers.sizes))  # type: ignore[union-attr]
    return numbered(SizeArray.row([found.get(i) for i in range(max(found, default=-1) + 1)]))


@rule("InvertPermutation", numbers=True)
def inverse(at: At) -> Value:
    """The permutation that undoes one."""
    plain = at.plain(0)
    return Shared(SizeArray.of_integers(np.argsort(plain))) if plain is not None else Shared()


@rule("ConcatOffset", sizes=True, numbers=True)
def offsets(at: At) -> list[Value]:
    """Where each part of a concatenation begins."""
    axis, shapes = at.plain(0), [at.numbers(n) for n in range(1, len(at.values))]
    if axis is None or any(n is None or None in n.sizes for n in shapes):
        return [Sized()] * len(shapes)
    start, found = size(0), []
    for numbers in shapes:
        row: list[Size | None] = [size(0)] * len(numbers.sizes)  # type: ignore[union-attr]
        row[axis[0]] = start
        found.append(numbered(SizeArray.row(row)))
        step = numbers.sizes[axis[0]]  # type: ignore[union-attr]
        start = _add(start, step) if start is not None and step is not None else None  # type: ignore[assignment]
    return found


@rule("Fill", sizes=True, numbers=True)
def filled(at: At) -> Value:
    """One shared value everywhere: by example along the axis that has the batch's length."""
    if not isinstance(at.values[1], Shared):
        return at.mixed("size" if isinstance(at.values[1], Sized) else "mixes")
    return of_shape(at, at.numbers(0), isinstance(at.values[0], Shared), numbers=at.numbers(1))


def of_shape(at: At, shape: SizeArray | None, shared: bool, numbers: SizeArray | None = None) -> Value:
    """The value of a constant or of noise in a tensor of this shape: by example along the axis with B."""
    if shared:
        plain = None if shape is None else shape.plain
        if numbers is not None and plain is not None and np.prod(plain) <= SizeArray.LIMIT:
            array = np.empty(tuple(int(n) for n in plain), object)
            array[...] = numbers.array[()]
            return Shared(SizeArray(array))
        return at.give(Shared(), shape.sizes if shape is not None else None)
    if shape is None or None in shape.sizes:
        return at.mixed("size")
    axes = [axis for axis, length in enumerate(shape.sizes) if length.of_batch]  # type: ignore[union-attr]
    length = shape.sizes[axes[0]] if len(axes) == 1 else None
    if length is None or not length.is_linear or not length.is_whole:
        return at.mixed("size")
    return at.give(ByExample(axes[0], inner=length.over(Size(letters=("batch",)))), shape.sizes)  # type: ignore[arg-type]


