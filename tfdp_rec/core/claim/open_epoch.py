"""The epoch that a training is in, under a sampling that has a price by the epoch alone (`RandomAllocation`).

All T steps of an epoch are counted at its first one, which may be made at any time. Every other step must be the next
one of the same iteration, so that each unit is at most once in what was counted.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import depend_on, require

_NOT_BEGUN = (
    "Refused batch: it is in the middle of an epoch of a RandomAllocation that this training has not begun: each epoch "
    "is trained on from its first batch, by one model, without a gap. Begin anew: iter(sampling.batches(fetch)).\n"
)


class OpenEpoch:
    """Iteration and number of the step that is due, and how many steps of the epoch are left, in a variable."""

    def __init__(self, state: tf.Variable, steps: int):
        self._state, self._steps = state, steps

    @property
    def left(self) -> int:
        """Number of steps that are counted and can still be made."""
        return int(self._state[2].numpy())

    def leave(self) -> None:
        """Leaves what is left of the epoch."""
        self._state.assign([0, 0, 0])

    def price_step(self, draw: tuple[Any, Any]) -> tf.Tensor:
        """Number of steps to count for this one: all at the first step of an epoch, and none at the others."""
        (iteration, number), (open_iteration, due, _) = draw, tf.unstack(self._state.read_value())
        begins = number % self._steps == 0
        checks = require(begins | ((iteration == open_iteration) & (number == due)), _NOT_BEGUN)
        return tf.where(begins, depend_on(tf.constant(self._steps, tf.int64), checks), 0)

    def note_step(self, draw: tuple[Any, Any]) -> list[Any]:
        """Operations that note a step that was counted."""
        iteration, number = draw
        return [self._state.assign(tf.stack([iteration, number + 1, self._steps - 1 - number % self._steps]))]
