"""Mean and variance of each column, released once under differential privacy, for `keras.layers.Normalization`.

Numbers are cut to public bounds, and then run from −1 to 1: u = (2x − upper − lower)/(upper − lower). A row gives u and
u² of each of d columns, 2d numbers of size 1 at most, on a grid of steps 1/Q, rounded towards zero:

    Q = ⌊√(4²⁰ / 2d)⌋,   so that   2d Q² ≤ 4²⁰:   a row moves the sums by at most 2²⁰ grid steps = 1 in ℓ₂.

A unit of r rows gives the sum of its rows' whole numbers divided by r, rounded towards zero: again at most Q each. So
the proof is of whole numbers, and `fixed_point.release_sums` adds the noise. What is no number gives 0.

Guarantee: the sums are one Gaussian mechanism of noise multiplier σ; means, variances and their limits are computed
from them, from the bounds and from the number of units, which is public: the accountant's, of whom those without rows
count as 0, or, without an accountant, the number that is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.unit_ids import unit_numbers
from tfdp_rec.sums.fixed_point import ONE, check_noise, event_with, grid_weights, release_sums
from tfdp_rec.sums.reliability import refuse_other_units

LABEL = "means and variances"


class Moments(NamedTuple):
    """Noisy moments and their event.

    Attributes:
        mean: Mean of each column, within its bounds.
        variance: Variance of each column; where noise hides it, that of the noise.
        event: Event to give to `Accountant.spend`, or to a plan: `PrivatePlan(spent=[(event, label)])`.
    """

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    event: DpEvent


def private_moments(
    values: ArrayLike, lower: ArrayLike, upper: ArrayLike, *, noise_multiplier: float, unit: Any = None,
    accountant: Any = None, words: WordSource = os_entropy,
) -> Moments:
    """Mean and variance of each column, under differential privacy.

    Args:
        values: One row of numbers for each row of the data, `[rows, columns]`, or one number, `[rows]`.
        lower: Public lower bound, of all columns or of each; smaller numbers count as it.
        upper: Public upper bound.
        noise_multiplier: σ; the sums have sensitivity 1.
        unit: Array with the user id of each row, if users are the privacy units: then each user counts once, by the
            mean of its rows. By default each row is a unit.
        accountant: Accountant that is charged, and its ledger, before anything is summed.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: Shapes or bounds do not fit, σ is out of range, or there are more units than the accountant's.

    Example:
        >>> ages = np.random.default_rng(0).uniform(20, 60, 5000)
        >>> mean, variance, event = private_moments(ages, 0, 100, noise_multiplier=5.0)
        >>> bool(39 < mean < 41), bool(100 < variance < 170), event
        (True, True, GaussianDpEvent(noise_multiplier=5.0))
    """
    noise, given = check_noise(noise_multiplier), np.asarray(values, np.float64)
    event = event_with(words, GaussianDpEvent(noise))
    least, most = (np.broadcast_to(np.asarray(bound, np.float64), given.shape[1:]) for bound in (lower, upper))
    half = most / 2 - least / 2
    if given.ndim not in (1, 2) or not given.size or not (np.isfinite(half) & (half > 0)).all():
        raise ValueError(f"values must be of shape [rows(, columns)], got {given.shape}, and lower < upper, finite.")
    units = np.arange(len(given)) if unit is None else unit_numbers(unit, len(given))
    count = int(units.max()) + 1
    if accountant is not None:
        count = accountant.sampling.num_units  # which is public; how many of them have a row is not
        refuse_other_units(accountant.sampling, None if unit is None else units, len(given))
        accountant.spend(event, LABEL)
    total = grid_moments(np.clip((given - least) / half - 1, -1.0, 1.0).reshape(len(given), -1), units)
    step = ONE / _weight(total.shape[1]) / count  # of a mean, for a step of 1 in a sum
    first, second = (np.clip(sums.reshape(half.shape) * step, -1.0, 1.0) for sums in release_sums(total, noise, words))
    spread = np.clip(second - first**2, min(noise * step, 1.0), 1.0)
    return Moments(least + half * (1 + first), half**2 * spread, event)


def grid_moments(numbers: NDArray[np.float64], units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of numbers from −1 to 1 and of their squares, `[2, columns]`, in grid steps. They must not be released."""
    known, weight = np.nan_to_num(numbers, nan=0.0), _weight(numbers.shape[1])
    return np.array([[_sum(column * weight, units) for column in each.T] for each in (known, known**2)], np.int64)


def _weight(columns: int) -> int:
    return int(grid_weights(np.array([2 * columns]))[0])


def _sum(steps: NDArray[np.float64], units: NDArray[np.int64]) -> int:
    rows = np.bincount(units)
    sums = np.zeros(len(rows), np.int64)
    np.add.at(sums, units, np.trunc(steps).astype(np.int64))
    return int((np.sign(sums) * (np.abs(sums) // rows)).sum())
