"""The ledger: a file of payments that only grows, and whose changes show.

    pay, fsync  ->  look at the data  ->  give back what was not used

Each line is one JSON object in its one canonical form (keys sorted, no spaces), and holds the hash of the line before:

    hash = sha256(the line without "hash")          previous = hash of the line before, "" in the first

so that a line that was changed, left out or moved breaks the chain at its place. A file has one owner at a time, in and
across processes, since two owners would each compute a total of their own. docs/ledger.md has what is guaranteed, every
field, and a checker that needs no part of this package.

A crash during a write may leave an incomplete last line; `pay` had not returned then. A line that lacks its newline
alone counts as spent. A line that cannot be read makes the ledger refused until a person has looked at it: after a
crash it paid for nothing, but in a truncated copy it may have paid. `mend` moves it to another file.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.entries import new_id
from tfdp_rec.core.claim.filters import PrivacyFilter
from tfdp_rec.core.claim.schemes import ZERO_OUT
from tfdp_rec.core.ground.files import Path, open_atomically, sync_entry

FORMAT = "tfdp_rec ledger 2"
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
        id: Id of the expense, which several payments may share.
    """

    event: DpEvent
    attempts: int = 1
    label: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 0
    about: tuple[str, ...] | None = None
    id: str = ""

    def fields(self) -> dict[str, Any]:
        """The payment's fields in an entry; `ValueError` for what no entry can hold."""
        if int(self.attempts) != self.attempts or self.attempts < 1:
            raise ValueError(f"attempts must be a whole number, at least 1, got {self.attempts!r}.")
        if int(self.steps) != self.steps or self.steps < 0:
            raise ValueError(f"steps must be a whole number, at least 0, got {self.steps!r}.")
        about: Any = () if self.about is None else self.about
        # A text would be its letters, and an iterator is empty when it is read again: no item would pay.
        listed = isinstance(about, Collection) and not isinstance(about, str | bytes)
        if not listed or not all(isinstance(item, str) for item in about):
            raise ValueError(f"about must be a tuple of texts, got {about!r}.")
        event = events.to_json(self.event)
        if finite(event) != event:
            raise ValueError(
                f"{self.event!r} has an infinite number: pay NonPrivateDpEvent for a use without a guarantee, and "
                "nothing for a use that costs nothing."
            )
        return {
            "attempts": int(self.attempts),
            "event": event,
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

    @property
    def whole(self) -> DpEvent:
        """Event of all its attempts."""
        return self.event if self.attempts == 1 else SelfComposedDpEvent(self.event, self.attempts)


@dataclasses.dataclass(frozen=True)
class Mark:
    """The end of a ledger at some time, which checkpoints and models keep."""

    ledger: str  # its id
    lines: int  # number of lines
    head: str  # hash of the last line


def line_text(fields: Mapping[str, Any]) -> bytes:
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


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(fields).encode()).hexdigest()


