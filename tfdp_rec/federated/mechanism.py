"""The client's mechanism: padding, clipping, noise of the right size, and a normalised private attention vector.

    mask_i ~ Bernoulli(p)                 which clicks are replaced by the anonymous news
    α  = softmax(u b^T / √(d))     computed by the model from the padded history
    clip   = α * min(1, θ / ‖α‖_2)
    noisy  = clip + scale * noise
    out_i  = f(noisy_i) / Σ_j f(noisy_j),   f = softplus in serving, ReLU in training

Everything after `noisy` is post-processing. What the mechanism promises, each with a test:

* for two histories of the same length that differ in one click, `out` is (ε, δ)-private;
* the distance of the clipped vectors never exceeds the sensitivity the noise is made for;
* a published calibration is never mistaken for a private one: `guarantee()` refuses it.

**The size of the noise.** The attention vector lies in K(θ) = {x * min(1, θ / ‖x‖_2) : x in the simplex of R^B}. The
largest distances inside it are the sensitivities (docs/privacy-privaterec.md, Lemma 1):

    L2:  √(2) * min(1, θ)
    L1:  min(1, θ * √(floor(B/2))) + min(1, θ * √(ceil(B/2)))

Padding each click with probability p turns an (ε0, δ0) mechanism on K(θ) into an (ε, δ) one with

    ε = log(1 + (1-p)(e^ε0 - 1)),   δ = (1-p) δ0            (Theorem 2)

so the noise is calibrated to ε0 = log(1 + (e^ε - 1)/(1-p)) and δ0 = δ/(1-p). `AnalyticGaussian` (default) is the
smallest σ whose exact δ(ε0) is δ0, for every ε0 > 0; `PureLaplace` has scale L1 / ε0 and δ = 0. The formulas of the
paper take θ for the sensitivity and do not give the privacy that they are asked for; they are in
`experiments.news.published`, and say so: `holds` is False.

Reference:
    Liu et al., "PrivateRec", 2022; Balle & Wang, "Improving the Gaussian Mechanism", ICML 2018.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize

from tfdp_rec.core.claim import profiles
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent, NonPrivateDpEvent, PaddedDpEvent, PureDpEvent
from tfdp_rec.core.claim.profiles import Number, deamplify, gaussian_delta
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated.grid import on_grid, whole_gaussian, whole_laplace

Activation = Literal["softplus", "relu"]
LEAST_CLIP = 1e-6  # below, rounding and underflow of what is clipped are no longer small beside the clip


# Calibration.


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

    def scale(self, epsilon: float, delta: float, padding: float, num_basis: int, clip_norm: float) -> float:
        """The noise scale for (`epsilon`, `delta`) after padding."""
        return self.sensitivity(num_basis, clip_norm) * self.unit(deamplify(epsilon, padding), delta / (1.0 - padding))

    @abc.abstractmethod
    def sensitivity(self, num_basis: int, clip_norm: float) -> float:
        """Largest distance that the noise is made for."""

    @abc.abstractmethod
    def unit(self, epsilon: float, delta: float) -> float:
        """Noise scale for sensitivity 1, without padding."""

    @abc.abstractmethod
    def steps(self, scale: float, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Noise in whole steps of a grid (`grid.py`), of which the scale is so many."""

    @abc.abstractmethod
    def event_without_padding(self, scale: float, num_basis: int, clip_norm: float) -> DpEvent:
        """What noise of this scale on the clipped attention really is, without padding."""


