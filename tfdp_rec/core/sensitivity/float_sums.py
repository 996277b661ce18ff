"""Sums over a batch in floating point, with a bound on the error that holds for all inputs.

A float sum is rounded at every addition, by at most u times the partial sum (u = 2⁻²⁴ in float32), and the rounding of
later additions depends on what came before: taking one example out of a batch changes the errors that all the others
make. So the errors must be small against the clip for all data. For terms t_b that each go through at most D additions,
in any order and along any tree,

    ‖computed − exact‖  ≤  u D Σ_b ‖t_b‖                                       and, for ‖t_b‖ ≤ 1 and n terms,
    ‖computed − exact‖  ≤  u n (D/√3 + 3),                                     in rows that stand D times at most
    ‖computed − exact‖  ≤  u √(n D) (D/√3 + 2)                                 (docs/privacy-floating-point.md, lemma 3)

A matrix product over the batch may send a term through as many additions as there are terms. Here it is cut into pieces
of c terms, whose results are then added up. Where an example contributes one term, the pieces are cut by place and by
the number of rows, so that neighbours differ in one piece: the others have the same numbers, and so the same errors.
What counts is the error of one piece and that of adding m of them up (lemma 4):

    ‖difference of errors‖  ≤  2 u (c (c/√3 + 2) + n (m − 1)),      with 5 for m − 1 if four at a time are added up in
                                                                    float32 and the rest in float64

Where an example contributes several terms, which may cancel, what way is taken depends on the data, so that all pieces
count: D = c + m, or c + 5. `Depth` is the D that the slack in the clip allows. Where no cut is short enough, the sum is
made in float64. No order of additions within a piece is assumed, so the processor's kernels do not matter.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.branches import choose, choose_from, has_gpu, wrap_in_call
from tfdp_rec.core.ground.graph_checks import HOST, negate
from tfdp_rec.core.ground.keras_internals import is_deterministic
from tfdp_rec.core.ground.shared_graphs import SharedGraph


def unit(dtype: tf.DType) -> float:
    """u: the relative error of one rounding."""
    return float(np.finfo(dtype.as_numpy_dtype).eps) / 2


def trace_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tensors as a graph that is traced once for all shapes of the same ranks and types."""
    # Branches and loops take long to trace, and a model has many variables. Not for functions that run in a server's
    # section (`cross_terms.join`): a graph stays on the device of its first trace.

    @functools.cache
    def graph(*kinds: tuple[tf.DType, int]) -> Any:
        signature = [tf.TensorSpec([None] * rank, dtype) for dtype, rank in kinds]
        return SharedGraph(function, input_signature=signature)

    return functools.wraps(function)(lambda *tensors: graph(*((t.dtype, t.shape.rank) for t in tensors))(*tensors))


class Way(NamedTuple):
    """How a product over the batch is cut: the number of the way among those of `products`, and a piece's length."""

    number: tf.Tensor
    size: tf.Tensor

    @classmethod
    def of(cls, terms: tf.Tensor, depth: tf.Tensor, dtype: tf.DType) -> Way:
        """The way for so many terms, of which none may go through more than `depth` additions."""
        with tf.device(HOST):
            laid_out = short_enough(tf.constant(_LAID_OUT), terms, depth)
            return cls._first(laid_out, tf.floor(depth) - _AFTER, dtype)

    @classmethod
    def cut_by_place(cls, rows: tf.Tensor, roundings: tf.Tensor, dtype: tf.DType) -> Way:
        """The way for so many rows, one term each, all but one of which neighbours have alike.

        The difference of their errors may be as many `roundings` of a row that is as long as the clip.
        """
        with tf.device(HOST):
            number, all_rows = tf.constant(_LAID_OUT), tf.cast(rows, roundings.dtype)
            lengths, after = (tf.cast(each, roundings.dtype) for each in (_lengths(rows, number), number - 1))
            laid_out = lengths * (lengths / np.sqrt(3) + 2) + all_rows * after <= roundings
            left = tf.maximum(roundings - all_rows * _AFTER, 0.0)
            longest = np.sqrt(3) * (tf.sqrt(1 + left / np.sqrt(3)) - 1)  # c (c/√3 + 2) = left
            return cls._first(laid_out, tf.floor(longest), dtype)

    @classmethod
    def _first(cls, laid_out: tf.Tensor, size: tf.Tensor, dtype: tf.DType) -> Way:
        """The first way that is exact enough: of the `laid_out`, in pieces of a `size`, or in float64."""
        # Not for a size that is no number; nor where a loop of small products takes longer than one in float64.
        cut = (size >= float(_LEAST)) & (dtype != tf.float64 and not _is_float64_fast())
        possible = tf.concat([laid_out, cut[None], tf.constant([True])], axis=0)
        return cls(tf.argmax(possible, output_type=tf.int32), tf.cast(tf.minimum(size, 2.0**30), tf.int32))


