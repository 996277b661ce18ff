"""What is refused: the one error of everything that would break a guarantee."""

from __future__ import annotations

from typing import Any


class NotPrivate(ValueError):
    """The request would break the guarantee, or cannot be shown to keep it.

    Attributes:
        operation: TensorFlow operation that is at fault, if one is.
    """

    operation: Any = None
