"""ε at δ of one event, however it is composed: by dp_accounting, or by `profiles.py` for events of this package.

    rdp    D_α(composition) = Σ_i count_i D_α(part_i),    ε = min_α D_α + log(1/δ)/(α - 1) + …
    pld    the loss of the composition is the sum of the losses of its parts: one transform for many steps

The curve of one step takes a tenth of a second to two seconds, and composing it many times a quarter. Curves are
cached, so that a search for the last step that fits computes one. Gaussians that are not sampled are one Gaussian.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim import allocation, events, profiles, selection
from tfdp_rec.core.claim.events import PaddedDpEvent, PureDpEvent, RandomAllocationDpEvent, RepeatAndSelectDpEvent
from tfdp_rec.core.claim.profiles import Distribution
from tfdp_rec.core.ground.refused import refuse_no_number

_PLD_GRID = 1e-4  # dp_accounting's default width
_COARSE = 16.0  # factor on the grid during a search
_PLD_FINE_UP_TO = 50.0  # above this ε the grid widens in proportion, which bounds the memory
_ROUNDING = 1e-11  # dp_accounting computes log A(α) to 6e-12 at worst, of any sign; under huge noise that exceeds it
_PLD_UP_TO = 1000.0  # above this ε the guarantee says little, and rdp's bound is returned
_TYPICAL_DELTA = 1e-6  # chooses the grid of a profile
_MOST_STEPS, _MOST_EPSILON = 10**9, 1e5


def epsilon_of(event: DpEvent, delta: float, accountant: str = "pld", coarser: float = 1.0) -> float:
    """ε at δ of one (composed) event.

    Infinite if a part has no guarantee, or if the failures of the event (`FailingDpEvent`) take up all of δ.

    Args:
        event: Everything that was done with the data.
        delta: Probability δ.
        accountant: "pld" or "rdp".
        coarser: Factor on the width of pld's grid; rdp takes whole orders alone above 1. A quicker, looser upper bound.

    Raises:
        ValueError: The event is unknown, the accountant cannot account for it, or δ is no probability below 1.

    Example:
        >>> epsilon_of(dp_accounting.NonPrivateDpEvent(), delta=1e-6)
        inf
    """
    check_delta(delta)
    events.to_json(event)
    event, failing = events.split_failures(event)
    delta -= failing
    if not events.is_private(event) or (failing and delta <= 0):
        return math.inf
    event = events.as_priced(event)
    if events.is_release(event):
        return profiles.epsilon_of_releases(profiles.releases_of(event), delta)
    check_supported(event, accountant)
    if accountant == "rdp":
        return _rdp_epsilon(event, delta, closely=coarser <= 1)
    lost, share = _rounding(event)
    certain = delta - lost - delta * share
    rough = math.inf if certain <= 0.0 else 0.0
    if _is_supported(event, "rdp"):  # at most a little above pld's: it chooses the grid
        rough = _rdp_epsilon(event, delta)
        rough = rough if rough <= _PLD_FINE_UP_TO and certain > 0.0 else _rdp_epsilon(event, delta, closely=True)
    if rough > _PLD_UP_TO or certain <= 0.0:  # pld cannot tell so small a δ from 0
        return rough
    return _pld_epsilon(event, certain, _PLD_GRID * coarser * max(1.0, rough / _PLD_FINE_UP_TO))


def deltas_of(event: DpEvent, epsilons: NDArray[np.float64], coarser: float = 1.0) -> NDArray[np.float64]:
    """The privacy profile of one (composed) event, by PLD: δ at each ε ≥ 0, rounded up; 1 where nothing is promised."""
    events.to_json(event)
    event, failing = events.split_failures(event)
    if not events.is_private(event):
        return np.ones(len(epsilons))
    event = events.as_priced(event)
    check_supported(event, "pld")
    rough = _rdp_epsilon(event, _TYPICAL_DELTA) if _is_supported(event, "rdp") else 0.0
    if rough > _PLD_UP_TO:
        return np.ones(len(epsilons))
    (lost, share), grid = _rounding(event), _PLD_GRID * coarser * max(1.0, rough / _PLD_FINE_UP_TO)
    gaussian, others = _split_gaussians(event)
    if gaussian is not None and not others:
        exact = profiles.gaussian_delta(epsilons, 1.0, gaussian.noise_multiplier)
    else:
        losses = _compose(event, grid)
        exact = losses.get_delta_for_epsilon(epsilons) if losses else np.zeros(len(epsilons))
    return np.minimum(exact * (1.0 + share) + lost + failing, 1.0)


def epsilon_of_divergences(orders: Sequence[float], divergences: ArrayLike, delta: float) -> float:
    """ε at δ of what has these Rényi divergences at these orders, by dp_accounting's conversion."""
    return float(compute_epsilon(orders, divergences, delta)[0])


