"""Per-example gradients in factored form: their norms and weighted sums, without ever forming them.

One example's gradient of a variable is kept as the few tensors it is made of. With T positions (or calls)
an example, and b the example:

=============  =============================================  ============================================
factor         gradient of example b                          squared norm
=============  =============================================  ============================================
`PerExample`   v_b, formed                                    ‖v_b‖²
`Outer`        Σ_t x_bt g_btᵀ                                 Σ_{t,s} (x_bt·x_bs)(g_bt·g_bs)
`Rows`         Σ_t e(id_bt) g_btᵀ, e(i) the i-th unit vector  Σ over distinct ids i of ‖Σ_{t: id_bt = i} g_bt‖²
`Scores`       Σ_s d_bs e(id_s) q_bᵀ, ids shared              ‖q_b‖² Σ over distinct ids of (Σ_{s: id_s = i} d_bs)²
=============  =============================================  ============================================

A variable that several calls read has several factors. Factors of one kind are concatenated over T (or added),
which makes shared layers exact; factors of different kinds add twice their inner product (tied tables).

A norm that comes out too small is a clip that holds too little. Where a squared norm is a sum of terms of both signs
(Gram matrices, inner products), large terms may cancel and leave their rounding errors: there it is rounded up, by a
bound on those errors that is far below the norm itself unless the terms did cancel.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf


def _wide(tensor: tf.Tensor) -> tf.Tensor:
    """Norms are computed in float32 at least, whatever the compute type of the layer."""
    return tensor if tensor.dtype in (tf.float32, tf.float64) else tf.cast(tensor, tf.float32)


def _per_example_sum(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tensor, axis=list(range(1, tensor.shape.rank)))


def _flat(tensor: tf.Tensor) -> tf.Tensor:
    """One row an example, `[batch, values]`: the shape in which TensorFlow is fastest, and in which equal work on one
    tensor (a layer's output gradient stands in its kernel's factor and in its bias's) is seen to be equal."""
    if tensor.shape.rank == 2:
        return tensor
    values = tf.TensorShape(tensor.shape[1:]).num_elements()
    return tf.reshape(tensor, [tf.shape(tensor)[0], tf.reduce_prod(tf.shape(tensor)[1:]) if values is None else values])


def _squared_length(tensor: tf.Tensor) -> tf.Tensor:
    """Σ tensor[b]² for each example: TensorFlow's norm reads once what squaring and adding up read and write thrice."""
    return tf.square(tf.raw_ops.EuclideanNorm(input=_flat(tensor), axis=[1]))


_WIDEST = 1024  # products in a term of an inner product of two kinds: rows of a table are seldom longer


def _round_up(squared_norm: tf.Tensor, magnitude: tf.Tensor, products: int) -> tf.Tensor:
    """A squared norm found by cancelling terms that add up to `magnitude`², each a sum of so many products."""
    error = 4 * np.finfo(squared_norm.dtype.as_numpy_dtype).eps * float(np.sqrt(products))
    return squared_norm + error * tf.square(magnitude)


def _weigh(weights: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """`weights[b] * tensor[b]`, where a weight of zero wins over an infinite or undefined gradient."""
    rows = _flat(tensor)
    weighed = tf.math.multiply_no_nan(rows, tf.cast(weights, tensor.dtype)[:, None])
    return weighed if rows is tensor else tf.reshape(weighed, tf.shape(tensor))


def _silence(weights: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` with the examples of weight zero set to zero; costs nothing in the usual case of none."""
    counts = tf.not_equal(weights, 0)
    return tf.cond(tf.reduce_all(counts), lambda: tensor, lambda: _weigh(tf.cast(counts, tensor.dtype), tensor))


def _by_position(tensor: tf.Tensor) -> tf.Tensor:
    """`[batch, T, n]`; a tensor without positions has one."""
    return tensor[:, None, :] if tensor.shape.rank == 2 else tensor


class Factor(abc.ABC):
    """The gradients of one variable by one kind of reading, one for each example of the batch."""

    sparse = False
    mergeable = True

    @classmethod
    @abc.abstractmethod
    def merge(cls, factors: Sequence[Factor]) -> Factor:
        """The factor of the sum of the gradients of `factors`, all of this class."""

    @abc.abstractmethod
    def squared_norm(self) -> tf.Tensor:
        """The squared norm of each example's gradient, `[batch]`."""

    @abc.abstractmethod
    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
        """Σ_b weights[b] · gradient of example b, in the variable's shape."""

    def dense(self) -> PerExample:
        """The same gradients, formed: only for pairs of kinds that have no cheaper inner product."""
        raise NotImplementedError(
            "A table is read by row in one layer and by a layer without a rule for tables in another; "
            "an example's gradient would have the table's shape. Register a rule for the second layer."
        )


class PerExample(Factor):
    """Formed gradients, `[batch, *variable.shape]`."""

    def __init__(self, values: tf.Tensor):
        self.values = _wide(values)

    @classmethod
    def merge(cls, factors: Sequence[PerExample]) -> PerExample:  # type: ignore[override]
        return cls(tf.add_n([f.values for f in factors]))

    def squared_norm(self) -> tf.Tensor:
        return _squared_length(self.values)

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(_weigh(weights, self.values), axis=0)

    def dense(self) -> PerExample:
        return self


class Outer(Factor):
    """Σ_t x_t g_tᵀ for `x` `[batch, T, in]` and `g` `[batch, T, out]`, both without T where there is one position;
    `assemble` makes of `[n, in, out]` n gradients in the variable's shape."""

    def __init__(self, x: tf.Tensor, g: tf.Tensor, assemble: Callable[[tf.Tensor], tf.Tensor]):
        self.x, self.g, self.assemble = _wide(x), _wide(g), assemble

    @classmethod
    def merge(cls, factors: Sequence[Outer]) -> Outer:  # type: ignore[override]
        if len(factors) == 1:
            return factors[0]
        x, g = (tf.concat([_by_position(v) for v in each], axis=1) for each in zip(*((f.x, f.g) for f in factors)))
        return cls(x, g, factors[0].assemble)

    def _gram_norm(self) -> tf.Tensor:
        x, g = (tf.matmul(v, v, transpose_b=True) for v in (self.x, self.g))
        lengths = tf.sqrt(tf.linalg.diag_part(x) * tf.linalg.diag_part(g))
        products = self.x.shape[2] + self.g.shape[2]
        return _round_up(_per_example_sum(x * g), tf.reduce_sum(lengths, axis=1), products)

    def _formed(self) -> tf.Tensor:
        return tf.matmul(_by_position(self.x), _by_position(self.g), transpose_a=True)

    def squared_norm(self) -> tf.Tensor:
        if self.x.shape.rank == 2 or self.x.shape[1] == 1:
            return _squared_length(self.x) * _squared_length(self.g)
        positions = self.x.shape[1]
        wide, tall = self.x.shape[2] * self.g.shape[2], self.x.shape[2] + self.g.shape[2]
        # T²(in + out) products by the Gram matrices against T·in·out by forming the gradient: take the fewer.
        if positions is not None:
            by_gram = positions * tall <= wide
            return self._gram_norm() if by_gram else _squared_length(self._formed())
        return tf.cond(
            tf.shape(self.x)[1] * tall <= wide, self._gram_norm, lambda: _squared_length(self._formed())
        )

    def weighted_sum(self, weights: tf.Tensor) -> tf.Tensor:
        x, g = _silence(weights, self.x), _weigh(weights, self.g)
        flat_x, flat_g = (v if v.shape.rank == 2 else tf.reshape(v, [-1, v.shape[2]]) for v in (x, g))
        return self.assemble(tf.matmul(flat_x, flat_g, transpose_a=True)[None])[0]

    def dense(self) -> PerExample:
        return PerExample(self.assemble(self._formed()))


class Rows(Factor):
    """Gradients of the rows that each example looked up: `ids` `[batch, T]` and `g` `[batch, T, width]`."""

    sparse = True

    def __init__(self, ids: tf.Tensor, g: tf.Tensor, shape: Sequence[int]):
        self.ids, self.g, self.shape = tf.cast(ids, tf.int64), _wide(g), tuple(shape)

    @classmethod
    def merge(cls, factors: Sequence[Rows]) -> Rows:  # type: ignore[override]
        if len(factors) == 1:
            return factors[0]
        ids = tf.concat([f.ids for f in factors], axis=1)
        return cls(ids, tf.concat([f.g for f in factors], axis=1), factors[0].shape)

    def squared_norm(self) -> tf.Tensor:
        if self.ids.shape[1] == 1:
            return _squared_length(self.g)
        # A segment for each (example, id) of which there are several: memory grows with the bag, not with its square.
        batch, rows = tf.shape(self.ids, tf.int64)[0], tf.reshape(self.g, [-1, self.g.shape[2]])
        keys = tf.reshape(tf.range(batch)[:, None] * self.shape[0] + self.ids, [-1])
        several = _repeated(keys)
        alone = tf.where(several, tf.zeros([], rows.dtype), _squared_length(rows))
        places = tf.where(several)[:, 0]
        together, segment = tf.unique(tf.gather(keys, places))
        sums = tf.math.unsorted_segment_sum(tf.gather(rows, places), segment, tf.size(together))
        squares = tf.math.unsorted_segment_sum(_squared_length(sums), together // self.shape[0], batch)
        return tf.reduce_sum(tf.reshape(alone, tf.shape(self.ids)), axis=1) + squares

    def weighted_sum(self, weights: tf.Tensor) -> tf.IndexedSlices:
        values = tf.reshape(_weigh(weights, self.g), [-1, self.g.shape[2]])
        return tf.IndexedSlices(values, tf.reshape(self.ids, [-1]), tf.constant(self.shape, tf.int64))


class Scores(Factor):
    """Gradients of shared candidates' rows: `ids` `[S]`, `d` `[batch, S]` of the logits, `q` `[batch, width]`."""

    sparse, mergeable = True, False  # two of them have two queries an example: their inner product is a formula below

    def __init__(self, ids: tf.Tensor, d: tf.Tensor, q: tf.Tensor, shape: Sequence[int]):
        self.ids, self.d, self.q, self.shape = tf.cast(ids, tf.int64), _wide(d), _wide(q), tuple(shape)

    def distinct(self) -> Scores:
        """The same gradients; candidates drawn twice are one candidate with the sum of the logits' gradients."""
        distinct, position = tf.unique(self.ids)
        count = tf.size(distinct)
        summed = tf.cond(
            tf.equal(count, tf.size(self.ids)),
            lambda: self.d,
            lambda: tf.transpose(tf.math.unsorted_segment_sum(tf.transpose(self.d), position, count)),
        )
        return Scores(distinct, summed, self.q, self.shape)

    @classmethod
    def merge(cls, factors: Sequence[Scores]) -> Scores:  # type: ignore[override]
        raise NotImplementedError("factors of this kind stay apart")

    def squared_norm(self) -> tf.Tensor:
        several = _repeated(self.ids)
        alone = tf.where(several[None, :], tf.zeros_like(self.d), self.d)
        places = tf.where(several)[:, 0]
        distinct, position = tf.unique(tf.gather(self.ids, places))
        members = tf.one_hot(position, tf.size(distinct), dtype=self.d.dtype)
        together = tf.matmul(tf.gather(self.d, places, axis=1), members)
        return _squared_length(self.q) * (_squared_length(alone) + _squared_length(together))

    def weighted_sum(self, weights: tf.Tensor) -> tf.IndexedSlices:
        values = tf.matmul(_weigh(weights, self.d), _silence(weights, self.q), transpose_a=True)
        return tf.IndexedSlices(values, self.ids, tf.constant(self.shape, tf.int64))


def _repeated(ids: tf.Tensor) -> tf.Tensor:
    """Which of `ids` `[n]` stand in several places."""
    _, position, count = tf.unique_with_counts(ids)
    return tf.gather(count, position) > 1


def _find(ids: tf.Tensor, among: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Whether each id stands in the list `among` of distinct ids, and where (anywhere, if it does not)."""
    among = tf.concat([among, tf.constant([-1], among.dtype)], axis=0)  # so that the list is never empty
    order = tf.argsort(among)
    ordered = tf.gather(among, order)
    place = tf.minimum(tf.searchsorted(ordered, ids), tf.size(ordered) - 1)
    found = tf.equal(tf.gather(ordered, place), ids)
    return found, tf.where(found, tf.gather(order, place), tf.zeros_like(place))


def _rows_scores(rows: Rows, scores: Scores) -> tf.Tensor:
    """⟨Σ_t e(id_t) g_tᵀ, Σ_s d_s e(id_s) qᵀ⟩ = Σ_t d[position of id_t among the candidates] (g_t · q)."""
    if rows.ids.shape[1] == 1:
        hit = tf.equal(rows.ids, scores.ids[None, :])
        d = tf.reduce_sum(tf.where(hit, scores.d, tf.zeros_like(scores.d)), axis=1)
        return d * tf.reduce_sum(rows.g[:, 0] * scores.q, axis=1)
    scores = scores.distinct()
    found, column = (tf.reshape(v, tf.shape(rows.ids)) for v in _find(tf.reshape(rows.ids, [-1]), scores.ids))
    d = tf.gather(tf.pad(scores.d, [[0, 0], [0, 1]]), column, batch_dims=1)
    along = tf.einsum("btd,bd->bt", rows.g, scores.q)
    return tf.reduce_sum(tf.where(found, d * along, tf.zeros_like(along)), axis=1)


def _scores_scores(a: Scores, b: Scores) -> tf.Tensor:
    """⟨Σ_s d_s e(id_s) qᵀ, Σ_u c_u e(id_u) pᵀ⟩ = (q · p) Σ over common ids of d_s c_u."""
    a, b = a.distinct(), b.distinct()
    found, column = _find(a.ids, b.ids)
    common = tf.where(found[None, :], tf.gather(tf.pad(b.d, [[0, 0], [0, 1]]), column, axis=1), tf.zeros_like(a.d))
    return tf.reduce_sum(a.q * b.q, axis=1) * tf.reduce_sum(a.d * common, axis=1)


def _rows_outer(rows: Rows, outer: Outer) -> tf.Tensor:
    """⟨Σ_t e(id_t) g_tᵀ, Σ_s x_s h_sᵀ⟩ = Σ_{t,s} x_s[id_t] (g_t · h_s): a table that also gives the logits."""
    picked = tf.gather(_by_position(outer.x), rows.ids, axis=2, batch_dims=1)
    return _per_example_sum(picked * tf.matmul(_by_position(outer.g), rows.g, transpose_b=True))


_INNER_PRODUCTS: dict[tuple[type, type], Callable[..., tf.Tensor]] = {
    (Rows, Scores): _rows_scores,
    (Scores, Scores): _scores_scores,
    (Rows, Outer): _rows_outer,
}


def inner_product(a: Factor, b: Factor) -> tf.Tensor:
    """The inner product of each example's two gradients, `[batch]`."""
    for left, right in ((a, b), (b, a)):
        if (type(left), type(right)) in _INNER_PRODUCTS:
            return _INNER_PRODUCTS[type(left), type(right)](left, right)
    return _per_example_sum(a.dense().values * b.dense().values)


def merge(factors: Sequence[Factor]) -> list[Factor]:
    """One factor of each kind that can be merged from all the factors of one variable."""
    kinds = dict.fromkeys(type(f) for f in factors if f.mergeable)
    merged = [kind.merge([f for f in factors if type(f) is kind]) for kind in kinds]
    return merged + [f for f in factors if not f.mergeable]


def squared_norm(factors: Sequence[Factor]) -> tf.Tensor:
    """The squared norm of each example's gradient of one variable, from its merged factors."""
    own = [f.squared_norm() for f in factors]
    total = functools.reduce(tf.add, own)
    if len(own) == 1:
        return total
    for a, b in itertools.combinations(factors, 2):
        total += 2 * inner_product(a, b)
    return _round_up(total, tf.add_n([tf.sqrt(square) for square in own]), _WIDEST)


def weighted_sum(factors: Sequence[Factor], weights: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """Σ_b weights[b] · gradient of example b of one variable: slices if every factor is sparse."""
    parts = [f.weighted_sum(weights) for f in factors]
    if len(parts) == 1:
        return parts[0]
    if all(f.sparse for f in factors):
        return join([p for p in parts])
    return functools.reduce(tf.add, [tf.convert_to_tensor(p) for p in parts])


def join(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Slices of one variable, one after the other (an id may then stand in several places)."""
    return tf.IndexedSlices(
        tf.concat([s.values for s in slices], axis=0),
        tf.concat([s.indices for s in slices], axis=0),
        slices[0].dense_shape,
    )
