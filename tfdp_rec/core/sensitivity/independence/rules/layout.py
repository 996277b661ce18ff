"""Operations that move entries: reshape, transpose, concatenation and the like.

A reshape keeps the order of entries in memory. With P the product of the lengths before the axis of the examples and R
that of the lengths behind it, memory holds [P, B, inner · R]. A new shape with P before an axis of length B · inner' is
by example along that axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdp_rec.core.sensitivity.independence.reading import At, Settled, rule
from tfdp_rec.core.sensitivity.independence.rules.reductions import drop_axes
from tfdp_rec.core.sensitivity.independence.rules.shapes import fill_shape
from tfdp_rec.core.sensitivity.independence.sizes import ONE, Size, SizeArray, product, size
from tfdp_rec.core.sensitivity.independence.values import ByExample, Shared, Sized, Value, value_of_lengths


@rule("Reshape", sizes=True, numbers=True, arguments=(1,))
def reshape(at: At) -> Value:
    """The same entries in the same order."""
    target = at.numbers(1)
    if not isinstance(at.values[0], ByExample):
        return at.give(at.follow(lambda x, shape: x.reshape(shape)), _check_target(target, at.sizes(0)))
    value, sizes = at.by_example()
    lengths = None if target is None else _complete_target(target, sizes)
    found = None if lengths is None else value_of_lengths(lengths)
    if lengths is None or found is None or product(sizes[: value.axis]) != product(lengths[: found.axis]):
        return at.mixed("order")
    return at.give(found, lengths)


def _check_target(target: SizeArray | None, sizes: Sequence[Size] | None) -> list[Size | None] | None:
    """The lengths of a reshaped tensor without examples."""
    # TensorFlow's optimizer takes a length that it does not know for the one that the entries fill up. If the shape is
    # then the old one, it removes the reshape, and with it the check that the entries fill up what was asked for.
    if target is None:
        return None
    lengths = None if sizes is None else _complete_target(target, sizes)
    if lengths is not None and product(lengths) == product(sizes or ()):
        return [*lengths]
    return [None if s is None or s == size(-1) or s.letters else s for s in target.sizes]


def _complete_target(target: SizeArray, sizes: Sequence[Size]) -> list[Size] | None:
    """The lengths that a reshape asks for, with -1 replaced."""
    known = [entry for entry in target.sizes if entry is not None]
    if len(known) < len(target.sizes):
        return None
    others = product([entry for entry in known if entry != size(-1)])
    rest = product(sizes).divide_by(others)
    # Where a length that is asked for is 0, TensorFlow leaves all zeros out: -1 is then 96 for lengths 12, 0, 8, 0.
    if rest is not None and size(-1) in known and {*others.letters} - {"batch"} and {*rest.letters} - {"batch"}:
        return None
    lengths = [rest if entry == size(-1) else entry for entry in known]
    return None if None in lengths else lengths  # type: ignore[return-value]


@rule("ExpandDims", sizes=True, numbers=True, arguments=(1,))
def expand(at: At) -> Value:
    """One more axis, of length one."""
    value, sizes = at.by_example(follow=lambda x, axis: np.expand_dims(x, int(axis.item())))
    (place,) = at.axes(1, len(sizes) + 1)
    return at.give(value.move_to(value.axis + (place <= value.axis)), _insert(sizes, place, ONE))


def _insert(sizes: Sequence[Size], axis: int, length: Size) -> list[Size]:
    return [*sizes[:axis], length, *sizes[axis:]]


@rule("Squeeze", sizes=True, numbers=True)
def squeeze(at: At) -> Value:
    """Named axes of length one are removed; without names, a batch of one would lose its axis: mixed."""
    named = tuple(at.attr("squeeze_dims"))
    value, sizes = at.by_example(follow=lambda x: x.squeeze(named or None))
    axes = {a % len(sizes) for a in named}
    return at.mixed("order") if not axes or value.axis in axes else drop_axes(at, value, sizes, axes)


@rule("Transpose", sizes=True, numbers=True, arguments=(1,))
def transpose(at: At) -> Value:
    """Axes in another order."""
    value, sizes = at.by_example(follow=lambda x, order: x.transpose(order))
    order = at.axes(1, len(sizes))
    return at.give(value.move_to(order.index(value.axis)), [sizes[a] for a in order])


@rule("BroadcastTo", sizes=True, numbers=True, arguments=(1,))
def broadcast_to(at: At) -> Value:
    """Repeated along axes of length one, or new ones."""
    target, sizes = at.numbers(1), at.sizes(0)
    if isinstance(at.values[0], Shared):
        if isinstance(at.values[1], Shared):
            return fill_shape(at, target, True, at.numbers(0) if at.rank(0) == 0 else None)
        return _repeat_shared(at, sizes, target)
    value, sizes = at.by_example()
    if target is None:
        return at.mixed("unknown")
    axis = value.axis + len(target.sizes) - len(sizes)
    others = [s for a, s in enumerate(target.sizes) if a != axis]
    if target.sizes[axis] != sizes[value.axis] or any(s is None or s.has_batch for s in others):
        return at.mixed("order")
    return at.give(value.move_to(axis), target.sizes)


def _repeat_shared(at: At, sizes: Sequence[Size] | None, target: SizeArray | None) -> Value:
    """A shared tensor repeated as often as there are examples: by example if it has length one there."""
    found = fill_shape(at, target, False)
    if sizes is None or target is None or not isinstance(found, ByExample):
        return at.mixed("size")
    own = found.axis - (len(target.sizes) - len(sizes))
    return found if own < 0 or sizes[own] == ONE else at.mixed("position")


@rule("Tile", sizes=True, arguments=(1,))
def tile(at: At) -> Value:
    """Repeated as often as asked along each axis."""
    value, times, sizes = at.values[0], at.numbers(1), at.sizes(0)
    if isinstance(value, (Shared, Sized)) and isinstance(at.values[1], Shared):
        return value
    if times is None or sizes is None or None in times.sizes:
        return at.mixed("size")
    lengths = [length * t for length, t in zip(sizes, times.sizes)]  # type: ignore[operator]
    if isinstance(value, Shared):
        return _repeat_shared(at, sizes, SizeArray.row(lengths))
    if not isinstance(value, ByExample) or times.has_batch:
        return at.mixed("size")
    return at.give(value, lengths) if times.sizes[value.axis] == ONE else at.mixed("order")


@rule("Pack", sizes=True, numbers=True)
def pack(at: At) -> Value:
    """Tensors side by side along a new axis."""
    axis = int(at.attr("axis"))
    if not any(isinstance(v, ByExample) for v in at.values):
        return at.follow(lambda *parts: np.stack(parts, axis))
    owners = _alike(at, range(len(at.values)))
    value, sizes = owners[0]
    axis %= len(sizes) + 1
    return at.give(value.move_to(value.axis + (axis <= value.axis)), _insert(sizes, axis, size(len(owners))))


def _alike(at: At, numbers: Sequence[int]) -> list[tuple[ByExample, tuple[Size, ...]]]:
    """Inputs by example that are put together, all of one value; settles the outputs for others."""
    for value in (at.values[n] for n in numbers):
        if not isinstance(value, ByExample):
            raise Settled(at.mixed("size" if isinstance(value, Sized) else "position"))
    owners = [at.by_example(n) for n in numbers]
    if any(value != owners[0][0] for value, _ in owners):
        raise Settled(at.mixed())
    return owners


@rule("Unpack", sizes=True, numbers=True)
def unpack(at: At) -> Value | list[Value]:
    """Slices along an axis, one by one."""
    axis = int(at.attr("axis"))
    value, sizes = at.by_example(follow=lambda x: list(np.moveaxis(x, axis, 0)))
    axis %= len(sizes)
    if axis == value.axis:
        return at.mixed()
    return [drop_axes(at, value, sizes, {axis}, n) for n in range(len(at.op.outputs))]


@rule("ConcatV2", sizes=True, numbers=True, arguments=(-1,))
def concat(at: At) -> Value:
    """Tensors one after the other along an axis."""
    count = len(at.values) - 1
    if not any(isinstance(v, ByExample) for v in at.values):
        return at.follow(lambda *parts: np.concatenate(parts[:-1], int(parts[-1].item())))
    owners = _alike(at, range(count))
    value, sizes = owners[0]
    (place,) = at.axes(count, len(sizes))
    if value.axis == place:
        return at.mixed()
    along = [own[place].plain for _, own in owners]
    total = None if None in along else size(sum(along))  # type: ignore[arg-type]
    return at.give(value, [total if axis == place else s for axis, s in enumerate(sizes)])


@rule("Split", arguments=(0,))
@rule("SplitV", arguments=(1, 2))
def split(at: At) -> Value | list[Value]:
    """Parts along another axis than the examples'; one part is the whole."""
    data, argument = (1, 0) if at.op.type == "Split" else (0, 2)
    value, sizes = at.by_example(data)
    if len(at.op.outputs) == 1:
        return at.give(value, sizes)
    (along,) = at.axes(argument, len(sizes))
    if along == value.axis:
        return at.mixed()
    lengths = [None if axis == along else length for axis, length in enumerate(sizes)]
    return [at.give(value, lengths, n) for n in range(len(at.op.outputs))]


@rule("Pad", arguments=(1,))
def pad(at: At) -> Value:
    """Margins along axes other than the examples'."""
    value, sizes = at.by_example()
    margins = at.numbers(1)
    if margins is None:
        return at.mixed("unknown")
    if any(margin != size(0) for margin in margins.array[value.axis]):
        return at.mixed("order")
    return at.give(value, [s if a == value.axis else None for a, s in enumerate(sizes)])
