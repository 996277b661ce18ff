"""Refusal of callbacks that act on exact figures of the training data: their choices are in the released weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdp_rec.refused import NotPrivate


def refuse_data_dependent(callbacks: Sequence[Any]) -> None:
    """Refuses callbacks that monitor training figures under a budget; warns of them without one."""
    names = [name for name in map(_acting, callbacks) if name]
    if not names:
        return
    sentence = (
        f"{', '.join(names)} would act on the exact loss or metrics of the training data, which no noise protects and "
        'no ε covers: monitor a key of public validation data (monitor="val_loss"; private validation data is not '
        "covered either), or leave it out."
    )
    if any(hasattr(c, "target_epsilon") for c in callbacks):
        raise NotPrivate(sentence)
    warnings.warn(sentence, stacklevel=3)


def _acting(callback: Any) -> str | None:
    """The name of a callback that acts on a training figure; None for others."""
    kind = type(callback).__name__
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return kind
    monitoring = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
    monitor = str(getattr(callback, "monitor", ""))
    acts = isinstance(callback, monitoring) and getattr(callback, "save_best_only", True)
    return f"{kind}({monitor!r})" if acts and not monitor.startswith("val_") else None