@dataclasses.dataclass(frozen=True)
class Depth:
    """The number of additions that a term may go through in a sum over the examples, and how sums are cut for it."""

    # Ways to cut are found once for all variables: each is some twenty operations on single numbers.

    rows: tf.Tensor  # of tables, to each of which an example contributes one term
    parts: tf.Tensor  # if it contributes several, whose norms may add up to more than that of their sum
    way: Way  # of products whose examples contribute one term

    @classmethod
    def of(cls, depth: tf.Tensor, examples: tf.Tensor, dtype: tf.DType) -> Depth:
        """One depth for all sums, whatever an example contributes."""
        return cls(depth, depth, Way.of(examples, depth, dtype))

    @classmethod
    def from_slack(cls, slack: tf.Tensor, reach: tf.Tensor, examples: tf.Tensor, dtype: tf.DType) -> Depth:
        """The depth at which the errors of two sums, with and without one example, stay within `slack` clips."""
        roundings, size = tf.cast(slack, reach.dtype) / (2 * unit(dtype)), tf.cast(tf.maximum(examples, 1), reach.dtype)
        first_order = roundings / tf.maximum(reach, 1.0)
        # D (1 + D u) ≤ first_order: an addition's error is a share of what is there, the errors before it included.
        parts = first_order / (1 + unit(dtype) * first_order) - 3
        # √(n D) (D/√3 + 2) ≤ roundings, since D^1.5 + 2√3 D^.5 ≤ (D + 4/√3)^1.5.
        rows = tf.pow(np.sqrt(3) * _SPARE * tf.maximum(roundings, 0.0) / tf.sqrt(size), 2 / 3) - 2.4
        if has_gpu():  # that equal pieces have equal errors was not tried there
            way = Way.of(examples, tf.maximum(np.sqrt(3) * (roundings / size - 3), parts), dtype)
        else:  # by public numbers alone
            way = Way.cut_by_place(examples, roundings * _SPARE, dtype)
        return cls(tf.maximum(rows, parts), parts, way)


def _is_float64_fast() -> bool:
    """Whether there are GPUs, and all of a kind that makes at least half as many float64 products as float32 ones."""
    gpus = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    kinds = [details.get("compute_capability") for details in gpus]
    return bool(kinds) and all(kind in _FAST_FLOAT64 for kind in kinds)


_FAST_FLOAT64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))  # P100, V100, A100, H100 and H200, B200


def short_enough(number: tf.Tensor, terms: tf.Tensor, depth: tf.Tensor) -> tf.Tensor:
    """Whether `number` pieces send no term through more than `depth` roundings, that of its product included."""
    return tf.cast(_lengths(terms, number) + number + 1, depth.dtype) <= tf.floor(depth)


