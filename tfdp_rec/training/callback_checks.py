"""Callbacks of a private fit: what is added to them, refusals of those that act on training figures, and warnings.

Exact figures of the training data are protected by no noise. A choice made by them is in the released weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdp_rec.core.claim.events import NonPrivateDpEvent
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.noise_walk import DOES_NOTHING, SPOILS, NoRate, noise_in_rows, rates_of
from tfdp_rec.training.release_methods import add_release_callback

_WARNED = "warned_of_noise"  # attribute of an optimizer
_LONG, _LITTLE = 50, 0.3  # a fit of fewer steps, or with less noise, says little about the rate
_MONITORING = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)


def prepare_callbacks(optimizer: PrivateOptimizer, callbacks: Any, data: Any) -> list[Any]:
    """The callbacks of a fit on some data, in the order in which they act; refused if one must not."""
    found = add_release_callback(list_callbacks(callbacks, optimizer.plan))
    refuse_data_dependent(found)
    refuse_forgetting(optimizer, found, data)
    return [*found, FitWarnings(found)]


def list_callbacks(callbacks: Any, plan: Any = None) -> list[Any]:
    """The callbacks given to a fit, as a list, with a plan's budget unless one of them keeps a budget already."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("Pass callbacks to fit as a list of callbacks: pending noise must be settled ahead of them.")
    found = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    kept = plan is None or any(getattr(each, "keeps_budget", False) for each in found)
    return found if kept else [*found, plan.budget()]


def refuse_data_dependent(callbacks: Sequence[Any]) -> None:
    """Refuses callbacks that monitor training figures under a budget; warns of them without one."""
    names = [name for name in map(_describe_monitor, callbacks) if name]
    if not names:
        return
    sentence = (
        f"{', '.join(names)} would act on the exact loss or metrics of the training data, which no noise protects and "
        'no ε covers: monitor a key of public validation data (monitor="val_loss"; private validation data is not '
        "covered either), or leave it out."
    )
    if any(map(_is_budget, callbacks)):
        raise NotPrivate(sentence)
    warnings.warn(sentence, stacklevel=3)


def refuse_forgetting(optimizer: PrivateOptimizer, callbacks: Sequence[Any], data: Any = None) -> None:
    """Refuses callbacks by which a resumed training would forget released steps."""
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise NotPrivate(
            "BackupAndRestore forgets the steps that were made after its last backup, though other callbacks may have "
            "released their weights, so that a restored training would be told too small an epsilon: use "
            "tfdp_rec.callbacks.TrainingCheckpoint."
        )
    # A plan of noise is paid for once. TrainingCheckpoint writes its state before it leaves by the model's own methods,
    # and between epochs. A callback that acts within an epoch can read weights in other ways, of which nothing tells.
    kept = optimizer.keeper is not None or any(hasattr(each, "save_before_release") for each in callbacks)
    if not optimizer.correlates_noise or not kept:
        return
    names = [type(each).__name__ for each in callbacks if _is_users(each) and _acts_within_epochs(each)]
    # Keras has the data act at the end of an epoch ahead of all callbacks.
    acts = isinstance(data, keras.utils.PyDataset) and type(data).on_epoch_end is not keras.utils.PyDataset.on_epoch_end
    if acts and not getattr(data, "keeps_off_weights", False):
        names.append(f"{type(data).__name__}.on_epoch_end")
    if names:
        raise NotPrivate(
            f"{', '.join(names)} acts within epochs, and this training can be resumed from a training checkpoint, "
            "which must be written before weights are read. If it reads no weights, or by the methods of the model in "
            "training alone (get_weights, save, predict, evaluate), give it the attribute keeps_off_weights = True; "
            "else let it act at the end of an epoch."
        )


def _acts_within_epochs(callback: Any) -> bool:
    hooks = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    written_by = (getattr(getattr(callback, hook), "__func__", getattr(callback, hook)).__module__ for hook in hooks)
    own = any(not str(module).startswith("keras.") for module in written_by)
    return own and not getattr(callback, "keeps_off_weights", False)


def _describe_monitor(callback: Any) -> str | None:
    # The name of a callback that acts on a training figure.
    kind = type(callback).__name__
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return kind
    monitor = str(getattr(callback, "monitor", ""))
    acts = isinstance(callback, _MONITORING) and getattr(callback, "save_best_only", True)
    return f"{kind}({monitor!r})" if acts and not monitor.startswith("val_") else None


def _is_budget(callback: Any) -> bool:
    return hasattr(callback, "target_epsilon")


