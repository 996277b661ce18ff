"""What is trained: two-towers, and a model that begins with the answers of private sums; in this process.

**Two-towers.** All start from the same weights and the same released popularity. Users give one example each time they
are in a batch: an item as label, and 20 others as context. Each private one has the noise that makes all of its steps,
with finding items and the prior, cost the run's budget: independent noise, or noise planned over the order that users
stand in.

**From sums**: `SASRec.upon` without a transformer: a query is the sum of the latest items' rows. The sums are of its
own, released for 0.8 of ε, and the steps of LazyDPSGD have the rest. Users give a window of their items each time they
are in a batch, with a label at each place, all of them one gradient that is clipped as one.

A training goes on from its last checkpoint; on a further day, from the tables of the released model, and upon sums that
have that day's added. All of its steps are paid for in the recommender's ledger, beside what was released for it
before; the history that the model keeps has both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec import mechanisms
from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.entries import Entries, Entry, Use
from tfdp_rec.core.claim.events import ComposedDpEvent, GaussianDpEvent, NoOpDpEvent, SelfComposedDpEvent
from tfdp_rec.core.claim.ledger import Ledger
from tfdp_rec.core.claim.orders import FixedOrder
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.core.claim.spending import Payments
from tfdp_rec.core.claim.statement import Statement, round_up
from tfdp_rec.core.ground.files import Path, restrict_to_owner
from tfdp_rec.core.mechanism.correlated_noise import INDEPENDENT, Correlation, optimised_correlation
from tfdp_rec.core.mechanism.noise_walk import noise_walk
from tfdp_rec.core.mechanism.rules import Recursion
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.next_item import NextItemExamples
from tfdp_rec.job.budget import COMPARED_SUMS, LABELS, PRIOR, count_days, release_file
from tfdp_rec.job.evaluation import HISTORY, KS
from tfdp_rec.job.recommenders import comparison, names
from tfdp_rec.job.run_folder import MODEL
from tfdp_rec.job.run_state import Job, MadeRecommender, Material
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.models import SASRec, TwoTower
from tfdp_rec.models.own_catalogue import load_model
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.sums.private_metrics import LABEL as METRICS
from tfdp_rec.training.privacy_budget import PrivacyBudget
from tfdp_rec.training.private_plan import PrivatePlan
from tfdp_rec.training.training_checkpoint import TrainingCheckpoint

_ITEMS, _MOST_ITEMS = 100, 10**5  # where they are yet to be found; of a public list
EVALUATIONS = 6  # tests during a training, the last of them at its end
_RATES, _NOISE_IN_A_ROW = dict.fromkeys(names.UPON_SUMS, 100.0), 0.8
_USUAL_RATE = 25.0  # of the main job: 4,096 users a batch, 600 steps, ε = 8, width 32, clip 1
# Without privacy, each its best. SGD does not clip: at the private rate it diverges.
_PEERS = {names.adam.name: (keras.optimizers.Adam, 0.005), mechanisms.sgd.name: (keras.optimizers.SGD, 16.0)}
_COVERS = (
    "the folder release/: servable/ and all that it answers, model.keras, the list of items in them, released.npz, "
    "ledger.jsonl, card.md and this statement"
)


def make_two_tower(settings: JobSettings, num_items: int, prior: Any) -> TwoTower:
    """The two-tower of a job."""
    return TwoTower(
        np.arange(1, num_items + 1), prior=prior, history_length=HISTORY, ks=KS, width=settings.width,
        hidden=settings.hidden, name="two_tower",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Training:
    """One recommender to be trained: what its model begins with, and the examples of its steps."""

    name: str
    job: Job
    material: Material

    @property
    def release(self) -> Any:
        """What was released for it before its steps: popularity of each item, or private sums."""
        return self.material.releases[release_file(self.name)]

    @property
    def sampling(self) -> Sampling:
        """How users come into batches."""
        assert self.material.users.sampling is not None
        return self.material.users.sampling

    @property
    def ledger(self) -> Ledger | None:
        """What its steps are paid in, if it claims an ε."""
        return self.job.state.ledgers[self.name] if names.look_up(self.name).claims_epsilon else None

    def make_model(self) -> Any:
        """A model over item numbers, the same for every mechanism."""
        settings = self.job.settings
        keras.utils.set_random_seed(settings.seed)
        if names.is_two_tower(self.name):
            return make_two_tower(settings, self.material.log.num_items, self.release)
        # What the sums have cost comes into the model's history with the ledger's other payments.
        return SASRec.upon(
            self.release, spent=(), width=settings.width, history_length=HISTORY, num_blocks=0, name="upon_sums"
        )  # fmt: skip

    def first_model(self) -> Any:
        """What it begins with: on a further day the released model, of whose tables the rows of known items stay."""
        model, earlier = self.make_model(), self.job.state.earlier
        if earlier is None:
            return model
        before, rows = load_released_model(self.job), 1 + len(earlier.items)
        # A day that was cut off after its model was written may have had rows of other items at the end.
        kept = dict.fromkeys((table.embeddings.path for table in before.item_tables()), range(rows))
        return before.grow_into(model, kept=kept, replaced=[each.path for each in before.constants_of_items()])

    def optimizer(self) -> keras.optimizers.Optimizer:
        """A fresh optimizer."""
        if self.name in _PEERS:
            kind, rate = _PEERS[self.name]
            return kind(rate)
        settings, noise = self.job.settings, self.job.state.noises[self.name]
        correlation = correlation_for(self.name, settings, self.sampling)
        mechanism = mechanisms.named(self.name) if names.is_two_tower(self.name) else mechanisms.lazy_dp_sgd
        return mechanism.optimizer(
            learning_rate_for(settings, self.name, noise, correlation), noise_multiplier=noise,
            l2_norm_clip=settings.clip_of(self.name), expected_batch_size=self.sampling.expected_batch_size,
            **({} if correlation is None else {"correlation": correlation}),
        )  # fmt: skip

    def examples(self) -> NextItemExamples:
        """The training users' examples, or windows."""
        log, users = self.material.log, self.material.users
        negatives = self.job.settings.negatives_of(self.name, log.num_items)
        if names.is_two_tower(self.name):
            return NextItemExamples(log, users.train, HISTORY, negatives)
        return NextItemExamples(
            log, users.train, HISTORY, negatives, every_place=True, repeats=False,
            released_counts=self.release.popularity,
        )  # fmt: skip

    def batches(self, made: int) -> Any:
        """Batches of the examples; in an order, from the step on that is next."""
        examples = self.examples()
        position: dict[str, Any] = {"position": made} if isinstance(self.sampling, FixedOrder) else {}
        return self.sampling.batches(examples.fetch, shared=examples.shared, present=examples.present, **position)

    # What it costs.

    def uses_before(self) -> list[tuple[str, Entry]]:
        """(id, entry) of every use of the log that it has before its first step: items, and popularity or sums."""
        if self.ledger is None:  # a two-tower
            uses = [Use.of((event, LABELS[file])) for file, event in self.job.budget.releases(PRIOR).items()]
            return [(use.id, use.entry) for use in uses]
        # The ids of the payments: the entries are receipts.
        paid_for = [paid for paid in self.ledger.paid if not paid.steps and not isinstance(paid.event, NoOpDpEvent)]
        return [(paid.id, Entry(paid.event, paid.attempts, label=paid.label)) for paid in paid_for]

    def make_accountant(self, optimizer: Any, pays: bool = True) -> tuple[Accountant | None, list[PrivacyBudget]]:
        """Its accountant, which pays in the ledger or leaves that to others, and what keeps its budget."""
        if self.name in _PEERS:
            return None, []
        for id, entry in self.uses_before():  # part of the model's saved history
            optimizer.privacy_history.add_entry(entry, id)
        ledger = self.ledger if pays else None
        accountant = Accountant(optimizer.dp_event(), self.sampling, self.job.budget.delta, ledger=ledger)
        accountant.follow(optimizer)
        return accountant, [PrivacyBudget(accountant, self.job.settings.epsilon)] if self.ledger is not None else []

    def steps_to_make(self, made: int, within: list[PrivacyBudget]) -> int:
        """Number of steps still to be made: those that are missing, as far as the budget allows."""
        missing = max(0, self.job.settings.steps - made)
        for budget in within:
            accountant = budget.accountant
            missing = min(missing, accountant.max_steps(budget.target_epsilon) - accountant.steps)
        return missing

    def add_costs(self, made: MadeRecommender, accountant: Accountant | None) -> MadeRecommender:
        """What was trained, with what its steps cost."""
        if accountant is None:
            return made
        job, budget = self.job, self.job.budget
        leaves = self.name == job.settings.released_name and self.ledger is not None
        fields = dict(accountant.statement().fields)
        said = {"Guarantee": fields.pop("Guarantee")}
        if leaves:
            said |= budget.days_field(count_days(job.chain, release_file(self.name)), is_trained=True)
        said |= fields
        if leaves:
            public = f"{budget.public_numbers(len(job.log))}; of those that train, {fields['Public']}"
            said |= {"Public": public, "Covers": _COVERS}
        if self.name == names.auto.name:
            said |= {"Compared": comparison.words(job)}
        return dataclasses.replace(
            made, epsilon=accountant.epsilon(), statement=Statement(said), noise_multiplier=job.state.noises[self.name]
        )


