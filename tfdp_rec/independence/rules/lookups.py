"""Rows by number: gather, one-hot, lookup tables, and the sums of rows that are their gradients.

Rows of a shared tensor, looked up by an example's ids, are by example. Rows of a tensor by example are by example if
they are looked up along another axis by shared numbers, or with `batch_dims` by the example's own.
"""

from __future__ import annotations

import numpy as np

from tfdp_rec.independence.reading import At, rule
from tfdp_rec.independence.rules.elementwise import lined_up
from tfdp_rec.independence.sizes import SizeArray, size
from tfdp_rec.independence.values import ByExample, Handle, Mixed, Shared, Sized, Value, numbered


@rule("GatherV2", sizes=True, numbers=True)
def gather(at: At) -> Value:
    """y[i.., b, j..] = x[i.., ids[b], j..]: rows along an axis, in the three cases above."""
    rows, ids = at.values[0], at.values[1]
    if isinstance(rows, (Shared, Sized)) and isinstance(ids, (Shared, Sized)):
        return _gathered_numbers(at, rows)
    axis, leading = at.plain(2), int(at.attr("batch_dims"))
    sizes, places = at.sizes(0), at.sizes(1)
    if Sized in (type(rows), type(ids)):
        return at.mixed("size")
    if axis is None or sizes is None or places is None or leading < 0:
        return at.mixed("unknown")
    along = axis[0] % len(sizes)
    lengths = [*sizes[:along], *places[leading:], *sizes[along + 1 :]]
    # y has the axes of x before `along`, those of ids behind `batch_dims`, then the rest of x.
    if isinstance(rows, Shared) and isinstance(ids, ByExample):
        kept = ids.axis >= leading
        return at.give(ids.at(along + ids.axis - leading), lengths) if kept else at.mixed("position")
    if isinstance(rows, ByExample) and isinstance(ids, Shared) and not leading:
        if rows.axis == along:
            return at.mixed("position")
        return at.give(rows.at(rows.axis + (len(places) - 1) * (rows.axis > along)), lengths)
    if isinstance(rows, ByExample) and isinstance(ids, ByExample):
        own = rows.axis == ids.axis < leading and rows.layout == ids.layout
        return at.give(rows, lengths) if own else at.mixed()
    return at.mixed()


def _gathered_numbers(at: At, rows: Shared | Sized) -> Value:
    ids = at.plain(1)
    if rows.numbers is not None and rows.numbers.array.ndim == 1 and ids is not None:
        return numbered(SizeArray(np.asarray(rows.numbers.array[np.reshape(ids, at.numbers(1).array.shape)], object)))  # type: ignore[union-attr]
    return Sized() if Sized in (type(rows), type(at.values[1])) else Shared()


@rule("ResourceGather")
def rows_of_a_variable(at: At) -> Value:
    """y[b] = table[ids[b]]: rows of a variable."""
    table, ids = at.values
    contents, sizes = at.reading.contents(at, table), at.sizes(1)
    held = table.lengths if isinstance(table, Handle) else None
    if not isinstance(contents, Shared) or not isinstance(ids, (Shared, ByExample)) or int(at.attr("batch_dims")):
        return contents if isinstance(contents, Mixed) else at.mixed("unknown")
    return at.give(ids, [*sizes, *held[1:]] if sizes is not None and held is not None else None)


@rule("OneHot")
def one_hot(at: At) -> Value:
    """A row of zeros with a one for each number."""
    ids, sizes = at.values[0], at.sizes(0)
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    if not isinstance(ids, ByExample) or sizes is None or not all(isinstance(v, Shared) for v in at.values[1:]):
        return at.mixed("unknown")
    axis = int(at.attr("axis")) % (len(sizes) + 1)
    depth = at.numbers(1)
    lengths = [*sizes[:axis], depth.sizes[0] if depth is not None else None, *sizes[axis:]]
    return at.give(ByExample(ids.axis + (axis <= ids.axis), *ids.layout), lengths)


@rule("LookupTableFindV2")
def looked_up(at: At) -> Value:
    """The entry of a lookup table for each key."""
    if not isinstance(at.values[0], (Handle, Shared)):
        return at.mixed("unknown")
    return at.give(lined_up(at, (1, 2)), at.sizes(1))


@rule("UnsortedSegmentSum")
def segments(at: At) -> Value:
    """y[k, j..] = Σ x[i.., j..] over the i.. with ids[i..] = k: by shared ids, along axes before the examples'."""
    rows, ids, count = at.values[0], at.values[1], at.plain(2)
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    taken, sizes = at.rank(1), at.sizes(0)
    shared = isinstance(ids, Shared) and isinstance(at.values[2], Shared)
    if not isinstance(rows, ByExample) or not shared or taken is None or sizes is None or rows.axis < taken:
        return at.mixed()
    return at.give(rows.at(rows.axis - taken + 1), [None if count is None else size(count[0]), *sizes[taken:]])
