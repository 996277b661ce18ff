"""Scores of candidates by a model of their features: the private way to train two deep towers.

With q the query of an example, h the tower, t a temperature, p the positive and n_1 … n_S the batch's shared negatives,

    logit_0 = q · h(p) / t,    logit_s = q · h(n_s) / t − log(S Q(n_s))

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

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.layers.negatives import Negatives, Softmax, any_of, best, cross_entropy, is_among, negatives_of

_FILE = "candidates.npz"


@keras.saving.register_keras_serializable(package="tfdp_rec")
class TowerScores(keras.layers.Layer):
    """Logits of one positive an example and of drawn negatives, by a model of the candidates' features.

    Args:
        tower: Layer or model that maps features of n candidates to `[n, width]`.
        candidates: Features of the public catalogue, an array or a nest of arrays with one row a candidate; a saved
            model contains them as an asset.
        negatives: Number of uniform draws for a batch, or `Negatives`.
        temperature: Divisor of the products, positive.
        num_hard_negatives: Number of negatives, those with the largest logits of each example, that take part in its
            softmax; by default all.

    Call arguments:
        query: Queries `[batch, width]`.
        positives: Features of each example's positive, in the same nest as `candidates`.
        exclude: Places in `candidates`, `[batch, E]`, that are no negatives of their example; -1 excludes nothing.

    Returns:
        Logits `[batch, 1 + S]`, the positive first; a negative with all features of the positive is left out.

    Raises:
        ValueError: The features have different numbers of rows, or the temperature or the number of hard negatives
            is not positive.

    Example:
        >>> titles = np.array(["a", "b", "c"])
        >>> tower = keras.Sequential([keras.layers.StringLookup(vocabulary=titles), keras.layers.Embedding(4, 2)])
        >>> scores = TowerScores(tower, titles, negatives=5)
        >>> scores(tf.ones([2, 2]), tf.constant(["b", "a"])).shape
        TensorShape([2, 6])
        >>> scores.top_k(tf.ones([2, 2]), k=3).indices.shape
        TensorShape([2, 3])
    """

    def __init__(
        self,
        tower: Any,
        candidates: Any,
        negatives: int | Negatives = 100,
        *,
        temperature: float = 1.0,
        num_hard_negatives: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.softmax = Softmax(temperature, num_hard_negatives)
        self.tower = keras.saving.deserialize_keras_object(tower) if isinstance(tower, dict) else tower
        self.candidates = tf.nest.map_structure(_constant, candidates)
        sizes = {int(tf.shape(feature)[0]) for feature in tf.nest.flatten(self.candidates)}
        if len(sizes) != 1:
            raise ValueError(f"candidates must be features with one row a candidate, got {sorted(sizes)} rows.")
        self.negatives = negatives_of(negatives, sizes.pop())

    def call(self, query: tf.Tensor, positives: Any, exclude: Any = None) -> tf.Tensor:
        self._refuse_text_for_numbers(positives)
        drawn = self.negatives.draw()
        others = tf.nest.map_structure(lambda feature: tf.gather(feature, drawn), self.candidates)
        # One axis of B (1 + S) rows, example by example: the tower's layers see rows, as in any other call.
        rows = self.tower(tf.nest.map_structure(_side_by_side, positives, others))
        rows = tf.reshape(rows, [-1, 1 + self.negatives.number, rows.shape[-1]])
        logits = tf.einsum("bd,bsd->bs", query / self.softmax.temperature, tf.cast(rows, query.dtype))
        hits = [_same(*pair) for pair in zip(tf.nest.flatten(positives), tf.nest.flatten(others))]
        hit = tf.reduce_all(tf.stack(hits), axis=0)
        others = logits[:, 1:] - tf.cast(self.negatives.log_expectation(drawn), logits.dtype)
        return self.softmax.logits(logits[:, :1], others, any_of(hit, is_among(drawn, exclude)))

    def _refuse_text_for_numbers(self, positives: Any) -> None:
        for own, known in zip(tf.nest.flatten(positives), tf.nest.flatten(self.candidates)):
            kinds = ["text" if tf.convert_to_tensor(each).dtype == tf.string else "numbers" for each in (own, known)]
            if kinds[0] != kinds[1]:
                raise NotPrivate(
                    f"Layer '{self.name}' is given {kinds[0]} for candidates that are {kinds[1]}: features of "
                    "positives and of candidates must be of one type, since the tower is run on both."
                )

    def cross_entropy(self, query: tf.Tensor, positives: Any, exclude: Any = None) -> tf.Tensor:
        """Each example's loss `[batch]`, which estimates that of a softmax over the catalogue."""
        return cross_entropy(self(query, positives, exclude))

    def top_k(
        self, query: tf.Tensor, k: Any, exclude: Any = None, allowed: Any = None, *, candidates: Any = None
    ) -> Any:
        """The `values` and `indices` of the best candidates for each query.

        Args:
            query: Queries `[batch, width]`.
            k: Number of candidates; may be a tensor, such as an input of an exported model.
            exclude: Places in the candidates, `[batch, E]`, to leave out; -1 excludes nothing.
            allowed: Whether each candidate may be recommended, `[candidates]` or `[batch, candidates]`.
            candidates: Features to rank, such as those of items newer than the model; by default the catalogue's.

        Returns:
            Values and indices `[batch, k]`, best first; -inf and -1 in the places for which no candidate is left.
        """
        features = self.candidates if candidates is None else tf.nest.map_structure(tf.convert_to_tensor, candidates)
        return best(tf.matmul(query, self.tower(features), transpose_b=True), k, exclude, allowed)

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
            **self.softmax.get_config(),
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
