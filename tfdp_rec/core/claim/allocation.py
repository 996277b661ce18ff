"""The price of an epoch under random allocation: each unit is in exactly one of T batches, and which is uniform.

Let a step add Gaussian noise of multiplier σ to a sum to which the unit adds at most 1, in a direction that may depend
on all that came before. All T noisy sums of an epoch can be computed, with fresh noise, from T numbers u_t: with the
unit u_t = [t is its batch] + σ z_t, without it u_t = σ z_t (docs/privacy-allocation.md). So the likelihood ratio of an
epoch, drawn without the unit, is

    R = (X_1 + ... + X_T) / T,    X_t = exp(σ⁻¹ z_t - σ⁻²/2),    z_t ~ N(0, 1),    E R = 1

and δ is a mean of a convex function of R, in both directions:

    with ~> without:  δ(ε) = E max(0, R - e^ε)        without ~> with:  δ(ε) = E max(0, 1 - e^ε R)

Whatever spreads R and keeps its mean (R is a conditional mean of what comes of it) makes both larger, for one epoch and
for several. So the distribution of R is kept on a grid of ratios e^(kη), and a value between two of them is *split*
among both so that the mean stays; below the grid among 0 and its first ratio; above it among its last and infinity,
which has probability with the unit alone. Means of independent ratios are split in the same way. Nothing here
is approximated from below; the error is the spread, of second order in η.

R of m and of m + 1 steps give that of 2m, 2m + 1 and 2m + 2, hence that of T steps in log T rounds, in which the ratios
draw together: the grid is refined on the way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from numpy.typing import NDArray
from scipy import special

Distribution: TypeAlias = "privacy_loss_distribution.PrivacyLossDistribution"

ROUNDING = 1e-12  # part of δ that sums of positive terms in float64 may change, for each step of an epoch
_POINTS, _FEW_POINTS = 2048, 512  # of a grid, about: where a price is told, and where it is searched for
_COARSE = 1e-3  # a grid of losses that is wider is that of a search
_TAIL = 1e-22  # probability, and part of the mean, beyond the ends of a grid
_RARE = 1e-18  # probability of ratios so low that they hardly occur
_MOST_ORDER = 128  # of Rényi divergences
_REACH = 10.5  # standard deviations to each side that the first grid covers
_MOST_NOISE = 1e6  # more is priced as this much: float64 cannot tell the ratios of a finer grid apart


@dataclasses.dataclass(frozen=True)
class Ratios:
    """A likelihood ratio of mean 1 on a grid: `mass[i]` is the probability of exp((first + i) step)."""

    step: float  # η
    first: int
    mass: NDArray[np.float64]
    at_zero: float = 0.0  # probability of 0
    at_infinity: float = 0.0  # the part of the mean that lies at infinity

    @property
    def logs(self) -> NDArray[np.float64]:
        """The logarithms of the grid's ratios."""
        return self.step * np.arange(self.first, self.first + len(self.mass), dtype=np.float64)


@functools.lru_cache(maxsize=64)
def ratios_of_epoch(noise: float, steps: int, points: int) -> Ratios:
    """The likelihood ratio of an epoch of so many steps with Gaussian noise of this multiplier."""
    few = _ratios_of_step(min(noise, _MOST_NOISE), points)  # of m steps
    more = mean_of(few, 0.5, few)  # of m + 1
    number = 1
    for digit in bin(int(steps))[3:]:
        finer = 2 if len(few.mass) < 0.7 * points else 1
        odd = mean_of(few, number / (2 * number + 1), more, finer)
        if digit == "0":
            few, more = mean_of(few, 0.5, few, finer), odd
        else:
            few, more = odd, mean_of(more, 0.5, more, finer)
        number = 2 * number + int(digit)
    return few


