"""Reductions, cumulative sums, searches along an axis: along any but the examples'."""

from __future__ import annotations

from tfdp_rec.clipping.independence.reading import At, rule
from tfdp_rec.clipping.independence.sizes import ONE, Size
from tfdp_rec.clipping.independence.values import ByExample, Shared, Sized, Value


@rule("Sum", "Mean", "All", "Any", "EuclideanNorm", "ReduceJoin", sizes=False)
def reduction(at: At) -> Value:
    """Several entries made one."""
    value, axes, sizes = at.values[0], at.plain(1), at.sizes(0)
    if isinstance(value, Shared) and isinstance(at.values[1], Shared):
        return Shared()
    if not isinstance(value, ByExample):
        return at.mixed("unknown")
    if axes is None or sizes is None:
        return at.mixed("mixes" if sizes is not None else "unknown")
    gone = {a % len(sizes) for a in axes}
    if value.axis in gone:
        return at.mixed()
    if at.attr("keep_dims"):
        return at.give(value, [ONE if a in gone else s for a, s in enumerate(sizes)])
    kept = [s for a, s in enumerate(sizes) if a not in gone]
    return at.give(value.at(value.axis - sum(a < value.axis for a in gone)), kept)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def cumulative(at: At) -> Value:
    """Running totals."""
    value, axis, rank = at.values[0], at.plain(1), at.rank(0)
    if isinstance(value, Shared) and isinstance(at.values[1], Shared):
        return Shared()
    if not isinstance(value, ByExample) or axis is None or rank is None:
        return at.mixed("unknown")
    return at.mixed() if axis[0] % rank == value.axis else at.give(value, at.sizes(0))


@rule("ArgMax", "ArgMin")
def place_of_the_largest(at: At) -> Value:
    """Where along an axis."""
    value, axis, sizes = at.values[0], at.plain(1), at.sizes(0)
    if isinstance(value, Shared) and isinstance(at.values[1], Shared):
        return Shared()
    if not isinstance(value, ByExample) or axis is None or sizes is None:
        return at.mixed("unknown")
    along = axis[0] % len(sizes)
    if along == value.axis:
        return at.mixed()
    kept: list[Size | None] = [s for a, s in enumerate(sizes) if a != along]
    return at.give(value.at(value.axis - (along < value.axis)), kept)


@rule("L2Loss", "Where", "Unique", "UniqueV2", "UniqueWithCounts", "DynamicPartition", "Bincount", "SparseBincount")
def of_everything(at: At) -> Value:
    """Of all entries together; what is found decides the shape of some."""
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    return at.mixed("mixes" if at.op.type in ("L2Loss", "Bincount") else "length")


@rule("DenseBincount")
def counted(at: At) -> Value:
    """How often each number stands in each row (or, of a vector, in all of it)."""
    value, counts = at.values[0], at.values[2]
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    if not isinstance(value, ByExample) or at.rank(0) != 2 or value.axis or not isinstance(at.values[1], Shared):
        return at.mixed()
    fits = counts == value if isinstance(counts, ByExample) else at.sizes(2) in ((Size(0 * ONE.number),), (ONE,))
    sizes = at.sizes(2)
    empty = isinstance(counts, Shared) and sizes is not None and any(s.number == 0 for s in sizes)
    return at.give(value, [(at.sizes(0) or (None,))[0], None]) if fits or empty else at.mixed()


__all__ = ["Sized", "reduction"]
