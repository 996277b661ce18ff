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

import datetime
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NonPrivateDpEvent, SelfComposedDpEvent

from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items, as_kind
from tfdp_rec.files import replacing, rows_at_a_time
from tfdp_rec.job import report
from tfdp_rec.job.budget import Lifetime
from tfdp_rec.job.checkpoint import ITEMS, LABELS, PRIOR, SUMS, ReleasePayment, RunCheckpoint
from tfdp_rec.job.evaluation import Evaluation, NewItemExamples, measured_record, same_for_all
from tfdp_rec.job.recommenders import names, private_sums
from tfdp_rec.job.recommenders.names import is_two_tower
from tfdp_rec.job.recommenders.popularity import Prior, noisy_popularity
from tfdp_rec.job.run import MadeRecommender, Run, Users, spent_before_training
from tfdp_rec.job.run_folder import CONFIG, PRIVATE, RELEASE, SERVABLE, STATEMENT, RunFolder
from tfdp_rec.job.settings import SHUFFLED, JobSettings
from tfdp_rec.job.sources import LogSource
from tfdp_rec.job.user_subset import UserSubset
from tfdp_rec.job.warm_start import WarmStart
from tfdp_rec.pricing.composition import epsilon_of
from tfdp_rec.serving.own_ids import export, line_breaks, writing_a_model
from tfdp_rec.settings import flag
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spectral.rules import MOST_HEAD
from tfdp_rec.spending.accountant import Accountant
from tfdp_rec.spending.statement import rounded_up
from tfdp_rec.sums.set_union import private_items

_RECENCY = 0.25  # where rows have times; see docs/spectral.md
_SCORES = 2**24  # at once, while testing: 64 MB, and a few times that
_UNPROVEN = "training without a guarantee"
_SEEN = (
    "A day before had {users:,} users, too: if these are the same data, end this by Ctrl-C, or they are paid for again "
    "and count twice."
)
Train = Callable[[str, Run], MadeRecommender]


class Progress:
    """Prints what is being done, i of n, and for how long; verbose 0 prints nothing, 1 counts within a step, too."""

    def __init__(self, steps: int, verbose: int):
        self.steps, self.verbose, self.step, self.start = steps, verbose, 0, time.monotonic()

    def begin(self, what: str) -> None:
        """The next step."""
        self.step += 1
        self.note(f"[{self.step}/{self.steps}] {what} ...")

    def note(self, what: str) -> None:
        """Something about the step."""
        if self.verbose:
            print(f"{time.monotonic() - self.start:6.0f} s  {what}", flush=True)

    def counter(self, words: str, most: int) -> Callable[[int], None]:
        """A function that shows how many of how many, on a terminal."""

        def show(count: int) -> None:
            if self.verbose == 1:
                print(f"\r{'':10}{count:,} of {most:,} {words}", end="\n" if count >= most else "", flush=True)

        return show


def run(source: LogSource, kept: RunCheckpoint, verbose: int = 1, train: Train | None = None) -> RunFolder:
    """Does all of a job, or what is not done yet, and writes the run folder."""
    made = kept.settings.mechanism
    steps = 3 + len(made) + any(map(is_two_tower, made)) + (names.spectral.name in made)
    show = Progress(steps, verbose)
    show.begin("reading the log, and grouping it by user")
    log = source.read(kept.log)
    show.note("for you alone, these counts are private: " + " ".join(log.summary().split("\n")).strip())
    try:
        return _Job(source, kept, show, log, train).whole()
    finally:
        kept.close()


