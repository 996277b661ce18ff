"""Callbacks that act on exact figures of the training data: what they choose is in the released weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras

from tfdp_rec.refused import NotPrivate


def refuse_choices(callbacks: Sequence[Any]) -> None:
    """Refuses them under a budget; says so otherwise.

    Args:
        callbacks: of a fit under a mechanism.

    Raises:
        NotPrivate: with the way out.
    """
    names = [name for name in map(_acts_on, callbacks) if name]
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


def _acts_on(callback: Any) -> str | None:
    """A callback that acts on a figure of training, by name; None for others."""
    kind = type(callback).__name__
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return kind
    several = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau, keras.callbacks.ModelCheckpoint)
    monitor = str(getattr(callback, "monitor", ""))
    acts = getattr(callback, "save_best_only", True)
    return f"{kind}({monitor!r})" if isinstance(callback, several) and acts and not monitor.startswith("val_") else None
