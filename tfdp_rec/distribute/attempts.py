"""Counting attempts: each is paid for before it is made.

A step that a worker was making when it died may have landed nowhere, on some servers or on all; the coordinator makes
it again, with another batch. The data was looked at both times, so both count. And a coordinator that dies must not
take its count with it: attempts are paid for in a ledger (`privacy.ledger`), synced, in blocks, before the first of a
block is dispatched. What was paid for counts when the ledger is read again, dispatched or not, and at the price of the
day: with the sampling and the noise that it was paid for.
"""

from __future__ import annotations

import os
import threading

from tfdp_rec.core.claim.entries import Entries
from tfdp_rec.core.claim.events import DpEvent
from tfdp_rec.core.claim.ledger import Ledger, Mark, Snapshot
from tfdp_rec.core.claim.schemes import PoissonSampling
from tfdp_rec.core.claim.spending import Payments, Unaccounted
from tfdp_rec.distribute.checkpoint import Checkpoints

LEDGER = "ledger.jsonl"


class Attempts:
    """A count of attempts, in a ledger if there is one; `earlier` steps there are of trainings before this one."""

    def __init__(self, payments: Payments | None = None, owned: bool = True, earlier: int = 0):
        self._payments, self._owned, self._lock = payments, owned, threading.Lock()
        if int(earlier) != earlier or earlier < 0:
            raise ValueError(f"earlier_steps must be a whole number of at least 0, got {earlier!r}.")
        self._reserved = payments.ledger.steps - earlier if payments else 0
        if self._reserved < 0:
            raise ValueError(f"The ledger holds {self._reserved + earlier} steps, fewer than the {earlier} before.")
        self._left, self._block = 0, 0
        self._paid_for: DpEvent | None = None
        self.receipt = ""

    @property
    def count(self) -> int:
        """Attempts that were made, or may have been."""
        return self._reserved - self._left

    @property
    def mark(self) -> Mark | None:
        """Where the ledger stands, for a checkpoint to keep."""
        return self._payments.ledger.mark if self._payments else None

    def paid_entries(self) -> Entries:
        """The steps that were paid for, each stretch at its own price."""
        found = Entries()
        for id, entry in self._payments.entries().items() if self._payments else ():
            if not entry.label:
                found.add(entry, id)
        return found

    def reserve(self, event: DpEvent, number: int) -> int:
        """Pays for attempts that are about to be made, and returns the number of their block."""
        # Attempts of the block before that were not made are given back, and can no longer be made.
        with self._lock:
            self._give_back()
            if self._payments:  # one entry for all attempts of one price: it is this training's, and no other's
                self.receipt = self._payments.pay_steps(event, number, self.receipt if event == self._paid_for else "")
                self._paid_for = event
            self._reserved += number
            self._left = number
            self._block += 1
            return self._block

    def take(self, block: int) -> bool:
        """Whether one more of a block may be made; it is counted as made from now on."""
        with self._lock:
            may = self._left > 0 and block == self._block
            self._left -= may
            return may

    def end(self) -> None:
        """No attempt is under way: those paid for and not made are given back."""
        with self._lock:
            self._give_back()

    def _give_back(self) -> None:
        left, self._left = self._left, 0  # first: attempts that cannot be given back count as made
        if left and self._payments:
            self._payments.give_back(self.receipt, left)
        self._reserved -= left

    def refuse_forgetting(self, checkpoints: Checkpoints) -> None:
        """Raises `BrokenLedger` if a checkpoint records attempts that the ledger lacks."""
        found = checkpoints.stand()
        if found is not None and self._payments:
            self._payments.ledger.refuse_behind(*found)
            if found[0] > self.count:
                raise ValueError(
                    f"The checkpoint stands at step {found[0]}, and the ledger holds {self.count} steps beside "
                    "earlier_steps: that is their number when this training began, not now."
                )

    def refuse_unpaid(self, history: Entries) -> None:
        """Raises `Unaccounted` if a ledger that others own lacks what was spent on the weights to begin with."""
        if self._payments is None or self._owned:
            return
        entries = dict(history.items())
        unpaid = [entries[id] for id in self._payments.find_unpaid(history)]
        lacking = [entry for entry in unpaid if not entry.void]  # those have no ε anyway
        if lacking:
            what = ", ".join(entry.label or f"{entry.steps} steps" for entry in lacking[:3])
            raise Unaccounted(
                f"{self._payments.ledger.path} has not paid for what begin_with has spent ({what}): give the ledger "
                "that has."
            )

    def close(self) -> None:
        """Lets another trainer have the ledger, if it is owned here."""
        self.end()
        if self._payments and self._owned:
            self._payments.ledger.close()


def open_attempts(
    directory: str | None, sampling: PoissonSampling, data_changed: bool, ledger: Ledger | None = None, earlier: int = 0
) -> Attempts:
    """The attempts of a training; without a directory they are counted in memory. A given ledger is its owner's."""
    if ledger is not None:
        return Attempts(Payments(ledger, sampling), owned=False, earlier=earlier)
    if earlier:
        raise ValueError("earlier_steps are steps in ledger=, which was not given: leave earlier_steps out.")
    if directory is None:
        return Attempts()
    os.makedirs(directory, mode=0o700, exist_ok=True)
    data = Snapshot(sampling.num_units, sampling.unit)
    ledger = Ledger(os.path.join(directory, LEDGER), sampling.unit, data, sampling.adjacency, data_changed)
    return Attempts(Payments(ledger, sampling))
