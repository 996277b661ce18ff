"""Noise of the federated part in whole steps of a public grid, on which it meets the data.

Data and noise meet as whole numbers of steps of a grid that is public, g = 2^(⌊log₂ scale⌋ − 20). Clipped data are
rounded to it towards zero, which makes no norm larger, so that the sensitivity holds still. Then

    Gaussian   ⌊noise / g + ½⌋ is added: as x / g is whole, the sum is a rounding of the Gaussian mechanism's output
    Laplace    k is added, Pr[k] ∝ exp(−|k + ½| g / scale): the ratio of two vectors' chances is at most e^ε

What comes after, such as the rounding to float32, knows the sum alone. In floats, noise / g reaches every step in
some 2³⁰ ways, and each Pr[k] is right to 2⁻³⁸ of itself. Of the Laplace law the part beyond 45 scales is cut off, which
has a chance of 2⁻⁶⁴ (docs/privacy-privaterec.md, section 5, for what this adds).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.mechanism.noise import words

_DIGIT = 2**10


def on_grid(values: NDArray[np.float64], step: float) -> NDArray[np.float64]:
    """Values rounded to the grid towards zero."""
    return step * np.trunc(values / step)


def whole_gaussian(scale: float, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Gaussians of standard deviation `scale`, rounded to whole numbers."""
    return np.floor(scale * words.draw_without_gaps(source, shape) + 0.5)


def whole_laplace(scale: float, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Whole numbers k with Pr[k] ∝ exp(-|k + ½| / scale), for scales from 2^20 to 2^21."""
    # k or -1 - k is geometric. Its two lowest digits to the base of 2^10 and what is left are independent, so that each
    # can be drawn by itself: a uniform of 53 bits alone would have gaps where k is large.
    first, second, third, fourth = source(4 * math.prod(shape)).reshape(4, *shape)
    low = _digit(second, scale) + _DIGIT * _digit(third, scale / _DIGIT)
    size = _DIGIT**2 * np.floor(_exponential(first, fourth) * (scale / _DIGIT**2)) + low
    return np.where(first & np.uint64(1), size, -1.0 - size)


def _digit(random: NDArray[np.uint64], scale: float) -> NDArray[np.float64]:
    """The lowest digit of a geometric variable."""
    cumulative = np.expm1(-np.arange(1, _DIGIT + 1) / scale) / np.expm1(-_DIGIT / scale)
    uniform = (random >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.searchsorted(cumulative, uniform, side="right").astype(np.float64)


def _exponential(mantissa: NDArray[np.uint64], zeros: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Exponential variables of scale 1: -log of m 2^-e, m in (1/2, 1] of 52 bits, e zeros at the end of a word."""
    exponent = np.where(zeros, np.frexp((zeros & (~zeros + np.uint64(1))).astype(np.float64))[1] - 1, 64)
    return exponent * math.log(2.0) - np.log(0.5 + ((mantissa >> np.uint64(12)).astype(np.float64) + 1.0) * 2.0**-53)
