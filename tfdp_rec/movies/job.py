"""The main job: watch timelines to a private recommender, with its peers beside it.

    timelines -> 80% of users train, 20% test -> private sums of the training users -> popularity counted under DP
    -> for each two-tower: train, account, test -> one private recommender exported

The privacy unit is a user. `SpectralRecommender` is made of two sums to which each user gives at most 1. For two-towers
users are Poisson-sampled, and a sampled user gives one example, a random movie of their timeline as label and the 20
before it as context.

*One ε a contestant.* Each private one has the whole budget and a statement of its own, about itself alone, on the same
users. So one of them leaves the run, chosen by name (`movies.contestants`), and nothing of the others is in the folder
but how they tested.

*Who trains* is drawn from all users, whatever they have watched: were users without movies left out first, one user's
movies would have a say in who the others are.

*Popularity prior* of the two-towers. The movies are counted once by `private_counts`, told that a typical user has 20
movies. What comes out is a public prior; its budget is in each two-tower's accountant.

*Going on.* A run that is kept (`movies.kept`) pays in a ledger before it looks at the data, and writes checkpoints.
What was interrupted goes on with the prior and the noise that it began with. Steps that a crash cut off are made again,
and stay paid for: the budget may then end before the last step.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable
from typing import Any

import dp_accounting
import keras
import numpy as np

from tfdp_rec import mechanisms
from tfdp_rec.callbacks import PrivacyBudget, TrainingCheckpoint
from tfdp_rec.data import NextItemExamples, PoissonSampling, Timelines
from tfdp_rec.datasets.histories import Catalogue, Histories
from tfdp_rec.models import TwoTower
from tfdp_rec.movies import contestants, private_sums, report
from tfdp_rec.movies.kept import Asked, RunCheckpoint
from tfdp_rec.movies.run_folder import RunFolder
from tfdp_rec.movies.settings import Settings
from tfdp_rec.movies.tested import KS, Tests, everybody_the_same
from tfdp_rec.movies.trained import Trained, measured_record
from tfdp_rec.privacy import Accountant, calibrate_noise, epsilon_of, private_counts
from tfdp_rec.privacy.counts import Counted
from tfdp_rec.spectral import SpectralRecommender

_NEGATIVES = 4000  # where there are so many movies
_TYPICAL = 20  # movies of a user: what the popularity prior counts on
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
    sampling: PoissonSampling
    delta: float
    prior_event: dp_accounting.DpEvent
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
        noise: σ.
        verbose: Keras' verbosity.
        kept: where checkpoints and ledgers are; None for neither.
    """

    problem: Problem
    settings: Settings
    folder: RunFolder
    noise: float
    verbose: int
    kept: RunCheckpoint | None = None


def noisy_popularity(timelines: Timelines, users: np.ndarray, noise_multiplier: float) -> Counted:
    """Popularity of each movie, up to scale, under DP, all of it positive; and what that cost.

    Args:
        timelines: of all users.
        users: whose timelines to count.
        noise_multiplier: σ_p.
    """
    watched, catalogue = Histories.of_timelines(timelines, users), Catalogue(timelines.movie_ids)
    counts, event = private_counts(watched, catalogue, noise_multiplier=noise_multiplier, typical=_TYPICAL)
    # Movies that the noise hides share what is left of the noise above zero, about 0.4 of its standard deviation.
    return Counted(np.maximum(counts, 0.0) + 0.25 * noise_multiplier + 0.1, event)


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
    sampling = PoissonSampling(len(train), settings.batch_size, unit="user")
    delta = settings.delta if settings.delta is not None else min(1e-6, 1.0 / len(train))
    negatives = settings.negatives or min(_NEGATIVES, timelines.num_movies)
    event = dp_accounting.GaussianDpEvent(settings.prior_noise)
    tests = Tests(NextItemExamples(timelines, test, settings.history, negatives), settings.seed)
    return Problem(timelines, train, tests, sampling, delta, event, negatives)


def with_prior(problem: Problem, settings: Settings, kept: RunCheckpoint | None) -> Problem:
    """Counts popularity under DP, or takes the counts that were paid for.

    Args:
        problem: the data.
        settings: of the job.
        kept: where the run is kept.
    """

    def count() -> np.ndarray:
        return noisy_popularity(problem.timelines, problem.train, settings.prior_noise).values

    prior = kept.prior(settings, problem.sampling, *problem.spent[0], count) if kept else count()
    return dataclasses.replace(problem, prior=prior)


