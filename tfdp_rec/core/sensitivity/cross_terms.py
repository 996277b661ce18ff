"""All factors of one variable together: merged, their norm, their sum over the batch.

With a and b the gradients of one example by two factors of different kinds, ‖a + b‖² = ‖a‖² + 2⟨a, b⟩ + ‖b‖². The inner
products stand here, once for each pair of kinds that meet (a table that is looked up and also gives the logits); kinds
that have none are formed and added.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.branches import choose
from tfdp_rec.core.sensitivity import float_sums
from tfdp_rec.core.sensitivity.factors import (
    Factor,
    Outer,
    PerExample,
    Rows,
    Scores,
    add_position_axis,
    count_along,
    root,
    total,
)
from tfdp_rec.core.sensitivity.float_sums import Depth

CANCELLING = 256.0  # how many times smaller than its parts a gradient may be before it is clipped by its parts
_ANY = 2.0**60  # a depth that cuts no sum


def _find(ids: tf.Tensor, among: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Whether each id stands in the list `among` of distinct ids, and where (anywhere, if it does not)."""
    among = tf.concat([among, tf.constant([-1], among.dtype)], axis=0)  # so that the list is never empty
    order = tf.argsort(among)
    ordered = tf.gather(among, order)
    place = tf.minimum(tf.searchsorted(ordered, ids), tf.size(ordered) - 1)
    found = tf.equal(tf.gather(ordered, place), ids)
    return found, tf.where(found, tf.gather(order, place), tf.zeros_like(place))


def _rows_scores(rows: Rows, scores: Scores) -> tf.Tensor:
    """⟨Σ_t e(id_t) g_tᵀ, Σ_u Σ_s d_us e(id_s) q_uᵀ⟩ = Σ_{t,u} d_u[id_t's place among the candidates] (g_t · q_u)."""
    candidates, columns = scores.distinct
    d, q = (add_position_axis(tensor) for tensor in scores.tensors)
    found, place = (tf.reshape(v, tf.shape(rows.ids)) for v in _find(tf.reshape(rows.ids, [-1]), candidates))
    own = tf.gather(_ensure_a_column(d), tf.gather(tf.pad(columns, [[0, 1]]), place), axis=2, batch_dims=1)
    along = tf.matmul(q, rows.sums, transpose_b=True)
    pairs = tf.where(found[:, None, :], own * along, tf.zeros_like(along))
    return tf.reduce_sum(tf.reduce_sum(pairs, axis=2), axis=1)


def _scores_scores(a: Scores, b: Scores) -> tf.Tensor:
    """⟨Σ_t Σ_s d_ts e(id_s) q_tᵀ, Σ_u Σ_v c_uv e(id_v) p_uᵀ⟩ = Σ_{t,u} (q_t · p_u) Σ over common ids of d_t c_u."""
    (ids, own), (others, columns) = a.distinct, b.distinct
    found, place = _find(ids, others)
    (d, q), (c, p) = ([add_position_axis(tensor) for tensor in factor.tensors] for factor in (a, b))
    d = tf.gather(d, own, axis=2)
    common = tf.gather(_ensure_a_column(c), tf.gather(tf.pad(columns, [[0, 1]]), place), axis=2)
    common = tf.where(found, common, tf.zeros_like(common))
    pairs = tf.matmul(q, p, transpose_b=True) * tf.matmul(d, common, transpose_b=True)
    return tf.reduce_sum(tf.reduce_sum(pairs, axis=2), axis=1)


def _ensure_a_column(d: tf.Tensor) -> tf.Tensor:
    """`d`, or one more column where it may have none: a place that is not found is the first."""
    return d if d.shape[2] else tf.pad(d, [[0, 0], [0, 0], [0, 1]])


def _rows_outer(rows: Rows, outer: Outer) -> tf.Tensor:
    """⟨Σ_t e(id_t) g_tᵀ, Σ_s x_s h_sᵀ⟩ = Σ_{t,s} x_s[id_t] (g_t · h_s): a table that also gives the logits."""
    picked = tf.gather(add_position_axis(outer.x), rows.ids, axis=2, batch_dims=1)
    pairs = picked * tf.matmul(add_position_axis(outer.g), rows.sums, transpose_b=True)
    return tf.reduce_sum(tf.reduce_sum(pairs, axis=2), axis=1)


_INNER_PRODUCTS: dict[tuple[type, type], Callable[..., tf.Tensor]] = {
    (Rows, Scores): _rows_scores,
    (Scores, Scores): _scores_scores,
    (Rows, Outer): _rows_outer,
}


def _find_product(a: Factor, b: Factor) -> Callable[[], tf.Tensor] | None:
    """What gives the inner product of each example's two gradients, `[batch]`; None for kinds that have none."""
    for left, right in ((a, b), (b, a)):
        if (type(left), type(right)) in _INNER_PRODUCTS:
            return functools.partial(_INNER_PRODUCTS[type(left), type(right)], left, right)
    return None