# The released model, on a further day.


def load_released_model(job: Job) -> Any:
    """The model that the days before have released. A day asks for it before it pays for anything."""
    assert job.state.earlier is not None
    path = job.state.folder.release / MODEL
    if not path.is_file():
        raise FileNotFoundError(f"{path} is gone, and this day goes on from it: put it back from a copy of release/.")
    before = load_model(path, compile=False)
    if before.item_tables()[0].embeddings.shape[0] < 1 + len(job.state.earlier.items):
        raise ValueError("model.keras has fewer items than released.npz: put back release/ as this run left it.")
    if names.look_up(job.settings.released_name).claims_epsilon:
        refuse_unpaid(before, job.chain, path)
    return before


def refuse_unpaid(model: Any, ledger: Ledger, path: Path) -> None:
    """Refuses a model whose private training the run's ledger has not paid for, as another run's."""
    history = model.saved_history() or Entries()
    drawn = [entry.sampling for entry in history if entry.sampling and not entry.label]
    if not drawn or history.ordinary or Payments(ledger, Sampling.from_state(dict(drawn[-1]))).find_unpaid(history):
        raise ValueError(
            f"{path} is not the model that this run released: {ledger.path} has not paid for its training. Put back "
            "release/ as this run left it."
        )


# Noise, and rates.


