"""One job: a log to a private recommender that is tested, released, served in the log's own ids, and reported.

    a source's log → grouped by user, on disk → split by a hash of users' ids → items: a public list, or found privately
    → private sums, popularity prior of two-towers → each recommender made and tested → one of them released → a report

*One ε a recommender.* Each private one has the whole budget and a ledger of its own, in which everything is paid for
before the log is looked at for it. So one of them leaves the run, chosen by its name (`recommenders.names`), and of the
others there are only results. Held-out users have a say in which items there are, some of them in what `auto` releases
(`recommenders.comparison`), and in nothing else but the figures of the released one, which are private and paid for in
its ledger (`held_out.py`). Exact figures are made with --confidential alone.

**A further day** (`--continue`) finds the items that are new in it, and adds its sums to those that were released
before. Users stay on their side of the split on all days.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import ComposedDpEvent, GaussianDpEvent, NonPrivateDpEvent
from tfdp_rec.core.claim.statement import Statement, round_up
from tfdp_rec.core.ground.files import replace_atomically
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items, as_kind
from tfdp_rec.job import budget as budgets
from tfdp_rec.job import held_out, report
from tfdp_rec.job.budget import (
    COMPARED_SUMS,
    ITEMS,
    LABELS,
    PRETRAINING_SUMS,
    PRIOR,
    SUMS,
    Budget,
    count_days,
    release_file,
)
from tfdp_rec.job.evaluation import HISTORY, Evaluation, NewItemExamples, same_for_all, users_at_once
from tfdp_rec.job.recommenders import comparison, names, private_sums
from tfdp_rec.job.recommenders.names import is_trained, is_two_tower
from tfdp_rec.job.run_folder import CONFIDENTIAL, CONFIG, MODEL, PRIVATE, RELEASE, SERVABLE, STATEMENT, RunFolder
from tfdp_rec.job.run_state import LOG, Job, MadeRecommender, Material, Progress, ReleasePayment, RunState, WarmStart
from tfdp_rec.job.seats import take_seats
from tfdp_rec.job.settings import ELSEWHERE, JobSettings
from tfdp_rec.job.sources import LogSource, features_of, titles_of
from tfdp_rec.job.users import Users, UserSubset, refuse_other_kind, split_on_spark, split_users, subset_of
from tfdp_rec.serving.own_ids import export, line_breaks
from tfdp_rec.settings import flag
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spectral.rules import MOST_HEAD
from tfdp_rec.sums.private_metrics import Figure
from tfdp_rec.sums.set_union import least_users, private_items
from tfdp_rec.sums.spark import SparkLog, rows_of

if TYPE_CHECKING:
    from tfdp_rec.job.recommenders.training import Training

_UNPROVEN = "training without a guarantee"
_MORE_ITEMS = "give a public list (--items), more users, or a larger --epsilon or --items-epsilon"
_PUBLIC_RESULTS = ("recommender", "steps", "epsilon", "noise_multiplier")
_TEST_USERS = 8000  # at most


def run(
    source: LogSource, state: RunState, verbose: int = 1, train: Callable[[Training], MadeRecommender] | None = None
) -> RunFolder:
    """Does all of a job, or what is not done yet, and writes the run folder; `train` trains elsewhere than here."""
    settings = state.settings
    show = Progress(3 + len(settings.mechanism) + len(_release_files(settings)), verbose)
    if names.look_up(settings.released_name).claims_epsilon:
        show.note(f"the budget of all that is released is epsilon = {settings.epsilon:g} for each user (--epsilon)")
    log = _read_log(source, state, show)
    try:
        job = _prepare(source, state, show, log)
        settings = job.settings
        seated = _take_seats(job)
        items = find_items(job, seated)
        material = _gather(job, items, seated)
        results, statements = _test_popularity(job, material), dict[str, Statement]()
        for name in settings.mechanism:
            done = state.result(name)
            if done is None or name == settings.released_name:
                payment = _pay_for_figures(job) if name == settings.released_name else None  # its statement has it
                recommender = _make(job, material, name, train)
                statement = dict(recommender.statement.fields) if recommender.statement else None
                done = done or {"record": _record(name, recommender, material), "statement": statement}
                state.keep_result(name, done)
                if name == settings.released_name:  # at once: what goes wrong with the others does not lose it
                    released, titles = recommender, _release(job, items, recommender)
                    if payment is not None:
                        _make_figures(job, material, items, payment)
            results.append(done["record"])
            if done["statement"] and name != settings.released_name:
                statements[name] = Statement(done["statement"])
        figures = _write_report(job, items, released, titles, results, statements)
        # Last: where it is, it is whole.
        WarmStart(items, job.chain.mark, None, titles).save(
            state.folder.path, material.releases.get(release_file(settings.released_name))
        )
        _say_end(job, material, titles, figures)
        return state.folder
    finally:
        state.close()
        if isinstance(log, SparkLog):
            log.close()


def _release_files(settings: JobSettings) -> list[str]:
    """The files of what is released before the recommenders are made."""
    files = set(map(release_file, settings.mechanism))
    return [file for file in (SUMS, PRETRAINING_SUMS, COMPARED_SUMS, PRIOR) if file in files]


def _read_log(source: LogSource, state: RunState, show: Progress) -> Any:
    show.begin("reading the log, and grouping it by user")
    rows, columns = source.rows()
    if state.settings.engine:
        log: Any = SparkLog(rows_of(rows), **columns)
    else:
        log = Interactions.read(rows, **columns, folder=state.directory / LOG)
    state.tell_owner(log.summary())
    return log


# What is decided and checked before anything is paid.


def _prepare(source: LogSource, state: RunState, show: Progress, log: Any) -> Job:
    """What the job is about, its ledgers open and the noise of its trainings decided."""
    settings, public = state.settings, source.public_items()
    if names.auto.name in settings.mechanism:
        settings = comparison.resolve(settings, len(log), _delta_of(settings, len(log)), log.ordered)
        if names.auto.name not in settings.mechanism:
            show.note(comparison.WHY_SUMS)
    if isinstance(log, SparkLog):
        users = split_on_spark(log, settings, _TEST_USERS, state.directory / LOG)
    else:
        users = split_users(log, settings)
    if users.sampling is not None:  # whole epochs, where they are paid for as a whole
        asked, together = settings.steps, users.sampling.steps_at_once
        settings = dataclasses.replace(settings, steps=together * max(1, round(asked / together)))
        if settings.steps != asked:
            show.note(f"{settings.steps} steps for --steps {asked}: whole epochs of {together}, as they are paid for")
    _refuse_unfit(settings, log, public)
    private = [name for name in settings.mechanism if names.look_up(name).claims_epsilon]
    state.open(log, list(dict.fromkeys([*private, settings.released_name])), settings.released_name)
    budget = _decide_budget(state, settings, len(log), users, public is not None)
    kind = (log.found()[1] if public is None else public.ids).type
    job = Job(settings, source, state, show, log, users, public, source.titles(kind), source.features(kind), budget)
    for name, ledger in state.ledgers.items():
        file = release_file(name)
        budget.refuse_excess(ledger, state.events_due(name, budget.releases(*([file] if file else []))))
    if state.earlier:
        refuse_other_kind("item", state.earlier.items.ids.type, kind)
        if is_trained(settings.released_name):
            from tfdp_rec.job.recommenders import training

            training.load_released_model(job)
    _refuse_full_disk(job)
    if state.is_familiar:
        print(
            f"A day before had {len(log):,} users, too: if these are the same data, end this by Ctrl-C, or they count "
            "twice, and may cost as much again.", file=sys.stderr,
        )  # fmt: skip
    if users.sampling is not None:
        from tfdp_rec.job.recommenders import training

        if not state.noises:
            state.keep(noises=training.decide_noises(job))
        training.rehearse(job)
    return job


def _delta_of(settings: JobSettings, users: int) -> float:
    return min(1e-6, 1.0 / users) if settings.delta is None else settings.delta


def _decide_budget(state: RunState, settings: JobSettings, users: int, split: Users, public: bool) -> Budget:
    """What the first day decided; on the first day this decides it."""
    trained, delta = len(split.train), _delta_of(settings, users)
    asked = len(split.test) * settings.has_figures
    noise = budgets.figures_noise(settings.epsilon, delta, asked, settings.metrics_epsilon)
    budget = Budget(
        settings.epsilon, delta, settings.days, public, settings.items_epsilon, settings.days_per_user, noise
    )  # fmt: skip
    if state.earlier:
        budget = Budget.read(state.ledgers[settings.released_name])
    if budget.delta > 1 / trained:
        raise ValueError(
            f"--delta {budget.delta:g} is above 1 / {trained} users: a mechanism that publishes one user's "
            "rows would still meet it. Choose a smaller one, on the first day."
        )
    for ledger in state.ledgers.values():
        budget.decide(ledger)
    budget = Budget.read(state.ledgers[settings.released_name])
    if budget.items is None or state.earlier or (state.directory / ITEMS).exists():
        return budget
    least = least_users(*budget.items)
    if users < least:  # no item can be found, even one that all users have
        given = f"--epsilon {budget.epsilon:g}" if budget.items_epsilon is None else "--items-epsilon"
        raise ValueError(
            f"{given} is too small for a log of {users:,} users: with its share for finding "
            f"items, {budget.items[0]:.3g}, an item is found if {least:,.0f} users or more have it. Nothing was paid: "
            f"{_MORE_ITEMS}, {ELSEWHERE}."
        )
    return budget


def _refuse_unfit(settings: JobSettings, log: Any, public: Items | None) -> None:
    """Raises for settings that do not fit the data's public sizes."""
    for name in ("top_k", "negatives"):
        value = getattr(settings, name)
        if public and value != getattr(JobSettings, name) and value > len(public):  # a default gives way
            raise ValueError(f"{flag(name)} must be at most the {len(public)} items, got {value}.")
    whole = pa.types.is_integer(log.found()[1].type)
    if public and whole and as_kind(pa.int64(), public.ids).null_count == len(public):
        raise ValueError(
            f"--items: none of the {len(public)} ids, such as {str(public.ids[0].as_py())[:40]!r}, is a whole number, "
            f"as the ids of the log are: name the column of ids {settings.item!r}, or put it first."
        )
    if settings.order == "yes" and not log.ordered:
        raise ValueError("--order yes needs --time, the column that says in which order rows are.")
    if settings.servers and any(map(is_two_tower, settings.mechanism)) and not log.ordered:
        raise ValueError("Workers of a cluster predict what comes next: give --time, or train in one process.")