class _Job:
    """One run, its log read."""

    def __init__(self, source: LogSource, kept: RunCheckpoint, show: Progress, log: Interactions, train: Train | None):
        self.source, self.kept, self.show, self.everything, self._train = source, kept, show, log, train
        self.settings = kept.settings
        self.released = names.released(self.settings.mechanism, self.settings.export)
        self.public = source.public_items()
        self.users = Users.of(log, self.settings)
        self.two_towers = list(filter(is_two_tower, self.settings.mechanism))
        in_order = self.settings.sampling == SHUFFLED
        self.paid = [name for name in self.settings.mechanism if names.is_paid(name, in_order)]
        self._refuse_unfit(log)
        own = dict.fromkeys([*self.paid, self.released])
        kept.open(log, {name: self.users.adjacency(name) for name in own}, self.released)
        self.ledger, self.before = kept.ledgers[self.released], kept.earlier
        wanted = Lifetime.of(self.ledger.chain) if self.before else self._wanted(log)
        self.delta = wanted.delta
        self._refuse_large_delta()
        for ledger in kept.ledgers.values():
            wanted.decided(ledger)
        decided = Lifetime.of(self.ledger.chain)
        self.budget = decided.budget
        for name, ledger in kept.ledgers.items():
            decided.refuse_beyond(ledger, kept.left_to_pay(self._releases(name)))
        if self.before:
            self._check_kinds(log, self.before.items)
        self.title_bytes = source.title_bytes(log.found()[1].type)
        self._refuse_full()
        if kept.seen:
            print(_SEEN.format(users=len(log)), file=sys.stderr)
        if self.two_towers and not kept.noises:
            from tfdp_rec.job.recommenders import two_towers

            assert self.users.sampling is not None
            past = [] if self.before is None else [
                (SelfComposedDpEvent(paid.event, paid.attempts), "earlier days") for paid in self.ledger.paid
            ]  # fmt: skip
            left = max(1, self.budget.days - sum(paid.label == LABELS[PRIOR] for paid in self.ledger.paid))
            spent = past + left * self._spent
            kept.keep_noises(two_towers.noises_for(self.settings, self.users.sampling, self.delta, spent, left))

    # What is checked before anything is paid.

    def _wanted(self, log: Interactions) -> Lifetime:
        asked = self.settings
        delta = min(1e-6, 1.0 / len(log)) if asked.delta is None else asked.delta
        return Lifetime(asked.epsilon, delta, asked.days, self.public is not None, asked.items_epsilon)

    def _releases(self, name: str) -> dict[str, DpEvent]:
        """What a recommender costs beside training steps, by the files of what is released."""
        found = dict(zip([ITEMS], self.budget.finding))
        if is_two_tower(name):
            found[PRIOR] = self._spent[-1][0]
        elif name == names.spectral.name:
            found[SUMS] = GaussianDpEvent(self.budget.sums)
        return found

    @property
    def _spent(self) -> list[tuple[DpEvent, str]]:
        return spent_before_training(self.budget)

    def _refuse_unfit(self, log: Interactions) -> None:
        """Raises for settings that do not fit each other, or the data's public sizes."""
        asked, most = self.settings, len(self.public) if self.public else None
        for name in ("top_k", "negatives"):
            value = getattr(asked, name)
            if most is not None and value != getattr(JobSettings, name) and value > most:  # a default gives way
                raise ValueError(f"{flag(name)} must be at most the {most} items, got {value}.")
        if self.two_towers and asked.servers and not log.ordered:
            raise ValueError("Workers of a cluster predict what comes next: give --time, or train in one process.")

    def _refuse_large_delta(self) -> None:
        if self.delta > 1 / len(self.users.train):
            raise ValueError(
                f"--delta {self.delta:g} is above 1 / {len(self.users.train)} users: a mechanism that publishes one "
                "user's rows would still meet it. Choose a smaller one, on the first day."
            )

    def _check_kinds(self, log: Interactions, known: Items) -> None:
        kinds = [pa.types.is_integer(kind) for kind in (known.ids.type, log.found()[1].type)]
        if kinds[0] != kinds[1]:
            words = ["whole numbers" if number else "text" for number in kinds]
            raise ValueError(
                f"--item: the ids of items were {words[0]} on the days before, and are {words[1]} here: write them as "
                "they were."
            )

    def _refuse_full(self) -> None:
        """Raises unless there is room for all that is going to be written, which is paid for before it is."""
        asked, log = self.settings, self.everything
        known = self.before.items.ids if self.before else pa.array([], pa.string())
        new = log.found()[1] if self.public is None else self.public.ids
        most, ids = len(new) + len(known), new.nbytes + known.nbytes
        kept = self._item_bytes() + 12 * log.num_rows + 8 * len(log)
        model = 4 * min(most, MOST_HEAD) ** 2 + 40 * most + 4 * ids + 2 * self.title_bytes + 2**22
        released = model + 2 * self.title_bytes + 2 * ids
        if names.spectral.name in asked.mechanism:
            kept, released = kept + private_sums.file_bytes(most), released + private_sums.file_bytes(most)
        if self.two_towers:
            tables = 8 * (most + 1) * (asked.width + 2)
            # Two checkpoints of each, of weights and as many values of the mechanism; the model, and its servable.
            kept, released = kept + 8 * most + 4 * tables * len(self.two_towers), released + 3 * tables
        needed = {
            self.kept.directory: kept, self.kept.folder.release.path: released, Path(tempfile.gettempdir()): 2 * ids
        }  # fmt: skip
        disks: dict[int, int] = {}
        for folder, size in needed.items():
            disk = folder.stat().st_dev
            disks[disk] = disks.get(disk, 0) + size
            free = shutil.disk_usage(folder).free
            if free < disks[disk]:
                raise OSError(
                    f"The disk of {folder} has {free / 2**20:.0f} MB left, and what is about to be paid for may take "
                    f"{disks[disk] / 2**20:.0f} MB: free some space, or give another --out or --checkpoint."
                )

    def _item_bytes(self) -> int:
        """What a file of the items takes at most."""
        known = self.before.items.ids.nbytes if self.before else 0
        new = self.everything.found()[1] if self.public is None else self.public.ids
        return 2 * (new.nbytes + known) + 2**16

    # The job.

    def whole(self) -> RunFolder:
        """From the items on."""
        self.run = self._run(self.everything.with_items(self._items()))
        self.sums = self._sums() if names.spectral.name in self.settings.mechanism else None
        if self.two_towers:
            self.run.prior = self._prior()
        results, statements = self._popularity(), dict[str, Mapping[str, str]]()
        for name in self.settings.mechanism:
            done = self.kept.finished(name)
            if done is None or name == self.released:
                self.show.begin(f"{names.named(name).label}: making and testing on {len(self.run.evaluation):,} users")
                made = self._make(name)
                done = done or self._tested(name, made)
                self.kept.finish(name, done)
                if name == self.released:  # at once: what goes wrong with the others does not lose it
                    released = made
                    self._release(made)
            results.append(done["record"])
            if done["statement"]:
                statements[name] = done["statement"]
        self._conclude(released, results, statements)
        return self.kept.folder

    def _run(self, log: Interactions) -> Run:
        asked, at_once = self.settings, min(500, rows_at_a_time([1, log.num_items], _SCORES))
        recency = _RECENCY * log.ordered if asked.recency is None else asked.recency
        examples = NewItemExamples(log, self.users.test[: asked.test_users])
        return Run(
            asked, log, self.users, self.budget, self.delta, recency, Evaluation(examples, asked.seed, at_once),
            self.kept.folder, self.kept, self.show.verbose,
        )  # fmt: skip

    def _items(self) -> Items:
        how = "finding items privately" if self.budget.items else "taking the items of the public list"
        self.show.begin(how)
        make = self._found if self.public is None else lambda payment: self._joined(self.public)
        payers = self.kept.ledgers if self.public is None else ()
        items = self.kept.release(ITEMS, payers, self._item_bytes(), make, Items.read)
        new = f", {len(items) - len(self.before.items):,} of them new" if self.before else ""
        self.show.note(f"{len(items):,} items{new}")
        return items

    def _joined(self, joining: Items | None) -> Items:
        """Known items keep their numbers; the others follow, but for those that no vocabulary can hold."""
        assert joining is not None
        broken = line_breaks(joining)
        if pc.sum(broken).as_py():
            self.show.note(f"{pc.sum(broken).as_py():,} items left out: a line break in the id")
            joining = Items(joining.ids.filter(pc.invert(broken)))
        if not self.before:
            return joining
        known = self.before.items.ids
        there = as_kind(known.type, joining.ids)
        if there.null_count:
            raise ValueError("--items: the items of the days before are whole numbers, and some of these are not.")
        return Items(pa.concat_arrays([known, there.filter(pc.invert(pc.is_in(there, value_set=known)))]))

    def _found(self, payment: ReleasePayment) -> Items:
        assert self.budget.items is not None
        epsilon, delta = self.budget.items
        accountant = cast(Accountant, payment)  # pays as one does, and follows no training
        known = self.before.items.ids.to_pylist() if self.before else []
        found = private_items(self.everything, epsilon=epsilon, delta=delta, accountant=accountant, known=known)
        paid = [ledger.chain.payments[number].event for ledger, number in payment.numbers]
        if paid != [found.event] * len(self.kept.ledgers) or [found.event] != self.budget.finding:
            raise RuntimeError(f"Finding items cost {found.event}, and {self.budget.finding} was planned for.")
        if self.before:
            return self._joined(Items(list(found.terms))) if found.terms else self.before.items
        if not found.terms:
            raise ValueError(
                f"No item has so many users that it can be found privately at epsilon {epsilon:g} with "
                f"{len(self.users.train)} users: give a public list (--items), more users, or a larger --epsilon; what "
                "was spent stays spent."
            )
        return self._joined(Items(list(found.terms)))

    def _sums(self) -> SpectralRecommender:
        users = f"{len(self.users.train):,} users"
        self.show.begin(f"making private sums of {users}: two readings, then minutes of algebra for thousands of items")
        made = private_sums.released(self.run, self.show.counter("users read", 2 * len(self.everything)))
        self.show.note(f"pairs of {len(made.released.head):,} items were counted")
        return made

    def _prior(self) -> np.ndarray:
        self.show.begin("counting popularity, where two-towers start")
        run, (event, label) = self.run, self._spent[-1]
        assert isinstance(event, GaussianDpEvent)
        sigma = event.noise_multiplier

        def count(payment: ReleasePayment) -> Prior:
            payment.spend(event, label)
            return Prior(noisy_popularity(run.log, run.users.train, sigma).values)

        payers = [name for name in self.kept.ledgers if is_two_tower(name)]
        return self.kept.release(PRIOR, payers, 8 * run.log.num_items + 2**16, count, np.load)

    def _popularity(self) -> list[dict[str, Any]]:
        """Results of the most popular items for everyone: counted exactly, and as they were released."""
        run = self.run
        exact = UserSubset(run.log, run.users.train).exact_counts(run.log.catalogue)
        shown: list[tuple[str, Any, float | None]] = [(names.popularity.name, exact, None)]
        if self.two_towers:
            cost = epsilon_of(ComposedDpEvent([event for event, _ in self._spent]), self.delta)
            shown.append((names.dp_popularity.name, run.prior, cost))
        elif self.sums is not None:
            spent = self.kept.ledgers[names.spectral.name].epsilon(self.delta)
            cost = private_sums.counts_epsilon(run, self.sums, spent)
            shown.append((names.dp_popularity.name, self.sums.released.counts, cost))
        return [
            {"recommender": name, **measured_record(run.evaluation.measured(same_for_all(counts))),
             "steps": None, "steps_per_second": None, "epsilon": epsilon, "noise_multiplier": None}
            for name, counts, epsilon in shown
        ]  # fmt: skip

    def _make(self, name: str) -> MadeRecommender:
        if name == self.released and name not in self.paid and not self._has_paid(_UNPROVEN):
            self.ledger.pay(NonPrivateDpEvent(), label=_UNPROVEN, settings={"sampling": None})
        if name == names.exact.name:
            return private_sums.without_noise(self.run)
        if name == names.spectral.name:
            assert self.sums is not None
            return private_sums.made(self.run, self.sums)
        if self._train is None:
            from tfdp_rec.job.recommenders.two_towers import train_one

            self._train = train_one
        return self._train(name, self.run)

    def _has_paid(self, label: str) -> bool:
        return any(paid.label == label for paid in self.ledger.paid)

    def _tested(self, name: str, made: MadeRecommender) -> dict[str, Any]:
        means = made.means if made.means is not None else self.run.evaluation.measured(made.scores)
        record = {"recommender": name, **measured_record(dict(means)), **made.costs()}
        return {"record": record, "statement": dict(made.statement.fields) if made.statement else None}

    def _release(self, made: MadeRecommender) -> None:
        """Writes the one recommender that leaves the run, with its statement beside it."""
        part, items = self.kept.folder.release, self.run.log.items
        assert items is not None
        self.named = self.source.titles(items)
        part.write_text(STATEMENT, made.statement or report.NO_GUARANTEE)
        if is_two_tower(self.released):
            made.model.save(str(part / "model.keras"))
        with replacing(part / SERVABLE) as temporary, writing_a_model(part / SERVABLE):
            export(temporary, made.model, items, self.named, min(self.settings.top_k, len(items)))

    def _conclude(
        self, made: MadeRecommender, results: list[dict[str, Any]], statements: dict[str, Mapping[str, str]]
    ) -> None:
        """The report; last what a further day starts from."""
        self.show.begin("writing the report")
        folder, log, asked = self.kept.folder, self.run.log, self.settings
        assert log.items is not None
        config = {
            **asked.as_config(), "when": datetime.datetime.now().isoformat(timespec="minutes"),
            "num_users": len(log), "train_users": len(self.users.train), "num_items": log.num_items,
            "day": made.model.released.fits if self.released == names.spectral.name else max(1, self.run.day),
            "released": self.released,
            "public": self.public is not None, "ordered": log.ordered, "delta": self.delta,
            "recency": self.run.recency, "noise_multipliers": self.kept.noises, "negatives": self.run.negatives,
        }  # fmt: skip
        folder.private.write_json("results.json", results)
        answers = self._first_answers(made)
        written = report.RunReport(folder, self.source, config, results, statements, made.statement, answers)
        report.write(written)
        if asked.step_at:  # after the page is there: large tables may take more memory than there is
            from tfdp_rec.job.step_times import step_times

            seconds = step_times(asked, log.num_items, self.show.verbose)
            folder.private.write_json("step_times.json", seconds)
            report.write(written, seconds)
        folder.private.write_json(CONFIG, config)  # where it is, a run can be continued
        # Last: where it is, it is whole.
        WarmStart(log.items, self.ledger.mark, None, self.named).save(folder.path, made.model)
        if self.show.verbose:
            self._say(folder.path, results, log.num_items)

    def _first_answers(self, made: MadeRecommender) -> list[tuple[Any, str]]:
        """Ids and titles of the first items that are recommended for an empty history."""
        scores = np.asarray(made.scores(np.zeros([1, self.settings.history], np.int32)))[0]
        best = np.argsort(-scores, kind="stable")[:5] + 1
        assert self.run.log.items is not None
        return [(item, self.named.get(item, "")) for item in self.run.log.items.of(best)]

    def _say(self, path: Path, results: list[dict[str, Any]], items: int) -> None:
        if self.settings.titles:
            self.show.note(f"{len(self.named):,} of {items:,} items have a title")
        self.show.note("done")
        if len(self.run.evaluation):
            print(f"\nHeld-out users, without noise, for you alone:\n{report.text(results)}")
        spent = self.ledger.epsilon(self.delta) if names.named(self.released).claims_epsilon else float("inf")
        cost = f"epsilon = {rounded_up(spent):g} at delta = {self.delta:g}"
        print(f"\n{path / PRIVATE}/report.html   {path / RELEASE / SERVABLE}   {cost}")
