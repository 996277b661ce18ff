"""Data in one order, the same in every epoch: shuffled files, logs. For noise that is planned and correlated.

Unit i is in batch ⌊i/B⌋ of every epoch, so that its steps are exactly b = ⌈n/B⌉ apart. The order may be known to
everybody: nothing is claimed for its being secret. Under zero-out adjacency (a unit's row counts as empty, and nobody
else's moves up) a planned training of N steps costs what its plan says, once, for every number of steps up to N:

    plan of correlated noise C, n_t = C⁻¹ z:    one Gaussian of multiplier σ / S(C, N, b)

That holds for a plan that goes on where it stopped. Each batch carries its *place* in the order to the step, which
refuses it where another one is due: a second `fit`, or a resumed run, begins at `position`, the steps made so far.
Independent noise costs what it costs in shuffled epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent

from tfdp_rec.privacy.events import PlannedDpEvent, is_private
from tfdp_rec.privacy.sampling import Run, ShuffledEpochs, composed


class FixedOrder(ShuffledEpochs):
    """Batches in the order of the units' numbers, epoch after epoch; shuffle the data once, before.

    Guarantee: under zero-out adjacency a planned training costs its plan's event, once; plans begun anew (a released
    model that was loaded and trained on) are composed.

    Args:
        num_units: as `Sampling`.
        expected_batch_size: units in a batch; the last one of an epoch may be smaller.
        unit: as `Sampling`.

    Example:
        >>> order = FixedOrder(num_units=5, expected_batch_size=2, unit="user")
        >>> batches = order.index_batches(position=1)
        >>> [next(batches).tolist() for _ in range(3)]
        [[2, 3], [4], [0, 1]]
    """

    positioned = True

    def index_batches(self, seed: int | None = None, position: int = 0) -> Iterator[np.ndarray]:
        """Endless batches of unit indices, the one at `position` first; there is nothing to seed."""
        size = int(self.expected_batch_size)
        while True:
            first = position % self.steps_per_epoch * size
            yield np.arange(first, min(first + size, self.num_units))
            position += 1

    def compose_history(self, runs: Sequence[Run], restarts: int = 0) -> DpEvent:
        """One event for each plan, at the least noise that it had; steps of independent noise as `ShuffledEpochs`.

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
        return composed([*events, super().compose_history(others, restarts)] if others else events)

    def _refuse_plan_of_another_order(self, event: PlannedDpEvent) -> None:
        fitting = -(-event.steps // self.steps_per_epoch)
        if event.separation > self.steps_per_epoch or event.participations < fitting:
            raise ValueError(
                f"The noise was planned for units that are in at most {event.participations} of {event.steps} steps, "
                f"at least {event.separation} apart; in this order they are in {fitting}, {self.steps_per_epoch} "
                f"apart. Plan for separation={self.steps_per_epoch}."
            )

    def describe(self) -> str:
        """One line for a privacy statement."""
        return (
            f"one order, the same in every epoch of {self.steps_per_epoch} batches of {self.expected_batch_size} out "
            f"of {self.num_units}; no amplification claimed, the order may be known"
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
