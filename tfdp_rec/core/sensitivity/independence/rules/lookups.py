"""Rows by number: gather, one-hot, lookup tables, and the sums of rows that are their gradients.

Rows of a shared tensor, looked up by an example's ids, are by example. Rows of a tensor by example are by example if
they are looked up along another axis by shared numbers, or with `batch_dims` by the example's own.
"""

from __future__ import annotations

import numpy as np

from tfdp_rec.core.sensitivity.independence.reading import At, rule
from tfdp_rec.core.sensitivity.independence.rules.elementwise import line_up
from tfdp_rec.core.sensitivity.independence.sizes import size
from tfdp_rec.core.sensitivity.independence.values import ByExample, Handle, Mixed, Shared, Sized, Value


@rule("GatherV2", sizes=True, numbers=True, arguments=(2,))
def gather(at: At) -> Value:
    """y[i.., b, j..] = x[i.., ids[b], j..]: rows along an axis, in the three cases above."""
    rows, ids = at.values[0], at.values[1]
    if not isinstance(rows, ByExample) and not isinstance(ids, ByExample):
        places = at.plain(1)
        if places is None or at.attr("batch_dims"):
            return at.follow(lambda *_: None)
        return at.follow(lambda x, ids, axis: x.take(np.array(places, int).reshape(ids.shape), axis.item()))
    axis, leading = at.plain(2), int(at.attr("batch_dims"))
    sizes, at_ids = at.sizes(0), at.sizes(1)
    if Sized in (type(rows), type(ids)):
        return at.mixed("size")
    if axis is None or sizes is None or at_ids is None or leading < 0:
        return at.mixed("unknown")
    along = axis[0] % len(sizes)
    lengths = [*sizes[:along], *at_ids[leading:], *sizes[along + 1 :]]
    # y has the axes of x before `along`, those of ids behind `batch_dims`, then the rest of x.
    if isinstance(rows, Shared) and isinstance(ids, ByExample):
        kept = ids.axis >= leading
        return at.give(ids.move_to(along + ids.axis - leading), lengths) if kept else at.mixed("position")
    if isinstance(rows, ByExample) and isinstance(ids, Shared) and not leading:
        if rows.axis == along:
            return at.mixed("position")
        return at.give(rows.move_to(rows.axis + (len(at_ids) - 1) * (rows.axis > along)), lengths)
    if isinstance(rows, ByExample) and isinstance(ids, ByExample):
        own = rows.axis == ids.axis < leading and rows.inner == ids.inner
        return at.give(rows, lengths) if own else at.mixed()
    return at.mixed()


@rule("ResourceGather")
def rows_of_a_variable(at: At) -> Value:
    """y[b] = table[ids[b]]: rows of a variable."""
    table, ids = at.values
    contents, sizes = at.reading.contents(at, table), at.sizes(1)
    held = table.lengths if isinstance(table, Handle) else None
    if not isinstance(contents, Shared) or not isinstance(ids, (Shared, ByExample)) or int(at.attr("batch_dims")):
        return contents if isinstance(contents, Mixed) else at.mixed("unknown")
    return at.give(ids, [*sizes, *held[1:]] if sizes is not None and held is not None else None)


@rule("OneHot", arguments=(1, 2, 3))
def one_hot(at: At) -> Value:
    """A row of zeros with a one for each number."""
    ids, sizes = at.by_example()
    axis = int(at.attr("axis")) % (len(sizes) + 1)
    lengths = [*sizes[:axis], (at.entries(1) or [None])[0], *sizes[axis:]]
    return at.give(ids.move_to(ids.axis + (axis <= ids.axis)), lengths)


@rule("LookupTableFindV2")
def look_up(at: At) -> Value:
    """The entry of a lookup table for each key; the default has an entry's shape, which must be a number's."""
    if not isinstance(at.values[0], (Handle, Shared)) or at.rank(2) != 0:
        return at.mixed("unknown")
    return at.give(line_up(at, (1, 2)), at.sizes(1))


@rule("UnsortedSegmentSum", arguments=(1, 2))
def segments(at: At) -> Value:
    """y[k, j..] = Σ x[i.., j..] over the i.. with ids[i..] = k: by shared ids, along axes before the examples'."""
    rows, sizes = at.by_example()
    count, taken = at.plain(2), at.rank(1)
    if taken is None or rows.axis < taken:
        return at.mixed()
    return at.give(rows.move_to(rows.axis - taken + 1), [None if count is None else size(count[0]), *sizes[taken:]])
