"""Orders: data whose batches have places, so that noise can be planned over them and take back what it added before.

The steps of a unit must lie as the plan assumes: at least `separation` apart, and at most `participations` of them.
Each batch carries its *place* to the step, which refuses it where another one is due. Under zero-out adjacency (a
unit contributes nothing, and no other rows move up) a planned training then costs what its plan says, once, for
every number of its steps:

    plan of correlated noise C, n_t = C⁻¹ z:    one Gaussian of multiplier σ / S(C, N, b)

**One fixed order**, the same in every epoch: unit i is in batch ⌊i/B⌋ of every epoch, so that its steps are exactly
b = ⌈n/B⌉ apart. No secrecy of the order is assumed. A second `fit`, or a resumed run, begins at `position`, the number
of steps made so far. Independent noise has no price here: it is the plan whose C is the identity.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent

from tfdp_rec.core.claim.events import PlannedDpEvent, is_private
from tfdp_rec.core.claim.schemes import Run, Sampling, compose_all, integer


class Order(Sampling):
    """Base class of orders; arguments as `Sampling`."""

    positioned = True

    @property
    @abc.abstractmethod
    def separation(self) -> int:
        """b, the least distance between two steps of a unit."""

    @abc.abstractmethod
    def participations(self, steps: int) -> int:
        """Largest number of the first `steps` steps that a unit can be in."""

    @abc.abstractmethod
    def batch_at(self, step: Any) -> Any:
        """Number of the batch at a step, or at a place of the order: an int or a tensor."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> int:
        """A number above 1 that tells orders apart, the same in every process."""

    def compose_history(self, runs: Sequence[Run]) -> DpEvent:
        """The events of all plans; other steps that are private are refused."""
        plans: dict[str, list[tuple[PlannedDpEvent, int]]] = {}
        for event, steps in runs:
            if isinstance(event, PlannedDpEvent):
                self._refuse_plan_of_another_order(event)
                plans.setdefault(event.plan, []).append((event, steps))
            elif is_private(event):
                raise ValueError(
                    f"A {type(self).__name__} has a price for planned noise alone: train with LazyDPFTRL or DPFTRL "
                    "(correlation=), whose plan is paid for once, or draw batches with PoissonSampling."
                )
        unpriced = [event for event, _ in runs if not isinstance(event, PlannedDpEvent)]
        return compose_all([*unpriced, *(_cost(several) for several in plans.values())])

    def _refuse_plan_of_another_order(self, event: PlannedDpEvent) -> None:
        fitting = self.participations(event.steps)
        if event.separation > self.separation or event.participations < fitting:
            raise ValueError(
                f"The noise was planned for units that are in at most {event.participations} of {event.steps} steps, "
                f"at least {event.separation} apart; in this order they are in {fitting}, {self.separation} "
                f"apart. Plan for separation={self.separation}."
            )


class FixedOrder(Order):
    """Batches in the order of the units' numbers, epoch after epoch; shuffle the data once, before.

    Guarantee: a planned training costs its plan's event, once; plans begun anew (a released model that was loaded and
    trained on) are composed.

    Args:
        num_units: Number of units; treated as public.
        expected_batch_size: Number of units in a batch, an integer; the last batch of an epoch may be smaller.
        unit: Name of a unit in a privacy statement.

    Raises:
        ValueError: An argument is out of range, or the batch size is not an integer.

    Example:
        >>> order = FixedOrder(num_units=5, expected_batch_size=2, unit="user")
        >>> batches = order.index_batches(position=1)
        >>> [next(batches).tolist() for _ in range(3)]
        [[2, 3], [4], [0, 1]]
    """

    def __init__(self, num_units: int, expected_batch_size: int, unit: str = "example"):
        super().__init__(num_units, integer("expected_batch_size", expected_batch_size), unit)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; the last one may be smaller."""
        return math.ceil(self.num_units / self.expected_batch_size)

    def index_batches(self, seed: int | None = None, position: int = 0) -> Iterator[np.ndarray]:
        """Endless batches of unit indices from `position` on; nothing is random, and the seed is not used."""
        size = int(self.expected_batch_size)
        while True:
            first = position % self.steps_per_epoch * size
            yield np.arange(first, min(first + size, self.num_units))
            position += 1

    @property
    def separation(self) -> int:
        return self.steps_per_epoch

    def participations(self, steps: int) -> int:
        return -(-steps // self.steps_per_epoch)

    def batch_at(self, step: Any) -> Any:
        return step % self.steps_per_epoch

    @property
    def fingerprint(self) -> int:
        return self.num_units * 2**22 + int(self.expected_batch_size)

    def describe(self) -> str:
        """One line for a privacy statement."""
        return (
            f"one order, the same in every epoch of {self.steps_per_epoch} batches of {self.expected_batch_size} out "
            f"of {self.num_units}; no amplification claimed, the order may be known"
        )


def _cost(several: Sequence[tuple[PlannedDpEvent, int]]) -> DpEvent:
    """The price of all steps of one plan: the plan's event, once."""
    plan = several[0][0]
    fits = all(event == plan for event, _ in several) and sum(steps for _, steps in several) <= plan.steps
    return plan.event if fits and is_private(plan.event) else dp_accounting.NonPrivateDpEvent()
