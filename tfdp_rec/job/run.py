"""The state of a job that its recommenders are made from: the log with its items, the split, the budget, the prior.

*The split* is by a hash of users' ids, whatever they have in the log: were users without items left out first, one
user's items would have a say in which others train.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tfdp_rec import mechanisms
from tfdp_rec.core.claim.orders import FixedOrder
from tfdp_rec.core.claim.schemes import PoissonSampling, Sampling
from tfdp_rec.core.claim.statement import Statement, rounded_up
from tfdp_rec.core.ground.files import rows_at_a_time
from tfdp_rec.datasets.log import PART, Catalogue, Part
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.job.budget import LABELS, PRIOR, SUMS, UPON, Budget
from tfdp_rec.job.checkpoint import RunCheckpoint
from tfdp_rec.job.evaluation import Evaluation, NewItemExamples
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.recommenders.names import IN_ORDER, is_trained, is_two_tower
from tfdp_rec.job.run_folder import RunFolder
from tfdp_rec.job.settings import SHUFFLED, JobSettings
from tfdp_rec.job.sources import LogSource, features_of
from tfdp_rec.metrics import Mean
from tfdp_rec.sums.counts import Counted, private_counts

_TRAIN = 0.8  # of the users
# Where there are so many items. Upon sums each is scored at every place of a history.
_NEGATIVES, _NEGATIVES_UPON = 4000, 1000
_TEST_USERS = 8000  # at most
_TYPICAL = 20  # items of a user: what noisy counts expect
_SCORES = 2**24  # at once, while testing: 64 MB, and a few times that


class Progress:
    """Prints what is being done, i of n, and for how long; verbose 0 prints nothing, 1 counts within a step, too."""

    def __init__(self, steps: int, verbose: int):
        self.steps, self.verbose, self.step, self.start = steps, verbose, 0, time.monotonic()

    def begin(self, what: str) -> None:
        """The next step."""
        self.step += 1
        self.note(f"[{self.step}/{self.steps}] {what} ...")

    def note(self, what: str) -> None:
        """Something about the step."""
        if self.verbose:
            print(f"{time.monotonic() - self.start:6.0f} s  {what}", flush=True)

    def count(self, words: str, most: int, count: int) -> None:
        """How many of how many, on a terminal."""
        if self.verbose == 1 and count <= most:
            print(f"\r{'':10}{count:,} of {most:,} {words}", end="\n" if count >= most else "", flush=True)


@dataclasses.dataclass(frozen=True)
class Users:
    """The split of a log's users, by their positions in it."""

    train: NDArray[np.int64]  # recommenders are made from these
    test: NDArray[np.int64]
    sampling: PoissonSampling | FixedOrder | None  # of training users into batches of two-towers, if there are any

    @classmethod
    def of(cls, log: Interactions, settings: JobSettings) -> Users:
        """The split; a user is on the same side on all days."""
        train, test = log.split(_TRAIN, key=f"tfdp-rec train {settings.seed}")
        if not len(train):
            raise ValueError(f"The log has {len(log)} users, too few to hold any out: none is left to train on.")
        if settings.sampling == SHUFFLED:
            train = np.random.default_rng(settings.seed).permutation(train)  # an order that may be public
        return cls(train, test, _sampling_of(len(train), settings))


def _sampling_of(users: int, settings: JobSettings) -> PoissonSampling | FixedOrder | None:
    if not any(map(is_trained, settings.mechanism)):
        return None
    if settings.sampling != SHUFFLED and settings.batch_size > users:
        raise ValueError(
            f"--batch-size {settings.batch_size} is more than the {users} users that are trained on: give a smaller "
            f"one, such as {max(1, users // 25)}."
        )
    if settings.sampling == SHUFFLED:
        return FixedOrder(users, min(settings.batch_size, users), unit="user")
    in_order = [name for name in settings.mechanism if name in mechanisms.names(IN_ORDER)]
    if in_order:
        raise ValueError(f"--mechanism {in_order[0]} plans its noise for users in one order: add --sampling shuffled.")
    return PoissonSampling(users, settings.batch_size, unit="user")


def begins_with(name: str) -> str | None:
    """The file of what is released for a recommender alone, before any training; None if there is no such release."""
    of_sums = {names.spectral.name: SUMS, names.upon_sums.name: UPON}
    return PRIOR if is_two_tower(name) else of_sums.get(name)


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
        total = np.zeros(len(catalogue), np.int64)
        for part in self.parts(catalogue):
            total += np.bincount(part.places, minlength=len(total))
        return total

    def noisy_popularity(self, catalogue: Catalogue, noise_multiplier: float) -> Counted:
        """Popularity of each item, up to scale, under DP, all of it positive; and what that cost."""
        counts, event = private_counts(self, catalogue, noise_multiplier=noise_multiplier, typical=_TYPICAL)
        # Items that the noise hides share what is left of the noise above zero, about 0.4 of its standard deviation.
        return Counted(np.maximum(counts, 0.0) + 0.25 * noise_multiplier + 0.1, event)


