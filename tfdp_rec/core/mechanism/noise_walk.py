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

from tfdp_rec.core.ground.keras_internals import learning_rate_of
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.correlated_noise import INDEPENDENT, BufferedToeplitz
from tfdp_rec.core.mechanism.rules import Recursion

SPOILS = 3.0
"""Rows with noise of that length had lost half of what a two-tower had learned, in the measurements."""
DOES_NOTHING = 0.01
"""Rows with noise of that length had learned nothing: their rate was some 100 times too small."""
FIRST = 0.7
"""Length of the noise in a row that a first rate aims at: published models learned best from 0.5 to 1.5, and those
whose score is a product of rows learned only there."""
_MOST = 0.1  # length of a row's move for one clipped example, where the noise is so small that it sets no limit
_DENSE_RATE, _DENSE_WALK = 0.01, 0.2
_ASKED = 1000  # values of a schedule


class NoRate(Exception):
    """A schedule of the learning rate cannot be asked before a step."""


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
    rates = rates_of(optimizer, steps) if rate is None else np.full(steps, float(rate))
    walks: dict[Any, float] = {}
    for table in optimizer.tables.values():
        if isinstance(table.rule, Recursion) and table.rule not in walks:
            walks[table.rule] = noise_walk(table.rule, rates, stddev, strategy)
    return {path: walks[t.rule] * t.width**0.5 for path, t in optimizer.tables.items() if t.rule in walks}


def rates_of(optimizer: PrivateOptimizer, steps: int) -> np.ndarray:
    """η of the next steps."""
    rate = learning_rate_of(optimizer)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        made, every = int(optimizer.iterations.numpy()), np.arange(steps)
        # A schedule takes one step at a time, each for some 0.1 ms: of long trainings some are asked for.
        some = np.unique(np.linspace(0, max(steps - 1, 0), min(steps, _ASKED)).round()).astype(int)
        try:
            values = [float(rate(made + step)) for step in some]
        except Exception as error:
            raise NoRate(f"{type(rate).__name__} has no value outside a step.") from error
        return np.interp(every, some, values) if steps else np.zeros(0)
    return np.full(steps, float(rate.numpy()))


def first_rate(optimizer: PrivateOptimizer, steps: int) -> float:
    """A first learning rate for the tables: noise alone gives a row the length `FIRST`, in all steps together."""
    at_rate_1 = max([0.0, *noise_in_rows(optimizer, steps, rate=1.0).values()])
    # Dense weights without an optimizer of their own move at the same rate, and every example moves all of them. At
    # rates for tables such models diverged: their step, C times the rate at most, is to stay within 0.5.
    at_one_rate = optimizer.dense and optimizer.dense_optimizer is None
    by_examples = 0.5 if at_one_rate else _MOST * optimizer.expected_batch_size
    by_the_clip = by_examples * (1 - optimizer.recursion.momentum) / optimizer.l2_norm_clip
    return min(by_the_clip, FIRST / at_rate_1) if at_rate_1 else by_the_clip


def first_dense_optimizer(steps: int, weight_decay: float = 0.0) -> keras.optimizers.Optimizer:
    """A first optimizer for variables that are not tables."""
    # A weight that only noise reaches walks by about rate · √steps under Adam, whatever the noise.
    return keras.optimizers.Adam(min(_DENSE_RATE, _DENSE_WALK / steps**0.5), weight_decay=weight_decay or None)
