"""Claims of one form and different noise, with the trade-off curve of each from its privacy losses.

If an event has δ(ε), then what has probability x without a unit and F(x) with it satisfies, for each ε ≥ 0,

    F(x) ≤ e^ε x + δ(ε),    1 − x ≤ e^ε (1 − F(x)) + δ(ε),

and the least x that some power allows is the greatest of the bounds that follow. Upper bounds of δ give a curve that
claims less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tfdp_rec.core.claim.composition import deltas_of, epsilon_of
from tfdp_rec.core.claim.events import DpEvent

_EPSILONS = np.linspace(0.0, 20.0, 801)
_COARSER = 16.0  # a wider grid of losses: many strengths are priced


class EventFamily:
    """Claims in the order of their strength: the event of a greater one has less noise.

    Args:
        event_at: Function from a strength above 0 to the event that is claimed.
    """

    tolerance = 2e-3  # each price takes seconds

    def __init__(self, event_at: Callable[[float], DpEvent]):
        self.event_at = event_at
        self._deltas = functools.cache(lambda strength: deltas_of(event_at(strength), _EPSILONS, _COARSER))

    def curve(self, strength: float) -> Callable[[float], float]:
        """The least x at which `power` is reached, in [0, 1]."""
        if strength == 0:
            return lambda power: power
        deltas, factors = self._deltas(strength), np.exp(_EPSILONS)

        def least(power: float) -> float:
            bounds = np.maximum((power - deltas) / factors, 1 - deltas - factors * (1 - power))
            return max(0.0, float(np.max(bounds)))

        return least

    def epsilon(self, strength: float, delta: float) -> float:
        """ε at δ of the claim."""
        return epsilon_of(self.event_at(strength), delta) if strength > 0 else 0.0
