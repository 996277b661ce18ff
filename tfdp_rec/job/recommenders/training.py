"""Training in a job: the steps of one recommender, its accountant, its ledger and its curve, in this process.

A training goes on from its last checkpoint. All of its steps are paid for in the recommender's ledger, beside what was
released for it before; the history that the model keeps has both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec import mechanisms
from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.entries import Entries, Entry, Use
from tfdp_rec.core.claim.events import NoOpDpEvent
from tfdp_rec.core.claim.ledger import Ledger
from tfdp_rec.core.claim.payments import Payments
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.core.claim.statement import Statement
from tfdp_rec.core.ground.files import Path, only_for_owner
from tfdp_rec.core.mechanism.correlated_noise import INDEPENDENT, Correlation
from tfdp_rec.core.mechanism.noise_walk import noise_walk
from tfdp_rec.core.mechanism.rules import Recursion
from tfdp_rec.job.budget import PRIOR
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.run import MadeRecommender, Run, begins_with
from tfdp_rec.job.run_folder import MODEL
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.models.own_catalogue import loaded_model
from tfdp_rec.settings import arguments
from tfdp_rec.training.privacy_budget import PrivacyBudget
from tfdp_rec.training.private_plan import PrivatePlan
from tfdp_rec.training.training_checkpoint import TrainingCheckpoint

EVALUATIONS = 6  # tests during a training, the last of them at its end
_RATES, _NOISE_IN_A_ROW = {names.upon_sums.name: 100.0}, 0.8
_USUAL_RATE = 25.0  # of the main job: 4,096 users a batch, 600 steps, ε = 8, width 32, clip 1
_COVERS = (
    "the folder release/: servable/ and all that it answers, model.keras, the list of items in them, released.npz, "
    "ledger.jsonl, card.md and this statement"
)


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


def noise_for(
    settings: JobSettings, sampling: Sampling, delta: float, spent: list[Any], days: int = 1,
    correlation: Correlation | None = None,
) -> float:  # fmt: skip
    """The least noise that keeps the steps of the remaining days, and what is spent, within the budget."""
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    return PrivatePlan(
        sampling=sampling, delta=delta, steps=days * settings.steps, epsilon=settings.epsilon, spent=spent,
        correlation=correlation,
    ).noise_multiplier  # fmt: skip


def learning_rate_for(
    settings: JobSettings, name: str, noise_multiplier: float, correlation: Correlation | None = None
) -> float:
    """The rate that was asked for; else a usual one, or what leaves noise of the main job's length in a row."""
    # With C clipped gradients shrink, and with B and σ the noise: rate · C σ √(steps · width) / B is that length.
    if settings.learning_rate is not None:
        return settings.learning_rate
    strategy, clip = INDEPENDENT if correlation is None else correlation.strategy, settings.clip_of(name)
    stddev = noise_multiplier * clip / settings.batch_size
    length = noise_walk(Recursion(), np.ones(settings.steps), stddev, strategy) * settings.width**0.5
    return min(_RATES.get(name, _USUAL_RATE) / clip, _NOISE_IN_A_ROW / length)


def optimizer_arguments(settings: JobSettings, name: str) -> dict[str, Any]:
    """What an optimizer is given beside its rate and noise."""
    return {**arguments(settings, "optimizer"), "l2_norm_clip": settings.clip_of(name)}


def released_model(run: Run) -> Any:
    """The model that the days before have released. A day asks for it before it pays for anything."""
    assert run.checkpoint.earlier is not None
    path = run.folder.release / MODEL
    if not path.is_file():
        raise FileNotFoundError(f"{path} is gone, and this day goes on from it: put it back from a copy of release/.")
    before = loaded_model(path, compile=False)
    if before.item_tables()[0].embeddings.shape[0] < 1 + len(run.checkpoint.earlier.items):
        raise ValueError("model.keras has fewer items than released.npz: put back release/ as this run left it.")
    if names.named(run.released).claims_epsilon:
        refuse_unpaid(before, run.ledger(run.released), path)
    return before


def refuse_unpaid(model: Any, ledger: Ledger, path: Path) -> None:
    """Refuses a model whose private training the run's ledger has not paid for, as another run's."""
    history = model.saved_history() or Entries()
    drawn = [entry.sampling for entry in history if entry.sampling and not entry.label]
    if not drawn or history.ordinary or Payments(ledger, Sampling.from_state(dict(drawn[-1]))).unpaid(history):
        raise ValueError(
            f"{path} is not the model that this run released: {ledger.path} has not paid for its training. Put back "
            "release/ as this run left it."
        )


