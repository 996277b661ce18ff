"""Allowances: steps that a budget lets an optimizer make.

    priced with all else that was spent -> paid for in the ledger, if there is one -> the gate of its meter is open

ε never exceeds the target, not by one step: the gate is in the graph of the step, which refuses a step too many, one on
other batches, and one of another optimizer. What was spent elsewhere is noticed before the next step, and priced.
"""

from __future__ import annotations

import math
import textwrap
from typing import Any

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.meter import Meter


class Allowance:
    """The steps of one optimizer at a time that fit a target, with all else that an accountant counts."""

    # `steps` are the accountant's in all, whatever ε allows; None for no such limit. A fit keeps it, if `in_fit`.

    def __init__(self, accountant: Accountant, target: float, steps: int | None = None, in_fit: bool = False):
        self.accountant, self.target, self.steps = accountant, target, steps
        self._in_fit, self._priced = in_fit, None
        self._optimizer: Any = None
        self._meter: Any = None
        self._others = list[Meter]()  # meters of all other optimizers that the accountant counts
        self._limit = self._unpaid = 0  # steps in all that fit; those beyond the gate, which are not paid for yet

    def begin(self, optimizer: Any) -> None:
        """Prices the steps of an optimizer from here on."""
        self._optimizer, self._meter, self._priced = optimizer, optimizer.privacy_history, None

    def left(self, optimizer: Any) -> int:
        """Number of further steps that fit; two reads, if nothing but steps of this optimizer happened before."""
        if optimizer is not self._optimizer:
            self.begin(optimizer)
        if self._priced is None or self._priced != self._state():
            self._price()
        return self._meter.gate.left + self._unpaid

    def _state(self) -> Any:
        # All that the price depends on and that steps of this optimizer leave as it is.
        accountant, spending = self.accountant, self.accountant.spending
        own = self._meter.version, accountant.event, accountant.delta, spending.version, len(spending.payments.written)
        return self.target, self.steps, own, [(each.version, each.counters.made) for each in self._others]

    def _price(self) -> None:
        accountant, optimizer, name = self.accountant, self._optimizer, self.accountant.sampling.name
        self._priced = None  # also if the pricing is interrupted
        self._meter.open(0, name, self._meter.gate.find_id(name), self._in_fit)  # stays closed where there is no price
        accountant.spending.refuse()
        related = [each for one in accountant.spending.meters for each in one.related_meters]
        self._others = [each for each in related if each is not self._meter]
        for meter in self._others:  # what was priced before these steps is priced again after them
            meter.stop()
        accountant.set_event(optimizer.dp_event())
        most, together = accountant.max_steps(self.target, self.steps), accountant.sampling.steps_at_once
        self._limit = most if self.steps is None else min(most, self.steps)
        left = max(0, self._limit - accountant.steps) // together * together
        self._open(min(left, accountant.spending.prepaid_steps(accountant.event, optimizer, left)), left)

    def _open(self, paid: int, left: int) -> None:
        accountant = self.accountant
        self._meter.open(paid, accountant.sampling.name, accountant.spending.paid_id if paid else "", self._in_fit)
        self._unpaid, self._priced = left - paid, self._state()

    def pay(self, optimizer: Any, steps: int, block: float = math.inf) -> None:
        """Pays for the next steps, and opens the gate for them; `ValueError` if they would exceed the budget."""
        # A crash would lose what is paid ahead: no more than `block` steps, unless `steps` are more.
        left = self.left(optimizer)
        if left < steps:
            raise ValueError(self._overspend_message(steps))
        if left - self._unpaid < steps:  # the gate is open for fewer
            spending, event = self.accountant.spending, self.accountant.event
            counted = self._meter.gate.left_of_epoch
            self._open(spending.pay_ahead(event, steps - counted, left - counted, optimizer, block), left - counted)

    def _overspend_message(self, ahead: int) -> str:
        accountant = self.accountant
        besides = "; ".join(dict.fromkeys(label for _, label in accountant.spent_besides))
        if besides and not accountant.steps:
            return (
                f"No step fits the budget: epsilon is {accountant.epsilon():.4g} before the first one here, and the "
                f"target {self.target:g} is for everything that was done with the data, which is "
                f"{textwrap.shorten(besides, 160, placeholder=' ...')}. Weights keep what they were trained at, frozen "
                "ones too. Give a larger epsilon, of which this much is spent, or train earlier models with less."
            )
        others, together = accountant.steps - int(self._optimizer.iterations), accountant.sampling.steps_at_once
        shared = f", {others} of them by another model or optimizer of the same weights" if others > 0 else ""
        if together > 1:
            shared = f", of {accountant.steps // together} epochs that were begun"
        said = (
            f"{ahead} more step(s) would exceed the budget: epsilon is {accountant.epsilon():.4g} after "
            f"{accountant.steps} steps{shared}, the target is {self.target:g} and the limit {self._limit} steps. "
        )
        if accountant.steps:
            return said + "Release what was trained; to train on, give a larger epsilon, of which this much is spent."
        return said + (
            "Use more noise (tfdp_rec.privacy.calibrate_noise), smaller batches, or a larger target; a mechanism "
            "without a guarantee, such as EANA, fits no target."
        )