class Chain:
    """The lines of one ledger, checked from the first to the last."""

    def __init__(self, path: str, text: bytes = b""):
        self.path = path  # for errors
        self.lines = list[dict[str, Any]]()
        self.limit: PrivacyFilter | None = None  # the filter that the ledger was begun with, if any
        self.payments = dict[int, Paid]()  # by number, less what was given back
        self._add_all(text)

    def _add_all(self, text: bytes) -> bytes:
        # Adds all lines of a file; returns the newline that the last one may lack.
        end = text.rfind(b"\n") + 1
        if text[end:] and parse_line(text[end:]) is None:
            raise BrokenLedger(
                f"The last line of {self.path} is cut short. If a crash during its writing did that, it paid for "
                "nothing: move it aside with  tfdp-rec ledger mend FILE. If the file was copied or restored since, use "
                "the newest complete backup instead."
            )
        for line in text.removesuffix(b"\n").split(b"\n") if text else ():
            self.add(line)
        return b"\n" if text[end:] else b""

    @property
    def id(self) -> str:
        """Id of the ledger."""
        return str(self.lines[0]["ledger"])

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return str(self.lines[-1]["hash"]) if self.lines else ""

    def add(self, line: bytes) -> None:
        """Checks and adds the next line."""
        number = len(self.lines)
        fields = parse_line(line)
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
            known = FILTER if "limit" in fields else FORMAT
            if fields["kind"] != "begin" or fields["format"] != known:
                raise ValueError(f"the format is not {known}.")
            self.limit = PrivacyFilter.from_json(fields["limit"]) if "limit" in fields else None
        elif fields["kind"] == "pay":
            self.payments[fields["number"]] = _read_payment(fields)
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
    def last_paid(self) -> Paid | None:
        """The latest payment."""
        return self.payments[max(self.payments)] if self.payments else None

    @property
    def steps(self) -> int:
        """Number of training steps that were paid for."""
        return sum(payment.steps for payment in self.payments.values())

    def epsilon(self, delta: float, accountant: str = "pld", more: Sequence[Payment] = ()) -> float:
        """ε at δ of all payments, and of `more` that are not made yet; under a filter, the budget's."""
        if self.limit is not None:
            return self.limit.claim(delta) if self._admits(more) else math.inf
        return max(epsilon_of(event, delta, accountant) for event in costs_of_items([*self.paid, *more]))

    def _admits(self, more: Sequence[Payment]) -> bool:
        return self.limit is None or all(map(self.limit.admits, costs_of_items([*self.paid, *more])))

    @property
    def used(self) -> float:
        """Fraction of a filter's budget that its payments use, for the worst item; the claim is the whole budget."""
        return max(map(self.limit.used, costs_of_items(self.paid))) if self.limit else 0.0

    @property
    def kind(self) -> str:
        """What the payments may depend on, as text."""
        if self.limit is None:
            return "payments fixed in advance"
        share = f"{self.used:.2%} of it is used"
        return f"filter: payments may depend on earlier releases, and the claim is its budget; {share}"

    def notes(self, label: str, since: int = 0) -> list[dict[str, Any]]:
        """Settings of the notes of a kind, in order, of those after a line."""
        notes = [line for line in self.lines if line["kind"] == "note" and line["label"] == label]
        return [line["settings"] for line in notes if line["number"] > since]

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


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line's fields; None unless its hash is right and its form canonical."""
    try:
        fields = json.loads(line)
        body = {key: value for key, value in fields.items() if key != "hash"}
        whole = line_text(body)[:-1]
    except (ValueError, AttributeError, TypeError):
        return None
    return fields if whole == line else None


def _read_payment(fields: Mapping[str, Any]) -> Paid:
    payment = Paid(
        event=events.from_json(fields["event"]), attempts=fields["attempts"], label=fields["label"],
        settings=fields["settings"], steps=fields["steps"],
        about=None if fields["about"] is None else tuple(fields["about"]), id=fields.get("id", ""),
        number=fields["number"], unit=fields["unit"], adjacency=fields["adjacency"],
        data=fields["data"]["id"], session=fields["session"],
    )
    payment.fields()  # refuses values out of range
    return payment


def compose(payments: Iterable[Payment]) -> DpEvent:
    """Payments as one event, equal events together, in order."""
    counts: dict[str, int] = {}
    for payment in payments:
        _count(payment, counts)
    return _compose(counts)


def costs_of_items(payments: Iterable[Payment]) -> list[DpEvent]:
    """The payments that are about each item as one event, equal ones once; at least one."""
    # They are gone through once, however many items there are: each item keeps how many there are of each event.
    general, own = dict[str, int](), dict[str, dict[str, int]]()
    for payment in payments:
        for counts in [general] if payment.about is None else [own.setdefault(i, {}) for i in set(payment.about)]:
            _count(payment, counts)
    different = dict.fromkeys(tuple(counts.items()) for counts in own.values()) or {(): None}
    return [_compose(general | {key: general.get(key, 0) + n for key, n in each}) for each in different]


def _count(payment: Payment, counts: dict[str, int]) -> None:
    key = json.dumps(events.to_json(payment.event))
    counts[key] = counts.get(key, 0) + payment.attempts


def _compose(counts: Mapping[str, int]) -> DpEvent:
    return ComposedDpEvent(
        [SelfComposedDpEvent(events.from_json(json.loads(key)), count) for key, count in counts.items()]
    )


def read(path: Path) -> Chain:
    """A ledger's lines, checked, without owning the file or writing to it."""
    with open(path, "rb") as file:
        return _chain(os.fspath(path), file.read())


def _chain(path: str, text: bytes) -> Chain:
    if not text:
        raise BrokenLedger(f"{path} is empty: it is no ledger. Restore its newest backup.")
    return Chain(path, text)