def _lengths(terms: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """How many terms the longest of `number` pieces has."""
    return (terms + number - 1) // number


_LAID_OUT = (1, 2, 4, 8, 16)  # numbers of pieces
_AT_ONCE = 4  # of them in memory, each as large as the sum: added up in one pass, they cost a third of what pairs do
# Beside those in its piece a term goes through three additions in a sum of four, and one rounding at the end; one more
# is for the additions in float64, fewer than 2²⁹: not of terms that are float64 themselves. The rounding of its product
# is one in place of the first addition.
_AFTER = _AT_ONCE + 1
# For terms longer than the clip by their weights' roundings, and for errors of errors. That these numbers are rounded
# themselves is covered by the 2 of the bounds, which are proved with 1.44.
_SPARE = 1 - 2.0**-12
_LEAST = 8  # terms in a piece, or float64 is faster


def products(x: tf.Tensor, g: tf.Tensor, way: Way) -> tf.Tensor:
    """xᵀ g for `x` `[terms, in]` and `g` `[terms, out]`: a sum over the terms."""
    if x.dtype == tf.float64:  # no way is better
        return tf.matmul(x, g, transpose_a=True)
    return _products(x, g, *way)


@trace_once
def _products(x: tf.Tensor, g: tf.Tensor, way: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    terms = tf.shape(x)[0]

    def lay_out(number: int) -> Callable[[], tf.Tensor]:
        # Pieces whose lengths differ by one at most, without a loop, which costs a third more.

        def add_up() -> tf.Tensor:
            lengths = terms // number + tf.cast(tf.range(number) < terms % number, tf.int32)
            pieces = list(zip(tf.split(x, lengths, num=number), tf.split(g, lengths, num=number)))
            total: list[tf.Tensor] = []
            for first in range(0, number, _AT_ONCE):
                with tf.control_dependencies(total):
                    some = [tf.matmul(*two, transpose_a=True) for two in pieces[first : first + _AT_ONCE]]
                    total = [tf.add_n(total + some)]
            return total[0]

        return add_up

    def add_in_pieces() -> tf.Tensor:
        def body(start: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            ends = [start + number * size for number in range(_AT_ONCE + 1)]
            some = [tf.matmul(x[one:end], g[one:end], transpose_a=True) for one, end in itertools.pairwise(ends)]
            return ends[-1], total + tf.cast(tf.add_n(some), tf.float64)

        nothing = tf.zeros([tf.shape(x)[1], tf.shape(g)[1]], tf.float64)
        shapes = (tf.TensorShape([]), tf.TensorShape([None, None]))
        found = tf.while_loop(
            lambda start, _: start < terms, body, (0, nothing), shape_invariants=shapes, parallel_iterations=1
        )
        return tf.cast(found[1], x.dtype)

    def add_in_float64() -> tf.Tensor:
        wide = tf.matmul(tf.cast(x, tf.float64), tf.cast(g, tf.float64), transpose_a=True)
        return tf.cast(wide, x.dtype)

    def multiply() -> tf.Tensor:
        return tf.matmul(x, g, transpose_a=True)

    ways = [multiply, *map(lay_out, _LAID_OUT[1:]), add_in_pieces, add_in_float64]
    return choose_from([wrap_in_call(each) for each in ways], way)


class Terms(NamedTuple):
    """What the rows of one table are sums of: weights[i] · values[numbers[i]] for the row ids[i], i < n."""

    ids: tf.Tensor
    values: tf.Tensor  # `[values, width]`
    weights: tf.Tensor
    numbers: tf.Tensor | None = None  # int64; each has a value of its own, in order, if left out


def rows(several: Sequence[Terms], depth: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Of each table the distinct ids, and for each the sum of its terms."""
    found = find_distinct([each.ids for each in several])

    def pair_up() -> Iterable[tuple[Terms, tuple[tf.Tensor, ...], tf.Tensor]]:
        return zip(several, found, _cells([place for _, place, _ in found], several), strict=True)

    def at_once() -> list[tf.Tensor]:
        if has_gpu() and len({own.values.shape[1] for own in several}) == 1:
            return _add_together(several, [(place, tf.size(ids)) for ids, place, _ in found])
        return [_add_segments(own.values, own.weights, those, tf.size(ids)) for own, (ids, *_), those in pair_up()]

    def some_in_float64() -> list[tf.Tensor]:
        return [_add_often(own.values, own.weights, those, count, depth) for own, (*_, count), those in pair_up()]

    if all(each.values.dtype == tf.float64 for each in several):
        added = at_once()
    else:  # one condition for all tables; false for a depth that is no number
        with tf.device(HOST):
            counts = tf.concat([count for *_, count in found], axis=0)
            are_few = tf.reduce_all(tf.cast(counts, depth.dtype) <= depth)
        added = choose(are_few, at_once, some_in_float64)
    distinct = move_from_host([ids for ids, *_ in found])
    pairs = zip(several, distinct, added, strict=True)
    return [(ids, tf.ensure_shape(sums, [None, own.values.shape[1]])) for own, ids, sums in pairs]


def find_distinct(several: Sequence[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
    """Of the ids of each table the distinct ones, each id's place among them, and their counts: on the host."""
    # A GPU would wait for the number of each table's. All ids leave it in one copy.
    if has_gpu():
        together = tf.concat(several, axis=0)
        with tf.device(HOST):
            several = split_whole(together, [tf.size(ids) for ids in several])
    with tf.device(HOST):
        return [tuple(tf.unique_with_counts(ids, out_idx=tf.int64)) for ids in several]


def move_from_host(several: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The ids of several tables, which are on the host, where tables are: in one copy."""
    if not has_gpu():
        return list(several)
    with tf.device(HOST):
        together = tf.concat(several, axis=0)
    return split_whole(together, [tf.size(ids) for ids in several])


def _add_together(several: Sequence[Terms], found: Sequence[tuple[tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
    """The sums of all tables of a width, from places of terms and numbers of distinct ids, as those of one."""
    shapes = [tf.shape(own.values) for own in several]
    with tf.device(HOST):
        counts = [count for _, count in found]

        def add_to_each(several: Sequence[tf.Tensor], sizes: Sequence[tf.Tensor]) -> tf.Tensor:
            starts = tf.unstack(tf.cumsum(tf.cast(tf.stack(sizes), tf.int64), exclusive=True), num=len(sizes))
            return tf.concat([each + start for each, start in zip(several, starts, strict=True)], axis=0)

        rows = add_to_each([place for place, _ in found], counts)
        cells = tf.stack([rows, add_to_each(_numbers(several), [shape[0] for shape in shapes])], axis=1)
        total = tf.add_n(counts)
    values, weights = (tf.concat(each, axis=0) for each in zip(*((own.values, own.weights) for own in several)))
    return tf.split(_add_segments(values, weights, cells, total), counts, num=len(several))


@trace_once
def _add_often(
    values: tf.Tensor, weights: tf.Tensor, cells: tf.Tensor, count: tf.Tensor, depth: tf.Tensor
) -> tf.Tensor:
    # Ids with more places than float32 may add up, alone: a float64 copy of all values would be large.
    often = negate(tf.cast(count, depth.dtype) <= depth)  # all of them at a depth that is no number
    number = tf.cumsum(tf.cast(often, tf.int32)) - 1
    taken = tf.gather(often, cells[:, 0])
    there, at = tf.where(often), tf.where(taken)[:, 0]
    place, source = tf.unstack(tf.gather(cells, at), num=2, axis=1)
    terms = tf.cast(tf.gather(weights, at)[:, None] * tf.gather(values, source), tf.float64)
    wide = tf.math.unsorted_segment_sum(terms, tf.gather(number, place), tf.size(there))
    rest = _add_segments(values, tf.where(taken, tf.zeros_like(weights), weights), cells, tf.size(count))
    return tf.tensor_scatter_nd_update(rest, there, tf.cast(wide, values.dtype))


def _cells(places: Sequence[tf.Tensor], several: Sequence[Terms]) -> list[tf.Tensor]:
    """(place, number of the value) of each table's terms `[n, 2]`, made for all tables at once."""
    with tf.device(HOST):
        cells = tf.stack([tf.concat(places, 0), tf.concat(_numbers(several), 0)], axis=1)
    return split_whole(cells, [tf.size(place) for place in places])


def _numbers(several: Sequence[Terms]) -> list[tf.Tensor]:
    """The number of each term's value, of each table."""
    apart = [own.weights for own in several if own.numbers is None]
    in_order = {id(weights): tf.range(tf.size(weights, tf.int64)) for weights in apart}
    return [in_order[id(own.weights)] if own.numbers is None else own.numbers for own in several]


def split_whole(numbers: tf.Tensor, sizes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """int64 numbers in runs of these sizes."""
    parts = tf.split(tf.bitcast(numbers, tf.float64), sizes, num=len(sizes))  # a GPU splits no int64 numbers
    return [tf.bitcast(part, tf.int64) for part in parts]


@trace_once
def _add_segments(values: tf.Tensor, weights: tf.Tensor, cells: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The sum of the terms by place: a sparse matrix times `values`."""
    if is_deterministic():  # a GPU has no such product then
        return tf.math.unsorted_segment_sum(weights[:, None] * tf.gather(values, cells[:, 1]), cells[:, 0], count)
    size = tf.shape(values, tf.int64)
    with tf.device(HOST):
        shape = tf.stack([tf.cast(count, tf.int64), size[0]])
    return tf.raw_ops.SparseTensorDenseMatMul(a_indices=cells, a_values=weights, a_shape=shape, b=values)
