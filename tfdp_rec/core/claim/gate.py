"""The gate of an optimizer's steps: may one more be made, and on this batch?

A step takes one of the steps that are left, and is refused where none is. Without a budget there is no limit; an
`Allowance` (`allowance.py`) opens the gate for as many steps as are priced and paid for.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_rec.core.claim.counters import Counter, Counters, make_number
from tfdp_rec.core.claim.open_epoch import OpenEpoch
from tfdp_rec.core.ground.graph_checks import place_on_host, require_all

_NO_LIMIT = 2**62

_NO_MORE = (
    "Refused batch: The privacy budget is spent: one more step would exceed what PrivacyBudget or the optimizer's plan "
    "allows, or would be made at a price from before something else was spent. Continue with a PrivacyBudget of a "
    "larger target, compile with more noise, or spend outside of fit.\n"
)
_OTHER = (
    "Refused batch: the price of this step is not known. Either the model was compiled with another optimizer after "
    "this step was traced, or a budget has priced the steps on the batches of one sampling, and this is none of them. "
    "Make it after that fit, with the model as it is compiled now, under its own budget.\n"
)
_BY_HAND = (
    "Refused batch: a plan of correlated noise is kept in training checkpoints, so that each state must be written "
    "before its weights can be read, which is ensured in fit alone: train with fit.\n"
)


class Gate:
    """The gate of the steps that some counters count."""

    def __init__(self, counters: Counters):
        self.is_kept = False  # whether a fit keeps a budget
        self._counters = counters
        self._left, self._allowed = make_number(_NO_LIMIT), make_number(1)
        self._priced: tuple[str, str] | None = None  # the sampling whose batches the gate is open for, and their id
        self._is_replaced = False  # whether the model has a new optimizer
        self._epoch: OpenEpoch | None = None  # the epoch that is begun, which is counted as a whole

    # In the graph of a step.

    @place_on_host
    def take_step(self, counter: Counter, price: Any) -> list[Any]:
        """Operations that take a step at its price in the steps that are left, to wait for; they fail where it is more.

        The price is 1, or all steps of an epoch at its first one and 0 at the others.
        """
        allowed = (self._allowed.read_value() > 0, _BY_HAND), (counter.allowed.read_value() > 0, _OTHER)
        with tf.control_dependencies(require_all(*allowed)):
            taken = self._left.assign_sub(price)
        # Taken before it is compared: of two threads at the last step at most one finds that it is within.
        with tf.control_dependencies([taken]):
            return require_all((self._left.read_value() >= 0, _NO_MORE))

    # Between steps.

    @property
    def left(self) -> int:
        """Number of steps that the gate is open for."""
        left = max(0, int(self._left.numpy()))
        return left + self._epoch.left if self._epoch else left

    @property
    def left_of_epoch(self) -> int:
        """Number of these steps that are counted already."""
        return self._epoch.left if self._epoch else 0

    def leave_epoch(self) -> None:
        """Leaves what is left of an epoch, since the batches are iterated anew."""
        if self._epoch:
            self._epoch.leave()

    @property
    def is_limited(self) -> bool:
        """Whether it was opened for a number of steps."""
        return self._priced is not None

    def find_id(self, sampling: str) -> str:
        """Id under which the next steps on batches of a sampling are counted; empty if there is none yet."""
        name, id = self._priced or ("", "")
        return self._counters.find_id(sampling) or (id if name == sampling else "")

    def allow_steps(self, allowed: bool) -> None:
        """Whether a step may be made now; False refuses the steps of graphs that were traced before, too."""
        with tf.init_scope():  # not in the graph of a step, which would then allow itself
            self._allowed.assign(int(allowed))

    def open(self, steps: int, sampling: str, id: str = "", in_fit: bool = False) -> None:
        """Opens for so many steps on batches of a sampling, counted under the id of their payment."""
        self.is_kept, self._priced = in_fit, (sampling, id)
        self._admit_all()
        self._left.assign(steps)

    def lift(self, is_planned: bool) -> None:
        """Opens without a limit; under a plan stays closed until a step is paid for."""
        self._priced = None
        self._admit_all()
        self._left.assign(0 if is_planned else _NO_LIMIT)

    def close(self) -> None:
        """Lets no step through until it is opened."""
        self._left.assign(0)

    def replace(self, is_replaced: bool) -> None:
        """Refuses all steps from here on, or none for this reason."""
        self._is_replaced = is_replaced
        self._admit_all()

    def _admit_all(self) -> None:
        for counter in self._counters:
            self.admit(counter)

    def admit(self, counter: Counter) -> None:
        """Sees whether the steps of a counter may pass, and under which id they are counted."""
        # Under a budget, steps on batches of its sampling alone, and none without a guarantee.
        name, id = self._priced or (counter.name, "")
        priced = not counter.ordinary and counter.name == name and not (self._priced and counter.void)
        if priced:
            self._counters.count_under(counter, id)
            self._epoch = counter.epoch
        counter.allowed.assign(int(priced and not self._is_replaced))
