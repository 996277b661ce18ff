"""What was spent, as evidence that outlives the process: a file that only grows, and that nobody can change unseen.

    pay, fsync  ->  only then look at the data  ->  give back what was not used

- An entry says what it pays for in full, sampling included, so that nothing is ever priced anew: the total is that of
  the entries, whatever the settings are today.
- A total is a bound for payments that were fixed in advance. A ledger that is begun as a filter (`filters.py`) admits
  payments that depend on earlier releases, refuses what would exceed its budget, and claims the budget.
- It is on disk before what it pays for begins. A crash can leave a payment that was not used, never a use that was
  not paid.
- One owner at a time, in and across processes: two that paid into one file would each believe in their own total.
- A line that was changed, left out or moved breaks the chain; a file put back from an older backup lacks a mark, or
  stands behind the clock of a checkpoint. All are refused.

A crash in mid-write may leave a last line without its end. `pay` had not returned then. If the line is whole but for
its newline it counts as spent; if it cannot be read, the ledger is refused until somebody has looked: a crash leaves
that, and then it paid for nothing, but so does a copy that was cut short, and then it may have. `mend` puts the rest
aside.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from dp_accounting import DpEvent

from tfdp_rec.files import Path, sync_entry, writing
from tfdp_rec.pricing.composition import epsilon_of
from tfdp_rec.pricing.events import to_json
from tfdp_rec.sampling.schemes import ZERO_OUT
from tfdp_rec.spending.entries import new_id
from tfdp_rec.spending.filters import PrivacyFilter
from tfdp_rec.spending.ledger_lines import (
    FILTER,
    FORMAT,
    BrokenLedger,
    Chain,
    Mark,
    Paid,
    Payment,
    Snapshot,
    adjacency_of,
    by_item,
    canonical,
    composed,
    finite,
    parsed,
    written,
)  # fmt: skip

REPLACE = "replace-one"


def read(path: Path) -> Chain:
    """A ledger's lines, checked; takes no ownership and writes nothing."""
    with open(path, "rb") as file:
        text, torn = _split(os.fspath(path), file.read())
    return Chain.parse(os.fspath(path), text + torn)


def total(chain: Chain, delta: float, accountant: str = "pld", more: Sequence[Payment] = ()) -> float:
    """ε at δ of everything in a ledger, from its entries alone: that of the item most was told of.

    A filter's is that of its budget, however much of it was used.
    """
    if chain.limit is not None:
        admitted = all(map(chain.limit.admits, _events([*chain.paid, *more])))
        return chain.limit.claim(delta) if admitted else math.inf
    found = {canonical(to_json(event)): event for event in map(composed, by_item([*chain.paid, *more]))}
    return max(epsilon_of(event, delta, accountant) for event in found.values())


def _events(payments: Sequence[Payment]) -> list[DpEvent]:
    """What tells of each item, as one event."""
    return [composed(own) for own in by_item(payments)]


def used(chain: Chain) -> float:
    """Fraction of a filter's budget that its payments use: that of the item most was told of."""
    return max(map(chain.limit.used, _events(chain.paid))) if chain.limit else 0.0


def mend(path: Path) -> str:
    """Puts a last line that cannot be read aside, and returns the name of the file that now holds it.

    Only for a line that a crash left: `pay` had not returned, so that nothing had begun that it paid for.
    """
    with open(path, "r+b") as file:
        _lock(file.fileno(), os.fspath(path))
        text = file.read()
        kept = text[: text.rfind(b"\n") + 1]
        if kept == text or parsed(text[len(kept) :]) is not None:
            raise ValueError(f"{path} has no line that is cut short: there is nothing to mend.")
        Chain.parse(os.fspath(path), kept)
        aside = f"{os.fspath(path)}.torn"
        with writing(aside, "wb", private=True) as rest:
            rest.write(text[len(kept) :])
        file.truncate(len(kept))
        os.fsync(file.fileno())
    return aside


