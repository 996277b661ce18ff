"""The two-tower recommender of EANA §4.1: what was watched predicts what is watched next.

    bag   = Σ of the context table's rows of the n watched movies / √n (padding left out; its length does not hang on n)
    query = bag + hidden layer(bag) / 10, which tames the layer under the large learning rates that tables need
    score of movie i = query · label table_i + log prior_i

The loss is the cross-entropy of the watched movie against S negatives of the public catalogue of M movies, shared by
the batch. One that is drawn with chance π (S/M, or what the batch tells) stands for 1/π movies, so log(1/π) is added to
its logit: the loss then estimates that of the full softmax. Negatives do not depend on the data, so one example's
gradient is its own.

Reference:
    Ning et al., "EANA", RecSys 2022, §4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
from numpy.typing import ArrayLike

from tfdp_rec.datasets.log import PADDING, Catalogue
from tfdp_rec.layers.candidate_scores import CandidateScores
from tfdp_rec.layers.negatives import read_batch
from tfdp_rec.metrics import ranks
from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.models.own_catalogue import OwnCatalogue
from tfdp_rec.serving import own_ids
from tfdp_rec.training.model import PrivateTraining

_HIDDEN_SHARE = 0.1


@keras.saving.register_keras_serializable(package="tfdp_rec")
class BagOfWords(keras.layers.Layer):
    """The sum of the n rows that are not padding, over √n; zeros where all are."""

    def call(self, rows: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
        return _bag(rows, present)


@keras.saving.register_keras_serializable(package="tfdp_rec")
class TwoTower(SavedByArguments, OwnCatalogue, own_ids.ServedByIds, PrivateTraining, tfrs.Model):
    """Bag-of-words context tower, lookup label tower, sampled softmax with shared negatives.

    A batch is a dict: `context` `[batch, n]` (movie numbers, 0 pads), `label` `[batch]` (0 for none),
    `negatives` `[S]` and, if they are not equally likely, `expected` `[S]`, the chance of each.

    Args:
        vocabulary: The raw ids of the public catalogue; movie number i is `vocabulary[i - 1]`, number 0 is padding.
        width: Width of both tables.
        hidden: Units of the hidden layer, 0 for none.
        prior: Popularity of each movie, up to scale, public or counted under differential privacy; None for uniform.
        history_length: Number of the last movies watched that count.
        ks: The cut-offs of recall@k and precision@k over the whole catalogue.

    Raises:
        ValueError: for an empty catalogue, repeated ids, or a prior that does not fit.

    Example:
        >>> import numpy as np, tfdp_rec
        >>> model = tfdp_rec.models.TwoTower(vocabulary=[318, 296, 593, 356], width=4, hidden=0, ks=(1, 2))
        >>> model.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2))
        >>> batch = {"context": np.array([[1, 2], [3, 0]]), "label": np.array([4, 1]), "negatives": np.array([2, 3])}
        >>> sorted(model.train_on_batch(batch, return_dict=True))
        ['loss']
    """

    shared_inputs = ("negatives", "expected")

    def __init__(
        self,
        vocabulary: ArrayLike,
        width: int = 128,
        hidden: int = 128,
        prior: ArrayLike | None = None,
        history_length: int = 20,
        ks: Sequence[int] = (1, 5, 10, 20),
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.vocabulary = Catalogue(vocabulary).ids
        self.width, self.hidden, self.history_length = width, hidden, history_length
        self.prior = check_prior(prior, len(self.vocabulary))
        self.ks = tuple(sorted(k for k in ks if k <= len(self.vocabulary)))
        rows = len(self.vocabulary) + 1
        start = keras.initializers.RandomNormal(stddev=width**-0.5)
        self.context_table = keras.layers.Embedding(rows, width, embeddings_initializer=start, name="context")
        self.bag = BagOfWords(name="bag")
        self.hidden_layer = keras.layers.Dense(hidden, activation="tanh", name="hidden") if hidden else None
        # Starts at nothing: at first the query is the bag itself, and the hidden layer learns what to add.
        self.out_layer = keras.layers.Dense(width, kernel_initializer="zeros", name="out") if hidden else None
        # Starts at nothing too: at first every score is the prior.
        self.scores = CandidateScores(rows, width, embeddings_initializer="zeros", name="label")
        self._log_prior = tf.constant(np.concatenate([[0.0], np.log(self.prior)]), tf.float32)
        self.context_table.build((None, None))
        self.encode(tf.zeros([1, history_length], tf.int64))
        self.built = True

    # Towers.

    def encode(self, context: tf.Tensor) -> tf.Tensor:
        """Queries `[batch, width]` from movie numbers `[batch, n]`, 0 being padding."""
        bag = self.bag(self.context_table(context), tf.not_equal(context, PADDING))
        if self.hidden_layer is None or self.out_layer is None:
            return bag
        return bag + _HIDDEN_SHARE * self.out_layer(self.hidden_layer(bag))

    def call(self, context: tf.Tensor) -> tf.Tensor:
        """Scores of the whole catalogue, `[batch, movies]`."""
        return tf.matmul(_append_one(self.encode(context)), self._candidates(), transpose_b=True)

    def _candidates(self) -> tf.Tensor:
        """The label table without padding, the log prior as one more column."""
        return tf.concat([self.scores.embeddings[1:], self._log_prior[1:, None]], axis=1)

    def item_tables(self) -> list[Any]:
        """As `OwnCatalogue.item_tables`."""
        return [self.context_table, self.scores]

    # Losses.

    def per_example_loss(self, data: dict[str, tf.Tensor], training: bool = True) -> tf.Tensor:
        """Sampled-softmax cross-entropy of each example, `[batch]`."""
        label, (negatives, corrections) = tf.cast(data["label"], tf.int64), read_batch(data, len(self.vocabulary))
        own, others = (tf.gather(self._log_prior, ids) for ids in (label, negatives))
        others += corrections
        losses = self.scores.cross_entropy(self.encode(data["context"]), label, negatives, offsets=(own, others))
        return losses * tf.cast(tf.not_equal(label, PADDING), losses.dtype)  # users without items learn nothing

    def recall(self, dataset: tf.data.Dataset) -> dict[str, float]:
        """recall@k and precision@k of every k on batches of held-out examples, over the whole catalogue.

        With one watched movie an example, recall@k is the share of examples that have it among the first k, and
        precision@k is that divided by k.

        Args:
            dataset: Batches as for training.
        """
        with self.private_weights.exporting():
            found = [ranks(self(batch["context"]).numpy(), np.asarray(batch["label"])) for batch in dataset]
        recalls = {k: float(np.mean(np.concatenate(found) < k)) for k in self.ks}
        named = {f"recall@{k}": value for k, value in recalls.items()}
        return named | {f"precision@{k}": value / k for k, value in recalls.items()}

    # Serving.

    def answers(self) -> TwoTowerAnswers:
        """A `tf.Module` with a copy of the settled weights, for `tfdp_rec.serving.export`."""
        with self.private_weights.exporting():
            return TwoTowerAnswers(self)


class TwoTowerAnswers(own_ids.WholeCatalogue):
    """Answers of a settled `TwoTower`, with a copy of its weights."""

    def __init__(self, model: TwoTower):
        super().__init__(len(model.vocabulary))
        # Copies: what is exported does not change when training goes on, and the Keras model does not come along.
        self.candidates = tf.Variable(model._candidates(), trainable=False)
        layers = [layer for layer in (model.context_table, model.hidden_layer, model.out_layer) if layer is not None]
        self.tower = [tf.Variable(w.numpy(), trainable=False) for layer in layers for w in layer.weights]
        self.history_length = model.history_length

    def scores(self, history: tf.Tensor) -> tf.Tensor:
        """As `WholeCatalogue.scores`."""
        return tf.matmul(self.encode(history), self.candidates, transpose_b=True)

    def encode(self, history: tf.Tensor) -> tf.Tensor:
        """Queries `[batch, width]`, made of the last items; a score is the product with the item's candidate."""
        known = tf.cast(history >= 0, tf.int64)
        recent = tf.cast(tf.cumsum(known, axis=1, reverse=True) <= self.history_length, tf.int64)
        return _append_one(self._bag_to_query(history + 1, known * recent))

    def _bag_to_query(self, watched: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
        table, *hidden = self.tower
        bag = _bag(tf.gather(table, watched), counted)
        if not hidden:
            return bag
        kernel, bias, out_kernel, out_bias = hidden
        return bag + _HIDDEN_SHARE * (tf.matmul(tf.tanh(tf.matmul(bag, kernel) + bias), out_kernel) + out_bias)


def _bag(rows: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    weights = tf.cast(present, rows.dtype)[:, :, None]
    return tf.math.divide_no_nan(tf.reduce_sum(rows * weights, axis=1), tf.sqrt(tf.reduce_sum(weights, axis=1)))


def _append_one(query: tf.Tensor) -> tf.Tensor:
    """The query with a 1 behind it, which meets the candidates' log prior."""
    return tf.concat([query, tf.ones_like(query[:, :1])], axis=1)


def check_prior(prior: ArrayLike | None, movies: int) -> np.ndarray:
    """The popularity of so many movies as shares; uniform for None."""
    if prior is None:
        return np.full(movies, 1.0 / movies)
    values = np.asarray(prior, np.float64)
    if values.shape != (movies,) or not (values > 0).all() or not np.isfinite(values).all():
        raise ValueError(f"prior must be {movies} positive numbers, one a movie; got shape {values.shape}.")
    return values / values.sum()
