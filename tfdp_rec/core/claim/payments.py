"""Payments for training steps in a ledger: in blocks, before the steps are made.

A block and the model's entry for its steps have the same id, so that the entry is a receipt. Steps of a block that will
not be made are given back; after a crash the whole block stays spent.

Planned noise is paid for as a whole, once, under the id of its plan.

A training of planned noise that is kept in checkpoints has an id, and so has each state of it that is kept: both stand
in the checkpoint and in notes of the ledger.

    note "about to be kept"  ->  the file is there, whole  ->  note "kept"  ->  something is released

Noise that takes back what it added is paid for once: two that go on from one state would share it. So such a training
goes on from the state that was kept last, or from one that was about to be since then; steps are paid for, checkpoints
written and weights released from no other.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from dp_accounting import DpEvent, SelfComposedDpEvent

from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.entries import Entries, Entry, Use, id_of_use, new_id
from tfdp_rec.core.claim.events import PlannedDpEvent
from tfdp_rec.core.claim.ledger import BrokenLedger, Ledger, Paid, Snapshot
from tfdp_rec.core.claim.schemes import PoissonSampling, Sampling
from tfdp_rec.core.ground.files import Path

BLOCK = 100  # steps paid for by one sync of the disk, and the most that a crash costs
_KEPT = "state kept"  # label of a note: a checkpoint holds a training as it stands
_KEEPING = "state about to be kept"  # label of a note: such a checkpoint is about to be there
_SETTINGS = {"step", "sampling"}  # of a payment for steps; a line with others is an expense of its own

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
        if not isinstance(ledger, Ledger):
            data = Snapshot(sampling.num_units, sampling.unit)
            ledger = Ledger(ledger, sampling.unit, data, sampling.adjacency)
        if (ledger.unit, ledger.adjacency) != (sampling.unit, sampling.adjacency):
            raise BrokenLedger(
                f"{ledger.path} counts for one {ledger.unit} ({ledger.adjacency}), and the sampling for one "
                f"{sampling.unit} ({sampling.adjacency}): open a ledger for the sampling's unit."
            )
        self.ledger, self._sampling = ledger, sampling
        self.path, self.limit = ledger.path, ledger.limit
        self._read = 0, list[Line]()

    # Paying.

    def pay_once(self, use: Use) -> None:
        """Pays for one use of the data that is no training step."""
        self.ledger.pay(use[0], label=use[1], settings={"sampling": None}, id=use.id)

    def has_paid(self, use: Use) -> bool:
        """Whether a use was paid for, under its id or by hand under its own label."""
        return not self.debts(Entries.of(use))

    def pay_steps(self, event: DpEvent, steps: int, id: str = "") -> str:
        """Pays for steps on this sampling's batches, for a plan of noise as a whole; returns the id of their entry."""
        refuse_unpayable(event, self._sampling)
        settings: dict[str, Any] = {"step": events.to_json(event), "sampling": self._sampling.get_state()}
        if not isinstance(event, PlannedDpEvent):
            id, step = id or new_id(), self._sampling.compose_history([(event, 1)])
            assert isinstance(step, SelfComposedDpEvent)
            self.ledger.pay(step.event, steps, "training", settings, steps, id=id)
            return id
        paid = [entry.event for paid, entry in self._lines() if entry and paid.id == event.plan]
        if any(each != event for each in paid):
            raise ValueError("A plan of noise has one noise multiplier, which was paid for at its first step.")
        if not paid:
            self.ledger.pay(event.event, 1, "training", settings, event.steps, id=event.plan)
        return event.plan

    def give_back(self, id: str, steps: int) -> None:
        """Gives back steps of an entry that this process paid for and will not make; a plan, if none of it was made."""
        # The latest payments first: their steps are the last to be made.
        for paid in reversed([paid for paid in self.ledger.paid if paid.id == id]):
            left, entry = min(steps, paid.steps), _steps_of(paid)
            planned = entry is not None and isinstance(entry.event, PlannedDpEvent)
            begun = planned and (left < paid.steps or paid.session != self.ledger.session)
            if left and not begun:
                self.ledger.give_back(paid.number, 1 if planned else left, left)
                steps -= left

    def note_checkpoint(self, training: str, stands: str, state: str, done: bool = True) -> None:
        """Notes that a training is kept in a `state` that follows the one it `stands` at, or is about to be."""
        self.refuse_superseded(training, stands)
        self.ledger.note(_KEPT if done else _KEEPING, {"training": training, "state": state})

    def refuse_superseded(self, training: str, stands: str) -> None:
        """Raises unless a training stands at its newest state."""
        # The newest is what was kept last, or was about to be since then.
        states = set[str]()
        for line in reversed(self.ledger.lines):
            if line["kind"] == "note" and line["label"] in (_KEPT, _KEEPING):
                if line["settings"]["training"] == training:
                    states.add(line["settings"]["state"])
                    if line["label"] == _KEPT:
                        break
        else:  # none was released
            return
        if stands not in states:
            raise RuntimeError(
                "Another run has gone on from the checkpoint that this training stands at, and what leaves here would "
                "hold other noise for the same steps: resume from the newest checkpoint of all, or begin anew."
            )

    # Reading.

    def entries(self, carried: Entries | None = None, goes_on: Iterable[str] = ()) -> Entries:
        """All that was paid for, as entries, less the steps that are still ahead."""
        # Of the entries that go on, and of plans, which are paid for as a whole, what models carry was begun.
        found, carried = Entries(), carried or Entries()
        for paid, entry in self._lines():
            line = f"line {paid.number}"
            if entry is None:  # a use, or steps that cost something else than they should
                found.add(Entry(paid.event, paid.attempts, label=paid.label or "a payment"), line)
                continue
            id = paid.id or line
            made = carried.steps_of(id)
            if id in goes_on or (made and isinstance(entry.event, PlannedDpEvent)):
                found.add(dataclasses.replace(entry, steps=made), id)
            else:
                found.extend(id, entry)
        return found

    def words(self) -> str:
        """What a statement says of the ledger; `BrokenLedger` if the open file was removed or replaced."""
        self.ledger.refuse_lost()
        place = f"line {len(self.ledger.lines)}, {self.ledger.head[:16]}; {self.ledger.kind}"
        return f"all of it was paid for in ledger {self.ledger.id} before it was done; {place}"

    def steps_of(self, id: str) -> int:
        """Number of steps that were paid for under an id."""
        return sum(paid.steps for paid in self.ledger.paid if paid.id == id)

    def debts(self, carried: Entries) -> dict[str, int]:
        """Number of steps, or other uses of the data, that models carry and this ledger has not paid for, by id."""
        steps, uses = dict[str, list[Line]](), Counter[str]()
        for paid, entry in self._lines():
            if entry is not None:
                steps.setdefault(paid.id, []).append((paid, entry))
            elif not paid.steps:
                # A payment by hand has an id of its own: it is found by event and label.
                for id in {paid.id, id_of_use(paid.event, paid.label)}:
                    uses[id_of_use(paid.event, id)] += paid.attempts
        owed = {}
        for id, entry in carried.items():
            if not entry.ordinary:
                own = uses[id_of_use(entry.event, id)]
                own += sum(paid.steps for paid, line in steps.get(id, ()) if line and _pays_for(line, entry))
                owed[id] = entry.steps - own
        return {id: steps for id, steps in owed.items() if steps > 0}

    def _lines(self) -> list[Line]:
        # Payments with their steps.
        if self._read[0] != len(self.ledger.lines):
            self._read = len(self.ledger.lines), [(paid, _steps_of(paid)) for paid in self.ledger.paid]
        return self._read[1]


