"""The lines of a ledger: what they say, how they are written, and how the chain of them is checked.

A ledger is a text file. Each line is one JSON object in its one canonical form (keys sorted, no spaces), holds the
hash of the line before it, and its own:

    hash = sha256(the line without "hash")          previous = hash of the line before, "" in the first

so that a line that was changed, left out or moved breaks the chain where it stands; what was cut off the end is found
by whoever holds a later hash (`Mark`). docs/ledger.md has every field, and a checker that does without this package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from tfdp_rec.pricing import events
from tfdp_rec.sampling.schemes import ZERO_OUT
from tfdp_rec.spending.filters import PrivacyFilter

FORMAT = "tfdp_rec ledger 2"
READ_TOO = "tfdp_rec ledger 1"  # its payments have no ids
FILTER = "tfdp_rec ledger 3"  # its first line has a limit, which readers of the formats before would pass over


class BrokenLedger(ValueError):
    """A ledger that is no evidence: changed, incomplete, or another's."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Which data were looked at: what is public of them, never their contents.

    Attributes:
        units: how many units there are, if that is public; else None.
        schema: what a row holds, in words, or any other public name of the data.

    Example:
        >>> Snapshot(1000, "user, items, times").id == Snapshot(1001, "user, items, times").id
        False
    """

    units: int | None
    schema: str = ""

    @property
    def id(self) -> str:
        """Of the public part."""
        return _digest({"units": self.units, "schema": self.schema})[:16]

    def to_json(self) -> dict[str, Any]:
        """As it stands in an entry."""
        return {"id": self.id, "units": self.units, "schema": self.schema}


@dataclasses.dataclass(frozen=True)
class Payment:
    """What is about to be spent.

    Attributes:
        event: of one attempt, with its sampling.
        attempts: how many are paid for.
        label: what for, in a few words.
        settings: of the mechanism and the sampling; public, JSON-able.
        steps: of an optimizer's clock that this covers; 0 for what is no step.
        about: which items of a person this may tell of; None for all. A total is that of the worst item.
        id: Id of the expense; payments of one id are one expense. Empty in ledgers of versions before 0.3.
    """

    event: DpEvent
    attempts: int = 1
    label: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 0
    about: tuple[str, ...] | None = None
    id: str = ""

    def fields(self) -> dict[str, Any]:
        """As it stands in an entry.

        Raises:
            ValueError: an event that is not known, no attempt, or fewer steps than none.
        """
        if int(self.attempts) != self.attempts or self.attempts < 1:
            raise ValueError(f"attempts must be a whole number, at least 1, got {self.attempts!r}.")
        if int(self.steps) != self.steps or self.steps < 0:
            raise ValueError(f"steps must be a whole number, at least 0, got {self.steps!r}.")
        return {
            "attempts": int(self.attempts),
            "event": _finite_event(self.event),
            "label": self.label,
            "settings": finite(dict(self.settings)),
            "steps": int(self.steps),
            "about": None if self.about is None else list(self.about),
            **({"id": self.id} if self.id else {}),
        }


@dataclasses.dataclass(frozen=True)
class Paid(Payment):
    """A payment as a ledger holds it, less what was given back.

    Attributes:
        number: of its line.
        unit: what is protected, such as "user" or "click".
        adjacency: which data sets are neighbours.
        data: id of the snapshot.
        session: of whoever held the ledger.
    """

    number: int = 0
    unit: str = ""
    adjacency: str = ""
    data: str = ""
    session: str = ""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a ledger stood: what a checkpoint, or a model, keeps of it.

    Attributes:
        ledger: its id.
        lines: how many it had.
        head: hash of the last of them.
    """

    ledger: str
    lines: int
    head: str


def written(fields: Mapping[str, Any]) -> bytes:
    """A line, with its hash."""
    return (canonical({**fields, "hash": _digest(fields)}) + "\n").encode()


def canonical(fields: Mapping[str, Any]) -> str:
    """JSON in its one form."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def finite(value: Any) -> Any:
    """Settings with the infinite written as a word, for JSON has no infinity."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _finite_event(event: DpEvent) -> dict[str, Any]:
    fields = events.to_json(event)
    if finite(fields) != fields:
        raise ValueError(
            f"{event!r} has an infinite number: write NonPrivateDpEvent for what has no guarantee, and nothing at "
            "all for what costs nothing."
        )
    return fields


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(fields).encode()).hexdigest()


