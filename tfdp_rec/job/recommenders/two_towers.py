"""Two-towers: what each mechanism trains one with.

All start from the same weights and the same released popularity. Each private one has the noise that makes all of its
steps, with finding items and the prior, cost the run's budget: independent noise, or noise planned over the order that
users stand in. Users give one example each time they are in a batch: an item as label, and 20 others as context.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np

from tfdp_rec import mechanisms
from tfdp_rec.core.claim.orders import FixedOrder
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.core.mechanism.correlated_noise import Correlation, optimised_correlation
from tfdp_rec.datasets.next_item import NextItemExamples
from tfdp_rec.job.evaluation import HISTORY, KS
from tfdp_rec.job.recommenders import names, training
from tfdp_rec.job.run import MadeRecommender, Run
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.models import TwoTower
from tfdp_rec.settings import arguments

# Without privacy, each its best. SGD does not clip: at the private rate it diverges.
_PEERS = {names.adam.name: (keras.optimizers.Adam, 0.005), mechanisms.sgd.name: (keras.optimizers.SGD, 16.0)}


def noises_for(
    settings: JobSettings, sampling: Sampling, delta: float, spent: list[Any], days: int = 1
) -> dict[str, float]:
    """The noise of each two-tower that is made: see `training.noise_for`."""
    made = list(filter(names.is_two_tower, settings.mechanism))
    if settings.noise_multiplier is not None:
        return dict.fromkeys(made, settings.noise_multiplier)
    planned = {name: correlation_for(name, settings, sampling) for name in made}
    noise = functools.partial(training.noise_for, settings, sampling, delta, spent, days)
    found = {each: noise(each) for each in set(planned.values())}
    return {name: found[correlation] for name, correlation in planned.items()}


@functools.cache
def _best_correlation(steps: int, separation: int, participations: int) -> Correlation:
    return optimised_correlation(steps=steps, separation=separation, participations=participations)


def correlation_for(name: str, settings: JobSettings, sampling: Sampling) -> Correlation | None:
    """What the noise of a mechanism takes back of what it added before; None if nothing."""
    if name not in mechanisms.names(names.IN_ORDER) or not isinstance(sampling, FixedOrder):
        return None
    return _best_correlation(settings.steps, sampling.separation, sampling.participations(settings.steps))


def untrained_model(run: Run) -> TwoTower:
    """A model over item numbers, the same for every mechanism."""
    settings, numbers = run.settings, np.arange(1, run.log.num_items + 1)
    keras.utils.set_random_seed(settings.seed)
    return TwoTower(
        numbers, prior=run.prior, history_length=HISTORY, ks=KS, name="two_tower", **arguments(settings, "TwoTower")
    )


def new_model(run: Run) -> TwoTower:
    """What a training begins with: an untrained model, or on a further day the released one with the day's items."""
    return training.go_on(run, untrained_model(run))


def optimizer_for(
    name: str, settings: JobSettings, noise_multiplier: float, correlation: Correlation | None = None
) -> keras.optimizers.Optimizer:
    """A fresh optimizer."""
    if name in _PEERS:
        kind, rate = _PEERS[name]
        return kind(rate)
    given = training.optimizer_arguments(settings, name) | ({} if correlation is None else {"correlation": correlation})
    rate = training.learning_rate_for(settings, name, noise_multiplier, correlation)
    kind = mechanisms.lazy_dp_sgd if name == names.upon_sums.name else mechanisms.named(name)
    return kind.optimizer(rate, noise_multiplier=noise_multiplier, **given)


def train_one(name: str, run: Run) -> MadeRecommender:
    """Trains and accounts under one mechanism, in this process."""
    noise = run.checkpoint.noises[name]
    optimizer = optimizer_for(name, run.settings, noise, correlation_for(name, run.settings, run.sampling))
    return training.trained(name, run, new_model(run), optimizer, functools.partial(_batches_from, run))


def _batches_from(run: Run, made: int) -> Any:
    """Batches of the training users' examples; in an order, from the step on that is next."""
    examples, sampling = examples_of(run), run.users.sampling
    position: dict[str, Any] = {"position": made} if isinstance(sampling, FixedOrder) else {}
    assert sampling is not None
    return sampling.batches(examples.fetch, shared=examples.shared, present=examples.present, **position)


def examples_of(run: Run) -> NextItemExamples:
    """The training users' examples."""
    return NextItemExamples(run.log, run.users.train, HISTORY, run.negatives(names.adam.name))
