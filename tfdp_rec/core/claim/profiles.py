"""Exact prices of the releases that a person makes of their own clicks, for which dp_accounting has no event.

A release is described by its hockey-stick profile δ(ε) between neighbours that differ in one item:

    Gaussian  z          δ(ε) = Φ(1/2z - εz) - e^ε Φ(-1/2z - εz)
    pure      ε₀         δ(ε) ≤ that of randomised response, (1 - e^(ε - ε₀)) / (1 + e^-ε₀)
    padded    p, inner   each item is replaced by a fixed one with probability p before the inner release:
                         δ(ε) = (1-p) δ_inner(log(1 + (e^ε - 1)/(1-p))),  and h(-ε) = 1 - e^-ε + e^-ε h(ε) below 0

Profiles become discretised privacy-loss distributions (connect-the-dots, pessimistic) and are composed by convolution.

Reference:
    Doroshenko et al., "Connect the Dots", PETS 2022; Zhu et al., "Optimal accounting", AISTATS 2022;
    docs/privacy-privaterec.md, Theorem 2, for padding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import dp_accounting
import numpy as np
from dp_accounting import DpEvent
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.common import DifferentialPrivacyParameters
from numpy.typing import NDArray
from scipy import special

from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.events import PaddedDpEvent, PureDpEvent

Number = TypeVar("Number", float, NDArray[np.float64])
Releases = tuple[tuple[DpEvent, int], ...]
Distribution: TypeAlias = "privacy_loss_distribution.PrivacyLossDistribution"

_TAIL = 1e-13
# dp_accounting composes in float64, by Fourier transforms, which leaves errors of either sign in δ: 7e-17 for each part
# was the most that was seen, up to 10⁶ parts, and 10⁻¹⁵ for one.
_LOST_BY_PART, _LOST = 5e-16, 1e-14
_GRID_UP_TO = 500.0  # dp_accounting computes e^ε in float64; above this ε, only pure ε has a price


def gaussian_delta(epsilon: Number, sensitivity: float, sigma: float) -> Number:
    """The exact δ of Gaussian noise: Φ(a - b) - e^ε Φ(-a - b), a = S/(2 σ), b = ε σ/S."""
    values = np.asarray(epsilon, dtype=np.float64)
    near, far = sensitivity / (2 * sigma), values * sigma / sensitivity
    exact = special.ndtr(near - far) - np.exp(values + special.log_ndtr(-near - far))
    return like(epsilon, np.clip(exact, -np.expm1(np.minimum(values, 0.0)), 1.0))


def pure_delta(epsilon: Number, pure_epsilon: float) -> Number:
    """A bound on δ(ε) for any pure `pure_epsilon` mechanism: that of randomised response."""
    values = np.asarray(epsilon, dtype=np.float64)
    inside = -np.expm1(np.minimum(values - pure_epsilon, 0.0)) / (1.0 + math.exp(-pure_epsilon))
    return like(epsilon, np.maximum(inside, -np.expm1(np.minimum(values, 0.0))))


def amplify(epsilon: float, padding: float) -> float:
    """ε of an `epsilon`-mechanism whose items are padded with probability p: log(p + (1-p) e^ε)."""
    return float(np.logaddexp(math.log1p(-padding) + epsilon, math.log(padding) if padding else -math.inf))


def deamplify(epsilon: Number, padding: float) -> Number:
    """ε of a mechanism that padding brings down to `epsilon`: log(1 + (e^ε - 1)/(1-p)), the inverse of `amplify`."""
    # ε + log(e^-ε + (1 - e^-ε)/(1-p)): the same, without e^ε, which overflows.
    shrunk = -np.expm1(-np.asarray(epsilon, dtype=np.float64)) / (1.0 - padding)
    kept = np.exp(-np.asarray(epsilon, dtype=np.float64))
    return like(epsilon, epsilon + np.log(shrunk + kept))


def delta_under_padding(epsilon: Number, padding: float, inner: Callable[[Any], Any]) -> Number:
    """The profile of a release with padding, for any real ε: the two formulas at the head of this file."""
    values = np.asarray(epsilon, dtype=np.float64)
    above = (1.0 - padding) * inner(deamplify(np.abs(values), padding))
    mirrored = -np.expm1(np.minimum(values, 0.0)) + np.exp(np.minimum(values, 0.0)) * above
    return like(epsilon, np.where(values < 0, mirrored, above))


def delta_of(event: DpEvent, epsilon: Number) -> Number:
    """δ(`epsilon`) of one release."""
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return gaussian_delta(epsilon, 1.0, event.noise_multiplier)
    if isinstance(event, PureDpEvent):
        return pure_delta(epsilon, event.epsilon)
    if isinstance(event, PaddedDpEvent):
        return delta_under_padding(epsilon, event.padding, lambda inside: delta_of(event.event, inside))
    raise ValueError(
        f"{events.describe(event)} cannot be composed with what one person releases of their own items: its "
        "neighbouring data sets differ by a person, theirs by one item replaced by another. Keep two ledgers."
    )


def releases_of(event: DpEvent, times: int = 1) -> dict[DpEvent, int]:
    """Number of times that each release of an event is made."""
    found: dict[DpEvent, int] = {}
    for release, count in events.parts_of(event, times):
        found[release] = found.get(release, 0) + count
    return found


def epsilon_of_releases(releases: dict[DpEvent, int], delta: float) -> float:
    """ε at δ of composed releases; at δ = 0 the sum of their pure ε, infinite if one of them has none."""
    if not all(events.is_private(release) for release in releases):
        return math.inf
    if delta == 0:
        return sum(count * _pure_epsilon(release) for release, count in releases.items())
    return _compose(tuple(sorted(releases.items(), key=repr)), delta)


def certain_delta(delta: float, parts: int) -> float:
    """The δ to ask a composition of so many parts for, so that rounding errors cannot make its ε too small."""
    return delta - _LOST - _LOST_BY_PART * parts


def pure_divergences(pure_epsilon: float, orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rényi divergences of randomised response, of which every pure `pure_epsilon` mechanism is a post-processing."""
    # log(p^α q^(1-α) + q^α p^(1-α)) / (α - 1) with p = e^ε q, p + q = 1. Rounded to more than ε for large ε.
    larger = np.logaddexp(orders * pure_epsilon, (1 - orders) * pure_epsilon) - np.logaddexp(pure_epsilon, 0.0)
    return np.minimum(larger / (orders - 1), pure_epsilon)


