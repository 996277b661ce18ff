"""A SavedModel that takes and returns the ids of one's own log, text or whole numbers, with titles.

    signature         inputs
    serving_default   history [batch, n]
    top_k             history [batch, n], k []
    among             history [batch, n], k [], allowed [a]     answers with allowed items alone
    ragged            items [s], lengths [batch], k []          histories one after the other, and their lengths

    outputs of each   ids [batch, k], titles [batch, k], scores [batch, k], known [batch]

A history is in order, the oldest item first; its items are left out of the answer. Ids that the model does not know
are ignored in every place, so that they serve as padding: "" for text, and for whole numbers 0, or the first of −1, −2,
... if 0 is an item. `known` is the number of entries that count; if it is 0, the answer is the most popular items.
Where fewer than k items are left, that same padding fills up, with the least float32 as score.

The vocabulary is an asset of the SavedModel, a line an item. The SavedModel holds nothing but what was released.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp_rec.core.claim.entries import warn_of_ordinary_steps
from tfdp_rec.core.ground.files import is_address, replace_atomically
from tfdp_rec.core.ground.graph_checks import depend_on, require
from tfdp_rec.datasets.log import Catalogue

if TYPE_CHECKING:
    import pyarrow as pa

    from tfdp_rec.datasets.logs.items import Items

VOCABULARY = "items.txt"
NOTHING = -1  # the slot of what is unknown, or of no answer
LEFT_OUT = tf.float32.min  # the score of what is not answered
_MOST_SCORES = 2**22  # computed at a time: 16 MB an array


class SlotAnswers(Protocol):
    """What a recommender answers, a `tf.Module`: histories of slots in, the best slots out."""

    places: NDArray[np.int64]  # in the catalogue, of each slot

    def best(self, history: tf.Tensor, k: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Slots and scores of the k best items that are not in the history, `[batch, k]`; slot −1 fills up."""
        # history: slots `[batch, n]`, the oldest first; −1, in any place, counts for nothing

    def best_among(self, history: tf.Tensor, k: Any, allowed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As `best`, of some items alone: different slots, `[a]`."""


class ServedByIds:
    """Mix-in, ahead of `PrivateTraining`, for models of a `vocabulary` of raw ids that have `answers()`."""

    vocabulary: NDArray[np.int64]

    @property
    def item_ids(self) -> NDArray[np.int64]:
        """Raw ids of the catalogue."""
        return self.vocabulary

    def answers(self) -> SlotAnswers:
        """What it answers."""
        raise NotImplementedError

    def export(self, filepath: str, k: int = 10, **kwargs: Any) -> None:
        """As `tfdp_rec.serving.export`, by the raw ids; the last `history_length` items of a history count."""
        from tfdp_rec.datasets.logs.items import Items

        if kwargs:
            raise TypeError(f"export does not take {', '.join(kwargs)}.")
        export(filepath, self, Items(self.vocabulary), k=k)


class WholeCatalogue(tf.Module):
    """`SlotAnswers` of a recommender that scores the whole catalogue at once; a slot is an item's number less 1."""

    def __init__(self, items: int):
        super().__init__()
        self.places = np.arange(items)

    def scores(self, history: tf.Tensor) -> tf.Tensor:
        """Scores `[batch, items]` for histories of slots, of which −1 counts for nothing."""
        raise NotImplementedError

    def best(self, history: tf.Tensor, k: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """As `SlotAnswers.best`."""
        slots = tf.range(len(self.places), dtype=tf.int64)
        return answer_in_groups(lambda some: first(self._mask_history(some), slots, k), history, k, len(self.places))

    def best_among(self, history: tf.Tensor, k: Any, allowed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As `SlotAnswers.best_among`."""
        allowed = tf.sort(allowed)  # of equal scores the first of the catalogue

        def answer(some: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return first(tf.gather(self._mask_history(some), allowed, axis=1), allowed, k)

        return answer_in_groups(answer, history, k, len(self.places))

    def _mask_history(self, history: tf.Tensor) -> tf.Tensor:
        """The scores, without what the history holds."""
        scores, known = self.scores(history), tf.cast(history >= 0, tf.int64)
        rows = tf.repeat(tf.range(tf.shape(history)[0], dtype=tf.int64), tf.shape(history)[1])
        places = tf.stack([rows, tf.maximum(tf.reshape(history, [-1]), 0)], axis=1)
        seen = tf.scatter_nd(places, tf.reshape(known, [-1]), tf.shape(scores, tf.int64)) > 0
        return tf.where(seen, LEFT_OUT, scores)


def answer_in_groups(
    answer: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]], history: tf.Tensor, k: Any, width: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """What `answer` says of histories, of `width` scores each, some at a time, to bound memory."""
    rows, columns = tf.unstack(tf.shape(history))
    size = tf.clip_by_value(rows, 1, max(1, _MOST_SCORES // width))
    number = tf.maximum(1, -(-rows // size))  # of groups; one, if there is no history
    filled = tf.pad(history, [[0, number * size - rows], [0, 0]], constant_values=NOTHING)
    groups = tf.reshape(filled, tf.stack([number, size, columns]))
    signature = tuple(tf.TensorSpec([None, None], kind) for kind in (tf.int64, tf.float32))
    found = tf.map_fn(answer, groups, fn_output_signature=signature, parallel_iterations=1)
    slots, scores = (tf.reshape(each, tf.stack([number * size, k]))[:rows] for each in found)
    return slots, scores


def first(scores: tf.Tensor, slots: tf.Tensor, k: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Slots and scores of the k best, the first of equal ones; −1 for what was left out or is not there."""
    best, index = tf.math.top_k(scores, tf.minimum(k, tf.size(slots)))
    found = tf.where(best > LEFT_OUT, tf.gather(slots, index), tf.constant(NOTHING, tf.int64))
    missing = [[0, 0], [0, k - tf.shape(best)[1]]]
    return tf.pad(found, missing, constant_values=NOTHING), tf.pad(best, missing, constant_values=LEFT_OUT)


def line_breaks(items: Items) -> pa.Array:
    """Which ids a vocabulary with a line for each cannot hold."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_integer(items.ids.type):
        return pa.array(np.zeros(len(items), bool))
    return pc.match_substring_regex(items.ids, "[\r\n]")


class Servable(Protocol):
    """A recommender that can be exported."""

    @property
    def item_ids(self) -> NDArray[np.int64]:
        """Ids that it was made with: the numbers 1 to M, or whole numbers of one's own."""

    def answers(self) -> SlotAnswers:
        """What it answers."""


def export(
    filepath: str | os.PathLike[str], recommender: Servable, items: Items, titles: Mapping[Any, str] | None = None,
    k: int = 10,
) -> None:
    """Writes the SavedModel of any recommender.

    Args:
        filepath: Folder that is made.
        recommender: `SpectralRecommender` that was fitted, `TwoTower`, `SASRec`, or another with their two members.
        items: Ids of the catalogue, in its order.
        titles: Titles by id, public; an item without one has the title "".
        k: Number of items in an answer where the request does not say.

    Raises:
        RuntimeError: There was no `fit`.
        OSError: The folder cannot be written.
        ValueError: The items are not those of the recommender, an id has a line break, titles are by ids of another
            type, or k is out of range.

    Example:
        >>> from tfdp_rec.data import Items
        >>> from tfdp_rec.spectral import SpectralRecommender
        >>> items = Items(["tea", "jam", "towel"])
        >>> recommender = SpectralRecommender([1, 2, 3], epsilon=8.0, delta=1e-4)
        >>> _ = recommender.fit([[1, 2]] * 300 + [[2, 3]] * 50, verbose=0)
        >>> folder = os.path.join(tempfile.mkdtemp(), "servable")
        >>> export(folder, recommender, items, {"jam": "Plum jam"}, k=1)
        >>> answer = tf.saved_model.load(folder).signatures["serving_default"](history=tf.constant([["tea"]]))
        >>> answer["ids"].numpy().tolist(), answer["titles"].numpy().tolist()
        ([[b'jam']], [[b'Plum jam']])
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    answers, own = recommender.answers(), recommender.item_ids
    numbered = np.array_equal(own, np.arange(1, len(items) + 1))
    if not numbered and not (pa.types.is_integer(items.ids.type) and np.array_equal(own, items.ids.to_numpy())):
        raise ValueError(
            f"The recommender has a catalogue of {len(own)} ids that are neither the numbers 1 to {len(items)} of "
            "these items nor their ids: make it on the log with these items."
        )
    if not isinstance(k, (int, np.integer)) or not 1 <= k <= len(items):
        raise ValueError(f"k must be a whole number between 1 and the {len(items)} items of the catalogue, got {k!r}.")
    named_by, an_id = next(iter(titles or {}), None), items.ids[0].as_py()
    if named_by is not None and isinstance(named_by, str) != isinstance(an_id, str):
        raise ValueError(
            f"The titles are by ids such as {named_by!r}, and the items have ids such as {an_id!r}: give titles by ids "
            "of the items' type."
        )
    place = pc.index(line_breaks(items), True).as_py()
    if place >= 0:
        raise ValueError(
            f"The item {items.ids[place].as_py()[:60]!r} has a line break in its id, and a served vocabulary has a "
            "line for each item: write such ids without."
        )
    warn_of_ordinary_steps(getattr(recommender, "privacy_history", None))
    in_slots = items.ids.take(pa.array(answers.places)).to_pylist()
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = os.path.join(folder, VOCABULARY)
        with open(vocabulary, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{item}\n" for item in in_slots)
        named = [" ".join((titles or {}).get(item, "").split()) for item in in_slots]  # each on one line
        served = OwnIds(vocabulary, in_slots, named, answers, k)
        try:
            # An older folder stays until this one is complete.
            with contextlib.nullcontext(filepath) if is_address(filepath) else replace_atomically(filepath) as whole:
                tf.saved_model.save(served, os.fspath(whole), signatures=served.questions)
        except tf.errors.OpError as problem:
            said = " ".join(problem.message.split())[:200].rstrip(".")
            raise OSError(f"{filepath} could not be written; is the disk full, or read-only? {said}.") from problem


class OwnIds(tf.Module):
    """The exported module: answers by slot, with the caller's own ids and titles."""

    def __init__(self, vocabulary: str, ids: Sequence[Any], titles: Sequence[str], answers: SlotAnswers, k: int):
        super().__init__()
        self.kind = tf.string if isinstance(ids[0], str) else tf.int64
        self.slots = tf.lookup.StaticHashTable(_lines(vocabulary, self.kind), default_value=NOTHING)
        self.padding = tf.constant("" if self.kind == tf.string else Catalogue(ids).padding, self.kind)
        self.ids = tf.Variable(ids, trainable=False, dtype=self.kind)
        self.titles = tf.Variable(titles, trainable=False, dtype=tf.string)
        self.answers, self.k = answers, k
        self.questions = self._questions()
        self.serve = self.questions["serving_default"]
        if hasattr(answers, "encode"):  # for an index, which no graph can ask (`item_index.py`)
            slots, scores = tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([None, None], tf.float32)
            self.encode = tf.function(self._encode, input_signature=[tf.TensorSpec([None, None], self.kind)])
            self.to_outputs = tf.function(self._to_outputs, input_signature=[slots, slots, scores])

    def _questions(self) -> dict[str, Any]:
        """What the SavedModel is asked by."""
        history, k = tf.TensorSpec([None, None], self.kind, "history"), tf.TensorSpec([], tf.int32, "k")
        several = tf.TensorSpec([None], self.kind, "items"), tf.TensorSpec([None], tf.int32, "lengths")
        asked = {
            "serving_default": (self._answer_default, [history]),
            "top_k": (self._answer, [history, k]),
            "among": (self._answer_among, [history, k, tf.TensorSpec([None], self.kind, "allowed")]),
            "ragged": (self._answer_lists, [*several, k]),
        }
        return {name: tf.function(function, input_signature=specs) for name, (function, specs) in asked.items()}

    def _encode(self, history: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Slots and query of each history."""
        slots = self.slots.lookup(history)
        return slots, self.answers.encode(slots)  # type: ignore[attr-defined]

    def _answer_default(self, history: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._answer(history, tf.constant(self.k))

    def _answer(self, history: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        slots = self.slots.lookup(history)
        return self._to_outputs(slots, *self.answers.best(slots, _positive(k)))

    def _answer_among(self, history: tf.Tensor, k: tf.Tensor, allowed: tf.Tensor) -> dict[str, tf.Tensor]:
        slots, some = self.slots.lookup(history), self.slots.lookup(allowed)
        some, _ = tf.unique(tf.boolean_mask(some, some >= 0))
        return self._to_outputs(slots, *self.answers.best_among(slots, _positive(k), some))

    def _answer_lists(self, items: tf.Tensor, lengths: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._answer(tf.RaggedTensor.from_row_lengths(items, lengths).to_tensor(self.padding), k)

    def _to_outputs(self, history: tf.Tensor, slots: tf.Tensor, scores: tf.Tensor) -> dict[str, tf.Tensor]:
        there, some = slots >= 0, tf.maximum(slots, 0)
        return {
            "ids": tf.where(there, tf.gather(self.ids, some), self.padding),
            "titles": tf.where(there, tf.gather(self.titles, some), ""),
            "scores": scores,
            "known": tf.reduce_sum(tf.cast(history >= 0, tf.int32), axis=1),
        }


def _lines(path: str, kind: tf.DType) -> tf.lookup.TextFileInitializer:
    """A table from each line to its number."""
    whole = tf.lookup.TextFileIndex.WHOLE_LINE if kind == tf.string else 0
    return _Nameless(path, kind, whole, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER)


class _Nameless(tf.lookup.TextFileInitializer):
    """Its table has a random name. TensorFlow's has the file's path in it, which would be in the SavedModel."""

    _shared_name = ""


def _positive(k: tf.Tensor) -> tf.Tensor:
    return depend_on(k, require(k >= 1, "k must be at least 1."))
