"""What a run has paid for and released so far, and the folders that hold it: to be resumed, and to add days to.

A run that is resumed reads one folder, which is as private as the log:

    DIR/run.json            settings, where results go, a hash of the log, noise multipliers, where the ledgers stood
    DIR/log/                the log, grouped by user
    DIR/items.parquet       the items: found, and paid for, once; or as they were given
    DIR/prior.npy           the popularity prior of two-towers: counted, and paid for, once
    DIR/recommender.npz     the private sums: made, and paid for, once
    DIR/begins_with.npz     private sums to train upon: made, and paid for, once
    DIR/NAME/...            training checkpoints; result.json once a recommender is done

DIR is what --checkpoint says, and then stays as it is. Without it DIR is `private/resume` of the run folder: it goes
once the run is done; if the run is cut off, the log is removed, which can be grouped again, and what was paid for
stays.

**Nothing is spent twice, and nothing paid is lost.** The disk space for a release is reserved before it is paid for. A
release that is in its file is taken from there. **Ctrl-C** while one is being made gives its payment back, and so does
a disk that fails: what had been drawn is gone with the process, and until it is in its file nothing that is shown or
written depends on it. A crash cannot tell, so that the release stays paid, and the run cannot be resumed. Training
steps are paid for in blocks; those that a crash cut off are made again, and stay paid for.

**Ledgers.** Each recommender that claims an ε has one, with everything that it cost: the released one's is
RUN/release/ledger.jsonl, those only compared have RUN/private/ledgers/NAME.jsonl. A process holds them from before the
first payment to the end, so that no two days are added to the same release.

**Days.** A day that is added starts from one file, which is written last of all, and whole: where it says day t, all
else of day t is there. It holds what was released under the run's ε, and public titles.

    RUN/release/released.npz    the recommender's items and titles, where the ledger stood; of private sums, the sums
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pathlib
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tfdp_rec.core.claim.events import DpEvent
from tfdp_rec.core.claim.ledger import Ledger, Mark, Paid, Snapshot, read
from tfdp_rec.core.claim.statement import Statement
from tfdp_rec.core.ground import interruption
from tfdp_rec.core.ground.files import Path, digest, end_hold, hold, hold_if_free, open_atomically, remove
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.job.budget import LABELS, Budget
from tfdp_rec.job.evaluation import Evaluation
from tfdp_rec.job.run_folder import CONFIG, FINAL, LEDGER, MODEL, PRIVATE, RELEASE, RELEASED, SEATS, RunFolder, find
from tfdp_rec.job.settings import ELSEWHERE, JobSettings
from tfdp_rec.job.sources import LogSource
from tfdp_rec.job.users import Users
from tfdp_rec.metrics import Mean
from tfdp_rec.spectral import Release, SpectralRecommender

LOG, RUN, RESUME, LEDGERS = "log", "run.json", "resume", "ledgers"
TIMELINES = "timelines"  # what a cluster's workers read, as long as a training lasts
NOTHING, RESUMABLE, LOST = "nothing was paid", "all that was paid for is kept", "what was paid for was not kept"
Loaded = TypeVar("Loaded")
_FREE = ("learning_rate", "top_k", "titles")  # these cost nothing, and may change
_WRONG_JSON = (AttributeError, KeyError, TypeError, ValueError)
_BROKEN = (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile)


# Days.


@dataclasses.dataclass(frozen=True, eq=False)
class WarmStart:
    """What the days so far have released."""

    items: Items  # all that are known
    mark: Mark  # where the ledger stood
    release: Release | None  # the sums; None for a two-tower
    titles: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    model: str = ""  # hash of the model's file beside it, if there is one

    def save(self, folder: Path, recommender: Any = None) -> None:
        """Writes it into a run folder; with private sums, as a file that `SpectralRecommender.load` reads, too."""
        titles = pa.array([self.titles.get(item) for item in self.items.ids.to_pylist()], pa.string())
        ids = io.BytesIO()
        pa.parquet.write_table(pa.table({"item": self.items.ids, "title": titles}), ids)
        arrays: dict[str, Any] = {
            "mark": json.dumps(dataclasses.asdict(self.mark)), "items": np.frombuffer(ids.getvalue(), np.uint8)
        }  # fmt: skip
        if os.path.isfile(model := find(folder, MODEL)):
            arrays["model"] = digest(model)
        with open_atomically(find(folder, RELEASED), "wb") as file:
            if isinstance(recommender, SpectralRecommender):
                recommender.write(file, **arrays)
            else:
                np.savez(file, **arrays)

    @classmethod
    def load(cls, folder: Path) -> WarmStart:
        """What `save` wrote into a run folder."""
        path = find(folder, RELEASED)
        found = cls.read(path)
        if found is None and path.exists():
            raise _change_error(path, KeyError("items"))
        if found is None:
            raise ValueError(
                f"{folder} has no {RELEASED}, what it released, so that there is nothing to add a day to: it was "
                "cut off. Begin another run with --days."
            )
        return found

    @classmethod
    def read(cls, path: Path) -> WarmStart | None:
        """What `save` wrote, from the file itself; None if there is no file, or it has no ids of a run."""
        if not os.path.isfile(path):
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                if "items" not in file:
                    return None
                table = pa.parquet.read_table(io.BytesIO(file["items"].tobytes()))
                release = Release.from_arrays(file) if "released_counts" in file else None
                release = release and dataclasses.replace(release, of_run=True)
                mark = Mark(**json.loads(str(file["mark"])))
                model = str(file["model"]) if "model" in file else ""
        except _BROKEN as problem:
            raise _change_error(path, problem) from None
        pairs = zip(table["item"].to_pylist(), table["title"].to_pylist())
        titles = {item: title for item, title in pairs if title is not None}
        return cls(Items(table["item"].combine_chunks()), mark, release, titles, model)

    def refuse_another_model(self, path: Path, model: Path) -> None:
        """Refuses a model beside the file that is not the one of its run, whose items are others."""
        if self.model != digest(model):
            raise ValueError(
                f"{model} is not the model that {path} was written with, and its items may be others. If it is of "
                "another run, export it from that run's folder; if a day of this run was cut off, resume it first; if "
                "you saved it anew, export it in Python, with its items, by tfdp_rec.serving.export."
            )


def settings_to_continue(folder: Path) -> tuple[JobSettings, Mark]:
    """Settings of a run that a day is to be added to, its budget as its ledger has it; and where its ledger stood."""
    path, ledger, released = (find(folder, name) for name in (CONFIG, LEDGER, RELEASED))
    if not path.is_file() and released.exists():
        raise FileNotFoundError(
            f"--continue: {folder} has no {PRIVATE}/{CONFIG}, which says how its logs are read: continue it where it "
            "was made."
        )
    if not path.is_file():
        raise FileNotFoundError(f"--continue: there is no run in {folder}.")
    if released.exists() and not ledger.exists():
        raise ValueError(
            f"--continue: {folder} has no {LEDGER}, so that what was spent is not known: put the newest one back."
        )
    mark, decided = WarmStart.load(folder).mark, Budget.read(read(ledger))
    fixed = {name: value for name, value in dataclasses.asdict(decided).items() if name != "public"}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        # The others were made to compare on the first day's data, and were not released.
        alone = {"mechanism": [config.get("released", "spectral")], "export": None, "confidential": False}
        settings = JobSettings.from_config({**config, **fixed, **alone})
    except _WRONG_JSON as problem:
        raise _change_error(path, problem) from None
    if settings.user and bool(settings.items) != decided.public:
        raise ValueError(f"{path} was changed: its ledger was begun with other items. Put it back.")
    return settings, mark


def _change_error(path: Path, problem: Exception) -> ValueError:
    return ValueError(f"{path} was changed: put it back from a backup ({problem}).")


# A run.


@dataclasses.dataclass(frozen=True)
class Job:
    """What is known of a run once its log is read; no stage changes it."""

    settings: JobSettings
    source: LogSource
    state: RunState
    show: Progress
    log: Any  # Interactions, or a log on Spark; without a choice of items
    users: Users
    public: Items | None  # the list of items, where they are not found
    titles: pa.Table  # public, in columns `item` and `title`
    features: pa.Table  # public, in columns `item` and `feature`
    budget: Budget

    @property
    def chain(self) -> Ledger:
        """The ledger of the recommender that leaves the run."""
        return self.state.ledgers[self.settings.released_name]


@dataclasses.dataclass(frozen=True)
class Material:
    """What recommenders are made from, once the items are chosen, and what they are tested on."""

    log: Any  # with its items
    users: Users
    releases: Mapping[str | None, Any]  # by file: private sums, and the popularity of each item
    tests: Evaluation | None  # exact, and so with --confidential alone
    features: list[list[str]] | None = None  # public, of each item


@dataclasses.dataclass(frozen=True)
class MadeRecommender:
    """A recommender, and what it cost."""

    model: Any  # with `answers()`, to serve; and `save(path)` of one that is trained
    scores: Any  # function from contexts to scores, for tests
    epsilon: float = float("inf")  # of all that was spent on it
    statement: Statement | None = None
    noise_multiplier: float | None = None
    steps: int | None = None  # None where nothing is trained
    means: Mapping[str, Mean] | None = None  # results of tests, if they were made already


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

    def count(self, words: str, most: int, count: int) -> None:
        """So many of `most`, in a line of a terminal that the next count replaces."""
        if self.verbose == 1 and count <= most:
            print(f"\r{'':10}{count:,} of {most:,} {words}", end="\n" if count >= most else "", flush=True)


class ReleasePayment:
    """Payment for one release in several ledgers; `private_items` pays through it as through an `Accountant`."""

    def __init__(self, ledgers: Sequence[Ledger], keep_marks: Callable[[], None]):
        self.ledgers, self.numbers, self._keep_marks = ledgers, list[tuple[Ledger, int]](), keep_marks
        self.events = list[DpEvent]()  # what was paid for

    def spend(self, event: DpEvent, label: str) -> None:
        """Pays, durably; the log may be looked at once this has returned."""
        interruption.check_interruption()
        with interruption.defer_signals():  # else a payment could stand in a ledger that is never given back
            for ledger in self.ledgers:
                due = Budget.read(ledger).event_due(ledger, event, label)
                self.numbers.append((ledger, ledger.pay(due, label=label, settings={"sampling": None})))
            self.events.append(event)
            self._keep_marks()

    def give_back(self) -> None:
        """Takes back all of it."""
        with interruption.defer_signals():
            for ledger, number in self.numbers:
                ledger.give_back(number, 1)
            self._keep_marks()


class RunState:
    """The folder of one run, held by this process."""

    earlier: WarmStart | None = None  # releases of the days before
    is_familiar = False  # whether a day before had data of the same public count and shape

    def __init__(self, directory: Path, settings: JobSettings, out: Path, every: int, continues: Mark | None = None):
        self.directory, self.settings, self.out = pathlib.Path(directory).absolute(), settings, os.path.abspath(out)
        self.every, self.continues = every, continues
        self.ledgers = dict[str, Ledger]()  # by recommender, once `open` was called
        self.noises = dict[str, float]()  # σ of trainings, by name; empty until they are decided
        self.seats = ""  # the list of seats of this day, by its id; empty until they are taken
        self._data, self._since, self._marks = "", dict[str, int](), dict[str, Any]()  # by path in the run folder
        self.in_run_folder = self.directory == resume_folder(self.out)  # no --checkpoint was asked for
        _refuse_released_part(self.out, self.directory)
        self.folder = RunFolder(self.out)
        hold(self.directory)

    @classmethod
    def begin(
        cls, directory: Path | None, settings: JobSettings, out: Path, every: int, continues: Mark | None = None
    ) -> RunState:
        """For a run, or a day, that begins; in the run folder if no directory is given."""
        place = resume_folder(out) if directory is None else pathlib.Path(directory)
        if (place / RUN).exists():
            hold(place)
            end_hold(place)
            if directory is not None:
                raise ValueError(f"{directory} holds a run: go on with it by --resume, or give another --checkpoint.")
            if clear(place) == RESUMABLE:
                raise ValueError(
                    f"{out} holds a run that was cut off, and all that it paid for: go on with it, "
                    f"{resume_command(None, out)}; or, to give that up, remove {place}."
                )
        if continues is None:
            _refuse_another_run(out)
        state = cls(place, settings, out, every, continues)
        if continues is None:
            _remove_unpaid_ledgers(out)
        state._write()
        return state

    @classmethod
    def resume(
        cls, directory: Path, choose: Callable[[JobSettings], JobSettings], out: Path | None, every: int
    ) -> RunState:
        """Of a run that goes on; `choose` is a function from its settings to those that it is asked for now."""
        try:
            run = _read_run(directory)
            before = JobSettings.from_config(run["asked"])
            kept = {"_data": run["data"], "_marks": run["ledgers"], "_since": run["since"], "noises": run["noises"],
                    "seats": run.get("seats", "")}  # fmt: skip
            continues = Mark(**run["continues"]) if run["continues"] else None
        except FileNotFoundError:
            raise ValueError(f"{directory} holds no run to go on with: leave --resume out to begin one.") from None
        except _WRONG_JSON as problem:
            raise _change_error(pathlib.Path(directory) / RUN, problem) from None
        now = choose(before)
        now.refuse_changes(before, directory, _FREE)
        if out and os.path.abspath(out) != run["out"]:
            raise ValueError(f"The run in {directory} writes to {run['out']}: leave --out out to go on with it.")
        state = cls(directory, now, run["out"], every, continues)
        vars(state).update(kept)
        return state

    def _write(self) -> None:
        run = {
            "job": "log", "asked": dataclasses.asdict(self.settings), "since": self._since, "data": self._data,
            "out": None if self.in_run_folder else self.out,  # a run folder may be moved
            "continues": dataclasses.asdict(self.continues) if self.continues else None,
            "ledgers": self._marks, "noises": self.noises, "seats": self.seats,
        }  # fmt: skip
        with open_atomically(self.directory / RUN, private=True) as file:
            json.dump(run, file, indent=1)

    def keep(self, **decided: Any) -> None:
        """Keeps, durably, what was decided: `noises` that trainings begin with, or the list of `seats` of this day."""
        vars(self).update(decided)
        for name, ledger in self.ledgers.items():
            self._marks[self._paths[name]] = dataclasses.asdict(ledger.mark)
        self._write()

    def tell_owner(self, what: str) -> None:
        """Keeps what no ε covers, and so with --confidential alone."""
        if self.settings.confidential:
            self.folder.append({"counted": what}, "log.jsonl")

    # Ledgers.

    def open(self, log: Any, recommenders: Sequence[str], released: str) -> None:
        """Opens a ledger for each recommender by name, which this process holds until `close`."""
        found = _hash_log(log.folder) if isinstance(log, Interactions) else log.digest()
        if self._data not in ("", found):
            raise ValueError(
                f"The run in {self.directory} was begun with other data: put those back to go on; for these, begin "
                f"another run {ELSEWHERE}."
            )
        self._data, data, goes_on = found, Snapshot(len(log), "user, item, time"), bool(self.continues or self._marks)
        beside = {name: f"{PRIVATE}/{LEDGERS}/{name}.jsonl" for name in recommenders}
        self._paths = beside | {released: f"{RELEASE}/{LEDGER}"}
        try:
            for name in recommenders:
                path = self.folder.path / self._paths[name]
                if goes_on and not path.exists():
                    raise ValueError(f"{path} is gone, so that what was spent is not known: put the newest one back.")
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self.ledgers[name] = Ledger(path, "user", data, data_changed=goes_on)
                self._check_ledger(self._paths[name], self.ledgers[name])
        except BaseException:
            self.close()
            raise
        ledger, since = self.ledgers[released], self._since[self._paths[released]]
        self.is_familiar = any(paid.data == data.id for paid in ledger.paid if paid.number < since)
        self.keep()

    def _check_ledger(self, path: str, ledger: Ledger) -> None:
        """It is this run's, and nothing was added to it since; what was released is read while nothing can be added."""
        mark = self._marks.get(path)
        if mark:
            ledger.refuse_behind(0, Mark(**mark))
        self._since.setdefault(path, 0)
        gone_on = False
        if self.continues:
            self.earlier = WarmStart.load(self.out)
            ledger.refuse_behind(0, self.earlier.mark)
            gone_on = self.earlier.mark != self.continues
            self._since[path] = self._since[path] or ledger.mark.lines
        elif mark and any(paid.number >= mark["lines"] and paid.label in LABELS.values() for paid in ledger.paid):
            gone_on = not _labels_without_file(ledger.paid, 0, self.directory)
        if gone_on:
            raise ValueError(
                f"{self.out} has gone on since this was begun in {self.directory}, so that nothing is left to do here: "
                f"add a day to it with --continue {self.out}."
            )

    def steps_before(self, name: str) -> int:
        """Number of steps in a recommender's ledger of the days before this one; 0 without a ledger."""
        since = self._since.get(self._paths.get(name, ""), 0)
        return sum(paid.steps for paid in self.ledgers[name].paid if paid.number < since) if since else 0

    def close(self) -> None:
        """Lets another process own the ledgers."""
        for ledger in self.ledgers.values():
            ledger.close()

    # Releases, and results.

    def events_due(self, recommender: str, events: Mapping[str, DpEvent]) -> list[DpEvent]:
        """Of a recommender's releases by file name, the events of those that are not in their files."""
        ledger, since = self.ledgers[recommender], self._since[self._paths[recommender]]
        paid = {each.label for each in ledger.paid if each.number >= since}
        there = [name for name in events if (self.directory / name).exists()]
        # Without run.json, which a person or a killed process removed, the files of another run look like this one's.
        unpaid = [name for name in there if LABELS[name] not in paid]
        if unpaid:
            raise ValueError(
                f"{self.directory / unpaid[0]} is of another run: {ledger.path} has not paid for it. Remove "
                f"{self.directory}, or begin {ELSEWHERE}."
            )
        if len(there) < len(events):
            self._refuse_lost()
        budget = Budget.read(ledger)
        return [budget.event_due(ledger, event, LABELS[name]) for name, event in events.items() if name not in there]

    def release(
        self, name: str, payers: Iterable[str], most: int, make: Callable[[ReleasePayment, Any], None],
        load: Callable[[pathlib.Path], Loaded],
    ) -> Loaded:  # fmt: skip
        """A release: read from its file, or paid for by the named recommenders and made now, into the open file."""
        path, payment = self.directory / name, ReleasePayment([self.ledgers[each] for each in payers], self.keep)
        if not path.exists():
            self._refuse_lost()
            try:
                with open_atomically(path, "wb", private=True, reserve=most) as file:
                    make(payment, file)
            except (KeyboardInterrupt, OSError):
                if not path.exists():  # else it was kept, and is paid for
                    payment.give_back()
                raise
        return load(path)

    def _refuse_lost(self) -> None:
        for name, ledger in self.ledgers.items():
            lost = _labels_without_file(ledger.paid, self._since[self._paths[name]], self.directory)
            if lost:
                another = "begin the day again with --continue" if self.continues else "begin another run"
                raise ValueError(
                    f"{ledger.path} has paid for the {lost[0]} of a run that ended before it kept it, and to "
                    f"make it again would cost as much again: {another}, {ELSEWHERE}."
                )

    def training_folder(self, name: str) -> str:
        """Folder of a recommender's training checkpoints, and of its result."""
        path = self.directory / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(path)

    def keep_result(self, name: str, result: Mapping[str, Any]) -> None:
        """Keeps what came of a recommender."""
        with open_atomically(pathlib.Path(self.training_folder(name)) / "result.json", private=True) as file:
            json.dump(result, file, indent=1)

    def result(self, name: str) -> dict[str, Any] | None:
        """What came of a recommender; None if it is not done."""
        path = self.directory / name / "result.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def end(self, is_done: bool) -> str:
        """Closes the ledgers, removes what is needed no longer, and returns NOTHING, RESUMABLE or LOST."""
        self.close()
        end_hold(self.directory)
        if not self.in_run_folder:
            return outcome(self.directory)
        if is_done:
            remove(self.directory)
            return RESUMABLE
        found = clear(self.directory)
        if found == NOTHING and self.continues is None:
            _remove_unpaid_ledgers(self.out)
            remove(self.folder.confidential)
            self.folder.remove_if_empty()
        return found