def merge(factors: Sequence[Factor]) -> list[Factor]:
    """One factor of each mergeable kind, from all the factors of one variable."""
    # Kinds without an inner product are formed and added: the sum must be of the same numbers as the norm.
    kinds: dict[type[Factor], list[Factor]] = {}
    if len(factors) > 1:
        factors = [each.take_apart() if isinstance(each, Rows) else each for each in factors]
    for factor in factors:
        if factor.mergeable:
            kinds.setdefault(type(factor), []).append(factor)
    merged = [own[0] if len(own) == 1 else kind.merge(own) for kind, own in kinds.items()]
    apart = merged + [f for f in factors if not f.mergeable]
    if not all(_find_product(a, b) for a, b in itertools.combinations(apart, 2)):
        return [PerExample.merge([f.dense() for f in apart])]
    return apart


def measure(factors: Sequence[Factor]) -> tuple[tf.Tensor, tf.Tensor]:
    """(norm, reach) of each example's gradient by merged factors; the norm is at least reach / `CANCELLING`."""
    if len(factors) == 1 and factors[0].whole:
        norm = factors[0].norm()
        return norm, norm
    reach = total(tf.stack([f.reach() for f in factors], axis=1))
    norm = factors[0].norm() if len(factors) == 1 else _norm_of_several(factors, reach)
    return tf.maximum(norm, reach / CANCELLING), reach


def _norm_of_several(factors: Sequence[Factor], reach: tf.Tensor) -> tf.Tensor:
    # ‖Σ_a g_a‖² = Σ_a ‖g_a‖² + 2 Σ_{a<b} ⟨g_a, g_b⟩, rounded up by what cancelling terms may lose of reach².
    square = tf.add_n([tf.square(f.norm()) for f in factors])
    for a, b in itertools.combinations(factors, 2):
        product = _find_product(a, b)
        assert product is not None, "`merge` leaves no other pairs"
        square += 2 * product()
    lost = sum((_additions(f) for f in factors), 8.0 + len(factors) ** 2) * float_sums.unit(square.dtype)
    return root(square + lost * tf.square(reach))


def _additions(factor: Factor) -> tf.Tensor | float:
    """How many numbers an inner product with this factor adds up, along all of its axes."""
    sizes = [count_along(v.shape[axis], v, axis) for v in factor.tensors for axis in range(1, v.shape.rank)]
    dtype = factor.tensors[0].dtype
    return sum((tf.cast(s, dtype) for s in sizes), tf.zeros([], dtype))


def weighted_sum(factors: Sequence[Factor], weights: tf.Tensor, depth: Depth) -> tf.Tensor | tf.IndexedSlices:
    """Σ_b weights[b] · gradient of example b of one variable: distinct rows if every factor is sparse."""
    if len(factors) == 1:
        return factors[0].weighted_sum(weights, depth)
    # An example has one term in each factor's sum: the bound for several terms counts, less the additions that follow.
    left = depth.parts - len(factors)

    def add_up(parts: Sequence[Factor], depth: tf.Tensor) -> tuple[tf.Tensor, ...]:
        allowed = Depth.of(depth, tf.size(weights), parts[0].tensors[0].dtype)
        sums = [part.weighted_sum(weights, allowed) for part in parts]
        if all(part.sparse for part in parts):
            joined = join(sums)
            return joined.indices, joined.values
        return (functools.reduce(tf.add, [tf.convert_to_tensor(each) for each in sums]),)

    def add_up_in_float64() -> tuple[tf.Tensor, ...]:
        # Where an example's parts cancel, the sums of the factors may be far larger than their total: not one of them
        # may be rounded to float32 by itself.
        *ids, total = add_up([factor.to_float64() for factor in factors], tf.constant(_ANY, tf.float64))
        return (*ids, tf.cast(total, factors[0].tensors[0].dtype))

    first: Any = factors[0]
    *ids, values = choose(left >= 1, lambda: add_up(factors, left), add_up_in_float64)
    return tf.IndexedSlices(values, ids[0], tf.constant(first.shape, tf.int64)) if ids else values


def join(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Several sums of one variable's rows as one, an id standing once."""
    values, ids = (tf.concat([getattr(s, part) for s in slices], axis=0) for part in ("values", "indices"))
    ids = tf.cast(ids, tf.int64)
    distinct, place = tf.unique(ids)
    count = tf.size(distinct)
    added = choose(count < tf.size(ids), lambda: tf.math.unsorted_segment_sum(values, place, count), lambda: values)
    return tf.IndexedSlices(tf.ensure_shape(added, [None, *values.shape[1:]]), distinct, slices[0].dense_shape)
