"""What a training checkpoint holds of an optimizer beside its variables, and no release holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp_rec.core.mechanism.base import PrivateOptimizer


def _parts(optimizer: PrivateOptimizer) -> list[Any]:
    return [part for part in (optimizer.debts, optimizer.course) if part is not None]


def kept_variables(optimizer: PrivateOptimizer) -> dict[str, tf.Variable]:
    """Variables by name."""
    return {name: held for part in _parts(optimizer) for name, held in part.kept_variables.items()}


@contextlib.contextmanager
def restoration(optimizer: PrivateOptimizer) -> Iterator[None]:
    """A block in which all variables become those of a training checkpoint."""
    with contextlib.ExitStack() as several:
        for part in reversed(_parts(optimizer)):  # the course first: it says that the rest is not all there yet
            several.enter_context(part.restoration())
        with optimizer.privacy_history.change_plan():
            yield


def is_cut_short(optimizer: PrivateOptimizer) -> bool:
    """Whether a step or payment was cut short so that nothing can be settled: weights can only be replaced."""
    return optimizer.course is not None and optimizer.course.is_unfinished


def allow_steps(optimizer: PrivateOptimizer, allowed: bool) -> None:
    """Whether a step may be made now, if a plan of noise is kept in checkpoints; `fit` alone allows it."""
    if optimizer.correlates_noise and optimizer.keeper is not None:
        optimizer.privacy_history.gate.allow_steps(allowed)