def divergences_under_padding(
    padding: float, inner: NDArray[np.float64], orders: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A bound on the Rényi divergences of a release with padding, from those without."""
    # E_Q[(P/Q)^α] is jointly convex in (P, Q), and 1 for the part that holds the fixed item in both.
    kept = math.log1p(-padding) + (orders - 1) * inner
    return np.logaddexp(kept, math.log(padding) if padding else -math.inf) / (orders - 1)


def _pure_epsilon(release: DpEvent) -> float:
    if isinstance(release, PaddedDpEvent):
        inner = _pure_epsilon(release.event)
        return inner if math.isinf(inner) else amplify(inner, release.padding)
    return release.epsilon if isinstance(release, PureDpEvent) else math.inf


@functools.lru_cache(maxsize=256)
def _compose(releases: Releases, delta: float) -> float:
    if not releases:
        return 0.0
    pure = sum(count * _pure_epsilon(release) for release, count in releases)
    certain = certain_delta(delta, sum(count for _, count in releases))
    if certain <= 0.0 or max(_crude_epsilon(release) for release, _ in releases) > _GRID_UP_TO:  # no grid tells these
        return pure
    crude = sum(count * _crude_epsilon(release) for release, count in releases)
    interval = float(np.clip(crude / 20_000, 1e-7, 1e-2))
    parts = [_distribution(release, interval).self_compose(count) for release, count in releases]
    total = functools.reduce(lambda left, right: left.compose(right), parts)
    return min(float(total.get_epsilon_for_delta(certain)), pure)


@functools.lru_cache(maxsize=256)
def _crude_epsilon(release: DpEvent) -> float:
    """A rough ε of a release, which chooses the grid."""
    if isinstance(release, PureDpEvent):
        return release.epsilon
    return _crossing(lambda epsilon: delta_of(release, epsilon), 1e-5)


def _distribution(release: DpEvent, interval: float) -> Distribution:
    """A release's privacy losses on multiples of `interval`, never too small."""
    if isinstance(release, PureDpEvent):
        return privacy_loss_distribution.from_privacy_parameters(
            DifferentialPrivacyParameters(release.epsilon, 0.0), value_discretization_interval=interval
        )
    reach = math.ceil(_crossing(lambda epsilon: delta_of(release, epsilon), _TAIL) / interval)
    deltas = np.clip(delta_of(release, np.asarray(np.arange(-reach, reach + 1) * interval, np.float64)), 0.0, 1.0)
    # Rounding may let the profile rise by a hair, which connect-the-dots refuses.
    dots = np.minimum.accumulate(deltas)
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -reach, reach, dots)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _crossing(delta_at: Callable[[Any], Any], target: float) -> float:
    """The smallest ε (to one part in a million, rounded up) whose `delta_at` is at most the target."""
    low, high = 0.0, 1.0
    while delta_at(high) > target:
        low, high = high, 2.0 * high
        if high > 1e6:
            return math.inf
    while high - low > 1e-9 * max(1.0, high) and high - low > 1e-6 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if delta_at(middle) <= target else (middle, high)
    return high


def like(given: Number, values: NDArray[np.float64]) -> Number:
    """A float for a float, an array for an array."""
    return values if isinstance(given, np.ndarray) else float(values)
