"""Reductions along axes other than the examples': y = Σ, max or mean of x; running sums; the k largest."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp_rec.core.sensitivity.independence.reading import At, rule
from tfdp_rec.core.sensitivity.independence.sizes import ONE, Size, size
from tfdp_rec.core.sensitivity.independence.values import ByExample, Value


@rule("Sum", "Mean", arguments=(1,))
def reduction(at: At) -> Value:
    """y[b, ·] = Σ, mean, max, all or any of x[b, ·, k] over other axes."""
    value, sizes = at.by_example()
    gone = set(at.axes(1, len(sizes)))
    if value.axis in gone:
        return at.mixed()
    if at.attr("keep_dims"):
        return at.give(value, [ONE if a in gone else s for a, s in enumerate(sizes)])
    return drop_axes(at, value, sizes, gone)


def drop_axes(at: At, value: ByExample, sizes: Sequence[Size], axes: set[int], output: int = 0) -> Value:
    """The value of an output that lacks these axes."""
    kept = [length for axis, length in enumerate(sizes) if axis not in axes]
    return at.give(value.move_to(value.axis - sum(a < value.axis for a in axes)), kept, output)


@rule("Cumsum", "ReverseV2", arguments=(1,))
def rearrange(at: At) -> Value:
    """Running sums y[b, t, ·] = Σ_{s ≤ t} x[b, s, ·], or entries turned round, along axes other than the examples'."""
    value, sizes = at.by_example()
    return at.mixed() if value.axis in at.axes(1, len(sizes)) else at.give(value, sizes)


@rule("TopKV2", arguments=(1,))
def largest(at: At) -> list[Value] | Value:
    """(y, i)[b, ·, :] = the k largest of x[b, ·, :] and their numbers, if the last axis is not the examples'."""
    value, sizes = at.by_example()
    count = at.plain(1)
    if value.axis == len(sizes) - 1:
        return at.mixed()
    lengths = [*sizes[:-1], None if count is None else size(count[0])]
    return [at.give(value, lengths), at.give(value, lengths, 1)]
