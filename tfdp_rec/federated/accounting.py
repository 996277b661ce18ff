"""What one client has spent: in a simulation, added up in memory; on a device, in a ledger.

A client releases attention vectors (about its history) and permuted labels (about its clicks on candidates), again
and again. Each release is a dp_accounting event whose profile is known (`tfdp_rec.core.claim.profiles`), and they are
composed. A server that chooses the clients itself gets no amplification by sampling: it knows which clients answered.

**In a simulation** a click belongs to the history or to the candidates of a round. `ClientAccountant.epsilon(delta)`
assumes that the same click may sit in both and composes everything; with `disjoint=True` it takes the larger of the two
books. That is right for one training whose histories were fixed before the clicks used as labels; a device, whose
label of today is history tomorrow, never uses it.

**On a device** the ledger is opened only where it is the newest that the device remembers, by a mark in a file of its
own, and is added up by click. A ledger that is gone, or was put back from an older backup, does not hold that mark and
is refused: begun anew it would forget what was spent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import REPLACE, DpEvent, NonPrivateDpEvent
from tfdp_rec.core.claim.ledger import BrokenLedger, Chain, Ledger, Mark, Payment, Snapshot, costs_of_items
from tfdp_rec.core.claim.profiles import epsilon_of_releases

UNIT = "click"
EXACT = NonPrivateDpEvent()
_OWNER = "owner"  # label of a note

_log = logging.getLogger(__name__)


class ClientAccountant:
    """Adds up one client's releases.

    Example:
        >>> from tfdp_rec.core.claim.events import PureDpEvent
        >>> accountant = ClientAccountant()
        >>> accountant.spend_labels(PureDpEvent(0.5), count=3)
        >>> round(accountant.epsilon(delta=0.0), 3)
        1.5
    """

    def __init__(self) -> None:
        self.history: Counter[DpEvent] = Counter()
        self.labels: Counter[DpEvent] = Counter()

    def spend_history(self, release: DpEvent, count: int = 1) -> None:
        """Record `count` releases of the mechanism `release` about the history."""
        _add(self.history, release, count)

    def spend_labels(self, release: DpEvent, count: int = 1) -> None:
        """Record `count` releases of the mechanism `release` that each concern the *same* click among candidates.

        Labels of different clicks compose in parallel: record the most that one click went through.
        """
        _add(self.labels, release, count)

    def epsilon(self, delta: float, disjoint: bool = False) -> float:
        """Total ε for one click at this `delta`.

        Args:
            delta: Failure probability of the whole, in [0, 1).
            disjoint: Whether no click is both in the history and a label.

        Raises:
            ValueError: If δ is out of range.
        """
        if not 0 <= delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {delta}.")
        books = [self.history, self.labels] if disjoint else [self.history + self.labels]
        return max(epsilon_of_releases(book, delta) for book in books)


def _add(book: Counter[DpEvent], release: DpEvent, count: int) -> None:
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}.")
    if count:
        book[release] += count


# A device's ledger.


def open_ledger(path: str | Path, data: Snapshot, mark: Mark | None) -> Ledger:
    """The device's ledger; a new one, with a warning in the device's log, where the device remembers none."""
    if mark is not None and not os.path.exists(path):
        raise BrokenLedger(
            f"{path} is gone, and this device has paid in it: without it what was spent is not known. Put the newest "
            "copy of it back."
        )
    if not os.path.exists(path) or not os.path.getsize(path):
        _log.warning("%s is begun. If this device has paid before, put that ledger and what is beside it back.", path)
    ledger = Ledger(path, UNIT, data, REPLACE)
    try:
        if mark is not None:
            ledger.refuse_without(mark)
        elif ledger.paid:
            raise BrokenLedger(
                f"{path} holds payments, and what this device remembers of it is gone from beside it: it may be an "
                "older backup. Put that file back, or begin another ledger; the costs of both add up."
            )
    except BaseException:
        ledger.close()
        raise
    return ledger


def keep_to(ledger: Ledger, person: str) -> None:
    """Makes a ledger that of one person; another's is refused, and a person without a name has one of their own."""
    if person and not refuse_another(ledger, person):
        ledger.note(_OWNER, {"digest": _digest(ledger, person)})


def refuse_another(chain: Chain, person: str) -> bool:
    """Raises if a ledger is another person's; returns whether it says whose it is."""
    owners = [line["settings"]["digest"] for line in chain.lines if line["kind"] == "note" and line["label"] == _OWNER]
    if owners and owners[0] != _digest(chain, person):
        raise BrokenLedger(
            f"{chain.path} is the ledger of another user of these data than the one with this number now, and would "
            "count for the wrong one. Give the data with the same users as before, or other ledgers; the costs of both "
            "add up."
        )
    return bool(owners)


def _digest(chain: Chain, person: str) -> str:
    return hashlib.sha256(f"{chain.id} {person}".encode()).hexdigest()


def exact_payments(ledger: Ledger, clicks: Collection[str]) -> list[Payment]:
    """One unbounded payment for those of the clicks, sent as they are, that have none yet."""
    booked = {item for paid in ledger.paid if paid.event == EXACT for item in paid.about or ()}
    new = tuple(sorted(set(clicks) - booked))
    return [Payment(EXACT, label="declared", about=new)] if new else []


def epsilon(payments: Sequence[Payment], delta: float, declared: Collection[str]) -> float:
    """ε of the click with the largest sum of payments, without those that are declared today."""
    left = [
        payment if payment.about is None
        else dataclasses.replace(payment, about=tuple(item for item in payment.about if item not in declared))
        for payment in payments
    ]  # fmt: skip
    return max(epsilon_of(each, delta) for each in costs_of_items(left))