# What other processes left.


def resume_folder(out: Path) -> pathlib.Path:
    """Where a run is kept without --checkpoint."""
    return pathlib.Path(out).absolute() / PRIVATE / RESUME


def resume_command(checkpoint: Path | None, out: Path) -> str:
    """The command that goes on with a run."""
    return f"tfdp-rec train {f'--checkpoint {checkpoint}' if checkpoint else f'--out {out}'} --resume"


def outcome(directory: pathlib.Path) -> str:
    """NOTHING, RESUMABLE or LOST: what became of a run's payments. A folder that was changed counts as RESUMABLE."""
    found = NOTHING
    # A file that cannot be read may stand for a payment.
    with contextlib.suppress(OSError, *_WRONG_JSON):
        run = _read_run(directory)
        released, continues = find(run["out"], RELEASED), run["continues"]
        if released.exists() != bool(continues) or continues and WarmStart.load(run["out"]).mark != Mark(**continues):
            return NOTHING  # it is done, or another day was added since
        for path in run["ledgers"]:
            since = run["since"].get(path, 0)
            paid = [each for each in read(pathlib.Path(run["out"]) / path).paid if each.number >= since]
            if _labels_without_file(paid, since, directory):
                return LOST
            found = RESUMABLE if paid else found
        return found
    return RESUMABLE


