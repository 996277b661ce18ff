"""Choosing rows privately, exactly, and without ever visiting a row that was not touched.

Number the rows ("buckets") of all tables 0 .. V-1 as one space (`BucketSpace`). Example i touches a set S_i of k_i
distinct buckets; its contribution map is 1 on S_i and 0 elsewhere, clipped to L2 norm C1:

  v_i[b] = min(1, C1 / √(k_i)) for b in S_i,        counts = Σ_i v_i,      sensitivity C1.

**Threshold selection** (AdaFEST) adds N(0, (s1 C1)^2) to the count of *every* bucket and keeps those that reach τ. Only
the kept set leaves the mechanism, and the noises are independent, so it is a vector of independent coins, heads with
probability

  Φ((counts[b] - τ) / (s1 C1)),  and for each of the other V - |touched| buckets  p = Φ(-τ / (s1 C1)).

A touched bucket gets its own coin. For the rest, the heads among V independent p-coins are found by their gaps: the
number of tails before the next head is geometric, floor(E / -log(1 - p)) for a unit exponential E. Heads that fall on
touched buckets are thrown away (those had their own coin), which leaves the others independent and exact. Work and
memory grow with touched + p V, not with V.

**Top-m selection** (exponential mechanism) adds Gumbel noise to e0 * counts and keeps the m largest. Of N equal counts
only the m largest Gumbels matter; their exponentials exp(-G) are the m smallest of N unit exponentials, whose spacings
are E_1/N, E_2/(N-1), ..., and their places are uniform.

Every coin is decided by 64 random bits and float64 tails of either side, so that a probability of 1e-18 is as exact as
one of 1/2: see docs/privacy-adafest.md.

Reference:
    B. Ghazi et al., Sparsity-Preserving Differentially Private Training of Large Embedding Models, NeurIPS 2023.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

# Random bits for numbered draws: (stream, numbers int64 [n]) -> uint64 [n]. Each number is read once a step.
Bits = Callable[[int, tf.Tensor], tf.Tensor]

TOUCHED_STREAM, GAP_STREAM, GUMBEL_STREAM, PLACE_STREAM = -1, -2, -3, -4
_DRAWS_OF_A_PART = 1 << 45  # numbers of draws that each part of a space has for itself


class BucketSpace:
    """Numbers for the rows of some tables, or for the `chosen` ones among them; -1 for all other rows."""

    def __init__(self, sizes: Mapping[str, int], chosen: Mapping[str, np.ndarray] | None = None):
        self.sizes = dict(sizes)
        self._chosen = None if chosen is None else _check_rows(self.sizes, chosen)
        # Numbers of rows of each table in the space.
        self.table_sizes = list(self.sizes.values() if self._chosen is None else map(len, self._chosen.values()))
        first, self._ends = 0, list[int]()
        for count in self.table_sizes:
            self._ends.append(first := first + count)
        self._first = dict(zip(sizes, [0, *self._ends]))
        self.size = first

    def numbers(self, path: str, ids: tf.Tensor) -> tf.Tensor:
        """The numbers of some rows of a table, int64, -1 for rows outside the space."""
        place = ids = tf.cast(ids, tf.int64)
        inside = (ids >= 0) & (ids < self.sizes[path])
        if self._chosen is not None:
            rows = self._chosen[path]
            place = tf.searchsorted(rows, ids, out_type=tf.int64)
            inside &= tf.gather(tf.concat([rows, [-1]], axis=0), place) == ids
        return tf.where(inside, self._first[path] + place, -tf.ones_like(ids))

    def rows(self, buckets: tf.Tensor) -> dict[str, tf.Tensor]:
        """Table path -> its rows, ascending, among some distinct numbers of the space."""
        buckets = tf.sort(buckets)
        owner = tf.searchsorted(tf.constant(self._ends, tf.int64), buckets, side="right")
        parts = zip(self.sizes, tf.dynamic_partition(buckets, owner, len(self.sizes)))
        places = {path: part - self._first[path] for path, part in parts}
        return places if self._chosen is None else {p: tf.gather(self._chosen[p], at) for p, at in places.items()}

    def all_rows(self, path: str) -> tf.Tensor:
        """All rows of a table that are in the space, ascending, int64."""
        return tf.range(self.sizes[path], dtype=tf.int64) if self._chosen is None else self._chosen[path]


def _check_rows(sizes: Mapping[str, int], chosen: Mapping[str, np.ndarray]) -> dict[str, tf.Tensor]:
    """The chosen rows of each table, sorted."""
    if set(sizes) != set(chosen):
        raise ValueError(f"rows are chosen for the tables {sorted(chosen)}, but the model has {sorted(sizes)}.")
    result = {}
    for path, size in sizes.items():
        rows = np.unique(np.asarray(chosen[path], dtype=np.int64))
        if len(rows) != len(chosen[path]):
            raise ValueError(f"the rows chosen for '{path}' hold a row twice.")
        if len(rows) and (rows[0] < 0 or rows[-1] >= size):
            raise ValueError(f"the rows chosen for '{path}' must lie between 0 and {size - 1}.")
        with tf.init_scope():
            result[path] = tf.constant(rows)
    return result


class Votes(NamedTuple):
    """A batch's counts (float64) of the distinct buckets it touched (int64), of `size` buckets in all."""

    touched: tf.Tensor
    counts: tf.Tensor
    size: int


