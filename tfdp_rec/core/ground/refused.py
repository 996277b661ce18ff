"""Refusals: the error of everything that would break a guarantee, and numbers that are too small."""

from __future__ import annotations

import math
from typing import Any


class NotPrivate(ValueError):
    """The request would break the guarantee, or cannot be shown to keep it.

    Attributes:
        operation: TensorFlow operation that is at fault, if one is.
    """

    operation: Any = None


def refuse_no_number(name: str, value: Any) -> None:
    """Raises `TypeError` for what is no number, such as text that was read from a file."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}.")


def refuse_below(least: float, **values: float) -> None:
    """Raises `ValueError` for the first of several named numbers that is below the least."""
    for name, value in values.items():
        refuse_no_number(name, value)
        if not least <= value < math.inf:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