def clear(directory: pathlib.Path) -> str:
    """Removes the log that a process left, and all of the folder unless it holds what was paid for; says which."""
    for left in [directory / LOG, directory / TIMELINES, *directory.glob(f".*.{LOG}")]:  # the last half grouped
        remove(left)
    found = outcome(directory)
    if found != RESUMABLE:
        remove(directory)
    return found


def sweep(runs: pathlib.Path) -> list[str]:
    """Removes what killed processes left of users' logs, and returns the commands that resume their runs."""
    commands = []
    for lock in [*runs.glob(f"*/{PRIVATE}/{RESUME}/in-use"), *runs.glob(".*.private/in-use")]:
        directory = lock.parent
        with hold_if_free(directory) as free:
            if free and (directory / RUN).exists():
                was_there = (directory / LOG).exists()
                if clear(directory) == RESUMABLE and was_there:
                    ours = directory.name == RESUME
                    commands.append(resume_command(None if ours else directory, directory.parent.parent))
    return commands


def _read_run(directory: Path) -> dict[str, Any]:
    """What run.json says."""
    path = pathlib.Path(directory).absolute()
    run = json.loads((path / RUN).read_text(encoding="utf-8"))
    run["out"] = run["out"] or os.fspath(path.parent.parent)
    return run


def _labels_without_file(paid: Sequence[Paid], since: int, directory: pathlib.Path) -> list[str]:
    """Labels of releases that were paid for since then, and are in no file."""
    lost = {label for name, label in LABELS.items() if not (directory / name).exists()}
    return [each.label for each in paid if each.number >= since and each.label in lost]


