"""Payments for training steps in a ledger: in blocks, before the steps are made.

A block and the model's entry for its steps have the same id, so that the entry is a receipt. Steps of a block that will
not be made are given back; after a crash the whole block stays spent.

Planned noise is paid for as a whole, before its first step. With the least σ so far, and one branch for the beginning
and one for each fork, the payments of a plan add up to what an accountant says of its steps (`sampling/orders.py`):

    Σ 1/σ² of all payments  =  branches / min σ²

A part is the stretch of a plan that one process makes (`optimizers/dp_ftrl.py`). Each state that is kept has an id,
which stands in its checkpoint and in a note of the ledger; so has what is released after its checkpoint was removed. A
part continues, and costs nothing at no less noise, if what the ledger last heard of the plan is the part's own, or the
state from which it was resumed. Payments for steps that a checkpoint will keep are passed over: had they been released,
there would be a note. A part that begins elsewhere is a fork, since earlier releases may hold other noise for the same
steps: it pays as another branch, and without a payment none of it is released.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting import DpEvent, SelfComposedDpEvent

from tfdp_rec.files import Path
from tfdp_rec.pricing import events
from tfdp_rec.pricing.events import PlannedDpEvent
from tfdp_rec.sampling.schemes import PoissonSampling, Sampling, dearer
from tfdp_rec.spending.entries import BY_HAND, DRAWN, ORDINARY, Entries, Entry, Use, id_of_use, new_id
from tfdp_rec.spending.ledger import BrokenLedger, Ledger, Paid, Snapshot, canonical

BLOCK = 100  # steps paid for by one sync of the disk, and the most that a crash costs
_KEPT = "plan kept"  # label of a note: a checkpoint holds the plan as it stands
_KEEPING = "plan about to be kept"  # label of a note: such a checkpoint is about to be there
_FROM = "from"  # setting of a payment: the step of the plan that it begins with
_CONTINUES = "continues"  # setting of a payment: whether its part continues where the plan stood
_KEPT_ALONG = "kept"  # setting of a payment: whether a checkpoint notes where the plan stands before each release
_ASSERTED = "asserted"  # setting of a payment for steps that carried no proof of their draw: what drew them
_LATE = "late"  # setting of a payment for what was done before

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

    def pay_once(self, use: Use, late: bool = False) -> None:
        """Pays for one use of the data that is no training step; `late`: it was made before."""
        settings = {"sampling": None} | ({_LATE: True} if late else {})
        self.ledger.pay(use[0], label=use[1], settings=settings, id=use.id)

    def has_paid(self, use: Use) -> bool:
        """Whether a use was paid for, under its id or by hand under its own label."""
        return not self.unpaid(Entries.of(use))

    def pay_steps(
        self, event: DpEvent, steps: int, id: str = "", asserted: str = "", stands: str = "", kept: bool = False,
        late: bool = False,
    ) -> str:
        """Pays for steps on this sampling's batches; returns the id of their entry."""
        refuse_unpayable(event, self._sampling)
        id = id or new_id()
        settings: dict[str, Any] = {"step": events.to_json(event), "sampling": self._sampling.get_state()}
        if asserted:
            settings[_ASSERTED] = asserted
        if late:
            settings[_LATE] = True
        if isinstance(event, PlannedDpEvent):
            price, own = self._price_of_plan(event, stands)
            self.ledger.pay(price, 1, "training", {**settings, **own, _KEPT_ALONG: kept}, steps, id=id)
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

    def note_checkpoint(self, event: DpEvent, carried: Entries, stands: str, state: str, done: bool = True) -> None:
        """Notes that a plan is kept as it stands, or is about to be, in a `state` that follows the one it stood at."""
        if isinstance(event, PlannedDpEvent):
            if not self._is_newest(event, stands):
                raise RuntimeError(
                    "Another run has gone on from the checkpoint that this training began with. What would leave now "
                    "holds other noise for the same steps, and would cost the plan again: resume from the newest "
                    "checkpoint, or train on with fit, which pays if the budget allows."
                )
            made = sum(e.steps for e in carried if _plan(e) == event.plan and _part(e) == event.part)
            self._note(event.plan, _Note(event.part, event.start + made, state, done))

    def confirm_checkpoint(self, event: DpEvent, stands: str) -> None:
        """Notes the checkpoint from which the event's part continues, if a kill left it without its last note."""
        if isinstance(event, PlannedDpEvent) and stands:
            newest = self._newest(event.plan)
            if newest and not newest.done and newest.state == stands:
                self._note(event.plan, newest._replace(done=True))

    def _note(self, plan: str, note: _Note) -> None:
        fields = {"plan": plan, "part": note.part, "step": note.step, "state": note.state}
        self.ledger.note(_KEPT if note.done else _KEEPING, fields)

    def _newest(self, plan: str, labels: tuple[str, ...] = (_KEPT, _KEEPING)) -> _Note | None:
        for line in reversed(self.ledger.lines):
            if line["kind"] == "note" and line["label"] in labels and line["settings"]["plan"] == plan:
                own = line["settings"]  # versions before 0.4 named no state
                return _Note(own["part"], own["step"], own.get("state", ""), line["label"] == _KEPT, line["number"])
        return None

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
                if isinstance(entry.event, PlannedDpEvent) and not _continues(paid):  # a branch, as it was paid for
                    entry = dataclasses.replace(entry, event=dataclasses.replace(entry.event, after=""))
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
        late = any(paid.settings.get(_LATE) for paid in self.ledger.paid)
        when = "some of it after it was done" if late else "before it was done"
        return f"all of it was paid for in ledger {self.ledger.id} {when}; {place}"

    def steps_of(self, id: str) -> int:
        """Number of steps that were paid for under an id."""
        return sum(paid.steps for paid in self.ledger.paid if paid.id == id)

    def unpaid(self, carried: Entries) -> dict[str, int]:
        """Number of steps, or other uses of the data, that models carry and this ledger has not paid for, by id."""
        steps, uses = dict[str, list[Line]](), Counter[str]()
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
                owed[id] = entry.steps - own
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
                    self.pay_once(Use(entry.event, entry.label, id), late=True)
                continue
            state = entry.sampling or self._sampling.get_state()
            assert state is not None
            proof = "" if entry.origin == DRAWN else asserted or entry.origin
            of_sampling = Payments(self.ledger, Sampling.from_state(dict(state)))
            of_sampling.pay_steps(entry.event, steps, id, proof, late=True)

    def _lines(self) -> list[Line]:
        return self._read_lines()[1]

    def _read_lines(self) -> tuple[list[Line], list[Line]]:
        # Payments with their steps, as they were paid for and as they count.
        if self._read[0] != len(self.ledger.lines):
            lines = [(paid, _steps_of(paid)) for paid in self.ledger.paid]
            self._read = len(self.ledger.lines), lines, self._cut(lines)
        return self._read[1:]

    # Plans.

    def price_of_plan(self, event: PlannedDpEvent, stands: str = "") -> DpEvent:
        """The price of further steps of a plan, by a part that stands at the state of an id."""
        return self._price_of_plan(event, stands)[0]

    def _price_of_plan(self, event: PlannedDpEvent, stands: str) -> tuple[DpEvent, dict[str, Any]]:
        # The price of further steps of a part; the step of the plan at which they begin, and whether they continue it.
        lines = self._lines_of(event.plan)
        parts = [entry for _, entry in lines]
        first = event.start + sum(entry.steps for entry in parts if _part(entry) == event.part)
        continues = bool(parts) and self._is_newest(event, stands)
        branches = 1 - continues + sum(not _continues(paid) for paid, _ in lines)
        whole = [*(entry.event.event for entry in parts if isinstance(entry.event, PlannedDpEvent)), event.event]
        price = _missing(whole, branches, [paid.event for paid, _ in lines])
        return price, {_FROM: first, _CONTINUES: continues}

    def _is_newest(self, event: PlannedDpEvent, stands: str) -> bool:
        # Whether a part may continue the plan: the ledger last heard of the plan from it, or from the state that it was
        # resumed from, or since then of steps alone that no release can hold. `stands`: the id of that state.
        lines, newest = self._lines_of(event.plan), self._newest(event.plan)
        by = {paid.number: _part(entry) for paid, entry in lines} | ({newest.number: newest.part} if newest else {})
        if not by or by[max(by)] == event.part:
            return True
        if event.part in by.values():
            return False
        begins, kept = (event.after, event.start), self._kept(event.plan, lines)
        if kept is None:
            parts = [entry for _, entry in lines]
            return bool(parts) and _part(parts[-1]) == event.after and _end(parts) == begins
        return kept.state == stands if kept.state and stands else (kept.part, kept.step) == begins

    def _lines_of(self, plan: str) -> list[tuple[Paid, Entry]]:
        return [(paid, entry) for paid, entry in self._lines() if entry is not None and _plan(entry) == plan]

    def _cut(self, lines: Sequence[Line]) -> list[Line]:
        # A part ends where another continued from it; one of an earlier process, at its last checkpoint. Later steps
        # were paid for, but were not made or are lost.
        found = list(lines)
        places: dict[str, list[int]] = {}  # of a plan's payments

        def end_last_part(plan: str, step: int) -> None:
            last = _part(lines[places[plan][-1]][1])
            for place in places[plan]:
                if found[place][1] is not None and _part(lines[place][1]) == last:
                    found[place] = _up_to(step, *found[place])

        for place, (paid, entry) in enumerate(lines):
            if entry is None or not (plan := _plan(entry)):
                continue
            if plan in places and _continues(paid):
                end_last_part(plan, int(paid.settings[_FROM]))
            places.setdefault(plan, []).append(place)
        for plan, own in places.items():
            kept = self._kept(plan, [lines[place] for place in own])
            if kept and lines[own[-1]][0].session != self.ledger.session:
                end_last_part(plan, kept.step)
        return found

    def _kept(self, plan: str, lines: Sequence[Line]) -> _Note | None:
        # The plan's last checkpoint, if nothing that was paid for since can have been released without another note.
        note = self._newest(plan, (_KEPT,))
        since = [paid for paid, _ in lines if note and paid.number > note.number]
        return note if all(paid.settings.get(_KEPT_ALONG) for paid in since) else None


