"""Slices: along the examples' axis all or nothing, along the others anything.

A slice of the batch by numbers, `x[:3]` or `x[1:]`, gives examples by their place in it, and is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdp_rec.independence.reading import At, rule
from tfdp_rec.independence.sizes import BATCH, ONE, Size, SizeArray, size
from tfdp_rec.independence.values import ByExample, Sized, Value


@dataclasses.dataclass(frozen=True)
class _Item:
    """One item of `x[a:b:c, None, 3]`: its kind, "slice" (`whole` for all of the axis), "new" or "one"; its axis."""

    kind: str
    axis: int | None
    whole: bool = False


def _items(at: At, rank: int, begin: Any, end: Any, strides: Any, sizes: Any) -> list[_Item]:
    """A strided slice's items, axis by axis."""
    count = len(strides)
    mask = {name: int(at.attr(f"{name}_mask")) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    named = sum(
        1 for n in range(count) if not (mask["ellipsis"] >> n & 1) and not (mask["new_axis"] >> n & 1)
    )
    # TensorFlow's order: an ellipsis stands for the axes that no other item names, new axes name none.
    found, axis = [], 0
    for n in range(count):
        if mask["ellipsis"] >> n & 1:
            for _ in range(rank - named):
                found.append(_Item("slice", axis, True))
                axis += 1
        elif mask["new_axis"] >> n & 1:
            found.append(_Item("new", None))
        elif mask["shrink_axis"] >> n & 1:
            found.append(_Item("one", axis))
            axis += 1
        else:
            starts = bool(mask["begin"] >> n & 1) or _is(begin, n, size(0))
            stops = bool(mask["end"] >> n & 1) or (sizes is not None and _is(end, n, sizes[axis]))
            found.append(_Item("slice", axis, starts and stops and _is(strides, n, ONE)))
            axis += 1
    found += [_Item("slice", a, True) for a in range(axis, rank)]
    return found


def _is(numbers: Any, place: int, wanted: Size) -> bool:
    return numbers is not None and numbers[place] == wanted


def _entries(at: At, number: int) -> Any:
    found = at.numbers(number)
    return None if found is None else found.sizes


@rule("StridedSlice", sizes=True, numbers=True, arguments=(1, 2, 3))
def strided_slice(at: At) -> Value:
    """`x[a:b:c, ..., None, 3]`."""
    if not isinstance(at.values[0], ByExample):
        return at.followed(lambda x, *bounds: x[_index(at, *bounds)])
    value, sizes = at.by_example()
    strides = _entries(at, 3)
    if strides is None:
        return at.mixed("unknown")
    return _sliced(at, value, sizes, _items(at, len(sizes), _entries(at, 1), _entries(at, 2), strides, sizes))


def _sliced(at: At, value: ByExample, sizes: tuple[Size, ...], items: list[_Item]) -> Value:
    lengths: list[Size | None] = []
    axis = None
    for item in items:
        if item.kind == "new":
            lengths.append(ONE)
        elif item.axis == value.axis:
            if item.kind == "one" or not item.whole:
                return at.mixed("position")
            axis = len(lengths)
            lengths.append(sizes[value.axis])
        elif not item.whole and any(isinstance(v, Sized) for v in at.values[1:]) and not _fixed(at, item.axis):
            return at.mixed("size")
        elif item.kind == "slice":
            lengths.append(sizes[item.axis] if item.whole else None)  # type: ignore[index]
    if axis is None:
        return at.mixed("unknown")
    return at.give(value.at(axis), lengths)


def _fixed(at: At, axis: int | None) -> bool:
    """Whether a slice of this axis begins and ends independently of the batch's size."""
    if int(at.attr("ellipsis_mask")) or int(at.attr("new_axis_mask")) or axis is None:
        return False
    return all((n := at.numbers(i)) is not None and not SizeArray.row([n.sizes[axis]]).of_batch for i in (1, 2))


def _index(at: At, begin: Any, end: Any, strides: Any) -> tuple[Any, ...]:
    mask = {name: int(at.attr(f"{name}_mask")) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    found: list[Any] = []
    for n in range(len(strides)):
        if mask["ellipsis"] >> n & 1:
            found.append(Ellipsis)
        elif mask["new_axis"] >> n & 1:
            found.append(None)
        elif mask["shrink_axis"] >> n & 1:
            found.append(begin[n])
        else:
            start = None if mask["begin"] >> n & 1 else begin[n]
            found.append(slice(start, None if mask["end"] >> n & 1 else end[n], strides[n]))
    return tuple(found)


@rule("StridedSliceGrad", sizes=True, arguments=(0, 1, 2, 3))
def strided_slice_gradient(at: At) -> Value:
    """The slice's gradient in its place, zeros elsewhere."""
    shape, strides = at.numbers(0), _entries(at, 3)
    value, _ = at.by_example(4)
    if shape is None or None in shape.sizes or strides is None:
        return at.mixed("unknown")
    axes = [a for a, s in enumerate(shape.sizes) if s.of_batch]  # type: ignore[union-attr]
    items = _items(at, len(shape.sizes), _entries(at, 1), _entries(at, 2), strides, shape.sizes)
    kept = [item for item in items if item.kind != "one"]
    here = kept[value.axis] if value.axis < len(kept) else None
    if len(axes) != 1 or here is None or here.axis != axes[0] or not here.whole:
        return at.mixed("order")
    if shape.sizes[axes[0]] != BATCH * value.inner:
        return at.mixed("order")
    return at.give(value.at(axes[0]), shape.sizes)


@rule("Slice", sizes=True, numbers=True, arguments=(1, 2))
def sliced(at: At) -> Value:
    """A block: from `begin`, of lengths `size` (-1: to the end)."""
    if not isinstance(at.values[0], ByExample):
        return at.followed(_block)
    value, sizes = at.by_example()
    begin, lengths, axis = _entries(at, 1), _entries(at, 2), value.axis
    if begin is None or lengths is None:
        return at.mixed("unknown")
    if begin[axis] != size(0) or lengths[axis] not in (size(-1), sizes[axis]):
        return at.mixed("position")
    if any(e is None or e.of_batch for a in range(len(sizes)) if a != axis for e in (begin[a], lengths[a])):
        return at.mixed("size")
    return at.give(value, [sizes[a] if a == axis else None if n == size(-1) else n for a, n in enumerate(lengths)])


def _block(array: np.ndarray, begin: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return array[tuple(slice(b, None if n == -1 else b + n) for b, n in zip(begin, lengths))]