def decide_noises(job: Job) -> dict[str, float]:
    """σ of each training that comes to the budget, with the days before and those that are left."""
    settings, budget, sampling = job.settings, job.budget, job.users.sampling
    assert sampling is not None
    earlier = job.chain.paid if job.state.earlier else ()
    past = [(SelfComposedDpEvent(each.event, each.attempts), "earlier days") for each in earlier]
    left = max(1, budget.days - count_days(job.chain, release_file(settings.released_name)))
    spent = dict[str | None, list[Any]]()
    for file in filter(None, {release_file(name) for name in settings.mechanism if names.is_trained(name)}):
        spent[file] = past + [
            (event, LABELS[each]) for each, event in budget.releases(file).items()
            for _ in range(budget.costly_days(job.chain, LABELS[each], left))
        ] + [(event, METRICS) for event in budget.figures]  # fmt: skip
    if COMPARED_SUMS in spent:
        spent[COMPARED_SUMS].append((budget.comparison, comparison.LABEL))
    noises = noises_for(settings, sampling, budget.delta, spent, left)
    if settings.noise_multiplier is None or isinstance(sampling, FixedOrder):
        return noises
    for name in filter(lambda name: names.look_up(name).claims_epsilon, noises):
        step = sampling.compose(GaussianDpEvent(noises[name]), 1)
        besides = [event for event, _ in spent[release_file(name)]]
        cost = epsilon_of(ComposedDpEvent([*besides, step]), budget.delta)
        if cost > budget.epsilon:
            least = "one step" if sampling.steps_at_once == 1 else f"an epoch of {sampling.steps_at_once} steps"
            raise ValueError(
                f"--noise-multiplier {noises[name]:g} is too small for {least} of {name}: epsilon would be "
                f"{round_up(cost):g} of {budget.epsilon:g}. Nothing was paid: give more, or leave it out."
            )
    return noises


def noises_for(
    settings: JobSettings, sampling: Sampling, delta: float, spent: Mapping[Any, list[Any]], days: int = 1
) -> dict[str, float]:
    """The least noise of each training that keeps the steps of the remaining days, and what is spent, in the budget."""
    noises, known = dict[str, float](), dict[Any, float]()  # by what decides it
    for name in filter(names.is_trained, settings.mechanism):
        file, correlation = release_file(name), correlation_for(name, settings, sampling)
        if settings.noise_multiplier is None and (file, correlation) not in known:
            known[file, correlation] = PrivatePlan(
                sampling=sampling, delta=delta, steps=days * settings.steps, epsilon=settings.epsilon,
                spent=spent[file], correlation=correlation,
            ).noise_multiplier  # fmt: skip
        noises[name] = settings.noise_multiplier or known[file, correlation]
    return noises


_find_correlation = functools.cache(optimised_correlation)


def correlation_for(name: str, settings: JobSettings, sampling: Sampling) -> Correlation | None:
    """What the noise of a mechanism takes back of what it added before; None if nothing."""
    if not names.is_planned(name) or not isinstance(sampling, FixedOrder):
        return None
    participations = sampling.participations(settings.steps)
    return _find_correlation(settings.steps, sampling.separation, participations=participations)


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


# Training.


@contextlib.contextmanager
def refusals_as_wrong_arguments() -> Iterator[None]:
    """Raises what a step refuses, or has no memory for, as a `ValueError`."""
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError) as problem:
        raise ValueError(problem.message) from problem


