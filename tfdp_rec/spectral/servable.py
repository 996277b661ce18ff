"""The recommender as a SavedModel: the arithmetic of `SpectralRecommender.recommend`, with the lookup from raw ids."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray


class Servable(tf.Module):
    """What is exported: released numbers, and nothing else.

    Args:
        item_ids: raw ids of the catalogue.
        head: places of the items that have weights.
        weights: between them.
        prior: of all items.
        recency: see `SpectralRecommender`.
        k: items an answer.
    """

    def __init__(
        self,
        item_ids: NDArray[np.int64],
        head: NDArray[np.int64],
        weights: NDArray[np.float32],
        prior: NDArray[np.float32],
        recency: float,
        k: int,
    ):
        super().__init__()
        raw = tf.constant(item_ids, tf.int64)
        initializer = tf.lookup.KeyValueTensorInitializer(raw, tf.range(tf.size(raw, tf.int64)))
        self.lookup = tf.lookup.StaticHashTable(initializer, default_value=-1)
        self.raw = tf.Variable(raw, trainable=False)
        # The catalogue in the order "head, then the rest": scores are made by joining two parts, not by scattering.
        order = np.concatenate([head, np.setdiff1d(np.arange(len(item_ids)), head)])
        self.order = tf.Variable(order, trainable=False, dtype=tf.int64)
        self.weights, self.prior = tf.Variable(weights, trainable=False), tf.Variable(prior, trainable=False)
        self.head_size, self.items, self.recency, self.k = len(head), len(item_ids), recency, k

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64, name="history")])
    def serve(self, history: tf.Tensor) -> dict[str, tf.Tensor]:
        """The k best items for each history, and their scores."""
        places = self.lookup.lookup(history)
        known = places >= 0
        age = tf.cumsum(tf.cast(known, tf.float32), axis=1, reverse=True, exclusive=True)
        rows = tf.broadcast_to(tf.range(tf.shape(history, tf.int64)[0])[:, None], tf.shape(history))
        cells = tf.stack([tf.boolean_mask(rows, known), tf.boolean_mask(places, known)], axis=1)
        nothing = tf.zeros(tf.stack([tf.shape(history)[0], self.items]), tf.float32)
        has = tf.tensor_scatter_nd_max(nothing, cells, tf.boolean_mask((1.0 + age) ** -self.recency, known))
        in_order = tf.gather(has, self.order, axis=1)
        personal = tf.matmul(in_order[:, : self.head_size], self.weights)
        scores = tf.gather(self.prior, self.order) + tf.pad(personal, [[0, 0], [0, self.items - self.head_size]])
        scores = tf.gather(scores, tf.argsort(self.order), axis=1)  # ties are broken as in Python: by place
        best, index = tf.math.top_k(tf.where(has > 0, tf.float32.min, scores), self.k)
        # Where the history holds nearly the whole catalogue, fewer than k are left: the rest is id 0.
        ids = tf.where(best > tf.float32.min, tf.gather(self.raw, index), tf.constant(0, tf.int64))
        return {"movie_ids": ids, "scores": best}


def write(
    filepath: str,
    item_ids: NDArray[np.int64],
    head: NDArray[np.int64],
    weights: NDArray[np.float32],
    prior: NDArray[np.float32],
    recency: float,
    k: int,
) -> None:
    """Writes the SavedModel; the arguments are those of `Servable`."""
    servable = Servable(item_ids, head, weights, prior, recency, k)
    tf.saved_model.save(servable, str(filepath), signatures={"serving_default": servable.serve})