@dataclasses.dataclass
class Run:
    """A job whose log was read: what any of its recommenders is made from."""

    source: LogSource
    checkpoint: RunCheckpoint
    show: Progress
    log: Interactions  # with its items once these are chosen
    users: Users
    public: Items | None  # the list of items, where they are not found
    titles: pa.Table  # public, in columns `item` and `title`
    features: pa.Table  # public, in columns `item` and `feature`
    budget: Budget
    seats: NDArray[np.bool_] | None = None  # users whose rows count today; None if all do
    # Popularity of each item, released before two-towers are trained; empty until then.
    prior: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))
    upon: Any = None  # the sums that a training goes on from, released before it

    @property
    def settings(self) -> JobSettings:
        """What was asked for."""
        return self.checkpoint.settings

    @property
    def folder(self) -> RunFolder:
        """Where results go."""
        return self.checkpoint.folder

    @property
    def released(self) -> str:
        """Name of the recommender that leaves the run."""
        return names.released(self.settings.mechanism, self.settings.export)

    @property
    def delta(self) -> float:
        """δ of all days together."""
        return self.budget.delta

    def ledger(self, name: str) -> Any:
        """A recommender's ledger; None if nothing is paid for it."""
        return self.checkpoint.ledgers.get(name)

    @property
    def order(self) -> bool | None:
        """Whether order counts in private sums; None if they are to decide it."""
        return {"auto": None if self.log.ordered else False, "yes": True, "no": False}[self.settings.order]

    @functools.cached_property
    def item_features(self) -> list[list[str]] | None:
        """Public features of the items of the log, once these are chosen."""
        assert self.log.items is not None
        return features_of(self.log.items, self.features)

    @property
    def counted(self) -> NDArray[np.int64]:
        """The users who are in private sums or popularity counts today."""
        train = self.users.train
        return train if self.seats is None else train[self.seats[train]]

    @property
    def sampling(self) -> Sampling:
        """How users come into batches."""
        assert self.users.sampling is not None
        return self.users.sampling

    def negatives(self, name: str) -> int:
        """Number of negatives that a batch of a recommender shares."""
        usual = _NEGATIVES_UPON if name == names.upon_sums.name else _NEGATIVES
        return min(self.settings.negatives or usual, self.log.num_items)

    @functools.cached_property
    def evaluation(self) -> Evaluation:
        """Tests on the held-out users."""
        examples = NewItemExamples(self.log, self.users.test[: _TEST_USERS])
        return Evaluation(examples, self.settings.seed, min(500, rows_at_a_time([1, self.log.num_items], _SCORES)))

    def days(self, file: str | None) -> int:
        """Number of days so far that have paid for the release in a file."""
        return 0 if file is None else sum(paid.label == LABELS[file] for paid in self.ledger(self.released).paid)

    def days_field(self, day: int) -> dict[str, str]:
        """The entry of a statement that is about days; empty for a single one."""
        most, epsilon = self.budget.days, self.budget.epsilon
        return {} if most == 1 else {
            "Days": f"{day} so far, of at most {most}, {self._days_of_a_user}; never above "
            f"epsilon = {rounded_up(epsilon):g}, as the first day decided. What follows is of the last of them"
        }  # fmt: skip

    @property
    def _days_of_a_user(self) -> str:
        each = self.budget.days_per_user
        if each is None:
            return "added up as if each user were in all of them"
        kept = f"of which a user's rows count on {each} at most, kept account of in a private list"
        if is_trained(self.released):
            kept += ", in all but training steps, which add up as if each user were in all of them"
        return kept

    @property
    def public_numbers(self) -> str:
        """What of the users is public, as text."""
        users = "the number of users of each day" if self.budget.days > 1 else "the number of users"
        return f"{users}, {len(self.log)}, and which of them were held out, by a hash of their ids"


@dataclasses.dataclass(frozen=True)
class MadeRecommender:
    """A recommender, and what it cost."""

    model: Any  # with `answers()`, to serve; and `save(path)` of a two-tower
    scores: Any  # function from contexts to scores, for tests
    epsilon: float = float("inf")  # of all that was spent on it
    statement: Statement | None = None
    noise_multiplier: float | None = None
    steps: int | None = None  # None where nothing is trained
    means: Mapping[str, Mean] | None = None  # results of tests, if they were made already


Train = Callable[[str, Run], MadeRecommender]
