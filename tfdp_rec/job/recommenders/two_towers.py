"""Two-towers: what each mechanism trains one with, and its training in this process.

All start from the same weights and the same released popularity. Each private one has the noise that makes all of its
steps, with finding items and the prior, cost the run's budget: independent noise, or noise planned over the order that
users stand in. Users give one example each time they are in a batch: an item as label, and 20 others as context.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import keras
import numpy as np
from dp_accounting import NoOpDpEvent

from tfdp_rec import mechanisms
from tfdp_rec.callbacks import PrivacyBudget, TrainingCheckpoint
from tfdp_rec.datasets.next_item import NextItemExamples
from tfdp_rec.files import only_for_owner
from tfdp_rec.job.budget import PRIOR
from tfdp_rec.job.evaluation import HISTORY, KS
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.run import MadeRecommender, Run
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.models import TwoTower
from tfdp_rec.optimizers.noise_walk import noise_walk
from tfdp_rec.optimizers.rules import Recursion
from tfdp_rec.pricing.correlated_noise import INDEPENDENT, Correlation, optimised_correlation
from tfdp_rec.private_plan import PrivatePlan
from tfdp_rec.sampling.orders import FixedOrder
from tfdp_rec.sampling.schemes import Sampling
from tfdp_rec.settings import arguments
from tfdp_rec.spending.accountant import Accountant
from tfdp_rec.spending.entries import DRAWN, Entry, id_of_use
from tfdp_rec.spending.statement import Statement

_RATE, _NOISE_IN_A_ROW = 25.0, 0.8  # of the main job: 4,096 users a batch, 600 steps, ε = 8, width 32, clip 1
# Without privacy, each its best. SGD does not clip: at the private rate it diverges.
_PEERS = {names.adam.name: (keras.optimizers.Adam, 0.005), mechanisms.sgd.name: (keras.optimizers.SGD, 16.0)}
EVALUATIONS = 6  # tests during a training, the last of them at its end
_COVERS = (
    "the folder release/: servable/ and all that it answers, model.keras, the list of items in them, released.npz, "
    "ledger.jsonl, card.md and this statement"
)


def noises_for(
    settings: JobSettings, sampling: Sampling, delta: float, spent: list[Any], days: int = 1
) -> dict[str, float]:
    """The least noise of each two-tower that keeps the remaining days, and what is spent, within the budget."""
    made = list(filter(names.is_two_tower, settings.mechanism))
    if settings.noise_multiplier is not None:
        return dict.fromkeys(made, settings.noise_multiplier)
    planned = {name: correlation_for(name, settings, sampling) for name in made}
    plan = functools.partial(
        PrivatePlan, sampling=sampling, delta=delta, steps=days * settings.steps, epsilon=settings.epsilon, spent=spent
    )
    found = {each: plan(correlation=each).noise_multiplier for each in set(planned.values())}
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
    model = untrained_model(run)
    if run.checkpoint.earlier is not None:
        before = keras.models.load_model(run.folder.release / "model.keras", compile=False)
        _go_on(before, model, 1 + len(run.checkpoint.earlier.items))
    return model


def _go_on(before: TwoTower, model: TwoTower, rows: int) -> None:
    """Has a model go on from the released one, of whose tables the rows of known items stay."""
    tables = (before.context_table.embeddings, before.scores.embeddings)
    if tables[0].shape[0] < rows:
        raise ValueError("model.keras has fewer items than released.npz: put back release/ as this run left it.")
    # A day that was cut off after its model was written may have had rows of other items at the end.
    before.grow_into(model, kept=dict.fromkeys([table.path for table in tables], range(rows)))


def learning_rate_for(settings: JobSettings, noise_multiplier: float, correlation: Correlation | None = None) -> float:
    """The rate that was asked for; else the main job's, or what leaves noise of the main job's length in a row."""
    # With C clipped gradients shrink, and with B and σ the noise: rate · C σ √(steps · width) / B is that length.
    if settings.learning_rate is not None:
        return settings.learning_rate
    strategy = INDEPENDENT if correlation is None else correlation.strategy
    stddev = noise_multiplier * settings.clip / settings.batch_size
    length = noise_walk(Recursion(), np.ones(settings.steps), stddev, strategy) * settings.width**0.5
    return min(_RATE / settings.clip, _NOISE_IN_A_ROW / length)


def optimizer_for(
    name: str, settings: JobSettings, noise_multiplier: float, correlation: Correlation | None = None
) -> keras.optimizers.Optimizer:
    """A fresh optimizer."""
    if name in _PEERS:
        kind, rate = _PEERS[name]
        return kind(rate)
    given = arguments(settings, "optimizer") | ({} if correlation is None else {"correlation": correlation})
    rate = learning_rate_for(settings, noise_multiplier, correlation)
    return mechanisms.named(name).optimizer(rate, noise_multiplier=noise_multiplier, **given)


class _Curve(keras.callbacks.Callback):
    """Writes a line of metrics an epoch, and ends the last epoch with the last step."""

    def __init__(self, run: Run, name: str, accountant: Accountant | None):
        super().__init__()
        self.run, self.name, self.accountant = run, name, accountant
        self.step, self.last = 0, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step == self.last:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        record = {"recommender": self.name, "step": self.step, "loss": float((logs or {})["loss"])}
        record |= {name: mean.value for name, mean in self.run.evaluation.measured(self.model).items()}
        if self.accountant is not None:
            record["epsilon"] = self.accountant.epsilon()
        self.run.folder.append(record)


def uses_before_training(run: Run, ledger: Any) -> list[tuple[str, Entry]]:
    """(id, entry) of every use of the log that a two-tower is made of beside its steps: items and popularity."""
    if ledger is None:
        return [(id_of_use(e, label), Entry(e, 1, DRAWN, label=label)) for e, label in run.budget.before_training]
    # The ids of the payments: the entries are receipts.
    uses = [paid for paid in ledger.paid if not paid.steps and not isinstance(paid.event, NoOpDpEvent)]
    return [(paid.id, Entry(paid.event, paid.attempts, DRAWN, label=paid.label)) for paid in uses]


def accounting(
    name: str, optimizer: Any, run: Run, ledger: Any = None, pays: bool = True
) -> tuple[Accountant | None, list[PrivacyBudget]]:
    """The accountant of a training, which pays in the ledger or leaves that to others, and what keeps its budget."""
    if name in mechanisms.names(names.PEERS):
        return None, []
    for id, entry in uses_before_training(run, ledger):  # part of the model's saved history
        optimizer.privacy_history.add_entry(entry, id)
    accountant = Accountant(optimizer.dp_event(), run.sampling, run.delta, ledger=ledger if pays else None)
    accountant.follow(optimizer)
    within = [PrivacyBudget(accountant, run.settings.epsilon)] if names.named(name).claims_epsilon else []
    return accountant, within


def steps_left(settings: JobSettings, made: int, within: list[PrivacyBudget]) -> int:
    """Number of steps still to be made: those that are missing, as far as the budget allows. More may be paid for."""
    missing = max(0, settings.steps - made)
    for budget in within:
        accountant = budget.accountant
        missing = min(missing, accountant.max_steps(budget.target_epsilon) - accountant.steps)
    return missing


def with_costs(made: MadeRecommender, name: str, accountant: Accountant | None, run: Run) -> MadeRecommender:
    """What was trained, with what its steps cost."""
    if accountant is None:
        return made
    leaves = name == run.released and names.named(name).claims_epsilon
    fields = dict(accountant.statement().fields)
    days = run.days_field(run.days(PRIOR)) if leaves else {}
    said = {"Guarantee": fields.pop("Guarantee"), **days, **fields}
    if leaves:
        said |= {"Public": f"{run.public_numbers}; of those that train, {fields['Public']}", "Covers": _COVERS}
    return dataclasses.replace(
        made, epsilon=accountant.epsilon(), statement=Statement(said), noise_multiplier=run.checkpoint.noises[name]
    )


def train_one(name: str, run: Run) -> MadeRecommender:
    """Trains and accounts under one mechanism, in this process."""
    settings, checkpoint = run.settings, run.checkpoint
    model, noise = new_model(run), checkpoint.noises[name]
    model.compile(optimizer=optimizer_for(name, settings, noise, correlation_for(name, settings, run.sampling)))
    ledger = run.ledger(name) if names.named(name).claims_epsilon else None
    accountant, within = accounting(name, model.optimizer, run, ledger)
    curve = _Curve(run, name, accountant)
    callbacks: list[keras.callbacks.Callback] = [*within, curve]
    batches = _batches_of(run)
    # A training that no ledger pays for, and that was cut off, begins anew: nothing of it is released.
    if accountant is not None and (ledger is not None or not within):
        model.prepare(batches.element_spec)
        checkpoint = TrainingCheckpoint(checkpoint.training_folder(name), checkpoint.every, accountant)
        resumed = checkpoint.resume(model)
        curve.step = resumed.step if resumed else 0
        batches = _batches_of(run, curve.step)
        callbacks.append(checkpoint)
    left, a_report = steps_left(settings, curve.step, within), -(-settings.steps // EVALUATIONS)
    curve.last, board = curve.step + left, run.folder.private / "tensorboard"
    callbacks.append(keras.callbacks.TensorBoard(str(board / name), write_graph=False))
    try:
        if left:  # the arguments of `fit` are the same however many these are
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".* is not private", UserWarning)  # the peers' names say so
                model.fit(
                    batches, steps_per_epoch=a_report, epochs=-(-settings.steps // a_report), callbacks=callbacks,
                    verbose=run.show.verbose,
                )  # fmt: skip
    finally:
        if accountant is not None:
            accountant.give_back_unused()
        only_for_owner(board)
    return with_costs(MadeRecommender(model, model, steps=curve.step), name, accountant, run)


def _batches_of(run: Run, made: int = 0) -> Any:
    """Batches of the training users' examples; in an order, from the step on that is next."""
    examples, sampling = examples_of(run), run.users.sampling
    position: dict[str, Any] = {"position": made} if isinstance(sampling, FixedOrder) else {}
    assert sampling is not None
    return sampling.batches(examples.fetch, shared=examples.shared, **position)


def examples_of(run: Run) -> NextItemExamples:
    """The training users' examples."""
    return NextItemExamples(run.log, run.users.train, HISTORY, run.negatives)
