"""How much noise the client's attention vector needs.

The attention vector lies in K(θ) = {x * min(1, θ / ‖x‖_2) : x in the simplex of R^B}. The largest
distances inside it are the sensitivities (docs/privacy-privaterec.md, Lemma 1):

    L2:  √(2) * min(1, θ)
    L1:  min(1, θ * √(floor(B/2))) + min(1, θ * √(ceil(B/2)))

Padding each click with probability p turns an (ε0, δ0) mechanism on K(θ) into an (ε, δ) one
with

    ε = log(1 + (1-p)(e^ε0 - 1)),   δ = (1-p) δ0            (Theorem 2)

so the noise is calibrated to ε0 = log(1 + (e^ε - 1)/(1-p)) and δ0 = δ/(1-p).

Two calibrations share one interface:

* `AnalyticGaussian` (default): the smallest σ whose exact δ(ε0) is δ0, for every ε0 > 0.
* `PureLaplace`: scale L1 / ε0, δ = 0.

The formulas of the paper take θ for the sensitivity and do not give the privacy that they are asked for; they are in
`experiments.news.published`. A calibration of that kind says so: `holds` is False, and `delta_at` says what it gives.

Reference:
    Liu et al., "PrivateRec", 2022; Balle & Wang, "Improving the Gaussian Mechanism", ICML 2018.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from numpy.typing import NDArray
from scipy import optimize

from tfdp_rec.noise import words
from tfdp_rec.pricing import profiles
from tfdp_rec.pricing.events import PaddedDpEvent, PureDpEvent
from tfdp_rec.pricing.profiles import Number, deamplify, gaussian_delta


def l2_sensitivity(clip_norm: float) -> float:
    """Largest L2 distance between two clipped attention vectors."""
    return math.sqrt(2.0) * min(1.0, clip_norm)


def l1_sensitivity(num_basis: int, clip_norm: float) -> float:
    """Largest L1 distance between two clipped attention vectors."""
    small, large = num_basis // 2, num_basis - num_basis // 2
    return min(1.0, clip_norm * math.sqrt(small)) + min(1.0, clip_norm * math.sqrt(large))


@dataclasses.dataclass(frozen=True)
class Calibration(abc.ABC):
    """The noise of the attention vector: how wide, how drawn, and what it really gives."""

    holds = True
    """Whether `scale` gives the privacy it is asked for."""

    needs_delta = True
    """Whether a positive delta is part of the guarantee."""

    @abc.abstractmethod
    def scale(self, epsilon: float, delta: float, padding: float, num_basis: int, clip_norm: float) -> float:
        """The noise scale for (`epsilon`, `delta`) after padding."""

    @abc.abstractmethod
    def draw(self, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Noise of scale 1."""

    @abc.abstractmethod
    def unpadded(self, scale: float, num_basis: int, clip_norm: float) -> DpEvent:
        """What noise of this scale on the clipped attention really is, without padding."""

    def event(self, scale: float, padding: float, num_basis: int, clip_norm: float) -> DpEvent:
        """What one release really is, padding included."""
        inner = self.unpadded(scale, num_basis, clip_norm)
        return PaddedDpEvent(inner, padding) if padding else inner

    def delta_at(self, epsilon: Number, scale: float, padding: float, num_basis: int, clip_norm: float) -> Number:
        """The true δ(`epsilon`) of noise of this scale, padding included, for any real `epsilon`."""
        return profiles.delta_of(self.event(scale, padding, num_basis, clip_norm), epsilon)


@dataclasses.dataclass(frozen=True)
class AnalyticGaussian(Calibration):
    """The smallest Gaussian noise that is (ε, δ)-private, for every ε.

    Reference:
        Balle & Wang, ICML 2018, Theorem 8.

    Example:
        >>> round(AnalyticGaussian().scale(10.0, 1e-5, 0.0, 5, 1.0), 4)
        0.7069
    """

    def draw(self, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
        return words.gaussian(source, shape)

    def unpadded(self, scale: float, num_basis: int, clip_norm: float) -> DpEvent:
        return GaussianDpEvent(scale / l2_sensitivity(clip_norm))

    def scale(self, epsilon: float, delta: float, padding: float, num_basis: int, clip_norm: float) -> float:
        sensitivity = l2_sensitivity(clip_norm)
        return sensitivity * unit_sigma(deamplify(epsilon, padding), delta / (1.0 - padding))


@dataclasses.dataclass(frozen=True)
class PureLaplace(Calibration):
    """Laplace noise on every coordinate: pure ε, δ = 0.

    Example:
        >>> PureLaplace().scale(10.0, 0.0, 0.0, 5, 1.0)
        0.2
    """

    needs_delta = False

    def draw(self, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
        return words.laplace(source, shape)

    def unpadded(self, scale: float, num_basis: int, clip_norm: float) -> DpEvent:
        return PureDpEvent(l1_sensitivity(num_basis, clip_norm) / scale)

    def scale(self, epsilon: float, delta: float, padding: float, num_basis: int, clip_norm: float) -> float:
        return l1_sensitivity(num_basis, clip_norm) / deamplify(epsilon, padding)


def unit_sigma(epsilon: float, delta: float) -> float:
    """The smallest σ with `gaussian_delta(epsilon, 1, σ)` at most δ."""
    if delta >= gaussian_delta(epsilon, 1.0, 1e-3):
        return 1e-3

    def excess(log_sigma: float) -> float:
        return math.log(max(gaussian_delta(epsilon, 1.0, math.exp(log_sigma)), 1e-300)) - math.log(delta)

    high = 0.0
    while excess(high) > 0:
        high += 2.0
    root = float(optimize.brentq(excess, math.log(1e-3), high, xtol=1e-12))
    return math.exp(root) * (1.0 + 1e-9)
