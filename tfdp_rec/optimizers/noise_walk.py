"""Distance that noise alone moves a weight, from public settings, before any training.

A step of rate η adds η s n_t to a weight, s = σ C / B, n = C⁻¹ z (n = z where noise is independent). After T steps a
weight that no gradient ever pulled has walked by a Gaussian of standard deviation

    s ‖wᵀ C⁻¹‖,    w_t = η_t                                    plain: η s √T at a constant rate
                   w_t = η_t Π_{j > t} (1 − η_j λ)              with decay
                   w_t = η_t (1 − κ μ^{T−t}) / (1 − μ)          with momentum; κ = μ for Nesterov, else 1

All weights of all tables walk so, those that examples pull as well. What that does to a model depends on how large its
weights have to be: a row of width d that says something has a length of about 1, so that the *length of the noise in a
row*, that standard deviation times √d, is what to look at. docs/rate-clip-batch.md has what was measured.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfdp_rec.keras_internals import learning_rate_of
from tfdp_rec.optimizers.base import PrivateOptimizer
from tfdp_rec.optimizers.rules import Recursion
from tfdp_rec.pricing.correlated_noise import INDEPENDENT, BufferedToeplitz

SPOILS = 3.0
"""Rows with noise of that length had lost half of what a two-tower had learned, in the measurements."""
FIRST = 0.5
"""Length of the noise in a row that a first rate aims at: between a tenth and 1 nothing was lost."""


def noise_walk(
    recursion: Recursion, rates: np.ndarray, stddev: float, strategy: BufferedToeplitz = INDEPENDENT
) -> float:
    """The standard deviation of a weight that was moved by noise alone, at these rates."""
    rates = np.asarray(rates, np.float64)
    if recursion.has_velocity:
        carried = recursion.momentum if recursion.nesterov else 1.0
        left = np.arange(len(rates), 0, -1)  # steps from this one on, itself included
        reach = (1 - carried * recursion.momentum**left) / (1 - recursion.momentum)
    else:
        keep = np.asarray(recursion.keep(rates), np.float64)
        reach = np.append(np.cumprod(keep[:0:-1])[::-1], 1.0)
    return stddev * strategy.last_error(rates * reach)


def noise_in_rows(optimizer: PrivateOptimizer, steps: int, rate: float | None = None) -> dict[str, float]:
    """The length of the noise in a row of each table after `steps` more steps, with the present settings."""
    strategy = getattr(getattr(optimizer, "correlation", None), "strategy", INDEPENDENT)
    stddev = optimizer.noise_multiplier * optimizer.l2_norm_clip / optimizer.expected_batch_size
    rates = _rates(optimizer, steps) if rate is None else np.full(steps, float(rate))
    walks: dict[Any, float] = {}
    for table in optimizer.tables.values():
        if isinstance(table.rule, Recursion) and table.rule not in walks:
            walks[table.rule] = noise_walk(table.rule, rates, stddev, strategy)
    return {path: walks[t.rule] * t.width**0.5 for path, t in optimizer.tables.items() if t.rule in walks}


def _rates(optimizer: PrivateOptimizer, steps: int) -> np.ndarray:
    """η of the next steps."""
    rate = learning_rate_of(optimizer)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        made = int(optimizer.iterations.numpy())
        return np.array([float(rate(made + step)) for step in range(steps)])
    return np.full(steps, float(rate.numpy()))


def first_rate(optimizer: PrivateOptimizer, steps: int) -> float:
    """A first learning rate: the largest that noise and clip keep within `FIRST`."""
    # The noise in a row is to have the length `FIRST`; a step, whose clipped mean gradient has at most the length C, is
    # to go no further than that either.
    at_rate_1 = max([0.0, *noise_in_rows(optimizer, steps, rate=1.0).values()])
    by_the_clip = FIRST * (1 - optimizer.recursion.momentum) / optimizer.l2_norm_clip
    return min(by_the_clip, FIRST / at_rate_1) if at_rate_1 else by_the_clip
