"""Negatives that do not depend on the data: drawn from the public catalogue for each batch, shared by its examples.

With Q the distribution of a draw and S draws, a negative s is expected S Q(s) times. The softmax over the catalogue,

    log Σ_i exp l_i,    is estimated by    log(exp l_positive + Σ_s exp(l_s − log(S Q(s))))

whose argument is right in expectation but for negatives equal to the positive. Q is uniform, or a mixture in equal
parts of the uniform distribution and of released counts: post-processing costs no privacy, while negatives drawn from
the batch would not be bounded by the clip. The seed is replaced before every private step (`recorder.secret_seeds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.datasets.negative_shares import check_counts, shares


@keras.saving.register_keras_serializable(package="tfdp_rec")
class Negatives(keras.layers.Layer):
    """Draws candidates' numbers from a distribution that is public or was released.

    Args:
        number: Number S of draws for a batch, with replacement.
        catalogue: Number of candidates.
        released_counts: Expected frequency of each candidate, `[catalogue]`: public, or released by a mechanism that
            the accountant counts (`privacy.private_counts(..., accountant=).values`); raw counts of private data are
            not private. Left out, all candidates are equally likely.

    Raises:
        ValueError: There are no draws or no candidates, or the counts do not fit the catalogue.

    Example:
        >>> drawn = Negatives(number=5, catalogue=3, released_counts=[8.0, 0.0, -1.5]).draw()
        >>> drawn.shape, bool(tf.reduce_all((drawn >= 0) & (drawn < 3)))
        (TensorShape([5]), True)
    """

    def __init__(self, number: int, catalogue: int, released_counts: Sequence[float] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        if not 1 <= number or not 1 <= catalogue:
            raise ValueError(f"Negatives need number and catalogue of at least 1, got {number} and {catalogue}.")
        self.number, self.catalogue = int(number), int(catalogue)
        self.released_counts = None if released_counts is None else check_counts(released_counts, self.catalogue)
        self._shares = None if self.released_counts is None else shares(self.released_counts)
        self.seed_generator = keras.random.SeedGenerator()
        self.built = True

    def draw(self) -> tf.Tensor:
        """Numbers of candidates from 0, `[S]` int64."""
        if self._shares is None:
            return keras.random.randint([self.number], 0, self.catalogue, dtype="int64", seed=self.seed_generator)
        places = keras.random.uniform([self.number], dtype="float64", seed=self.seed_generator)
        found = tf.searchsorted(tf.constant(np.cumsum(self._shares)), places, side="right", out_type=tf.int64)
        return tf.minimum(found, self.catalogue - 1)

    def log_expectation(self, numbers: tf.Tensor) -> tf.Tensor:
        """log(S Q(s)), float32: the correction to subtract from the logit of each negative."""
        if self._shares is None:
            return tf.fill(tf.shape(numbers), log_expectation(self.number, self.catalogue))
        return tf.gather(tf.constant(np.log(self.number * self._shares), tf.float32), numbers)

    def get_config(self) -> dict[str, Any]:
        own = {"number": self.number, "catalogue": self.catalogue, "released_counts": self.released_counts}
        return {**super().get_config(), **own}


def negatives_of(given: Any, catalogue: int) -> Any:
    """`Negatives` from a layer, its config or a number of uniform draws; None stays None."""
    if isinstance(given, dict):
        given = keras.saving.deserialize_keras_object(given)
    if given is None or isinstance(given, Negatives):
        if given is not None and given.catalogue != catalogue:
            raise ValueError(f"The negatives are for {given.catalogue} candidates, but there are {catalogue}.")
        return given
    return Negatives(given, catalogue, name="negatives")


_FAR_BELOW = -1e9  # a logit that takes no part in a softmax


def log_expectation(number: Any, catalogue: int) -> tf.Tensor:
    """log(S / M): the correction for S uniform draws from M candidates."""
    return tf.math.log(tf.cast(number, tf.float32)) - np.log(catalogue)


def read_batch(data: Mapping[str, Any], catalogue: int) -> tuple[tf.Tensor, tf.Tensor]:
    """A batch's negatives `[S]`, repeats last, and their offsets; without `expected` all are equally likely."""
    negatives = tf.cast(data["negatives"], tf.int64)
    if "expected" in data:
        return repeats_last(negatives, tf.math.log(data["expected"]))
    return repeats_last(negatives, tf.fill(tf.shape(negatives), log_expectation(tf.size(negatives), catalogue)))


