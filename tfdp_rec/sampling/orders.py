"""Orders: data whose batches have places, so that noise can be planned over them and take back what it added before.

A unit's steps must lie as the plan counts on: at least `separation` apart, no more than `participations` of them. Each
batch carries its *place* to the step, which refuses it where another one is due. Under zero-out adjacency (a unit's
rows count as empty, and nobody else's move up) a planned training then costs what its plan says, once, for every number
of its steps:

    plan of correlated noise C, n_t = C⁻¹ z:    one Gaussian of multiplier σ / S(C, N, b)
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import dp_accounting
from dp_accounting import DpEvent

from tfdp_rec.pricing.events import PlannedDpEvent, is_private
from tfdp_rec.sampling.schemes import Run, Sampling, composed


class Order(Sampling):
    """Base of the orders. Arguments as `Sampling`."""

    positioned = True

    @property
    @abc.abstractmethod
    def separation(self) -> int:
        """b: a unit's steps are at least so many apart."""

    @abc.abstractmethod
    def participations(self, steps: int) -> int:
        """In how many of so many steps a unit can be."""

    @abc.abstractmethod
    def turn(self, step: Any) -> Any:
        """Which batch is due at a step, or stands at a place; ints or tensors of them."""

    @property
    @abc.abstractmethod
    def number(self) -> int:
        """Tells orders apart, in every process alike; above 1."""

    @abc.abstractmethod
    def compose_independent(self, runs: Sequence[Run], restarts: int) -> DpEvent:
        """The event of steps with noise of their own; as `compose_history`."""

    def compose_history(self, runs: Sequence[Run], restarts: int = 0) -> DpEvent:
        """One event for each plan, at the least noise that it had, and what steps of independent noise cost.

        Raises:
            ValueError: for a plan that counts on another order.
        """
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


def _cost(several: Sequence[tuple[PlannedDpEvent, int]]) -> DpEvent:
    """What the runs of one plan cost together: its event for each end that it has.

    A plan that was forked, at a training checkpoint, has several ends. With z the noise of the common steps, z' and z"
    those of each's own, its releases are C g + (z, z') and C g' + (z, z"): a unit moves both together by √2 S at most,
    in which the common steps are counted twice.
    """
    planned = {(event.steps, event.separation, event.participations) for event, _ in several}
    wholes: list[Any] = [event.event for event, _ in several]
    ends = _ends(several)
    over = max(ends.values()) > several[0][0].steps
    if len(planned) > 1 or over or not all(map(is_private, wholes)):
        return dp_accounting.NonPrivateDpEvent()
    least = min(wholes, key=lambda whole: whole.noise_multiplier)
    begun = {(event.after, event.start) for event, _ in several if event.after}
    forks = sum((part, end) not in begun for part, end in ends.items())
    return least if forks == 1 else dp_accounting.SelfComposedDpEvent(least, forks)


def _ends(several: Sequence[tuple[PlannedDpEvent, int]]) -> dict[str, int]:
    """The step of the plan that each part has come to."""
    ends: dict[str, int] = {}
    for event, steps in several:
        ends[event.part] = ends.get(event.part, event.start) + steps
    return ends