def _refuse_released_part(out: str, directory: pathlib.Path) -> None:
    """Raises if private files would come into a run's released part: this run's, or another's."""
    mine = os.path.join(os.path.realpath(out), RELEASE)
    for name, folder in (("--checkpoint", directory), ("--out", pathlib.Path(out))):
        for part in (folder.resolve(), *folder.resolve().parents):
            of_another = part.name == RELEASE and any((part / each).exists() for each in FINAL)
            if os.fspath(part) == mine or of_another:
                raise ValueError(
                    f"{name} {folder} lies in {part}, which is handed on, and users' data would be in it: give another."
                )


def _refuse_another_run(out: Path) -> None:
    """Raises if a folder holds a run, or what one has released: its ledger may be elsewhere, or gone."""
    if any(find(out, name).exists() for name in FINAL):
        raise FileExistsError(f"{out} holds another run; give another --out.")
    if any(map(_may_have_paid, _ledgers_in(out))):
        raise FileExistsError(
            f"{out} holds the ledger of a run that was cut off after it had paid: give another --out."
        )


def _ledgers_in(out: Path) -> list[pathlib.Path]:
    return [find(out, LEDGER), *pathlib.Path(out, PRIVATE, LEDGERS).glob("*.jsonl")]


def _may_have_paid(path: pathlib.Path) -> bool:
    """Whether a ledger holds a payment, or cannot be read; an empty file is what Ctrl-C at its making left."""
    try:
        return path.exists() and path.stat().st_size > 0 and bool(read(path).paid)
    except ValueError:
        return True


def _remove_unpaid_ledgers(out: Path) -> None:
    """Removes ledgers that have paid for nothing, and their list of seats: what they say is not for another run."""
    for path in _ledgers_in(out):
        if path.exists() and not _may_have_paid(path):
            with open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise ValueError(f"{path} is in use by another run: give another --out.") from None
                path.unlink()
    if not find(out, LEDGER).exists() and not find(out, RELEASED).exists():
        for name in SEATS:
            remove(pathlib.Path(out, PRIVATE, name))
    beside = pathlib.Path(out, PRIVATE, LEDGERS)
    if beside.is_dir() and not any(beside.iterdir()):
        beside.rmdir()


def _hash_log(folder: pathlib.Path) -> str:
    """Of all that is in a grouped log; it never leaves a folder that is as private."""
    whole = hashlib.sha256()
    for name in ("users.arrow", "offsets.bin", "found.arrow", "rows.bin", "times.bin"):
        if (folder / name).exists():
            with open(folder / name, "rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
