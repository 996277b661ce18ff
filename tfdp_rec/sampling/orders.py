"""Orders: data whose batches have places, so that noise can be planned over them and take back what it added before.

The steps of a unit must lie as the plan assumes: at least `separation` apart, and at most `participations` of them.
Each batch carries its *place* to the step, which refuses it where another one is due. Under zero-out adjacency (a
unit contributes nothing, and no other rows move up) a planned training then costs what its plan says, once, for
every number of its steps:

    plan of correlated noise C, n_t = C⁻¹ z:    one Gaussian of multiplier σ / S(C, N, b)

**One fixed order**, the same in every epoch: unit i is in batch ⌊i/B⌋ of every epoch, so that its steps are exactly
b = ⌈n/B⌉ apart. No secrecy of the order is assumed. A second `fit`, or a resumed run, begins at `position`, the number
of steps made so far. Independent noise costs what it costs in shuffled epochs.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent

from tfdp_rec.pricing.events import PlannedDpEvent, is_private
from tfdp_rec.sampling.schemes import Run, Sampling, ShuffledEpochs, composed


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

    @abc.abstractmethod
    def compose_independent(self, runs: Sequence[Run], restarts: int) -> DpEvent:
        """The event of steps with independent noise; arguments as in `compose_history`."""

    def compose_history(self, runs: Sequence[Run], restarts: int = 0) -> DpEvent:
        """The events of all plans, each at the least noise of its runs, and of the steps with independent noise."""
        plans: dict[str, list[tuple[PlannedDpEvent, int]]] = {}
        for event, steps in runs:
            if isinstance(event, PlannedDpEvent):
                self._refuse_plan_of_another_order(event)
                plans.setdefault(event.plan, []).append((event, steps))
        others = [(event, steps) for event, steps in runs if not isinstance(event, PlannedDpEvent)]
        events = [_cost(several) for several in plans.values()]
        return composed([*events, self.compose_independent(others, restarts)] if others else events)

    def _refuse_plan_of_another_order(self, event: PlannedDpEvent) -> None:
        fitting = self.participations(event.steps)
        if event.separation > self.separation or event.participations < fitting:
            raise ValueError(
                f"The noise was planned for units that are in at most {event.participations} of {event.steps} steps, "
                f"at least {event.separation} apart; in this order they are in {fitting}, {self.separation} "
                f"apart. Plan for separation={self.separation}."
            )


class FixedOrder(Order, ShuffledEpochs):
    """Batches in the order of the units' numbers, epoch after epoch; shuffle the data once, before.

    Guarantee: a planned training costs its plan's event, once; plans begun anew (a released model that was loaded and
    trained on) are composed.

    Args:
        num_units: Number of units; treated as public.
        expected_batch_size: Number of units in a batch; the last batch of an epoch may be smaller.
        unit: Name of a unit in a privacy statement.

    Example:
        >>> order = FixedOrder(num_units=5, expected_batch_size=2, unit="user")
        >>> batches = order.index_batches(position=1)
        >>> [next(batches).tolist() for _ in range(3)]
        [[2, 3], [4], [0, 1]]
    """

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

    def compose_independent(self, runs: Sequence[Run], restarts: int) -> DpEvent:
        return ShuffledEpochs.compose_history(self, runs, restarts)

    def describe(self) -> str:
        """One line for a privacy statement."""
        return (
            f"one order, the same in every epoch of {self.steps_per_epoch} batches of {self.expected_batch_size} out "
            f"of {self.num_units}; no amplification claimed, the order may be known"
        )


def _cost(several: Sequence[tuple[PlannedDpEvent, int]]) -> DpEvent:
    """The price of all runs of one plan: the plan's event, once for each branch of its training."""
    # A training that was continued twice from one checkpoint has two branches. Let z be the noise of the common steps,
    # z' and z" that of each branch: the releases are C g + (z, z') and C g' + (z, z"). A unit changes both together by
    # √2 S at most, which counts the common steps twice.
    planned = {(event.steps, event.separation, event.participations) for event, _ in several}
    events: list[Any] = [event.event for event, _ in several]
    ends = _ends(several)
    over = max(ends.values()) > several[0][0].steps
    if len(planned) > 1 or over or not all(map(is_private, events)):
        return dp_accounting.NonPrivateDpEvent()
    least = min(events, key=lambda event: event.noise_multiplier)
    begun = {(event.after, event.start) for event, _ in several if event.after}
    forks = sum((part, end) not in begun for part, end in ends.items())
    return least if forks == 1 else dp_accounting.SelfComposedDpEvent(least, forks)


def _ends(several: Sequence[tuple[PlannedDpEvent, int]]) -> dict[str, int]:
    """The last step of the plan that each part has made."""
    ends: dict[str, int] = {}
    for event, steps in several:
        ends[event.part] = ends.get(event.part, event.start) + steps
    return ends
