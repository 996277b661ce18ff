"""The data of a run, split, and how its users get into batches.

*Who trains* is drawn from all users, whatever they have watched: were users without movies left out first, one user's
movies would have a say in who the others are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import dp_accounting
import numpy as np

from tfdp_rec import mechanisms
from tfdp_rec.data import FixedOrder, NextItemExamples, PoissonSampling, Timelines
from tfdp_rec.movies import contestants
from tfdp_rec.movies.kept import RunCheckpoint
from tfdp_rec.movies.settings import SHUFFLED, Settings
from tfdp_rec.movies.tested import Tests
from tfdp_rec.pricing.gaussian_release import noise_of_one_release
from tfdp_rec.run_folder import RunFolder

_NEGATIVES = 4000  # where there are so many movies
_PRIOR = "popularity counts"


@dataclasses.dataclass
class Problem:
    """The data of a run, split.

    Attributes:
        tests: of the test users.
        prior: popularity, released before training; empty until it was.
    """

    timelines: Timelines
    train: np.ndarray
    tests: Tests
    sampling: PoissonSampling | FixedOrder
    delta: float
    prior_event: dp_accounting.GaussianDpEvent
    negatives: int
    prior: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))

    @property
    def spent(self) -> list[tuple[dp_accounting.DpEvent, str]]:
        """What a two-tower costs beside its training."""
        return [(self.prior_event, _PRIOR)]


@dataclasses.dataclass(frozen=True)
class Run:
    """What the training of any of a run's mechanisms needs.

    Attributes:
        problem: the data.
        settings: of the job.
        folder: that results go to.
        noises: σ, by mechanism.
        verbose: Keras' verbosity.
        kept: where checkpoints and ledgers are; None for neither.
    """

    problem: Problem
    settings: Settings
    folder: RunFolder
    noises: Mapping[str, float]
    verbose: int
    kept: RunCheckpoint | None = None


def prepare(timelines: Timelines, settings: Settings) -> Problem:
    """Splits the users; nothing of them is released yet.

    Raises:
        ValueError: for settings that do not fit the data.
    """
    if settings.top_k > timelines.num_movies:
        raise ValueError(f"top_k must be at most the {timelines.num_movies} movies, got {settings.top_k}.")
    contestants.released(settings.mechanisms, settings.export)  # for what that refuses
    train, test = timelines.split_users(0.8, seed=settings.seed, min_length=0)
    test = test[timelines.lengths[test] >= 2][: settings.test_users]
    if settings.sampling == SHUFFLED:
        train = np.random.default_rng(settings.seed).permutation(train)  # an order that anybody may know
    sampling = sampling_of(len(train), settings)
    delta = settings.delta if settings.delta is not None else min(1e-6, 1.0 / len(train))
    negatives = settings.negatives or min(_NEGATIVES, timelines.num_movies)
    event = dp_accounting.GaussianDpEvent(prior_noise(settings.epsilon, delta))
    tests = Tests(NextItemExamples(timelines, test, settings.history, negatives), settings.seed)
    return Problem(timelines, train, tests, sampling, delta, event, negatives)


def prior_noise(epsilon: float, delta: float) -> float:
    """σ of the popularity counts: at most a twenty-fifth of the budget, in σ⁻², and 4 where that would be less noise.

    Args:
        epsilon: the budget of a two-tower, counts and training together.
        delta: its δ.
    """
    return max(4.0, 5.0 * noise_of_one_release(epsilon, delta))


def sampling_of(users: int, settings: Settings) -> PoissonSampling | FixedOrder:
    """How so many training users get into batches.

    Raises:
        ValueError: a mechanism needs them in one order.
    """
    if settings.sampling == SHUFFLED:
        return FixedOrder(users, min(settings.batch_size, users), unit="user")
    in_order = [name for name in settings.mechanisms if name in mechanisms.names(contestants.IN_ORDER)]
    if in_order:
        raise ValueError(f"--mechanism {in_order[0]} plans its noise for users in one order: add --sampling shuffled.")
    return PoissonSampling(users, settings.batch_size, unit="user")