@dataclasses.dataclass(frozen=True)
class AnalyticGaussian(Calibration):
    """The smallest Gaussian noise that is (ε, δ)-private, for every ε.

    Reference:
        Balle & Wang, ICML 2018, Theorem 8.

    Example:
        >>> round(AnalyticGaussian().scale(10.0, 1e-5, 0.0, 5, 1.0), 4)
        0.7069
    """

    def steps(self, scale: float, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
        return whole_gaussian(scale, source, shape)

    def event_without_padding(self, scale: float, num_basis: int, clip_norm: float) -> DpEvent:
        return GaussianDpEvent(scale / l2_sensitivity(clip_norm))

    def sensitivity(self, num_basis: int, clip_norm: float) -> float:
        return l2_sensitivity(clip_norm)

    def unit(self, epsilon: float, delta: float) -> float:
        return unit_sigma(epsilon, delta)


@dataclasses.dataclass(frozen=True)
class PureLaplace(Calibration):
    """Laplace noise on every coordinate: pure ε, δ = 0.

    Example:
        >>> PureLaplace().scale(10.0, 0.0, 0.0, 5, 1.0)
        0.2
    """

    needs_delta = False

    def steps(self, scale: float, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
        return whole_laplace(scale, source, shape)

    def event_without_padding(self, scale: float, num_basis: int, clip_norm: float) -> DpEvent:
        return PureDpEvent(l1_sensitivity(num_basis, clip_norm) / scale)

    def sensitivity(self, num_basis: int, clip_norm: float) -> float:
        return l1_sensitivity(num_basis, clip_norm)

    def unit(self, epsilon: float, delta: float) -> float:
        return 1.0 / epsilon


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


# The release.


def clip(attention: ArrayLike, clip_norm: float) -> NDArray[np.float64]:
    """Scales attention vectors (last axis) down to sum at most 1 and L2 norm at most `clip_norm`."""
    # The sensitivity rests on a sum of at most 1, so it is not left to the model's softmax. Nor is finiteness: a vector
    # that is not finite, or negative somewhere, counts as uniform, so that no click can decide whether there is an
    # answer.
    values = np.asarray(attention, dtype=np.float64)
    sound = (np.isfinite(values) & (values >= 0)).all(axis=-1, keepdims=True)
    values = np.where(sound, values, 1.0 / values.shape[-1])
    values = values / np.maximum(values.sum(axis=-1, keepdims=True), 1.0)
    norms = np.linalg.norm(values, axis=-1, keepdims=True)
    return values * np.minimum(1.0, clip_norm / np.maximum(norms, np.finfo(float).tiny))


def normalise(noisy: ArrayLike, activation: Activation) -> NDArray[np.float64]:
    """Makes noisy attention non-negative with sum 1 (post-processing; uniform when ReLU leaves nothing)."""
    values = np.asarray(noisy, dtype=np.float64)
    positive = np.maximum(values, 0.0) if activation == "relu" else np.logaddexp(0.0, values)
    total = positive.sum(axis=-1, keepdims=True)
    uniform = np.full_like(positive, 1.0 / positive.shape[-1])
    return np.where(total > 0, positive / np.where(total > 0, total, 1.0), uniform)


@dataclasses.dataclass(frozen=True)
class AttentionMechanism:
    """Private release of one attention vector.

    Args:
        num_basis: Length B of the attention vector, at least 2.
        epsilon: Privacy of one release, for one clicked item of the history. `inf` turns the noise off.
        delta: Failure probability of one release; 0 for Laplace noise.
        clip_norm: The clip θ, at least 1e-6. At 1 (default) nothing is cut, as attention sums to 1.
        padding: Probability p with which each click is replaced by the anonymous news.
        activation: "softplus" (serving) or "relu" (training).
        calibration: Kind and size of the noise.

    Raises:
        ValueError: On a value out of range, or a δ that the calibration cannot use.

    Reference:
        Liu et al., "PrivateRec", 2022, Algorithm 2; corrected as docs/privacy-privaterec.md says.

    Example:
        >>> mechanism = AttentionMechanism(num_basis=3, epsilon=10.0, delta=1e-5, padding=0.2)
        >>> float(mechanism.release([0.7, 0.2, 0.1]).sum().round(6))
        1.0
    """

    num_basis: int
    epsilon: float
    delta: float = 1e-5
    clip_norm: float = 1.0
    padding: float = 0.0
    activation: Activation = "softplus"
    calibration: Calibration = AnalyticGaussian()

    def __post_init__(self) -> None:
        if not (isinstance(self.num_basis, int) and self.num_basis >= 2):
            raise ValueError(f"num_basis must be a whole number, at least 2, got {self.num_basis}.")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}.")
        if not (np.isfinite(self.clip_norm) and self.clip_norm >= LEAST_CLIP):
            raise ValueError(f"clip_norm must be finite and at least {LEAST_CLIP:g}, got {self.clip_norm}.")
        if not 0 <= self.padding < 1:
            raise ValueError(f"padding must be in [0, 1), got {self.padding}.")
        if self.activation not in ("softplus", "relu"):
            raise ValueError(f"activation must be 'softplus' or 'relu', got {self.activation!r}.")
        self._check_delta()

    def _check_delta(self) -> None:
        if self.calibration.needs_delta and not 0 < self.delta < 1 - self.padding:
            raise ValueError(
                f"delta must be in (0, 1 - padding) for Gaussian noise, got {self.delta}; PureLaplace needs none."
            )
        if not self.calibration.needs_delta and self.delta != 0:
            raise ValueError(f"delta must be 0 for Laplace noise, got {self.delta}.")

    @property
    def noise_scale(self) -> float:
        """Standard deviation (Gaussian) or scale (Laplace) of the noise on each coordinate."""
        if np.isinf(self.epsilon):
            return 0.0
        return self.calibration.scale(self.epsilon, self.delta, self.padding, self.num_basis, self.clip_norm)

    def padding_mask(
        self, shape: tuple[int, ...], source: words.WordSource = words.os_entropy
    ) -> NDArray[np.bool_]:
        """Which clicks to replace by the anonymous news. Every position is drawn, clicks or not."""
        return words.bernoulli(source, self.padding, shape)

    def noise(self, shape: tuple[int, ...], source: words.WordSource = words.os_entropy) -> NDArray[np.float64]:
        """Noise of the right scale, on its grid (zeros when ε is infinite)."""
        scale = self.noise_scale
        if not scale:
            return np.zeros(shape)
        return words.step_of(scale) * self.calibration.steps(scale / words.step_of(scale), source, shape)

    def release(self, attention: ArrayLike, source: words.WordSource = words.os_entropy) -> NDArray[np.float64]:
        """Clip, add noise, normalise.

        Args:
            attention: Attention vector of the *padded* history, shape [..., num_basis].
            source: Source of the random words.

        Raises:
            ValueError: If the attention has another width.
        """
        shape = np.shape(attention)
        return self.finish(attention, self.noise(shape, source))

    def finish(self, attention: ArrayLike, noise: ArrayLike) -> NDArray[np.float64]:
        """`release` with noise already drawn by `noise`.

        Args:
            attention: Attention vectors, shape [..., num_basis].
            noise: Noise of the mechanism's scale, in the same shape.

        Raises:
            ValueError: If the attention has another width.
        """
        clipped = clip(attention, self.clip_norm)
        if clipped.shape[-1] != self.num_basis:
            raise ValueError(f"attention must have {self.num_basis} weights, got {clipped.shape[-1]}.")
        if self.noise_scale:
            clipped = on_grid(clipped, words.step_of(self.noise_scale))
        return normalise(clipped + np.asarray(noise), self.activation)

    @property
    def event(self) -> DpEvent:
        """What one release really costs, whatever the calibration claims."""
        scale = self.noise_scale
        if scale == 0:
            return NonPrivateDpEvent()
        inner = self.calibration.event_without_padding(scale, self.num_basis, self.clip_norm)
        return PaddedDpEvent(inner, self.padding) if self.padding else inner

    def delta_at(self, epsilon: Number) -> Number:
        """The true δ(`epsilon`) of one release, whatever the calibration claims.

        Example:
            >>> AttentionMechanism(3, 10.0, 1e-5).delta_at(10.0) <= 1e-5
            True
        """
        if self.noise_scale == 0:
            raise ValueError("epsilon is infinite: without noise no delta below 1 holds.")
        return profiles.delta_of(self.event, epsilon)

    def guarantee(self) -> tuple[float, float]:
        """(ε, δ) of one release.

        Raises:
            ValueError: For a published calibration, whose claim does not hold.
        """
        if not self.calibration.holds:
            raise ValueError(
                f"{type(self.calibration).__name__} does not give the privacy it claims; "
                "use AnalyticGaussian or PureLaplace, or read delta_at() for what it gives."
            )
        return self.epsilon, self.delta

    def settings(self) -> dict[str, Any]:
        """The public settings as plain values, for bundles and ledgers."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"calibration": type(self.calibration).__name__}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> AttentionMechanism:
        """The mechanism whose `settings()` these are.

        Raises:
            ValueError: If the calibration is unknown.
        """
        name = settings["calibration"]
        known = {kind.__name__: kind for kind in CALIBRATIONS}
        if name not in known:
            raise ValueError(f"calibration must be one of {sorted(known)}, got {name!r}.")
        return cls(**(settings | {"calibration": known[name]()}))


CALIBRATIONS: tuple[type[Calibration], ...] = (AnalyticGaussian, PureLaplace)
