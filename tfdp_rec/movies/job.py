"""The main job: watch timelines to a private recommender, with its peers beside it.

    timelines -> 80% of users train, 20% test -> private sums of the training users -> popularity counted under DP
    -> for each two-tower: train, account, test -> one private recommender exported

The privacy unit is a user. `SpectralRecommender` is made of two sums to which each user gives at most 1. For two-towers
users are Poisson-sampled, or stand in one shuffled order (`--sampling`), and give one example each time, a random movie
of their timeline as label and the 20 before it as context.

*One ε a contestant.* Each private one has the whole budget and a statement of its own, about itself alone, on the same
users. So one of them leaves the run, chosen by name (`movies.contestants`), and nothing of the others is in the folder
but how they tested.

*Popularity prior* of the two-towers. The movies are counted once by `private_counts`, told that a typical user has 20
movies. What comes out is a public prior; its budget is in each two-tower's accountant.

*Going on.* A run that is kept (`movies.kept`) pays in a ledger before it looks at the data, and writes checkpoints.
What was interrupted goes on with the prior and the noise that it began with. Steps that a crash cut off are made again,
and stay paid for: the budget may then end before the last step.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp_rec.data import Timelines
from tfdp_rec.datasets.histories import Catalogue, Histories
from tfdp_rec.files import replacing
from tfdp_rec.movies import contestants, laid_out, private_sums, report
from tfdp_rec.movies.kept import Asked, RunCheckpoint
from tfdp_rec.movies.larger import step_times
from tfdp_rec.movies.problem import Problem, Run, prepare
from tfdp_rec.movies.settings import Settings
from tfdp_rec.movies.tested import everybody_the_same
from tfdp_rec.movies.trained import Trained, measured_record
from tfdp_rec.movies.two_towers import noises_for, train_one
from tfdp_rec.pricing.composition import epsilon_of
from tfdp_rec.run_folder import CONFIG, PRIVATE, RELEASE, SERVABLE, STATEMENT, RunFolder
from tfdp_rec.serving.own_ids import writing_a_model
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.sums.counts import Counted, private_counts

_TYPICAL = 20  # movies of a user: what the popularity prior counts on


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


def with_prior(problem: Problem, settings: Settings, kept: RunCheckpoint | None) -> Problem:
    """Counts popularity under DP, or takes the counts that were paid for.

    Args:
        problem: the data.
        settings: of the job.
        kept: where the run is kept.
    """

    def count() -> np.ndarray:
        return noisy_popularity(problem.timelines, problem.train, problem.prior_event.noise_multiplier).values

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
    noises = kept.noises if kept and goes_on else noises_for(problem, settings)
    folder = RunFolder.reopened(kept.out) if kept and goes_on else RunFolder(out)
    laid_out.sweep(folder.path.absolute().parent)
    sums = with_sums(problem, settings, kept, verbose)
    problem = with_prior(problem, settings, kept)
    if kept and not goes_on:
        kept.begin(asked, folder.path, noises, timelines)
    config = {
        **dataclasses.asdict(settings),
        "data": list(asked.source.data),
        "when": datetime.datetime.now().isoformat(timespec="minutes"),
        "users": timelines.num_users,
        "movies": timelines.num_movies,
        "events": timelines.num_events,
        "train_users": len(problem.train),
        "delta": problem.delta,
        "negatives": problem.negatives,
        "noise_multipliers": noises,
    }
    folder.private.write_json(CONFIG, config)
    _train_all(Run(problem, settings, folder, noises, verbose, kept), config, _all_kinds(train, sums))
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
            if mechanism == released:  # at once: what goes wrong with the others does not lose it
                _release(run.folder, run.problem, run.settings, mechanism, trained)
        results.append(done["record"])
        if done["statement"]:
            statements[mechanism] = done["statement"]
    run.folder.private.write_json("results.json", results)
    config = {**config, "released": released}
    report.write(run.folder, config, results, statements)
    seconds = step_times(run.settings, run.problem.timelines.num_movies, run.verbose)
    if seconds:  # after the page is there: large tables may take more memory than there is
        run.folder.private.write_json("step_times.json", seconds)
        report.write(run.folder, config, results, statements, seconds)
    if run.verbose:
        print("\n" + report.as_text(report.table(results)))
        if seconds:
            print("\n" + report.as_text(report.times(seconds)))
        warning = "" if contestants.named(released).claims_epsilon else ": not private, no epsilon holds for it"
        path = run.folder.path
        print(f"\n{path / PRIVATE}/report.html   {report.label(released)} in {path / RELEASE / SERVABLE}{warning}")


def _release(folder: RunFolder, problem: Problem, settings: Settings, name: str, trained: Trained) -> None:
    """Saves and exports one recommender, with the titles and the statement beside it."""
    model, part = trained.model, folder.release
    part.write_text(STATEMENT, trained.statement or report.NO_GUARANTEE)
    model.save(str(part / ("recommender.npz" if isinstance(model, SpectralRecommender) else "model.keras")))
    with replacing(part / SERVABLE) as temporary, writing_a_model(part / SERVABLE):
        model.export(temporary, k=settings.top_k)
    titles = problem.timelines.titles
    part.write_json("titles.json", {str(i): t for i, t in zip(problem.timelines.movie_ids.tolist(), titles)})
    part.write_text("servable.txt", f"{name}\n")
