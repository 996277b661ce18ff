"""Next-item examples (EANA, §4.1): one item of a user as label, the 20 before it as context.

One example a user and draw, so with Poisson-sampled users the guarantee is **user-level**: all that a user has is
behind at most one row of a batch. The label's place is uniform among all but the first, which has nothing before it.
Every user is a unit: a user with one item gives it as label, without context; a user with none gives label 0 and
contributes nothing, which models of this package see by the label, and others by `present`. Where items have no order,
the label is any of them and the context any 20 others.

A user's one gradient may be made of many labels, which the same clip bounds: with `every_place` an example is a window
of a user's items at a random place, and each item of it but the first is a label. It is what a model that reads its
history causally takes (`models.SASRec`). A user with fewer than two items has no label then.

Negatives are of the public catalogue, without repetition, the same for the whole batch: they depend on no user, as
private training needs. All are equally likely, or half by released counts (`negative_shares.py`).

    context  [b, history]   oldest first, then zeros
    label    [b]            0 for users without items; [b, history] with every_place, what follows each of the context
    negatives [S]           shared by the batch
    expected  [S]           with released counts: the chance of each of them to be a negative

Reference:
    Ning et al., "EANA: Reducing Privacy Risk on Large-scale Recommendation Models", RecSys 2022, §4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.datasets.log import PADDING, values_at
from tfdp_rec.datasets.negative_shares import check_counts, different, inclusion
from tfdp_rec.datasets.timelines import Timelines

if TYPE_CHECKING:
    from tfdp_rec.datasets.logs.interactions import Interactions

Features = dict[str, NDArray[Any]]


class NextItemExamples:
    """Examples of some users; `fetch` and `shared` are what a sampling's `batches` asks for.

    `sampling.batches(examples.fetch, shared=examples.shared, present=examples.present)` makes batches of them.

    Args:
        log: The users' items, in memory or mapped from disk.
        users: Positions of the users; index i of `fetch` is users[i]. All, if left out.
        history: Number of items of context.
        negatives: Number of negatives; 0 leaves them out.
        released_counts: Popularity of each item, `[items]`, public or released by a mechanism that the accountant
            counts: popular items are then negatives more often, which steadies their rows. Raw counts are not private.
        seed: Seed, for tests only. Left out, labels and negatives come from the operating system's entropy.
        every_place: Whether each place of a window of the user's items has a label, the item that follows.
        repeats: Whether an item may be a label at a place where the window has had it before. A recommender that
            leaves out of its answers what the history has learns nothing of use from such a label.

    Raises:
        ValueError: an argument is out of range, or items without order are to have a label at every place.

    Example:
        >>> from tfdp_rec.datasets.movielens import generated
        >>> timelines = generated.timelines(num_users=100, num_movies=300, events=3_000)
        >>> train, test = timelines.split_users(0.8)
        >>> examples = NextItemExamples(timelines, train, negatives=50)
        >>> {name: array.shape for name, array in examples.fetch(np.array([4, 7])).items()}
        {'context': (2, 20), 'label': (2,)}
        >>> examples.shared()["negatives"].shape
        (50,)
    """

    def __init__(
        self,
        log: Timelines | Interactions,
        users: ArrayLike | None = None,
        history: int = 20,
        negatives: int = 500,
        seed: int | None = None,
        every_place: bool = False,
        repeats: bool = True,
        released_counts: Sequence[float] | None = None,
    ):
        self.items, self.num_items = log.numbers, log.num_items
        self.users = np.arange(log.num_users) if users is None else np.asarray(users, np.int64)
        self.history, self.negatives = history, negatives
        self._rng = np.random.default_rng(seed)
        self.ordered, self.every_place, self.repeats = log.ordered, every_place, repeats
        self._check(log.num_users)
        self.chances = None
        if released_counts is not None and negatives:
            self.chances = inclusion(check_counts(released_counts, self.num_items), negatives)
        self.starts = log.offsets[self.users]
        self.lengths = log.offsets[self.users + 1] - self.starts

    def _check(self, num_users: int) -> None:
        if self.history < 1:
            raise ValueError(f"history must be at least 1, got {self.history!r}.")
        if self.every_place and not self.ordered:
            raise ValueError("every_place needs items in the order of time: of others, none follows another.")
        if not 0 <= self.negatives <= self.num_items:
            raise ValueError(f"negatives must be between 0 and the {self.num_items} items, got {self.negatives!r}.")
        if len(self.users) == 0 or not 0 <= self.users.min() <= self.users.max() < num_users:
            raise ValueError(f"users must be positions from 0 to {num_users - 1}, and at least one.")
        if len(np.unique(self.users)) != len(self.users):
            raise ValueError("users holds a user twice, who could then be in a batch twice.")

    def __len__(self) -> int:
        """How many users, and so how many units to sample from."""
        return len(self.users)

    def fetch(self, indices: ArrayLike) -> Features:
        """One example of each user at these indices (perhaps none): what a sampling's `batches` asks for."""
        indices = np.asarray(indices, np.int64)
        if self.every_place:
            return self._windows(indices, self._rng)
        return self._examples(indices, self._positions(indices, self._rng), self._rng)

    def present(self, indices: ArrayLike) -> NDArray[np.bool_]:
        """Whether each user at these indices has a label, for `batches(examples.fetch, present=examples.present)`."""
        return self.lengths[np.asarray(indices, np.int64)] > int(self.every_place)

    def shared(self) -> Features:
        """Fresh negatives, if there are any, for `batches(examples.fetch, shared=examples.shared)`."""
        if not self.negatives:
            return {}
        if self.chances is None:
            drawn = self._rng.choice(self.num_items, self.negatives, replace=False, shuffle=False)
            return {"negatives": (drawn + 1).astype(np.int32)}
        drawn = different(self.chances, self._rng)
        return {"negatives": (drawn + 1).astype(np.int32), "expected": self.chances[drawn].astype(np.float32)}

    def fixed(self, seed: int = 0) -> Features:
        """One example of every user who has items, the same at every call: for testing. Without negatives.

        It has one label, also with `every_place`.
        """
        rng, indices = np.random.default_rng(seed), np.flatnonzero(self.lengths > 0)
        return self._examples(indices, self._positions(indices, rng), rng)

    def _positions(self, indices: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Places of labels: any but the first, where the first is not all there is and order counts."""
        lengths = self.lengths[indices]
        first = np.minimum(1, np.maximum(lengths - 1, 0)) if self.ordered else np.zeros_like(lengths)
        return rng.integers(first, np.maximum(lengths, 1))

    def _examples(self, indices: NDArray[np.int64], positions: NDArray[np.int64], rng: np.random.Generator) -> Features:
        """Labels at these places of the users' items, with their context."""
        starts, has = self.starts[indices], self.lengths[indices] > 0
        before = self._places_before(positions) if self.ordered else self._others(indices, positions, rng)
        context = np.where(before >= 0, values_at(self.items, starts[:, None] + np.maximum(before, 0)), PADDING)
        label = np.where(has, values_at(self.items, starts + positions), PADDING)
        return {"context": context.astype(np.int32), "label": label.astype(np.int32)}

    def _windows(self, indices: NDArray[np.int64], rng: np.random.Generator) -> Features:
        """Windows of the users' items, at random places, and what follows each item."""
        starts, lengths, columns = self.starts[indices], self.lengths[indices], np.arange(self.history)
        labels = np.minimum(np.maximum(lengths - 1, 0), self.history)
        first = starts + rng.integers(0, np.maximum(lengths - labels, 1))  # so that the window and its last label fit
        there, places = columns < labels[:, None], first[:, None] + columns
        context, label = (
            np.where(there, values_at(self.items, np.where(there, places + further, 0)), PADDING) for further in (0, 1)
        )
        if not self.repeats:
            had = (label[:, :, None] == context[:, None, :]) & (columns <= columns[:, None])
            label = np.where(had.any(axis=2), PADDING, label)
        return {"context": context.astype(np.int32), "label": label.astype(np.int32)}

    def _places_before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places before each, oldest first; -1 where there are no more."""
        counts, columns = np.minimum(positions, self.history)[:, None], np.arange(self.history)
        return np.where(columns < counts, positions[:, None] - counts + columns, -1)

    def _others(
        self, indices: NDArray[np.int64], positions: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Any places but each user's label's, none twice (Floyd's draw); -1 where there are no more."""
        others = np.maximum(self.lengths[indices] - 1, 0)
        drawn = np.full((len(indices), self.history), -1)
        # Floyd: column j draws from the first n − k + j + 1 places; one that is taken gives way to the last of them, so
        # that each set of k places is equally likely, without a permutation of a long history.
        for column in range(self.history):
            last = others - np.minimum(others, self.history) + column
            place = rng.integers(0, np.maximum(last, 0) + 1)
            place = np.where((drawn == place[:, None]).any(axis=1), last, place)
            drawn[:, column] = np.where(last < others, place, -1)
        return np.where(drawn >= positions[:, None], drawn + 1, drawn)  # the label's place is skipped
