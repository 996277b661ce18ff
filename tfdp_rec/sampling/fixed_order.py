"""Data in one order, the same in every epoch: shuffled files, logs. For noise that is planned and correlated.

Unit i is in batch ⌊i/B⌋ of every epoch, so that its steps are exactly b = ⌈n/B⌉ apart. The order may be known to
everybody: nothing is claimed for its being secret. A second `fit`, or a resumed run, begins at `position`, the steps
made so far. Independent noise costs what it costs in shuffled epochs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from dp_accounting import DpEvent

from tfdp_rec.sampling.orders import Order
from tfdp_rec.sampling.schemes import Run, ShuffledEpochs


class FixedOrder(Order, ShuffledEpochs):
    """Batches in the order of the units' numbers, epoch after epoch; shuffle the data once, before.

    Guarantee: a planned training costs its plan's event, once; plans begun anew (a released
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

    def index_batches(self, seed: int | None = None, position: int = 0) -> Iterator[np.ndarray]:
        """Endless batches of unit indices, the one at `position` first; there is nothing to seed."""
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

    def turn(self, step: Any) -> Any:
        return step % self.steps_per_epoch

    @property
    def number(self) -> int:
        return self.num_units * 2**22 + int(self.expected_batch_size)

    def compose_independent(self, runs: Sequence[Run], restarts: int) -> DpEvent:
        return ShuffledEpochs.compose_history(self, runs, restarts)

    def describe(self) -> str:
        """One line for a privacy statement."""
        return (
            f"one order, the same in every epoch of {self.steps_per_epoch} batches of {self.expected_batch_size} out "
            f"of {self.num_units}; no amplification claimed, the order may be known"
        )
