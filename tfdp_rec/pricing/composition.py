"""ε at δ of one event, however it is composed: by dp_accounting, or by profiles where an event is of ours.

What costs is the curve of one step (a tenth of a second to two seconds); many steps of it are a product (rdp) or one
transform (pld). A curve is remembered, so that a search for the last step that fits, or ε after every epoch, costs one.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from numpy.typing import NDArray

from tfdp_rec.pricing import events, profiles
from tfdp_rec.pricing.profiles import Distribution

_PLD_GRID = 1e-4  # dp_accounting's default width
_COARSE = 16.0  # times that, while a number is only looked for
_PLD_FINE_UP_TO = 50.0  # beyond this ε the grid widens in proportion, or it would fill the memory
_ROUNDING = 1e-11  # dp_accounting finds log A(α) to 6e-12 at worst: under huge noise more than it is, and of any sign
_PLD_UP_TO = 1000.0  # and beyond this one, no guarantee worth the name, rdp's bound is good enough
_MOST_STEPS = 10**9


def epsilon_of(event: DpEvent, delta: float, accountant: str = "pld", coarser: float = 1.0) -> float:
    """ε at δ of one (composed) event by dp_accounting; infinite where a part has no guarantee, or where what may fail
    takes up all of δ.

    Args:
        event: all that was done.
        delta: δ.
        accountant: "pld" or "rdp".
        coarser: so many times the width of pld's grid: an upper bound still, in a fraction of the time.

    Raises:
        ValueError: an event that is unknown, or that the accountant cannot account for.

    Example:
        >>> epsilon_of(dp_accounting.NonPrivateDpEvent(), delta=1e-6)
        inf
    """
    events.to_json(event)
    event, failing = events.without_failures(event)
    delta -= failing
    if not events.is_private(event) or (failing and delta <= 0):
        return math.inf
    if profiles.is_release(event):
        return profiles.composed_epsilon(profiles.releases_of(event), delta)
    check_supported(event, accountant)
    by_rdp = 0.0
    if quickest(event, accountant) == "rdp":
        by_rdp = _by_rdp(event, delta)
    if accountant == "rdp" or by_rdp > _PLD_UP_TO:
        return by_rdp
    grid = _PLD_GRID * coarser * max(1.0, by_rdp / _PLD_FINE_UP_TO)
    return _by_pld(event, delta, grid)


def _by_rdp(event: DpEvent, delta: float) -> float:
    return float(compute_epsilon(orders(), divergences(event, orders()), delta)[0])


@functools.cache
def orders() -> tuple[float, ...]:
    """dp_accounting's orders of Rényi divergences."""
    return tuple(map(float, RdpAccountant().orders))


