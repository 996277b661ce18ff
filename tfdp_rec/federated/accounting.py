"""What one client has spent over all its releases.

A client releases attention vectors (about its history) and permuted labels (about its clicks on
candidates), again and again. Each release has a hockey-stick profile δ(ε), known exactly or
bounded; the profiles become discretised privacy-loss distributions (connect-the-dots, pessimistic) and are
composed by convolution. A server that chooses the clients itself gets no amplification by sampling: it
knows who answered.

A click belongs to the history or to the candidates of a round. `epsilon(delta)` assumes that the same click
may sit in both and composes everything; `epsilon(delta, disjoint=True)` takes the larger of the two books,
which is right when the history was fixed before the clicks used as labels.

Reference:
    Doroshenko et al., "Connect the Dots", PETS 2022; Zhu et al., "Optimal accounting", AISTATS 2022.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.common import DifferentialPrivacyParameters

from tfdp_rec.federated import calibration, mechanism

_TAIL = 1e-13


class Profile(Protocol):
    """One release as the accountant sees it."""

    def distribution(self, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Its privacy-loss distribution, pessimistic, on multiples of `interval`."""

    def crude_epsilon(self) -> float:
        """About how much it spends, to choose the interval."""


@dataclasses.dataclass(frozen=True)
class PureRelease:
    """A release with pure ε: a permuted label.

    Example:
        >>> PureRelease(1.0).crude_epsilon()
        1.0
    """

    epsilon: float

    def distribution(self, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Randomised response with this ε, which dominates every such release."""
        return privacy_loss_distribution.from_privacy_parameters(
            DifferentialPrivacyParameters(self.epsilon, 0.0), value_discretization_interval=interval
        )

    def crude_epsilon(self) -> float:
        """The ε itself."""
        return self.epsilon


@dataclasses.dataclass(frozen=True)
class GaussianRelease:
    """A clipped vector of sensitivity `sensitivity` plus Gaussian noise, as in a clipped-and-noised gradient.

    Example:
        >>> GaussianRelease(sigma=2.0, sensitivity=1.0).crude_epsilon() < 10
        True
    """

    sigma: float
    sensitivity: float

    def distribution(self, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
        """The exact Gaussian profile, discretised pessimistically."""
        return _connect_dots(
            lambda epsilon: calibration.gaussian_delta(epsilon, self.sensitivity, self.sigma), interval
        )

    def crude_epsilon(self) -> float:
        """Where δ falls to 1e-5."""
        return _crossing(lambda epsilon: calibration.gaussian_delta(epsilon, self.sensitivity, self.sigma), 1e-5)


@dataclasses.dataclass(frozen=True)
class AttentionRelease:
    """A private attention vector, with its true profile (also when its calibration is a published one).

    Example:
        >>> release = AttentionRelease(mechanism.AttentionMechanism(3, 2.0, 1e-5, padding=0.5))
        >>> round(release.crude_epsilon(), 2)
        2.0
    """

    mechanism: mechanism.AttentionMechanism

    def distribution(self, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
        """The padded profile of Theorem 2, discretised pessimistically."""
        return _connect_dots(self.mechanism.delta_at, interval)

    def crude_epsilon(self) -> float:
        """Where the true δ falls to the mechanism's own (1e-5 if that is 0)."""
        if math.isinf(self.mechanism.epsilon):
            return math.inf
        return _crossing(self.mechanism.delta_at, self.mechanism.delta or 1e-5)


@dataclasses.dataclass(frozen=True)
class Unbounded:
    """A release that nothing bounds: a raw gradient, a published local update, noise switched off.

    Example:
        >>> Unbounded().crude_epsilon()
        inf
    """

    def distribution(self, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Refused: there is none.

        Raises:
            ValueError: Always.
        """
        raise ValueError("this release has no privacy-loss distribution: nothing bounds it.")

    def crude_epsilon(self) -> float:
        """Infinity."""
        return math.inf


class ClientAccountant:
    """Adds up one client's releases.

    Example:
        >>> accountant = ClientAccountant()
        >>> accountant.spend_labels(PureRelease(0.5), count=3)
        >>> round(accountant.epsilon(delta=0.0), 3)
        1.5
    """

    def __init__(self) -> None:
        self.history: Counter[Profile] = Counter()
        self.labels: Counter[Profile] = Counter()

    def spend_history(self, release: Profile, count: int = 1) -> None:
        """Record releases about the history.

        Args:
            release: What was released.
            count: How many times.

        Raises:
            ValueError: If the count is negative.
        """
        _add(self.history, release, count)

    def spend_labels(self, release: Profile, count: int = 1) -> None:
        """Record releases that each concern the *same* click among candidates.

        Labels of different clicks compose in parallel: record the most that one click went through.

        Args:
            release: What was released.
            count: How many times for one click.

        Raises:
            ValueError: If the count is negative.
        """
        _add(self.labels, release, count)

    def epsilon(self, delta: float, disjoint: bool = False) -> float:
        """Total ε for one click at this `delta`.

        Args:
            delta: Failure probability of the whole, in [0, 1).
            disjoint: Whether no click is both in the history and a label.

        Raises:
            ValueError: If δ is out of range.
        """
        if not 0 <= delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {delta}.")
        if disjoint:
            return max(_compose(self.history, delta), _compose(self.labels, delta))
        return _compose(self.history + self.labels, delta)


def _add(book: Counter[Profile], release: Profile, count: int) -> None:
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}.")
    if count:
        book[release] += count


def _compose(book: Counter[Profile], delta: float) -> float:
    if any(math.isinf(release.crude_epsilon()) for release in book):
        return math.inf
    if delta == 0:
        return _pure_total(book)
    return _composed(tuple(sorted(book.items(), key=repr)), delta)


def _pure_total(book: Counter[Profile]) -> float:
    """Basic composition of the pure releases; infinite as soon as one needs a positive δ."""
    total = 0.0
    for release, count in book.items():
        if isinstance(release, AttentionRelease) and not release.mechanism.calibration.needs_delta:
            total += count * _crossing(release.mechanism.delta_at, 0.0)
        elif isinstance(release, PureRelease):
            total += count * release.epsilon
        else:
            return math.inf
    return total


@functools.lru_cache(maxsize=256)
def _composed(releases: tuple[tuple[Profile, int], ...], delta: float) -> float:
    if not releases:
        return 0.0
    crude = sum(count * release.crude_epsilon() for release, count in releases)
    interval = float(np.clip(crude / 20_000, 1e-7, 1e-2))
    parts = [release.distribution(interval).self_compose(count) for release, count in releases]
    total = functools.reduce(lambda left, right: left.compose(right), parts)
    return float(total.get_epsilon_for_delta(delta))


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


def _connect_dots(delta_at: Callable[[Any], Any], interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    """A symmetric, pessimistic distribution through the profile's points at multiples of `interval`."""
    reach = math.ceil(_crossing(delta_at, _TAIL) / interval)
    epsilons = np.arange(-reach, reach + 1) * interval
    deltas = np.minimum.accumulate(np.clip(delta_at(epsilons), 0.0, 1.0))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -reach, reach, deltas)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)