@dataclasses.dataclass
class Chain:
    """The lines of one ledger, checked from the first to the last.

    Attributes:
        path: of the file, for what errors say.
        lines: as they were read.
        limit: Filter that the ledger was begun with; None if its payments are fixed in advance.
    """

    path: str
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    limit: PrivacyFilter | None = None

    def __post_init__(self) -> None:
        self.payments: dict[int, Paid] = {}

    @classmethod
    def parse(cls, path: str, text: bytes) -> Chain:
        """The chain in a file's bytes, each line of which ends in a newline."""
        chain = cls(path)
        for line in text.split(b"\n")[:-1]:
            chain.add(line)
        if not chain.lines:
            raise BrokenLedger(f"{path} is empty: it is no ledger. Put the newest backup of it back.")
        return chain

    @property
    def id(self) -> str:
        """Of the ledger."""
        return str(self.lines[0]["ledger"])

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return str(self.lines[-1]["hash"]) if self.lines else ""

    @property
    def last_paid(self) -> Paid | None:
        """The latest payment."""
        return self.payments[max(self.payments)] if self.payments else None

    def add(self, line: bytes) -> None:
        """Takes the next line."""
        number = len(self.lines)
        fields = parsed(line)
        if fields is None:
            raise self._broken(number, "was changed")
        if fields.get("number") != number or fields.get("previous") != self.head:
            raise self._broken(number, "does not follow the one before it, as if lines were left out or moved")
        try:
            self._take(fields)
        except (KeyError, TypeError, ValueError) as problem:
            raise self._broken(number, f"says what no ledger says ({str(problem).rstrip('.')})") from problem
        self.lines.append(fields)

    def _broken(self, number: int, what: str) -> BrokenLedger:
        return BrokenLedger(
            f"Line {number + 1} of {self.path} {what}: nobody can tell from it what was spent. Put the newest whole "
            "backup of it back; without one, take the total to be infinite."
        )

    def _take(self, fields: dict[str, Any]) -> None:
        if fields["number"] == 0:
            known = (FILTER,) if "limit" in fields else (FORMAT, READ_TOO)
            if fields["kind"] != "begin" or fields["format"] not in known:
                raise ValueError(f"the format is not {' or '.join(known)}.")
            self.limit = PrivacyFilter.from_json(fields["limit"]) if "limit" in fields else None
        elif fields["kind"] == "pay":
            self.payments[fields["number"]] = _paid(fields)
        elif fields["kind"] == "return":
            self._give_back(fields)
        elif fields["kind"] != "note":
            raise ValueError(f"unknown kind {fields['kind']!r}.")

    def _give_back(self, fields: dict[str, Any]) -> None:
        """Attempts that were never made; only who paid for them can know."""
        paid = self.payments[fields["of"]]
        left = paid.attempts - fields["attempts"]
        if not 0 <= left <= paid.attempts or not 0 <= fields["steps"] <= paid.steps:
            raise ValueError("more is given back than was paid.")
        if fields["session"] != paid.session:
            raise ValueError("somebody gives back what another paid.")
        steps = paid.steps - fields["steps"]
        self.payments[fields["of"]] = dataclasses.replace(paid, attempts=left, steps=steps)

    # What it adds up to.

    @property
    def paid(self) -> list[Paid]:
        """All that was paid for and not given back."""
        return [payment for payment in self.payments.values() if payment.attempts]

    @property
    def steps(self) -> int:
        """Of all clocks together."""
        return sum(payment.steps for payment in self.payments.values())

    def refuse_without(self, mark: Mark) -> None:
        """Raises unless the ledger went on from a mark."""
        if mark.ledger != self.id:
            raise BrokenLedger(
                f"{self.path} is not the ledger that this was counted in: it was begun anew, or another file was put "
                "in its place. Put the right one back."
            )
        if mark.lines > len(self.lines) or self.lines[mark.lines - 1]["hash"] != mark.head:
            raise BrokenLedger(
                f"{self.path} lacks entries that were in it before: {len(self.lines)} lines of at least {mark.lines} "
                "are there, as in an older backup. Put the newest one back."
            )


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line's fields, if its hash is right and its form the canonical one."""
    try:
        fields = json.loads(line)
        body = {key: value for key, value in fields.items() if key != "hash"}
        whole = written(body)[:-1]
    except (ValueError, AttributeError, TypeError):
        return None
    return fields if whole == line else None


def _paid(fields: Mapping[str, Any]) -> Paid:
    payment = Paid(
        event=events.from_json(fields["event"]), attempts=fields["attempts"], label=fields["label"],
        settings=fields["settings"], steps=fields["steps"],
        about=None if fields["about"] is None else tuple(fields["about"]),
        number=fields["number"], unit=fields["unit"], adjacency=adjacency_of(fields["adjacency"]),
        data=fields["data"]["id"], session=fields["session"], id=fields.get("id", ""),
    )  # fmt: skip
    payment.fields()  # for what that refuses
    return payment


def adjacency_of(said: str) -> str:
    """Which data sets are neighbours, by the word for it in a ledger."""
    # Versions before 0.3 said "add-or-remove-one" under Poisson sampling. The number of units is public, so neighbours
    # were zero-out there too, and every event cost the same (`sampling/schemes.py`): such a ledger goes on.
    return ZERO_OUT if said == "add-or-remove-one" else said


def composed(payments: Iterable[Payment]) -> DpEvent:
    """Payments as one event: like ones together, in the order in which they came.

    Example:
        >>> import dp_accounting
        >>> composed([Payment(dp_accounting.GaussianDpEvent(2.0), 3), Payment(dp_accounting.GaussianDpEvent(2.0))])
        ComposedDpEvent(events=[SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=4)])
    """
    counts: dict[str, int] = {}
    for payment in payments:
        key = json.dumps(events.to_json(payment.event))
        counts[key] = counts.get(key, 0) + payment.attempts
    return ComposedDpEvent(
        [SelfComposedDpEvent(events.from_json(json.loads(key)), count) for key, count in counts.items()]
    )


def by_item(payments: Sequence[Payment]) -> list[list[Payment]]:
    """For each item what tells of it, without those whose payments another item has too; one list at least."""
    general = [payment for payment in payments if payment.about is None]
    own: dict[str, list[int]] = {}
    for index, payment in enumerate(payments):
        for item in set(payment.about or ()):
            own.setdefault(item, []).append(index)
    sets = sorted({frozenset(indices) for indices in own.values()}, key=len, reverse=True)
    worst = [each for n, each in enumerate(sets) if not any(each < larger for larger in sets[:n])]
    return [general + [payments[index] for index in sorted(each)] for each in worst] or [general]