def contribution_counts(
    examples: tf.Tensor, buckets: tf.Tensor, num_buckets: int, contribution_clip: float
) -> Votes:
    """The sum over examples of their contribution maps, each clipped to L2 norm `contribution_clip`."""
    # `examples` and `buckets` are pairs, int64 [m], in any order and with repetitions; negative buckets (padding,
    # masked ids) count for nothing.
    present = buckets >= 0
    pairs = tf.boolean_mask(examples * num_buckets + buckets, present)
    pairs, _ = tf.unique(pairs)  # an id that repeats within an example counts once
    example = pairs // num_buckets
    num_examples = tf.maximum(tf.reduce_max(example), -1) + 1
    degree = tf.math.unsorted_segment_sum(tf.ones_like(pairs, tf.float64), example, num_examples)
    weight = tf.minimum(tf.constant(1.0, tf.float64), contribution_clip / tf.sqrt(degree))
    touched, index = tf.unique(pairs - example * num_buckets)
    counts = tf.math.unsorted_segment_sum(tf.gather(weight, example), index, tf.size(touched))
    return Votes(touched, counts, num_buckets)


def threshold_survivors(
    votes: Votes, noise_stddev: tf.Tensor, threshold: tf.Tensor, bits: Bits, parts: Sequence[int] | None = None
) -> tf.Tensor:
    """The buckets whose noisy count reaches the threshold, of all V buckets, in no particular order."""
    # With `parts`, the sizes of successive parts of the space, `threshold` has one for each part.
    scale = tf.cast(noise_stddev, tf.float64)
    threshold = tf.cast(threshold, tf.float64)
    each, ends, own = [threshold], [votes.size], threshold
    if parts is not None:
        each, ends = tf.unstack(threshold, num=len(parts)), list(itertools.accumulate(parts))
        own = tf.gather(threshold, tf.searchsorted(tf.constant(ends, tf.int64), votes.touched, side="right"))
    # Heads with probability Φ(-z): an exponential is at most -log Φ(z) just as often.
    tails = -log_normal_cdf((own - votes.counts) / scale)
    kept = tf.boolean_mask(votes.touched, unit_exponentials(bits(TOUCHED_STREAM, votes.touched)) <= tails)
    strays = []
    for number, (start, end, least) in enumerate(zip([0, *ends], ends, each)):
        rate = -log_normal_cdf(least / scale)
        strays.append(start + bernoulli_places(end - start, rate, bits, number * _DRAWS_OF_A_PART))
    # `unique` keeps the order of first sight: what comes after the touched are the strays that are not among them.
    seen = tf.size(votes.touched)
    distinct, _ = tf.unique(tf.concat([votes.touched, *strays], axis=0))
    return tf.concat([kept, distinct[seen:]], axis=0)


def bernoulli_places(num_buckets: int, rate: tf.Tensor, bits: Bits, first_draw: int = 0) -> tf.Tensor:
    """Ascending places of the heads among V ≤ 2^52 coins of rate -log(1 - p), in time that grows with the heads."""
    # Random bits of the numbers from `first_draw` on are used.
    size = tf.constant(float(num_buckets), tf.float64)
    expected = -tf.math.expm1(-rate) * size
    chunk = tf.cast(expected + 6.0 * tf.sqrt(expected) + 8.0, tf.int64)

    def draw(start: tf.Tensor, last: tf.Tensor, places: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        exponentials = unit_exponentials(bits(GAP_STREAM, tf.range(start, start + chunk)))
        tails = tf.minimum(tf.math.floor(exponentials / rate), size)  # size is as good as infinity
        heads = last + tf.cumsum(tails + 1.0)
        inside = tf.cast(tf.boolean_mask(heads, heads < size), tf.int64)
        return start + chunk, heads[-1], tf.concat([places, inside], axis=0)

    _, _, places = tf.while_loop(
        lambda start, last, places: last < size,
        draw,
        (tf.constant(first_draw, tf.int64), tf.constant(-1.0, tf.float64), tf.zeros([0], tf.int64)),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([]), tf.TensorShape([None])),
    )
    return places


def top_survivors(votes: Votes, num_survivors: int, epsilon: tf.Tensor, bits: Bits) -> tf.Tensor:
    """The m buckets with the largest ε * count + Gumbel, of all V buckets."""
    touched, counts, num_buckets = votes
    own = tf.cast(epsilon, tf.float64) * counts - tf.math.log(unit_exponentials(bits(GUMBEL_STREAM, touched)))
    num_untouched = num_buckets - tf.size(touched, out_type=tf.int64)
    num_drawn = tf.minimum(tf.constant(num_survivors, tf.int64), num_untouched)
    rank = tf.range(num_drawn)
    spacings = unit_exponentials(bits(GUMBEL_STREAM, num_buckets + rank)) / tf.cast(num_untouched - rank, tf.float64)
    others = -tf.math.log(tf.cumsum(spacings))  # the largest Gumbels of the untouched, descending
    _, winners = tf.math.top_k(tf.concat([own, others], axis=0), k=num_survivors)
    seen = tf.size(touched)
    num_others = tf.math.count_nonzero(winners >= seen, dtype=tf.int64)
    kept = tf.gather(touched, tf.boolean_mask(winners, winners < seen))
    return tf.concat([kept, distinct_places(num_buckets, num_others, touched, bits)], axis=0)


