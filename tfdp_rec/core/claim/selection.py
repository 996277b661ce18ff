"""The price of the best of several private runs, whose number is drawn and stays secret.

Run M, all else than the data drawn anew, K times, and release the best result alone, by a score that is part of it. Let
δ(ε) be M's profile, the larger one of both directions, and f(x) = E x^K. Where a run is better than this result with
probability p on one data set, and q on the other, the densities of the two releases are those of M times f'(1 - p) and
f'(1 - q), and q ≤ e^τ p + δ(τ) for every τ. For the numbers of runs that follow, with f'(1) = E K,

    f'(1 - p) / f'(1 - q) = ((γ' + q) / (γ' + p))^(1 + η) ≤ e^((1 + η) τ)    where  δ(τ) ≤ γ' (e^τ - 1)

and so the release of the best has at most the profile  E K · δ(ε - (1 + η) τ).  docs/privacy-tuning.md has the proof.

K is at least 1, and truncated negative binomial of shape η, with γ' = γ / (1 - γ); geometric for η = 1, logarithmic for
η = 0. The Rényi divergences are those of the reference.

Reference:
    Papernot and Steinke, "Hyperparameter tuning with Rényi differential privacy", ICLR 2022.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

Distribution: TypeAlias = "privacy_loss_distribution.PrivacyLossDistribution"
Profile = Callable[[Any], Any]
Curve = tuple[ArrayLike, ArrayLike]  # orders, and the Rényi divergences of a run at them

_TAIL = 1e-13  # of δ, beyond the end of a grid
_MOST_LOSS = 700.0  # e^ε of more is no float64


@functools.cache
def chance_to_end(mean: float, shape: float) -> float:
    """γ, for which the number of runs has this mean."""

    def excess(gamma: float) -> float:
        if shape == 0:
            return (1.0 / gamma - 1.0) / -math.log(gamma) - mean
        return shape * (1.0 - gamma) / (gamma * -math.expm1(shape * math.log(gamma))) - mean

    return float(optimize.brentq(excess, 1e-12, 1.0 - 1e-9, xtol=1e-16, rtol=1e-14))


def losses_of_best(delta_at: Profile, lost: float, mean: float, shape: float, grid: float) -> Distribution:
    """The privacy losses of the best run's release, on multiples of `grid`, never too small.

    Args:
        delta_at: The profile of a run, for any real ε.
        lost: What it may be too small by.
        mean: Mean number of runs.
        shape: Shape η of its distribution.
        grid: Width of the grid.
    """
    gamma = chance_to_end(mean, shape)
    away = (1.0 + shape) * _first(lambda tau: delta_at(tau) + lost <= gamma / (1.0 - gamma) * math.expm1(tau))
    reach = math.ceil(_first(lambda epsilon: mean * delta_at(epsilon - away) <= _TAIL) / grid)
    losses = grid * np.arange(reach + 1, dtype=np.float64)
    above = np.minimum(mean * (delta_at(losses - away) + lost), 1.0)
    below = (1.0 + np.exp(-losses) * (above - 1.0))[:0:-1]  # by the other direction: δ(-ε) = 1 - e^-ε + e^-ε δ(ε)
    deltas = _convex(np.exp(np.append(-losses[:0:-1], losses)), np.minimum.accumulate(np.append(below, above)))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -reach, reach, deltas)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def divergences_of_best(mean: float, shape: float, run: Curve, every: Curve) -> NDArray[np.float64]:
    """Rényi divergences of the best run's release at the orders of the curve `run`, with help of those of another."""
    (orders, divergences), (others, helping) = (tuple(map(np.asarray, curve)) for curve in (run, every))
    spread = np.min((1.0 - 1.0 / others) * helping - math.log(chance_to_end(mean, shape)) / others)
    return divergences + (1.0 + shape) * spread + math.log(mean) / (orders - 1.0)


def _first(holds: Callable[[float], Any]) -> float:
    """The least number from 0 on, to one part in 10⁹ and rounded up, from which a condition holds."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2.0 * high
        if high > _MOST_LOSS:
            raise ValueError("A run of so large an epsilon has no price as one of several: give it more noise.")
    while high - low > 1e-9 * max(1.0, high):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _convex(places: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The largest convex function below these values: a profile is convex in e^ε, so that it is below this one, too."""
    kept = list[int]()
    x, y = places.tolist(), values.tolist()
    for new in range(len(x)):
        while len(kept) > 1 and (y[kept[-1]] - y[kept[-2]]) * (x[new] - x[kept[-2]]) >= (y[new] - y[kept[-2]]) * (
            x[kept[-1]] - x[kept[-2]]
        ):
            kept.pop()
        kept.append(new)
    return np.interp(places, places[kept], values[kept])
