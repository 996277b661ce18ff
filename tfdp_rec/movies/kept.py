"""What a run of the main job needs to be gone on with, in one folder of its own.

    DIR/prior.npy                   the noisy popularity: counted, and paid for, once
    DIR/run.json                    what was asked for, where results go, a hash of the data; written after these
    DIR/spectral/ledger.jsonl       what the recommender of private sums has cost: one release
    DIR/spectral/recommender.npz    that release: made, and paid for, once
    DIR/MECHANISM/ledger.jsonl      what that mechanism's model has cost, the prior's count first
    DIR/MECHANISM/...               training checkpoints: of this process, or of a cluster's servers
    DIR/MECHANISM/result.json       what came of it, once it is done

One ledger a contestant, since ε is said of each recommender by itself: the private sums take nothing from others, each
two-tower is trained from the start on the same prior. Who lets several of a run's recommenders out adds their ledgers
up. Whoever claims no ε has no ledger here.

The folder is as private as the data: checkpoints hold weights that owe noise, and results are computed without any.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdp_rec.files import Path, hold, writing
from tfdp_rec.movies import contestants
from tfdp_rec.movies.settings import Place, Settings, Source
from tfdp_rec.settings import flag

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from tfdp_rec.data import Timelines
    from tfdp_rec.sampling.schemes import Sampling
    from tfdp_rec.spectral import SpectralRecommender
    from tfdp_rec.spending.ledger import Ledger

LEDGER = "ledger.jsonl"  # as a cluster's trainer calls the one beside its checkpoints
_RUN, _PRIOR, _RESULT, _SUMS = "run.json", "prior.npy", "result.json", "recommender.npz"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a run was asked for; to go on, it must be asked for the same.

    Attributes:
        source: of the timelines.
        settings: of the job.
        place: where it trains.
    """

    source: Source = Source()
    settings: Settings = Settings()
    place: Place = Place()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Asked:
        """The inverse of `dataclasses.asdict`, through JSON."""
        kinds = {"source": Source, "settings": Settings, "place": Place}
        return cls(**{name: _of_lists(kind, fields[name]) for name, kind in kinds.items()})

    def refuse_other(self, other: Asked, directory: Path) -> None:
        """Raises if a run that goes on is asked for something else.

        Args:
            other: what it is asked for now.
            directory: where it was kept.

        Raises:
            ValueError: naming the option, and both values.
        """
        self.place.refuse_other(other.place, directory)
        for mine, theirs in ((self.source, other.source), (self.settings, other.settings)):
            refuse_changed(mine, theirs, directory)


def refuse_changed(mine: Any, theirs: Any, directory: Path) -> None:
    """Raises if a run that goes on is asked for something else.

    Args:
        mine: settings that it began with, a dataclass.
        theirs: those that it is asked for now.
        directory: where it was kept.

    Raises:
        ValueError: naming the option, and both values.
    """
    for name, value in dataclasses.asdict(mine).items():
        now = getattr(theirs, name)
        if now != value:
            option = "--mechanism" if name == "mechanisms" else flag(name)
            raise ValueError(
                f"The run in {directory} has {option} {_words(value)}, and is asked to go on with "
                f"{_words(now)}: leave {option} out, or begin another run in another --checkpoint."
            )


