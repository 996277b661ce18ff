"""Exposure: how far a planted secret stands out from secrets that were never planted.

Give the model's loss on a canary that was trained on, and on n references drawn like it that were not.
With rank = 1 + (references with a lower loss),

    exposure by interpolation = log₂ n − log₂ rank.

It cannot exceed log₂ n, reached by every canary better than all references. To tell those apart, fit a
skew-normal distribution with cumulative distribution F to the reference losses and take

    exposure by extrapolation = −log₂ F(loss of the canary).

A secret that left no trace ranks uniformly: its exposure is 1 in the median. References tied with the
canary count one half each, so a model that gives every sequence the same loss shows that same 1 rather
than the greatest or the least exposure there is.

Reference:
    Carlini, Liu, Erlingsson, Kos and Song, The Secret Sharer, USENIX Security 2019, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Losses = Mapping[int, ArrayLike]
Floats = NDArray[np.float64]

_LEFT_TAIL = -3.0  # standard units; left of it the closed form cancels and the integral is taken instead


@overload
def exposure_interpolation(canary_losses: Losses, reference_losses: ArrayLike) -> dict[int, Floats]: ...
@overload
def exposure_interpolation(canary_losses: ArrayLike, reference_losses: ArrayLike) -> Floats: ...
def exposure_interpolation(canary_losses: Any, reference_losses: ArrayLike) -> Any:
    """log₂ n − log₂ rank of each canary among the references.

    Args:
        canary_losses: Losses of the canaries, or a dict from repeat count to such a list.
        reference_losses: Losses of sequences that were never trained on, [n].

    Returns:
        Exposures in the order and the structure of `canary_losses`.

    Raises:
        ValueError: no references, or a loss that is not finite.

    Example:
        >>> exposure_interpolation([0.5, 2.5, 9.0], [1.0, 2.0, 3.0, 4.0]).round(3).tolist()
        [2.0, 0.415, -0.322]
    """
    references = np.sort(_losses("reference_losses", reference_losses))
    return _map_losses(canary_losses, lambda losses: np.log2(references.size) - np.log2(_ranks(losses, references)))


@overload
def exposure_extrapolation(canary_losses: Losses, reference_losses: ArrayLike) -> dict[int, Floats]: ...
@overload
def exposure_extrapolation(canary_losses: ArrayLike, reference_losses: ArrayLike) -> Floats: ...
def exposure_extrapolation(canary_losses: Any, reference_losses: ArrayLike) -> Any:
    """−log₂ of the skew-normal cumulative distribution fitted to the references.

    Not bounded by the number of references, but only as good as the fit: `skew_normal_fit_error` says
    how far the fit is from the references.

    Args:
        canary_losses: Losses of the canaries, or a dict from repeat count to such a list.
        reference_losses: Losses of sequences that were never trained on, [n].

    Returns:
        Exposures in the order and the structure of `canary_losses`.

    Raises:
        ValueError: fewer than 8 references, references without spread, or a loss that is not finite.

    Example:
        >>> references = np.random.default_rng(0).normal(10.0, 1.0, size=4096)
        >>> far, near = exposure_extrapolation([2.0, 10.0], references)
        >>> bool(far > 30) and bool(0.8 < near < 1.2)
        True
    """
    shape, location, scale = _fit(reference_losses)

    def expose(losses: Floats) -> Floats:
        return -skew_normal_log_cdf((losses - location) / scale, shape) / np.log(2)

    return _map_losses(canary_losses, expose)


def skew_normal_fit_error(reference_losses: ArrayLike) -> float:
    """Kolmogorov–Smirnov distance between the references and the skew-normal fitted to them.

    Args:
        reference_losses: Losses of sequences that were never trained on, [n].

    Raises:
        ValueError: as `exposure_extrapolation`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> skew_normal_fit_error(rng.normal(size=4096)) < 0.03
        True
        >>> skew_normal_fit_error(rng.exponential(size=4096) ** 3) > 0.1
        True
    """
    shape, location, scale = _fit(reference_losses)
    scaled = (_losses("reference_losses", reference_losses) - location) / scale
    return float(stats.ks_1samp(scaled, lambda z: np.exp(skew_normal_log_cdf(z, shape))).statistic)


def skew_normal_log_cdf(z: ArrayLike, shape: float) -> Floats:
    """ln of the standard skew-normal cumulative distribution, accurate far into the left tail."""
    z = np.asarray(z, dtype=np.float64)
    if shape == 0:
        return np.asarray(special.log_ndtr(z))
    # The closed form Φ(z) − 2 T(z, a) (Owen's T) cancels in the left tail, while the interesting canaries are exactly
    # those far to the left. There ∫ 2 φ(z − s) Φ(a (z − s)) ds over s > 0 is taken instead.
    closed = special.ndtr(z) - 2 * special.owens_t(z, shape)
    tail = (z < _LEFT_TAIL) | (closed < 1e-4)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(tail, _log_tail(np.where(tail, z, -1.0), shape), np.log(closed))


def _log_tail(z: Floats, shape: float) -> Floats:
    def log_density(x: Floats) -> Floats:
        return np.log(2 / np.sqrt(2 * np.pi)) - x**2 / 2 + special.log_ndtr(shape * x)

    u = shape * z
    mills = np.exp(-(u**2) / 2 - 0.5 * np.log(2 * np.pi) - special.log_ndtr(u))  # φ(u) / Φ(u)
    slope = np.maximum(-z + shape * mills, 1e-3)  # the density is log-concave: its slope at z bounds the integral
    reach = np.minimum(40 / slope, 40.0)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    steps = (nodes + 1) / 2 * reach[..., None]
    heights = log_density(z[..., None] - steps) + np.log(weights / 2 * reach[..., None])
    return np.asarray(special.logsumexp(heights, axis=-1))


def _fit(reference_losses: ArrayLike) -> tuple[float, float, float]:
    references = _losses("reference_losses", reference_losses)
    if references.size < 8:
        raise ValueError(f"A skew-normal fit needs at least 8 reference losses, got {references.size}.")
    centre, spread = float(np.mean(references)), float(np.std(references))
    if spread <= 1e-12 * max(1.0, abs(centre)):
        raise ValueError("The reference losses are all equal; extrapolation needs a spread to fit.")
    shape, location, scale = stats.skewnorm.fit((references - centre) / spread)
    return float(shape), centre + spread * float(location), spread * float(scale)


def _ranks(losses: Floats, ordered: Floats) -> Floats:
    better = np.searchsorted(ordered, losses, side="left")
    ties = np.searchsorted(ordered, losses, side="right") - better
    return 1 + better + ties / 2


def _map_losses(canary_losses: Any, function: Any) -> Any:
    if isinstance(canary_losses, Mapping):
        return {key: function(_losses("canary_losses", losses)) for key, losses in canary_losses.items()}
    return function(_losses("canary_losses", canary_losses))


def _losses(name: str, values: ArrayLike) -> Floats:
    losses = np.asarray(values, dtype=np.float64)
    if losses.ndim != 1 or losses.size == 0:
        raise ValueError(f"{name} must be a list of at least one loss, got shape {losses.shape}.")
    if not np.all(np.isfinite(losses)):
        raise ValueError(f"{name} must be finite, got {losses[~np.isfinite(losses)][0]}.")
    return losses
