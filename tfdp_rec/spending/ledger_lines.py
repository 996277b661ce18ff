"""The lines of a ledger: their fields, their text, and the check of their chain.

A ledger is a text file. Each line is one JSON object in its one canonical form (keys sorted, no spaces), holds the
hash of the line before it, and its own:

    hash = sha256(the line without "hash")          previous = hash of the line before, "" in the first

so that a line that was changed, left out or moved breaks the chain at its place. Lines that were cut off the end are
missed by a later hash, which checkpoints and models keep (`Mark`). docs/ledger.md has every field, and a checker that
needs no part of this package.
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
FILTER = "tfdp_rec ledger 3"  # its first line has a limit, which earlier versions would ignore


class BrokenLedger(ValueError):
    """A ledger that proves nothing: it was changed, is incomplete, or is another one."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Public description of a data set, without its contents.

    Args:
        units: Number of units, if it is public; else None.
        schema: Contents of a row in words, or any other public name of the data.

    Example:
        >>> Snapshot(1000, "user, items, times").id == Snapshot(1001, "user, items, times").id
        False
    """

    units: int | None
    schema: str = ""

    @property
    def id(self) -> str:
        """Hash of the description."""
        return _digest({"units": self.units, "schema": self.schema})[:16]

    def to_json(self) -> dict[str, Any]:
        """The snapshot's fields in an entry."""
        return {"id": self.id, "units": self.units, "schema": self.schema}


@dataclasses.dataclass(frozen=True)
class Payment:
    """A payment for an expense, before the data are used.

    Args:
        event: Event of one attempt, with its sampling.
        attempts: Number of attempts that are paid for.
        label: Name of the expense, in a few words.
        settings: Public, JSON-able settings of the mechanism and the sampling.
        steps: Number of training steps that the payment covers; 0 for other uses of the data.
        about: Items of a person that the expense may reveal something of; None for all. A total is that of the worst
            item.
        id: Id of the expense, which several payments may share. Empty in ledgers of versions before 0.3.
    """

    event: DpEvent
    attempts: int = 1
    label: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 0
    about: tuple[str, ...] | None = None
    id: str = ""

    def fields(self) -> dict[str, Any]:
        """The payment's fields in an entry.

        Raises:
            ValueError: The event is unknown or infinite, there is no attempt, or the number of steps is negative.
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
    """A payment in a ledger, less what was given back."""

    number: int = 0  # of its line
    unit: str = ""  # privacy unit, such as "user" or "click"
    adjacency: str = ""
    data: str = ""  # id of the snapshot
    session: str = ""  # id of the `Ledger` object that paid


@dataclasses.dataclass(frozen=True)
class Mark:
    """The end of a ledger at some time, which checkpoints and models keep."""

    ledger: str  # its id
    lines: int  # number of lines
    head: str  # hash of the last line


def written(fields: Mapping[str, Any]) -> bytes:
    """The text of a line, with its hash."""
    return (canonical({**fields, "hash": _digest(fields)}) + "\n").encode()


def canonical(fields: Mapping[str, Any]) -> str:
    """JSON in its canonical form; a `ValueError` for infinite numbers."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def finite(value: Any) -> Any:
    """Settings with infinite numbers as text, since JSON has none."""
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _finite_event(event: DpEvent) -> dict[str, Any]:
    fields = events.to_json(event)
    if finite(fields) != fields:
        raise ValueError(
            f"{event!r} has an infinite number: pay NonPrivateDpEvent for a use without a guarantee, and nothing for a "
            "use that costs nothing."
        )
    return fields


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(fields).encode()).hexdigest()


