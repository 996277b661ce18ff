"""Slices: along the examples' axis all or nothing, along the others anything.

A slice of the batch by numbers, `x[:3]` or `x[1:]`, gives examples by their place in it, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdp_rec.core.sensitivity.independence.reading import At, rule
from tfdp_rec.core.sensitivity.independence.sizes import ONE, Size, size
from tfdp_rec.core.sensitivity.independence.values import Sized, Value, value_of_lengths


class _Item(NamedTuple):
    """One item of `x[a:b:c, None, 3]`: its kind, "slice", "new" or "one"; its axis; its place, None in an ellipsis."""

    kind: str
    axis: int | None
    place: int | None


def _items(at: At, rank: int, count: int) -> list[_Item]:
    """A strided slice's `count` items, axis by axis."""
    ellipsis, new, one = (int(at.attr(f"{name}_mask")) for name in ("ellipsis", "new_axis", "shrink_axis"))
    named = sum(not (ellipsis | new) >> n & 1 for n in range(count))
    # TensorFlow's order: an ellipsis stands for the axes that no other item names, new axes name none.
    found: list[_Item] = []
    axis = 0
    for n in range(count):
        if ellipsis >> n & 1:
            found += [_Item("slice", a, None) for a in range(axis, axis + rank - named)]
            axis += rank - named
        elif new >> n & 1:
            found.append(_Item("new", None, n))
        else:
            found.append(_Item("one" if one >> n & 1 else "slice", axis, n))
            axis += 1
    return found + [_Item("slice", a, None) for a in range(axis, rank)]


def _is_whole(at: At, item: _Item, sizes: Sequence[Size | None]) -> bool:
    """Whether a slice takes all of its axis."""
    if item.place is None or item.axis is None:
        return item.axis is not None
    begin, end, strides = (at.entries(n) for n in (1, 2, 3))
    n, length = item.place, sizes[item.axis]
    starts = bool(at.attr("begin_mask") >> n & 1) or begin is not None and begin[n] == size(0)
    stops = bool(at.attr("end_mask") >> n & 1) or end is not None and length is not None and end[n] == length
    return item.kind == "slice" and starts and stops and strides is not None and strides[n] == ONE


@rule("StridedSlice", sizes=True, numbers=True, arguments=(1, 2, 3))
def slice_by_strides(at: At) -> Value:
    """`x[a:b:c, ..., None, 3]`."""
    value, sizes = at.by_example(follow=lambda x, *bounds: x[_index(at, x.ndim, *bounds)])
    strides = at.entries(3)
    if strides is None:
        return at.mixed("unknown")
    lengths: list[Size | None] = []
    axis = None
    for item in _items(at, len(sizes), len(strides)):
        whole = _is_whole(at, item, sizes)
        if item.axis == value.axis:
            if not whole:
                return at.mixed("position")
            axis = len(lengths)
        elif item.axis is not None and not whole and not _is_fixed(at, item):
            return at.mixed("size")
        if item.kind != "one":
            lengths.append(ONE if item.axis is None else sizes[item.axis] if whole else None)
    return at.mixed("unknown") if axis is None else at.give(value.move_to(axis), lengths)


def _is_fixed(at: At, item: _Item) -> bool:
    """Whether a slice begins, ends and strides independently of the batch's size."""
    if not any(isinstance(v, Sized) for v in at.values[1:4]):
        return True
    bounds: list[Any] = [at.entries(n) for n in (1, 2, 3)]
    return all(b is not None and b[item.place] is not None and not b[item.place].has_batch for b in bounds)


def _index(at: At, rank: int, begin: Any, end: Any, strides: Any) -> tuple[Any, ...]:
    """The same slice of an array."""
    found: list[Any] = []
    for kind, _, n in _items(at, rank, len(strides)):
        if kind != "slice" or n is None:
            found.append(None if kind == "new" else slice(None) if n is None else begin[n])
            continue
        start = None if at.attr("begin_mask") >> n & 1 else begin[n]
        found.append(slice(start, None if at.attr("end_mask") >> n & 1 else end[n], strides[n]))
    return tuple(found)


@rule("StridedSliceGrad", sizes=True, arguments=(0, 1, 2, 3))
def place_gradient_of_slice(at: At) -> Value:
    """The slice's gradient in its place, zeros elsewhere."""
    shape, strides = at.numbers(0), at.entries(3)
    value, _ = at.by_example(4)
    if shape is None or None in shape.sizes or strides is None:
        return at.mixed("unknown")
    items, found = _items(at, len(shape.sizes), len(strides)), value_of_lengths(shape.sizes)  # type: ignore[arg-type]
    kept = [item for item in items if item.kind != "one"]
    here = kept[value.axis] if value.axis < len(kept) else None
    if here is None or here.axis is None or found != value.move_to(here.axis) or not _is_whole(at, here, shape.sizes):
        return at.mixed("order")
    others = [item for item in items if item.axis not in (None, here.axis)]
    if not all(_is_whole(at, item, shape.sizes) or _is_fixed(at, item) for item in others):
        return at.mixed("size")
    return at.give(found, shape.sizes)


@rule("Slice", sizes=True, numbers=True, arguments=(1, 2))
def take_block(at: At) -> Value:
    """A block: from `begin`, of lengths `size` (-1: to the end)."""
    value, sizes = at.by_example(follow=_block)
    begin, lengths, axis = at.entries(1), at.entries(2), value.axis
    if begin is None or lengths is None:
        return at.mixed("unknown")
    if begin[axis] != size(0) or lengths[axis] not in (size(-1), sizes[axis]):
        return at.mixed("position")
    if any(e is None or e.has_batch for a in range(len(sizes)) if a != axis for e in (begin[a], lengths[a])):
        return at.mixed("size")
    return at.give(value, [sizes[a] if a == axis else None if n == size(-1) else n for a, n in enumerate(lengths)])


def _block(array: np.ndarray, begin: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return array[tuple(slice(b, None if n == -1 else b + n) for b, n in zip(begin, lengths))]
