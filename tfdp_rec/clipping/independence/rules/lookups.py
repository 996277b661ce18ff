"""Rows by their numbers: gather, scatter, one-hot, lookup tables.

Each example's rows of something shared are its own. Rows of a tensor that is by example are an example's own if they
are looked up along another axis, or under the example's own number in the batch: `gather` with `batch_dims`,
`gather_nd` at (number, id). Segments whose numbers are data mix.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdp_rec.clipping.independence.reading import At, rule
from tfdp_rec.clipping.independence.rules.elementwise import lined_up
from tfdp_rec.clipping.independence.sizes import BATCH, ONE, Numbers, Size
from tfdp_rec.clipping.independence.values import (
    ByExample,
    Flat,
    Handle,
    Places,
    Shared,
    Sized,
    Tuples,
    Value,
    numbered,
)


@rule("Gather", "GatherV2", places=True, sizes=True)
def gather(at: At) -> Value:
    """Rows along an axis."""
    rows, ids = at.values[0], at.values[1]
    if isinstance(rows, (Shared, Sized)) and isinstance(ids, (Shared, Sized)):
        return _gathered_numbers(at, rows)
    axis = at.plain(2) if at.op.type == "GatherV2" else [0]
    leading = int(at.attr("batch_dims")) if at.op.type == "GatherV2" else 0
    sizes, places = at.sizes(0), at.sizes(1)
    if axis is None or sizes is None or places is None or Sized in (type(rows), type(ids)):
        return at.mixed("size" if Sized in (type(rows), type(ids)) else "unknown")
    along, leading = axis[0] % len(sizes), leading % (len(places) or 1) if leading < 0 else leading
    lengths = [*sizes[:along], *places[leading:], *sizes[along + 1 :]]
    if isinstance(ids, (Tuples, Flat)) or isinstance(rows, (Places, Tuples, Flat)):
        return at.mixed("position")
    if isinstance(ids, Places):
        return _own_rows(at, rows, ids, along, lengths)
    if isinstance(rows, Shared) and isinstance(ids, ByExample):
        kept = leading == 0 or ids.axis >= leading
        return at.give(ByExample(along + ids.axis - leading, *ids.layout), lengths) if kept else at.mixed("position")
    if isinstance(rows, ByExample) and isinstance(ids, Shared) and not leading:
        if rows.axis == along:
            return at.mixed("position")
        return at.give(rows.at(rows.axis + (len(places) - 1) * (rows.axis > along)), lengths)
    if isinstance(rows, ByExample) and isinstance(ids, ByExample):
        if not (rows.axis == ids.axis < leading and rows.layout == ids.layout):
            return at.mixed()
        if not tf.config.list_physical_devices("GPU"):  # there, an id out of range is no error
            at.reading.within.add((id(at.op.inputs[1]), sizes[along]))
        return at.give(ByExample(rows.axis, *rows.layout), lengths)
    return at.mixed()


def _own_rows(at: At, rows: Value, ids: Places, along: int, lengths: list[Size]) -> Value:
    """Row i for example i: the tensor itself."""
    own = isinstance(rows, ByExample) and rows.axis == along and rows.is_plain
    exact = ids.is_plain and ids.step == ONE and at.rank(1) == 1
    return at.give(rows, lengths) if own and exact else at.mixed("position")


def _gathered_numbers(at: At, rows: Shared | Sized) -> Value:
    ids = at.plain(1)
    if rows.numbers is not None and rows.numbers.array.ndim == 1 and ids is not None:
        return numbered(Numbers(np.asarray(rows.numbers.array[np.reshape(ids, at.numbers(1).array.shape)], object)))  # type: ignore[union-attr]
    return Sized() if Sized in (type(rows), type(at.values[1])) else Shared()


@rule("ResourceGather")
def rows_of_a_variable(at: At) -> Value:
    """Rows of a table, each for the id that asks."""
    table, ids = at.values
    contents = at.reading.contents(at, table)
    sizes, axes = at.sizes(1), at.op.outputs[0].shape.rank
    if not isinstance(contents, Shared) or isinstance(ids, Shared):
        return contents
    if not isinstance(ids, ByExample) or int(at.attr("batch_dims")):
        return at.mixed("unknown")
    ids = ByExample(ids.axis, *ids.layout)
    tail = [None] * (axes - len(sizes)) if axes is not None and sizes is not None else []
    return at.give(ids, [*sizes, *tail] if sizes is not None and axes is not None else None)


@rule("ResourceGatherNd")
def entries_of_a_variable(at: At) -> Value:
    """Entries of a table at tuples of ids."""
    contents, ids = at.reading.contents(at, at.values[0]), at.values[1]
    if not isinstance(contents, Shared) or isinstance(ids, Shared):
        return contents
    return _along_tuples(at, ids, 1)


@rule("GatherNd", places=True)
def gather_nd(at: At) -> Value:
    """Entries at tuples of numbers."""
    rows, ids = at.values
    if isinstance(rows, Shared):
        if isinstance(ids, Shared):
            return Shared()
        return at.mixed("position") if isinstance(ids, (Places, Tuples)) else _along_tuples(at, ids, 1)
    if isinstance(rows, Places) or not isinstance(rows, ByExample):
        return at.mixed("position")
    sizes, places = at.sizes(0), at.sizes(1)
    if sizes is None or places is None:
        return at.mixed("unknown")
    taken = places[-1].plain
    if isinstance(ids, Shared) and taken is not None and not isinstance(rows, Tuples):  # before the examples' axis
        return at.give(rows.at(rows.axis - taken + len(places) - 1)) if rows.axis >= taken else at.mixed("position")
    if not isinstance(ids, Tuples) or rows.axis or not rows.is_plain or isinstance(rows, Tuples):
        return at.mixed("mixes")
    lengths = [*places[:-1], *(sizes[taken:] if taken is not None else [])]
    return at.give(ByExample(ids.axis), lengths if taken is not None else None)


def _along_tuples(at: At, ids: Value, number: int) -> Value:
    rank = at.rank(number)
    if not isinstance(ids, ByExample) or rank is None or ids.axis >= rank - 1:
        return at.mixed()
    return ByExample(ids.axis, *ids.layout)


@rule("ScatterNd", places=True, sizes=True)
def scatter_nd(at: At) -> Value:
    """Zeros, and each example's entries under its own number: the gradient of `gather_nd`."""
    ids, updates, shape = at.values[0], at.values[1], at.numbers(2)
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    if shape is None or None in shape.sizes:
        return at.mixed("unknown")
    if isinstance(ids, Flat):
        return _flat_entries(at, ids, updates, shape, 1)
    own = isinstance(ids, Tuples) and ids.is_plain and ids.axis == 0
    by_example = type(updates) is ByExample and updates.is_plain and updates.axis == 0
    alone = shape.sizes[0] == BATCH and not any(s.of_batch for s in shape.sizes[1:])  # type: ignore[union-attr]
    return at.give(ByExample(0), shape.sizes) if own and by_example and alone else at.mixed()


