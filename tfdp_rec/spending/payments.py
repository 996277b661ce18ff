"""Payments for training steps in a ledger: in blocks, before the steps are made.

A block and the model's entry for its steps have the same id, so that the entry is a receipt. Steps of a block that will
not be made are given back; after a crash the whole block stays spent.

Planned noise is paid for as a whole, before its first step:

    price of a part  =  0 if it continues from the plan's last step or last checkpoint;  else the plan's event

A part is the stretch of a plan that one process makes (`optimizers/dp_ftrl.py`). A checkpoint writes a note in the
ledger, which is valid until the next payment. A part that begins elsewhere is a fork and pays the plan's price again,
since earlier releases may hold other noise for the same steps. Three kinds of forks: a part that begins at an older
checkpoint; a second part that begins at one checkpoint; a part that continues after another began at its checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import dp_accounting
from dp_accounting import DpEvent, SelfComposedDpEvent

from tfdp_rec.files import Path
from tfdp_rec.pricing import events
from tfdp_rec.pricing.events import PlannedDpEvent
from tfdp_rec.sampling.schemes import PoissonSampling, Sampling, dearer
from tfdp_rec.spending.entries import BY_HAND, DRAWN, ORDINARY, Entries, Entry, id_of_use, new_id
from tfdp_rec.spending.ledger import BrokenLedger, Ledger, Paid, Snapshot, canonical

BLOCK = 100  # steps paid for by one sync of the disk, and the most that a crash costs
_KEPT = "plan kept"  # label of a note: a checkpoint holds the plan as it stands
_CLAIMED = "payment claimed"  # label of a note: the entry that a payment without an id was for
_FROM = "from"  # setting of a payment: the step of the plan that it begins with
_ASSERTED = "asserted"  # setting of a payment for steps that carried no proof of their draw: what drew them

Line = tuple[Paid, Entry | None]  # a payment, and the steps that it is for, if it is for steps


def refuse_unpayable(event: DpEvent, sampling: Sampling) -> None:
    """Raises for steps that are neither priced one by one nor planned."""
    if not isinstance(event, PlannedDpEvent) and not isinstance(sampling, PoissonSampling):
        raise ValueError(
            f"{type(sampling).__name__} has no price for a single step, which an accountant's ledger needs: use "
            "PoissonSampling, or planned noise (LazyDPFTRL) in a FixedOrder, or pay for whole epochs by hand: "
            "ledger.pay(event, attempts=epochs)."
        )


class Payments:
    """The payments for the steps of one sampling, and the rest of their ledger."""

    def __init__(self, ledger: Path | Ledger, sampling: Sampling):
        self.owns = not isinstance(ledger, Ledger)
        if not isinstance(ledger, Ledger):
            data = Snapshot(sampling.num_units, sampling.unit)
            ledger = Ledger(ledger, sampling.unit, data, sampling.adjacency)
        if (ledger.unit, ledger.adjacency) != (sampling.unit, sampling.adjacency):
            raise BrokenLedger(
                f"{ledger.path} counts for one {ledger.unit} ({ledger.adjacency}), and the sampling for one "
                f"{sampling.unit} ({sampling.adjacency}): open a ledger for the sampling's unit."
            )
        self.ledger, self._sampling = ledger, sampling
        self._read = 0, list[Line](), list[Line]()

    # Paying.

    def pay_once(self, event: DpEvent, label: str, id: str) -> None:
        """Pays for one use of the data that is no training step."""
        self.ledger.pay(event, label=label, settings={"sampling": None}, id=id)

    def pay_steps(self, event: DpEvent, steps: int, id: str = "", asserted: str = "") -> str:
        """Pays for steps on this sampling's batches; returns the id of their entry."""
        refuse_unpayable(event, self._sampling)
        id = id or new_id()
        settings: dict[str, Any] = {"step": events.to_json(event), "sampling": self._sampling.get_state()}
        if asserted:
            settings[_ASSERTED] = asserted
        if isinstance(event, PlannedDpEvent):
            price, first = self._price_of_plan(event)
            self.ledger.pay(price, 1, "training", {**settings, _FROM: first}, steps, id=id)
        else:
            step = self._sampling.compose_history([(event, 1)])
            assert isinstance(step, SelfComposedDpEvent)
            self.ledger.pay(step.event, steps, "training", settings, steps, id=id)
        return id

    def give_back(self, id: str, steps: int) -> None:
        """Gives back steps of an entry that this process paid for and will not make."""
        # The latest payments first: their steps are the last to be made.
        for paid in reversed([paid for paid in self.ledger.paid if paid.id == id]):
            left = min(steps, paid.steps)
            if left:
                entry = _steps_of(paid)
                planned = entry is not None and isinstance(entry.event, PlannedDpEvent)
                unbegun = left == self.ledger.lines[paid.number]["steps"] and not self._continued(paid, entry)
                attempts = int(unbegun) if planned else left  # a plan that was begun costs as a whole
                self.ledger.give_back(paid.number, attempts, left)
                steps -= left

    def _continued(self, paid: Paid, entry: Entry | None) -> bool:
        # Whether a later payment of the same plan may have cost nothing because of this one.
        later = [each for each in self.ledger.paid if each.number > paid.number]
        return any(_plan(steps) == _plan(entry) for steps in map(_steps_of, later) if steps and entry)

    def note_checkpoint(self, event: DpEvent, made: int) -> None:
        """Notes that a checkpoint holds a plan after `made` steps of the event's part."""
        if isinstance(event, PlannedDpEvent):
            self.ledger.note(_KEPT, {"plan": event.plan, "part": event.part, "step": event.start + made})

    # Reading.

    def entries(self) -> Entries:
        """All steps that were paid for, under any sampling, without those that a plan's fork has replaced."""
        found, samplings = Entries(), dict[str, Any]()
        for paid, entry in self._lines():
            if entry is not None:
                id = paid.id or f"line {paid.number}"
                # Steps of one id may have been paid for under two samplings, as their data grew.
                if samplings.setdefault(id, entry.sampling) != entry.sampling:
                    id += f" {canonical(entry.sampling or {})}"
                found.extend(id, entry)
        return found

    def others(self) -> list[tuple[DpEvent, str]]:
        """(event, label) of payments except those for steps under this sampling."""
        mine = self._sampling.get_state()
        return [
            (paid.event if paid.attempts == 1 else SelfComposedDpEvent(paid.event, paid.attempts), paid.label)
            for paid, entry in self._lines()
            if entry is None or entry.sampling != mine
        ]

    def words(self) -> str:
        """What a statement says of the ledger; `BrokenLedger` if the open file was removed or replaced."""
        self.ledger.refuse_lost()
        place = f"line {len(self.ledger.lines)}, {self.ledger.head[:16]}; {self.ledger.kind}"
        return f"all of it was paid for in ledger {self.ledger.id} before it was done; {place}"

    def steps_of(self, id: str) -> int:
        """Number of steps that were paid for under an id."""
        return sum(paid.steps for paid in self.ledger.paid if paid.id == id)

    def unpaid(self, carried: Entries) -> dict[str, int]:
        """Number of steps, or other uses of the data, that models carry and this ledger has not paid for, by id."""
        claims, steps, uses = self._claims(), dict[str, list[Line]](), Counter[str]()
        for paid, entry in self._read_lines()[0]:
            if entry is not None:
                steps.setdefault(paid.id, []).append((paid, entry))
            elif not paid.steps:
                # A payment by hand has an id of its own: it is found by event and label.
                for id in {paid.id, id_of_use(paid.event, paid.label)}:
                    uses[id_of_use(paid.event, id)] += paid.attempts
        owed = {}
        for id, entry in carried.items():
            if entry.origin != ORDINARY:
                own = uses[id_of_use(entry.event, id)]
                own += sum(paid.steps for paid, line in steps.get(id, ()) if line and _pays_for(line, entry))
                owed[id] = entry.steps - own - (0 if entry.label else claims[id])
        return {id: steps for id, steps in owed.items() if steps > 0}

    def pay_for(self, carried: Entries, asserted: str = "") -> None:
        """Pays for all entries of models that this ledger has not paid for; `asserted`: what drew unproven batches."""
        if self.ledger.limit is not None and self.unpaid(carried):
            raise ValueError(
                f"{self.ledger.path} is {self.ledger.limit}, which holds for uses that were paid for in advance: "
                "earlier releases may have decided its budget. Account for this model in a ledger of payments that "
                "are fixed in advance, or train it anew."
            )
        for id, steps in self.unpaid(carried).items():
            entry = dict(carried.items())[id]
            if entry.label:
                for _ in range(steps):
                    self.pay_once(entry.event, entry.label, id)
                continue
            state = entry.sampling or self._sampling.get_state()
            if not entry.receipted:
                steps -= self._claim(id, dataclasses.replace(entry, steps=steps, sampling=state))
            if steps:
                assert state is not None
                proof = "" if entry.origin == DRAWN else asserted or entry.origin
                Payments(self.ledger, Sampling.from_state(dict(state))).pay_steps(entry.event, steps, id, proof)

    # Payments of versions before 0.3 have no ids: an entry of such a version may claim them, once.

    def _claim(self, id: str, entry: Entry) -> int:
        wanted, free = (entry.event, entry.sampling), Counter[int]()
        for paid, steps in self._lines():
            if not paid.id and steps is not None and (steps.event, steps.sampling) == wanted:
                free[paid.number] = paid.steps
        for note in self.ledger.notes(_CLAIMED):
            free[note["line"]] -= note["steps"]
        claimed = 0
        for line, left in free.items():
            taken = max(0, min(left, entry.steps - claimed))
            if taken:
                self.ledger.note(_CLAIMED, {"line": line, "entry": id, "steps": taken})
                claimed += taken
        return claimed

    def _claims(self) -> Counter[str]:
        claims = Counter[str]()
        for note in self.ledger.notes(_CLAIMED):
            claims[note["entry"]] += note["steps"]
        return claims

    def _lines(self) -> list[Line]:
        return self._read_lines()[1]

    def _read_lines(self) -> tuple[list[Line], list[Line]]:
        # Payments with their steps, as they were paid for and as they count.
        if self._read[0] != len(self.ledger.lines):
            lines = [(paid, _steps_of(paid)) for paid in self.ledger.paid]
            self._read = len(self.ledger.lines), lines, self._cut(lines)
        return self._read[1:]

    # Plans.

    def _price_of_plan(self, event: PlannedDpEvent) -> tuple[DpEvent, int]:
        # The price of further steps of a part, and the step of the plan at which they begin.
        lines = [(paid, entry) for paid, entry in self._lines() if entry is not None and _plan(entry) == event.plan]
        parts = [entry for _, entry in lines]
        first = event.start + sum(entry.steps for entry in parts if _part(entry) == event.part)
        # Only the part that began last may continue: its releases may exist, although no note names them.
        latest = _part(parts[-1]) if parts else None
        ends = _end(parts), self._kept(event.plan, since=lines[-1][0].number if lines else 0)
        left = latest == event.after and (event.after, event.start) in ends
        goes_on = bool(parts) and (latest == event.part or left)
        return (dp_accounting.NoOpDpEvent() if goes_on else event.event), first

    def _cut(self, lines: Sequence[Line]) -> list[Line]:
        # A part ends where another continued from it; one of an earlier process, at its last checkpoint. Later steps
        # were paid for, but were not made or are lost.
        found = list(lines)
        last: dict[str, int] = {}  # place of a plan's last payment
        for place, (paid, entry) in enumerate(lines):
            if entry is None or not (plan := _plan(entry)):
                continue
            if plan in last and paid.event == dp_accounting.NoOpDpEvent():
                found[last[plan]] = _up_to(int(paid.settings[_FROM]), *found[last[plan]])
            last[plan] = place
        for plan, place in last.items():
            paid, entry = found[place]
            kept = self._kept(plan, paid.number)
            if kept and paid.session != self.ledger.session and kept[0] == _part(entry):
                found[place] = _up_to(kept[1], paid, entry)
        return found

    def _kept(self, plan: str, since: int) -> tuple[str, int] | None:
        # The part and step of the last checkpoint since a payment.
        own = [note for note in self.ledger.notes(_KEPT, since) if note["plan"] == plan]
        return (own[-1]["part"], own[-1]["step"]) if own else None