def go_on(run: Run, model: Any) -> Any:
    """The model; on a further day it goes on from the released one, of whose tables the rows of known items stay."""
    if run.checkpoint.earlier is None:
        return model
    before, rows = released_model(run), 1 + len(run.checkpoint.earlier.items)
    # A day that was cut off after its model was written may have had rows of other items at the end.
    kept = dict.fromkeys((table.embeddings.path for table in before.item_tables()), range(rows))
    return before.grow_into(model, kept=kept, replaced=[each.path for each in before.frozen_of_items()])


def uses_before_training(run: Run, ledger: Any) -> list[tuple[str, Entry]]:
    """(id, entry) of every use of the log that a training has before its first step: items, and popularity or sums."""
    if ledger is None:  # of a two-tower
        return [(use.id, use.entry) for use in map(Use.of, run.budget.before_training(PRIOR))]
    # The ids of the payments: the entries are receipts.
    paid_for = [paid for paid in ledger.paid if not paid.steps and not isinstance(paid.event, NoOpDpEvent)]
    return [(paid.id, Entry(paid.event, paid.attempts, label=paid.label)) for paid in paid_for]


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


@contextlib.contextmanager
def refusals_as_wrong_arguments() -> Iterator[None]:
    """Raises what a step refuses, or has no memory for, as a `ValueError`."""
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError) as problem:
        raise ValueError(problem.message) from problem


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
    days = run.days_field(run.days(begins_with(name))) if leaves else {}
    said = {"Guarantee": fields.pop("Guarantee"), **days, **fields}
    if leaves:
        said |= {"Public": f"{run.public_numbers}; of those that train, {fields['Public']}", "Covers": _COVERS}
    return dataclasses.replace(
        made, epsilon=accountant.epsilon(), statement=Statement(said), noise_multiplier=run.checkpoint.noises[name]
    )


def trained(
    name: str, run: Run, model: Any, optimizer: keras.optimizers.Optimizer, batches_from: Callable[[int], Any]
) -> MadeRecommender:
    """Trains and accounts in this process; `batches_from` is a function from the steps made to the batches to come."""
    settings, checkpoint = run.settings, run.checkpoint
    model.compile(optimizer=optimizer)
    ledger = run.ledger(name) if names.named(name).claims_epsilon else None
    accountant, within = accounting(name, model.optimizer, run, ledger)
    curve, batches = _Curve(run, name, accountant), batches_from(0)
    callbacks: list[keras.callbacks.Callback] = [curve, *within]  # so that a budget does not call the last step its end
    # A training that no ledger pays for, and that was cut off, begins anew: nothing of it is released.
    if accountant is not None and (ledger is not None or not within):
        model.prepare(batches.element_spec)
        checkpoint = TrainingCheckpoint(checkpoint.training_folder(name), checkpoint.every, accountant)
        resumed = checkpoint.resume(model)
        curve.step = resumed.step if resumed else 0
        if resumed and settings.learning_rate is not None:  # which --resume may change; the checkpoint has the first
            model.optimizer.learning_rate = settings.learning_rate
        batches = batches_from(curve.step)
        callbacks.append(checkpoint)
    left, a_report = steps_left(settings, curve.step, within), -(-settings.steps // EVALUATIONS)
    for budget in within:  # so that a block pays for no more than these, which a crash would lose
        budget.steps = budget.accountant.steps + left
    curve.last, board = curve.step + left, run.folder.private / "tensorboard"
    callbacks.append(keras.callbacks.TensorBoard(str(board / name), write_graph=False))
    try:
        if left:  # the arguments of `fit` are the same however many these are
            with warnings.catch_warnings(), refusals_as_wrong_arguments():
                warnings.filterwarnings("ignore", ".* is not private", UserWarning)  # the peers' names say so
                model.fit(
                    batches, steps_per_epoch=a_report, epochs=-(-settings.steps // a_report), callbacks=callbacks,
                    verbose=run.show.verbose,
                )  # fmt: skip
    finally:
        if accountant is not None:
            accountant.give_back_unused()
        only_for_owner(board)
    if curve.step < settings.steps:
        run.show.note(f"{curve.step} of {settings.steps} steps were made: no more fit into the budget")
    return with_costs(MadeRecommender(model, model, steps=curve.step), name, accountant, run)
