"""One job: a log to a private recommender that is tested, released, served in the log's own ids, and reported.

    a source's log → grouped by user, on disk → split by a hash of users' ids → items: a public list, or found privately
    → private sums, popularity prior of two-towers → each recommender made and tested → one of them released → a report

*One ε a recommender.* Each private one has the whole budget and a ledger of its own, in which everything is paid for
before the log is looked at for it. So one of them leaves the run, chosen by its name (`recommenders.names`), and of the
others there are only results. Held-out users have a say in which items there are, and in nothing else.

**A further day** (`--continue`) finds the items that are new in it, and adds its sums to those that were released
before. Users stay on their side of the split on all days.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent, SelfComposedDpEvent
from tfdp_rec.core.claim.schemes import PoissonSampling
from tfdp_rec.core.claim.statement import Statement, rounded_up
from tfdp_rec.core.ground.files import replacing
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items, as_kind
from tfdp_rec.job import report, seats
from tfdp_rec.job.budget import ITEMS, LABELS, PRIOR, UPON, Budget
from tfdp_rec.job.checkpoint import ReleasePayment, RunCheckpoint
from tfdp_rec.job.evaluation import HISTORY, same_for_all
from tfdp_rec.job.recommenders import names, private_sums
from tfdp_rec.job.recommenders.names import is_trained, is_two_tower
from tfdp_rec.job.run import MadeRecommender, Progress, Run, Train, Users, UserSubset, begins_with
from tfdp_rec.job.run_folder import CONFIG, MODEL, PRIVATE, RELEASE, SERVABLE, STATEMENT, RunFolder
from tfdp_rec.job.settings import ELSEWHERE, JobSettings
from tfdp_rec.job.sources import LogSource, titles_of
from tfdp_rec.job.warm_start import WarmStart
from tfdp_rec.serving.own_ids import export, line_breaks
from tfdp_rec.settings import flag
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spectral.rules import MOST_HEAD
from tfdp_rec.sums.set_union import least_users, private_items

_UNPROVEN = "training without a guarantee"
_MORE_ITEMS = "give a public list (--items), more users, or a larger --epsilon or --items-epsilon"


def run(source: LogSource, checkpoint: RunCheckpoint, verbose: int = 1, train: Train | None = None) -> RunFolder:
    """Does all of a job, or what is not done yet, and writes the run folder; `train` stands for `train_one`."""
    made = checkpoint.settings.mechanism
    show = Progress(3 + len(made) + len({begins_with(name) for name in made} - {None}), verbose)
    show.begin("reading the log, and grouping it by user")
    rows, columns = source.rows()
    log = Interactions.read(rows, **columns, folder=checkpoint.log)
    del rows  # of a source in memory they are as large as the log
    show.note("for you alone, these counts are private: " + " ".join(log.summary().split("\n")).strip())
    try:
        run = _begun(source, checkpoint, show, log)
        run.log = log.with_items(_items(run))
        _note_listed(run, log)
        sums = _sums(run) if names.spectral.name in made else None
        run.upon = _sums(run, upon=True) if names.upon_sums.name in made else None
        run.prior = _prior(run) if any(map(is_two_tower, made)) else run.prior
        results, others = _popularity(run, sums or run.upon), dict[str, Statement]()
        for name in made:
            done = checkpoint.finished(name)
            if done is None or name == run.released:
                show.begin(f"{names.named(name).label}: making and testing on {len(run.evaluation):,} users")
                recommender = _made(run, name, sums, train)
                statement = dict(recommender.statement.fields) if recommender.statement else None
                done = done or {"record": _record(run, name, recommender), "statement": statement}
                checkpoint.finish(name, done)
                if name == run.released:  # at once: what goes wrong with the others does not lose it
                    released = recommender
                    titles = _release(run, released)
            results.append(done["record"])
            if done["statement"] and name != run.released:
                others[name] = Statement(done["statement"])
        _conclude(run, released, titles, results, others)
        return checkpoint.folder
    finally:
        checkpoint.close()


# What is decided and checked before anything is paid.


def _begun(source: LogSource, checkpoint: RunCheckpoint, show: Progress, log: Interactions) -> Run:
    """A run whose ledgers are open, and whose noise is decided."""
    settings, users, public = checkpoint.settings, Users.of(log, checkpoint.settings), source.public_items()
    seats.refuse_unfit(settings)
    _refuse_unfit(settings, log, public)
    released = names.released(settings.mechanism, settings.export)
    own = dict.fromkeys([*(name for name in settings.mechanism if names.named(name).claims_epsilon), released])
    checkpoint.open(log, list(own), released)
    chain = checkpoint.ledgers[released]
    delta = min(1e-6, 1.0 / len(log)) if settings.delta is None else settings.delta
    wanted = Budget(
        settings.epsilon, delta, settings.days, public is not None, settings.items_epsilon, settings.days_per_user
    )
    wanted = Budget.of(chain) if checkpoint.earlier else wanted
    if wanted.delta > 1 / len(users.train):
        raise ValueError(
            f"--delta {wanted.delta:g} is above 1 / {len(users.train)} users: a mechanism that publishes one user's "
            "rows would still meet it. Choose a smaller one, on the first day."
        )
    for ledger in checkpoint.ledgers.values():
        wanted.decided(ledger)
    budget = Budget.of(chain)
    _refuse_no_items(budget, len(log), checkpoint)
    kind = (log.found()[1] if public is None else public.ids).type
    run = Run(source, checkpoint, show, log, users, public, source.titles(kind), source.features(kind), budget)
    for name, ledger in checkpoint.ledgers.items():
        budget.refuse_beyond(ledger, checkpoint.left_to_pay(name, _releases(run, name)))
    if checkpoint.earlier:
        _refuse_other_kind(kind, checkpoint.earlier.items)
        if is_trained(released):
            from tfdp_rec.job.recommenders import training

            training.released_model(run)
    _refuse_full(run)
    if checkpoint.seen:
        print(
            f"A day before had {len(log):,} users, too: if these are the same data, end this by Ctrl-C, or they count "
            "twice, and may cost as much again.", file=sys.stderr,
        )  # fmt: skip
    if users.sampling is not None and not checkpoint.noises:
        _decide_noises(run)
    if users.sampling is not None:
        from tfdp_rec.job.recommenders.rehearsal import rehearse

        rehearse(run)
    if budget.days_per_user is not None:
        taken = seats.DaySeats.taken(checkpoint.folder.private.path, chain, budget, log, checkpoint.seats)
        checkpoint.keep_seats(taken.id)
        run.seats = taken.of_users
        show.note(f"for you alone: {taken.of_users.sum():,} of {len(log):,} users have a seat today")
    return run


def _refuse_no_items(budget: Budget, users: int, checkpoint: RunCheckpoint) -> None:
    """Raises if no item can be found, even one that all users have: before anything is paid."""
    if budget.items is None or checkpoint.earlier or (checkpoint.directory / ITEMS).exists():
        return
    least = least_users(*budget.items)
    if users < least:
        given = f"--epsilon {budget.epsilon:g}" if budget.items_epsilon is None else "--items-epsilon"
        raise ValueError(
            f"{given} is too small for a log of {users:,} users: with its share for finding "
            f"items, {budget.items[0]:.3g}, an item is found if {least:,.0f} users or more have it. Nothing was paid: "
            f"{_MORE_ITEMS}, {ELSEWHERE}."
        )


def _decide_noises(run: Run) -> None:
    """Keeps the noise of trainings that comes to the budget, with the days before and those that are left."""
    from tfdp_rec.job.recommenders import training, two_towers

    checkpoint, paid = run.checkpoint, run.ledger(run.released).paid
    earlier = paid if checkpoint.earlier else ()
    past = [(SelfComposedDpEvent(each.event, each.attempts), "earlier days") for each in earlier]
    left = max(1, run.budget.days - run.days(begins_with(run.released)))
    given = run.settings, run.sampling, run.delta
    spent = {file: past + _to_come(run, file, left) for file in (PRIOR, UPON)}
    noises = two_towers.noises_for(*given, spent[PRIOR], left)
    if names.upon_sums.name in run.settings.mechanism:
        noises[names.upon_sums.name] = training.noise_for(*given, spent[UPON], left)
    _refuse_no_step(run, noises, spent)
    checkpoint.keep_noises(noises)


def _to_come(run: Run, file: str, left: int) -> list[tuple[DpEvent, str]]:
    """What a training is going to pay beside its steps on the days that are left."""
    budget, chain = run.budget, run.ledger(run.released)
    return [
        (event, label) for event, label in budget.before_training(file)
        for _ in range(budget.costly_days(chain, label, left))
    ]  # fmt: skip


def _refuse_no_step(run: Run, noises: Mapping[str, float], spent: Mapping[Any, list[Any]]) -> None:
    """Raises if the noise that was asked for leaves no room for a single step beside what is released before."""
    if run.settings.noise_multiplier is None or not isinstance(run.sampling, PoissonSampling):
        return
    for name in filter(lambda name: names.named(name).claims_epsilon, noises):
        step = run.sampling.compose(GaussianDpEvent(noises[name]), 1)
        cost = epsilon_of(ComposedDpEvent([*(event for event, _ in spent[begins_with(name)]), step]), run.delta)
        if cost > run.budget.epsilon:
            raise ValueError(
                f"--noise-multiplier {noises[name]:g} is too small for one step of {name}: epsilon would be "
                f"{rounded_up(cost):g} of {run.budget.epsilon:g}. Nothing was paid: give more, or leave it out."
            )


def _releases(run: Run, name: str) -> dict[str, DpEvent]:
    """What a recommender costs beside training steps, by the files of what is released."""
    file = begins_with(name)
    return run.budget.releases(*([file] if file else []))


def _refuse_unfit(settings: JobSettings, log: Interactions, public: Items | None) -> None:
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


def _refuse_other_kind(kind: pa.DataType, known: Items) -> None:
    kinds = [pa.types.is_integer(each) for each in (known.ids.type, kind)]
    if kinds[0] != kinds[1]:
        words = ["whole numbers" if number else "text" for number in kinds]
        raise ValueError(
            f"--item: the ids of items were {words[0]} on the days before, and are {words[1]} here: write them as "
            "they were."
        )


def _candidates(run: Run) -> tuple[int, int]:
    """Number of items that there may be at most, and the bytes of their ids."""
    known = run.checkpoint.earlier.items.ids if run.checkpoint.earlier else pa.array([], pa.string())
    new = run.log.found()[1] if run.public is None else run.public.ids
    return len(new) + len(known), new.nbytes + known.nbytes


def _item_bytes(run: Run) -> int:
    """What a file of the items takes at most."""
    return 2 * _candidates(run)[1] + 2**16


def _refuse_full(run: Run) -> None:
    """Raises unless there is room for all that is going to be written, which is paid for before it is."""
    made, (most, ids) = run.settings.mechanism, _candidates(run)
    in_checkpoint = _item_bytes(run) + 12 * run.log.num_rows + 8 * len(run.log)
    released = 4 * min(most, MOST_HEAD) ** 2 + 40 * most + 6 * ids + 4 * run.titles.nbytes + 2**22
    of_sums = private_sums.file_bytes(most, run.features.num_rows)
    if names.spectral.name in made:
        in_checkpoint, released = in_checkpoint + of_sums, released + of_sums
    if names.upon_sums.name in made:  # which are in its checkpoints, its model and its servable, too
        in_checkpoint, released = in_checkpoint + 3 * of_sums, released + 3 * of_sums
    trainings = sum(map(is_trained, made))
    if trainings:
        tables = 8 * (most + 1) * (run.settings.width + 2)
        # Two checkpoints of each, of weights and as many values of the mechanism; the model, and its servable.
        in_checkpoint, released = in_checkpoint + 8 * most + 4 * tables * trainings, released + 3 * tables
    needed = [(run.checkpoint.directory, in_checkpoint), (run.folder.release.path, released)]
    disks: dict[int, int] = {}
    for folder, size in [*needed, (Path(tempfile.gettempdir()), 2 * ids)]:
        disk = folder.stat().st_dev
        disks[disk] = disks.get(disk, 0) + size
        free = shutil.disk_usage(folder).free
        if free < disks[disk]:
            raise OSError(
                f"The disk of {folder} has {free / 2**20:.0f} MB left, and what is about to be paid for may take "
                f"{disks[disk] / 2**20:.0f} MB: free some space, or give another --out or --checkpoint."
            )


# What is released once: items, sums, the prior.


def _items(run: Run) -> Items:
    checkpoint, before = run.checkpoint, run.checkpoint.earlier
    cost = run.budget.items
    least = f"finding items privately: those of {least_users(*cost):,.0f} users at the least" if cost else ""
    run.show.begin(least or "taking the items of the public list")

    def make(payment: ReleasePayment, file: Any) -> None:
        (_found(run, payment) if run.public is None else _joined(run, run.public)).write(file)

    payers = checkpoint.ledgers if run.public is None else ()
    items = checkpoint.release(ITEMS, payers, _item_bytes(run), make, Items.read)
    # Said here and not in `make`: of a release that Ctrl-C may still give back, nothing is shown.
    broken = line_breaks(items)
    if left_out := pc.sum(broken).as_py():
        run.show.note(f"{left_out:,} items left out: a line break in the id")
        items = Items(items.ids.filter(pc.invert(broken)))
    new = f", {len(items) - len(before.items):,} of them new" if before else ""
    way = "" if run.public is not None else "; --items names a public list of more"
    run.show.note(f"{len(items):,} items can be recommended{new}{way}")
    return items


def _note_listed(run: Run, whole: Interactions) -> None:
    """Says how much of the log a public list covers. No refusal: whether there is one would tell of the rows."""
    if run.settings.items:
        listed, rows = run.log.num_rows, whole.num_rows
        other = "" if 2 * listed >= rows else ". Is another column that of the ids?"
        run.show.note(f"for you alone: {listed:,} of {rows:,} rows are of listed items{other}")


def _joined(run: Run, joining: Items) -> Items:
    """Known items keep their numbers; the others follow."""
    if not run.checkpoint.earlier:
        return joining
    known = run.checkpoint.earlier.items.ids
    there = as_kind(known.type, joining.ids)
    if there.null_count:
        raise ValueError("--items: the items of the days before are whole numbers, and some of these are not.")
    return Items(pa.concat_arrays([known, there.filter(pc.invert(pc.is_in(there, value_set=known)))]))


def _found(run: Run, payment: ReleasePayment) -> Items:
    assert run.budget.items is not None
    (epsilon, delta), before = run.budget.items, run.checkpoint.earlier
    accountant = cast(Accountant, payment)  # pays as one does, and follows no training
    known = before.items.ids.to_pylist() if before else []
    log: Any = run.log if run.seats is None else UserSubset(run.log, np.flatnonzero(run.seats))
    found = private_items(log, epsilon=epsilon, delta=delta, accountant=accountant, known=known)
    planned = run.budget.releases()[ITEMS]
    if payment.events != [planned]:
        raise RuntimeError(f"Finding items cost {found.event}, and {planned} was planned for.")
    if found.terms:
        return _joined(run, Items(list(found.terms)))
    if before:
        return before.items
    raise ValueError(
        f"No item has so many users that it can be found privately at epsilon {epsilon:g} with {len(run.log)} users, "
        f"and what was spent stays spent: {_MORE_ITEMS}, {ELSEWHERE}."
    )


def _sums(run: Run, upon: bool = False) -> SpectralRecommender:
    users = f"{len(run.users.train):,} users" if run.seats is None else "users with a seat"
    readings = 2 if upon or run.order is not None or run.checkpoint.earlier else 3
    what = "private sums to train upon," if upon else "private sums"
    run.show.begin(f"making {what} of {users}: {readings} readings, then minutes of algebra for many items")
    counter = functools.partial(run.show.count, "users read", readings * len(run.log))
    made = private_sums.released(run, UserSubset(run.log, run.counted, counter), upon)
    run.show.note(f"pairs of {len(made.released.head):,} items were counted: {made.pairs_words}")
    return made


def _prior(run: Run) -> np.ndarray:
    run.show.begin("counting popularity, where two-towers start")
    event: Any = run.budget.releases(PRIOR)[PRIOR]

    def count(payment: ReleasePayment, file: Any) -> None:
        payment.spend(event, LABELS[PRIOR])
        users = UserSubset(run.log, run.counted)
        np.save(file, users.noisy_popularity(run.log.catalogue, event.noise_multiplier).values)

    payers = [name for name in run.checkpoint.ledgers if is_two_tower(name)]
    return run.checkpoint.release(PRIOR, payers, 8 * run.log.num_items + 2**16, count, np.load)


# The recommenders.


def _popularity(run: Run, sums: SpectralRecommender | None) -> list[dict[str, Any]]:
    """Results of the most popular items for everyone: counted exactly, and as they were released."""
    exact = UserSubset(run.log, run.users.train).exact_counts(run.log.catalogue)
    shown: list[tuple[str, Any, float | None]] = [(names.popularity.name, exact, None)]
    if len(run.prior):
        shown.append((names.dp_popularity.name, run.prior, _counts_epsilon(run, run.budget.releases(PRIOR)[PRIOR])))
    elif sums is not None:
        counted = GaussianDpEvent(sums.split.counts)
        shown.append((names.dp_popularity.name, sums.released.counts, _counts_epsilon(run, counted)))
    return [
        _record(run, name, MadeRecommender(None, same_for_all(counts))) | {"epsilon": epsilon}
        for name, counts, epsilon in shown
    ]


def _counts_epsilon(run: Run, counts: DpEvent) -> float:
    """Cost of popularity counts with finding items; on later days of all that was spent."""
    if run.checkpoint.earlier:
        return run.ledger(run.released).epsilon(run.delta)
    return epsilon_of(ComposedDpEvent([*run.budget.releases().values(), counts]), run.delta)


def _made(run: Run, name: str, sums: SpectralRecommender | None, train: Train | None) -> MadeRecommender:
    if name == run.released and not names.named(name).claims_epsilon:
        ledger = run.ledger(name)
        if _UNPROVEN not in [paid.label for paid in ledger.paid]:
            ledger.pay(NonPrivateDpEvent(), label=_UNPROVEN, settings={"sampling": None})
    if name == names.exact.name:
        return private_sums.without_noise(run, sums)
    if name == names.spectral.name:
        assert sums is not None
        return private_sums.made(run, sums)
    if name == names.upon_sums.name:
        from tfdp_rec.job.recommenders import upon_sums

        return upon_sums.made(run)
    if train is not None:
        return train(name, run)
    from tfdp_rec.job.recommenders.two_towers import train_one

    return train_one(name, run)


def _record(run: Run, name: str, made: MadeRecommender) -> dict[str, Any]:
    """What results.json says of a recommender."""
    means = run.evaluation.measured(made.scores) if made.means is None else made.means
    return {
        "recommender": name, "recalls": {metric: mean.value for metric, mean in means.items()},
        "errors": {metric: mean.error for metric, mean in means.items()},
        "test_users": len(run.evaluation), "steps": made.steps, "epsilon": made.epsilon,
        "noise_multiplier": made.noise_multiplier,
    }  # fmt: skip


def _release(run: Run, made: MadeRecommender) -> Mapping[Any, str]:
    """Writes the one recommender that leaves the run, with its statement beside it; returns the titles of its items."""
    part, items = run.folder.release, run.log.items
    assert items is not None
    titles = titles_of(items, run.titles)
    part.write(STATEMENT, made.statement or report.NO_GUARANTEE)
    if is_trained(run.released):
        made.model.save(str(part / MODEL))
    with replacing(part / SERVABLE) as temporary:
        export(temporary, made.model, items, titles, min(run.settings.top_k, len(items)))
    return titles


def _conclude(
    run: Run, made: MadeRecommender, titles: Mapping[Any, str], results: list[dict[str, Any]],
    others: Mapping[str, Statement],
) -> None:  # fmt: skip
    """The report; last what a further day starts from."""
    run.show.begin("writing the report")
    folder, log, settings, file = run.folder, run.log, run.settings, begins_with(run.released)
    assert log.items is not None
    config = {
        **dataclasses.asdict(settings), "when": datetime.datetime.now().isoformat(timespec="minutes"),
        "num_users": len(log), "train_users": len(run.users.train), "num_items": log.num_items,
        "day": made.model.released.fits if run.released == names.spectral.name else max(1, run.days(file)),
        "released": run.released, "public": run.public is not None, "ordered": log.ordered, "delta": run.delta,
        "noise_multipliers": run.checkpoint.noises, "shared_negatives": run.negatives(run.released),
    }  # fmt: skip
    folder.private.write_json("results.json", results)
    scores = np.asarray(made.scores(np.zeros([1, HISTORY], np.int32)))[0]
    first = log.items.of(np.argsort(-scores, kind="stable")[:5] + 1)  # for an empty history
    answers = [(item, titles.get(item, "")) for item in first]
    report.write(report.RunReport(folder, run.source, config, results, others, made.statement, answers))
    folder.private.write_json(CONFIG, config)  # where it is, a run can be continued
    ledger = run.ledger(run.released)
    # Last: where it is, it is whole.
    sums = run.upon if run.released == names.upon_sums.name else made.model
    WarmStart(log.items, ledger.mark, None, titles).save(folder.path, sums)
    if not run.show.verbose:
        return
    if settings.titles:
        run.show.note(f"{len(titles):,} of {log.num_items:,} items have a title")
    if settings.features:
        run.show.note(f"{sum(map(bool, run.item_features or ())):,} of {log.num_items:,} items have features")
    run.show.note("done")
    if len(run.evaluation):
        print(f"\nHeld-out users, without noise, for you alone:\n{report.text(results)}")
    spent = ledger.epsilon(run.delta) if names.named(run.released).claims_epsilon else float("inf")
    cost = f"epsilon = {rounded_up(spent):g} at delta = {run.delta:g}"
    print(f"\n{folder.path / PRIVATE}/report.html   {folder.path / RELEASE / SERVABLE}   {cost}")
