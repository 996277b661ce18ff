"""A device's ledger: opened only where it is the newest that the device remembers, and added up by click.

The device keeps a mark of its ledger in a file of its own. A ledger that is gone, or was put back from an older backup,
does not hold that mark and is refused: begun anew it would forget what was spent.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from dp_accounting import NonPrivateDpEvent

from tfdp_rec.pricing.composition import epsilon_of
from tfdp_rec.spending.ledger import REPLACE, Ledger
from tfdp_rec.spending.ledger_lines import BrokenLedger, Mark, Payment, Snapshot, by_item, composed

UNIT = "click"
EXACT = NonPrivateDpEvent()

_log = logging.getLogger(__name__)


def open_ledger(path: str | Path, data: Snapshot, mark: Mark | None) -> Ledger:
    """The device's ledger; a new one, with a warning in the device's log, where the device remembers none."""
    if mark is not None and not os.path.exists(path):
        raise BrokenLedger(
            f"{path} is gone, and this device has paid in it: without it what was spent is not known. Put the newest "
            "copy of it back."
        )
    if not os.path.exists(path):
        _log.warning("%s is begun. If this device has paid before, put that ledger and what is beside it back.", path)
    ledger = Ledger(path, UNIT, data, REPLACE)
    try:
        if mark is not None:
            ledger.refuse_behind(0, mark)
    except BaseException:
        ledger.close()
        raise
    return ledger


def exact_payments(ledger: Ledger, clicks: Collection[str]) -> list[Payment]:
    """One unbounded payment for those of the clicks, sent as they are, that have none yet."""
    booked = {item for paid in ledger.paid if paid.event == EXACT for item in paid.about or ()}
    new = tuple(sorted(set(clicks) - booked))
    return [Payment(EXACT, label="declared", about=new)] if new else []


def epsilon(payments: Sequence[Payment], delta: float, declared: Collection[str]) -> float:
    """ε of the click with the largest sum of payments, without those that are declared today."""
    left = [
        payment if payment.about is None else dataclasses.replace(payment, about=_without(payment.about, declared))
        for payment in payments
    ]
    items = by_item([payment for payment in left if payment.about != ()])
    return max(epsilon_of(composed(each), delta) for each in items)


def _without(about: tuple[str, ...], declared: Collection[str]) -> tuple[str, ...]:
    return tuple(item for item in about if item not in declared)
