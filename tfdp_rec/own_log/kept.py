"""What a run on a log needs to be gone on with, in one folder that is as private as the log.

    DIR/run.json            what was asked for, where results go, a hash of the log, where the ledger stood
    DIR/ledger.jsonl        what was paid, each release before the log was looked at for it
    DIR/log/                the log, grouped by user
    DIR/items.parquet       the items: found, and paid for, once; or as they were given
    DIR/recommender.npz     the private sums: made, and paid for, once

**Nothing is spent twice.** A release that is in its file is taken from there. **Ctrl-C** while one is being made gives
its payment back: what had been drawn is gone with the process, and until it is in its file nothing that is shown or
written hangs on it. After a crash nobody can say that, so that it stays paid, and the run cannot be gone on with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from dp_accounting import DpEvent

from tfdp_rec.data import Interactions, Items
from tfdp_rec.files import Path, hold, writing
from tfdp_rec.movies.kept import refuse_changed
from tfdp_rec.own_log.folders import JOB, RUN
from tfdp_rec.own_log.settings import Asked
from tfdp_rec.privacy import Ledger, Snapshot, set_union
from tfdp_rec.privacy.ledger import ZERO_OUT
from tfdp_rec.privacy.ledger_lines import Mark
from tfdp_rec.spectral import SpectralRecommender

LEDGER, LOG = "ledger.jsonl", "log"
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

    Raises:
        ValueError: another process has it.
    """

    def __init__(self, directory: Path, asked: Asked, out: Path):
        self.directory, self.asked, self.out = pathlib.Path(directory).absolute(), asked, os.path.abspath(out)
        self._data, self._mark = "", dict[str, Any]()
        self._ledger: Ledger | None = None
        hold(self.directory)

    @classmethod
    def fresh(cls, directory: Path, asked: Asked, out: Path) -> Kept:
        """For a run that begins.

        Raises:
            ValueError: one has begun there.
        """
        if os.path.exists(os.path.join(directory, RUN)):
            raise ValueError(f"{directory} holds a run: go on with it by --resume, or give another --checkpoint.")
        kept = cls(directory, asked, out)
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
            before, data, mark = Asked.from_json(run["asked"]), run["data"], run["ledger"]
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None
        now = given(before)
        refuse_changed(before.columns, now.columns, directory)
        refuse_changed(before.terms, now.terms, directory)
        if out and os.path.abspath(out) != run["out"]:
            raise ValueError(f"The run in {directory} writes to {run['out']}: leave --out out to go on with it.")
        kept = cls(directory, before, run["out"])
        kept._data, kept._mark = data, mark
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
            ValueError: it is another log than the run was begun with.
            BrokenLedger: the ledger was deleted, or put back from an older backup.
        """
        found = _hash(log.folder)
        if self._data not in ("", found):
            raise ValueError(
                f"The run in {self.directory} was begun with another log: put that back to go on; for this one, begin "
                "another run in another --checkpoint."
            )
        self._data = found
        self._ledger = Ledger(self.directory / LEDGER, "user", Snapshot(len(log), "user, item, time"), ZERO_OUT)
        if self._mark:
            self._ledger.refuse_behind(0, Mark(**self._mark))
        self._marked()
        return self._ledger

    def close(self) -> None:
        """Lets another own the ledger."""
        if self._ledger is not None:
            self._ledger.close()

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
        lost = [paid for paid in self._ledger.paid if paid.label not in self._kept_labels()]
        if lost:
            raise ValueError(
                f"{self._ledger.path} has paid for the {lost[0].label} of a run that ended before it kept it, and to "
                "make it again would cost as much again: begin another run in another --checkpoint."
            )
        payer = Payer(self._ledger, self._marked)
        try:
            yield payer
        except KeyboardInterrupt:
            if not path.exists():  # else it was kept, and is paid for
                payer.give_back()
                self._marked()
            raise

    def _kept_labels(self) -> set[str]:
        return {label for name, label in _LABELS.items() if (self.directory / name).exists()}

    def _marked(self) -> None:
        assert self._ledger is not None
        self._mark = dataclasses.asdict(self._ledger.mark)
        self._write()

    def _write(self) -> None:
        run = {"job": JOB, "asked": dataclasses.asdict(self.asked), "out": self.out}
        with writing(self.directory / RUN, private=True) as file:
            json.dump({**run, "data": self._data, "ledger": self._mark}, file, indent=1)

    def remove(self) -> None:
        """Removes all of it, where nobody asked for it to be kept."""
        self.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _hash(folder: pathlib.Path) -> str:
    """Of all that is in a grouped log; it never leaves a folder that is as private."""
    digest = hashlib.sha256()
    for name in ("users.arrow", "offsets.bin", "found.arrow", "rows.bin", "times.bin"):
        if (folder / name).exists():
            with open(folder / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
