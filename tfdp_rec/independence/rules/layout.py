"""Operations that move entries: reshape, transpose, concatenation and the like.

A reshape keeps the order of entries in memory. With P the product of the lengths before the axis of the examples and R
that of the lengths behind it, memory holds [P · outer, B, inner · R]. A new shape with the product P' before the axis
of B is [P', (P · outer / P') · B · inner', ...], which is by example if P' divides P · outer.
"""

from __future__ import annotations

import numpy as np

from tfdp_rec.independence.reading import At, rule
from tfdp_rec.independence.rules.shapes import of_shape
from tfdp_rec.independence.sizes import BATCH, ONE, Size, SizeArray, product, size
from tfdp_rec.independence.values import ByExample, Shared, Sized, Value, numbered


@rule("Reshape", sizes=True, numbers=True)
def reshape(at: At) -> Value:
    """The same entries in the same order."""
    value, target = at.values[0], at.numbers(1)
    if isinstance(value, (Shared, Sized)):
        return _reshape_numbers(at, value, target)
    if not isinstance(value, ByExample) or not isinstance(at.values[1], (Shared, Sized)):
        return at.mixed("length")
    sizes = at.sizes(0)
    if sizes is None:
        return at.mixed("unknown")
    target_sizes = None if target is None else _target(target, sizes)
    return at.mixed("order") if target_sizes is None else _laid_out(at, value, sizes, target_sizes)


def _target(target: SizeArray, sizes: tuple[Size, ...]) -> list[Size] | None:
    """The lengths that a reshape asks for, with -1 replaced."""
    entries = list(target.sizes)
    if any(e is None for e in entries):
        return None
    rest = [n for n, entry in enumerate(entries) if entry == size(-1)]
    if rest:
        found = product(list(sizes)).over(product([e for e in entries if e != size(-1)]))  # type: ignore[misc]
        if found is None:
            return None
        entries[rest[0]] = found
    return entries  # type: ignore[return-value]


def _laid_out(at: At, value: ByExample, sizes: tuple[Size, ...], target: list[Size]) -> Value:
    axes = [axis for axis, length in enumerate(target) if length.of_batch]
    if len(axes) != 1:
        return at.mixed("order")
    axis, length = axes[0], target[axes[0]]
    before = product(list(sizes[: value.axis])) * value.outer
    outer = before.over(product(target[:axis]))
    each = length.over(BATCH)
    inner = None if outer is None or each is None else each.over(outer)
    if outer is None or inner is None or not (outer.is_whole and inner.is_whole) or inner.of_batch:
        return at.mixed("order")
    return at.give(ByExample(axis, outer, inner), target)


def _reshape_numbers(at: At, value: Shared | Sized, target: SizeArray | None) -> Value:
    if isinstance(at.values[1], Sized):
        return at.mixed("size")
    if not isinstance(at.values[1], Shared):
        return at.mixed("length")
    plain, numbers = (None if target is None else target.plain), value.numbers
    if numbers is None or plain is None:
        return at.give(type(value)(), None if target is None or isinstance(value, Sized) else _lengths(at, target))
    return numbered(SizeArray(numbers.array.reshape([int(n) for n in plain])))


def _lengths(at: At, target: SizeArray) -> list[Size | None] | None:
    return [None if s == size(-1) else s for s in target.sizes]


@rule("ExpandDims", sizes=True, numbers=True)
def expand(at: At) -> Value:
    """One more axis, of length one."""
    value, axis = at.values[0], at.plain(1)
    if isinstance(value, (Shared, Sized)):
        if value.numbers is None or axis is None:
            sizes = at.sizes(0)
            return type(value)() if sizes is None or axis is None else at.give(type(value)(), _inserted(sizes, axis[0]))
        return numbered(SizeArray(np.expand_dims(value.numbers.array, axis[0])))
    sizes = at.sizes(0)
    if not isinstance(value, ByExample) or axis is None or sizes is None:
        return at.mixed("unknown")
    place = axis[0] % (len(sizes) + 1)
    return at.give(value.at(value.axis + (place <= value.axis)), _inserted(sizes, place))


def _inserted(sizes: tuple[Size, ...], axis: int, length: Size | None = ONE) -> list[Size | None]:
    found: list[Size | None] = list(sizes)
    found.insert(axis % (len(sizes) + 1), length)
    return found


@rule("Squeeze", sizes=True, numbers=True)
def squeeze(at: At) -> Value:
    """Named axes of length one are removed; without names, a batch of one would lose its axis: mixed."""
    value, named = at.values[0], list(at.attr("squeeze_dims"))
    sizes = at.sizes(0)
    if isinstance(value, (Shared, Sized)):
        if value.numbers is not None:
            return numbered(SizeArray(value.numbers.array.squeeze(tuple(named) if named else None)))
        return type(value)()
    if not isinstance(value, ByExample) or sizes is None:
        return at.mixed("unknown")
    axes = {a % len(sizes) for a in named}
    if not axes or value.axis in axes:  # a batch of one would lose its axis
        return at.mixed("order")
    kept = [s for axis, s in enumerate(sizes) if axis not in axes]
    return at.give(value.at(value.axis - sum(a < value.axis for a in axes)), kept)


