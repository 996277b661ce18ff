"""Warnings of a private fit: no ε is counted, the noise will drown the tables, the loss has diverged.

None of them ends the fit. The first two look at public settings alone; the third repeats what Keras shows.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import keras
from dp_accounting import NonPrivateDpEvent

from tfdp_rec.optimizers import PrivateOptimizer
from tfdp_rec.optimizers.noise_walk import SPOILS, noise_in_rows

_WARNED = "warned_of_noise"  # attribute of an optimizer


class WarnIfNoBudget(keras.callbacks.Callback):
    """Warns, once per model, that no accountant follows it; stands after all callbacks that may begin to count."""

    keeps_off_weights = True

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        optimizer, history = self.model.optimizer, self.model.privacy_history
        if history.followed or isinstance(optimizer.dp_event(), NonPrivateDpEvent):
            return  # without a guarantee there is no ε to count
        history.followed = True
        warnings.warn(
            f"No epsilon is being counted: no accountant follows this model under {type(optimizer).__name__}. With "
            "accountant = tfdp_rec.privacy.Accountant(model.optimizer.dp_event(), sampling, delta=...), whose sampling "
            "draws the batches, give fit callbacks=[tfdp_rec.callbacks.PrivacyBudget(accountant, target_epsilon=...)]; "
            "accountant.follow(model) also counts steps that were made already.",
            stacklevel=2,
        )


class WarnIfNoiseDrowns(keras.callbacks.Callback):
    """Warns, once per optimizer and before its first step, that noise alone will drown its tables."""

    keeps_off_weights = True

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        # Public settings alone: rate, noise, clip, batch size, steps of this fit, widths of tables.
        optimizer, steps = self.model.optimizer, (self.params.get("steps") or 0) * (self.params.get("epochs") or 0)
        if not steps or not optimizer.built or not optimizer.moves_every_row or getattr(optimizer, _WARNED, False):
            return
        lengths = noise_in_rows(optimizer, steps) if optimizer.table_rule is None else {}
        path = max(lengths, key=lengths.__getitem__, default="")
        if lengths and lengths[path] > SPOILS:
            setattr(optimizer, _WARNED, True)
            warnings.warn(_drowning(optimizer, path, lengths[path], steps), stacklevel=2)


def _drowning(optimizer: PrivateOptimizer, path: str, length: float, steps: int) -> str:
    return (
        f"In {steps} steps noise alone will give the rows of '{path}' a length of {length:.1f}; trained rows have a "
        f"length near 1, and in experiments {SPOILS:g} was too much. Multiply the learning rate by {1 / length:.2g}, "
        f"or use larger batches (noise multiplier {optimizer.noise_multiplier:.3g}, clip {optimizer.l2_norm_clip:g}, "
        f"batches of {optimizer.expected_batch_size:g}; docs/rate-clip-batch.md)."
    )


class WarnOnDivergence(keras.callbacks.Callback):
    """Warns that the loss is no number, and lets training go on."""

    # To stop here would let the data decide the number of steps, which no ε covers.

    keeps_off_weights = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # The loss that Keras shows is computed from private data without noise, and so is this warning.
        loss = (logs or {}).get("loss")
        if loss is None or math.isfinite(float(loss)):
            return
        warnings.warn(
            "The loss is not a number any more: begin anew with a smaller learning_rate (a tenth, say), a smaller "
            "l2_norm_clip or larger batches. Training goes on, on noise alone; its steps are spent. If you stop it "
            "because of this warning, release nothing of it: its number of steps depends on the data, and no epsilon "
            "covers that.",
            stacklevel=2,
        )
