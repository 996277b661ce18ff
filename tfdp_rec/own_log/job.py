"""A log of one's own to a private recommender, served in one's own ids.

    the log's files -> grouped by user, on disk -> items: a public list, or found privately
    -> private sums over 80% of the users (by a hash of their ids) -> tests on the others -> a SavedModel and a report

**A further day** (`--continue`) finds the items that are new in it, and adds its sums to those that were released
before. Users stay on their side of the split on all days.

One budget pays for the items and for the sums of all days (`own_log.budget`, `own_log.lifetime`), in one ledger, each
before the log is looked at for it. The other 20% of the users have a say in which items there are, and in nothing else;
what they tell of the recommender is not private, and stays in the report.
"""

from __future__ import annotations

import datetime
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from dp_accounting import ComposedDpEvent, GaussianDpEvent

from tfdp_rec.data import Interactions, Items
from tfdp_rec.datasets.logs.items import as_kind
from tfdp_rec.files import replacing, rows_at_a_time
from tfdp_rec.movies.tested import Scores, Tests, everybody_the_same
from tfdp_rec.movies.trained import measured_record
from tfdp_rec.own_log import report, titles
from tfdp_rec.own_log.chosen import ChosenUsers, popularity
from tfdp_rec.own_log.earlier import Earlier
from tfdp_rec.own_log.kept import Kept, Payer
from tfdp_rec.own_log.lifetime import Lifetime
from tfdp_rec.own_log.settings import Asked
from tfdp_rec.own_log.tested import MOST_USERS, NewItems
from tfdp_rec.pricing.composition import epsilon_of
from tfdp_rec.run_folder import CONFIG, PRIVATE, RELEASE, SERVABLE, STATEMENT, RunFolder
from tfdp_rec.serving.own_ids import export, line_breaks, writing_a_model
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spectral.rules import MOST_HEAD
from tfdp_rec.spending.accountant import Accountant
from tfdp_rec.spending.ledger import Ledger
from tfdp_rec.spending.statement import rounded_up
from tfdp_rec.sums.set_union import private_items

_TRAIN = 0.8  # of the users
_RECENCY = 0.25  # where rows have times; see docs/spectral.md
_SCORES = 2**24  # at once, while testing: 64 MB, and a few times that
_SEEN = (
    "A day before had {users:,} users, too: if these are the same data, end this by Ctrl-C, or they are paid for again "
    "and count twice."
)


class Progress:
    """Says what is being done, i of n, and how long it took.

    Args:
        steps: n.
        verbose: 0 says nothing; 1 counts within a step, too.
    """

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
        """Shows how many of how many, on a terminal.

        Args:
            words: what is counted.
            most: how many there will be.
        """

        def show(count: int) -> None:
            if self.verbose == 1:
                print(f"\r{'':10}{count:,} of {most:,} {words}", end="\n" if count >= most else "", flush=True)

        return show


def run(asked: Asked, kept: Kept, verbose: int = 1) -> RunFolder:
    """Does all of it, or what is not done yet, and writes the run folder.

    Args:
        asked: the log, and what to spend.
        kept: where the run is kept.
        verbose: 0 prints nothing.

    Raises:
        ValueError: the log is not what it should be, or something does not fit.
        OSError: a disk is full, or a file is not there.
    """
    show, columns = Progress(5, verbose), asked.columns
    if columns.titles:
        titles.columns_of(columns.titles, columns.item)  # before the log is read, which may take long
    show.begin("reading the log, and grouping it by user")
    log = Interactions.read(
        list(asked.terms.data), user=columns.user, item=columns.item, time=columns.time, folder=kept.log
    )
    show.note("for you alone, these counts are private: " + " ".join(log.summary().split("\n")).strip())
    try:
        return _Run(asked, kept, show, log, kept.opened(log)).whole()
    finally:
        kept.close()


