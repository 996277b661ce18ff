"""Randomness for plain arrays: a federated client's, and that of counts which are released once.

Every draw is made from 64-bit words, and the source of the words decides whether the draw is private:

* `os_entropy` asks the operating system's cryptographic generator. It is the default everywhere.
* `seeded(seed)` repeats itself. It is for studies and tests; noise made from it can be subtracted again by
  anyone who knows the seed.

A word becomes a uniform on the 2^52 midpoints of (0, 1/2) and a sign, and the inverse distribution function
turns that into a Gaussian or a Laplace variable. The smallest tail probability that can come out is 2^-54 a
side (8.2 standard deviations of a Gaussian), so cutting the tails there adds less than 2^-52 to δ per
coordinate. The results are double-precision numbers, not real ones: an attacker who studies their lowest
bits is outside this model, as docs/privacy-privaterec.md says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

WordSource: TypeAlias = Callable[[int], NDArray[np.uint64]]
"""A callable that returns `count` independent, uniform 64-bit words."""


def os_entropy(count: int) -> NDArray[np.uint64]:
    """Words (uint64) from the operating system's cryptographic generator."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


def seeded(seed: int) -> WordSource:
    """Words that repeat for the same seed: for studies and tests, never for protection.

    Args:
        seed: Any non-negative integer.

    Example:
        >>> bool((seeded(3)(4) == seeded(3)(4)).all())
        True
    """
    generator = np.random.default_rng(seed)
    return lambda count: generator.integers(0, 2**64, size=count, dtype=np.uint64)


def uniform(source: WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Uniforms on the midpoints of 2^52 equal cells of (0, 1)."""
    words = source(int(np.prod(shape)))
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5).reshape(shape) * 2.0**-52


def gaussian(source: WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Unit Gaussians by the inverse distribution function."""
    tail, sign = _tail_and_sign(source, shape)
    return -sign * special.ndtri(tail)


def gaussians(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Unit Gaussians of the operating system's in `shape`, for an array that is released once: counts, a vocabulary.

    Example:
        >>> counts = np.array([120.0, 3.0, 48.0])
        >>> (counts + 4.0 * gaussians(counts.shape)).shape
        (3,)
    """
    return gaussian(os_entropy, shape)


def bernoulli(source: WordSource, probability: float, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """True with the given probability, independently."""
    return uniform(source, shape) < probability


def _tail_and_sign(source: WordSource, shape: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    words = source(int(np.prod(shape))).reshape(shape)
    tail = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-53
    sign = np.where(words & np.uint64(1), 1.0, -1.0)
    return tail, sign
