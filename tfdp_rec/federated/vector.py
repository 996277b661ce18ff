"""DP-FedRec's mechanisms: clip a whole vector to norm C and add noise of sensitivity 2C.

    Gaussian   L2 norm, N(0, (2C z)^2) on every coordinate       (ε, δ)
    Laplace    L1 norm, Lap(2C / ε) on every coordinate    (ε, 0); the paper's tables use this one

Used on local gradients in training and on user embeddings in serving ("VDP"). The noise is the same on each of
the d coordinates while the clip bounds all of them together, so a coordinate's share of the signal shrinks with d
(Laplace) or its root (Gaussian). That is what PrivateRec avoids.

Data and noise meet as whole numbers of steps of a grid that is public, g = 2^(⌊log₂ scale⌋ − 20). A clipped vector is
rounded to it towards zero, which makes no norm larger, so that 2C bounds the distance still. Then

    Gaussian   ⌊noise / g + ½⌋ is added: as x / g is whole, the sum is a rounding of the Gaussian mechanism's output
    Laplace    k is added, Pr[k] ∝ exp(−|k + ½| g / scale): the ratio of two vectors' chances is at most e^ε

What comes after, such as the rounding to float32, knows the sum alone. In floats, noise / g reaches every step in
some 2³⁰ ways, and each Pr[k] is right to 2⁻³⁸ of itself. Of the Laplace law the part beyond 45 scales is cut off, which
has a chance of 2⁻⁶⁴ (docs/privacy-privaterec.md, section 5, for what this adds).

Reference:
    Liu et al., "PrivateRec", 2022, Section 4; docs/privacy-privaterec.md, section 5.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.federated.mechanism import LEAST_CLIP, unit_sigma
from tfdp_rec.noise import words
from tfdp_rec.pricing.events import PureDpEvent
from tfdp_rec.sums.fixed_point import without_gaps

_GRID_BITS = 20  # from the scale of the noise down to a step of its grid
_DIGIT = 2**10
_ROUNDING = 1.0 + 1e-9  # of norms in float64, so that a clipped vector is no longer than C


class ClippedVector(abc.ABC):
    """What both mechanisms share: any two vectors of norm at most C are 2C apart at most."""

    epsilon: float
    order: ClassVar[int]
    """Which norm is clipped: 1 or 2."""

    def __post_init__(self) -> None:
        if not (self.clip >= LEAST_CLIP and math.isfinite(self.clip)):
            raise ValueError(
                f"l{self.order}_norm_clip must be finite and at least {LEAST_CLIP:g}, got {self.clip}: smaller vectors "
                "vanish where their norm is computed."
            )
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}.")

    @property
    def clip(self) -> float:
        """The clip C."""
        return float(getattr(self, f"l{self.order}_norm_clip"))

    @property
    @abc.abstractmethod
    def scale(self) -> float:
        """Standard deviation (Gaussian) or scale (Laplace) of the noise on every coordinate."""

    @property
    def event(self) -> DpEvent:
        """What one release costs."""
        return NonPrivateDpEvent() if self.noiseless else self._noised()

    @abc.abstractmethod
    def _noised(self) -> DpEvent: ...

    @property
    def grid(self) -> float:
        """The step of the grid on which data and noise meet; 0, which stands for no grid, without noise."""
        return 0.0 if self.noiseless else 2.0 ** (math.frexp(self.scale)[1] - 1 - _GRID_BITS)

    @abc.abstractmethod
    def _steps(self, count: int, shape: tuple[int, ...], source: words.WordSource) -> NDArray[np.float64]:
        """The noise in the sum of `count` releases, in whole steps of the grid."""

    def sum_noise(self, count: int, shape: tuple[int, ...], source: words.WordSource) -> NDArray[np.float64]:
        """The noise in the sum of `count` releases: each has noise of its own. What it is added to is on the grid."""
        return np.zeros(shape) if self.noiseless else self.grid * self._steps(count, shape, source)

    @property
    def noiseless(self) -> bool:
        """Whether nothing is clipped or added."""
        return math.isinf(self.epsilon)

    def release(self, vectors: ArrayLike, source: words.WordSource = words.os_entropy) -> NDArray[np.float64]:
        """Clips and noises vectors (last axis), on the grid. One that is not finite sends noise alone."""
        values = np.asarray(vectors, dtype=np.float64)
        if self.noiseless:
            return values
        norms = np.linalg.norm(values, ord=self.order, axis=-1, keepdims=True)
        finite = np.isfinite(norms)
        weights = np.minimum(1.0, self.clip / np.maximum(norms * _ROUNDING, np.finfo(float).tiny))
        clipped = np.where(finite, values * np.where(finite, weights, 0.0), 0.0)
        return self.grid * np.trunc(clipped / self.grid) + self.sum_noise(1, values.shape, source)


@dataclasses.dataclass(frozen=True)
class VectorMechanism(ClippedVector):
    """Clip to an L2 norm and add Gaussian noise.

    Args:
        l2_norm_clip: The clip C, at least 1e-6.
        epsilon: Privacy of one release; `inf` neither clips nor adds noise.
        delta: Failure probability of one release.

    Raises:
        ValueError: On a value out of range.

    Example:
        >>> round(VectorMechanism(0.5, 10.0, 1e-5).scale, 3)
        0.5
    """

    l2_norm_clip: float
    epsilon: float
    delta: float = 1e-5

    order: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta}.")

    @property
    def scale(self) -> float:
        """Standard deviation of the noise on every coordinate."""
        if self.noiseless:
            return 0.0
        return 2.0 * self.l2_norm_clip * unit_sigma(self.epsilon, self.delta)

    def _noised(self) -> DpEvent:
        return GaussianDpEvent(self.scale / (2.0 * self.l2_norm_clip))

    def _steps(self, count: int, shape: tuple[int, ...], source: words.WordSource) -> NDArray[np.float64]:
        # The sum of Gaussians is a Gaussian, drawn at once.
        return np.floor(math.sqrt(count) * self.scale / self.grid * without_gaps(source, shape) + 0.5)


@dataclasses.dataclass(frozen=True)
class PureVectorMechanism(ClippedVector):
    """Clip to an L1 norm and add Laplace noise: δ = 0.

    Args:
        l1_norm_clip: The clip C, at least 1e-6.
        epsilon: Privacy of one release; `inf` neither clips nor adds noise.

    Raises:
        ValueError: On a value out of range.

    Example:
        >>> PureVectorMechanism(0.5, 10.0).scale
        0.1
    """

    l1_norm_clip: float
    epsilon: float

    order: ClassVar[int] = 1

    @property
    def scale(self) -> float:
        """Scale of the Laplace noise on every coordinate."""
        return 2.0 * self.l1_norm_clip / self.epsilon

    def _noised(self) -> DpEvent:
        return PureDpEvent(self.epsilon)

    def _steps(self, count: int, shape: tuple[int, ...], source: words.WordSource) -> NDArray[np.float64]:
        total = np.zeros(shape)
        for _ in range(count):  # a sum of Laplace variables is none
            total += whole_laplace(self.scale / self.grid, source, shape)
        return total


def whole_laplace(scale: float, source: words.WordSource, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Whole numbers k with Pr[k] ∝ exp(-|k + ½| / scale), for scales from 2^20 to 2^21."""
    # k or -1 - k is geometric. Its two lowest digits to the base of 2^10 and what is left are independent, so that each
    # can be drawn by itself: a uniform of 53 bits alone would have gaps where k is large.
    first, second, third, fourth = source(4 * math.prod(shape)).reshape(4, *shape)
    low = _digit(second, scale) + _DIGIT * _digit(third, scale / _DIGIT)
    size = _DIGIT**2 * np.floor(_exponential(first, fourth) * (scale / _DIGIT**2)) + low
    return np.where(first & np.uint64(1), size, -1.0 - size)


def _digit(random: NDArray[np.uint64], scale: float) -> NDArray[np.float64]:
    """The lowest digit of a geometric variable."""
    cumulative = np.expm1(-np.arange(1, _DIGIT + 1) / scale) / np.expm1(-_DIGIT / scale)
    uniform = (random >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.searchsorted(cumulative, uniform, side="right").astype(np.float64)


def _exponential(mantissa: NDArray[np.uint64], zeros: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Exponential variables of scale 1: -log of m 2^-e, m in (1/2, 1] of 52 bits, e zeros at the end of a word."""
    exponent = np.where(zeros, np.frexp((zeros & (~zeros + np.uint64(1))).astype(np.float64))[1] - 1, 64)
    return exponent * math.log(2.0) - np.log(0.5 + ((mantissa >> np.uint64(12)).astype(np.float64) + 1.0) * 2.0**-53)