def _flat_entries(at: At, ids: Flat, updates: Value, shape: Numbers, taken: int) -> Value:
    """Each example's entries among its own `below` of a tensor that is laid out by example."""
    fits = shape.sizes[0] == BATCH * ids.below and not any(s is None or s.of_batch for s in shape.sizes[1:])
    ranks = (at.rank(0) or 0) - taken, at.rank(1) or 0
    lined_up = type(updates) is ByExample and updates.axis == ids.axis == 0 and updates.layout == ids.layout
    if fits and lined_up and ranks[0] <= ranks[1]:
        return at.give(ByExample(0, inner=ids.below), shape.sizes)
    return at.mixed("position")


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


@rule("LookupTableFind", "LookupTableFindV2")
def looked_up(at: At) -> Value:
    """What a table of the model says of each key."""
    if not isinstance(at.values[0], (Handle, Shared)):
        return at.mixed("unknown")
    return at.give(lined_up(at, (1, 2)), at.sizes(1))


@rule("LookupTableSize", "LookupTableSizeV2")
def table_size(at: At) -> Value:
    """How many keys a table has: it is not written in the loss."""
    return Shared()


_SEGMENTS = ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")


@rule(*_SEGMENTS, places=True, sizes=True)
def segments(at: At) -> Value:
    """Rows with one number added up: by shared numbers, along axes before the examples'; or each example's own."""
    rows, ids, count = at.values[0], at.values[1], at.numbers(2)
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    taken = at.rank(1)
    if isinstance(ids, ByExample) and count is not None and taken is not None:
        return _own_segments(at, rows, ids, count.sizes[0], taken)
    if isinstance(at.values[2], Sized):
        return at.mixed("size")
    if not isinstance(rows, ByExample) or not isinstance(ids, Shared) or taken is None or rows.axis < taken:
        return at.mixed()
    sizes, count = at.sizes(0), at.numbers(2)
    lengths = None if sizes is None else [count.sizes[0] if count is not None else None, *sizes[taken:]]
    return at.give(rows.at(rows.axis - taken + 1), lengths)


def _own_segments(at: At, rows: Value, ids: ByExample, count: Size | None, taken: int) -> Value:
    """Segments numbered by example: gradient of `gather` with `batch_dims`, or of all rows by number."""
    sizes = at.sizes(0)
    if type(rows) is not ByExample or rows.axis or ids.axis or rows.layout != ids.layout or sizes is None:
        return at.mixed("mixes")
    tail = list(sizes[taken:])
    if isinstance(ids, Flat) and count == BATCH * ids.below:
        return at.give(ByExample(0, inner=ids.below), [count, *tail])
    if isinstance(ids, Places) and ids.is_plain and ids.step == ONE and count == BATCH and taken == 1:
        return at.give(ByExample(0), [count, *tail])
    return at.mixed("mixes")


@rule(*(f"TensorScatter{how}" for how in ("Update", "Add", "Sub", "Max", "Min")), places=True)
def tensor_scatter(at: At) -> Value:
    """Entries of a tensor written anew, each example's under its own number."""
    value, ids, updates = at.values
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    if value != ByExample(0) or ids != Tuples(0) or updates != ByExample(0):
        return at.mixed()
    return at.give(ByExample(0), at.sizes(0))
