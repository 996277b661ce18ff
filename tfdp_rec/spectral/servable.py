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
        k: items an answer.
    """

    def __init__(
        self,
        item_ids: NDArray[np.int64],
        head: NDArray[np.int64],
        weights: NDArray[np.float32],
        prior: NDArray[np.float32],
        k: int,
    ):
        super().__init__()
        raw = tf.constant(item_ids, tf.int64)
        initializer = tf.lookup.KeyValueTensorInitializer(raw, tf.range(tf.size(raw, tf.int64)))
        self.lookup = tf.lookup.StaticHashTable(initializer, default_value=-1)
        position = np.full(len(item_ids), -1)
        position[head] = np.arange(len(head))
        self.raw = tf.Variable(raw, trainable=False)
        self.position = tf.Variable(position, trainable=False, dtype=tf.int64)
        # The catalogue in the order "head, then the rest": scores are made by joining two parts, not by scattering.
        self.order = tf.Variable(np.concatenate([head, np.flatnonzero(position < 0)]), trainable=False, dtype=tf.int64)
        self.weights, self.prior = tf.Variable(weights, trainable=False), tf.Variable(prior, trainable=False)
        self.head_size, self.items, self.k = len(head), len(item_ids), k

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64, name="history")])
    def serve(self, history: tf.Tensor) -> dict[str, tf.Tensor]:
        """The k best items for each history, and their scores."""
        places = self.lookup.lookup(history)
        rows = tf.broadcast_to(tf.range(tf.shape(history, tf.int64)[0])[:, None], tf.shape(history))
        known = places >= 0
        rows, places = tf.boolean_mask(rows, known), tf.boolean_mask(places, known)
        seen = self._marked(rows, places, tf.shape(history, tf.int64)[0], self.items)
        prior = tf.gather(self.prior, self.order)
        in_order = tf.gather(seen, self.order, axis=1)
        personal = tf.matmul(tf.cast(in_order[:, : self.head_size], tf.float32), self.weights)
        scores = prior + tf.pad(personal, [[0, 0], [0, self.items - self.head_size]])
        scores = tf.gather(scores, tf.argsort(self.order), axis=1)  # ties are broken as in Python: by place
        best, index = tf.math.top_k(tf.where(seen, tf.float32.min, scores), self.k)
        # Where the history holds nearly the whole catalogue, fewer than k are left: the rest is id 0.
        ids = tf.where(best > tf.float32.min, tf.gather(self.raw, index), tf.constant(0, tf.int64))
        return {"movie_ids": ids, "scores": best}

    def _marked(self, rows: tf.Tensor, places: tf.Tensor, batch: tf.Tensor, items: int) -> tf.Tensor:
        """True where a history has an item."""
        counts = tf.scatter_nd(tf.stack([rows, places], axis=1), tf.ones_like(rows), tf.stack([batch, items]))
        return counts > 0


def write(
    filepath: str,
    item_ids: NDArray[np.int64],
    head: NDArray[np.int64],
    weights: NDArray[np.float32],
    prior: NDArray[np.float32],
    k: int,
) -> None:
    """Writes the SavedModel; the arguments are those of `Servable`."""
    servable = Servable(item_ids, head, weights, prior, k)
    tf.saved_model.save(servable, str(filepath), signatures={"serving_default": servable.serve})