def divergences(event: DpEvent, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Rényi divergences of an event at some orders, rounded up; infinite where none is known."""
    if not events.is_private(event) or not RdpAccountant().supports(event):
        return np.full(len(orders), np.inf)
    parts = [count * _divergences(json.dumps(events.to_json(part)), orders) for part, count in events.parts_of(event)]
    return sum(parts, np.zeros(len(orders)))


def _by_pld(event: DpEvent, delta: float, grid: float) -> float:
    losses = [_losses_of(part, count, grid) for part, count in events.parts_of(event)]
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses) or not losses:
        return float(_fresh("pld", grid).compose(event).get_epsilon(delta))
    composed = functools.reduce(lambda left, right: left.compose(right), known)
    return float(composed.get_epsilon_for_delta(delta))


def _losses_of(part: DpEvent, count: int, grid: float) -> Distribution | None:
    """Those of a part that is made `count` times, as dp_accounting composes them; None where it is not Gaussian."""
    if isinstance(part, GaussianDpEvent):
        return _gaussian_losses(part.noise_multiplier / math.sqrt(count), 1.0, grid)
    if isinstance(part, PoissonSampledDpEvent) and isinstance(part.event, GaussianDpEvent):
        return _gaussian_losses(part.event.noise_multiplier, part.sampling_probability, grid).self_compose(count)
    return None


@functools.lru_cache(maxsize=128)
def _divergences(part: str, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """Rényi divergences of one event at some orders, rounded up; infinite where a series does not end."""
    absl = logging.getLogger("absl")
    absl.addFilter(_without_series)
    try:
        found = RdpAccountant(list(orders)).compose(events.from_json(json.loads(part))).rdp
        found = np.where(np.isnan(found), np.inf, found)  # a NaN would pass for nothing in a comparison
        return np.maximum(found, 0.0) + _ROUNDING / np.minimum(np.subtract(orders, 1.0), 1.0)  # log A(α) / (α - 1)
    finally:
        absl.removeFilter(_without_series)


def _without_series(record: logging.LogRecord) -> bool:
    """Whether to log what is no order that is left out: a hundred lines, and the others give a bound that holds."""
    return "failed to converge" not in record.getMessage()


@functools.lru_cache(maxsize=16)  # up to some megabytes each
def _gaussian_losses(noise: float, probability: float, grid: float) -> Distribution:
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, value_discretization_interval=grid, sampling_prob=probability
    )


def searches(event: DpEvent, accountant: str) -> list[tuple[str, float]]:
    """(accountant, coarser) by which to look for a number that depends on ε: each begins where the one before ended."""
    if quickest(event, accountant) == accountant:
        return [(accountant, 1.0)]
    return [("rdp", 1.0), (accountant, _COARSE), (accountant, 1.0)]


def most_steps(epsilon: Callable[[int], float], target: float, start: int) -> int:
    """The largest number of steps that costs at most `target`; never more than 10^9."""
    low, high = start, start + 1
    while epsilon(high) <= target:
        low, high = high, high + max(1, (high - start) // 2, high // 16)
        if high > _MOST_STEPS:
            return _MOST_STEPS
    while high - low > 1:
        below, above = epsilon(low) - target, min(epsilon(high) - target, 1e9)
        guess = low + round((high - low) * -below / (above - below))
        width = max(1, (high - low) // 8)  # stay off the ends, so that the interval always shrinks
        middle = min(max(guess, low + width), high - width)
        low, high = (middle, high) if epsilon(middle) <= target else (low, middle)
    return low


def quickest(event: DpEvent, accountant: str) -> str:
    """rdp where it can account for the event, and bound what pld will say; else the accountant itself."""
    return "rdp" if _fresh("rdp").supports(events.without_failures(event)[0]) else accountant


def check_supported(event: DpEvent, accountant: str) -> None:
    """Raises for an event that an accountant cannot account for."""
    if events.planned_in(event):
        raise ValueError(
            "Correlated noise is planned for a whole training on data in one order, and says nothing of batches that "
            "are drawn anew: account for it with tfdp_rec.privacy.FixedOrder or BoundedStream, and train on batches "
            "of that."
        )
    if events.is_private(event) and not _fresh(accountant).supports(events.without_failures(event)[0]):
        raise ValueError(
            f"The {accountant} accountant cannot account for {events.in_words(event)}; try "
            f'accountant="{"rdp" if accountant == "pld" else "pld"}".'
        )


def _fresh(accountant: str, grid: float = _PLD_GRID) -> dp_accounting.PrivacyAccountant:
    # Both price ADD_OR_REMOVE_ONE, their default. For a sampled step that is the mixture which zero-out neighbours give
    # (`sampling.py`), and for what is not sampled the two relations are one.
    if accountant == "rdp":
        return dp_accounting.rdp.RdpAccountant()
    return dp_accounting.pld.PLDAccountant(value_discretization_interval=grid)


def checked_epsilon(target_epsilon: float) -> None:
    """Raises for a budget that is not positive and finite."""
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be positive and finite, got {target_epsilon!r}.")


def checked_count(name: str, value: int) -> int:
    """A number of steps, at least 0."""
    if int(value) != value or value < 0:
        raise ValueError(f"{name} must be a whole number, at least 0, got {value!r}.")
    return int(value)