def _count_candidates(job: Job) -> tuple[int, int]:
    """Number of items that there may be at most, and the bytes of their ids."""
    lists = [job.log.found()[1] if job.public is None else job.public.ids]
    lists += [job.state.earlier.items.ids] if job.state.earlier else []
    return sum(map(len, lists)), sum(each.nbytes for each in lists)


def _item_bytes(job: Job) -> int:
    """What a file of the items takes at most."""
    return 2 * _count_candidates(job)[1] + 2**16


def _refuse_full_disk(job: Job) -> None:
    """Raises unless there is room for all that is going to be written, which is paid for before it is."""
    made, (most, ids) = job.settings.mechanism, _count_candidates(job)
    here = job.users.held_out or job.log
    in_checkpoint = _item_bytes(job) + 12 * here.num_rows + 8 * len(here)
    released = 4 * min(most, MOST_HEAD) ** 2 + 40 * most + 6 * ids + 4 * job.titles.nbytes + 2**22
    # Sums to train upon are in the checkpoints of the training, its model and its servable, too.
    copies = (names.spectral.name in made) + 3 * sum(name in made for name in names.UPON_SUMS)
    sums = copies * private_sums.file_bytes(most, job.features.num_rows)
    trainings = sum(map(is_trained, made))
    tables = 8 * (most + 1) * (job.settings.width + 2)
    # Two checkpoints of each, of weights and as many values of the mechanism; the model, and its servable.
    in_checkpoint += sums + (8 * most + 4 * tables * trainings if trainings else 0)
    released += sums + (3 * tables if trainings else 0)
    needed = [(job.state.directory, in_checkpoint), (job.state.folder.release, released)]
    disks: dict[int, int] = {}
    for folder, size in [*needed, (Path(tempfile.gettempdir()), 2 * ids)]:
        disk = folder.stat().st_dev
        disks[disk] = disks.get(disk, 0) + size
        free = shutil.disk_usage(folder).free
        if free < disks[disk]:
            raise OSError(
                f"The disk of {folder} has {free / 2**20:.0f} MB left, and what is about to be paid for may take more: "
                "free some space, or give another --out or --checkpoint."  # how much would tell of the items there are
            )


