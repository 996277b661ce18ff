"""Whose rows a job makes its recommenders from, and on whom it tests them.

*The split* is by a hash of users' ids, whatever they have in the log: were users without items left out first, one
user's items would have a say in which others train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tfdp_rec.core.claim.orders import FixedOrder
from tfdp_rec.core.claim.schemes import PoissonSampling, RandomAllocation, Sampling
from tfdp_rec.datasets.log import PART, Catalogue, Part
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.job.recommenders.names import auto, is_trained
from tfdp_rec.job.settings import ALLOCATION, SHUFFLED, JobSettings
from tfdp_rec.sums.counts import Counted, exact_counts, private_counts
from tfdp_rec.sums.spark import SparkLog

TRAIN = 0.8  # of the users
_COMPARED = 0.25  # of the others, where sums and a training upon them are compared: these are not tested on
_TYPICAL = 20  # items of a user: what noisy counts expect


@dataclasses.dataclass(frozen=True)
class Users:
    """The split of a log's users, by their positions in it."""

    train: Any  # recommenders are made from these; of a log on Spark, the log of these
    test: NDArray[np.int64]
    sampling: Sampling | None  # of training users into batches, if anything is trained
    compared: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))  # in no other part
    held_out: Interactions | None = None  # the log of users to test on, where that of all is on Spark


def split_users(log: Interactions, settings: JobSettings) -> Users:
    """The split; a user is on the same side on all days."""
    train, test = log.split(TRAIN, key=f"tfdp-rec train {settings.seed}")
    if not len(train):
        raise ValueError(f"The log has {len(log)} users, too few to hold any out: none is left to train on.")
    compared = test[:0]
    if auto.name in settings.mechanism:
        taken = log.uniforms(f"tfdp-rec compare {settings.seed}")[test] < _COMPARED
        test, compared = test[~taken], test[taken]
    if settings.sampling == SHUFFLED:
        train = np.random.default_rng(settings.seed).permutation(train)  # an order that may be public
    return Users(train, test, _choose_sampling(len(train), settings), compared)


def split_on_spark(log: SparkLog, settings: JobSettings, most: int, folder: Path) -> Users:
    """The same split; at most about so many users to test on come here, by the same hash."""
    key = f"tfdp-rec train {settings.seed}"
    train, test = log.split(TRAIN, key)
    if not len(train) or not len(test):
        raise ValueError(f"The log has {len(log)} users, too few to train on some and to test on others.")
    low = 1 - (1 - TRAIN) * min(1.0, most / len(test))
    held_out = log.restrict_to(key, max(low, TRAIN), 1.0).collect(folder)
    return Users(train, np.arange(len(held_out)), None, held_out=held_out)


def _choose_sampling(users: int, settings: JobSettings) -> Sampling | None:
    if not any(map(is_trained, settings.mechanism)):
        return None
    if settings.sampling == SHUFFLED:
        return FixedOrder(users, min(settings.batch_size, users), unit="user")
    if settings.batch_size > users:
        raise ValueError(
            f"--batch-size {settings.batch_size} is more than the {users} users that are trained on: give a smaller "
            f"one, such as {max(1, users // 25)}."
        )
    if settings.sampling == ALLOCATION:
        return RandomAllocation(users, round(users / settings.batch_size), unit="user")
    return PoissonSampling(users, settings.batch_size, unit="user")


def refuse_other_kind(name: str, before: pa.DataType, now: pa.DataType, why: str = "") -> None:
    """Raises if ids of users or of items were text on the days before, and are whole numbers now, or the reverse."""
    then, here = ("whole numbers" if pa.types.is_integer(kind) else "text" for kind in (before, now))
    if then != here:
        raise ValueError(
            f"--{name}: the ids of {name}s were {then} on the days before, and are {here} here{why}: write them as "
            "they were."
        )


def subset_of(log: Any, users: Any, show: Callable[[int], None] = lambda read: None) -> Any:
    """Some users of a log, to be counted where it is."""
    return users.with_items(log.items) if isinstance(users, SparkLog) else UserSubset(log, users, show)


class UserSubset:
    """Some users of a log, as `SpectralRecommender.fit` and `private_counts` take them; `show` is given public counts.

    Example:
        >>> log = Interactions.read({"u": [0, 1, 1, 2], "i": [5, 5, 6, 6]}, user="u", item="i", items=[5, 6])
        >>> two = UserSubset(log, log.units([0, 2]))
        >>> len(two), [part.lengths.tolist() for part in two.parts(log.catalogue)]
        (2, [[1, 1]])
    """

    # Users outside it are left out of every part: no copy of the log is made, and memory does not grow with it.

    def __init__(self, log: Any, users: NDArray[np.int64], show: Callable[[int], None] = lambda read: None):
        self._all, self._show, self._read = log, show, 0
        self._inside = np.zeros(len(log), bool)
        self._inside[users] = True

    def __len__(self) -> int:
        return int(self._inside.sum())

    def found(self) -> tuple[UserSubset, pa.ChunkedArray]:
        """As `Interactions.found`, of these users."""
        rows, ids = self._all.found()
        return UserSubset(rows, np.flatnonzero(self._inside)), ids

    def parts(self, catalogue: Catalogue, events: int = PART, in_order: bool = False) -> Iterator[Part]:
        """As `Log.parts`."""
        start = 0
        for part in self._all.parts(catalogue, events, in_order):
            inside = self._inside[start : start + part.num_users]
            start += part.num_users
            rows, number = inside[part.users], np.cumsum(inside) - 1
            yield Part(int(inside.sum()), number[part.users[rows]], part.places[rows])
            self._read += part.num_users
            self._show(self._read)

    def exact_counts(self, catalogue: Catalogue) -> NDArray[np.int64]:
        """How many of the users have each item: without noise, and so for the log's owner alone."""
        return exact_counts(self, catalogue)

    def noisy_popularity(self, catalogue: Catalogue, noise_multiplier: float) -> Counted:
        """Popularity of each item, up to scale, under DP, all of it positive; and what that cost."""
        counts, event = private_counts(self, catalogue, noise_multiplier=noise_multiplier, typical=_TYPICAL)
        # Items that the noise hides share what is left of the noise above zero, about 0.4 of its standard deviation.
        return Counted(np.maximum(counts, 0.0) + 0.25 * noise_multiplier + 0.1, event)
