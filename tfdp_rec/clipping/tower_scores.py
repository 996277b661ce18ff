"""Scores of candidates by a model of their features: the private way to train two deep towers.

With q the query of an example, h the tower, p its positive and n_1 … n_S negatives that the batch shares,

    logit_0 = q · h(p),    logit_s = q · h(n_s) − log(S Q(n_s))

If the batch shared one run of the tower on the S negatives, a layer inside it would see the sum of all examples'
gradients, which does not split by example. So the tower runs on each example's 1 + S candidates, in one axis of
B (1 + S) rows, and its layers are clipped by the ordinary rules. For a table alone, `CandidateScores` costs B + S rows.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.clipping.negatives import Negatives, corrected, cross_entropy, negatives_of

_FILE = "candidates.npz"


@keras.saving.register_keras_serializable(package="tfdp_rec")
class TowerScores(keras.layers.Layer):
    """Logits of one positive an example and of drawn negatives, by a model of the candidates' features.

    Args:
        tower: Layer or model that maps features of n candidates to `[n, width]`.
        candidates: Features of the public catalogue, an array or a nest of arrays with one row a candidate; a saved
            model contains them as an asset.
        negatives: Number of uniform draws for a batch, or `Negatives`.

    Call arguments:
        query: Queries `[batch, width]`.
        positives: Features of each example's positive, in the same nest as `candidates`.

    Returns:
        Logits `[batch, 1 + S]`, the positive first; a negative with all features of the positive is left out.

    Raises:
        ValueError: The features have different numbers of rows.

    Example:
        >>> titles = np.array(["a", "b", "c"])
        >>> tower = keras.Sequential([keras.layers.StringLookup(vocabulary=titles), keras.layers.Embedding(4, 2)])
        >>> scores = TowerScores(tower, titles, negatives=5)
        >>> scores(tf.ones([2, 2]), tf.constant(["b", "a"])).shape
        TensorShape([2, 6])
        >>> scores.top_k(tf.ones([2, 2]), k=3).indices.shape
        TensorShape([2, 3])
    """

    def __init__(self, tower: Any, candidates: Any, negatives: int | Negatives = 100, **kwargs: Any):
        super().__init__(**kwargs)
        self.tower = keras.saving.deserialize_keras_object(tower) if isinstance(tower, dict) else tower
        self.candidates = tf.nest.map_structure(_constant, candidates)
        sizes = {int(tf.shape(feature)[0]) for feature in tf.nest.flatten(self.candidates)}
        if len(sizes) != 1:
            raise ValueError(f"candidates must be features with one row a candidate, got {sorted(sizes)} rows.")
        self.negatives = negatives_of(negatives, sizes.pop())

    def call(self, query: tf.Tensor, positives: Any) -> tf.Tensor:
        drawn = self.negatives.draw()
        others = tf.nest.map_structure(lambda feature: tf.gather(feature, drawn), self.candidates)
        # One axis of B (1 + S) rows, example by example: the tower's layers see rows, as in any other call.
        rows = self.tower(tf.nest.map_structure(_side_by_side, positives, others))
        rows = tf.reshape(rows, [-1, 1 + self.negatives.number, rows.shape[-1]])
        logits = tf.einsum("bd,bsd->bs", query, tf.cast(rows, query.dtype))
        hits = [_same(*pair) for pair in zip(tf.nest.flatten(positives), tf.nest.flatten(others))]
        return corrected(logits, self.negatives.log_expected(drawn), tf.reduce_all(tf.stack(hits), axis=0))

    def cross_entropy(self, query: tf.Tensor, positives: Any) -> tf.Tensor:
        """Each example's loss `[batch]`, which estimates that of a softmax over the catalogue."""
        return cross_entropy(self(query, positives))

    def top_k(self, query: tf.Tensor, k: int) -> Any:
        """The `values` and `indices` of the k best candidates for each query, over the whole catalogue."""
        return tf.math.top_k(tf.matmul(query, self.tower(self.candidates), transpose_b=True), k)

    def save_assets(self, dir_path: str) -> None:
        """Writes the candidates beside the model's weights."""
        flat = [feature.numpy() for feature in tf.nest.flatten(self.candidates)]
        np.savez(os.path.join(dir_path, _FILE), *(each.astype("S") if each.dtype == object else each for each in flat))

    def load_assets(self, dir_path: str) -> None:
        """Reads what `save_assets` wrote."""
        with np.load(os.path.join(dir_path, _FILE)) as found:
            flat = [_constant(found[name]) for name in found.files]
        self.candidates = tf.nest.pack_sequence_as(self.candidates, flat)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "tower": keras.saving.serialize_keras_object(self.tower),
            "candidates": tf.nest.map_structure(_blank, self.candidates),  # until `load_assets`
            "negatives": keras.saving.serialize_keras_object(self.negatives),
        }


def _constant(feature: Any) -> tf.Tensor:
    """A feature as a constant outside the graph being traced; zeros of its shape, from a config."""
    with tf.init_scope():
        if not isinstance(feature, str):
            return tf.constant(feature)
        kind, *shape = feature.split()
        return tf.fill(list(map(int, shape)), tf.constant("" if kind == "string" else 0, kind))


def _blank(feature: tf.Tensor) -> str:
    """The type and shape of a feature, for a config."""
    return " ".join([feature.dtype.name, *map(str, feature.shape)])


def _side_by_side(positives: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Each example's positive and the negatives, `[batch (1 + S), ...]`."""
    positives = tf.cast(positives, others.dtype) if positives.dtype != others.dtype else positives
    shape = tf.concat([tf.shape(positives)[:1], tf.shape(others)], axis=0)
    both = tf.concat([positives[:, None], tf.broadcast_to(others[None], shape)], axis=1)
    return tf.reshape(both, [-1, *others.shape[1:]])


def _same(positives: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Whether a feature of an example's positive is that of each negative, `[batch, S]`."""
    equal = tf.equal(tf.cast(positives[:, None], others.dtype), others[None])
    return tf.reduce_all(equal, axis=list(range(2, equal.shape.rank))) if equal.shape.rank > 2 else equal