class RunCheckpoint:
    """The folder of one run.

    Args:
        directory: made if missing.
        every: steps between two checkpoints within an epoch, or a report of a cluster.

    Attributes:
        asked: what the run was asked for; None if it has not begun.
        out: its run folder.
        noises: its noise multipliers, by mechanism.
    """

    def __init__(self, directory: Path, every: int):
        self.directory, self.every = pathlib.Path(directory).absolute(), every
        self.asked: Asked | None = None
        self.out = ""
        self.noises: dict[str, float] = {}
        self._marks: dict[str, Any] = {}
        self._data = ""

    @classmethod
    def fresh(cls, directory: Path, every: int) -> RunCheckpoint:
        """For a run that begins.

        Raises:
            ValueError: one has begun there.
        """
        if os.path.exists(os.path.join(directory, _RUN)):
            raise ValueError(f"{directory} holds a run: go on with it by --resume, or give another --checkpoint.")
        return cls(directory, every)

    @classmethod
    def kept(cls, directory: Path, every: int) -> RunCheckpoint:
        """Of a run that goes on.

        Raises:
            ValueError: none has begun there.
        """
        found = cls(directory, every)
        try:
            run = json.loads((found.directory / _RUN).read_text(encoding="utf-8"))
            found.asked, found.out, found.noises = Asked.from_json(run["asked"]), run["out"], run["noises"]
            found._marks, found._data = run["ledgers"], run["data"]
        except FileNotFoundError:
            raise ValueError(f"{directory} holds no run to go on with: leave --resume out to begin one.") from None
        except (json.JSONDecodeError, KeyError, TypeError) as problem:
            raise ValueError(f"{found.directory / _RUN} was changed: put it back from a backup ({problem}).") from None
        hold(found.directory)
        return found

    def refuse_other_data(self, timelines: Timelines) -> None:
        """Raises if a run goes on with other data than it began with.

        Raises:
            ValueError: saying so.
        """
        if self.asked is not None and self._data != _hash(timelines):
            raise ValueError(
                f"The run in {self.directory} was begun with other data: put those back to go on; for these, begin "
                "another run in another --checkpoint."
            )

    # What is released before training.

    def sums(
        self, name: str, sampling: Sampling, event: DpEvent, label: str, make: Callable[[], SpectralRecommender]
    ) -> SpectralRecommender:
        """The recommender of private sums: as it was made, or made now that it is paid for, but not a second time.

        Args:
            name: of the contestant.
            sampling: which says who the users are; nobody is sampled.
            event: what it costs.
            label: what to call that.
            make: makes it.

        Raises:
            BrokenLedger: its ledger was deleted, or put back from an older backup.
            ValueError: it was paid for already, and what came out was not kept.
        """
        from tfdp_rec.spectral import SpectralRecommender

        path = self.directory / name / _SUMS
        if self.asked is not None:
            self.ledger(name, sampling)  # for what that refuses
            return SpectralRecommender.load(path)
        hold(self.directory)
        with self._opened(name, sampling) as ledger:
            if ledger.paid:
                raise ValueError(
                    f"{ledger.path} has paid for the private sums of a run that was cut off before it kept them, and "
                    "to make them again would cost as much again: begin in another --checkpoint, or without spectral."
                )
            ledger.pay(event, label=label, settings={"sampling": None})
            self._marks[name] = dataclasses.asdict(ledger.mark)
        made = make()
        made.save(path)
        path.chmod(0o600)
        return made

    def prior(
        self, settings: Settings, sampling: Sampling, event: DpEvent, label: str, count: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """What was released before training: as it was counted, or counted now that it is paid for.

        Args:
            settings: of the job.
            sampling: of the users.
            event: what the count costs.
            label: what to call it.
            count: counts.
        """
        if self.asked is not None:
            return np.load(self.directory / _PRIOR)
        hold(self.directory)
        for mechanism in filter(contestants.is_two_tower, filter(_claims, settings.mechanisms)):
            with self._opened(mechanism, sampling) as ledger:
                ledger.pay(event, label=label, settings={"sampling": None})
                self._marks[mechanism] = dataclasses.asdict(ledger.mark)
        values = count()
        with writing(self.directory / _PRIOR, "wb", private=True) as file:
            np.save(file, values)
        return values

    def begin(self, asked: Asked, out: Path, noises: dict[str, float], timelines: Timelines) -> None:
        """From here on the run can be gone on with.

        Args:
            asked: what the run was asked for.
            out: its run folder.
            noises: its noise multipliers.
            timelines: its data.
        """
        self.asked, self.out, self.noises = asked, os.path.abspath(out), noises
        run = {"asked": dataclasses.asdict(asked), "out": self.out, "noises": noises}
        self._write(self.directory / _RUN, {**run, "data": _hash(timelines), "ledgers": self._marks})

    # Each mechanism's.

    def folder(self, mechanism: str) -> str:
        """Of a mechanism's training checkpoints."""
        path = self.directory / mechanism
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(path)

    def ledger(self, mechanism: str, sampling: Sampling) -> str | None:
        """The path of a mechanism's ledger, which holds what it held; None if it claims no ε.

        Args:
            mechanism: its name.
            sampling: of the users.

        Raises:
            BrokenLedger: it was deleted, or put back from an older backup.
        """
        if not _claims(mechanism):
            return None
        with self._opened(mechanism, sampling) as ledger:
            from tfdp_rec.spending.ledger_lines import Mark

            ledger.refuse_behind(0, Mark(**self._marks[mechanism]))
        return os.path.join(self.folder(mechanism), LEDGER)

    def finish(self, mechanism: str, result: Mapping[str, Any]) -> None:
        """Keeps what came of a mechanism."""
        self._write(pathlib.Path(self.folder(mechanism)) / _RESULT, result)

    def finished(self, mechanism: str) -> dict[str, Any] | None:
        """What came of a mechanism; None if it is not done."""
        path = self.directory / mechanism / _RESULT
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _opened(self, mechanism: str, sampling: Sampling) -> Ledger:
        from tfdp_rec.spending.ledger import ZERO_OUT, Ledger
        from tfdp_rec.spending.ledger_lines import Snapshot

        data = Snapshot(sampling.num_units, sampling.unit)
        # The rules of the sums use how many users there are: their neighbours have as many.
        adjacency = sampling.adjacency if contestants.is_two_tower(mechanism) else ZERO_OUT
        return Ledger(os.path.join(self.folder(mechanism), LEDGER), sampling.unit, data, adjacency)

    def _write(self, path: pathlib.Path, fields: Mapping[str, Any]) -> None:
        with writing(path, private=True) as file:
            json.dump(fields, file, indent=1)


def _claims(mechanism: str) -> bool:
    return contestants.named(mechanism).claims_epsilon


def _of_lists(kind: Any, fields: Mapping[str, Any]) -> Any:
    """A settings dataclass; JSON knows no tuples."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def _words(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value}" if value != "" else "left out"


def _hash(timelines: Timelines) -> str:
    """Of all that is in them; it never leaves a folder that is as private as they are."""
    digest = hashlib.sha256()
    for part in (timelines.movies, timelines.offsets, timelines.movie_ids):
        digest.update(np.ascontiguousarray(part).data)
        digest.update(b"|")
    return digest.hexdigest()