def _rdp_epsilon(event: DpEvent, delta: float, closely: bool = False) -> float:
    """ε by the best of some orders, or of all orders."""
    some = whole_orders()
    epsilon, best = compute_epsilon(some, divergences(event, some), delta)
    if closely:
        # Log-moments are convex in the order, and ε is their ratio to a linear function of it: its only minimum is
        # beside the best of some. The first order counts where it tells no difference at all.
        place = some.index(best) if best in some else 0
        low, high = (some[place - 1] if place else 1.0), (*some, math.inf)[place + 1]
        near = tuple(order for order in orders() if low < order < high or order == orders()[0])
        epsilon = min(epsilon, epsilon_of_divergences(near, divergences(event, near), delta))
    return float(epsilon)


@functools.cache
def orders() -> tuple[float, ...]:
    """dp_accounting's orders of Rényi divergences."""
    return tuple(map(float, RdpAccountant().orders))


@functools.cache
def whole_orders() -> tuple[float, ...]:
    """Some of `orders`, at which the divergence of a sampled Gaussian is a short sum, and no series."""
    return tuple(order for order in orders() if order.is_integer() and (order < 8 or order % 4 == 0))


def divergences(event: DpEvent, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Rényi divergences of an event at some orders, rounded up; infinite where none is known."""
    parts = [count * _divergences(json.dumps(events.to_json(part)), orders) for part, count in events.parts_of(event)]
    return sum(parts, np.zeros(len(orders)))


def _pld_epsilon(event: DpEvent, delta: float, grid: float) -> float:
    composed = _compose(event, grid)
    return float(composed.get_epsilon_for_delta(delta)) if composed else 0.0


def _compose(event: DpEvent, grid: float) -> Distribution | None:
    gaussian, others = _split_gaussians(event)
    losses = [_losses_of(part, count, grid) for part, count in others]
    losses += [] if gaussian is None else [_mechanism_losses(gaussian, 1.0, grid)]
    return functools.reduce(lambda left, right: left.compose(right), losses) if losses else None


def _split_gaussians(event: DpEvent) -> tuple[GaussianDpEvent | None, list[tuple[DpEvent, int]]]:
    """The one Gaussian that an event's Gaussians are together, and the other parts with their counts."""
    parts = list(events.parts_of(event))
    others = [(part, count) for part, count in parts if not isinstance(part, GaussianDpEvent)]
    # Those of multipliers σ are one of 1/√Σ σ⁻².
    inverses = [(1.0 / part.noise_multiplier, count) for part, count in parts if isinstance(part, GaussianDpEvent)]
    precision = sum(count * inverse * inverse for inverse, count in inverses)
    return GaussianDpEvent(precision**-0.5) if precision else None, others


def _rounding(event: DpEvent) -> tuple[float, float]:
    """What rounding may have taken from δ of an event's losses: at most this, and this part of it."""
    gaussian, others = _split_gaussians(event)
    convolved = (gaussian is not None) + sum(count for _, count in others)
    allocated = sum(count * getattr(part, "steps_per_epoch", 0) for part, count in others)
    return -profiles.certain_delta(0.0, convolved), allocation.ROUNDING * allocated


def _losses_of(part: DpEvent, count: int, grid: float) -> Distribution:
    """Losses of `count` times a part, as dp_accounting composes them."""
    if isinstance(part, RandomAllocationDpEvent):
        return allocation.losses_of_epoch(part.event.noise_multiplier, part.steps_per_epoch, grid).self_compose(count)
    if isinstance(part, RepeatAndSelectDpEvent):
        return _losses_of_best(json.dumps(events.to_json(part)), grid).self_compose(count)
    if isinstance(part, PoissonSampledDpEvent):
        return _mechanism_losses(part.event, part.sampling_probability, grid).self_compose(count)
    return _mechanism_losses(part, 1.0, grid).self_compose(count)


@functools.lru_cache(maxsize=64)
def _losses_of_best(part: str, grid: float) -> Distribution:
    event = events.as_priced(events.from_json(json.loads(part)))
    run, (lost, share) = _compose(event.event, grid), _rounding(event.event)

    def delta_at(epsilon: Any) -> Any:
        exact = run.get_delta_for_epsilon(epsilon) if run else np.maximum(-np.expm1(epsilon), 0.0)
        return exact * (1.0 + share)

    return selection.losses_of_best(delta_at, lost, event.mean, event.shape, grid)


@functools.lru_cache(maxsize=128)
def _divergences(part: str, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Rényi divergences of one event at some orders, rounded up; infinite where none is known or a series diverges."""
    event, alpha = events.as_priced(events.from_json(json.loads(part))), np.array(orders)
    absl = logging.getLogger("absl")
    absl.addFilter(_is_news)
    try:
        if isinstance(event, PureDpEvent) and events.is_private(event):
            found = profiles.pure_divergences(event.epsilon, alpha)
        elif isinstance(event, PaddedDpEvent):
            found = profiles.divergences_under_padding(event.padding, divergences(event.event, orders), alpha)
        elif isinstance(event, RandomAllocationDpEvent) and events.is_private(event):
            found = allocation.divergences(event.event.noise_multiplier, event.steps_per_epoch, alpha)
        elif isinstance(event, RepeatAndSelectDpEvent):
            curves = [(at, divergences(event.event, at)) for at in (orders, whole_orders())]
            found = selection.divergences_of_best(event.mean, event.shape, *curves)
        elif events.is_private(event) and RdpAccountant().supports(event):
            found = RdpAccountant(list(orders)).compose(event).rdp
        else:
            found = np.full(len(orders), np.inf)
        found = np.where(np.isnan(found), np.inf, found)  # every comparison with NaN is false
        return np.maximum(found, 0.0) + _ROUNDING / np.minimum(alpha - 1.0, 1.0)  # log A(α) / (α - 1)
    finally:
        absl.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Keeps out the messages about orders without a finite series: the other orders give a valid bound."""
    return "failed to converge" not in record.getMessage()


@functools.lru_cache(maxsize=64)  # up to some megabytes each; a ledger of thirty days asks for one a day
def _mechanism_losses(event: GaussianDpEvent | LaplaceDpEvent, probability: float, grid: float) -> Distribution:
    kinds = privacy_loss_distribution
    make = kinds.from_gaussian_mechanism if isinstance(event, GaussianDpEvent) else kinds.from_laplace_mechanism
    return make(event.noise_multiplier, value_discretization_interval=grid, sampling_prob=probability)


def searches(event: DpEvent, accountant: str) -> list[tuple[str, float]]:
    """(accountant, coarser) of successive searches for a number that depends on ε; each starts from the last result."""
    if accountant == "rdp" or not _is_supported(event, "rdp"):
        return [(accountant, 1.0)]
    return [("rdp", _COARSE), (accountant, _COARSE), (accountant, 1.0)]


def most_steps(epsilon: Callable[[int], float], target: float, start: int) -> int:
    """The largest number of steps, from `start` to 10^9, whose `epsilon` is at most `target`; `start` must fit."""
    # Doubling finds an interval, then the secant halves it at least: each price may take seconds.
    low, high = start, start + 1
    while epsilon(high) <= target:
        if high >= _MOST_STEPS:
            return high
        low, high = high, min(_MOST_STEPS, high + max(1, (high - start) // 2, high // 16))
    while high - low > 1:
        below, above = epsilon(low) - target, min(epsilon(high) - target, 1e9)
        guess = low + round((high - low) * -below / (above - below))
        width = max(1, (high - low) // 8)  # stay off the ends, so that the interval always shrinks
        middle = min(max(guess, low + width), high - width)
        low, high = (middle, high) if epsilon(middle) <= target else (low, middle)
    return low


def _is_supported(event: DpEvent, accountant: str) -> bool:
    parts = [part for part, _ in events.parts_of(events.as_priced(events.split_failures(event)[0]))]
    epochs = [part for part in parts if isinstance(part, RandomAllocationDpEvent)]
    best = [part for part in parts if isinstance(part, RepeatAndSelectDpEvent)]
    others = ComposedDpEvent([part for part in parts if part not in (*epochs, *best)])
    known = all(isinstance(part.event, GaussianDpEvent) for part in epochs)
    known = known and all(_is_supported(part.event, accountant) for part in best)
    return known and bool(_fresh(accountant).supports(others))


def check_supported(event: DpEvent, accountant: str) -> None:
    """Raises for an event that an accountant cannot account for."""
    if events.has_plan(event):
        raise ValueError(
            "Correlated noise is planned for a whole training on data in one order, and has no guarantee on batches "
            "that are drawn at random: account for it with tfdp_rec.privacy.FixedOrder or BoundedStream, and train on "
            "batches of that."
        )
    if events.is_private(event) and not _is_supported(event, accountant):
        raise ValueError(
            f"The {accountant} accountant cannot account for {events.describe(event)}; try "
            f'accountant="{"rdp" if accountant == "pld" else "pld"}".'
        )


def _fresh(accountant: str) -> dp_accounting.PrivacyAccountant:
    # Both price ADD_OR_REMOVE_ONE, their default. For a sampled step that is the mixture which zero-out neighbours give
    # (`core/claim/schemes.py`), and without sampling the two relations cost the same.
    return RdpAccountant() if accountant == "rdp" else dp_accounting.pld.PLDAccountant()


def check_delta(delta: float) -> None:
    """Raises for a δ that is no probability below 1."""
    refuse_no_number("delta", delta)
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be at least 0 and below 1, got {delta!r}.")


def check_epsilon(target_epsilon: float) -> None:
    """Raises for a budget that is not positive, or so large that it promises nothing and overflows."""
    refuse_no_number("epsilon", target_epsilon)
    if not 0 < target_epsilon <= _MOST_EPSILON:
        words = "at most 100,000" if _MOST_EPSILON < target_epsilon < math.inf else "positive and finite"
        raise ValueError(f"epsilon must be {words}, got {target_epsilon!r}.")


def valid_count(name: str, value: int) -> int:
    """A number of steps, at least 0."""
    if int(value) != value or value < 0:
        raise ValueError(f"{name} must be a whole number, at least 0, got {value!r}.")
    return int(value)
