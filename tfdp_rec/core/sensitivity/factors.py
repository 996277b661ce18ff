"""Per-example gradients in factored form: their norms and weighted sums, without ever forming them.

A factor stores one example's gradient of a variable as the few tensors that it is made of. With T positions (or calls)
an example, and b the example:

=============  =============================================  ============================================
factor         gradient of example b                          norm
=============  =============================================  ============================================
`PerExample`   v_b, formed                                    ‖v_b‖
`Outer`        Σ_t x_bt g_btᵀ                                 √ Σ_{t,s} (x_bt·x_bs)(g_bt·g_bs)
`Rows`         Σ_t e(id_bt) g_btᵀ, e(i) the i-th unit vector  √ Σ over distinct ids i of ‖Σ_{t: id_bt = i} g_bt‖²
`BagRows`      Σ_t c_bt e(id_bt) q_bᵀ                         ‖q_b‖ √ Σ over distinct ids i of (Σ_{t: id_bt = i} c_bt)²
`Scores`       Σ_t Σ_s d_bts e(id_s) q_btᵀ, ids shared        of the `Outer` product of d, summed over equal ids, and q
=============  =============================================  ============================================

A variable that several calls read has several factors. Factors of one kind are concatenated over T (or added),
which makes shared layers exact; factors of different kinds add twice their inner product (tied tables).

**In floating point** a norm that comes out too small is a clip that holds too little. Three rules, proved to suffice in
docs/privacy-floating-point.md:

- *the numbers that are summed are the numbers whose norm was taken*: an id that an example read twice is one
  row, summed before the norm and before the sum alike;
- *every norm is rounded up*, by a proven bound on its error, also where its square would underflow;
- *cancelling terms are bounded by their sizes*: `reach` is the sum of the norms of the terms of an example's gradient.
  Where it is far above the norm, rounding errors of the terms count, so the norm is at least reach / 256, and the sum
  over the batch is as exact as the batch's total reach demands (`float_sums.py`).

A layer that is called on merged axes (ids flattened to [B·T]) gives factors of B·k rows; `fold` adds up each
example's k.
"""

from __future__ import annotations

import abc
import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp_rec.core.ground.branches import choose, has_gpu
from tfdp_rec.core.ground.graph_checks import HOST
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity import float_sums
from tfdp_rec.core.sensitivity.float_sums import Depth, Terms, Way

_FLOOR = 2.0**-50  # added to lengths, √values times: above what squares lose that are too small to be float32 numbers
_LONGEST = 2.0**60  # a length beyond is infinite: times it, what a weight too small to be normal loses would count


class Reads(NamedTuple):
    """Rows of one table: `example[i]` has a gradient at row `ids[i]`; all examples read the `shared` rows."""

    example: tf.Tensor
    ids: tf.Tensor
    shared: tf.Tensor


