"""Privacy filters: budgets under which a payment may be chosen after seeing what earlier payments bought.

ε of a composition is a bound for events that were fixed beforehand. A filter is fixed at its beginning instead,
admits an event only while a sum stays within a limit, and claims the budget, however its events were chosen. P and Q
are the laws of all that is released on two neighbouring data sets, p_i and q_i those of release i given the releases
before it.

**Rényi, at one order α.** Event i has D_α(p_i‖q_i) ≤ ρ_i whatever came before, and Σ ρ_i ≤ ρ in every course of
events:

    X_i = Π_{j≤i} (p_j/q_j)^α e^(-(α-1) ρ_j)   is a supermartingale under Q, X_0 = 1,   so   D_α(P‖Q) ≤ ρ

and ρ is the largest divergence that converts to (ε, δ) at that order. The order may not depend on the data: the least
ε over all orders is a choice made at the end, for which the argument does not hold.

**Gaussians alone.** A Gaussian of multiplier σ is the increment of one Brownian motion with drift 0 or 1 over a time
σ^-2. Events that follow each other take up times that follow each other, so whatever is chosen, all releases are
computed from the path up to time μ² ≥ Σ σ_i^-2, which tells as much as one Gaussian of multiplier 1/μ. Nothing is
lost to an order.

**Failures** of some probability have no divergence. Before the first failure the releases are those of a course
without failures, times the same probability of none under P and Q; all failures together have probability Σ δ_i at
most. So they need a share of δ that was set aside at the beginning, and the rest of δ is for the divergence.

Steps of a plan, or of a block that is paid ahead, may alternate with other releases: each is an event of the sum,
which holds all of them from the time they are paid for. What is given back was never run, and no release depends on
it.

Reference:
    Feldman and Zrnic, Individual privacy accounting via a Rényi filter, NeurIPS 2021.
    Smith and Thakurta, Fully adaptive composition for Gaussian differential privacy, 2022.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.composition import check_delta, check_epsilon, divergences, epsilon_of_divergences, orders
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release

_SLACK = 1e-6  # of the limit: more than sums of floats, or another version of dp_accounting, differ by
_ORDERS = 1.1, 1024.0  # dp_accounting's range


@dataclasses.dataclass(frozen=True)
class PrivacyFilter(abc.ABC):
    """A budget that is fixed when a ledger begins, and that the ledger never exceeds: `Ledger(..., limit=...)`.

    Args:
        epsilon: Claimed ε.
        delta: Claimed δ.
        failing: Share of δ for events that may fail, such as the threshold of a private vocabulary.
    """

    epsilon: float
    delta: float
    failing: float = 0.0

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be between 0 and 1, got {self.delta!r}.")
        if not (0 <= self.failing and self._rest > 0):
            raise ValueError(f"failing must be at least 0 and below delta, got {self.failing!r}.")

    @property
    def _budget(self) -> str:
        return f"for epsilon = {self.epsilon:g} at delta = {self.delta:g}"

    @property
    def _rest(self) -> float:
        """δ without the share of failures."""
        return self.delta - self.failing * (1 + 2 * _SLACK)

    @functools.cached_property
    def limit(self) -> float:
        """The largest sum that is (ε, δ), less a small slack for rounding."""
        return self._largest() * (1 - 2 * _SLACK)

    def used(self, event: DpEvent) -> float:
        """Fraction of the budget that an `event`, or a composition of events, uses; infinite if it has no price."""
        events.to_json(event)
        event, failing = events.split_failures(event)
        # Failures and divergences have budgets of their own; the fuller one decides.
        share = failing / self.failing if self.failing else math.inf if failing else 0.0
        return max(share, self._amount(event) / self.limit)

    def admits(self, event: DpEvent) -> bool:
        """Whether an `event`, or a composition of events, is within the budget."""
        return self.used(event) <= 1 + _SLACK

    def claim(self, delta: float) -> float:
        """ε at `delta` of everything that is ever admitted: the budget's ε, infinite below its δ."""
        check_delta(delta)
        return self.epsilon if delta >= self.delta else math.inf

    def refuse_unpriced(self, event: DpEvent) -> None:
        """Raises `ValueError` for an `event` that this filter cannot price."""
        if math.isinf(self.used(event)):
            raise ValueError(
                f"{events.describe(event)[:150]} has no price in {self}: {self._lacks}, or it may fail and there is no "
                "share of delta for that (failing=). Pay for it in a ledger of payments that are fixed in advance."
            )

    def to_json(self) -> dict[str, Any]:
        """The filter's entry in a ledger's first line."""
        return {"kind": type(self).__name__, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> PrivacyFilter:
        """The inverse of `to_json`."""
        kinds = {"RenyiFilter": RenyiFilter, "GaussianFilter": GaussianFilter}
        return kinds[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})

    _lacks = ""

    @abc.abstractmethod
    def _largest(self) -> float:
        """The largest sum that is (ε, δ)."""

    @abc.abstractmethod
    def _amount(self, event: DpEvent) -> float:
        """An event's term of the sum; infinite if it has no price."""


