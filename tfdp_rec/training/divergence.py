"""Training that leads nowhere: foreseen by its noise, which takes no data, and said when its loss is no number."""

from __future__ import annotations

import math
import warnings
from typing import Any

import keras

from tfdp_rec.optimizers import PrivateOptimizer
from tfdp_rec.optimizers.noise_walk import SPOILS, noise_in_rows

_SAID = "noise_foreseen"  # of an optimizer


class ForeseeNoise(keras.callbacks.Callback):
    """Says once an optimizer, before its first step, that noise alone will drown its tables."""

    keeps_off_weights = True

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Looks at public settings alone: rate, noise, clip, batch size, steps of this fit, widths of tables."""
        optimizer, steps = self.model.optimizer, (self.params.get("steps") or 0) * (self.params.get("epochs") or 0)
        if not steps or not optimizer.built or not optimizer.moves_every_row or getattr(optimizer, _SAID, False):
            return
        lengths = noise_in_rows(optimizer, steps) if optimizer.table_rule is None else {}
        path = max(lengths, key=lengths.__getitem__, default="")
        if lengths and lengths[path] > SPOILS:
            setattr(optimizer, _SAID, True)
            warnings.warn(_drowning(optimizer, path, lengths[path], steps), stacklevel=2)


def _drowning(optimizer: PrivateOptimizer, path: str, length: float, steps: int) -> str:
    times = 1 / length
    return (
        f"In {steps} steps noise alone will give the rows of '{path}' a length of {length:.1f}, where rows of length 1 "
        f"say something and {SPOILS:g} was too much: take {times:.2g} of the learning rate, or larger batches (noise "
        f"multiplier {optimizer.noise_multiplier:.3g}, clip {optimizer.l2_norm_clip:g}, batches of "
        f"{optimizer.expected_batch_size:g}; docs/rate-clip-batch.md)."
    )


class SayNoNumber(keras.callbacks.Callback):
    """Says that a loss is not a number any more, and lets training go on: to end it there would be to let the data
    decide how many steps a model made, which no ε covers.
    """

    keeps_off_weights = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the loss that Keras shows, which is private, as what is said of it is."""
        loss = (logs or {}).get("loss")
        if loss is None or math.isfinite(float(loss)):
            return
        warnings.warn(
            "The loss is not a number any more: begin anew with a smaller learning_rate (a tenth, say), a smaller "
            "l2_norm_clip or larger batches. Training goes on, on noise alone; its steps are spent. Where it is ended "
            "for this, release nothing of it: the number of its steps tells of the data, and no epsilon covers that.",
            stacklevel=2,
        )