def _take_seats(job: Job) -> NDArray[np.bool_] | None:
    """Whether each user's rows count today; None if all do."""
    state = job.state
    if job.budget.days_per_user is None:
        return None
    seated, list_id = take_seats(state.folder.private, job.chain, job.budget, job.log, state.seats)
    state.keep(seats=list_id)
    state.tell_owner(f"{seated.sum():,} of {len(job.log):,} users have a seat today")
    return seated


# What is released before a recommender is made: items, sums, the prior.


def find_items(job: Job, seated: NDArray[np.bool_] | None) -> Items:
    """The items that can be recommended: of the public list, or found among the users with a seat."""
    state, budget, show = job.state, job.budget, job.show
    show.begin(
        "taking the items of the public list" if budget.items is None else
        f"finding items privately: those of {least_users(*budget.items):,.0f} users at the least"
    )  # fmt: skip

    def make(payment: ReleasePayment, file: Any) -> None:
        (_search_items(job, seated, payment) if job.public is None else _join(state, job.public)).write(file)

    items = state.release(ITEMS, state.ledgers if job.public is None else (), _item_bytes(job), make, Items.read)
    # Said here and not in `make`: of a release that Ctrl-C may still give back, nothing is shown.
    broken = line_breaks(items)
    if left_out := pc.sum(broken).as_py():
        show.note(f"{left_out:,} items left out: a line break in the id")
        items = Items(items.ids.filter(pc.invert(broken)))
    new = f", {len(items) - len(state.earlier.items):,} of them new" if state.earlier else ""
    way = "" if job.public is not None else "; --items names a public list of more"
    show.note(f"{len(items):,} items can be recommended{new}{way}")
    return items


