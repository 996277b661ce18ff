"""The recommender as a SavedModel: the arithmetic of `SpectralRecommender.recommend` in TensorFlow's operations, exact
at any size of the catalogue.

**Slots.** Items stand in one order: the m of the head first, then the rest, the best prior first. A history moves the
scores of the head alone; all others keep their prior. So the k best of M items are among

    the head, and the first k + n of the rest      (n the length of the history, which is left out of the answer)

and an answer costs O(m + k + n), whether the catalogue has ten thousand items or ten million: nothing is approximate.
With public features a history moves the scores of all items, and an answer costs O(M).

Equal scores stand in the order of the catalogue, as in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import sparse

from tfdp_rec.serving.own_ids import LEFT_OUT, NOTHING, answer_in_groups, first
from tfdp_rec.spectral.features import mean_vector


class SpectralAnswers(tf.Module):
    """Answers of a `SpectralRecommender`, from released numbers alone (`serving.own_ids.SlotAnswers`)."""

    def __init__(
        self,
        head: NDArray[np.int64],
        weights: NDArray[np.float32],
        prior: NDArray[np.float32],
        overlap: NDArray[np.float32],
        recency: float,
        features: tuple[sparse.csr_matrix, NDArray[np.float32]] | None = None,  # as `likeness` takes them
    ):
        super().__init__()
        rest = np.setdiff1d(np.arange(len(prior)), head)
        self.places = np.concatenate([head, rest[np.argsort(-prior[rest], kind="stable")]])
        self.place = tf.Variable(self.places, trainable=False, dtype=tf.int64)
        self.weights = tf.Variable(weights, trainable=False)
        self.prior = tf.Variable(prior[self.places], trainable=False)
        self.overlap = tf.Variable(overlap, trainable=False)
        self.head_size, self.items, self.recency = len(head), len(prior), recency
        self.likeness = features and _Likeness(*(each[self.places] for each in features))

    def best(self, history: tf.Tensor, k: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """As `SlotAnswers.best`."""
        if self.likeness is None:  # only the first of the rest can be among the best
            return self._best(history, tf.minimum(self.items - self.head_size, k + tf.shape(history)[1]), k)
        return answer_in_groups(lambda some: self._best(some, self.items - self.head_size, k), history, k, self.items)

    def _best(self, history: tf.Tensor, rest: Any, k: Any) -> tuple[tf.Tensor, tf.Tensor]:
        weighed = self._weigh(history)
        has = self._has(history, weighed, 0, self.head_size)
        had = self._has(history, weighed, self.head_size, rest)
        of_rest = tf.repeat(self.prior[None, self.head_size : self.head_size + rest], tf.shape(history)[0], axis=0)
        scores = tf.concat([self.prior[: self.head_size] + self._personal(has), of_rest], axis=1)
        held = tf.concat([has, had], axis=1)
        if self.likeness is not None:
            scores += self.likeness(held)
        scores = tf.where(held > 0, LEFT_OUT, scores)
        return self._first(scores, tf.range(tf.cast(self.head_size + rest, tf.int64)), k)

    def best_among(self, history: tf.Tensor, k: Any, allowed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As `SlotAnswers.best_among`."""
        if self.likeness is None:
            return self._answer_among(history, k, allowed)
        return answer_in_groups(lambda some: self._answer_among(some, k, allowed), history, k, self.items)

    def _answer_among(self, history: tf.Tensor, k: Any, allowed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        weighed = self._weigh(history)
        personal = self._personal(self._has(history, weighed, 0, self.head_size))
        column = tf.where(allowed < self.head_size, allowed, self.head_size)
        scores = tf.gather(self.prior, allowed) + tf.gather(tf.pad(personal, [[0, 0], [0, 1]]), column, axis=1)
        if self.likeness is not None:
            scores += tf.gather(self.likeness(self._has(history, weighed, 0, self.items)), allowed, axis=1)
        return self._first(tf.where(_is_there(history, allowed), LEFT_OUT, scores), allowed, k)

    def _weigh(self, history: tf.Tensor) -> tf.Tensor:
        """Weight of each entry: those of the known ones are 1 on average."""
        known = tf.cast(history >= 0, tf.float32)
        weight = (1.0 + tf.cumsum(known, axis=1, reverse=True, exclusive=True)) ** -self.recency
        total = tf.reduce_sum(known * weight, axis=1, keepdims=True)
        return tf.math.divide_no_nan(weight * tf.reduce_sum(known, axis=1, keepdims=True), total)

    def _has(self, history: tf.Tensor, weighed: tf.Tensor, first: int, size: Any) -> tf.Tensor:
        """Weights of the slots from `first` on in each history, `[batch, size]`; of a repeated slot the last weight."""
        batch = tf.shape(history, tf.int64)[0]
        there = (history >= first) & (history < first + tf.cast(size, tf.int64))
        rows = tf.broadcast_to(tf.range(batch)[:, None], tf.shape(history))
        cells = tf.stack([tf.boolean_mask(rows, there), tf.boolean_mask(history, there) - first], axis=1)
        nothing = tf.zeros(tf.stack([batch, tf.cast(size, tf.int64)]), tf.float32)
        return tf.tensor_scatter_nd_max(nothing, cells, tf.boolean_mask(weighed, there))

    def _personal(self, has: tf.Tensor) -> tf.Tensor:
        """Scores of the head from the histories; reads the weights of their items alone."""
        any_of_head = tf.cast(tf.reduce_any(has > 0, axis=1, keepdims=True), tf.float32)
        return tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(has), self.weights) - any_of_head * self.overlap

    def _first(self, scores: tf.Tensor, slots: tf.Tensor, k: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """The k best of some slots; of equal scores the first in the catalogue."""
        order = tf.argsort(tf.gather(self.place, slots))
        return first(tf.gather(scores, order, axis=1), tf.gather(slots, order), k)


class _Likeness(tf.Module):
    """What public features add to the scores of all slots: `features.likeness`, of histories by slot."""

    def __init__(self, vectors: sparse.csr_matrix, shares: NDArray[np.float32]):
        super().__init__()
        mean = mean_vector(vectors, shares)
        usual = float(mean @ mean)
        self.shares = tf.Variable(shares / usual if usual else np.zeros_like(shares), trainable=False)
        self.mean = tf.Variable(mean, trainable=False)
        self.has = tf.Variable((vectors.getnnz(axis=1) > 0).astype(np.float32)[:, None], trainable=False)
        entries = vectors.tocoo()
        self.entries = tf.Variable(entries.data, trainable=False)
        self.places = tf.Variable(np.stack([entries.row, entries.col], axis=1), trainable=False, dtype=tf.int64)
        self.shape = vectors.shape

    def __call__(self, weights: tf.Tensor) -> tf.Tensor:
        vectors = tf.SparseTensor(self.places, self.entries, self.shape)
        total = weights @ self.has
        of_histories = tf.sparse.sparse_dense_matmul(vectors, weights, adjoint_a=True, adjoint_b=True)
        apart = tf.math.divide_no_nan(tf.transpose(of_histories) - total * self.mean, total)
        return tf.transpose(tf.sparse.sparse_dense_matmul(vectors, apart, adjoint_b=True)) * self.shares


def _is_there(history: tf.Tensor, slots: tf.Tensor) -> tf.Tensor:
    """Whether each history holds each slot, `[batch, slots]`."""
    in_order = tf.sort(tf.pad(history, [[0, 0], [1, 0]], constant_values=NOTHING), axis=1)
    wanted = tf.repeat(slots[None], tf.shape(history)[0], axis=0)
    near = tf.minimum(tf.searchsorted(in_order, wanted), tf.shape(in_order)[1] - 1)
    return tf.gather(in_order, near, batch_dims=1) == wanted