def losses_of_epoch(noise: float, steps: int, grid: float) -> Distribution:
    """The privacy losses of an epoch, on multiples of `grid`, never too small."""
    ratios = ratios_of_epoch(noise, steps, _POINTS if grid <= _COARSE else _FEW_POINTS)
    places = ratios.logs / grid
    lower = np.floor(places).astype(np.int64)
    up = ratios.mass * _share(places - lower, grid)
    first = int(lower[0])
    without = np.bincount(lower - first, ratios.mass - up, int(lower[-1]) - first + 2)
    without += np.bincount(lower - first + 1, up, len(without))
    losses = grid * (first + np.arange(len(without)))
    removed = pld_pmf.DensePLDPmf(grid, first, without * np.exp(losses), ratios.at_infinity, True)
    added = pld_pmf.DensePLDPmf(grid, -first - len(without) + 1, without[::-1], ratios.at_zero, True)
    return privacy_loss_distribution.PrivacyLossDistribution(removed, added)


def divergences(noise: float, steps: int, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bounds on the Rényi divergences of an epoch; infinite above order 128."""
    # With the unit, (α - 1) D_α = log E R^α, convex in α: below the line between whole orders.
    whole = np.interp(orders, np.arange(1, _MOST_ORDER + 1), _log_moments(noise, steps)[1:], right=np.inf)
    return np.maximum(whole, _log_inverse_moments(noise, steps, orders - 1.0)) / (orders - 1.0)


def _log_moments(noise: float, steps: int) -> NDArray[np.float64]:
    """log E R^k for k = 0, 1, ..., exactly: E (X_1 + ... + X_T)^k / k! is that of z^k in (Σ_j E X^j z^j / j!)^T."""
    orders = np.arange(_MOST_ORDER + 1)
    series = orders * (orders - 1) / (2 * noise * noise) - special.gammaln(orders + 1)

    def times(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
        table = one[:, None] + other[::-1]
        return np.array([special.logsumexp(np.diagonal(table, _MOST_ORDER - order)) for order in orders])

    total = series
    for digit in bin(int(steps))[3:]:
        total = times(total, total)
        total = times(total, series) if digit == "1" else total
    return total + special.gammaln(orders + 1) - orders * math.log(steps)


def _log_inverse_moments(noise: float, steps: int, powers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bounds on log E R^-β, which is (α - 1) D_α without ~> with at α = β + 1."""
    ratios = ratios_of_epoch(noise, steps, _FEW_POINTS)
    logs, powers = ratios.logs, powers[:, None]
    # From the grid's first ratio c on R^-β, and below it its tangent: convex, so that the grid's mean is a bound.
    tangent = math.log(ratios.at_zero or 1e-300) - powers * logs[:1] + np.log1p(powers)
    grid = np.log(ratios.mass, where=ratios.mass > 0, out=np.full_like(logs, -np.inf)) - powers * logs
    # What R^-β is more than that is at most (E R^-2β P(R < c))^½, with R at least the geometric mean of the X_t, and
    # P(R < c) at most E max(0, d - R) / (d - c) for any ratio d above c.
    inner = max(1, int(np.searchsorted(np.cumsum(ratios.mass), _RARE)))
    values = np.exp(logs[: inner + 1])
    short = ratios.mass[:inner] @ (values[inner] - values[:inner]) + ratios.at_zero * values[inner]
    rest = math.log(short / (values[inner] - values[0])) + (4 * powers * powers / steps + 2 * powers) / (2 * noise**2)
    return special.logsumexp(np.concatenate([tangent, grid, rest / 2], axis=1), axis=1)


def _ratios_of_step(noise: float, points: int) -> Ratios:
    """log X is normal: its mass in a cell of the grid, and X's mean there, which is the mass with the unit."""
    width = 1.0 / noise
    low, high = -width * width / 2 - _REACH * width, width * width / 2 + _REACH * width
    step = (high - low) / points
    first = math.floor(low / step)
    edges = step * np.arange(first, first + points + 2, dtype=np.float64)
    without, with_unit = (_chances(edges / width + sign * width / 2) for sign in (1.0, -1.0))
    ratios = np.exp(edges)
    # Of a cell (a, b): a share of its mass moves to b, so that the mean stays, and the rest to a.
    up = np.clip((with_unit[1:-1] - ratios[:-1] * without[1:-1]) / np.diff(ratios), 0.0, without[1:-1])
    mass = np.append(without[1:-1] - up, 0.0) + np.insert(up, 0, 0.0)
    up = min(with_unit[0] / ratios[0], without[0])
    mass[0] += up
    mass[-1] += without[-1]
    return Ratios(step, first, mass, without[0] - up, max(0.0, with_unit[-1] - ratios[-1] * without[-1]))


def _chances(edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of a normal number below the first edge, between edges, and above the last."""
    below, above = special.ndtr(edges), special.ndtr(-edges)
    return np.concatenate([below[:1], np.where(edges[1:] <= 0, np.diff(below), -np.diff(above)), above[-1:]])


def mean_of(one: Ratios, weight: float, other: Ratios, finer: int = 1) -> Ratios:
    """weight · one + (1 - weight) · other, which are independent, on a grid `finer` times as fine."""
    step, apart = one.step / finer, other.first - one.first
    # Values i of one and i + d of the other have the mean e^(iη) (w + (1 - w) e^(dη)): for all i at the same place
    # between two ratios of the grid.
    shifts = np.arange(apart + 1 - len(one.mass), apart + len(other.mass))
    places = np.log1p((1.0 - weight) * np.expm1(shifts * one.step)) / step
    lower = np.floor(places).astype(np.int64)
    first = finer * min(one.first, other.first)
    size = finer * max(len(one.mass), apart + len(other.mass)) + finer * max(0, -apart) + 2
    mass = np.zeros(size)
    for shift, low, share in zip(shifts.tolist(), lower.tolist(), _share(places - lower, step).tolist()):
        begin, end = max(0, apart - shift), min(len(one.mass), apart + len(other.mass) - shift)
        both = one.mass[begin:end] * other.mass[begin + shift - apart : end + shift - apart]
        at, up = finer * (one.first + begin) + low - first, share * both
        stop = at + finer * (end - begin)
        mass[at:stop:finer] += both - up
        mass[at + 1 : stop + 1 : finer] += up
    # Where one of both is 0 or infinite, which is hardly ever, the mean is spread over 0 and infinity.
    zero = _chance_of_either(one.at_zero, other.at_zero)
    mine, others = _chance_of_either(one.at_infinity, other.at_zero), _chance_of_either(other.at_infinity, one.at_zero)
    return _trim(Ratios(step, first, mass, zero, weight * mine + (1.0 - weight) * others))


def _chance_of_either(one: float, other: float) -> float:
    """The chance of one or both of two independent events."""
    return one + other - one * other


def _share(place: Any, step: float) -> Any:
    """The share that moves to the upper neighbour of a value at this place, from 0 to 1, between two of the grid."""
    return np.expm1(place * step) / math.expm1(step)


def _trim(ratios: Ratios) -> Ratios:
    """Without the ends of the grid that have almost no probability and almost nothing of the mean."""
    values, mass = np.exp(ratios.logs), ratios.mass
    low = int(np.searchsorted(np.cumsum(mass), _TAIL))
    tail = np.cumsum(mass[::-1])[::-1]
    beyond = np.cumsum((mass * values)[::-1])[::-1] - values * tail  # of the mean, where the grid would end here
    high = max(low, int(np.argmax(beyond <= _TAIL)))
    kept = mass[low : high + 1] * ((1.0 - ratios.at_zero) / float(tail[0]))  # rounding would add up over the rounds
    raised = float(mass[:low] @ values[:low]) / values[low]
    kept[0] += raised
    kept[-1] += float(mass[high + 1 :].sum())
    zero = ratios.at_zero + max(0.0, float(mass[:low].sum()) - raised)
    return Ratios(ratios.step, ratios.first + low, kept, zero, ratios.at_infinity + max(0.0, float(beyond[high])))