def distinct_places(num_buckets: int, count: tf.Tensor, excluded: tf.Tensor, bits: Bits) -> tf.Tensor:
    """`count` distinct buckets, a uniform draw from those that are not excluded."""
    wanted = tf.size(excluded, out_type=tf.int64) + count
    size = tf.constant(num_buckets, tf.uint64)

    def draw(start: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        chunk = 2 * (wanted - tf.size(found, out_type=tf.int64)) + 16
        words = bits(PLACE_STREAM, tf.range(start, start + chunk))
        fresh = tf.cast(tf.math.floormod(words, size), tf.int64)  # uneven by V / 2^64
        found, _ = tf.unique(tf.concat([found, fresh], axis=0))
        return start + chunk, found[:wanted]

    _, found = tf.while_loop(
        lambda start, found: tf.size(found, out_type=tf.int64) < wanted,
        draw,
        (tf.constant(0, tf.int64), excluded),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
    )
    return found[tf.size(excluded) :]


def unit_exponentials(words: tf.Tensor) -> tf.Tensor:
    """Unit exponentials, float64, from 64 bits each, exact in both tails."""
    # With x = (word + 1/2) / 2^64 uniform, E = -log(1 - x). The half below 1/2 is taken as it is, the half above
    # through 1 - x in integers, so that neither end loses bits: 2^-65 ≤ E ≤ 45.
    low = words < tf.constant(2**63, tf.uint64)
    x = (tf.cast(tf.where(low, words, tf.bitwise.invert(words)), tf.float64) + 0.5) * 2.0**-64
    return tf.where(low, -tf.math.log1p(-x), -tf.math.log(x))


def log_normal_cdf(z: tf.Tensor) -> tf.Tensor:
    """log Φ(z) in float64, exact for large z (it is then minus the other tail); -inf below z = -38."""
    z = tf.cast(z, tf.float64)
    half_tail = 0.5 * tf.math.erfc(tf.abs(z) * math.sqrt(0.5))
    return tf.where(z >= 0.0, tf.math.log1p(-half_tail), tf.math.log(half_tail))


def split_noise_multiplier(noise_multiplier: float, selection_fraction: float = 0.1) -> tuple[float, float]:
    """Splits one noise multiplier s between selecting rows, s1, and noising their gradients, s2.

    The two Gaussian mechanisms together are one, 1/s^2 = 1/s1^2 + 1/s2^2. Selection gets the share f of that budget.

    Args:
        noise_multiplier: Noise multiplier s of the DP-SGD step whose privacy the pair is to have.
        selection_fraction: Share f of the selection, between 0 and 1, exclusive.

    Example:
        >>> s1, s2 = split_noise_multiplier(1.0, selection_fraction=0.1)
        >>> round(s1, 3), round(s2, 3), round(s1**-2 + s2**-2, 9)
        (3.162, 1.054, 1.0)
    """
    if not 0.0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier!r}.")
    if not 0.0 < selection_fraction < 1.0:
        raise ValueError(f"selection_fraction must lie strictly between 0 and 1, got {selection_fraction!r}.")
    return noise_multiplier / math.sqrt(selection_fraction), noise_multiplier / math.sqrt(1.0 - selection_fraction)


def expected_strays(num_buckets: int, noise_stddev: float, threshold: float) -> float:
    """Mean number of untouched buckets that survive a selection: `num_buckets` · Φ(-`threshold` / `noise_stddev`).

    Example:
        >>> round(expected_strays(1_000_000, noise_stddev=3.0, threshold=12.0), 2)
        31.67
    """
    return num_buckets * 0.5 * math.erfc(threshold / noise_stddev * math.sqrt(0.5))


def gumbel_noise_multiplier(epsilon: float, num_survivors: int) -> float:
    """The noise multiplier of a Gaussian mechanism that is no more private than one top-m selection."""
    # A draw of the exponential mechanism with scale e0, on counts that one example moves by at most 1 in one direction,
    # has privacy loss in an interval of length e0, and is therefore μ-Gaussian-DP with μ = -2 Φ^-1(1 / (1 + e^(e0/2))).
    # Gumbel top-m is m such draws: 1/s^2 = m μ^2. Being a bound on the whole trade-off curve it survives subsampling
    # and composition, which an (ε, δ) pair would not. The proof is in docs/privacy-adafest.md.
    from scipy.special import expit, ndtri

    return 1.0 / (-2.0 * float(ndtri(expit(-0.5 * epsilon))) * math.sqrt(num_survivors))