@dataclasses.dataclass(frozen=True)
class RenyiFilter(PrivacyFilter):
    """A filter of Rényi divergences of one order: Gaussians, Poisson-sampled steps, Laplace noise.

    Args:
        epsilon: Claimed ε.
        delta: Claimed δ.
        failing: Share of δ for events that may fail.
        order: Order α, chosen without the data; by default the one at which most Gaussians fit. `order_for` gives the
            best one for a planned event.

    Example:
        >>> limit = RenyiFilter(8.0, 1e-6)
        >>> limit.order, round(limit.used(GaussianDpEvent(1.0)), 3)
        (4.4, 0.475)
    """

    order: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.order:
            best = self.order_for(self.epsilon, self.delta, GaussianDpEvent(1.0), self.failing)
            object.__setattr__(self, "order", best)
        if not _ORDERS[0] <= self.order <= _ORDERS[1]:
            raise ValueError(f"order must be from {_ORDERS[0]:g} to {_ORDERS[1]:g}, got {self.order!r}.")
        if not self.limit > 0:
            raise ValueError(
                f"No divergence of order {self.order:g} is as small as epsilon = {self.epsilon:g} at delta = "
                f"{self.delta:g}: leave order out, or take RenyiFilter.order_for(epsilon, delta, event)."
            )

    def __str__(self) -> str:
        return f"a filter of Rényi divergences of order {self.order:g}, {self._budget}"

    @staticmethod
    def order_for(epsilon: float, delta: float, event: DpEvent, failing: float = 0.0) -> float:
        """The order at which an event fits most often.

        Args:
            epsilon: Claimed ε.
            delta: Claimed δ.
            event: Event that the ledger is planned for, such as one Poisson-sampled step.
            failing: Share of δ for events that may fail.

        Example:
            >>> from dp_accounting import PoissonSampledDpEvent
            >>> RenyiFilter.order_for(1.0, 1e-6, PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)))
            15.0
        """
        limits = [_largest_divergence(order, epsilon, delta - failing) for order in orders()]
        return float(orders()[int(np.argmax(limits / divergences(event, orders())))])

    _lacks = "no divergence of that order is known for it"

    def _largest(self) -> float:
        return _largest_divergence(self.order, self.epsilon, self._rest)

    def _amount(self, event: DpEvent) -> float:
        return float(divergences(event, (self.order,))[0])


@dataclasses.dataclass(frozen=True)
class GaussianFilter(PrivacyFilter):
    """A filter of Gaussians alone: planned noise, private sums, counts; no sampled steps.

    It admits as much as a composition of events that were fixed beforehand. Arguments as `PrivacyFilter`.

    Example:
        >>> round(GaussianFilter(8.0, 1e-6).used(GaussianDpEvent(1.0)), 3)
        0.426
    """

    def __str__(self) -> str:
        return f"a filter of Gaussians, {self._budget}"

    _lacks = "it is no Gaussian"

    def _largest(self) -> float:
        return noise_of_one_release(self.epsilon, self._rest) ** -2

    def _amount(self, event: DpEvent) -> float:
        parts = list(events.parts_of(event))
        if not all(isinstance(part, GaussianDpEvent) and part.noise_multiplier > 0 for part, _ in parts):
            return math.inf
        return math.fsum(count * (1 / part.noise_multiplier) * (1 / part.noise_multiplier) for part, count in parts)


def _largest_divergence(order: float, epsilon: float, delta: float) -> float:
    """The ρ that dp_accounting converts to ε at δ."""
    # At one order ε = ρ + a constant. It is below 0 only where ε is as small as δ², and dp_accounting converts
    # by another bound.
    return epsilon - max(epsilon_of_divergences([order], [epsilon], delta) - epsilon, 0.0)