@dataclasses.dataclass
class Chain:
    """The lines of one ledger, checked from the first to the last."""

    path: str  # of the file, for errors
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    limit: PrivacyFilter | None = None  # filter that the ledger was begun with; None if payments are fixed in advance

    def __post_init__(self) -> None:
        self.payments: dict[int, Paid] = {}

    @classmethod
    def parse(cls, path: str, text: bytes) -> Chain:
        """The chain in a file's bytes, each line of which ends in a newline."""
        chain = cls(path)
        for line in text.split(b"\n")[:-1]:
            chain.add(line)
        if not chain.lines:
            raise BrokenLedger(f"{path} is empty: it is no ledger. Restore its newest backup.")
        return chain

    @property
    def id(self) -> str:
        """Id of the ledger."""
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
        """Checks and adds the next line."""
        number = len(self.lines)
        fields = parsed(line)
        if fields is None:
            raise self._broken(number, "was changed")
        if fields.get("number") != number or fields.get("previous") != self.head:
            raise self._broken(number, "does not follow the one before it, as if lines were left out or moved")
        try:
            self._apply(fields)
        except (KeyError, TypeError, ValueError) as problem:
            raise self._broken(number, f"is no line of a ledger ({str(problem).rstrip('.')})") from problem
        self.lines.append(fields)

    def _broken(self, number: int, what: str) -> BrokenLedger:
        return BrokenLedger(
            f"Line {number + 1} of {self.path} {what}: the cost cannot be read from it. Restore its newest complete "
            "backup; without one the total is infinite."
        )

    def _apply(self, fields: dict[str, Any]) -> None:
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
        # Only the session that paid can know that attempts were never made.
        paid = self.payments[fields["of"]]
        left = paid.attempts - fields["attempts"]
        if not 0 <= left <= paid.attempts or not 0 <= fields["steps"] <= paid.steps:
            raise ValueError("more is given back than was paid.")
        if fields["session"] != paid.session:
            raise ValueError("it gives back a payment of another session.")
        steps = paid.steps - fields["steps"]
        self.payments[fields["of"]] = dataclasses.replace(paid, attempts=left, steps=steps)

    # Totals.

    @property
    def paid(self) -> list[Paid]:
        """All payments, less what was given back."""
        return [payment for payment in self.payments.values() if payment.attempts]

    @property
    def steps(self) -> int:
        """Number of training steps that were paid for."""
        return sum(payment.steps for payment in self.payments.values())

    def refuse_without(self, mark: Mark) -> None:
        """Raises unless the ledger continues from a mark."""
        if mark.ledger != self.id:
            raise BrokenLedger(
                f"{self.path} is not the ledger that this was counted in: it was begun anew, or another file replaced "
                "it. Restore the right one."
            )
        if mark.lines > len(self.lines) or self.lines[mark.lines - 1]["hash"] != mark.head:
            raise BrokenLedger(
                f"{self.path} lacks entries that were in it before: {len(self.lines)} lines of at least {mark.lines} "
                "are there, as in an older backup. Restore the newest one."
            )


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line's fields; None unless its hash is right and its form canonical."""
    try:
        fields = json.loads(line)
        body = {key: value for key, value in fields.items() if key != "hash"}
        whole = written(body)[:-1]
    except (ValueError, AttributeError, TypeError):
        return None
    return fields if whole == line else None


def _paid(fields: Mapping[str, Any]) -> Paid:
    payment = Paid(
        event=events.from_json(fields["event"]),
        attempts=fields["attempts"],
        label=fields["label"],
        settings=fields["settings"],
        steps=fields["steps"],
        about=None if fields["about"] is None else tuple(fields["about"]),
        id=fields.get("id", ""),
        number=fields["number"],
        unit=fields["unit"],
        adjacency=adjacency_of(fields["adjacency"]),
        data=fields["data"]["id"],
        session=fields["session"],
    )
    payment.fields()  # refuses values out of range
    return payment


def adjacency_of(said: str) -> str:
    """The present name of an adjacency in a ledger."""
    # Versions before 0.3 said "add-or-remove-one" under Poisson sampling. The number of units is public, so neighbours
    # were zero-out there too, and every event cost the same (`sampling/schemes.py`): such a ledger goes on.
    return ZERO_OUT if said == "add-or-remove-one" else said


def composed(payments: Iterable[Payment]) -> DpEvent:
    """Payments as one event, equal events together, in order.

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
    """Payments that are about each item, without items whose payments are a subset of another's; at least one list."""
    general = [payment for payment in payments if payment.about is None]
    own: dict[str, list[int]] = {}
    for index, payment in enumerate(payments):
        for item in set(payment.about or ()):
            own.setdefault(item, []).append(index)
    sets = sorted({frozenset(indices) for indices in own.values()}, key=len, reverse=True)
    worst = [each for n, each in enumerate(sets) if not any(each < larger for larger in sets[:n])]
    return [general + [payments[index] for index in sorted(each)] for each in worst] or [general]