@rule("Transpose", sizes=True, numbers=True)
def transpose(at: At) -> Value:
    """Axes in another order."""
    value, order, sizes = at.values[0], at.plain(1), at.sizes(0)
    if isinstance(value, (Shared, Sized)):
        if value.numbers is not None and order is not None:
            return numbered(SizeArray(value.numbers.array.transpose(order)))
        if order is None or sizes is None or isinstance(value, Sized):
            return type(value)()
        return at.give(Shared(), [sizes[a] for a in order])
    if not isinstance(value, ByExample) or order is None or sizes is None:
        return at.mixed("unknown")
    return at.give(value.at(order.index(value.axis)), [sizes[a] for a in order])


@rule("BroadcastTo", sizes=True, numbers=True)
def broadcast_to(at: At) -> Value:
    """Repeated along axes of length one, or new ones."""
    value, target, sizes = at.values[0], at.numbers(1), at.sizes(0)
    if not isinstance(at.values[1], (Shared, Sized)):
        return at.mixed("length")
    if isinstance(value, Shared):
        return _shared_broadcast(at, target, sizes)
    if not isinstance(value, ByExample) or target is None or sizes is None:
        return at.mixed("unknown")
    axis = value.axis + len(target.sizes) - len(sizes)
    if target.sizes[axis] != sizes[value.axis] or any(
        s is None or s.of_batch for a, s in enumerate(target.sizes) if a != axis
    ):
        return at.mixed("order")
    return at.give(value.at(axis), target.sizes)


def _shared_broadcast(at: At, target: SizeArray | None, sizes: tuple[Size, ...] | None) -> Value:
    if isinstance(at.values[1], Shared):
        return of_shape(at, target, True, at.numbers(0) if at.rank(0) == 0 else None)
    found = of_shape(at, target, False)
    if not isinstance(found, ByExample) or sizes is None or target is None:
        return found if isinstance(found, ByExample) and sizes is not None else at.mixed("size")
    own = found.axis - (len(target.sizes) - len(sizes))
    return found if own < 0 or sizes[own] == ONE else at.mixed("position")


@rule("Tile", sizes=True)
def tile(at: At) -> Value:
    """Repeated as often as asked along each axis."""
    value, times, sizes = at.values[0], at.numbers(1), at.sizes(0)
    if not isinstance(at.values[1], (Shared, Sized)):
        return at.mixed("length")
    if isinstance(value, (Shared, Sized)) and isinstance(at.values[1], Shared):
        return type(value)()
    if times is None or sizes is None or None in times.sizes:
        return at.mixed("size")
    lengths = [length * t for length, t in zip(sizes, times.sizes)]  # type: ignore[operator]
    if isinstance(value, Shared):
        found = of_shape(at, SizeArray.row(lengths), False)
        return found if not isinstance(found, ByExample) or sizes[found.axis] == ONE else at.mixed("position")
    if not isinstance(value, ByExample) or any(
        t.of_batch for t in times.sizes  # type: ignore[union-attr]
    ):
        return at.mixed("size")
    # Along the examples' own axis the whole batch is repeated: `outer` grows.
    outer = value.outer * times.sizes[value.axis]  # type: ignore[operator]
    return at.give(ByExample(value.axis, outer, value.inner), lengths)


@rule("Pack", sizes=True, numbers=True)
def pack(at: At) -> Value:
    """Tensors side by side along a new axis."""
    axis = int(at.attr("axis"))
    if all(isinstance(v, (Shared, Sized)) for v in at.values):
        return _pack_numbers(at)
    sizes = at.sizes(0)
    owners = [v for v in at.values if isinstance(v, ByExample)]
    if sizes is None or len(owners) < len(at.values):
        return at.mixed("size" if any(isinstance(v, Sized) for v in at.values) else "mixes")
    axis %= len(sizes) + 1
    if any(v != owners[0] for v in owners):
        return at.mixed()
    return at.give(owners[0].at(owners[0].axis + (axis <= owners[0].axis)), _inserted(sizes, axis, size(len(owners))))


def _pack_numbers(at: At) -> Value:
    several = [at.numbers(n) for n in range(len(at.values))]
    if all(n is not None for n in several):
        return numbered(SizeArray(np.stack([n.array for n in several], int(at.attr("axis")))))  # type: ignore[union-attr]
    return Sized() if any(isinstance(v, Sized) for v in at.values) else Shared()


@rule("Unpack", sizes=True, numbers=True)
def unpack(at: At) -> Value | list[Value]:
    """Slices along an axis, one by one."""
    value, sizes = at.values[0], at.sizes(0)
    if isinstance(value, (Shared, Sized)):
        if value.numbers is not None and value.numbers.array.ndim == 1:
            return [numbered(SizeArray.scalar(s)) for s in value.numbers.sizes]
        return type(value)()
    if not isinstance(value, ByExample) or sizes is None:
        return at.mixed("unknown")
    axis = int(at.attr("axis")) % len(sizes)
    if axis == value.axis:
        return at.mixed()
    kept = [s for a, s in enumerate(sizes) if a != axis]
    return [at.give(value.at(value.axis - (axis < value.axis)), kept, n) for n in range(len(at.op.outputs))]