def with_sums(
    problem: Problem, settings: Settings, kept: RunCheckpoint | None, verbose: int = 0
) -> SpectralRecommender | None:
    """Makes the private recommender of sums, or takes the one that was made and paid for; None if nobody asked for it.

    Args:
        problem: the data.
        settings: of the job.
        kept: where the run is kept.
        verbose: 0 prints nothing, 1 shows how far it is.
    """
    if contestants.spectral.name not in settings.mechanisms:
        return None
    if verbose and not (kept and kept.asked):
        print(f"Making private sums of {len(problem.train)} users ...", flush=True)
    recommender = private_sums.unfitted(problem.timelines, settings.epsilon, problem.delta, settings.recency)

    def fit() -> SpectralRecommender:
        return recommender.fit(Histories.of_timelines(problem.timelines, problem.train), int(verbose == 1))

    if kept is None:
        return fit()
    return kept.sums(contestants.spectral.name, problem.sampling, recommender.event, private_sums.LABEL, fit)


def noise_for(problem: Problem, settings: Settings) -> float:
    """The least noise for the budget, unless it was given."""
    if settings.noise_multiplier is not None:
        return settings.noise_multiplier
    return calibrate_noise(settings.epsilon, problem.delta, problem.sampling, settings.steps, spent=problem.spent)


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


