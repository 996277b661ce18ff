"""How weights leave training: settled first, and as files that are whole or not there.

A mechanism may owe noise to rows that no batch has read for a while. Whatever lets weights, or numbers computed from
them, out of training settles that noise before:

- the model's own methods (`RELEASING`), through `releasing`;
- an eager read of a table's variable by anything else, such as `model.layers[0].get_weights()`, `layer.save_weights`,
  or a part of the model called by itself, through `guard`;
- callbacks at the end of an epoch, which may run a compiled function of a part of the model (`settle_for`).

A compiled function that reads a table by itself in the middle of an epoch asks nobody: call `model.settle()` before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.files import replacing

RELEASING = (
    "__call__", "evaluate", "predict", "predict_on_batch", "test_on_batch", "get_weights", "save_own_variables",
    "_trackable_children", "get_state_tree",
)  # fmt: skip
WRITING = ("save", "save_weights", "export")

_LOGS_ONLY = (
    keras.callbacks.BackupAndRestore,  # these two save through the model's own methods
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)


def releasing(owner: type, name: str) -> Callable[..., Any]:
    """A method for `owner` that settles pending noise before it does what the parent's does."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        settle_outside_steps(self)
        return getattr(super(owner, self), name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As Keras' `{name}`, after settling pending noise."
    return method


def writing(owner: type, name: str) -> Callable[..., Any]:
    """A method that settles, and writes its file or folder whole: an older one stays until the new one is complete."""

    def method(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        settle_outside_steps(self)
        parents = getattr(super(owner, self), name)
        asks_first = kwargs.get("overwrite", args[0] if args and name != "export" else True) is False
        if asks_first or not _is_one_local_file(filepath):
            return parents(filepath, *args, **kwargs)
        with replacing(filepath) as temporary:
            return parents(temporary, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As Keras' `{name}`, after settling pending noise; an interruption leaves the older file whole."
    return method


def settle_outside_steps(model: Any) -> None:
    """Settles unless this is a step's own work, or the building of a graph."""
    if not model._in_step and tf.executing_eagerly():
        model.settle()


def _is_one_local_file(filepath: Any) -> bool:
    """A file name on this machine; not a cloud address, an open file, or the index of a sharded save."""
    if not isinstance(filepath, (str, os.PathLike)):
        return False
    return "://" not in os.fspath(filepath) and not os.fspath(filepath).endswith(".json")


def guard(variable: keras.Variable, settle: Callable[[], None]) -> None:
    """Makes eager reads of a variable settle first, whoever reads.

    Args:
        variable: a table.
        settle: called before a read outside graphs.
    """
    kind = type(variable)
    if getattr(kind, "settles_when_read", False):
        return

    def value(self: Any) -> Any:
        settle()
        return kind.value.fget(self)  # type: ignore[attr-defined]

    members = {"value": property(value), "settles_when_read": True, "__module__": kind.__module__}
    variable.__class__ = type(kind.__name__, (kind,), members)


class _SettleAtEpochEnd(keras.callbacks.Callback):
    """Goes ahead of callbacks that may look at weights."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.settle()


def settle_for(callbacks: Any) -> Any:
    """The callbacks of a fit, with a settling one ahead of them if any of them may look at weights."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("Pass callbacks to fit as a list of callbacks: pending noise must be settled ahead of them.")
    several = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    if all(type(c) in _LOGS_ONLY or getattr(c, "keeps_off_weights", False) for c in several):
        return several
    return [_SettleAtEpochEnd(), *several]
