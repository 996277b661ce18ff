"""Reductions along axes other than the examples': y = Σ, max or mean of x; running sums; the k largest."""

from __future__ import annotations

from tfdp_rec.independence.reading import At, rule
from tfdp_rec.independence.sizes import ONE, size
from tfdp_rec.independence.values import ByExample, Shared, Value


@rule("Sum", "Mean", "All", "Any")
def reduction(at: At) -> Value:
    """y[b, ·] = Σ, mean, max, all or any of x[b, ·, k] over other axes."""
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


@rule("Cumsum")
def cumulated(at: At) -> Value:
    """y[b, t, ·] = Σ x[b, s, ·] over s ≤ t, or s ≥ t, along another axis than the examples'."""
    value, axes, sizes = at.values[0], at.plain(1), at.sizes(0)
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    if not isinstance(value, ByExample) or axes is None or sizes is None:
        return at.mixed("unknown")
    return at.mixed() if value.axis == axes[0] % len(sizes) else at.give(value, sizes)


@rule("TopKV2")
def largest(at: At) -> list[Value] | Value:
    """(y, i)[b, ·, :] = the k largest of x[b, ·, :] and their numbers, if the last axis is not the examples'."""
    value, count, sizes = at.values[0], at.plain(1), at.sizes(0)
    if all(isinstance(v, Shared) for v in at.values):
        return Shared()
    if not isinstance(value, ByExample) or not isinstance(at.values[1], Shared) or sizes is None:
        return at.mixed("unknown")
    if value.axis == len(sizes) - 1:
        return at.mixed()
    lengths = [*sizes[:-1], None if count is None else size(count[0])]
    return [at.give(value, lengths), at.give(value, lengths, 1)]