class _Note(NamedTuple):
    # The part and step at which a plan is kept, the id of that state, and whether it surely is there.
    part: str
    step: int
    state: str
    done: bool
    number: int = 0  # of its line


def _steps_of(paid: Paid) -> Entry | None:
    """Steps that a payment is for, if its settings name them and they cost what was paid."""
    step, state = paid.settings.get("step"), paid.settings.get("sampling")
    if not step or not state:
        return None
    event, steps = events.from_json(step), paid.steps
    if isinstance(event, PlannedDpEvent):
        known = _CONTINUES in paid.settings or paid.event in (event.event, dp_accounting.NoOpDpEvent())
        fits = paid.attempts == 1 and known
        steps = max(steps, int(paid.event != dp_accounting.NoOpDpEvent()))  # a price counts, even without a step
    else:
        price = Sampling.from_state(state).compose_history([(event, 1)])
        fits = paid.attempts == paid.steps and price == SelfComposedDpEvent(paid.event, 1)
    return Entry(event, steps, BY_HAND if paid.settings.get(_ASSERTED) else DRAWN, dict(state)) if fits else None


def _pays_for(paid: Entry, made: Entry) -> bool:
    # A payment is for its own event alone, under a sampling that costs no less than the one that was asserted since.
    return paid.event == made.event and dearer(paid.sampling, made.sampling) == paid.sampling