@rule("ConcatV2", sizes=True, numbers=True)
def concat(at: At) -> Value:
    """Tensors one after the other along an axis."""
    parts, axis = at.values[:-1], at.plain(len(at.values) - 1)
    if all(isinstance(v, (Shared, Sized)) for v in parts):
        return _concat_numbers(at, len(parts))
    sizes = [at.sizes(n) for n in range(len(parts))]
    if axis is None or any(s is None for s in sizes):
        return at.mixed("unknown")
    owners = [v for v in parts if isinstance(v, ByExample)]
    rank = len(sizes[0])  # type: ignore[arg-type]
    place = axis[0] % rank
    if len(owners) < len(parts):
        return at.mixed("size" if any(isinstance(v, Sized) for v in parts) else "position")
    if owners[0].axis == place or any(v != owners[0] for v in owners):
        return at.mixed()
    lengths: list[Size | None] = list(sizes[0])  # type: ignore[arg-type]
    along = [s[place] for s in sizes]  # type: ignore[index]
    plain = [s.plain for s in along]
    lengths[place] = size(sum(plain)) if all(p is not None for p in plain) else None  # type: ignore[arg-type]
    return at.give(owners[0], lengths)


def _concat_numbers(at: At, count: int) -> Value:
    several = [at.numbers(n) for n in range(count)]
    axis = at.plain(count)
    if axis is not None and all(n is not None and n.array.ndim for n in several):
        return numbered(SizeArray(np.concatenate([n.array for n in several], axis[0])))  # type: ignore[union-attr]
    return Sized() if any(isinstance(v, Sized) for v in at.values[:count]) else Shared()


@rule("Split", "SplitV")
def split(at: At) -> Value | list[Value]:
    """Parts along an axis."""
    number, place = (1, 0) if at.op.type == "Split" else (0, 2)
    value, axis, sizes = at.values[number], at.plain(place), at.sizes(number)
    if isinstance(value, Shared):
        return Shared()
    if not all(isinstance(v, Shared) for n, v in enumerate(at.values) if n != number):
        return at.mixed("length")
    if not isinstance(value, ByExample) or axis is None or sizes is None:
        return at.mixed("unknown")
    along = axis[0] % len(sizes)
    if along == value.axis:
        return at.mixed()
    return [
        at.give(value, [None if a == along else s for a, s in enumerate(sizes)], n) for n in range(len(at.op.outputs))
    ]


@rule("Pad")
def pad(at: At) -> Value:
    """Margins along axes other than the examples'."""
    value, margins, sizes = at.values[0], at.numbers(1), at.sizes(0)
    if isinstance(value, Shared) and all(isinstance(v, Shared) for v in at.values):
        return Shared()
    shared = all(isinstance(v, Shared) for v in at.values[1:])
    if not isinstance(value, ByExample) or margins is None or sizes is None or not shared:
        return at.mixed("unknown")
    before, after = margins.array[value.axis]
    if before != size(0) or after != size(0):
        return at.mixed("order")
    return at.give(value, [s if a == value.axis else None for a, s in enumerate(sizes)])


@rule("ReverseV2")
def reverse(at: At) -> Value:
    """Reversed along axes other than the examples'."""
    value, axes, rank = at.values[0], at.plain(1), at.rank(0)
    if isinstance(value, Shared) and isinstance(at.values[1], Shared):
        return Shared()
    if not isinstance(value, ByExample) or axes is None or rank is None:
        return at.mixed("unknown")
    return at.mixed() if value.axis in {a % rank for a in axes} else at.give(value, at.sizes(0))


@rule("SpaceToBatchND")
def space_to_batch(at: At) -> Value:
    """Blocks of positions, each with all examples: part of a dilated convolution."""
    value, blocks, sizes = at.values[0], at.plain(1), at.sizes(0)
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    if not isinstance(at.values[2], Shared):  # margins
        return at.mixed("length")
    if not isinstance(value, ByExample) or blocks is None or value.axis or sizes is None:
        return at.mixed("unknown")
    times = size(int(product([size(b) for b in blocks]).number))
    lengths = [sizes[0] * times, *[None] * len(blocks), *sizes[1 + len(blocks) :]]
    return at.give(ByExample(0, times * value.outer, value.inner), lengths)


@rule("BatchToSpaceND")
def batch_to_space(at: At) -> Value:
    """The inverse of `SpaceToBatchND`."""
    value, blocks, sizes = at.values[0], at.plain(1), at.sizes(0)
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    if not isinstance(at.values[2], Shared):  # margins
        return at.mixed("length")
    if not isinstance(value, ByExample) or blocks is None or value.axis or sizes is None:
        return at.mixed("unknown")
    outer = value.outer.over(product([size(b) for b in blocks]))
    if outer is None or not outer.is_whole:
        return at.mixed("order")
    lengths = [outer * BATCH * value.inner, *[None] * len(blocks), *sizes[1 + len(blocks) :]]
    return at.give(ByExample(0, outer, value.inner), lengths)