class NoPayments:
    """Of an accountant without a ledger: nothing is paid for, and what models carry is the record."""

    path, ledger, limit = "", None, None

    def entries(self, carried: Entries, goes_on: Iterable[str]) -> Entries:
        """All that was spent: what is carried."""
        return carried

    def debts(self, carried: Entries) -> dict[str, int]:
        """Nothing: it is counted, and owed to no ledger."""
        return {}

    def has_paid(self, use: Use) -> bool:
        """Whether a use was paid for: none was."""
        return False

    def pay_once(self, use: Use) -> None:
        """Does nothing."""

    def note_checkpoint(self, training: str, stands: str, state: str, done: bool = True) -> None:
        """Does nothing: without a ledger no training is kept that has an ε."""

    def refuse_superseded(self, training: str, stands: str) -> None:
        """Does nothing, as `note_checkpoint`."""

    def words(self) -> str:
        """What a statement says of the ledger: nothing."""
        return ""


def _steps_of(paid: Paid) -> Entry | None:
    """Steps that a payment is for, if its settings name them and they cost what was paid."""
    step, state = paid.settings.get("step"), paid.settings.get("sampling")
    if not step or not state or not set(paid.settings) <= _SETTINGS:
        return None
    event, steps = events.from_json(step), paid.steps
    if isinstance(event, PlannedDpEvent):
        fits = (paid.event, paid.attempts, paid.id) == (event.event, 1, event.plan) and steps <= event.steps
        steps = max(1, steps)  # a price counts, even without a step
    else:
        price = Sampling.from_state(state).compose_history([(event, 1)])
        fits = paid.attempts == paid.steps and price == SelfComposedDpEvent(paid.event, 1)
    return Entry(event, steps, dict(state)) if fits else None


def _pays_for(paid: Entry, made: Entry) -> bool:
    return (paid.event, paid.sampling) == (made.event, made.sampling)
