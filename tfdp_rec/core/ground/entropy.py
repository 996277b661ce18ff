"""Random words from the operating system, for plain arrays. For graphs: `system_words.py`."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray


def os_entropy(count: int) -> NDArray[np.uint64]:
    """Words (uint64) from the operating system's cryptographic generator."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
