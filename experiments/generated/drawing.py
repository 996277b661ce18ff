"""What generated data sets share: popularity by a shifted Zipf law, and hashes in place of stored randomness.

Of V ranks the first ones are drawn most often,

    P(rank ≤ r) = ((r + c)^(1-a) - c^(1-a)) / ((V + c)^(1-a) - c^(1-a)),

by the distribution's closed-form inverse, so a draw costs the same for 3 ranks and 10 million.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15


def zipf_ranks(uniform: NDArray[np.float64], size: int, exponent: float, shift: float) -> NDArray[np.int64]:
    """Ranks from 0 for uniform numbers, by the law with exponent a other than 1 and shift c."""
    power = 1.0 - exponent
    low, high = shift**power, (size + shift) ** power
    rank = (low + uniform * (high - low)) ** (1.0 / power) - shift
    return np.clip(rank.astype(np.int64), 0, size - 1)


@functools.cache
def zipf_offset(size: int, exponent: float, head_share: float) -> float:
    """The shift c that gives the first of `size` ranks its share; very large where the share is that of chance."""

    def share(log_offset: float) -> float:
        c, power = math.exp(log_offset), 1.0 - exponent
        return ((1.0 + c) ** power - c**power) / ((size + c) ** power - c**power)

    low, high = -60.0, 12.0
    if size == 1 or share(high) >= head_share:
        return math.exp(high)
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share(middle) > head_share else (low, middle)
    return math.exp(low)


def mixed(x: Any) -> Any:
    """The finalizer of splitmix64: uint64 to uint64, one to one."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
