"""How a ledger pays for planned noise: for the whole plan before its first step, and once.

    price of a part  =  nothing, where it goes on from where the plan was left or last kept;  else the plan's event

A part is a stretch of a plan that one process makes (`optimizers.correlated`). A checkpoint *keeps* the plan, by a note
in the ledger. Steps that a crash cuts off after that were seen by nobody: whoever releases a model that checkpoints
keep writes one first. A note says so of the fit that it was written in, and of no fit that was paid for later. A part
that begins elsewhere, as from the copy of an older checkpoint, or where another has begun already, is a fork, and pays
again: what was released of the first may contain other noise for the same steps. So does a part that another has gone
on from, and that goes on itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import dp_accounting
from dp_accounting import DpEvent

from tfdp_rec.privacy.events import PlannedDpEvent
from tfdp_rec.privacy.history import Entry
from tfdp_rec.privacy.ledger import Ledger
from tfdp_rec.privacy.ledger_lines import Paid

KEPT = "plan kept"
FROM = "from"
"""Among a payment's settings: the step of the plan that it begins with."""

Payments = Sequence[tuple[Paid, Entry | None]]


def may_cost(event: PlannedDpEvent, price: DpEvent) -> bool:
    """Whether a part may have been paid for with this."""
    return price in (event.event, dp_accounting.NoOpDpEvent())


def price_of(event: PlannedDpEvent, payments: Payments, ledger: Ledger) -> tuple[DpEvent, int]:
    """What more of a part costs, and the step of the plan that it begins with.

    Args:
        event: the part's.
        payments: so far, cut (`cut`).
        ledger: with the notes of what was kept.
    """
    parts = [entry for _, entry in payments if entry is not None and _plan(entry) == event.plan]
    own = [entry.steps for entry in parts if entry.event.part == event.part]  # type: ignore[attr-defined]
    first = event.start + sum(own)
    came_from, last = (event.after, event.start), parts[-1] if parts else None
    # The last to begin, or nobody: another that began since may have been released, by a program that notes nothing.
    latest = last.event.part if last else None  # type: ignore[attr-defined]
    left = last is not None and latest == event.after and came_from in (
        _end(last, parts), _kept(event.plan, ledger, _paid_last(event.plan, payments)),
    )  # fmt: skip
    goes_on = latest == event.part or left
    return (dp_accounting.NoOpDpEvent() if goes_on else event.event), first


def keep(event: PlannedDpEvent, made: int, ledger: Ledger) -> None:
    """Notes that a checkpoint holds the plan as it stands.

    Args:
        event: the part's.
        made: steps of it.
        ledger: to note it in.
    """
    ledger.note(KEPT, {"plan": event.plan, "part": event.part, "step": event.start + made})


def cut(payments: Payments, ledger: Ledger) -> Payments:
    """A part ends where another one went on from it, and one of a process that is gone where it was last kept: what was
    paid ahead of that was not made, or is lost.

    Args:
        payments: so far.
        ledger: whose.
    """
    found = list(payments)
    last: dict[str, int] = {}  # place of a plan's last payment
    for place, (paid, entry) in enumerate(payments):
        if entry is None or not (plan := _plan(entry)):
            continue
        if plan in last and paid.event == dp_accounting.NoOpDpEvent():
            found[last[plan]] = _up_to(int(paid.settings[FROM]), *found[last[plan]])
        last[plan] = place
    for plan, place in last.items():
        paid, entry = found[place]
        kept = _kept(plan, ledger, paid.number)
        if kept and paid.session != ledger.session and kept[0] == entry.event.part:  # type: ignore[union-attr]
            found[place] = _up_to(kept[1], paid, entry)
    return found


def _up_to(step: int, paid: Paid, entry: Entry | None) -> tuple[Paid, Entry | None]:
    assert entry is not None
    least = int(paid.event != dp_accounting.NoOpDpEvent())  # what was paid counts, were no step of it left
    steps = max(least, min(entry.steps, step - int(paid.settings[FROM])))
    return dataclasses.replace(paid, steps=steps), dataclasses.replace(entry, steps=steps)


def _plan(entry: Entry) -> str:
    return entry.event.plan if isinstance(entry.event, PlannedDpEvent) else ""


def _end(last: Entry, parts: Sequence[Entry]) -> tuple[str, int]:
    """The part that a plan's last payment is of, and the step that it comes to."""
    event = last.event
    assert isinstance(event, PlannedDpEvent)
    return event.part, event.start + sum(e.steps for e in parts if e.event.part == event.part)  # type: ignore[attr-defined]


def _paid_last(plan: str, payments: Payments) -> int:
    return max(paid.number for paid, entry in payments if entry is not None and _plan(entry) == plan)


def _kept(plan: str, ledger: Ledger, since: int) -> tuple[str, int] | None:
    """The part and step that a checkpoint has kept since a payment: steps of a later one need not be in checkpoints."""
    notes = [line for line in ledger.chain.lines if line.get("label") == KEPT and line["kind"] == "note"]
    own = [note["settings"] for note in notes if note["settings"]["plan"] == plan and note["number"] > since]
    return (own[-1]["part"], own[-1]["step"]) if own else None
