"""Two-towers: what each mechanism trains one with, and its training in this process.

All start from the same weights and the same released popularity. Each private one has the noise that makes all of its
steps, with the prior, cost the run's budget: independent noise, or noise planned over the order that users stand in.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import keras
import numpy as np

from tfdp_rec import mechanisms
from tfdp_rec.callbacks import PrivacyBudget, TrainingCheckpoint
from tfdp_rec.data import FixedOrder, NextItemExamples
from tfdp_rec.files import only_for_owner
from tfdp_rec.models import TwoTower
from tfdp_rec.movies import contestants
from tfdp_rec.movies.problem import Problem, Run
from tfdp_rec.movies.settings import Settings
from tfdp_rec.movies.tested import KS, Tests
from tfdp_rec.movies.trained import Trained
from tfdp_rec.optimizers.noise_walk import noise_walk
from tfdp_rec.optimizers.recursion import Recursion
from tfdp_rec.pricing.correlated_noise import INDEPENDENT, Correlation, optimised_correlation
from tfdp_rec.private_plan import PrivatePlan
from tfdp_rec.run_folder import RunFolder
from tfdp_rec.spending.accountant import Accountant

_RATE, _NOISE_IN_A_ROW = 25.0, 0.8  # of the main job: 4,096 users a batch, 600 steps, ε = 8, width 32, clip 1


def noises_for(problem: Problem, settings: Settings) -> dict[str, float]:
    """The least noise of each two-tower for the budget, unless it was given."""
    two_towers = list(filter(contestants.is_two_tower, settings.mechanisms))
    planned = {name: correlation_for(name, problem, settings) for name in two_towers}
    found = {correlation: noise_for(correlation, problem, settings) for correlation in set(planned.values())}
    return {name: found[correlation] for name, correlation in planned.items()}


def noise_for(correlation: Correlation | None, problem: Problem, settings: Settings) -> float:
    """The least noise of that kind for the budget, unless it was given."""
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    plan = PrivatePlan(
        sampling=problem.sampling, delta=problem.delta, steps=settings.steps, epsilon=settings.epsilon,
        correlation=correlation, spent=problem.spent,
    )  # fmt: skip
    return plan.noise_multiplier


@functools.cache
def _best_correlation(steps: int, separation: int, participations: int) -> Correlation:
    return optimised_correlation(steps=steps, separation=separation, participations=participations)


def correlation_for(mechanism: str, problem: Problem, settings: Settings) -> Correlation | None:
    """What the noise of a mechanism takes back of what it added before; None if nothing."""
    order, steps = problem.sampling, settings.steps
    if mechanism not in mechanisms.names(contestants.IN_ORDER) or not isinstance(order, FixedOrder):
        return None
    return _best_correlation(steps, order.separation, order.participations(steps))


def new_model(problem: Problem, settings: Settings) -> TwoTower:
    """An untrained model; the same for every mechanism."""
    keras.utils.set_random_seed(settings.seed)
    return TwoTower(
        problem.timelines.movie_ids,
        settings.width,
        settings.hidden,
        problem.prior,
        settings.history,
        KS,
        name="two_tower",
    )


def learning_rate_for(settings: Settings, noise_multiplier: float, correlation: Correlation | None = None) -> float:
    """That which was asked for; else the main job's, or what leaves noise of the main job's length in a row.

    With C clipped gradients shrink, and with B and σ the noise: rate · C σ √(steps · width) / B is that length.

    Args:
        settings: of the job.
        noise_multiplier: σ.
        correlation: of the noise.
    """
    if settings.learning_rate is not None:
        return settings.learning_rate
    strategy = INDEPENDENT if correlation is None else correlation.strategy
    stddev = noise_multiplier * settings.clip / settings.batch_size
    length = noise_walk(Recursion(), np.ones(settings.steps), stddev, strategy) * settings.width**0.5
    return min(_RATE / settings.clip, _NOISE_IN_A_ROW / length)


def optimizer_for(
    mechanism: str, settings: Settings, noise_multiplier: float, correlation: Correlation | None = None
) -> keras.optimizers.Optimizer:
    """A fresh optimizer."""
    if mechanism == mechanisms.sgd.name:
        # It does not clip: at the private rate it diverges. Its own best rate, found the same way.
        return keras.optimizers.SGD(settings.sgd_learning_rate)
    if mechanism == contestants.adam.name:
        return keras.optimizers.Adam(settings.adam_learning_rate)
    own = {} if correlation is None else {"correlation": correlation}
    return mechanisms.named(mechanism).optimizer(
        learning_rate_for(settings, noise_multiplier, correlation),
        **own,
        l2_norm_clip=settings.clip,
        noise_multiplier=noise_multiplier,
        expected_batch_size=settings.batch_size,
    )


class _Curve(keras.callbacks.Callback):
    """Times the steps, writes a line of metrics an epoch, and ends the last epoch with the last step."""

    def __init__(self, folder: RunFolder, mechanism: str, tests: Tests, accountant: Accountant | None):
        super().__init__()
        self.folder, self.mechanism, self.tests, self.accountant = folder, mechanism, tests, accountant
        self.step, self.last, self.seconds, self.timed = 0, 0, 0.0, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if batch == 0:  # the first step of the first epoch traces the graph
            self.start = time.perf_counter()
        else:
            self.timed += 1
        if self.step == self.last:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds += time.perf_counter() - self.start
        record = {"mechanism": self.mechanism, "step": self.step, "loss": float((logs or {})["loss"])}
        record |= {name: mean.value for name, mean in self.tests.measured(self.model).items()}
        if self.accountant is not None:
            record["epsilon"] = self.accountant.epsilon()
        self.folder.append(record)


def accounting(
    mechanism: str, optimizer: Any, problem: Problem, settings: Settings, ledger: str | None = None
) -> tuple[Accountant | None, list[PrivacyBudget]]:
    """The accountant of a training, and the callback that keeps it within its budget.

    Args:
        mechanism: its name.
        optimizer: whose steps are accounted for.
        problem: the data.
        settings: of the job.
        ledger: that the prior was paid in, and that steps are to be.
    """
    if mechanism in mechanisms.names(contestants.PEERS):
        return None, []
    accountant = Accountant(optimizer.dp_event(), problem.sampling, problem.delta, ledger=ledger)
    for event, label in [] if ledger else problem.spent:
        accountant.spend(event, label)
    accountant.follow(optimizer)
    within = [PrivacyBudget(accountant, settings.epsilon)] if contestants.named(mechanism).claims_epsilon else []
    return accountant, within


def steps_left(settings: Settings, made: int, within: list[PrivacyBudget]) -> int:
    """How many steps are still to be made: those that are missing, as far as the budget allows.

    Args:
        settings: of the job.
        made: that the model has behind it. More than those may be paid for.
        within: the budget, if there is one.
    """
    missing = max(0, settings.steps - made)
    for budget in within:
        accountant = budget.accountant
        missing = min(missing, accountant.max_steps(budget.target_epsilon) - accountant.steps)
    return missing


def train_one(mechanism: str, run: Run) -> Trained:
    """Trains, accounts and tests under one mechanism, in this process."""
    problem, settings, kept = run.problem, run.settings, run.kept
    model = new_model(problem, settings)
    noise, correlation = run.noises[mechanism], correlation_for(mechanism, problem, settings)
    model.compile(optimizer=optimizer_for(mechanism, settings, noise, correlation))
    batches = batches_of(problem, settings)
    ledger = kept.ledger(mechanism, problem.sampling) if kept else None
    accountant, within = accounting(mechanism, model.optimizer, problem, settings, ledger)
    curve = _Curve(run.folder, mechanism, problem.tests, accountant)
    callbacks: list[keras.callbacks.Callback] = [*within, curve]
    if kept and accountant is not None:
        model.prepare(batches.element_spec)
        checkpoint = TrainingCheckpoint(kept.folder(mechanism), kept.every, accountant)
        resumed = checkpoint.resume(model)
        curve.step = resumed.step if resumed else 0
        batches = batches_of(problem, settings, curve.step)
        callbacks.append(checkpoint)
    try:
        _fit(model, batches, callbacks, curve, run, steps_left(settings, curve.step, within))
    finally:
        if accountant is not None:
            accountant.close()
    speed = curve.timed / curve.seconds if curve.seconds else None
    trained = Trained(model, problem.tests.measured(model), steps=curve.step, steps_per_second=speed)
    return trained.accounted(accountant, noise)


def batches_of(problem: Problem, settings: Settings, made: int = 0) -> Any:
    """Batches of the training users' examples; in an order, from the step on that is next."""
    examples = NextItemExamples(problem.timelines, problem.train, settings.history, problem.negatives)
    if isinstance(problem.sampling, FixedOrder):
        return problem.sampling.batches(examples.fetch, shared=examples.shared, position=made)
    return problem.sampling.batches(examples.fetch, shared=examples.shared)


def _fit(model: TwoTower, batches: Any, callbacks: list[Any], curve: _Curve, run: Run, left: int) -> None:
    """Makes the steps that are left; what fit is told is the same however many these are."""
    if not left:
        return
    curve.last = curve.step + left
    steps, a_report = run.settings.steps, -(-run.settings.steps // run.settings.evaluations)
    board = run.folder.private / "tensorboard"
    tensorboard = keras.callbacks.TensorBoard(str(board / curve.mechanism), write_graph=False)
    model.fit(
        batches, steps_per_epoch=a_report, epochs=-(-steps // a_report), callbacks=[*callbacks, tensorboard],
        verbose=run.verbose, shuffle=False,
    )  # fmt: skip
    only_for_owner(board)