def _continues(paid: Paid) -> bool:
    # Versions before 0.4 paid nothing for what continues, whatever its noise.
    return bool(paid.settings.get(_CONTINUES, paid.event == dp_accounting.NoOpDpEvent()))


def _missing(whole: Sequence[DpEvent], branches: int, paid: Sequence[DpEvent]) -> DpEvent:
    """What a plan's payments lack of its price; `whole`: the price of a branch at each of them, and at the next."""
    if not paid or not all(map(events.is_private, [*whole, *paid])):
        return whole[-1]
    least = min(whole, key=_sigma)
    given = [event for event in paid if event != dp_accounting.NoOpDpEvent()]
    if all(event == least for event in given):
        number = branches - len(given)
        return dp_accounting.NoOpDpEvent() if number <= 0 else least
    due = branches * _sigma(least) ** -2
    missing = due - math.fsum(_sigma(event) ** -2 for event in given) + 1e-12 * due  # more than its rounding errors
    return dp_accounting.GaussianDpEvent(missing**-0.5) if missing > 0 else dp_accounting.NoOpDpEvent()


def _sigma(event: Any) -> float:
    return float(event.noise_multiplier)


def _up_to(step: int, paid: Paid, entry: Entry | None) -> Line:
    assert entry is not None
    first, event, costs = int(paid.settings[_FROM]), entry.event, paid.event != dp_accounting.NoOpDpEvent()
    if costs and step <= first and _continues(paid):  # less noise, of steps that were not made: an expense by itself
        return dataclasses.replace(paid, steps=0), None
    steps = max(int(costs), min(entry.steps, step - first))
    if isinstance(event, PlannedDpEvent) and first + steps > step:  # a price without a step: an end of where it began
        event = dataclasses.replace(event, part=event.after or event.part, start=step - steps)
    return dataclasses.replace(paid, steps=steps), dataclasses.replace(entry, event=event, steps=steps)


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
