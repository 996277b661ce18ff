"""Randomness for plain arrays: a federated client's, and that of counts which are released once, by `release`.

Every draw is made from 64-bit words, and the source of the words decides whether the draw is private:

* `os_entropy` asks the operating system's cryptographic generator. It is the default everywhere.
* `seeded(seed)` repeats itself. It is for studies and tests; noise made from it can be subtracted again by
  anyone who knows the seed.

A word becomes a uniform on the 2^52 midpoints of (0, 1/2) and a sign, and the inverse distribution function
turns that into a Gaussian or a Laplace variable. The smallest tail probability that can come out is 2^-54 a
side (8.2 standard deviations of a Gaussian), so cutting the tails there adds less than 2^-52 to δ per
coordinate. The results are double-precision numbers, not real ones: added to data as they are, they give the data
away by their lowest bits. So data and noise meet on a public grid: in `release`, and in rooms that have one of their
own (`sums/fixed_point.py`, `federated/grid.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from tfdp_rec.core.ground.entropy import os_entropy as os_entropy

WordSource: TypeAlias = Callable[[int], NDArray[np.uint64]]
"""A callable that returns `count` independent, uniform 64-bit words."""


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


def draw_without_gaps(source: WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Unit Gaussians that reach every step of a grid in very many ways: half the sum of four."""
    return sum((gaussian(source, shape) for _ in range(4)), np.zeros(shape)) / 2.0


def step_of(scale: float) -> float:
    """The step of the public grid for noise of a scale: 2^(⌊log₂ scale⌋ − 20)."""
    return 2.0 ** (math.frexp(scale)[1] - 21)


def release(
    values: ArrayLike, *, sensitivity: float, noise_multiplier: float, source: WordSource = os_entropy
) -> NDArray[np.float64]:
    """Numbers of your own, such as counts, with Gaussian noise, to be released once.

    With s = σ · sensitivity and the grid g = 2^(⌊log₂ s⌋ − 20), which is public, each number x is released as
    g ⌊(x + s z) / g⌉, z ~ N(0, 1): a rounding of the Gaussian mechanism's output, so that its guarantee holds. It costs
    `dp_accounting.GaussianDpEvent(noise_multiplier)`, which `Accountant.spend` is given *before*.

    Args:
        values: The exact numbers, below 2⁵³ in size, as an array of any shape.
        sensitivity: The most, in ℓ₂ over all numbers, by which one privacy unit may change them. You prove it.
        noise_multiplier: σ, the noise's standard deviation in units of the sensitivity.
        source: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: A number is too large or none, or the sensitivity or σ is not finite, or not positive.

    Example:
        >>> release([120.0, 3.0, 48.0], sensitivity=1.0, noise_multiplier=4.0).shape
        (3,)
    """
    exact, scale = np.asarray(values, np.float64), float(sensitivity) * float(noise_multiplier)
    known = (np.abs(exact) < 2.0**53).all()  # a larger whole number was rounded: two a unit apart may be far apart
    if not (min(sensitivity, noise_multiplier) > 0 and 2.0**-900 < scale < math.inf and known):
        raise ValueError(
            "values (below 2^53), sensitivity and noise_multiplier must be finite, the latter positive: bound what a "
            f"unit may change; got {sensitivity!r} and {noise_multiplier!r}."
        )
    step = step_of(scale)
    return np.asarray(np.round((exact + scale * draw_without_gaps(source, exact.shape)) / step) * step)


def bernoulli(source: WordSource, probability: float, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """True with the given probability, independently."""
    return uniform(source, shape) < probability


def _tail_and_sign(source: WordSource, shape: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    words = source(int(np.prod(shape))).reshape(shape)
    tail = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-53
    sign = np.where(words & np.uint64(1), 1.0, -1.0)
    return tail, sign
