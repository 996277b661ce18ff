"""Sums over users, released once, on a grid of whole numbers on which a sum is exact.

A user gives the weight w to each of p coordinates, and 0 to all others. On the grid of 2⁻²⁰ the weight is

    q = ⌊√(4²⁰ / p)⌋,   so that   p q² ≤ 4²⁰:   the user moves the sum by at most 2²⁰ grid steps = 1 in ℓ₂.

This is arithmetic of whole numbers: no rounding depends on the other users or on their order. The release is

    S + ⌊2²⁰ σ z + ½⌋,   z ~ N(0, 1),   in grid steps,

which, S being whole, is ⌊S + 2²⁰ σ z + ½⌋: a public rounding of the output of the Gaussian mechanism of noise
multiplier σ. So that mechanism's guarantee holds, and the lowest bits of the answer reveal nothing.

Only z is a floating-point number. One Gaussian by the inverse distribution function of 2⁵² uniforms has gaps in its
tails: beyond 6.3 standard deviations (chance 3·10⁻¹⁰) they are wider than a grid step at σ = 1, and a user of a
thousand items touches half a million entries. So z is half the sum of four of them, which reaches every grid step in
very many ways.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.events import DpEvent, NonPrivateDpEvent
from tfdp_rec.core.ground.files import row_chunks
from tfdp_rec.core.mechanism.noise.words import WordSource, draw_without_gaps, os_entropy

GRID_BITS = 20
ONE = 2**GRID_BITS
_LARGEST_NOISE = 2.0**20  # above it the spacing of float64 approaches the grid's
_AT_ONCE = 2**22  # Gaussians drawn at once
_MOST = 2**22  # of one unit's sum


def grid_weights(pieces: NDArray[np.int64], over: int = 1, parts: int = 1) -> NDArray[np.int64]:
    """q for users that give to `pieces` coordinates each, 0 for none; with t `over` n `parts` q of √(t/(n p))."""
    different, which = np.unique(pieces, return_inverse=True)
    roots = [math.isqrt(over * ONE * ONE // (parts * int(p))) if p > 0 else 0 for p in different]
    return np.array(roots, np.int64)[which]


def unit_sums(
    units: NDArray[np.int64], cells: NDArray[np.int64], entries: NDArray[np.int64], size: int, over: int = 1,
    parts: int = 1, least: int = 0,
) -> NDArray[np.int64]:  # fmt: skip
    """Sums `[size, k]` over units of what their rows' `entries` `[rows, k]` add up to, in grid steps, without noise."""
    # With e a unit's sums, whole numbers, it gives q e, towards 0, where q² Σ e² ≤ 4²⁰ over / parts: √(over / parts) in
    # ℓ₂, and less where Σ e² < least. q has 20 more bits than the grid. A larger e counts as _MOST: squares of it could
    # leave 64 bits.
    pairs, rows = np.unique(units * size + cells, return_inverse=True)
    owners = pairs // size
    given = np.stack([np.clip(_added(rows, column, len(pairs)), -_MOST, _MOST) for column in entries.T])
    squares = _added(owners, np.square(given).sum(axis=0), units.max(initial=-1) + 1)
    weights = grid_weights(np.maximum(squares, least), over * ONE * ONE, parts)[owners]
    moved = (np.sign(e) * (np.abs(e) * weights >> GRID_BITS) for e in given)
    return np.stack([_added(pairs % size, each, size) for each in moved], axis=1)


def _added(places: NDArray[np.int64], numbers: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    total = np.zeros(size, np.int64)
    np.add.at(total, places, numbers)
    return total


def check_noise(noise_multiplier: float) -> float:
    """σ as a float; refused unless it is positive and the grid can hold its noise."""
    if not 0 < noise_multiplier < _LARGEST_NOISE:
        raise ValueError(f"noise_multiplier must be positive and below 2^20, got {noise_multiplier!r}.")
    return float(noise_multiplier)


def event_with(words: WordSource, event: DpEvent) -> DpEvent:
    """The event of a release with these words: one without a guarantee, unless they are the operating system's."""
    return event if words is os_entropy else NonPrivateDpEvent()


def release_sums(
    total: NDArray[np.int64], noise_multiplier: float, words: WordSource = os_entropy
) -> NDArray[np.float64]:
    """Sums in grid steps, with noise, in units of 1."""
    noise = draw_without_gaps(words, total.shape) * (noise_multiplier * ONE)
    return (total + np.floor(noise + 0.5).astype(np.int64)) / ONE


def release_pairs(
    total: NDArray[np.int64], noise_multiplier: float, words: WordSource = os_entropy
) -> NDArray[np.float32]:
    """The part of a square array above its diagonal, with noise, mirrored; the diagonal is 0."""
    size = len(total)
    noisy = np.zeros((size, size), np.float32)  # rounding a release is post-processing
    for start, end in row_chunks((size, size), _AT_ONCE):
        block = release_sums(total[start:end, start:], noise_multiplier, words)
        noisy[start:end, start:] = np.triu(block, 1)
    for start, end in row_chunks((size, size), _AT_ONCE):
        noisy[end:, start:end] = noisy[start:end, end:].T
        noisy[start:end, start:end] += noisy[start:end, start:end].T
    return noisy
