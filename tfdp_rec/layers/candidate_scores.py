"""Scores of candidates that the whole batch shares: the private way to train with sampled negatives.

In-batch negatives make one example's gradient depend on the others, so that clipping no longer bounds what one example
can do. Here the negatives are ids [S] that depend on no example: drawn uniformly from the public catalogue in the data
pipeline. With q the query of an example and E the table,

    logit_0 = q · E[positive] / t,    logit_s = q · E[negative_s] / t

with a temperature t. What the layer draws itself (`negatives.py`) has its expected number taken off, log(S Q(s)). The
gradient of E for one example is d_0 e(positive) qᵀ + Σ_s d_s e(negative_s) qᵀ, whose norm has
a closed form (`factors.Scores`): neither [batch, S, width] nor the table's shape is ever made. An example may have T
queries and positives, such as one for each place of a sequence; it is still clipped as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tfdp_rec.core.ground.keras_internals import look_up_resource
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import rows_of
from tfdp_rec.core.sensitivity import factors, rules
from tfdp_rec.core.sensitivity.rules import check_ids
from tfdp_rec.layers.negatives import Negatives, Softmax, any_of, best, is_among, negatives_of, repeats_last

Offsets: TypeAlias = tuple[tf.Tensor | None, tf.Tensor | None]


@keras.saving.register_keras_serializable(package="tfdp_rec")
class CandidateScores(keras.layers.Layer):
    """Logits of one positive an example and of negatives shared by the batch, from a table of candidates.

    Args:
        vocabulary_size: Number of rows of the candidate table; left out with a vocabulary, whose table has one row
            more, the first, for unknown ids.
        width: Length of a row, and of a query.
        embeddings_initializer: Initializer of the table.
        remove_accidental_hits: Whether a negative equal to the example's own positive is left out of the softmax.
        negatives: Number of negatives that the layer draws uniformly for a batch, or `Negatives`; left out if each
            call gives them.
        vocabulary: Ids of the catalogue, strings or whole numbers, in which calls then name candidates.
        temperature: Divisor of the products, positive.
        num_hard_negatives: Number of negatives, those with the largest logits of each example, that take part in its
            softmax; by default all.

    Call arguments:
        query: Queries `[batch, width]`; or `[batch, T, width]`, one for each of an example's T positions.
        positives: Ids `[batch]`, or `[batch, T]`.
        negatives: Ids `[S]`, independent of the data and the same for every example; left out if the layer draws them.
        exclude: Ids `[batch, E]` that are no negatives of their example, such as items of its history; an id outside
            the catalogue, such as -1, excludes no candidate of it.
        offsets: Pair of what is added to the logits of the positives, in their shape, and of the negatives that the
            call gives, `[S]`, such as log priors: public or released; or `[batch, S]`, or `[batch, T, S]` of positions,
            made of each example alone. None in either place adds nothing.
        as_loss: Whether the losses are asked for, as by `cross_entropy`, and not the logits.

    Returns:
        Logits `[batch, 1 + S]`, the positive first, made for a softmax: of a negative that the layer drew several times
        one column counts as often, and the others, which come last, are far below. Or losses `[batch]`. Of positions
        `[batch, T, 1 + S]` or `[batch, T]`: what an example adds to a gradient is all its positions' together.

    Raises:
        ValueError: There is neither a size nor a vocabulary, the temperature or the number of hard negatives is not
            positive, a call has no negatives, or it has offsets for those that the layer draws.

    Example:
        >>> import tensorflow as tf
        >>> layer = CandidateScores(vocabulary_size=100, width=8)
        >>> layer(tf.ones([4, 8]), tf.constant([1, 2, 3, 4]), tf.constant([7, 9])).shape
        TensorShape([4, 3])
        >>> layer = CandidateScores(vocabulary=["Alien", "Brazil", "Casino"], width=8, negatives=5)
        >>> layer(tf.ones([2, 8]), tf.constant(["Brazil", "Alien"])).shape
        TensorShape([2, 6])
        >>> layer.top_k(tf.ones([2, 8]), k=2).shape
        TensorShape([2, 2])
    """

    def __init__(
        self,
        vocabulary_size: int | None = None,
        width: int = 0,
        embeddings_initializer: Any = "uniform",
        remove_accidental_hits: bool = True,
        *,
        negatives: int | Negatives | None = None,
        vocabulary: ArrayLike | None = None,
        temperature: float = 1.0,
        num_hard_negatives: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.softmax = Softmax(temperature, num_hard_negatives)
        # By way of a list, so that strings of pandas are strings and no objects.
        self.vocabulary = None if vocabulary is None else np.asarray(np.asarray(vocabulary).tolist())
        self.lookup, rows = _lookup_of(self.vocabulary, vocabulary_size)
        if not rows or width < 1:
            raise ValueError("CandidateScores needs a width, and vocabulary_size or vocabulary.")
        self.vocabulary_size, self.width = rows, width
        self.first = 0 if self.lookup is None else 1
        self.negatives = negatives_of(negatives, rows - self.first)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.remove_accidental_hits = remove_accidental_hits
        self.embeddings = self.add_weight(
            shape=(rows, width), initializer=self.embeddings_initializer, name="embeddings"
        )
        self.built = True

    def rows(
        self, positives: Any, negatives: Any, exclude: Any
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None, bool]:
        """Rows of the positives, of the negatives and of what is excluded, and whether the layer drew the negatives."""
        if negatives is None and self.negatives is None:
            raise ValueError(
                f"Layer '{self.name}' was called without negatives: give ids [S] from the public catalogue, shared by "
                "the batch, or let the layer draw them: CandidateScores(negatives=S)."
            )
        if self.lookup is None and tf.convert_to_tensor(positives).dtype == tf.string:
            raise NotPrivate(
                f"Layer '{self.name}' is given text, and knows its candidates by number: make it with their ids, "
                "tfdp_rec.CandidateScores(vocabulary=ids, width=..., negatives=...), which are public, or give numbers."
            )
        known = self.lookup or _numbers
        positives, exclude = known(positives), None if exclude is None else known(exclude)
        if negatives is not None:
            return positives, known(negatives), exclude, False
        return positives, self.negatives.draw() + self.first, exclude, True

    def products(
        self, query: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor, table: Any, offsets: Offsets
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Logits of the positives `[batch, 1]` and of the negatives `[batch, S]`, before hits are taken out."""
        own, others = offsets
        rows = tf.cast(tf.gather(table, negatives), query.dtype)
        first = tf.reduce_sum(query * tf.cast(tf.gather(table, positives), query.dtype), axis=1, keepdims=True)
        found = tf.matmul(query, rows, transpose_b=True)
        if own is not None:
            first += tf.cast(own, query.dtype)[:, None]
        if others is not None:
            others = tf.cast(others, query.dtype)  # TensorFlow adds what is shared within the product
            found = tf.nn.bias_add(found, others) if others.shape.rank == 1 else found + others
        return first, found

    def call(
        self, query: tf.Tensor, positives: Any, negatives: Any = None, exclude: Any = None, offsets: Any = None,
        as_loss: bool = False,
    ) -> tf.Tensor:  # fmt: skip
        operands = self.operands(query, positives, negatives, exclude, offsets)
        flat, positives, negatives, exclude, offsets, _ = operands
        products = self.products(flat, positives, negatives, look_up_resource(self.embeddings), offsets)
        return self.finish(products, positives, negatives, exclude, as_loss, query)

    def operands(
        self, query: tf.Tensor, positives: Any, negatives: Any = None, exclude: Any = None, offsets: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor | None, Offsets, bool]:
        """What the products are of: queries and rows, positions in one long axis; and whether the layer drew."""
        positives, negatives, exclude, drawn = self.rows(positives, negatives, exclude)
        if (query.shape.rank, positives.shape.rank) not in ((2, 1), (3, 2)):
            raise ValueError(
                f"Layer '{self.name}' takes one query an example, [batch, width], and one positive, [batch], or one of "
                f"each a position, [batch, T, width] and [batch, T]; got {query.shape} and {positives.shape}."
            )
        own, others = offsets or (None, None)
        if query.shape.rank == 3:
            if exclude is not None:
                exclude = tf.repeat(exclude, tf.shape(query)[1], axis=0)
            query = tf.reshape(query, [-1, self.width])
            positives, own = tf.reshape(positives, [-1]), None if own is None else tf.reshape(own, [-1])
            if others is not None and others.shape.rank == 3:
                others = tf.reshape(others, [-1, tf.shape(others)[2]])
        if drawn:
            if others is not None:
                raise ValueError(f"Layer '{self.name}' draws its negatives: offsets are for those that a call gives.")
            negatives, often = repeats_last(negatives)
            others = often - self.negatives.log_expectation(negatives - self.first)
        if self.softmax.temperature != 1:
            query = query / self.softmax.temperature
        return query, positives, negatives, exclude, (own, others), drawn

    def finish(
        self, products: tuple[tf.Tensor, tf.Tensor], positives: tf.Tensor, negatives: tf.Tensor,
        exclude: tf.Tensor | None, as_loss: bool, query: tf.Tensor,
    ) -> tf.Tensor:  # fmt: skip
        """Logits of the softmax or its losses, from the products and the rows that they are products of.

        They have the axes of `query`, as it was given.
        """
        hits = is_among(negatives, positives[:, None]) if self.remove_accidental_hits else None
        make = self.softmax.losses if as_loss else self.softmax.logits
        found = make(*products, any_of(hits, is_among(negatives, exclude)))
        if query.shape.rank == 2:
            return found
        by_position = tf.reshape(found, tf.concat([tf.shape(query)[:2], tf.shape(found)[1:]], axis=0))
        return tf.ensure_shape(by_position, [*query.shape[:2], *found.shape[1:]])

    def cross_entropy(
        self, query: tf.Tensor, positives: Any, negatives: Any = None, exclude: Any = None, offsets: Any = None
    ) -> tf.Tensor:
        """Each example's loss `[batch]`; of negatives that the layer draws, an estimate of the whole catalogue's."""
        return self(query, positives, negatives, exclude, offsets, as_loss=True)

    def top_k(self, query: tf.Tensor, k: Any, exclude: Any = None, allowed: Any = None) -> tf.Tensor:
        """The ids of the best candidates for each query, over the whole catalogue.

        Args:
            query: Queries `[batch, width]`.
            k: Number of candidates; may be a tensor, such as an input of an exported model.
            exclude: Ids `[batch, E]` to leave out, such as items of the history; an id outside the catalogue
                excludes nothing.
            allowed: Whether each candidate may be recommended, `[catalogue]` or `[batch, catalogue]`.

        Returns:
            Ids `[batch, k]`, best first; -1 or "" in the places for which no candidate is left.
        """
        scores = tf.matmul(query, tf.convert_to_tensor(self.embeddings)[self.first :], transpose_b=True)
        if exclude is not None:
            exclude = (self.lookup or tf.identity)(exclude) - self.first
        indices = best(scores, k, exclude, allowed).indices
        if self.vocabulary is None:
            return indices
        missing = "" if self.vocabulary.dtype.kind in "US" else -1
        return tf.gather(tf.constant([missing, *self.vocabulary.tolist()]), indices + 1)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "width": self.width,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "remove_accidental_hits": self.remove_accidental_hits,
            "negatives": keras.saving.serialize_keras_object(self.negatives),
            "vocabulary": None if self.vocabulary is None else self.vocabulary.tolist(),
            **self.softmax.get_config(),
        }


