"""DP-FedRec's mechanisms: clip a whole vector to norm C and add noise of sensitivity 2C.

    Gaussian   L2 norm, N(0, (2C z)^2) on every coordinate       (ε, δ)
    Laplace    L1 norm, Lap(2C / ε) on every coordinate    (ε, 0); the paper's tables use this one

Used on local gradients in training and on user embeddings in serving ("VDP"). The noise is the same on each of
the d coordinates while the clip bounds all of them together, so a coordinate's share of the signal shrinks with d
(Laplace) or its root (Gaussian). That is what PrivateRec avoids.

Data and noise meet on a public grid: `grid.py`.

Reference:
    Liu et al., "PrivateRec", 2022, Section 4; docs/privacy-privaterec.md, section 5.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent, NonPrivateDpEvent, PureDpEvent
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated.grid import on_grid, whole_gaussian, whole_laplace
from tfdp_rec.federated.mechanism import LEAST_CLIP, unit_sigma

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
        return NonPrivateDpEvent() if self.noiseless else self._event_of_noise()

    @abc.abstractmethod
    def _event_of_noise(self) -> DpEvent: ...

    @property
    def grid(self) -> float:
        """The step of the grid on which data and noise meet; 0, which stands for no grid, without noise."""
        return 0.0 if self.noiseless else words.step_of(self.scale)

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
        return on_grid(clipped, self.grid) + self.sum_noise(1, values.shape, source)


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

    def _event_of_noise(self) -> DpEvent:
        return GaussianDpEvent(self.scale / (2.0 * self.l2_norm_clip))

    def _steps(self, count: int, shape: tuple[int, ...], source: words.WordSource) -> NDArray[np.float64]:
        # The sum of Gaussians is a Gaussian, drawn at once.
        return whole_gaussian(math.sqrt(count) * self.scale / self.grid, source, shape)


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

    def _event_of_noise(self) -> DpEvent:
        return PureDpEvent(self.epsilon)

    def _steps(self, count: int, shape: tuple[int, ...], source: words.WordSource) -> NDArray[np.float64]:
        total = np.zeros(shape)
        for _ in range(count):  # a sum of Laplace variables is none
            total += whole_laplace(self.scale / self.grid, source, shape)
        return total