class _Run:
    """One run, its log read."""

    def __init__(self, asked: Asked, kept: Kept, show: Progress, log: Interactions, ledger: Ledger):
        self.asked, self.kept, self.show, self.ledger = asked, kept, show, ledger
        self.everything, self.before = log, kept.earlier
        self.train, self.test = log.split(_TRAIN, key=f"tfdp-rec train {asked.terms.seed}")
        wanted = Lifetime.of(ledger.chain) if self.before else self._wanted(log)
        self.delta = wanted.delta
        self._check_users(log)
        decided = wanted.decided(ledger)
        self.budget = decided.budget
        decided.refuse_beyond(ledger, kept.to_pay(self.budget.events))
        self.recency = _RECENCY * log.ordered if asked.terms.recency is None else asked.terms.recency
        if self.before:
            self._check_kinds(log, self.before.items)
        self.public = Items.read(asked.columns.items, usual=[asked.columns.item]) if asked.columns.items else None
        kind, named = log.found()[1].type, asked.columns
        self.title_bytes = titles.check(named.titles, kind, named.item) if named.titles else 0
        self._refuse_full()
        if kept.seen:
            print(_SEEN.format(users=len(log)), file=sys.stderr)

    def _wanted(self, log: Interactions) -> Lifetime:
        terms, columns = self.asked.terms, self.asked.columns
        delta = min(1e-6, 1.0 / len(log)) if terms.delta is None else terms.delta
        return Lifetime(terms.epsilon, delta, self.asked.days.days, bool(columns.items), columns.items_epsilon)

    def _check_users(self, log: Interactions) -> None:
        if not len(self.train):
            raise ValueError(f"The log has {len(log)} users, too few to hold any back: nobody is left to learn from.")
        if self.delta > 1 / len(self.train):
            raise ValueError(
                f"--delta {self.delta:g} is above 1 / {len(self.train)} users: a mechanism that publishes one user's "
                "rows would still meet it. Choose a smaller one, on the first day."
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
        """Raises unless there is room for all that is going to be written, which is paid for before it is.

        Raises:
            OSError: naming the folder.
        """
        log, known = self.everything, self.before.items.ids if self.before else pa.array([], pa.string())
        new = log.found()[1] if self.public is None else self.public.ids
        most, ids = len(new) + len(known), new.nbytes + known.nbytes
        model = 4 * min(most, MOST_HEAD) ** 2 + 40 * most + 4 * ids + 2 * self.title_bytes + 2**22
        needed = {
            self.kept.directory: self._item_bytes() + _sums_bytes(most) + 12 * log.num_rows + 8 * len(log),
            self.kept.folder.release.path: _sums_bytes(most) + model, Path(tempfile.gettempdir()): 2 * ids,
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

    @property
    def spent(self) -> float:
        """ε of all days so far, by the ledger's entries alone."""
        return self.ledger.epsilon(self.delta)

    def whole(self) -> RunFolder:
        """From the items on."""
        log = self.everything.with_items(self._items())
        recommender = self._sums(log)
        results = self._tested(log, recommender)
        return self._released(log, recommender, results)

    def _items(self) -> Items:
        how = "finding items privately" if self.budget.items else "taking the items of the public list"
        self.show.begin(how)
        public = self.public
        items = self.kept.items(self._found if public is None else lambda payer: self._with(public), self._item_bytes())
        new = f", {len(items) - len(self.before.items):,} of them new" if self.before else ""
        self.show.note(f"{len(items):,} items{new}")
        return items

    def _with(self, joining: Items) -> Items:
        """What was known before keeps its numbers; the others follow, but for those that no vocabulary can hold."""
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

    def _found(self, payer: Payer) -> Items:
        assert self.budget.items is not None
        epsilon, delta = self.budget.items
        accountant = cast(Accountant, payer)  # pays as one does, and follows no training
        known = self.before.items.ids.to_pylist() if self.before else []
        found = private_items(self.everything, epsilon=epsilon, delta=delta, accountant=accountant, known=known)
        paid = [payer.ledger.chain.payments[number].event for number in payer.numbers]
        if paid != [found.event] or found.event != self.budget.events[0]:
            raise RuntimeError(f"Finding items cost {found.event}, and {self.budget.events[0]} was planned for.")
        if self.before:
            return self._with(Items(list(found.terms))) if found.terms else self.before.items
        if not found.terms:
            raise ValueError(
                f"No item has so many users that it can be told privately at epsilon {epsilon:g} of {len(self.train)} "
                "users: give a public list (--items), more users, or a larger --epsilon; what was spent stays spent."
            )
        return self._with(Items(list(found.terms)))

    def _sums(self, log: Interactions) -> SpectralRecommender:
        users = f"{len(self.train):,} users, two readings, then minutes of algebra if there are thousands of items"
        self.show.begin(f"making private sums of {users}")
        counter = self.show.counter("users read", 2 * len(log))
        before = self.before.release.faded(self.asked.days.keep) if self.before else None
        unfitted = SpectralRecommender(
            log.catalogue.ids, None, self.delta, noise_multiplier=self.budget.sums, recency=self.recency, before=before
        )
        # It prints how many items its head has, which hangs on what it drew; until it is kept, nothing may.
        made = self.kept.sums(
            unfitted.event, lambda: unfitted.fit(ChosenUsers(log, self.train, counter), verbose=0),
            _sums_bytes(log.num_items),
        )
        self.show.note(f"pairs of {len(made.head):,} items were counted")
        return made

    def _tested(self, log: Interactions, recommender: SpectralRecommender) -> list[dict[str, Any]]:
        asked = self.test[:MOST_USERS]
        self.show.begin(f"testing on {len(asked):,} users who were held back")
        at_once = min(500, rows_at_a_time([1, log.num_items], _SCORES))
        tests = Tests(NewItems(log, asked), self.asked.terms.seed, at_once)
        if not len(tests):
            self.show.note("none of them has two different items: nothing can be tested")
            return []
        exact = popularity(ChosenUsers(log, self.train), log.catalogue)
        counts = [*self.budget.events[:-1], GaussianDpEvent(recommender.split.counts)]
        spent = self.spent  # counts alone are told apart on the first day; what they cost later is no more than all
        counted = spent if self.before else epsilon_of(ComposedDpEvent(counts), self.delta)
        who: list[tuple[str, Scores, float | None]] = [
            ("popularity", everybody_the_same(exact), None),
            ("dp-popularity", everybody_the_same(recommender.counts), counted),
            ("spectral", lambda context: recommender.scores([told[told > 0] for told in context]), spent),
        ]
        return [
            {"recommender": name, **measured_record(tests.measured(scores)), "epsilon": epsilon}
            for name, scores, epsilon in who
        ]

    def _released(
        self, log: Interactions, recommender: SpectralRecommender, results: list[dict[str, Any]]
    ) -> RunFolder:
        self.show.begin("writing the SavedModel and the report")
        folder, columns, terms = self.kept.folder, self.asked.columns, self.asked.terms
        assert log.items is not None
        named = titles.read(columns.titles, log.items, columns.item) if columns.titles else {}
        said = report.statement(self.budget, self.spent, recommender, len(log))
        folder.release.write_text(STATEMENT, said)
        with replacing(folder.release / SERVABLE) as temporary, writing_a_model(folder.release / SERVABLE):
            export(temporary, recommender, log.items, named, min(terms.top_k, log.num_items))
        about = {
            "job": "log", "when": datetime.datetime.now().isoformat(timespec="minutes"), "users": len(log),
            "train_users": len(self.train), "num_items": log.num_items, "day": recommender.released.fits,
        }  # fmt: skip
        config = {**about, **self.asked.as_config(), "delta": self.delta, "recency": self.recency}
        folder.private.write_json("results.json", results)
        report.write(folder, config, results, said, self.spent)
        folder.private.write_json(CONFIG, config)  # where it is, a run can be continued
        Earlier(log.items, recommender.released, self.ledger.mark).save(folder.path)  # last: where it is, it is whole
        if self.show.verbose:
            self._say(folder.path, results, named, log.num_items)
        return folder

    def _say(self, path: Path, results: list[dict[str, Any]], named: dict[Any, str], items: int) -> None:
        if self.asked.columns.titles:
            self.show.note(f"{len(named):,} of {items:,} items have a title")
        self.show.note("done")
        if results:
            print(f"\nHeld-back users, without noise, for you alone:\n{report.text(results)}")
        cost = f"epsilon = {rounded_up(self.spent):g} at delta = {self.delta:g}"
        print(f"\n{path / PRIVATE}/report.html   {path / RELEASE / SERVABLE}   {cost}")


def _sums_bytes(items: int) -> int:
    """What a file of the sums takes at most: two square arrays of the head, and a few numbers an item."""
    return 8 * min(items, MOST_HEAD) ** 2 + 80 * items + 2**20
