"""Some users of a log as histories, read from the mapped files a part at a time, telling how far the reading is.

Who is left out is left out of every part: no copy of the log is made, and memory does not hang on its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.data import Interactions
from tfdp_rec.datasets.histories import PART, Catalogue, Part


class ChosenUsers:
    """What `SpectralRecommender.fit` takes.

    Args:
        log: with its items chosen.
        users: positions of those who count.
        show: called with how many users were read in all, over all readings. It is told nothing that is private.

    Example:
        >>> log = Interactions.read({"u": [0, 1, 1, 2], "i": [5, 5, 6, 6]}, user="u", item="i", items=[5, 6])
        >>> two = ChosenUsers(log, log.units([0, 2]))
        >>> len(two), [part.lengths.tolist() for part in two.parts(log.catalogue)]
        (2, [[1, 1]])
    """

    def __init__(self, log: Interactions, users: NDArray[np.int64], show: Callable[[int], None] = lambda read: None):
        self._everybody, self._show, self._read = log.histories(), show, 0
        self._chosen = np.zeros(len(log), bool)
        self._chosen[users] = True

    def __len__(self) -> int:
        return int(self._chosen.sum())

    def histories(self) -> ChosenUsers:
        """Itself: how `histories_of` knows it."""
        return self

    def parts(self, catalogue: Catalogue, events: int = PART) -> Iterator[Part]:
        """The users in order, in parts of about so many events."""
        start = 0
        for part in self._everybody.parts(catalogue, events):
            chosen = self._chosen[start : start + part.num_users]
            start += part.num_users
            kept, number = chosen[part.users], np.cumsum(chosen) - 1
            yield Part(int(chosen.sum()), number[part.users[kept]], part.places[kept])
            self._read += part.num_users
            self._show(self._read)


def popularity(users: ChosenUsers, catalogue: Catalogue) -> NDArray[np.int64]:
    """How many of the users have each item: exact, and so for the log's owner alone.

    Args:
        users: to count.
        catalogue: the items.
    """
    total = np.zeros(len(catalogue), np.int64)
    for part in users.parts(catalogue):
        total += np.bincount(part.places, minlength=len(total))
    return total