class FitWarnings(keras.callbacks.Callback):
    """Warnings of a private fit; stands after all other callbacks, any of which may begin to count or end the fit."""

    keeps_off_weights = True

    def __init__(self, callbacks: Sequence[Any]):
        super().__init__()
        self._others = callbacks

    def on_train_begin(self, logs: Any = None) -> None:
        # Again: hooks may have been set in set_model.
        refuse_forgetting(self.model.optimizer, self._others)
        optimizer, history = self.model.optimizer, self.model.privacy_history
        if not history.followed and not isinstance(optimizer.dp_event(), NonPrivateDpEvent):
            history.followed = True  # once per model
            warnings.warn(_NOT_COUNTED.format(type(optimizer).__name__), stacklevel=2)
        self._warn_of_the_rate((self.params.get("steps") or 0) * (self.params.get("epochs") or 0))

    def _warn_of_the_rate(self, steps: int) -> None:
        # Once per optimizer and before its first step. Public settings alone: rate, noise, clip, batch size, steps of
        # this fit, widths of tables.
        optimizer = self.model.optimizer
        if not steps or not optimizer.built or not optimizer.moves_every_row or getattr(optimizer, _WARNED, False):
            return
        try:
            lengths = noise_in_rows(optimizer, steps) if optimizer.table_rule is None else {}
        except NoRate:  # a schedule that reads the batch, say, which the step's trace refuses with the reason
            return
        path = max(lengths, key=lengths.__getitem__, default="")
        if lengths and lengths[path] > SPOILS:
            setattr(optimizer, _WARNED, True)
            warnings.warn(_rate_too_large(optimizer, path, lengths[path], steps), stacklevel=2)
        elif lengths and lengths[path] < DOES_NOTHING and steps >= _LONG and optimizer.noise_multiplier > _LITTLE:
            setattr(optimizer, _WARNED, True)
            warnings.warn(_rate_too_small(path, lengths[path], steps), stacklevel=2)
        if lengths and optimizer.debts is not None and optimizer.noise_multiplier > 0:
            bound = optimizer.debts.bound.foresee(rates_of(optimizer, steps).max(), _NARROW)
            if bound < _NARROW:
                setattr(optimizer, _WARNED, True)
                warnings.warn(_NARROW_BOUND.format(bound), stacklevel=2)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # The loss that Keras shows is computed from private data without noise, and so is this warning. To stop here
        # would let the data decide the number of steps, which no ε covers.
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            warnings.warn(_DIVERGED, stacklevel=2)

    def on_train_end(self, logs: Any = None) -> None:
        own = [type(each).__name__ for each in self._others if _is_users(each)]
        # A budget's own end and an early stop by public validation data are known to be no choice by training figures.
        known = any(getattr(each, "ended_fit", False) or getattr(each, "stopped_epoch", 0) for each in self._others)
        if self.model.stop_training and own and not known and any(map(_is_budget, self._others)):
            warnings.warn(
                f"{', '.join(own)} ended this fit. If that was decided by the loss or metrics of the training data, or "
                "by private validation data, no epsilon covers the choice: release nothing of this model.",
                stacklevel=2,
            )


def _rate_too_large(optimizer: PrivateOptimizer, path: str, length: float, steps: int) -> str:
    return (
        f"In {steps} steps noise alone will give the rows of '{path}' a length of {length:.1f}; trained rows have a "
        f"length near 1, and in experiments {SPOILS:g} was too much. Multiply the learning rate by {1 / length:.2g}, "
        f"or use larger batches (noise multiplier {optimizer.noise_multiplier:.3g}, clip {optimizer.l2_norm_clip:g}, "
        f"batches of {optimizer.expected_batch_size:g}; docs/rate-clip-batch.md)."
    )


def _rate_too_small(path: str, length: float, steps: int) -> str:
    return (
        f"In {steps} steps noise alone will give the rows of '{path}' a length of no more than {length:.1g}. Such "
        "a rate teaches tables nothing: trained rows have a length near 1, and in experiments noise of 0.3 to 1 was "
        f"best. Multiply the learning rate by {0.5 / length:.1g} (docs/rate-clip-batch.md)."
    )


def _is_users(callback: Any) -> bool:
    kind = type(callback)
    return kind is keras.callbacks.LambdaCallback or not kind.__module__.startswith(("keras.", "tfdp_rec."))

_NOT_COUNTED = (
    "No epsilon is being counted: no accountant follows this model under {}. With accountant = "
    "tfdp_rec.privacy.Accountant(model.optimizer.dp_event(), sampling, delta=...), whose sampling draws the batches, "
    "give fit callbacks=[tfdp_rec.callbacks.PrivacyBudget(accountant, target_epsilon=...)]; accountant.follow(model) "
    "also counts steps that were made already."
)
_NARROW = 1.0  # weights of trained rows, whose length is near 1, are smaller
_NARROW_BOUND = (
    "Until the next release no gradient takes a weight of a table past {:.2g}, four times what was released or a "
    "multiple of this training's noise (docs/privacy-noise.md). If rows need larger weights, use a larger "
    "learning_rate, l2_norm_clip or noise multiplier, no schedule of the rate, or model.settle() at the ends of epochs."
)
_DIVERGED = (
    "The loss is not a number any more: begin anew with a smaller learning_rate (a tenth, say), a smaller l2_norm_clip "
    "or larger batches. Training goes on, on noise alone; its steps are spent. If you stop it because of this warning, "
    "release nothing of it: its number of steps depends on the data, and no epsilon covers that."
)
