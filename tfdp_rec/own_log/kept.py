"""What a run on a log needs to be gone on with, in one folder that is as private as the log.

    DIR/run.json            what was asked for, where results go, a hash of the log, where the ledger stood
    DIR/log/                the log, grouped by user
    DIR/items.parquet       the items: found, and paid for, once; or as they were given
    DIR/recommender.npz     the private sums: made, and paid for, once

DIR is what --checkpoint says, and then stays as it is. Without it DIR is `private/resume` of the run folder: it goes
once the run is done; if the run is cut off, the log is removed, which can be grouped again, and what was paid for
stays.

**Nothing is spent twice, and nothing paid is lost.** The disk space for a release is reserved before it is paid for. A
release that is in its file is taken from there. **Ctrl-C** while one is being made gives its payment back, and so does
a disk that fails: what had been drawn is gone with the process, and until it is in its file nothing that is shown or
written hangs on it. After a crash nobody can say that, so that it stays paid, and the run cannot be gone on with.

**One ledger**, in the released part of the run folder from the start. A process holds it from before the first payment
to the end, so that no two days are added to the same sums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

from dp_accounting import DpEvent

from tfdp_rec import interruption
from tfdp_rec.data import Interactions, Items
from tfdp_rec.files import Path, hold, let_go, remove, replacing, unheld, writing
from tfdp_rec.own_log.earlier import RELEASED, Earlier, mark_of
from tfdp_rec.own_log.folders import JOB, RUN, is_kept
from tfdp_rec.own_log.settings import Asked
from tfdp_rec.run_folder import LEDGER, PRIVATE, RESUME, SERVABLE, STATEMENT, RunFolder, find
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spending.ledger import ZERO_OUT, Ledger, read
from tfdp_rec.spending.ledger_lines import Mark, Snapshot
from tfdp_rec.sums import set_union

LOG = "log"
_ITEMS, _SUMS = "items.parquet", "recommender.npz"
_LABELS = {_ITEMS: set_union.LABEL, _SUMS: "private sums"}
NOTHING, RESUMABLE, LOST = "nothing was paid", "all that was paid for is kept", "what was paid for was not kept"


class Payer:
    """What `private_items` pays through: like an `Accountant`, one ledger, and no training.

    Args:
        ledger: the ledger to pay in.
        paid: a function that is called when something was paid.
    """

    def __init__(self, ledger: Ledger, paid: Callable[[], None]):
        self.ledger, self.numbers, self._paid = ledger, list[int](), paid

    def spend(self, event: DpEvent, label: str) -> None:
        """Pays, durably; the log may be looked at once this has returned."""
        with interruption.deferred():  # else a payment could stand in the ledger that nobody knows of
            self.numbers.append(self.ledger.pay(event, label=label, settings={"sampling": None}))
            self._paid()

    def give_back(self) -> None:
        """Takes back all of it."""
        for number in self.numbers:
            self.ledger.give_back(number, 1)


class Kept:
    """The folder of one run, held by this process.

    Args:
        directory: the folder; made if missing.
        asked: what the run is asked for.
        out: the run folder.
        continues: where the ledger of the run folder stood when its sums were released, if this adds a day to them.

    Attributes:
        earlier: what the days before have released; None on the first.
        seen: whether a day before had data of the same public count and shape.

    Raises:
        ValueError: another process has it.
        OSError: nothing can be written there.
    """

    def __init__(self, directory: Path, asked: Asked, out: Path, continues: Mark | None = None):
        self.directory, self.asked, self.out = pathlib.Path(directory).absolute(), asked, os.path.abspath(out)
        self.earlier: Earlier | None = None
        self.seen = False
        self._continues, self._since = continues, 0
        self._data, self._mark = "", dict[str, Any]()
        self._ledger: Ledger | None = None
        self.folder = RunFolder.reopened(self.out)
        hold(self.directory)
        _adopt(self.directory, self.out)

    @classmethod
    def fresh(cls, directory: Path | None, asked: Asked, out: Path, continues: Mark | None = None) -> Kept:
        """For a run, or a day, that begins.

        Args:
            directory: the folder; in the run folder if None.
            asked: what the run is asked for.
            out: the run folder.
            continues: as in the constructor.

        Raises:
            ValueError: one has begun there.
        """
        place = resume_folder(out) if directory is None else pathlib.Path(directory)
        if (place / RUN).exists():
            hold(place)
            let_go(place)
            if directory is not None:
                raise ValueError(f"{directory} holds a run: go on with it by --resume, or give another --checkpoint.")
            if clear(place) == RESUMABLE:
                raise ValueError(
                    f"{out} holds a run that was cut off, and all that it paid for: go on with it, {how(None, out)}; "
                    f"or, to give that up, remove {place}."
                )
        if continues is None:
            _refuse_paid(out)
        kept = cls(place, asked, out, continues)
        if continues is None:
            _remove_unpaid(kept.folder.release / LEDGER)
        kept._write()
        return kept

    @classmethod
    def going_on(cls, directory: Path, given: Callable[[Asked], Asked], out: Path | None) -> Kept:
        """Of a run that goes on.

        Args:
            directory: where it was kept.
            given: a function from what it was asked for to what it is asked for now.
            out: the run folder that it is asked for now.

        Raises:
            ValueError: it is asked for something else than it began with, or the folder was changed.
        """
        path = pathlib.Path(directory) / RUN
        try:
            run = _run_of(directory)
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
            log: the log whose users it protects.

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
        data, path = Snapshot(len(log), "user, item, time"), self.folder.release / LEDGER
        if (self._continues or self._mark) and not path.exists():
            raise ValueError(f"{path} is gone, so that nobody knows what was spent: put the newest one back.")
        ledger = self._ledger = Ledger(path, "user", data, ZERO_OUT, data_changed=bool(self._continues or self._mark))
        try:
            self._check_ledger(ledger)
        except BaseException:
            self.close()
            raise
        self.seen = any(paid.data == data.id for paid in ledger.paid if paid.number < self._since)
        self._marked()
        return ledger

    def _check_ledger(self, ledger: Ledger) -> None:
        """It is this run's, and nothing was added to it since; what was released is read while nobody else can add."""
        if self._mark:
            ledger.refuse_behind(0, Mark(**self._mark))
        if self._continues:
            self.earlier = Earlier.load(self.out)
            ledger.refuse_behind(0, self.earlier.mark)
            if self.earlier.mark != self._continues:
                raise self._gone_on()
            self._since = self._since or ledger.mark.lines
        elif self._mark and self._all_kept() and any(paid.number >= self._mark["lines"] for paid in ledger.paid):
            raise self._gone_on()

    def _all_kept(self) -> bool:
        return all((self.directory / name).exists() for name in _LABELS)

    def _gone_on(self) -> ValueError:
        return ValueError(
            f"{self.out} has gone on since this was begun in {self.directory}, so that nothing is left to do here: add "
            f"a day to it with --continue {self.out}, and another --checkpoint."
        )

    def to_pay(self, events: Sequence[DpEvent]) -> list[DpEvent]:
        """Those of a day's releases that are not in their files.

        Args:
            events: what the day's releases cost; the sums last.

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
        if self._ledger is not None:
            self._ledger.close()

    # Releases.

    def items(self, find: Callable[[Payer], Items], most: int) -> Items:
        """The items: as they were found, or found now that they are paid for.

        Args:
            find: a function that finds them, and pays.
            most: bytes that their file may have.
        """
        return Items.read(self._released(_ITEMS, most, find))

    def sums(self, event: DpEvent, make: Callable[[], SpectralRecommender], most: int) -> SpectralRecommender:
        """The recommender: as it was made, or made now that it is paid for.

        Args:
            event: what it costs.
            make: a function that makes it.
            most: bytes that its file may have.
        """

        def paid(payer: Payer) -> SpectralRecommender:
            payer.spend(event, _LABELS[_SUMS])
            return make()

        return SpectralRecommender.load(self._released(_SUMS, most, paid))

    def _released(self, name: str, most: int, make: Callable[[Payer], Items | SpectralRecommender]) -> pathlib.Path:
        """The file of a release: paid for, made, and put there now that there is room for it, unless it is there."""
        assert self._ledger is not None
        path, payer = self.directory / name, Payer(self._ledger, self._marked)
        if path.exists():
            return path
        self._refuse_lost()
        try:
            with writing(path, "wb", private=True, reserve=most) as file:
                make(payer).write(file)
        except (KeyboardInterrupt, OSError):
            if not path.exists():  # else it was kept, and is paid for
                with interruption.deferred():
                    payer.give_back()
                    self._marked()
            raise
        return path

    def _refuse_lost(self) -> None:
        assert self._ledger is not None
        lost = _lost(self._ledger.paid, self._since, self.directory)
        if lost:
            another = "begin the day again, with --continue," if self._continues else "begin another run"
            raise ValueError(
                f"{self._ledger.path} has paid for the {lost[0]} of a run that ended before it kept it, and to "
                f"make it again would cost as much again: {another} in another --checkpoint."
            )

    def _marked(self) -> None:
        assert self._ledger is not None
        self._mark = dataclasses.asdict(self._ledger.mark)
        self._write()

    def _write(self) -> None:
        continues = dataclasses.asdict(self._continues) if self._continues else None
        out = None if self.in_run_folder else self.out  # a run folder may be moved
        run = {"job": JOB, "asked": self.asked.as_config(), "out": out, "continues": continues}
        with writing(self.directory / RUN, private=True) as file:
            json.dump({**run, "since": self._since, "data": self._data, "ledger": self._mark}, file, indent=1)

    # The end.

    @property
    def in_run_folder(self) -> bool:
        """Whether nobody asked for this to be kept."""
        return self.directory == resume_folder(self.out)

    def ended(self, done: bool) -> str:
        """Closes the ledger, and removes what is not needed any more where nobody asked for it to be kept.

        Args:
            done: whether the run is done.

        Returns:
            NOTHING, RESUMABLE or LOST.
        """
        self.close()
        let_go(self.directory)
        if not self.in_run_folder:
            return state(self.directory)
        if done:
            remove(self.directory)
            return RESUMABLE
        found = clear(self.directory)
        if found == NOTHING and self._continues is None:
            _remove_unpaid(self.folder.release / LEDGER)
            self.folder.remove_if_empty()
        return found


def resume_folder(out: Path) -> pathlib.Path:
    """Where a run is kept if nobody says where.

    Args:
        out: the run folder.
    """
    return pathlib.Path(out).absolute() / PRIVATE / RESUME


def how(checkpoint: Path | None, out: Path) -> str:
    """The command that goes on with a run.

    Args:
        checkpoint: where it is kept; None for the run folder.
        out: the run folder.
    """
    return f"tfdp-rec train {f'--checkpoint {checkpoint}' if checkpoint else f'--out {out}'} --resume"


def state(directory: Path) -> str:
    """What became of what a run has paid: NOTHING, RESUMABLE or LOST.

    Args:
        directory: where it is kept. What was changed there counts as RESUMABLE: it is for somebody to look at.
    """
    try:
        return _state(pathlib.Path(directory), _run_of(directory))
    except (KeyError, OSError, TypeError, ValueError):
        return RESUMABLE


def _state(directory: pathlib.Path, run: dict[str, Any]) -> str:
    released, ledger = find(run["out"], RELEASED), find(run["out"], LEDGER)
    if run["continues"] and (not released.exists() or mark_of(released) != Mark(**run["continues"])):
        return NOTHING  # that day is done, or another was added since
    if not run["continues"] and released.exists():
        return NOTHING
    if not run["ledger"]:
        return NOTHING
    paid = [each for each in read(ledger).paid if each.number >= run["since"]]
    return LOST if _lost(paid, run["since"], directory) else RESUMABLE if paid else NOTHING


def clear(directory: pathlib.Path) -> str:
    """Removes the log that a process left, and all of the folder unless it holds what was paid for.

    Args:
        directory: of a run that nobody asked to be kept, and that no process holds.

    Returns:
        What became of what the run has paid.
    """
    remove(directory / LOG)
    for left in directory.glob(f".*.{LOG}"):  # half grouped
        remove(left)
    found = state(directory)
    if found != RESUMABLE:
        remove(directory)
    return found


def sweep(runs: pathlib.Path) -> list[str]:
    """Removes what killed processes left of users' logs, where nobody asked for it to be kept.

    Args:
        runs: the folder that run folders are in.

    Returns:
        How to go on with each run that was cut off and has kept what it paid for.
    """
    commands = []
    for lock in [*runs.glob(f"*/{PRIVATE}/{RESUME}/in-use"), *runs.glob(".*.private/in-use")]:
        directory = lock.parent
        with unheld(directory) as free:
            if free and is_kept(directory):
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    _adopt(directory, _run_of(directory)["out"])
                was_there = (directory / LOG).exists()
                if clear(directory) == RESUMABLE and was_there:
                    ours = directory.name == RESUME
                    commands.append(how(None if ours else directory, directory.parent.parent))
    return commands


def _run_of(directory: Path) -> dict[str, Any]:
    path = pathlib.Path(directory).absolute()
    run = json.loads((path / RUN).read_text(encoding="utf-8"))
    run["out"] = run["out"] or os.fspath(path.parent.parent)
    return run


def _lost(paid: Sequence[Any], since: int, directory: pathlib.Path) -> list[str]:
    """What was paid for since then, and is in no file."""
    kept = {label for name, label in _LABELS.items() if (directory / name).exists()}
    return [each.label for each in paid if each.number >= since and each.label not in kept]


def _refuse_paid(out: Path) -> None:
    """Raises if a run folder holds a ledger that has paid, or one that may have."""
    written = any(find(out, name).exists() for name in (RELEASED, SERVABLE, STATEMENT))
    if written or _may_have_paid(find(out, LEDGER)):
        raise FileExistsError(
            f"{out} holds the ledger of a run that was cut off after it had paid: give another --out."
        )


def _may_have_paid(path: pathlib.Path) -> bool:
    """Whether a ledger holds a payment, or cannot be read; an empty file is what Ctrl-C at its making left."""
    try:
        return path.exists() and path.stat().st_size > 0 and bool(read(path).paid)
    except ValueError:
        return True


def _remove_unpaid(path: pathlib.Path) -> None:
    """Removes a ledger that has paid for nothing: what it says of a budget is not for another run.

    Raises:
        ValueError: a process has it open.
    """
    if path.exists() and not _may_have_paid(path):
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"{path} is in use by another run: give another --out.") from None
            path.unlink()


def _adopt(directory: pathlib.Path, out: Path) -> None:
    """Puts the ledger that an older version kept beside the log into the run folder, where it belongs.

    Raises:
        ValueError: another run's is there.
    """
    mine = directory / LEDGER
    if not mine.exists():
        return
    path = RunFolder.reopened(out).release / LEDGER
    if not path.exists():
        with replacing(path) as temporary:
            shutil.copyfile(mine, temporary)
            os.chmod(temporary, 0o600)
    elif not path.read_bytes().startswith(mine.read_bytes()):
        raise ValueError(f"{path} is the ledger of another run than {mine}: move one of the two folders away first.")
    mine.unlink()


def _hash(folder: pathlib.Path) -> str:
    """Of all that is in a grouped log; it never leaves a folder that is as private."""
    digest = hashlib.sha256()
    for name in ("users.arrow", "offsets.bin", "found.arrow", "rows.bin", "times.bin"):
        if (folder / name).exists():
            with open(folder / name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
