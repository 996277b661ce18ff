"""The state of a job that its recommenders are made from: the log with its items, the split, the budget, the prior.

*The split* is by a hash of users' ids, whatever they have in the log: were users without items left out first, one
user's items would have a say in which others train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from numpy.typing import NDArray

from tfdp_rec import mechanisms
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.job.budget import Budget
from tfdp_rec.job.checkpoint import LABELS, PRIOR, RunCheckpoint
from tfdp_rec.job.evaluation import Evaluation
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.recommenders.names import IN_ORDER, is_two_tower
from tfdp_rec.job.run_folder import RunFolder
from tfdp_rec.job.settings import SHUFFLED, JobSettings
from tfdp_rec.metrics import Mean
from tfdp_rec.pricing.gaussian_release import noise_of_one_release
from tfdp_rec.sampling.orders import FixedOrder
from tfdp_rec.sampling.schemes import PoissonSampling, Sampling
from tfdp_rec.spending.ledger import ZERO_OUT
from tfdp_rec.spending.statement import Statement, rounded_up
from tfdp_rec.sums import set_union

_TRAIN, _NEGATIVES = 0.8, 4000  # of the users; where there are so many items


@dataclasses.dataclass(frozen=True)
class Users:
    """The split of a log's users.

    Attributes:
        train: Positions of the users that recommenders are made from.
        test: Positions of the held-out users.
        sampling: Sampling of training users into the batches of two-towers; None if there are none.
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    sampling: PoissonSampling | FixedOrder | None

    @classmethod
    def of(cls, log: Interactions, settings: JobSettings) -> Users:
        """The split; a user is on the same side on all days."""
        train, test = log.split(_TRAIN, key=f"tfdp-rec train {settings.seed}")
        if not len(train):
            raise ValueError(f"The log has {len(log)} users, too few to hold any out: none is left to train on.")
        if settings.sampling == SHUFFLED:
            train = np.random.default_rng(settings.seed).permutation(train)  # an order that may be public
        return cls(train, test, _sampling_of(len(train), settings))

    def adjacency(self, name: str) -> str:
        """Adjacency of a recommender's ledger. The rules of private sums use how many users there are."""
        return self.sampling.adjacency if self.sampling and is_two_tower(name) else ZERO_OUT


def _sampling_of(users: int, settings: JobSettings) -> PoissonSampling | FixedOrder | None:
    if not any(map(is_two_tower, settings.mechanism)):
        return None
    if settings.sampling == SHUFFLED:
        return FixedOrder(users, min(settings.batch_size, users), unit="user")
    in_order = [name for name in settings.mechanism if name in mechanisms.names(IN_ORDER)]
    if in_order:
        raise ValueError(f"--mechanism {in_order[0]} plans its noise for users in one order: add --sampling shuffled.")
    return PoissonSampling(users, settings.batch_size, unit="user")


def prior_noise(epsilon: float, delta: float) -> float:
    """σ of the popularity counts: at most a twenty-fifth of a two-tower's budget, in σ⁻², and never less than 4."""
    return max(4.0, 5.0 * noise_of_one_release(epsilon, delta))


@dataclasses.dataclass
class Run:
    """What the making of any of a job's recommenders needs.

    Attributes:
        prior: Popularity of each item, released before two-towers are trained; empty until then.
        recency: Exponent of private sums.
    """

    settings: JobSettings
    log: Interactions
    users: Users
    budget: Budget
    delta: float
    recency: float
    evaluation: Evaluation
    folder: RunFolder
    checkpoint: RunCheckpoint
    verbose: int
    prior: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))

    @property
    def sampling(self) -> Sampling:
        """How users come into batches."""
        assert self.users.sampling is not None
        return self.users.sampling

    @property
    def negatives(self) -> int:
        """Number of negatives that a batch shares."""
        return min(self.settings.negatives or _NEGATIVES, self.log.num_items)

    @property
    def day(self) -> int:
        """Number of days so far on which a two-tower was trained."""
        released = self.ledger(names.released(self.settings.mechanism, self.settings.export))
        return sum(paid.label == LABELS[PRIOR] for paid in released.paid)

    def ledger(self, name: str) -> Any:
        """A recommender's ledger; None if nothing is paid for it."""
        return self.checkpoint.ledgers.get(name)


def spent_before_training(budget: Budget) -> list[tuple[DpEvent, str]]:
    """What a two-tower costs on one day beside its steps: finding items, and its popularity prior."""
    prior = GaussianDpEvent(prior_noise(budget.epsilon, budget.delta) * budget.days**0.5)
    return [*((event, set_union.LABEL) for event in budget.finding), (prior, LABELS[PRIOR])]


def days_field(budget: Budget, day: int) -> dict[str, str]:
    """The entry of a statement that is about days; empty for a single one."""
    if budget.days == 1:
        return {}
    return {
        "Days": f"{day} so far, of at most {budget.days}, added up as if each user were in all of them; never above "
        f"epsilon = {rounded_up(budget.epsilon):g}, as the first day decided. What follows is of the last of them"
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MadeRecommender:
    """A recommender, and what it cost.

    Attributes:
        model: Model with `answers()`, to serve; and `save(path)` of a two-tower.
        scores: Function from contexts to scores, for tests.
        epsilon: ε of all that was spent on it; infinite where nothing is private.
        statement: The guarantee; None where there is none.
        noise_multiplier: σ; None where there is none.
        steps: Number of training steps; None where nothing is trained.
        steps_per_second: None if there were too few to tell.
        means: Results of tests, if they were made already.
    """

    model: Any
    scores: Any
    epsilon: float = float("inf")
    statement: Statement | None = None
    noise_multiplier: float | None = None
    steps: int | None = None
    steps_per_second: float | None = None
    means: Mapping[str, Mean] | None = None

    def costs(self) -> dict[str, Any]:
        """What results.json says of it beside tests."""
        names = ("steps", "steps_per_second", "epsilon", "noise_multiplier")
        return {name: getattr(self, name) for name in names}