def _search_items(job: Job, seated: NDArray[np.bool_] | None, payment: ReleasePayment) -> Items:
    assert job.budget.items is not None
    (epsilon, delta), before = job.budget.items, job.state.earlier
    accountant = cast(Accountant, payment)  # pays as one does, and follows no training
    known = before.items.ids.to_pylist() if before else []
    log: Any = job.log if seated is None else UserSubset(job.log, np.flatnonzero(seated))
    found = private_items(log, epsilon=epsilon, delta=delta, accountant=accountant, known=known)
    planned = job.budget.releases()[ITEMS]
    if payment.events != [planned]:
        raise RuntimeError(f"Finding items cost {found.event}, and {planned} was planned for.")
    if found.terms:
        return _join(job.state, Items(list(found.terms)))
    if before:
        return before.items
    raise ValueError(
        f"No item has so many users that it can be found privately at epsilon {epsilon:g} with {len(job.log)} users, "
        f"and what was spent stays spent: {_MORE_ITEMS}, {ELSEWHERE}."
    )


def _join(state: RunState, joining: Items) -> Items:
    """Known items keep their numbers; the others follow."""
    if not state.earlier:
        return joining
    known = state.earlier.items.ids
    there = as_kind(known.type, joining.ids)
    if there.null_count:
        raise ValueError("--items: the items of the days before are whole numbers, and some of these are not.")
    return Items(pa.concat_arrays([known, there.filter(pc.invert(pc.is_in(there, value_set=known)))]))


def _gather(job: Job, items: Items, seated: NDArray[np.bool_] | None) -> Material:
    """The log with its items, and what is released of the users whose rows count today."""
    log, features = job.log.with_items(items), features_of(items, job.features)
    if job.settings.items and not job.settings.engine:  # no refusal: whether there is one would tell of the rows
        listed, rows = log.num_rows, job.log.num_rows
        other = "" if 2 * listed >= rows else ". Is another column that of the ids?"
        job.state.tell_owner(f"{listed:,} of {rows:,} rows are of listed items{other}")
    counted = job.users.train if seated is None else job.users.train[seated[job.users.train]]
    releases: dict[str | None, Any] = {
        file: _count_popularity(job, log, counted) if file == PRIOR else
        private_sums.release(job, log, counted, file, features, seated is not None)
        for file in _release_files(job.settings)
    }  # fmt: skip
    tests = None
    if job.settings.confidential:
        tested = job.users.held_out.with_items(items) if job.users.held_out else log
        examples = NewItemExamples(tested, job.users.test[:_TEST_USERS])
        tests = Evaluation(examples, job.settings.seed, users_at_once(log.num_items))
    return Material(log, job.users, releases, tests, features)