def mend(path: Path) -> str:
    """Moves an unreadable last line, which a crash left, to another file; returns that file's name."""
    # `pay` had not returned, so that no use of the data had begun.
    with open(path, "r+b") as file:
        _lock(file.fileno(), os.fspath(path))
        text = file.read()
        kept = text[: text.rfind(b"\n") + 1]
        if kept == text or parse_line(text[len(kept) :]) is not None:
            raise ValueError(f"{path} has no last line that is cut short: there is nothing to mend.")
        _chain(os.fspath(path), kept)
        aside = f"{os.fspath(path)}.torn"
        with open_atomically(aside, "wb", private=True) as rest:
            rest.write(text[len(kept) :])
        file.truncate(len(kept))
        os.fsync(file.fileno())
    return aside


class Ledger(Chain):
    """A ledger file, owned by this object until `close`.

    Args:
        path: Path of the file; a missing one is made, readable by its owner alone, in a folder that exists.
        unit: Name of the privacy unit, such as "user".
        data: Snapshot of the data that are used from now on.
        adjacency: Name of the relation between neighbouring data sets: ZERO_OUT, or "replace-one" where one item has
            another's place.
        data_changed: Whether the data may differ from those of the last entry, by growth for instance. Payments for the
            old data stay paid.
        limit: `RenyiFilter` or `GaussianFilter` of a new ledger whose payments may be chosen after seeing what earlier
            ones bought. It stands in the first line and never changes.

    Raises:
        BrokenLedger: The file was changed or is incomplete, or it is about another unit, adjacency or data.
        ValueError: Another process or object owns the file, or it was begun with another limit, or without one.

    Example:
        >>> import dp_accounting, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "ledger.jsonl")
        >>> with Ledger(path, "user", Snapshot(1000, "user, items")) as ledger:
        ...     number = ledger.pay(dp_accounting.GaussianDpEvent(4.0), label="popularity counts")
        ...     round(ledger.epsilon(delta=1e-4), 3)
        0.773
        >>> read(path).paid[0].label
        'popularity counts'
    """

    def __init__(
        self, path: Path, unit: str, data: Snapshot, adjacency: str = ZERO_OUT, data_changed: bool = False,
        limit: PrivacyFilter | None = None,
    ):
        super().__init__(os.path.realpath(path))
        self.unit = unit
        self.adjacency = adjacency
        self.data = data
        self.session = secrets.token_hex(8)  # id of this object, which stands in every line that it writes
        self._process = os.getpid()
        self._thread = threading.RLock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            _lock(self._file, self.path)
            self._begin(limit)
            self._refuse_foreign(data_changed)
            self._refuse_another(limit)
        except BaseException:
            self.close()
            raise

    def _begin(self, limit: PrivacyFilter | None) -> None:
        # Reads the file's lines; of an empty file, writes the first.
        self._size = os.fstat(self._file).st_size
        missing = self._add_all(os.pread(self._file, self._size, 0))
        if not self.lines:
            kind = {"format": FILTER, "limit": limit.to_json()} if limit else {"format": FORMAT}
            self._append({"kind": "begin", **kind, "ledger": secrets.token_hex(8)})
            sync_entry(os.path.dirname(self.path))
        if missing:  # the last line is whole but for its newline: it counts
            self._write(missing)
            self._size += len(missing)

    def _refuse_foreign(self, data_changed: bool) -> None:
        last = self.last_paid
        if last is None:
            return
        if (last.unit, last.adjacency) != (self.unit, self.adjacency):
            raise BrokenLedger(
                f"{self.path} counts for one {last.unit} ({last.adjacency}), not for one {self.unit} "
                f"({self.adjacency}): no single epsilon holds for both. Keep another ledger for this."
            )
        if last.data != self.data.id and not data_changed:
            raise BrokenLedger(
                f"{self.path} counts for data {last.data}, and these are {self.data.id} ({self.data.units} units, "
                f"{self.data.schema!r}): open the right ledger, or declare that the data changed: data_changed=True."
            )

    def _refuse_another(self, limit: PrivacyFilter | None) -> None:
        if limit is not None and limit != self.limit:
            raise ValueError(
                f"{self.path} is {self.limit or 'a ledger of payments that are fixed in advance'}, not {limit}: a "
                "ledger's kind never changes, since its payments were made under it. Begin another ledger; the costs "
                "of both add up."
            )

    # Paying.

    def pay(
        self, event: DpEvent, attempts: int = 1, label: str = "", settings: Mapping[str, Any] | None = None,
        steps: int = 0, about: tuple[str, ...] | None = None, id: str = "",
    ) -> int:
        """Writes an expense durably, and returns the number of its line; use the data only after that.

        Arguments as `Payment`; without `id` the expense has a new one.

        Raises:
            ValueError: The event cannot stand in a ledger, a number is out of range, or the filter's rest is exceeded.
        """
        if about is not None and not about:  # would count for no item
            raise ValueError("about must name at least one item; leave it out for an expense that is about all.")
        payment = Payment(event, attempts, label, settings or {}, steps, about, id or new_id())
        entry = {"unit": self.unit, "adjacency": self.adjacency, "data": self.data.to_json()}
        line = {"kind": "pay", **payment.fields(), **entry}
        with self._thread:  # or two threads would both be admitted to what is left of a filter
            self._refuse_beyond(payment)
            return self._append(line)

    def _refuse_beyond(self, payment: Payment) -> None:
        if self.limit is None:
            return
        self.limit.refuse_unpriced(payment.event)
        if not self._admits([payment]):
            raise ValueError(
                f"{self.path} is {self.limit}: {self.used:.2%} of it is used, and this payment would exceed it. "
                "Nothing was paid. Pay for less: calibrate_noise(..., ledger=ledger) finds the noise that fits."
            )

    def give_back(self, number: int, attempts: int, steps: int = 0) -> None:
        """Gives back `attempts` and `steps` of the payment in line `number` that will never be made.

        Raises:
            ValueError: The payment is not this object's, or is of fewer attempts or steps.
        """
        paid = self.payments.get(number)
        within = paid is not None and 0 <= attempts <= paid.attempts and 0 <= steps <= paid.steps
        if within and paid is not None:  # a step that stays paid keeps its price: its receipt stays valid
            within = (paid.attempts - attempts) * paid.steps >= (paid.steps - steps) * paid.attempts
        if paid is None or not within or paid.session != self.session or not attempts + steps:
            raise ValueError(
                f"Entry {number} has no {attempts} attempts that this process paid for and did not make: attempts that "
                "another process paid for may have been made, and stay spent."
            )
        self._append({"kind": "return", "of": number, "attempts": int(attempts), "steps": int(steps)})

    def note(self, label: str, settings: Mapping[str, Any]) -> int:
        """Writes a note of a kind, `label`, with JSON-able `settings`, which costs nothing; returns its number."""
        return self._append({"kind": "note", "label": label, "settings": finite(dict(settings))})

    def _append(self, fields: Mapping[str, Any]) -> int:
        with self._thread:
            number = len(self.lines)
            line = line_text({**fields, "number": number, "previous": self.head, "session": self.session})
            self._refuse_lost()
            self._write(line)
            self.add(line[:-1])
            self._size += len(line)  # last: an object whose line was cut short writes no other after it
            return number

    def refuse_lost(self) -> None:
        """Raises `BrokenLedger` if the open file was changed by anything but this object; not after `close`."""
        if self._file >= 0:
            self._refuse_lost()

    def _refuse_lost(self) -> None:
        if self._file < 0 or self._process != os.getpid():
            raise ValueError(f"{self.path} is not open in this process any more: open the ledger again where you pay.")
        about = os.fstat(self._file)
        if about.st_nlink == 0 or about.st_size != self._size or not _same(self.path, about):
            raise BrokenLedger(
                f"{self.path} was removed, replaced or written to by another process while it was open: restore the "
                "newest file before anything more is spent."
            )

    def _write(self, line: bytes) -> None:
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self.path} was not written completely: free some space, then  tfdp-rec ledger mend.")
        os.fsync(self._file)

    @property
    def mark(self) -> Mark:
        """Present end of the ledger, for a checkpoint to keep beside its steps."""
        return Mark(self.id, len(self.lines), self.head)

    def refuse_behind(self, steps: int, mark: Mark | None = None) -> None:
        """Raises `BrokenLedger` if the ledger lacks `steps` of a checkpoint, or lines that its `mark` has seen."""
        if mark is not None:
            self.refuse_without(mark)
        if steps > self.steps:
            raise BrokenLedger(
                f"{self.path} has paid for {self.steps} steps of {steps} that were made: the file was deleted, or "
                "restored from an older backup. Restore the newest file; without it the cost is unknown."
            )

    def close(self) -> None:
        """Releases the file for other owners."""
        if getattr(self, "_file", -1) >= 0:
            if self._process == os.getpid():  # a forked child that ends must not unlock its parent's file
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
        self._file = -1

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _same(path: str, about: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), about)
    except FileNotFoundError:
        return False


def _lock(file: int, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this opening of the file: keeps out this process too
    except OSError:
        raise ValueError(
            f"{path} is in use by another process or Ledger object: close that first, or share one Ledger object."
        ) from None