def _numbers(ids: Any) -> tf.Tensor:
    """Ids of any type of whole numbers as rows of a table, which are looked up by int32 or int64."""
    ids = tf.convert_to_tensor(ids)
    return tf.cast(ids, tf.int64) if ids.dtype.is_integer and ids.dtype != tf.int32 else ids


def _lookup_of(vocabulary: Any, size: int | None) -> tuple[Any, int]:
    """The layer that maps ids to rows, None without a vocabulary, and the number of rows."""
    if vocabulary is None:
        return None, size or 0
    kind = keras.layers.IntegerLookup if vocabulary.dtype.kind in "iu" else keras.layers.StringLookup
    return kind(vocabulary=vocabulary.tolist(), name="lookup"), len(vocabulary) + 1


class CandidateScoresRule(rules.Rule):
    """Closed form for the shared candidates, rows for the positives."""

    way = "by row, shared candidates in closed form"

    def run(self, call: rules.Call, original: Callable[..., Any], hooks: rules.Hooks) -> Any:
        layer: Any = call.layer
        given = dict(call.kwargs)
        as_loss = given.pop("as_loss", False)
        given_query = call.args[0] if call.args else given["query"]
        query, positives, negatives, exclude, offsets, drawn = layer.operands(*call.args, **given)
        positives, negatives = (check_ids(ids, layer, layer.embeddings, hooks) for ids in (positives, negatives))
        # `factors` needs rows, not ids; a second lookup or draw would not be the one that the logits are made of.
        call.args, call.kwargs = (query, positives, negatives), {"drawn": drawn}
        hooks.before_read(layer.embeddings, _one_after_the_other(positives, negatives))
        products = layer.products(query, positives, negatives, rows_of(layer.embeddings), offsets)
        watched = tuple(map(hooks.watch, products))
        return layer.finish(watched, positives, negatives, exclude, as_loss, given_query)

    def factors(self, call: rules.Call, gradients: list[tf.Tensor]) -> Iterator[tuple[keras.Variable, factors.Factor]]:
        query, positives, negatives = call.args
        (own, others), table = gradients, call.layer.embeddings
        rows = (own * query)[:, None, :]
        yield table, factors.Rows(tf.cast(positives, tf.int64)[:, None], rows, table.shape)
        yield table, factors.Scores(negatives, others, query, table.shape)

    def tables(self, call: rules.Call) -> dict[str, tf.Tensor]:
        """The ids that the batch decides; negatives that the layer draws are unknown before the step."""
        _, positives, negatives = call.args
        ids = positives if call.kwargs["drawn"] else _one_after_the_other(positives, negatives)
        return {call.layer.embeddings.path: ids}

    def announces_all(self, call: rules.Call) -> bool:
        return not call.kwargs["drawn"]


def _one_after_the_other(positives: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
    return tf.concat([tf.cast(positives, tf.int64), tf.cast(negatives, tf.int64)], axis=0)


rules.register(CandidateScores, CandidateScoresRule())