class _Curve(keras.callbacks.Callback):
    """Ends the last epoch with the last step; writes a line of exact metrics an epoch, where these are asked for."""

    def __init__(self, training: Training, accountant: Accountant | None):
        super().__init__()
        self.training, self.accountant = training, accountant
        self.step, self.last = 0, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step == self.last:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        job, tests = self.training.job, self.training.material.tests
        job.show.note(f"{self.step:,} of {job.settings.steps:,} steps")
        if tests is None:
            return
        record = {"recommender": self.training.name, "step": self.step, "loss": float((logs or {})["loss"])}
        record |= {name: mean.value for name, mean in tests.measure(self.model).items()}
        if self.accountant is not None:
            record["epsilon"] = self.accountant.epsilon()
        job.state.folder.append(record)


def train_here(training: Training) -> MadeRecommender:
    """Trains and accounts in this process."""
    job, settings, state = training.job, training.job.settings, training.job.state
    model = training.first_model()
    model.compile(optimizer=training.optimizer())
    if training.name == names.auto.name:  # before the steps, which may spend all else
        comparison.pay(job)
    accountant, within = training.make_accountant(model.optimizer)
    curve, batches = _Curve(training, accountant), training.batches(0)
    callbacks: list[keras.callbacks.Callback] = [curve, *within]  # so that a budget does not call the last step its end
    # A training that no ledger pays for, and that was cut off, begins anew: nothing of it is released.
    if accountant is not None and (training.ledger is not None or not within):
        model.prepare(batches.element_spec)
        checkpoint = TrainingCheckpoint(state.training_folder(training.name), state.every, accountant)
        resumed = checkpoint.resume(model)
        curve.step = resumed.step if resumed else 0
        if resumed and settings.learning_rate is not None:  # which --resume may change; the checkpoint has the first
            model.optimizer.learning_rate = settings.learning_rate
        batches = training.batches(curve.step)
        callbacks.append(checkpoint)
    left, a_report = training.steps_to_make(curve.step, within), -(-settings.steps // EVALUATIONS)
    for budget in within:  # so that a block pays for no more than these, which a crash would lose
        budget.steps = budget.accountant.steps + left
    curve.last, board = curve.step + left, state.folder.confidential / "tensorboard"
    if settings.confidential:
        callbacks.append(keras.callbacks.TensorBoard(str(board / training.name), write_graph=False))
    try:
        if left:  # the arguments of `fit` are the same however many these are
            with warnings.catch_warnings(), refusals_as_wrong_arguments():
                warnings.filterwarnings("ignore", ".* is not private", UserWarning)  # the peers' names say so
                # Keras would print losses.
                epochs = -(-settings.steps // a_report)
                model.fit(batches, steps_per_epoch=a_report, epochs=epochs, callbacks=callbacks, verbose=0)
    finally:
        if accountant is not None:
            accountant.give_back_rest()
        if settings.confidential:
            restrict_to_owner(board)
    if curve.step < settings.steps:
        job.show.note(f"{curve.step} of {settings.steps} steps were made: no more fit into the budget")
    made = MadeRecommender(model, model, steps=curve.step)
    if training.name == names.auto.name:
        made = comparison.choose(job, training.material, training.release, made)
    return training.add_costs(made, accountant)


# Trainings tried out, before anything is paid.


def rehearse(job: Job) -> None:
    """Raises what a training that is still to be done would raise at its first step, or for want of memory."""
    # Each makes its model, its optimizer, and one step on nothing of the log: a batch is drawn as in training, and all
    # users in it are one invented user.
    ids = range(1, 1 + (min(len(job.public), _MOST_ITEMS) if job.public else _ITEMS))
    rows = {"user": [0, 0], "item": [1, 2], "time": [0, 1]}
    invented = Interactions.read(rows, user="user", item="item", time="time", items=ids)
    users = dataclasses.replace(job.users, train=np.zeros(1, np.int64), test=np.zeros(0, np.int64))
    for name in filter(names.is_trained, job.settings.mechanism):
        if job.state.result(name) is None:
            release = np.ones(len(ids)) if names.is_two_tower(name) else _make_sums(job, invented, name)
            _try_step(Training(name, job, Material(invented, users, {release_file(name): release}, None)))


def _make_sums(job: Job, log: Interactions, name: str) -> SpectralRecommender:
    return SpectralRecommender(
        log.catalogue.ids, None, job.budget.delta, noise_multiplier=job.budget.noise(str(release_file(name))),
        ordered=True, recency=job.settings.recency, users_private=True,
    ).fit(log, verbose=0)  # fmt: skip


def _try_step(training: Training) -> None:
    model, examples = training.make_model(), training.examples()
    model.compile(optimizer=training.optimizer())
    batches = training.sampling.batches(
        lambda units: examples.fetch(np.zeros(len(units), np.int64)), shared=examples.shared
    )  # fmt: skip
    with warnings.catch_warnings(), refusals_as_wrong_arguments():
        warnings.simplefilter("ignore", UserWarning)  # that nothing is counted, which nobody is to hear
        model.fit(batches, steps_per_epoch=1, verbose=0)