def repeats_last(negatives: tf.Tensor, corrections: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """The negatives `[S]`, repeats last, and offsets, less corrections `[S]`: a repeated id counts in one column."""
    # The softmax is the same, and its gradient is zero in the other columns: none need to be added up by id, and side
    # by side they are quick to look at.
    ids, number, times = tf.unique_with_counts(negatives)
    place = tf.range(tf.size(negatives))
    first = tf.math.unsorted_segment_min(place, number, tf.size(times))
    repeats = tf.boolean_mask(negatives, tf.not_equal(tf.gather(first, number), place))
    counts = tf.math.log(tf.cast(times, tf.float32))
    if corrections is not None:
        counts -= tf.gather(corrections, first)
    offsets = tf.concat([counts, tf.fill(tf.shape(repeats), _FAR_BELOW)], axis=0)
    ordered = tf.concat([ids, repeats], axis=0)
    return tf.ensure_shape(ordered, negatives.shape), tf.ensure_shape(offsets, negatives.shape)


def mask_out(others: tf.Tensor, left_out: tf.Tensor | None) -> tf.Tensor:
    """Logits `[batch, S]` of negatives, those that a mask leaves out far below the others."""
    return others if left_out is None else tf.where(left_out, tf.constant(_FAR_BELOW, others.dtype), others)


class Softmax:
    """What a softmax over a positive and negatives is made of: a temperature, and how many negatives take part."""

    def __init__(self, temperature: float, num_hard_negatives: int | None):
        if not 0 < np.float32(temperature) < np.inf:
            raise ValueError(f"temperature must be a positive number, got {temperature!r}.")
        if num_hard_negatives is not None and num_hard_negatives < 1:
            raise ValueError(f"num_hard_negatives must be positive, got {num_hard_negatives!r}.")
        self.temperature, self.num_hard_negatives = float(temperature), num_hard_negatives

    def logits(self, own: tf.Tensor, others: tf.Tensor, left_out: tf.Tensor | None) -> tf.Tensor:
        """Logits `[batch, 1 + S]`, without the negatives that a mask leaves out."""
        others = mask_out(others, left_out)
        if self.num_hard_negatives is not None:
            largest = tf.math.top_k(others, tf.minimum(self.num_hard_negatives, tf.shape(others)[1])).values
            others = mask_out(others, others < largest[:, -1:])
        return tf.concat([own, others], axis=1)

    def losses(self, own: tf.Tensor, others: tf.Tensor, left_out: tf.Tensor | None) -> tf.Tensor:
        """Cross-entropies `[batch]` of the same logits."""
        if self.num_hard_negatives is None:
            return cross_entropy_beside(own, others, left_out)
        return cross_entropy(self.logits(own, others, left_out))

    def get_config(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "num_hard_negatives": self.num_hard_negatives}


def any_of(*masks: tf.Tensor | None) -> tf.Tensor | None:
    """Whether any of the masks holds; None if there is none."""
    there = [mask for mask in masks if mask is not None]
    return tf.reduce_any(tf.stack(there), axis=0) if len(there) > 1 else there[0] if there else None


def is_among(negatives: tf.Tensor, ids: tf.Tensor | None) -> tf.Tensor | None:
    """Whether each of the negatives `[S]` is one of an example's ids `[batch, E]`: `[batch, S]`."""
    if ids is None:
        return None
    return tf.reduce_any(tf.equal(tf.cast(ids, tf.int64)[:, None, :], tf.cast(negatives, tf.int64)[None, :, None]), 2)


def best(scores: tf.Tensor, k: Any, exclude: Any = None, allowed: Any = None) -> Any:
    """The `values` and `indices` of the k largest scores of each row, -inf and -1 where there are too few."""
    nothing = tf.constant(-np.inf, scores.dtype)
    if allowed is not None:
        scores = tf.where(allowed, scores, nothing)
    if exclude is not None:
        numbers = tf.cast(exclude, tf.int64)
        known = tf.where((numbers >= 0) & (numbers < tf.shape(scores, tf.int64)[1]))
        places = tf.stack([known[:, 0], tf.gather_nd(numbers, known)], axis=1)
        scores = tf.tensor_scatter_nd_update(scores, places, tf.fill(tf.shape(places)[:1], nothing))
    # A row of -inf more for each place that is asked for: k may be more than there are candidates.
    short = tf.maximum(k - tf.shape(scores)[1], 0)
    found = tf.math.top_k(tf.pad(scores, [[0, 0], [0, short]], constant_values=-np.inf), k)
    return found._replace(indices=tf.where(found.values == nothing, -1, found.indices))


def cross_entropy(logits: tf.Tensor) -> tf.Tensor:
    """−log of the softmax of logits at the first place, `[batch]`."""
    return tf.reduce_logsumexp(logits, axis=1) - logits[:, 0]


def cross_entropy_beside(own: tf.Tensor, others: tf.Tensor, left_out: tf.Tensor | None = None) -> tf.Tensor:
    """The same of positives `[batch, 1]` and negatives `[batch, S]`, of which some are left out."""
    # Each pass over [batch, S] is a tenth of a step: logits are not copied beside each other, nor gradients apart.

    @tf.custom_gradient
    def loss(own: tf.Tensor, others: tf.Tensor) -> Any:
        others = mask_out(others, left_out)
        most = tf.maximum(own, tf.reduce_max(others, axis=1, keepdims=True))
        mine, theirs = tf.exp(own - most), tf.exp(others - most)
        total = mine + tf.reduce_sum(theirs, axis=1, keepdims=True)

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            scale = upstream[:, None] / total
            return scale * mine - upstream[:, None], scale * theirs

        return (tf.math.log(total) + most - own)[:, 0], gradient

    return loss(own, others)
