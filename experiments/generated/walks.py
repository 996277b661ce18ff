"""Histories of generated users that are pieced together from runs of real ones.

A user follows a real history from a random place on. After each item, with probability `LEAVE`, the user leaves it for
another real history: random occurrences of the user's last item are found, and the one is kept before which most of the
user's last items stand, too. Now and then the next item is any item of all histories. So the generated users have the
real ones' popularity, their runs of a few items, and transitions that depend on several items together; of what lasts
longer they have nothing. An item that the user has already is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAVE = 0.3
ANY = 0.02
OCCURRENCES = 16  # of which the most alike is kept
_CONTEXT = 5
_TRIES = 8
_USERS_AT_ONCE = 50_000

Ids = NDArray[np.int32]


class Walks:
    """A generator of histories.

    Args:
        real: Histories of real users, items from 1, the oldest first.
        longest: Largest number of items of a generated user; lengths are the real ones', cut at it.

    Example:
        >>> walks = Walks([np.array([1, 2, 3, 4])] * 9 + [np.array([2, 4])], longest=3)
        >>> [len(history) for history in walks.users(3, seed=0)]
        [3, 3, 3]
    """

    def __init__(self, real: Sequence[NDArray[np.integer]], longest: int = 30):
        self.longest = longest
        self.lengths = np.minimum([len(history) for history in real], longest)
        self._items = np.concatenate(real).astype(np.int32)
        ends = np.cumsum([len(history) for history in real])
        self._left = np.repeat(ends, [len(history) for history in real]) - np.arange(len(self._items)) - 1
        # Occurrences by item: those of item i stand at order[first[i]:first[i + 1]].
        self._order = np.argsort(self._items, kind="stable")
        self._first = np.searchsorted(self._items[self._order], np.arange(self._items.max() + 2))

    def users(self, count: int, seed: int) -> list[Ids]:
        """The histories of so many users; of equal seeds, the first ones are the same for every count."""
        found: list[Ids] = []
        for part, start in enumerate(range(0, count, _USERS_AT_ONCE)):
            rng = np.random.default_rng([seed, part])
            lengths = rng.choice(self.lengths, _USERS_AT_ONCE)
            items = self._walked(rng)
            kept = (items[user, : lengths[user]] for user in range(min(_USERS_AT_ONCE, count - start)))
            found += [history[history > 0] for history in kept]
        return found

    def _walked(self, rng: np.random.Generator) -> Ids:
        users = np.zeros((_USERS_AT_ONCE, self.longest), np.int32)
        at = rng.integers(0, len(self._items), len(users))  # where each user is in the real histories
        users[:, 0] = self._items[at]
        for place in range(1, self.longest):
            todo = np.arange(len(users))
            for attempt in range(_TRIES):
                at[todo] = self._step(users[todo, max(0, place - _CONTEXT) : place], at[todo], rng, attempt > 2)
                new = (users[todo, :place] != self._items[at[todo]][:, None]).all(axis=1)
                users[todo, place] = self._items[at[todo]]
                todo = todo[~new]
            users[todo, place] = 0  # no new item was found: the place is left out
        return users

    def _step(self, recent: Ids, at: NDArray[np.int64], rng: np.random.Generator, anywhere: bool) -> NDArray[np.int64]:
        """The next place in the real histories, of users with these last items at these places."""
        leaves = np.flatnonzero(rng.random(len(at)) < LEAVE)
        at = at.copy()
        at[leaves] = self._alike(recent[leaves], rng)
        lost = (self._left[at] < 1) | (rng.random(len(at)) < (0.5 if anywhere else ANY))
        return np.where(lost, rng.integers(0, len(self._items), len(at)), np.minimum(at + 1, len(self._items) - 1))

    def _alike(self, recent: Ids, rng: np.random.Generator) -> NDArray[np.int64]:
        """Occurrences of the last items that have much of what stands before them in common with these users."""
        last = recent[:, -1]
        occurrences = (self._first[last + 1] - self._first[last])[:, None]
        some = (rng.random((len(recent), OCCURRENCES)) * occurrences).astype(np.int64)
        at = self._order[self._first[last][:, None] + some]
        alike = np.zeros(at.shape, np.int8)
        for back in range(1, _CONTEXT):
            before = self._items[np.maximum(at - back, 0)]
            alike += (before[:, :, None] == recent[:, None, :]).any(axis=2)
        return at[np.arange(len(at)), np.argmax(alike, axis=1)]
