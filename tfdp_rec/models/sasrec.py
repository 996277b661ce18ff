"""A causal transformer that predicts the next item at every place of a history, of SASRec's shape.

    x_t     = E[item_t] + P[t],    y = blocks(x), where place t attends to the places s ≤ t
    recent_t = Σ_{s≤t} w_{t−s} E[item_s] / √(Σ w²),    w_j = 1 / (1 + j)
    query_t = recent_t + W · norm(y_t) + b
    score of item i after place t = query_t · label table_i + log prior_i

W, b and the label table begin at zero: at first all scores are the log prior, and a query is the recent items alone,
which a private training learns soonest. The loss of an example is the mean over its places of the cross-entropy of the
item that follows, against S negatives of the public catalogue, shared by the batch: drawn uniformly, or with chances
that the batch tells. All places of a user are one gradient, clipped as one, so the guarantee is that of a user.

`SASRec.upon` puts the logits of released private sums in the place of the log prior (`released_sums.py`): the model
begins with their answers.

Reference:
    Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
from numpy.typing import ArrayLike

from tfdp_rec.core.claim.events import DpEvent
from tfdp_rec.core.ground.keras_internals import resource
from tfdp_rec.datasets.log import PADDING, Catalogue
from tfdp_rec.layers.candidate_scores import CandidateScores
from tfdp_rec.layers.negatives import read_batch
from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.models.kg_entity import EncoderBlock
from tfdp_rec.models.own_catalogue import OwnCatalogue
from tfdp_rec.models.released_sums import ReleasedSums
from tfdp_rec.models.two_tower import check_prior
from tfdp_rec.serving import own_ids
from tfdp_rec.training.model import PrivateTraining


@keras.saving.register_keras_serializable(package="tfdp_rec")
class RecentItems(keras.layers.Layer):
    """Σ_{s≤t} x_s / (1 + t − s) at every place t, scaled so that independent rows keep their size."""

    def call(self, rows: tf.Tensor) -> tf.Tensor:
        places = np.arange(rows.shape[1])
        ago = places[:, None] - places
        weights = np.where(ago >= 0, 1.0 / (1.0 + np.maximum(ago, 0)), 0.0)
        weights /= np.sqrt(np.sum(weights**2, axis=1, keepdims=True))
        return tf.einsum("ts,bsw->btw", tf.constant(weights, rows.dtype), rows)


@keras.saving.register_keras_serializable(package="tfdp_rec")
class SASRec(SavedByArguments, OwnCatalogue, own_ids.ServedByIds, PrivateTraining, tfrs.Model):
    """Causal transformer over a history, lookup label tower, sampled softmax with shared negatives.

    A batch is a dict: `context` `[batch, n]` (item numbers, the oldest first, then zeros), `label` `[batch, n]`, the
    item that follows each, 0 for none, and `negatives` `[S]`: what `NextItemExamples(every_place=True)` makes. With
    its `released_counts` also `expected` `[S]`, the chance of each negative.

    Args:
        vocabulary: Raw ids of the public catalogue; item number i is `vocabulary[i - 1]`, number 0 is padding.
        width: Width of both tables and of the transformer.
        history_length: Number n of places of a history.
        num_blocks: Number of transformer blocks; with 0, a query is the recent items alone.
        num_heads: Number of attention heads of each block; must divide `width`.
        hidden: Units of each block's hidden layer; four times `width` if left out.
        prior: Popularity of each item, up to scale, public or counted under differential privacy; None for uniform.
        sums: Arguments of `ReleasedSums`, which `SASRec.upon` gives; None for a model without.

    Raises:
        ValueError: The catalogue is empty or repeats an id, the prior does not fit, or `num_heads` does not divide
            `width`.

    Example:
        >>> import numpy as np, tfdp_rec
        >>> model = tfdp_rec.models.SASRec(vocabulary=[318, 296, 593, 356], width=4, history_length=3, num_heads=1)
        >>> model.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2))
        >>> batch = {"context": np.array([[1, 2, 3], [3, 0, 0]]), "label": np.array([[2, 3, 4], [1, 0, 0]])}
        >>> sorted(model.train_on_batch({**batch, "negatives": np.array([2, 3])}, return_dict=True))
        ['loss']
        >>> model(batch["context"]).shape
        TensorShape([2, 4])
    """

    shared_inputs = ("negatives", "expected")

    def __init__(
        self,
        vocabulary: ArrayLike,
        width: int = 64,
        history_length: int = 50,
        num_blocks: int = 1,
        num_heads: int = 2,
        hidden: int | None = None,
        prior: ArrayLike | None = None,
        sums: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if num_blocks and width % num_heads:
            raise ValueError(f"num_heads must divide width, got {num_heads} heads and width {width}.")
        self.vocabulary = Catalogue(vocabulary).ids
        self.width, self.history_length = width, history_length
        self.prior = check_prior(prior, len(self.vocabulary))
        rows = len(self.vocabulary) + 1
        start = keras.initializers.RandomNormal(stddev=width**-0.5)
        self.items = keras.layers.Embedding(rows, width, embeddings_initializer=start, name="items")
        self.recent = RecentItems(name="recent")
        self.positions = keras.layers.Embedding(history_length, width, embeddings_initializer=start, name="positions")
        self.blocks = [
            EncoderBlock(width, num_heads, hidden or 4 * width, causal=True, name=f"block_{i}")
            for i in range(num_blocks)
        ]
        self.final_norm = keras.layers.LayerNormalization(name="final_norm")
        self.to_query = keras.layers.Dense(width, kernel_initializer="zeros", name="to_query")
        self.scores = CandidateScores(rows, width, embeddings_initializer="zeros", name="label")
        self.sums = None if sums is None else ReleasedSums(len(self.vocabulary), **sums, name="sums")
        self._log_prior = tf.constant(np.concatenate([[0.0], np.log(self.prior)]), tf.float32)
        # All weights exist from the start: loading and clipping both need them before the first batch.
        self.items.build((None, None))
        if self.blocks:
            for layer in (*self.blocks, self.final_norm, self.to_query):
                layer.build((None, history_length, width))
            self.positions.build((None, None))
        self.built = True

    @classmethod
    def upon(
        cls, recommender: Any, spent: Iterable[tuple[DpEvent, str]] | None = None, **arguments: Any
    ) -> SASRec:
        """A model that begins with the answers of private sums, and is trained to better them.

        The model reads `history_length` places, and so do its sums: make them as many as histories have.

        What the sums have cost is part of the model's privacy history: every accountant that follows the model counts
        it, beside the steps. A plan that is to leave room for it takes `PrivatePlan(..., spent=recommender.uses)`.

        Args:
            recommender: Fitted `SpectralRecommender`, with histories in order and without features.
            spent: `tfdp_rec.privacy.Use` objects of what the sums have cost, where a ledger or plan has others for it;
                by default `recommender.uses`. Empty only for sums of other users than the training's.
            **arguments: Arguments of the constructor, but for vocabulary, prior and sums.

        Raises:
            ValueError: The sums are of items without order, have features, or do not tell what they have cost.

        Example:
            >>> import tfdp_rec
            >>> sums = tfdp_rec.spectral.SpectralRecommender([10, 20, 30], epsilon=8.0, delta=1e-4, ordered=True)
            >>> model = SASRec.upon(sums.fit([[10, 20, 30]] * 200, verbose=0), width=4, history_length=2)
            >>> int(np.argmax(model(np.array([[1, 2]]))[0, 2:])), sums.recommend([[10, 20]], k=1)[0].tolist()
            (0, [[30]])
        """
        if not recommender.ordered or recommender.has_features:
            raise ValueError("SASRec.upon takes sums of histories in order, without features: ordered=True.")
        sums = {"head": len(recommender.released.head), "recency": recommender.recency}
        made = cls(recommender.item_ids.tolist(), sums=sums, **arguments)
        assert made.sums is not None
        made.sums.take(recommender)
        made.add_uses(recommender.uses if spent is None else spent)
        return made

    def encode(self, context: tf.Tensor) -> tf.Tensor:
        """Queries `[batch, n, width]` at every place of histories `[batch, n]`."""
        rows = self.items(context)
        query = self.recent(rows)
        if not self.blocks:
            return query
        x = rows + self.positions(tf.zeros_like(context) + tf.range(self.history_length, dtype=context.dtype))
        for block in self.blocks:
            x = block(x)  # what pads stands after the items, and no place sees what comes after it
        return query + self.to_query(self.final_norm(x))

    def call(self, context: tf.Tensor) -> tf.Tensor:
        """Scores of the whole catalogue after each history, `[batch, items]`; an empty one's are the log prior."""
        context = latest(tf.convert_to_tensor(context), self.history_length)
        lengths = tf.reduce_sum(tf.cast(tf.not_equal(context, PADDING), tf.int32), axis=1)
        queries = self.encode(context)
        last = tf.gather(queries, tf.maximum(lengths - 1, 0), batch_dims=1)
        last *= tf.cast(lengths > 0, last.dtype)[:, None]
        begin = self._log_prior[1:] if self.sums is None else self.sums.everything(context)
        return tf.matmul(last, self.scores.embeddings[1:], transpose_b=True) + tf.cast(begin, last.dtype)

    # Items that join.

    def item_tables(self) -> list[Any]:
        """As `OwnCatalogue.item_tables`."""
        return [self.items, self.scores]

    def _other_arguments(self) -> dict[str, Any]:
        return {} if self.sums is None else {"sums": {"head": self.sums.head, "recency": self.sums.recency}}

    def constants_of_items(self) -> list[keras.Variable]:
        """As `OwnCatalogue.constants_of_items`: the released sums."""
        return [] if self.sums is None else list(self.sums.weights)

    def take_constants(self, before: SASRec) -> None:
        """As `OwnCatalogue.take_constants`."""
        if self.sums is not None and before.sums is not None:
            self.sums.take_from(before.sums)

    # Serving.

    def answers(self) -> SASRecAnswers:
        """A `tf.Module` with a copy of the settled weights, for `tfdp_rec.serving.export`."""
        with self.private_weights.exporting():
            return SASRecAnswers(self)

    # Training.

    def per_example_loss(self, data: dict[str, tf.Tensor], training: bool = True) -> tf.Tensor:
        """The mean over an example's places of the sampled-softmax cross-entropy, `[batch]`."""
        label, (negatives, corrections) = tf.cast(data["label"], tf.int64), read_batch(data, len(self.vocabulary))
        if self.sums is None:
            own, others = (tf.gather(self._log_prior, ids) for ids in (label, negatives))
        else:
            own, others = self.sums(data["context"], label, negatives)
        others += corrections
        losses = self.scores.cross_entropy(self.encode(data["context"]), label, negatives, offsets=(own, others))
        counts = tf.cast(tf.not_equal(label, PADDING), losses.dtype)
        return tf.math.divide_no_nan(tf.reduce_sum(losses * counts, axis=1), tf.reduce_sum(counts, axis=1))


class SASRecAnswers(own_ids.WholeCatalogue):
    """Answers of a settled `SASRec`, with a copy of its weights."""

    def __init__(self, model: SASRec):
        super().__init__(len(model.vocabulary))
        twin = type(model).from_config(model.get_config())
        twin.set_weights(model.get_weights())
        # The SavedModel has the copy's variables and its arithmetic, but not the Keras model.
        self.held = [resource(weight) for weight in twin.weights]
        self._call = lambda context: twin.call(context)

    def scores(self, history: tf.Tensor) -> tf.Tensor:
        """As `WholeCatalogue.scores`."""
        return self._call(tf.maximum(history + 1, 0))


def latest(context: tf.Tensor, places: int) -> tf.Tensor:
    """The last items of histories with padding in any place: `[batch, places]`, the oldest first, then zeros."""
    known = tf.cast(tf.not_equal(context, PADDING), tf.int32)
    order = tf.argsort(1 - known, axis=1, stable=True)  # items first, in their order
    items = tf.pad(tf.gather(context, order, batch_dims=1), [[0, 0], [0, places]])
    begin = tf.maximum(tf.reduce_sum(known, axis=1) - places, 0)
    return tf.gather(items, begin[:, None] + tf.range(places), batch_dims=1)