def wide(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` in float32 at least: the type in which norms are computed."""
    return tensor if tensor.dtype in (tf.float32, tf.float64) else tf.cast(tensor, tf.float32)


def count_along(size: int | None, tensor: tf.Tensor, axis: int) -> tf.Tensor | float:
    """The length of an axis: `size` if it is known while tracing, otherwise a tensor."""
    return float(size) if size is not None else tf.cast(tf.shape(tensor)[axis], tensor.dtype)


def _error_factor(additions: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor | float:
    """1 + the largest relative error of `additions` and a few more, of terms of one sign."""
    return 1 + (additions + 8) * float_sums.unit(dtype)


def length(tensor: tf.Tensor) -> tf.Tensor:
    """‖·‖ along the last axis, rounded up."""
    factor, floor = _roundings_of(tensor)
    return _drop_longest(_plain_length(tensor)) * factor + floor


def norms(several: Sequence[tuple[tf.Tensor, ...]]) -> tf.Tensor:
    """The norms of gradients by their sides, `[batch, gradients]`, those of one side first. All of one type."""
    # A layer's output gradient is a side of its kernel's gradient and of its bias'.
    distinct = list({id(side): side for sides in several for side in sides}.values())
    rows = _drop_longest(tf.stack(_plain_lengths(distinct), axis=1))
    pairs = zip(*map(_roundings_of, distinct), strict=True)
    factors, floors = (tf.convert_to_tensor(each, rows.dtype) for each in pairs)
    found, columns = rows * factors + floors, {id(side): column for column, side in enumerate(distinct)}

    def take(number: int, place: int) -> tf.Tensor:
        chosen = [columns[id(sides[place])] for sides in several if len(sides) == number]
        return tf.gather(found, tf.constant(chosen, tf.int64), axis=1)

    # A product of lengths: squares may underflow or overflow.
    return tf.concat([take(1, 0), take(2, 0) * take(2, 1) * _error_factor(0, rows.dtype)], axis=1)


def _plain_length(tensor: tf.Tensor) -> tf.Tensor:
    # One pass over the tensor; squaring and adding up would make three.
    return tf.raw_ops.EuclideanNorm(input=tensor, axis=[-1])


def _plain_lengths(several: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The lengths of sides `[batch, values]`."""
    if not has_gpu():
        return [_plain_length(side) for side in several]
    # Of all sides of one length at once: a GPU starts two kernels, and not one a table.
    alike: dict[Any, list[int]] = {}
    for place, side in enumerate(several):
        alike.setdefault((side.shape[-1], side.shape[-1] is None and place), []).append(place)
    found: list[Any] = [None] * len(several)
    for places in alike.values():
        lengths = tf.unstack(_plain_length(tf.stack([several[place] for place in places])), num=len(places))
        for place, each in zip(places, lengths, strict=True):
            found[place] = each
    return found


def _drop_longest(lengths: tf.Tensor) -> tf.Tensor:
    """Lengths, those beyond the longest infinite, so that their examples are dropped."""
    return tf.where(lengths > _LONGEST, tf.constant(math.inf, lengths.dtype), lengths)


def _roundings_of(tensor: tf.Tensor) -> tuple[tf.Tensor | float, tf.Tensor | float]:
    """By how much a length along the last axis is to be multiplied, and raised."""
    values = count_along(tensor.shape[-1], tensor, -1)
    return _error_factor(values / 2, tensor.dtype), _FLOOR * values**0.5


def length_of_all(tensor: tf.Tensor) -> tf.Tensor:
    """‖tensor[b]‖ for each example, axis by axis, so that no sum is longer than an axis."""
    if tensor.shape.rank == 1:
        return tf.abs(tensor) + _FLOOR
    while tensor.shape.rank > 2:
        tensor = length(tensor)
    return length(tensor)


def total(lengths: tf.Tensor) -> tf.Tensor:
    """Σ over positions `[batch, T]`, rounded up."""
    return tf.reduce_sum(lengths, axis=1) * _error_factor(count_along(lengths.shape[1], lengths, 1), lengths.dtype)


def join_axes(tensor: tf.Tensor, start: int, end: int) -> tf.Tensor:
    """`tensor` with its axes from `start` up to `end` as one, or a new one if they are none. Lengths may be 0."""
    known = tensor.shape.as_list()
    joined = [*known[:start], None if None in known[start:end] else math.prod(known[start:end]), *known[end:]]
    if joined.count(None) <= 1 and 0 not in joined:  # one operation, with no arithmetic of shapes
        return tf.reshape(tensor, [-1 if length is None else length for length in joined])
    lengths = [tf.shape(tensor)[axis] if length is None else length for axis, length in enumerate(known)]
    return tf.reshape(tensor, [*lengths[:start], math.prod(lengths[start:end]), *lengths[end:]])


def _flat(tensor: tf.Tensor) -> tf.Tensor:
    """`[batch, values]`."""
    # TensorFlow is fastest in this shape, and finds equal work on one tensor: a layer's output gradient is part of the
    # factors of its kernel and of its bias.
    return tensor if tensor.shape.rank == 2 else join_axes(tensor, 1, tensor.shape.rank)


def _weigh(weights: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """`weights[b] * tensor[b]`, zero for a weight of zero and an infinite or undefined gradient."""
    rows = _flat(tensor)
    weighed = tf.math.multiply_no_nan(rows, tf.expand_dims(tf.cast(weights, tensor.dtype), 1))
    return weighed if rows is tensor else tf.reshape(weighed, tf.shape(tensor))


@float_sums.trace_once
def _sum_at_first_places(ids: tf.Tensor, g: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """`g` summed over equal ids of one example, at the place of the first; zero at the others."""
    # (example, id) pairs as one number: ids are below `rows`, as `check_ids` ensures.
    batch, flat = tf.shape(ids, tf.int64)[0], tf.reshape(g, [-1, tf.shape(g)[2]])
    _, place, count = tf.unique_with_counts(tf.reshape(tf.range(batch)[:, None] * rows + ids, [-1]))
    repeated = count > 1

    def sum_repeats() -> tf.Tensor:
        # All of `g` is read and written once; the rest is as large as what repeats.
        at = tf.where(tf.gather(repeated, place))
        number = tf.gather(tf.cumsum(tf.cast(repeated, tf.int32)) - 1, tf.gather_nd(place, at))
        groups, here = tf.reduce_max(number) + 1, tf.range(tf.size(number))
        sums = tf.math.unsorted_segment_sum(tf.gather_nd(flat, at), number, groups)
        first = tf.equal(tf.gather(tf.math.unsorted_segment_min(here, number, groups), number), here)
        new = tf.where(first[:, None], tf.gather(sums, number), tf.zeros([], g.dtype))
        return tf.reshape(tf.tensor_scatter_nd_update(flat, at, new), tf.shape(g))

    return choose(tf.reduce_any(repeated), sum_repeats, lambda: g)


def add_position_axis(tensor: tf.Tensor) -> tf.Tensor:
    """`[batch, T, n]`, with T = 1 for a tensor without positions."""
    return tensor[:, None, :] if tensor.shape.rank == 2 else tensor


class Factor(abc.ABC):
    """Each example's gradient of one variable, in one of the forms of this file's table."""

    sparse = False
    mergeable = True

    @classmethod
    @abc.abstractmethod
    def merge(cls, factors: Sequence[Factor]) -> Factor:
        """The factor of the sum of the gradients of `factors`, all of this class."""

    @property
    @abc.abstractmethod
    def tensors(self) -> tuple[tf.Tensor, ...]:
        """The numbers that gradients are made of, with the batch as first axis."""

    @property
    def sides(self) -> tuple[tf.Tensor, ...]:
        """One or two tensors `[batch, values]` of whose lengths the norm is the product; none if it is no such."""
        return ()

    @abc.abstractmethod
    def norm(self) -> tf.Tensor:
        """The norm of each example's gradient, rounded up, `[batch]`."""

    def reach(self) -> tf.Tensor:
        """The sum of the norms of the terms of each example's gradient, `[batch]`: its norm if there is one term."""
        return self.norm()

    @property
    def whole(self) -> bool:
        """Whether an example contributes a single term to each number of the sum."""
        return True

    @property
    def terms(self) -> tf.Tensor | int:
        """The number of terms that an example contributes to a number of the sum."""
        return 1

    @abc.abstractmethod
    def weighted_sum(self, weights: tf.Tensor, depth: Depth) -> tf.Tensor | tf.IndexedSlices:
        """Σ_b weights[b] · gradient of example b, in the variable's shape; distinct rows if sparse.

        Examples of weight zero are silent (`silence`), or all their numbers are finite.
        """

    @property
    def unweighed(self) -> str:
        """Name of the attribute whose numbers a weighted sum takes as they are: weights go into the other factor."""
        return ""

    @abc.abstractmethod
    def to_float64(self) -> Factor:
        """The same numbers in float64, and so their weighted sum."""

    def reads(self) -> Reads:
        """The rows at which each example has a gradient, by which mechanisms choose rows: for sparse kinds."""
        raise NotImplementedError(f"{type(self).__name__} is sparse and must say which examples read which rows.")

    def dense(self) -> PerExample:
        """The same gradients, formed: for pairs of kinds without a cheaper inner product."""
        raise NotImplementedError(
            "A table is read by row in one layer, and as a whole in a layer without a rule for tables, so an example's "
            "gradient would have the table's shape. Register a rule for the second layer."
        )


class PerExample(Factor):
    """Formed gradients.

    Args:
        values: Gradients, `[batch, *variable.shape]`.
    """

    def __init__(self, values: tf.Tensor):
        self.values = wide(values)

    @classmethod
    def merge(cls, factors: Sequence[PerExample]) -> PerExample:  # type: ignore[override]
        return cls(tf.add_n([f.values for f in factors]))

    @property
    def tensors(self) -> tuple[tf.Tensor, ...]:
        return (self.values,)

    @property
    def sides(self) -> tuple[tf.Tensor, ...]:
        return (self.values,) if self.values.shape.rank == 2 else ()

    def norm(self) -> tf.Tensor:
        return length_of_all(self.values)

    @property
    def unweighed(self) -> str:
        return "values"

    def weighted_sum(self, weights: tf.Tensor, depth: Depth) -> tf.Tensor:
        # A product, which reads the values once.
        flat = _flat(self.values) if self.values.shape.rank > 1 else tf.expand_dims(self.values, 1)
        added = float_sums.products(tf.expand_dims(tf.cast(weights, flat.dtype), 1), flat, depth.way)
        return tf.ensure_shape(tf.reshape(added, tf.shape(self.values)[1:]), self.values.shape[1:])

    def to_float64(self) -> PerExample:
        return PerExample(tf.cast(self.values, tf.float64))

    def dense(self) -> PerExample:
        return self


class Outer(Factor):
    """Σ_t x_t g_tᵀ for `x` `[batch, T, in]` and `g` `[batch, T, out]`, both without T where there is one position;
    `assemble` makes of `[n, in, out]` n gradients in the variable's shape.
    """

    def __init__(self, x: tf.Tensor, g: tf.Tensor, assemble: Callable[[tf.Tensor], tf.Tensor]):
        self.x, self.g, self.assemble = wide(x), wide(g), assemble

    @classmethod
    def merge(cls, factors: Sequence[Outer]) -> Outer:  # type: ignore[override]
        x, g = (tf.concat([add_position_axis(v) for v in each], axis=1) for each in zip(*((f.x, f.g) for f in factors)))
        return cls(x, g, factors[0].assemble)

    @property
    def tensors(self) -> tuple[tf.Tensor, ...]:
        return self.x, self.g

    @property
    def whole(self) -> bool:
        return self.x.shape.rank == 2 or self.x.shape[1] == 1

    @property
    def sides(self) -> tuple[tf.Tensor, ...]:
        return (_flat(self.x), _flat(self.g)) if self.whole else ()

    @property
    def terms(self) -> tf.Tensor | int:
        return 1 if self.whole else tf.shape(self.x)[1]

    @property
    def unweighed(self) -> str:
        return "x"

    def reach(self) -> tf.Tensor:
        if self.whole:
            return self.norm()
        return total(length(self.x) * length(self.g))

    def _gram_norm(self) -> tf.Tensor:
        # √ Σ_{t,s} (x_t·x_s)(g_t·g_s): terms of both signs, rounded up by a share of reach², the most they may lose.
        products = tf.matmul(self.x, self.x, transpose_b=True) * tf.matmul(self.g, self.g, transpose_b=True)
        square = tf.reduce_sum(tf.reduce_sum(products, axis=2), axis=1)
        positions, rows, columns = (
            count_along(tensor.shape[axis], tensor, axis) for tensor, axis in ((self.x, 1), (self.x, 2), (self.g, 2))
        )
        lost = (rows + columns + 2 * positions + 8) * float_sums.unit(square.dtype)
        return root(square + lost * tf.square(self.reach()))

    def _norm_of_gradients(self) -> tf.Tensor:
        lost = (count_along(self.x.shape[1], self.x, 1) + 8) * float_sums.unit(self.x.dtype)
        return length_of_all(self._form()) + lost * self.reach()

    def _form(self) -> tf.Tensor:
        return tf.matmul(add_position_axis(self.x), add_position_axis(self.g), transpose_a=True)

    def norm(self) -> tf.Tensor:
        if self.whole:
            return norms([self.sides])[:, 0]
        # T²(in + out) products by the Gram matrices against T·in·out by forming the gradient: take the fewer.
        positions, rows, columns = self.x.shape[1], self.x.shape[2], self.g.shape[2]
        if None not in (positions, rows, columns):
            return self._gram_norm() if positions * (rows + columns) <= rows * columns else self._norm_of_gradients()
        (positions, rows), columns = tf.unstack(tf.shape(self.x)[1:]), tf.shape(self.g)[2]
        return choose(positions * (rows + columns) <= rows * columns, self._gram_norm, self._norm_of_gradients)

    def weighted_sum(self, weights: tf.Tensor, depth: Depth) -> tf.Tensor:
        flat_x, flat_g = (v if v.shape.rank == 2 else join_axes(v, 0, 2) for v in (self.x, _weigh(weights, self.g)))
        way = depth.way if self.whole else Way.of(tf.shape(flat_x)[0], depth.parts, flat_x.dtype)
        added = float_sums.products(flat_x, flat_g, way)
        added = tf.ensure_shape(added, [self.x.shape[-1], self.g.shape[-1]])
        return tf.squeeze(self.assemble(tf.expand_dims(added, 0)), 0)

    def rebuild(self, x: tf.Tensor, g: tf.Tensor) -> Outer:
        """The same factor of other numbers."""
        return Outer(x, g, self.assemble)

    def to_float64(self) -> Outer:
        return self.rebuild(tf.cast(self.x, tf.float64), tf.cast(self.g, tf.float64))

    def dense(self) -> PerExample:
        return PerExample(self.assemble(self._form()))


class Rows(Factor):
    """Gradients of the rows that each example looked up: `ids` `[batch, T]` and `g` `[batch, T, width]`.

    Args:
        shape: Shape of the table.
    """

    sparse = True

    def __init__(self, ids: tf.Tensor, g: tf.Tensor, shape: Sequence[int]):
        self.ids, self.g, self.shape = tf.cast(ids, tf.int64), wide(g), tuple(shape)

    @classmethod
    def merge(cls, factors: Sequence[Rows]) -> Rows:  # type: ignore[override]
        ids = tf.concat([f.ids for f in factors], axis=1)
        return cls(ids, tf.concat([f.g for f in factors], axis=1), factors[0].shape)

    @property
    def tensors(self) -> tuple[tf.Tensor, ...]:
        return (self.g,)

    @functools.cached_property
    def sums(self) -> tf.Tensor:
        """`g` summed over repeated ids of one example, at the place of the first; zero at the others."""
        # Memory grows with the length of a bag; comparing all pairs of ids would take its square.
        if self.ids.shape[1] == 1:
            return self.g
        found = _sum_at_first_places(self.ids, self.g, tf.constant(self.shape[0], tf.int64))
        return tf.ensure_shape(found, self.g.shape)

    def take_apart(self) -> Rows:
        """The same, with a gradient of its own for each row."""
        return self

    @property
    def unweighed(self) -> str:
        return "sums"

    @property
    def sides(self) -> tuple[tf.Tensor, ...]:
        return (tf.squeeze(self.g, 1),) if self.ids.shape[1] == 1 else ()

    def norm(self) -> tf.Tensor:
        return length(*self.sides) if self.sides else length_of_all(self.sums)

    def weighted_sum(self, weights: tf.Tensor, depth: Depth) -> tf.IndexedSlices:
        return add_rows([self], weights, depth)[0]

    def terms_of(self, weights: tf.Tensor) -> Terms:
        """The terms of the weighted sum."""
        one_each = self.ids.shape[1] == 1
        places = weights if one_each else tf.reshape(tf.ones_like(self.ids, weights.dtype) * weights[:, None], [-1])
        values = tf.reshape(self.sums, [-1, self.g.shape[2]])
        return Terms(tf.reshape(self.ids, [-1]), values, tf.cast(places, self.g.dtype))

    def to_float64(self) -> Rows:
        return Rows(self.ids, tf.cast(self.sums, tf.float64), self.shape)

    def reads(self) -> Reads:
        # What a model reads and makes nothing of, such as padding, has a gradient of zero.
        at = tf.where(tf.reduce_any(tf.not_equal(self.g, 0), axis=2))
        return Reads(at[:, 0], tf.gather_nd(self.ids, at), tf.zeros([0], tf.int64))


class BagRows(Rows):
    """Gradients of rows that each example adds up (`bags.py`): `ids` and `coefficients` `[batch, T]`, and `q`
    `[batch, width]`.

    Args:
        shape: Shape of the table.
    """

    def __init__(self, ids: tf.Tensor, coefficients: tf.Tensor, q: tf.Tensor, shape: Sequence[int]):
        super().__init__(ids, coefficients[:, :, None], shape)
        self.q = wide(q)

    def take_apart(self) -> Rows:
        return Rows(self.ids, spread(self.g[:, :, 0], self.q), self.shape)

    @property
    def tensors(self) -> tuple[tf.Tensor, ...]:
        return self.g, self.q

    @property
    def unweighed(self) -> str:
        return "q"

    @property
    def sides(self) -> tuple[tf.Tensor, ...]:
        return tf.squeeze(self.sums, 2), self.q

    def norm(self) -> tf.Tensor:
        return norms([self.sides])[:, 0]

    def terms_of(self, weights: tf.Tensor) -> Terms:
        places = _weigh(weights, tf.squeeze(self.sums, 2))
        with tf.device(HOST):  # where the places of ids are found
            examples = tf.repeat(tf.range(tf.size(weights, tf.int64)), self.ids.shape[1])
        return Terms(tf.reshape(self.ids, [-1]), self.q, tf.reshape(places, [-1]), examples)

    def to_float64(self) -> Rows:
        return self.take_apart().to_float64()

    def reads(self) -> Reads:
        at = tf.where(tf.not_equal(self.g[:, :, 0], 0) & tf.reduce_any(tf.not_equal(self.q, 0), axis=1)[:, None])
        return Reads(at[:, 0], tf.gather_nd(self.ids, at), tf.zeros([0], tf.int64))


def spread(coefficients: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
    """c_bt q_b, `[batch, T, width]`."""
    return coefficients[:, :, None] * q[:, None, :]


def add_rows(several: Sequence[Rows], weights: tf.Tensor, depth: Depth) -> list[tf.IndexedSlices]:
    """The weighted sums of several tables, with one condition for all."""
    added = float_sums.rows([factor.terms_of(weights) for factor in several], depth.rows)
    pairs = zip(several, added, strict=True)
    return [tf.IndexedSlices(sums, ids, tf.constant(own.shape, tf.int64)) for own, (ids, sums) in pairs]


class Scores(Outer):
    """Gradients of shared candidates' rows `ids` `[S]`: Σ_t d_t q_tᵀ for the gradients `d` `[batch, T, S]` of logits
    and the queries `q` `[batch, T, width]`, both without T where an example has one query.

    Of an id that stands several times the first column of `x` has the sum of d, and the others nothing.

    Args:
        shape: Shape of the table.
    """

    sparse, mergeable = True, False  # several may have candidates of their own: see `cross_terms.py`

    def __init__(self, ids: tf.Tensor, d: tf.Tensor, q: tf.Tensor, shape: Sequence[int]):
        self.ids, self.shape = tf.cast(ids, tf.int64), tuple(shape)
        columns = wide(d) if d.shape.rank == 2 else join_axes(wide(d), 0, 2)
        summed = _sum_at_first_columns(self.ids, columns)
        super().__init__(tf.ensure_shape(tf.reshape(summed, tf.shape(d)), d.shape), q, lambda formed: formed)

    @functools.cached_property
    def distinct(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The distinct ids `[n]`, and the first column of each."""
        ids, number = tf.unique(self.ids)
        return ids, _first_places(number, tf.size(ids))

    def weighted_sum(self, weights: tf.Tensor, depth: Depth) -> tf.IndexedSlices:
        ids, columns = self.distinct
        rows = tf.gather(super().weighted_sum(weights, depth), columns)
        rows = tf.ensure_shape(rows, [None, self.g.shape[-1]])
        return tf.IndexedSlices(rows, ids, tf.constant(self.shape, tf.int64))

    def rebuild(self, x: tf.Tensor, g: tf.Tensor) -> Scores:
        return Scores(self.ids, x, g, self.shape)

    def dense(self) -> PerExample:
        return Factor.dense(self)  # which refuses: it would have the table's shape

    def reads(self) -> Reads:
        return Reads(tf.zeros([0], tf.int64), tf.zeros([0], tf.int64), self.ids)


def _first_places(number: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Where each of `count` ids stands first, by the ids' numbers in the order of their first places."""
    return tf.math.unsorted_segment_min(tf.range(tf.size(number)), number, count)


@float_sums.trace_once
def _sum_at_first_columns(ids: tf.Tensor, d: tf.Tensor) -> tf.Tensor:
    distinct, number = tf.unique(ids)
    count = tf.size(distinct)

    def sum_repeats() -> tf.Tensor:
        first = tf.gather(_first_places(number, count), number)
        return tf.transpose(tf.math.unsorted_segment_sum(tf.transpose(d), first, tf.size(ids)))

    # Repeats that come last and have no gradient, as `negatives.repeats_last` makes them: `d` is the sum already.
    come_last = tf.reduce_all(tf.equal(number[:count], tf.range(count)))
    return choose(come_last & tf.reduce_all(tf.equal(d[:, count:], 0)), lambda: d, sum_repeats)


def silence(factors: Sequence[Factor], heard: tf.Tensor) -> list[Factor]:
    """The factors with all numbers of examples that are not `heard` set to zero; no work if there are none."""
    # A product with a weight of zero is none where the number is infinite.
    places = [place for place, factor in enumerate(factors) if factor.unweighed]
    numbers = [getattr(factors[place], factors[place].unweighed) for place in places]
    if not numbers:
        return list(factors)
    kept = choose(tf.reduce_all(heard), lambda: numbers, lambda: [_weigh(heard, each) for each in numbers])
    found = list(factors)
    for place, tensor, before in zip(places, kept, numbers, strict=True):
        found[place] = copy.copy(found[place])
        setattr(found[place], found[place].unweighed, tf.ensure_shape(tensor, before.shape))
    return found


def root(square: tf.Tensor) -> tf.Tensor:
    """√, rounded up; a square rounded below zero counts as zero, NaN stays NaN."""
    kept = tf.where(square < 0, tf.zeros_like(square), square)
    return tf.sqrt(kept) * _error_factor(0, square.dtype) + _FLOOR


def fold(factor: Factor, batch_size: tf.Tensor, name: str) -> Factor:
    """The factor of `batch_size` examples from one of B·k rows, example-major."""
    # An example's gradient is the sum over its k rows: formed gradients are added up, positions are put side by side.
    if isinstance(factor, PerExample):
        return PerExample(tf.reduce_sum(_split_by_example(factor.values, batch_size), axis=1))
    if isinstance(factor, Rows):
        factor = factor.take_apart()
        ids, g = (_split_by_example(t, batch_size) for t in (factor.ids, factor.g))
        return Rows(join_axes(ids, 1, 3), join_axes(g, 1, 3), factor.shape)
    if isinstance(factor, Outer):
        x, g = (_split_by_example(t, batch_size) for t in (factor.x, factor.g))
        return factor.rebuild(*(t if t.shape.rank == 3 else join_axes(t, 1, 3) for t in (x, g)))
    raise NotPrivate(
        f"Layer '{name}' is called on several rows an example in one long axis, whose gradients its clipping rule "
        "does not add up by example; call it on [batch, T, ...] instead."
    )


def _split_by_example(tensor: tf.Tensor, batch_size: tf.Tensor) -> tf.Tensor:
    """`[B·k, ...]` as `[B, k, ...]`; a batch of no examples has k = 0."""
    shape = tf.shape(tensor)
    each = shape[0] // tf.maximum(batch_size, 1)
    split = tf.reshape(tensor, tf.concat([[batch_size, each], shape[1:]], axis=0))
    return tf.ensure_shape(split, [None, None, *tensor.shape[1:]])
