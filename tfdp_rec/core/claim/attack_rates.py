"""How well an observer can tell at most whether a unit's data were used, from the privacy profile δ(ε).

An attack names one of two neighbouring data sets. With α its false-positive rate, its true-positive rate is

    at most  min over ε ≥ 0 of  min( e^ε α + δ(ε),  1 − e^−ε (1 − δ(ε) − α) )

(the two data sets in either role). Each ε gives a bound, so that a minimum over some of them is one, too. At even odds
a guess is right with probability (1 + δ(0))/2 at most. All of it holds for any attack, whatever else is known to it.

Reference:
    Kairouz, Oh and Viswanath, "The composition theorem for differential privacy", ICML 2015.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim.composition import deltas_of
from tfdp_rec.core.claim.events import DpEvent
from tfdp_rec.core.claim.ledger import Payment, costs_of_items

_EPSILONS = np.arange(501) / 100  # e^ε α passes 1 for α = 1% at 4.6


def profile_of(payments: Iterable[Payment]) -> NDArray[np.float64]:
    """δ at ε = 0, 0.01, ..., 5 of payments that were fixed in advance, for the worst item."""
    return np.max([deltas_of(event, _EPSILONS) for event in costs_of_items(payments)], axis=0)


def most_true_positives(deltas: NDArray[np.float64], rates: ArrayLike) -> NDArray[np.float64]:
    """The largest true-positive rate of any attack at each false-positive rate, by a profile of `profile_of`."""
    alpha, grows = np.asarray(rates, np.float64)[:, None], np.exp(_EPSILONS)
    return np.clip(np.minimum(grows * alpha + deltas, 1 - (1 - deltas - alpha) / grows).min(axis=1), 0.0, 1.0)


def attack_limit(event: DpEvent) -> Callable[[ArrayLike], NDArray[np.float64]]:
    """What an event allows any attack at most, as `tfdp_rec.audit.attack_membership` takes it.

    Args:
        event: Event of all that was released, such as a model's or a recommender's.

    Returns:
        Function from false-positive rates to the largest true-positive rates.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> attack_limit(GaussianDpEvent(1.0))([0.01, 0.1]).round(3)
        array([0.092, 0.389])
    """
    return functools.partial(most_true_positives, deltas_of(event, _EPSILONS))