class Ledger:
    """A ledger file, owned by this object until `close`.

    Args:
        path: of the file; made if missing, readable by its owner alone, in a folder that must exist.
        unit: what is protected.
        data: which data are looked at from now on.
        adjacency: Which data sets are neighbours: ZERO_OUT, or REPLACE for one item replaced by another.
        data_changed: say so where they are other data than those of the last entry, grown for instance. What was paid
            for the old stays paid.
        limit: `RenyiFilter` or `GaussianFilter` for a new ledger whose payments may be chosen after seeing what earlier
            ones bought. It is fixed in the first line: a ledger that exists is what it was begun as.

    Raises:
        BrokenLedger: the file is no evidence, or is about another unit, adjacency or data.
        ValueError: somebody else has it; it was begun with another limit, or without one.

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
        self,
        path: Path,
        unit: str,
        data: Snapshot,
        adjacency: str = ZERO_OUT,
        data_changed: bool = False,
        limit: PrivacyFilter | None = None,
    ):
        self.path = os.path.realpath(path)
        self.unit, self.adjacency, self.data = unit, adjacency_of(adjacency), data
        self._session, self._process, self._thread = secrets.token_hex(8), os.getpid(), threading.RLock()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            _lock(self._file, self.path)
            self.chain = self._begun(limit)
            self._refuse_foreign(data_changed)
            self._refuse_another(limit)
        except BaseException:
            self.close()
            raise

    def _begun(self, limit: PrivacyFilter | None) -> Chain:
        """What is there; the first line, if nothing is."""
        text, torn = _split(self.path, _whole(self._file))
        self._size = len(text) + len(torn) - bool(torn)
        if not text + torn:
            self.chain = Chain(self.path)
            kind = {"format": FILTER, "limit": limit.to_json()} if limit else {"format": FORMAT}
            self._append({"kind": "begin", **kind, "ledger": secrets.token_hex(8)})
            sync_entry(os.path.dirname(self.path))
            return self.chain
        chain = Chain.parse(self.path, text + torn)
        if torn:  # whole but for its newline: it counts
            self._write(b"\n")
        return chain

    def _refuse_foreign(self, data_changed: bool) -> None:
        last = self.chain.last_paid
        if last is None:
            return
        if (last.unit, last.adjacency) != (self.unit, self.adjacency):
            raise BrokenLedger(
                f"{self.path} counts for one {last.unit} ({last.adjacency}), not for one {self.unit} "
                f"({self.adjacency}): no one epsilon holds for both. Keep another ledger for this."
            )
        if last.data != self.data.id and not data_changed:
            raise BrokenLedger(
                f"{self.path} counts for data {last.data}, and these are {self.data.id} ({self.data.units} units, "
                f"{self.data.schema!r}): give the right ledger, or say that the data have changed: data_changed=True."
            )

    def _refuse_another(self, limit: PrivacyFilter | None) -> None:
        if limit is not None and limit != self.limit:
            raise ValueError(
                f"{self.path} is {self.limit or 'a ledger of payments that are fixed in advance'}, not {limit}: a "
                "ledger stays what it was begun as, for its payments were made under that. Begin another; what both "
                "cost adds up."
            )

    # Paying.

    def pay(
        self,
        event: DpEvent,
        attempts: int = 1,
        label: str = "",
        settings: Mapping[str, Any] | None = None,
        steps: int = 0,
        about: tuple[str, ...] | None = None,
        id: str = "",
    ) -> int:
        """Writes down, durably, what is about to be spent; look at the data after this has returned.

        Args:
            event: of one attempt, with its sampling.
            attempts: how many are paid for.
            label: what for.
            settings: of the mechanism and the sampling.
            steps: of an optimizer's clock that this covers.
            about: which items this may tell of; None for all.
            id: Id of the expense, if this pays for more of one; a new one if empty.

        Returns:
            The entry's number.

        Raises:
            ValueError: an event that no ledger can hold, or a number out of range; more than is left of a filter.
        """
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
        if not all(map(self.limit.admits, _events([*self.paid, payment]))):
            raise ValueError(
                f"{self.path} is {self.limit}: {used(self.chain):.2%} of it is used, and this payment would exceed it. "
                "Nothing was paid. Pay for less: calibrate_noise(..., ledger=ledger) finds the noise that fits."
            )

    def give_back(self, number: int, attempts: int, steps: int = 0) -> None:
        """Takes back attempts, or steps alone, that this object paid for and that were not made and never will be.

        Args:
            number: of the payment.
            attempts: how many were not made; none of a plan that was begun.
            steps: how many steps were not made.

        Raises:
            ValueError: if they are not this object's to give back.
        """
        paid = self.chain.payments.get(number)
        within = paid is not None and 0 <= attempts <= paid.attempts and 0 <= steps <= paid.steps
        if paid is None or not within or paid.session != self._session or not attempts + steps:
            raise ValueError(
                f"Entry {number} has no {attempts} attempts that this process paid for and did not make: what another "
                "has paid for may have been made, and stays spent."
            )
        self._append({"kind": "return", "of": number, "attempts": int(attempts), "steps": int(steps)})

    def note(self, label: str, settings: Mapping[str, Any]) -> int:
        """Writes down something that costs nothing, such as a draw that was paid for.

        Args:
            label: what it is.
            settings: what it says; JSON-able.
        """
        return self._append({"kind": "note", "label": label, "settings": finite(dict(settings))})

    def _append(self, fields: Mapping[str, Any]) -> int:
        with self._thread:
            number = len(self.chain.lines)
            line = written({**fields, "number": number, "previous": self.chain.head, "session": self._session})
            self._refuse_lost()
            self._write(line)
            self.chain.add(line[:-1])
            return number

    def refuse_lost(self) -> None:
        """Raises if the file is not the one that was read, as it was left; after `close` the file is not looked at.

        Raises:
            BrokenLedger: The file was removed, replaced or written to by another process.
        """
        if self._file >= 0:
            self._refuse_lost()

    def _refuse_lost(self) -> None:
        if self._file < 0 or self._process != os.getpid():
            raise ValueError(f"{self.path} is not held by this process any more: open it anew where you pay.")
        about = os.fstat(self._file)
        if about.st_nlink == 0 or about.st_size != self._size or not _same(self.path, about):
            raise BrokenLedger(
                f"{self.path} was removed, replaced or written to by another while it was open: put the newest one "
                "back before anything more is spent."
            )

    def _write(self, line: bytes) -> None:
        if os.write(self._file, line) != len(line):
            raise OSError(f"{self.path} could not be written to the end: free some space, and mend it.")
        os.fsync(self._file)
        self._size += len(line)

    # What was paid.

    def epsilon(self, delta: float, accountant: str = "pld", more: Sequence[Payment] = ()) -> float:
        """ε at δ of all that was paid, and of what more may be."""
        return total(self.chain, delta, accountant, more)

    @property
    def paid(self) -> list[Paid]:
        """All that was paid for and not given back."""
        return self.chain.paid

    @property
    def limit(self) -> PrivacyFilter | None:
        """The filter that this ledger is; None for one of payments that are fixed in advance."""
        return self.chain.limit

    @property
    def used(self) -> float:
        """Fraction of a filter's budget that is used; the claim is the whole budget nevertheless."""
        return used(self.chain)

    @property
    def steps(self) -> int:
        """Of optimizers' clocks that were paid for."""
        return self.chain.steps

    @property
    def session(self) -> str:
        """Of this object: tells what it paid for from what others did."""
        return self._session

    @property
    def mark(self) -> Mark:
        """Where the ledger stands, for a checkpoint to keep beside its clocks."""
        return Mark(self.chain.id, len(self.chain.lines), self.chain.head)

    def refuse_behind(self, steps: int, mark: Mark | None = None) -> None:
        """Raises if more was done than the ledger holds: it was deleted, or is an older one.

        Args:
            steps: what a checkpoint's clocks stand at.
            mark: what the checkpoint kept of the ledger.

        Raises:
            BrokenLedger: saying what to do.
        """
        if mark is not None:
            self.chain.refuse_without(mark)
        if steps > self.steps:
            raise BrokenLedger(
                f"{self.path} has paid for {self.steps} steps and the clocks stand at {steps}: it was deleted, or "
                "put back from an older backup. Put the newest one back; without it nobody knows what was spent."
            )

    def close(self) -> None:
        """Lets another own the file."""
        if getattr(self, "_file", -1) >= 0:
            if self._process == os.getpid():  # else a forked child ends, and its parent goes on
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
        self._file = -1

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _split(path: str, text: bytes) -> tuple[bytes, bytes]:
    """The whole lines, and a last one that lacks its newline alone, with it."""
    end = text.rfind(b"\n") + 1
    torn = text[end:]
    if torn and parsed(torn) is None:
        raise BrokenLedger(
            f"The last line of {path} is cut short. A crash while it was being written leaves that, and then it paid "
            "for nothing: put it aside with  tfdp-rec ledger mend FILE. If the file was copied or put back since, "
            "take the newest whole backup instead."
        )
    return text[:end], torn + b"\n" if torn else b""


def _whole(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


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
            f"{path} is in use: another pays into it. End that first, or share its Ledger object within one process."
        ) from None