def optimizer_for(mechanism: str, settings: Settings, noise_multiplier: float) -> keras.optimizers.Optimizer:
    """A fresh optimizer."""
    if mechanism == mechanisms.sgd.name:
        # It does not clip: at the private rate it diverges. Its own best rate, found the same way.
        return keras.optimizers.SGD(settings.sgd_learning_rate)
    if mechanism == contestants.adam.name:
        return keras.optimizers.Adam(settings.adam_learning_rate)
    return mechanisms.named(mechanism).optimizer(
        settings.learning_rate,
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
    model.compile(optimizer=optimizer_for(mechanism, settings, run.noise))
    examples = NextItemExamples(problem.timelines, problem.train, settings.history, problem.negatives)
    batches = problem.sampling.batches(examples.fetch, shared=examples.shared)
    ledger = kept.ledger(mechanism, problem.sampling) if kept else None
    accountant, within = accounting(mechanism, model.optimizer, problem, settings, ledger)
    curve = _Curve(run.folder, mechanism, problem.tests, accountant)
    callbacks: list[keras.callbacks.Callback] = [*within, curve]
    if kept and accountant is not None:
        model.prepare(batches.element_spec)
        checkpoint = TrainingCheckpoint(kept.folder(mechanism), kept.every, accountant)
        resumed = checkpoint.resume(model)
        curve.step = resumed.step if resumed else 0
        callbacks.append(checkpoint)
    try:
        _fit(model, batches, callbacks, curve, run, steps_left(settings, curve.step, within))
    finally:
        if accountant is not None:
            accountant.close()
    speed = curve.timed / curve.seconds if curve.seconds else None
    trained = Trained(model, problem.tests.measured(model), steps=curve.step, steps_per_second=speed)
    return trained.accounted(accountant, run.noise)


def _fit(model: TwoTower, batches: Any, callbacks: list[Any], curve: _Curve, run: Run, left: int) -> None:
    """Makes the steps that are left; what fit is told is the same however many these are."""
    if not left:
        return
    curve.last = curve.step + left
    steps, a_report = run.settings.steps, -(-run.settings.steps // run.settings.evaluations)
    tensorboard = keras.callbacks.TensorBoard(str(run.folder / "tensorboard" / curve.mechanism), write_graph=False)
    model.fit(
        batches, steps_per_epoch=a_report, epochs=-(-steps // a_report), callbacks=[*callbacks, tensorboard],
        verbose=run.verbose,
    )  # fmt: skip


def popularity_results(problem: Problem) -> list[dict[str, Any]]:
    """Recommends everybody the most watched movies: counted exactly, and as the two-towers' prior has them."""
    watched = np.concatenate([problem.timelines[user] for user in problem.train])
    exact = np.bincount(watched, minlength=problem.timelines.num_movies + 1)[1:]
    costs = {contestants.popularity: None, contestants.dp_popularity: epsilon_of(problem.prior_event, problem.delta)}
    return [
        {
            "mechanism": who.name,
            **measured_record(problem.tests.measured(everybody_the_same(counts))),
            **{"steps": None, "steps_per_second": None, "epsilon": epsilon},
        }
        for (who, epsilon), counts in zip(costs.items(), (exact, problem.prior))
    ]


Train = Callable[[str, Run], Trained]


def run(
    timelines: Timelines,
    asked: Asked,
    out: str | None = None,
    verbose: int = 1,
    train: Train = train_one,
    kept: RunCheckpoint | None = None,
) -> RunFolder:
    """Trains every mechanism asked for, and writes the run folder.

    Args:
        timelines: of all users.
        asked: what to train and how.
        out: the folder; made from the time if None.
        verbose: Keras' verbosity; 0 prints nothing.
        train: trains one mechanism: in this process, or on a cluster.
        kept: where the run is kept, to be gone on with.

    Raises:
        ValueError: for settings that do not fit the data, or other data than a run was begun with.
        FileExistsError: if `out` holds a run.
    """
    settings, goes_on = asked.settings, kept is not None and kept.asked is not None
    problem = prepare(timelines, settings)
    if kept:
        kept.refuse_other_data(timelines)
    noise = kept.noise if kept and goes_on else noise_for(problem, settings)
    folder = RunFolder.reopened(kept.out) if kept and goes_on else RunFolder(out)
    sums = with_sums(problem, settings, kept, verbose)
    problem = with_prior(problem, settings, kept)
    if kept and not goes_on:
        kept.begin(asked, folder.path, noise, timelines)
    config = {
        **dataclasses.asdict(settings),
        "when": datetime.datetime.now().isoformat(timespec="minutes"),
        "users": timelines.num_users,
        "movies": timelines.num_movies,
        "events": timelines.num_events,
        "train_users": len(problem.train),
        "delta": problem.delta,
        "negatives": problem.negatives,
        "noise_multiplier": noise,
    }
    folder.write_json("config.json", config)
    _train_all(Run(problem, settings, folder, noise, verbose, kept), config, _all_kinds(train, sums))
    return folder


def _all_kinds(train: Train, sums: SpectralRecommender | None) -> Train:
    """What makes a contestant of whatever kind.

    Args:
        train: makes the two-towers.
        sums: the private recommender of sums, made already.
    """

    def make(name: str, run: Run) -> Trained:
        problem = run.problem
        if name == contestants.exact.name:
            peer = private_sums.without_noise(problem.timelines, problem.train, problem.delta, run.settings.recency)
            return private_sums.tested(peer, name, problem.tests)
        if sums is not None and name == contestants.spectral.name:
            return private_sums.tested(sums, name, problem.tests)
        return train(name, run)

    return make


def _train_all(run: Run, config: dict[str, Any], train: Train) -> None:
    """Makes what is not done yet, releases one recommender, and reports."""
    results, statements = popularity_results(run.problem), dict[str, str]()
    released = contestants.released(run.settings.mechanisms, run.settings.export)
    for mechanism in run.settings.mechanisms:
        done = run.kept.finished(mechanism) if run.kept else None
        if done is None or mechanism == released:
            if run.verbose:
                print(f"\n== {report.label(mechanism)}", flush=True)
            trained = train(mechanism, run)
            done = done or {"record": trained.record(mechanism), "statement": trained.statement}
            if run.kept:
                run.kept.finish(mechanism, done)
            if mechanism == released:
                model = trained.model
        results.append(done["record"])
        if done["statement"]:
            statements[mechanism] = done["statement"]
    run.folder.write_json("results.json", results)
    _release(run.folder, run.problem, run.settings, released, model)
    report.write(run.folder, {**config, "released": released}, results, statements)
    if run.verbose:
        print("\n" + report.as_text(report.table(results)))
        warning = "" if contestants.named(released).claims_epsilon else ": not private, no epsilon holds for it"
        path = run.folder.path
        print(f"\n{path}/report.md   {report.label(released)} in {path}/servable{warning}")


def _release(folder: RunFolder, problem: Problem, settings: Settings, name: str, model: Any) -> None:
    """Saves and exports one recommender, with the titles beside it."""
    model.save(str(folder / ("recommender.npz" if isinstance(model, SpectralRecommender) else "model.keras")))
    model.export(str(folder / "servable"), k=settings.top_k)
    titles = problem.timelines.titles
    folder.write_json("titles.json", {str(i): t for i, t in zip(problem.timelines.movie_ids.tolist(), titles)})
    folder.write_text("servable.txt", f"{name}\n")