def _count_popularity(job: Job, log: Interactions, counted: NDArray[np.int64]) -> NDArray[np.float64]:
    job.show.begin("counting popularity, where two-towers start")

    def count(payment: ReleasePayment, opened: Any) -> None:
        payment.spend(job.budget.releases(PRIOR)[PRIOR], LABELS[PRIOR])
        users = UserSubset(log, counted)
        np.save(opened, users.noisy_popularity(log.catalogue, job.budget.noise(PRIOR)).values)

    payers = [name for name in job.state.ledgers if is_two_tower(name)]
    return job.state.release(PRIOR, payers, 8 * log.num_items + 2**16, count, np.load)


# The recommenders.


def _test_popularity(job: Job, material: Material) -> list[dict[str, Any]]:
    """Results of the most popular items for everyone: counted exactly, and as they were released."""
    if material.tests is None:
        return []
    releases, users = material.releases, subset_of(material.log, job.users.train)
    exact = users.exact_counts(material.log.catalogue)
    shown: list[tuple[str, Any, float | None]] = [(names.popularity.name, exact, None)]
    sums = releases.get(SUMS) or releases.get(PRETRAINING_SUMS) or releases.get(COMPARED_SUMS)
    if PRIOR in releases:
        shown.append((names.dp_popularity.name, releases[PRIOR], _counts_epsilon(job, job.budget.noise(PRIOR))))
    elif sums is not None:
        shown.append((names.dp_popularity.name, sums.released.counts, _counts_epsilon(job, sums.split.counts)))
    return [
        _record(name, MadeRecommender(None, same_for_all(counts)), material) | {"epsilon": epsilon}
        for name, counts, epsilon in shown
    ]


def _counts_epsilon(job: Job, noise: float) -> float:
    """Cost of popularity counts with finding items; on later days of all that was spent."""
    if job.state.earlier:
        return job.chain.epsilon(job.budget.delta)
    return epsilon_of(ComposedDpEvent([*job.budget.releases().values(), GaussianDpEvent(noise)]), job.budget.delta)


def _make(
    job: Job, material: Material, name: str, train: Callable[[Training], MadeRecommender] | None
) -> MadeRecommender:
    job.show.begin(f"{names.look_up(name).label}: making it{' and testing it' * job.settings.confidential}")
    if name == job.settings.released_name and not names.look_up(name).claims_epsilon:
        if _UNPROVEN not in [paid.label for paid in job.chain.paid]:
            job.chain.pay(NonPrivateDpEvent(), label=_UNPROVEN, settings={"sampling": None})
    if name == names.exact.name:
        return private_sums.make_without_noise(job, material)
    if name == names.spectral.name:
        return private_sums.make(job, material.releases[SUMS])
    if name == names.auto.name and not material.releases[COMPARED_SUMS].ordered:  # the users' vote: nothing to train
        return private_sums.make(job, material.releases[COMPARED_SUMS], name)
    from tfdp_rec.job.recommenders import training

    planned = training.Training(name, job, material)
    return train(planned) if train is not None and is_two_tower(name) else training.train_here(planned)


def _record(name: str, made: MadeRecommender, material: Material) -> dict[str, Any]:
    """What results.json says of a recommender; with exact figures, where these are asked for."""
    cost = {"steps": made.steps, "epsilon": made.epsilon, "noise_multiplier": made.noise_multiplier}
    if material.tests is None:
        return {"recommender": name, **cost}
    means = material.tests.measure(made.scores) if made.means is None else made.means
    return {
        "recommender": name, "recalls": {metric: mean.value for metric, mean in means.items()},
        "errors": {metric: mean.error for metric, mean in means.items()}, "test_users": len(material.tests), **cost,
    }  # fmt: skip


