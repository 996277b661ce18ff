"""Some users of a log: as histories, read from the mapped files a part at a time, and the popularity of items in them.

Users outside the subset are left out of every part: no copy of the log is made, and memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.datasets.log import PART, Catalogue, Part
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.sums.counts import Counted, private_counts

_TYPICAL = 20  # items of a user: what noisy counts expect


class UserSubset:
    """Some users of a log, as `SpectralRecommender.fit` and `private_counts` take them; `show` is given public counts.

    Example:
        >>> log = Interactions.read({"u": [0, 1, 1, 2], "i": [5, 5, 6, 6]}, user="u", item="i", items=[5, 6])
        >>> two = UserSubset(log, log.units([0, 2]))
        >>> len(two), [part.lengths.tolist() for part in two.parts(log.catalogue)]
        (2, [[1, 1]])
    """

    def __init__(self, log: Interactions, users: NDArray[np.int64], show: Callable[[int], None] = lambda read: None):
        self._all, self._show, self._read = log, show, 0
        self._inside = np.zeros(len(log), bool)
        self._inside[users] = True

    def __len__(self) -> int:
        return int(self._inside.sum())

    def parts(self, catalogue: Catalogue, events: int = PART) -> Iterator[Part]:
        """The users in order, in parts of about so many events."""
        start = 0
        for part in self._all.parts(catalogue, events):
            inside = self._inside[start : start + part.num_users]
            start += part.num_users
            rows, number = inside[part.users], np.cumsum(inside) - 1
            yield Part(int(inside.sum()), number[part.users[rows]], part.places[rows])
            self._read += part.num_users
            self._show(self._read)

    def exact_counts(self, catalogue: Catalogue) -> NDArray[np.int64]:
        """How many of the users have each item: without noise, and so for the log's owner alone."""
        total = np.zeros(len(catalogue), np.int64)
        for part in self.parts(catalogue):
            total += np.bincount(part.places, minlength=len(total))
        return total

    def noisy_popularity(self, catalogue: Catalogue, noise_multiplier: float) -> Counted:
        """Popularity of each item, up to scale, under DP, all of it positive; and what that cost."""
        counts, event = private_counts(self, catalogue, noise_multiplier=noise_multiplier, typical=_TYPICAL)
        # Items that the noise hides share what is left of the noise above zero, about 0.4 of its standard deviation.
        return Counted(np.maximum(counts, 0.0) + 0.25 * noise_multiplier + 0.1, event)
