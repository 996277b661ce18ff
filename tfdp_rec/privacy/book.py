"""A ledger as the accountant of one training uses it: steps paid for in blocks, ahead of their making.

    ahead = steps of the open block - steps made since it was paid for

A block is on disk before its first step; what is left of it is given back when nobody will make it. A crash leaves
the whole block spent. Planned steps are one block, the plan (`plan_payments.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

from dp_accounting import DpEvent, SelfComposedDpEvent

from tfdp_rec.privacy import events, plan_payments
from tfdp_rec.privacy.events import PlannedDpEvent
from tfdp_rec.privacy.history import DRAWN, UNPROVEN, Entry, History
from tfdp_rec.privacy.ledger import Ledger
from tfdp_rec.privacy.ledger_lines import BrokenLedger, Paid
from tfdp_rec.privacy.sampling import PoissonSampling, Sampling

BLOCK = 100  # steps that a crash costs at most, for one sync of the disk


def refuse_unpayable(event: DpEvent, sampling: Sampling) -> None:
    """Raises for steps that are neither paid for one by one nor planned.

    Args:
        event: of a step.
        sampling: of its batch.

    Raises:
        ValueError: for them.
    """
    if not isinstance(event, PlannedDpEvent) and not isinstance(sampling, PoissonSampling):
        raise ValueError(
            f"{type(sampling).__name__} does not pay for steps one by one, which is what an accountant's ledger is "
            "paid in: use PoissonSampling, or noise that is planned (LazyDPFTRL) in a FixedOrder, or pay for whole "
            "epochs by hand: ledger.pay(event, attempts=epochs)."
        )


class Book:
    """The payments of one training, and of all else that its ledger holds.

    Args:
        ledger: opened for the sampling's unit and adjacency.
        sampling: whose steps these are.

    Raises:
        BrokenLedger: it counts for another unit or adjacency.
    """

    def __init__(self, ledger: Ledger, sampling: Sampling):
        if (ledger.unit, ledger.adjacency) != (sampling.unit, sampling.adjacency):
            raise BrokenLedger(
                f"{ledger.path} counts for one {ledger.unit} ({ledger.adjacency}), and the sampling for one "
                f"{sampling.unit} ({sampling.adjacency}): open the ledger for what is sampled."
            )
        self.ledger, self._sampling = ledger, sampling
        self._open: tuple[int, DpEvent, int, int] | None = None  # entry, event, steps, steps made before
        self._seen = 0, list[tuple[Paid, Entry | None]]()

    # Paying.

    def pay_once(self, event: DpEvent, label: str) -> None:
        """Something that looks at all data once."""
        self.ledger.pay(event, label=label, settings={"sampling": None})

    def pay_steps(self, event: DpEvent, steps: int) -> int:
        """Steps of `event` on their batches; returns the entry's number."""
        refuse_unpayable(event, self._sampling)
        if isinstance(event, PlannedDpEvent):
            return self._pay_plan(event, steps)
        per_step = self._sampling.compose_history([(event, 1)])
        assert isinstance(per_step, SelfComposedDpEvent)
        settings = {"step": events.to_json(event), "sampling": self._sampling.get_state()}
        return self.ledger.pay(per_step.event, steps, "training", settings, steps)

    def _pay_plan(self, event: PlannedDpEvent, steps: int) -> int:
        price, first = plan_payments.price_of(event, self._payments(), self.ledger)
        settings = {"step": events.to_json(event), "sampling": self._sampling.get_state(), plan_payments.FROM: first}
        return self.ledger.pay(price, 1, "training", settings, steps)

    def keep(self, event: DpEvent, history: History) -> None:
        """A checkpoint was written of what `event`'s steps have made: who goes on from it pays for no plan twice."""
        if isinstance(event, PlannedDpEvent):
            plan_payments.keep(event, self._made(event, history), self.ledger)

    def pay_ahead(self, event: DpEvent, history: History, steps: int, most: int) -> int:
        """Makes sure that `steps` more steps are paid for, and returns how many are.

        Args:
            event: of one step.
            history: what the models have done.
            steps: about to be made.
            most: that will be made in all.
        """
        ahead = self.ahead(history)
        if ahead < steps or self._open is None or self._open[1] != event:
            self.settle(history)
            ahead = max(steps, most if isinstance(event, PlannedDpEvent) else min(BLOCK, most))
            self._open = self.pay_steps(event, ahead), event, ahead, self._made(event, history)
        return ahead

    def ahead(self, history: History) -> int:
        """Steps that are paid for and not made yet."""
        if self._open is None:
            return 0
        _, event, steps, before = self._open
        return max(0, steps - (self._made(event, history) - before))

    def settle(self, history: History) -> None:
        """Nobody makes a step now: what is left of the open block is given back."""
        left = self.ahead(history)
        if left and self._open:
            number, event, steps, _ = self._open
            whole = int(left == steps)  # of a plan that was begun nothing comes back but its steps
            self.ledger.give_back(number, whole if isinstance(event, PlannedDpEvent) else left, left)
        self._open = None

    def _made(self, event: DpEvent, history: History) -> int:
        return self._counted(history)[self._key(event, self._sampling.get_state())]

    # Reading.

    def entries(self) -> list[Entry]:
        """All steps that were paid for, under whatever sampling, in their order."""
        found = [(paid, entry) for paid, entry in self._payments() if entry is not None]
        return [dataclasses.replace(entry, steps=paid.steps) for paid, entry in found if paid.steps]

    def own(self, history: History) -> list[Entry]:
        """Steps under this sampling that were paid for, without those ahead."""
        mine, ahead = self._sampling.get_state(), self.ahead(history)
        found = []
        for paid, entry in self._payments():
            if entry is None or entry.sampling != mine:
                continue
            steps = paid.steps - (ahead if self._open and paid.number == self._open[0] else 0)
            if steps:
                found.append(dataclasses.replace(entry, steps=steps))
        return found

    def others(self) -> list[tuple[DpEvent, str]]:
        """All else that was paid for."""
        mine = self._sampling.get_state()
        return [
            (paid.event if paid.attempts == 1 else SelfComposedDpEvent(paid.event, paid.attempts), paid.label)
            for paid, entry in self._payments()
            if entry is None or entry.sampling != mine
        ]

    def unpaid(self, history: History) -> int:
        """Steps, and uses of all data, that the models tell of and the ledger has not paid for."""
        return sum(self._owed(history).values())

    def catch_up(self, history: History) -> None:
        """Pays for all that is unpaid."""
        for key, steps in self._owed(history).items():
            event, sampling, label = json.loads(key)
            if label:
                self.ledger.pay(events.from_json(event), steps, label, {"sampling": None})
            else:
                Book(self.ledger, Sampling.from_state(sampling)).pay_steps(events.from_json(event), steps)

    def _owed(self, history: History) -> Counter[str]:
        paid: Counter[str] = Counter()
        for payment, entry in self._payments():
            if entry is not None:
                paid[self._key(entry.event, entry.sampling)] += payment.steps
            else:
                paid[self._key(payment.event, None, payment.label)] += payment.attempts
        return self._counted(history) - paid

    def _counted(self, history: History) -> Counter[str]:
        counted: Counter[str] = Counter()
        for entry in history:
            sampling = self._sampling.get_state() if entry.origin == UNPROVEN else entry.sampling
            counted[self._key(entry.event, None if entry.label else sampling, entry.label)] += entry.steps
        return counted

    def _key(self, event: DpEvent, sampling: dict[str, Any] | None, label: str = "") -> str:
        return json.dumps([events.to_json(event), sampling, label], sort_keys=True)

    def _payments(self) -> list[tuple[Paid, Entry | None]]:
        """What was paid for, each with the steps that it is, if it is steps."""
        lines = len(self.ledger.chain.lines)
        if self._seen[0] != lines:
            self._seen = lines, list(self._read())
        return self._seen[1]

    def _read(self) -> plan_payments.Payments:
        return plan_payments.cut([(paid, _steps_of(paid)) for paid in self.ledger.paid], self.ledger)


def _steps_of(paid: Paid) -> Entry | None:
    """The steps that a payment is, if it says so and they cost what was paid."""
    step, state = paid.settings.get("step"), paid.settings.get("sampling")
    if not step or not state:
        return None
    event = events.from_json(step)
    if isinstance(event, PlannedDpEvent):
        fits = paid.attempts == 1 and plan_payments.may_cost(event, paid.event)
        return Entry(event, paid.steps, DRAWN, dict(state)) if fits else None
    if paid.attempts != paid.steps:
        return None
    if Sampling.from_state(state).compose_history([(event, 1)]) != SelfComposedDpEvent(paid.event, 1):
        return None
    return Entry(event, paid.steps, DRAWN, dict(state))