def _pay_for_figures(job: Job) -> int | None:
    """The payment for figures that are to be made; None if there are to be none, or they were made or lost."""
    if not job.budget.figures:
        return None
    payment = held_out.pay_for_figures(job.chain, *job.budget.figures)
    job.state.keep()
    return payment


def _make_figures(job: Job, material: Material, items: Items, payment: int) -> None:
    ask, (event,), users = held_out.load_released(job.state.folder.path, items), job.budget.figures, job.users.test
    held_out.make_figures(job.chain, payment, event, material.log, users, job.settings.seed, ask)
    job.state.keep()


def _release(job: Job, items: Items, made: MadeRecommender) -> Mapping[Any, str]:
    """Writes the one recommender that leaves the run, with its statement beside it; returns the titles of its items."""
    folder, titles = job.state.folder, titles_of(items, job.titles)
    folder.write(STATEMENT, made.statement or report.NO_GUARANTEE)
    if is_trained(job.settings.released_name) and not isinstance(made.model, SpectralRecommender):
        made.model.save(str(folder.release / MODEL))
    with replace_atomically(folder.release / SERVABLE) as temporary:
        export(temporary, made.model, items, titles, min(job.settings.top_k, len(items)))
    return titles


# The end.


def _write_report(
    job: Job, items: Items, made: MadeRecommender, titles: Mapping[Any, str], results: Sequence[dict[str, Any]],
    statements: Mapping[str, Statement],
) -> Mapping[str, Figure]:  # fmt: skip
    """Writes the report, with results and settings beside it; returns the private figures in it."""
    job.show.begin("writing the report")
    settings, folder, released = job.settings, job.state.folder, job.settings.released_name
    why = comparison.WHY_SUMS if names.auto.name in job.state.settings.mechanism and released != names.auto.name else ""
    days = max(1, count_days(job.chain, release_file(released)))
    config = {
        **dataclasses.asdict(settings), "when": datetime.datetime.now().isoformat(timespec="minutes"),
        "num_users": len(job.log), "train_users": len(job.users.train), "num_items": len(items),
        "day": made.model.released.fits if released == names.spectral.name else days,
        "released": released, "why": why, "public": job.public is not None, "ordered": job.log.ordered,
        "delta": job.budget.delta, "noise_multipliers": job.state.noises,
        "shared_negatives": settings.negatives_of(released, len(items)),
    }  # fmt: skip
    public = [{name: result[name] for name in _PUBLIC_RESULTS} for result in results]
    folder.write("results.json", json.dumps(public, indent=1))
    scores = np.asarray(made.scores(np.zeros([1, HISTORY], np.int32)))[0]
    first = items.of(np.argsort(-scores, kind="stable")[:5] + 1)  # for an empty history
    answers = [(item, titles.get(item, "")) for item in first]
    kept, why = held_out.kept_figures(job.chain)
    figures = {name: held_out.figure_of(kept[name]) for name in sorted(kept, reverse=True)}  # recall first
    content = report.RunReport(
        folder, job.source, config, results, statements, made.statement, answers, figures, why
    )  # fmt: skip
    report.write(content)
    if settings.confidential:
        folder.write(f"{CONFIDENTIAL}/results.json", json.dumps(results, indent=1))
        report.write_confidential(content)
    folder.write(CONFIG, json.dumps(config, indent=1))  # where it is, a run can be continued
    return figures


def _say_end(job: Job, material: Material, titles: Mapping[Any, str], figures: Mapping[str, Figure]) -> None:
    settings, show, delta = job.settings, job.show, job.budget.delta
    if not show.verbose:
        return
    if settings.titles:
        show.note(f"{len(titles):,} of {material.log.num_items:,} items have a title")
    if settings.features:
        show.note(f"{sum(map(bool, material.features or ())):,} of {material.log.num_items:,} items have features")
    show.note("done")
    if figures:
        print(f"\nHeld-out users, with noise that was paid for:\n{report.text(figures)}")
    is_private = names.look_up(settings.released_name).claims_epsilon
    spent = round_up(job.chain.epsilon(delta)) if is_private else float("inf")
    folder, cost = job.state.folder.path, f"epsilon = {spent:g} at delta = {delta:g}"
    print(f"\n{folder / PRIVATE}/report.html   {folder / RELEASE / SERVABLE}   {cost}")