def _steps_of(paid: Paid) -> Entry | None:
    """Steps that a payment is for, if its settings name them and they cost what was paid."""
    step, state = paid.settings.get("step"), paid.settings.get("sampling")
    if not step or not state:
        return None
    event, steps = events.from_json(step), paid.steps
    if isinstance(event, PlannedDpEvent):
        fits = paid.attempts == 1 and paid.event in (event.event, dp_accounting.NoOpDpEvent())
        steps = max(steps, int(paid.event != dp_accounting.NoOpDpEvent()))  # a price counts, even without a step
    else:
        price = Sampling.from_state(state).compose_history([(event, 1)])
        fits = paid.attempts == paid.steps and price == SelfComposedDpEvent(paid.event, 1)
    return Entry(event, steps, BY_HAND if paid.settings.get(_ASSERTED) else DRAWN, dict(state)) if fits else None


def _pays_for(paid: Entry, made: Entry) -> bool:
    # A payment is for its own event alone, under a sampling that costs no less than the one that was asserted since.
    return paid.event == made.event and dearer(paid.sampling, made.sampling) == paid.sampling


def _up_to(step: int, paid: Paid, entry: Entry | None) -> Line:
    assert entry is not None
    least = int(paid.event != dp_accounting.NoOpDpEvent())
    steps = max(least, min(entry.steps, step - int(paid.settings[_FROM])))
    return dataclasses.replace(paid, steps=steps), dataclasses.replace(entry, steps=steps)


def _plan(entry: Entry) -> str:
    return entry.event.plan if isinstance(entry.event, PlannedDpEvent) else ""


def _part(entry: Entry | None) -> str:
    assert entry is not None and isinstance(entry.event, PlannedDpEvent)
    return entry.event.part


def _end(parts: Sequence[Entry]) -> tuple[str, int] | None:
    """The part of a plan's last payment, and the last step of this part."""
    if not parts:
        return None
    event = parts[-1].event
    assert isinstance(event, PlannedDpEvent)
    return event.part, event.start + sum(entry.steps for entry in parts if _part(entry) == event.part)
