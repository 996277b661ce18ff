"""What a run on a log needs to be gone on with, in one folder that is as private as the log.

    DIR/run.json            what was asked for, where results go, a hash of the log, where the ledger stood
    DIR/ledger.jsonl        what was paid, each release before the log was looked at for it; a day that continues a
                            run has none, and pays in that of the run
    DIR/log/                the log, grouped by user
    DIR/items.parquet       the items: found, and paid for, once; or as they were given
    DIR/recommender.npz     the private sums: made, and paid for, once

**Nothing is spent twice.** A release that is in its file is taken from there. **Ctrl-C** while one is being made gives
its payment back: what had been drawn is gone with the process, and until it is in its file nothing that is shown or
written hangs on it. After a crash nobody can say that, so that it stays paid, and the run cannot be gone on with.

**One ledger.** A run's is in its run folder once it is done, and grows there. A day that continues it holds it from
before the first payment to the end, so that no two days are added to the same sums; so does a first day that is written
anew. Another run's is never written over. Where nobody asked for DIR to be kept, what was paid goes to the run folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dp_accounting import DpEvent

from tfdp_rec.data import Interactions, Items
from tfdp_rec.files import Path, hold, writing
from tfdp_rec.own_log.earlier import Earlier
from tfdp_rec.own_log.folders import JOB, LEDGER, RUN, copy_ledger, leave_ledger
from tfdp_rec.own_log.settings import Asked
from tfdp_rec.privacy import Ledger, Snapshot, set_union
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spending.ledger import ZERO_OUT, read
from tfdp_rec.spending.ledger_lines import Mark

LOG = "log"
_ITEMS, _SUMS = "items.parquet", "recommender.npz"
_LABELS = {_ITEMS: set_union.LABEL, _SUMS: "private sums"}


class Payer:
    """What `private_items` pays through: like an `Accountant`, one ledger, and no training.

    Args:
        ledger: to pay in.
        paid: called when something was.
    """

    def __init__(self, ledger: Ledger, paid: Callable[[], None]):
        self.ledger, self.numbers, self._paid = ledger, list[int](), paid

    def spend(self, event: DpEvent, label: str) -> None:
        """Pays, durably; the log may be looked at once this has returned."""
        self.numbers.append(self.ledger.pay(event, label=label, settings={"sampling": None}))
        self._paid()

    def give_back(self) -> None:
        """Takes back all of it."""
        for number in self.numbers:
            self.ledger.give_back(number, 1)


class Kept:
    """The folder of one run, held by this process.

    Args:
        directory: made if missing.
        asked: what the run is asked for.
        out: its run folder.
        continues: where the ledger of the run folder stood when its sums were released, if this adds a day to them.

    Attributes:
        earlier: what the days before have released; None on the first.
        seen: a day before had data of the same public count and shape.

    Raises:
        ValueError: another process has it.
    """

    def __init__(self, directory: Path, asked: Asked, out: Path, continues: Mark | None = None):
        self.directory, self.asked, self.out = pathlib.Path(directory).absolute(), asked, os.path.abspath(out)
        self.earlier: Earlier | None = None
        self.seen = False
        self._continues, self._since = continues, 0
        self._data, self._mark = "", dict[str, Any]()
        self._ledger: Ledger | None = None
        self._handed_over: Ledger | None = None
        hold(self.directory)

    @classmethod
    def fresh(cls, directory: Path, asked: Asked, out: Path, continues: Mark | None = None) -> Kept:
        """For a run, or a day, that begins.

        Raises:
            ValueError: one has begun there.
        """
        if os.path.exists(os.path.join(directory, RUN)):
            hold(directory)
            raise ValueError(f"{directory} holds a run: go on with it by --resume, or give another --checkpoint.")
        kept = cls(directory, asked, out, continues)
        kept._write()
        return kept

    @classmethod
    def going_on(cls, directory: Path, given: Callable[[Asked], Asked], out: Path | None) -> Kept:
        """Of a run that goes on.

        Args:
            directory: where it was kept.
            given: what it is asked for now, from what it was asked for.
            out: the run folder that it is asked for now.

        Raises:
            ValueError: it is asked for something else than it began with, or the folder was changed.
        """
        path = pathlib.Path(directory) / RUN
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
            before, data, mark = Asked.from_config(run["asked"]), run["data"], run["ledger"]
            continues, since = Mark(**run["continues"]) if run["continues"] else None, run["since"]
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None
        now = given(before)
        now.refuse_other(before, {}, directory)
        if out and os.path.abspath(out) != run["out"]:
            raise ValueError(f"The run in {directory} writes to {run['out']}: leave --out out to go on with it.")
        kept = cls(directory, before, run["out"], continues)
        kept._data, kept._mark, kept._since = data, mark, since
        return kept

    @property
    def log(self) -> pathlib.Path:
        """Where the log is grouped."""
        return self.directory / LOG

    def opened(self, log: Interactions) -> Ledger:
        """The ledger, from now on; call `close` in the end.

        Args:
            log: whose users it protects.

        Raises:
            ValueError: it is another log than the run was begun with, or the run has gone on since.
            BrokenLedger: the ledger was deleted, or put back from an older backup.
        """
        found = _hash(log.folder)
        if self._data not in ("", found):
            raise ValueError(
                f"The run in {self.directory} was begun with another log: put that back to go on; for this one, begin "
                "another run in another --checkpoint."
            )
        self._data = found
        data = Snapshot(len(log), "user, item, time")
        ledger = self._ledger = self._one_that_grows(data) if self._continues else self._first(data)
        if self._mark:
            ledger.refuse_behind(0, Mark(**self._mark))
        elif self._continues:
            self._since = ledger.mark.lines
        self.seen = any(paid.data == data.id for paid in ledger.paid if paid.number < self._since)
        self._marked()
        return ledger

    def _first(self, data: Snapshot) -> Ledger:
        path, copy = self.directory / LEDGER, pathlib.Path(self.out) / LEDGER
        if copy.exists():
            self._refuse_other(copy)
            # Nobody adds a day while this is written anew; looked at again, now that nobody can.
            self._handed_over = Ledger(copy, "user", data, ZERO_OUT, data_changed=True)
            self._refuse_other(copy)
        return Ledger(path, "user", data, ZERO_OUT)

    def _refuse_other(self, copy: pathlib.Path) -> None:
        """Raises unless a run folder's ledger is this run's, as it was handed over."""
        path = self.directory / LEDGER
        mine, there = read(path).lines if path.exists() else [], read(copy).lines
        if len(there) > (len(mine) or self._mark.get("lines", 0)) and there[: len(mine)] == mine:
            raise self._gone_on()
        if not mine or there == mine:
            return
        raise ValueError(
            f"{copy} is the ledger of another run, which was begun after this one in {self.directory}: to write there "
            "would lose what it has spent. Move that folder away first, to go on with this one."
        )

    def hand_over(self) -> None:
        """Puts the ledger of a first day into the run folder, where the days that follow pay; nobody else's is lost.

        Raises:
            ValueError: another run's is there, or this one's that has grown.
        """
        copy = pathlib.Path(self.out) / LEDGER
        if copy.exists():
            self._refuse_other(copy)
        else:
            copy_ledger(self.directory, copy.parent)

    def _one_that_grows(self, data: Snapshot) -> Ledger:
        """That of the run folder; what was released by then is read while nobody else can add to it."""
        path = pathlib.Path(self.out) / LEDGER
        if not path.exists():
            raise ValueError(f"{path} is gone, so that nobody knows what was spent: put the newest one back.")
        ledger = Ledger(path, "user", data, ZERO_OUT, data_changed=True)
        try:
            self.earlier = Earlier.load(self.out)
            ledger.refuse_behind(0, self.earlier.mark)
            if self.earlier.mark != self._continues:
                raise self._gone_on()
        except BaseException:
            ledger.close()
            raise
        return ledger

    def _gone_on(self) -> ValueError:
        return ValueError(
            f"{self.out} has gone on since this was begun in {self.directory}, so that nothing is left to do here: add "
            f"a day to it with --continue {self.out}, and another --checkpoint."
        )

    def to_pay(self, events: Sequence[DpEvent]) -> list[DpEvent]:
        """Those of a day's releases that are not in their files.

        Args:
            events: of the day; the sums last.

        Raises:
            ValueError: one was paid for already, and what came out was not kept.
        """
        names = [_SUMS] if len(events) == 1 else [_ITEMS, _SUMS]
        left = [event for name, event in zip(names, events) if not (self.directory / name).exists()]
        if left:
            self._refuse_lost()
        return left

    def close(self) -> None:
        """Lets another own the ledger."""
        for ledger in (self._ledger, self._handed_over):
            if ledger is not None:
                ledger.close()

    # Releases.

    def items(self, find: Callable[[Payer], Items]) -> Items:
        """The items: as they were found, or found now that they are paid for."""
        path = self.directory / _ITEMS
        if not path.exists():
            with self._paying(path) as payer:
                find(payer).save(path)
                path.chmod(0o600)
        return Items.read(path)

    def sums(self, event: DpEvent, make: Callable[[], SpectralRecommender]) -> SpectralRecommender:
        """The recommender: as it was made, or made now that it is paid for.

        Args:
            event: what it costs.
            make: makes it.
        """
        path = self.directory / _SUMS
        if not path.exists():
            with self._paying(path) as payer:
                payer.spend(event, _LABELS[_SUMS])
                make().save(path)
                path.chmod(0o600)
        return SpectralRecommender.load(path)

    @contextlib.contextmanager
    def _paying(self, path: pathlib.Path) -> Iterator[Payer]:
        """Where a release is paid for, made, and put into its file."""
        assert self._ledger is not None
        self._refuse_lost()
        payer = Payer(self._ledger, self._marked)
        try:
            yield payer
        except KeyboardInterrupt:
            if not path.exists():  # else it was kept, and is paid for
                payer.give_back()
                self._marked()
            raise

    def _refuse_lost(self) -> None:
        assert self._ledger is not None
        since = [paid for paid in self._ledger.paid if paid.number >= self._since]
        lost = [paid for paid in since if paid.label not in self._kept_labels()]
        if lost:
            another = "begin the day again, with --continue," if self._continues else "begin another run"
            raise ValueError(
                f"{self._ledger.path} has paid for the {lost[0].label} of a run that ended before it kept it, and to "
                f"make it again would cost as much again: {another} in another --checkpoint."
            )

    def _kept_labels(self) -> set[str]:
        return {label for name, label in _LABELS.items() if (self.directory / name).exists()}

    def _marked(self) -> None:
        assert self._ledger is not None
        self._mark = dataclasses.asdict(self._ledger.mark)
        self._write()

    def _write(self) -> None:
        continues = dataclasses.asdict(self._continues) if self._continues else None
        run = {"job": JOB, "asked": self.asked.as_config(), "out": self.out, "continues": continues}
        with writing(self.directory / RUN, private=True) as file:
            json.dump({**run, "since": self._since, "data": self._data, "ledger": self._mark}, file, indent=1)

    def remove(self) -> None:
        """Removes all of it, where nobody asked for it to be kept; what a first day has paid is in its run folder."""
        self.close()
        leave_ledger(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)


def _hash(folder: pathlib.Path) -> str:
    """Of all that is in a grouped log; it never leaves a folder that is as private."""
    digest = hashlib.sha256()
    for name in ("users.arrow", "offsets.bin", "found.arrow", "rows.bin", "times.bin"):
        if (folder / name).exists():
            with open(folder / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
