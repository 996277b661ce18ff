"""What was spent on the units of one sampling: by the models that are followed, and by other uses of their data.

    followed models -> their entries, and those that were recorded here -> a ledger, if there is one: its payments

With a ledger the payments are the record, the models' entries are receipts, and steps are paid for before they are
made, in blocks: a block and the model's entry for its steps have the same id. Steps of a block that will not be made
are given back; after a crash the whole block stays spent. Without a ledger what the models carry is the record
(`NoPayments`).

Planned noise is paid for as a whole, once, under the id of its plan. A training of planned noise that is kept in
checkpoints has an id, and so has each state of it that is kept: both stand in the checkpoint and in notes of the
ledger.

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
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.core.ground.files import Path

BLOCK = 100  # most steps paid for by one sync of the disk: what a crash costs, beside the steps since the checkpoint
_KEPT = "state kept"  # label of a note: a checkpoint holds a training as it stands
_KEEPING = "state about to be kept"  # label of a note: such a checkpoint is about to be there
_SETTINGS = {"step", "sampling"}  # of a payment for steps; a line with others is an expense of its own

Line = tuple[Paid, Entry | None]  # a payment, and the steps that it is for, if it is for steps



class Unaccounted(ValueError):
    """The data were used in a way that an accountant cannot account for, so that it gives no ε."""


class Spending:
    """What an accountant counts, and what it has paid for ahead."""

    # A `Ledger` that was opened here, from a path, is `owned`.

    def __init__(self, sampling: Sampling, ledger: Path | Ledger | None = None):
        self.sampling, self.owned = sampling, ledger is not None and not isinstance(ledger, Ledger)
        self.payments = NoPayments() if ledger is None else Payments(ledger, sampling)
        self.version = 0  # number of changes, other than steps, of what is counted here alone
        self._recorded, self._followed = Entries(), list[Any]()
        self._open: tuple[str, DpEvent] | None = None  # id and event of steps that are paid for, and not all made
        self._payee: Any = None  # the meter of the optimizer that they are paid for

    def follow(self, model: Any) -> None:
        """Counts the steps of a private `model`, or of an optimizer; refuses one without a privacy history."""
        found = _meter_of(model)
        if found is None:
            raise TypeError(
                f"{type(model).__name__} has no privacy history: follow a model that was compiled with a mechanism of "
                "tfdp_rec."
            )
        found.followed = True
        if not any(model is known for known in self._followed):
            self._followed.append(model)
            self._note_expense()

    @property
    def meters(self) -> list[Any]:
        """The meters of the models that are followed, under their present optimizers."""
        return list({id(meter): meter for meter in map(_meter_of, self._followed)}.values())

    @property
    def history(self) -> Entries:
        """All entries that were recorded here or that the followed models carry; under a ledger these are receipts."""
        found = Entries()
        for entries in (self._recorded, *(meter.snapshot() for meter in self.meters)):
            found.merge(entries)
        return found

    def entries(self, event: DpEvent) -> Entries:
        """All that was spent, less steps that are still ahead, if the next steps are of an event."""
        return self.payments.entries(self.history, (self.paid_id, getattr(event, "plan", "")))

    def merge(self, entries: Entries) -> None:
        """Adds what an earlier run counted, each entry once; under a ledger, which has paid for it."""
        self._recorded.merge(entries)
        self._note_expense()

    def spend(self, use: Use) -> None:
        """Counts one use of the data that is no step; under a ledger it is paid for, unless it was."""
        self.history.add(use.entry, use.id)  # raises for the id of another expense, before anything is paid
        if not self.payments.has_paid(use):
            self.payments.pay_once(use)
        self._recorded.add(use.entry, use.id)
        self._note_expense()

    def _note_expense(self) -> None:
        # No step is made at the price of before.
        self.version += 1
        for meter in self.meters:
            meter.price_anew()

    def has_spent(self, use: Use) -> bool:
        """Whether a use is counted: under a ledger, whether that has paid for it."""
        is_carried = self.payments.ledger is None and self.history.steps_of(use.id) > 0
        return is_carried or self.payments.has_paid(use)

    def refuse(self) -> None:
        """Raises `Unaccounted` if steps were for another unit, not paid for, or without a record."""
        carried = self.history
        self._refuse_other_units(carried)
        if unpaid := self.payments.find_unpaid(carried):
            uses = dict.fromkeys(f"'{entry.label}'" for id, entry in carried.items() if id in unpaid and entry.label)
            made = f"{sum(unpaid.values())} steps" + (f" or uses ({', '.join(uses)})" if uses else "")
            raise Unaccounted(
                f"{made} were made that {self.payments.path} has not paid for: the file was deleted, "
                "restored from an older backup, or begun after these steps, or another model made them. Restore the "
                "newest file; or begin the ledger before the first step of a new model."
            )
        missing = sum(meter.undescribed_steps for meter in set(self.meters))
        if missing:
            raise Unaccounted(
                f"The optimizer has made {missing} steps that its privacy history does not describe: weights or "
                "counters were restored without it. Restore with load_model, load_weights or TrainingCheckpoint."
            )

    def _refuse_other_units(self, carried: Entries) -> None:
        # A user may have many rows: what a step costs for one row does not tell what it costs for a user.
        units = {entry.sampling.get("unit") for entry in carried if entry.sampling and not entry.ordinary}
        for unit in units - {self.sampling.unit}:
            raise Unaccounted(
                f"Steps or counts were made for another unit, one {unit}, and this accountant counts for one "
                f"{self.sampling.unit}: what they cost for the one does not tell what they cost for the other. Train "
                "a model anew with samplings of one unit."
            )

    # Steps that are paid for ahead.

    def pay_ahead(
        self, event: DpEvent, steps: int, most: int, optimizer: Any, block: float = BLOCK
    ) -> int:  # fmt: skip
        """Pays for `steps` next steps of an `event` by `optimizer`; returns how many are paid for.

        They are paid for in blocks of at most `block` steps, which a crash would lose, unless `steps` are more, and at
        most `most`; planned ones as a whole.
        """
        ahead = self.prepaid_steps(event, optimizer, most)
        if isinstance(self.payments, NoPayments) or ahead >= steps:
            return ahead
        if optimizer.correlates_noise:
            self.payments.refuse_superseded(optimizer.training_id, optimizer.state_id)
        if not self._pays_for(event, optimizer):
            self.give_back_rest()  # steps of another price, or of another optimizer, are under an id of their own
        # Payments are durable, so they are made in blocks: one sync of the disk for many steps.
        together = self.sampling.steps_at_once
        wanted = -(-max(steps, int(min(BLOCK, block, most))) // together) * together
        self._open = self.payments.pay_steps(event, wanted - ahead, self.paid_id), event
        self._payee = optimizer.privacy_history
        return min(most, self._steps_ahead(self.payments))

    def prepaid_steps(self, event: DpEvent, optimizer: Any, most: int) -> int:
        """Number of next steps of an optimizer, at most `most`, that are paid for; all of them without a ledger."""
        if isinstance(self.payments, NoPayments):
            return most
        return min(most, self._steps_ahead(self.payments)) if self._pays_for(event, optimizer) else 0

    def _pays_for(self, event: DpEvent, optimizer: Any) -> bool:
        # Whether what is paid ahead is for the next steps of an optimizer, at an event.
        meter = optimizer.privacy_history
        return meter is self._payee and self._open == (meter.gate.find_id(self.sampling.name), event)

    @property
    def paid_id(self) -> str:
        """Id of the steps that are paid for and not all made; empty if there are none."""
        return self._open[0] if self._open else ""

    def _steps_ahead(self, paid: Payments) -> int:
        # Number of steps that are paid for and not made yet.
        return max(0, paid.steps_of(self.paid_id) - self.history.steps_of(self.paid_id)) if self._open else 0

    def give_back_rest(self) -> None:
        """Gives back the steps that were paid for in the ledger and will not be made."""
        if self._open is None or isinstance(self.payments, NoPayments):
            return
        # Forgotten first: an interruption below may lose steps, and lets none be made that the file has taken back.
        id, left = self.paid_id, self._steps_ahead(self.payments)
        self._open = None
        self.version += 1
        if left:
            for meter in self.meters:  # also within a fit: no step that is not paid for
                meter.stop()
            self.payments.give_back(id, left)


def _meter_of(model: Any) -> Any:
    return getattr(model, "privacy_history", None) or getattr(
        getattr(model, "optimizer", None), "privacy_history", None
    )


def refuse_unpayable(event: DpEvent, sampling: Sampling) -> None:
    """Raises for steps that are neither priced one by one nor planned."""
    if not isinstance(event, PlannedDpEvent) and sampling.price(event) is None:
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
        self.written = ledger.lines  # by this, and by others who pay here
        self._read = 0, list[Line]()

    # Paying.

    def pay_once(self, use: Use) -> None:
        """Pays for one use of the data that is no training step."""
        self.ledger.pay(use[0], label=use[1], settings={"sampling": None}, id=use.id)

    def has_paid(self, use: Use) -> bool:
        """Whether a use was paid for, under its id or by hand under its own label."""
        return not self.find_unpaid(Entries.of(use))

    def pay_steps(self, event: DpEvent, steps: int, id: str = "") -> str:
        """Pays for steps on this sampling's batches, for a plan of noise as a whole; returns the id of their entry."""
        refuse_unpayable(event, self._sampling)
        settings: dict[str, Any] = {"step": events.to_json(event), "sampling": self._sampling.get_state()}
        if not isinstance(event, PlannedDpEvent):
            id, price = id or new_id(), self._sampling.compose_history([(event, steps)])
            assert isinstance(price, SelfComposedDpEvent)
            self.ledger.pay(price.event, price.count, "training", settings, steps, id=id)
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
                self.ledger.give_back(paid.number, 1 if planned else left // self._sampling.steps_at_once, left)
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

    def entries(self, carried: Entries | None = None, in_progress: Iterable[str] = ()) -> Entries:
        """All that was paid for, as entries, less the steps that are still ahead."""
        # Of the entries in progress here, and of plans, which are paid for as a whole, what models carry was begun. Of
        # all others, such as those of a process that was killed, what was paid for counts, made or not.
        found, carried = Entries(), carried or Entries()
        for paid, entry in self._lines():
            line = f"line {paid.number}"
            if entry is None:  # a use, or steps that cost something else than they should
                found.add(Entry(paid.event, paid.attempts, label=paid.label or "a payment"), line)
                continue
            id = paid.id or line
            made = carried.steps_of(id)
            if id in in_progress or (made and isinstance(entry.event, PlannedDpEvent)):
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

    def find_unpaid(self, carried: Entries) -> dict[str, int]:
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

    path, ledger, limit, written = "", None, None, ()

    def entries(self, carried: Entries, in_progress: Iterable[str]) -> Entries:
        """All that was spent: what is carried."""
        return carried

    def find_unpaid(self, carried: Entries) -> dict[str, int]:
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
        price = Sampling.from_state(state).compose_history([(event, steps)])
        fits = price == SelfComposedDpEvent(paid.event, paid.attempts)
    return Entry(event, steps, dict(state)) if fits else None


def _pays_for(paid: Entry, made: Entry) -> bool:
    return (paid.event, paid.sampling) == (made.event, made.sampling)
