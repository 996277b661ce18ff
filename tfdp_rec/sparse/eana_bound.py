"""EANA's data-dependent Rényi bound (EANA paper, section 3.1).

EANA noises only the rows a batch touches, so it has no (ε, δ) for arbitrary neighbouring data sets.
For a *linear* loss, *one* pass and row counts that are *known beforehand*, the final weight of
coordinate j is a Gaussian whose variance counts how often the coordinate was touched. With one more
example x the two releases are, coordinate by coordinate and up to the learning rate,

    narrow = N(0, C σ²)   and   wide = N(x, (C + 1) σ²),   C = touches without the example,

and the Rényi divergences of order α > 1 between them are (van Erven and Harremoës 2014, eq. 10)

    D_α(wide ‖ narrow) = α x² / (2 (C + 1 − α) σ²) − ½ ln(1 + 1/C) + ln[C / (C + 1 − α)] / (2 (α − 1))
    D_α(narrow ‖ wide) = α x² / (2 (C + α) σ²)     + ½ ln(1 + 1/C) + ln[(C + 1) / (C + α)] / (2 (α − 1)).

The first is finite only for α < C + 1, is never below the second, and falls with C (the tests check
both on a grid). So the worst case under Theorem 3.1's conditions (every count ≥ C₀, at most d₀
coordinates touched, ‖x‖ ≤ L) is the first with C = C₀, summed over d₀ coordinates, and it is attained:

    ε(α) = α L² / (2 (C₀ + 1 − α) σ²) + d₀ · { −½ ln(1 + 1/C₀) + ln[C₀ / (C₀ + 1 − α)] / (2 (α − 1)) }.

The paper prints the two directions of (3) and (7) exchanged and mixes their logarithms: its (1), (8) and
(9) carry +½ ln(1 + 1/C) and ln[(C + 1)/(C + 1 − α)], which is a true bound but larger by
(2α − 1)/(2(α − 1)) · ln(1 + 1/C) a coordinate, and its (7) is negative at x = 0, which no divergence is.
This file returns the exact divergences; `eana_rdp_published` keeps the printed (1) for comparison.

Limits: the bound does not hold for a neural network's loss, for several passes, or against an adversary
that sees the steps, and a row that no other example touches has none. The count must be the number of
*noise draws* of a row: with batches that is the number of batches that read it, not of examples.

Reference:
    Berlowitz et al., EANA: Reducing Privacy Risk on Large-scale Recommendation Models, RecSys 2022.
    Canonne, Kamath and Steinke 2020, Proposition 12, for the conversion to ε.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tfdp_rec.core.claim.composition import epsilon_of_divergences

_DENSE_ORDERS = 512  # every integer up to here, then a geometric grid: any subset of orders is valid


def eana_rdp(
    order: int, *, min_count: int, max_nonzero: int, l2_norm_clip: float, noise_stddev: float
) -> float:
    """Theorem 3.1: the worst Rényi divergence between EANA on two neighbouring data sets.

    Holds for a linear loss, one pass, and data sets in which every coordinate is touched at least
    `min_count` times and no example touches more than `max_nonzero` coordinates.

    Args:
        order: α, an integer with 1 < α ≤ `min_count`.
        min_count: C₀, a public lower bound on the noise draws of every coordinate.
        max_nonzero: d₀, the number of coordinates (rows times width) that one example can touch.
        l2_norm_clip: L, the bound on an example's gradient norm.
        noise_stddev: σ of one noise draw on the *sum* of clipped gradients, that is noise
            multiplier times clipping norm.

    Raises:
        TypeError: A count or the order is not an integer.
        ValueError: A condition of the theorem does not hold.

    Example:
        >>> bound = eana_rdp(4, min_count=100, max_nonzero=10, l2_norm_clip=1.0, noise_stddev=0.5)
        >>> printed = eana_rdp_published(4, min_count=100, max_nonzero=10, l2_norm_clip=1.0, noise_stddev=0.5)
        >>> round(bound, 4), round(printed, 4)
        (0.0835, 0.1996)
    """
    _check_order(order, min_count)
    _check_scales(max_nonzero, l2_norm_clip, noise_stddev)
    return float(_divergence(order, float(min_count), l2_norm_clip, noise_stddev, max_nonzero))


def eana_rdp_published(
    order: int, *, min_count: int, max_nonzero: int, l2_norm_clip: float, noise_stddev: float
) -> float:
    """Theorem 3.1 as the paper prints it, inequality (1): valid, but larger than `eana_rdp`.

    Arguments as `eana_rdp`.

    Example:
        >>> sizes = dict(min_count=50, max_nonzero=10, l2_norm_clip=1.0, noise_stddev=1.0)
        >>> eana_rdp_published(2, **sizes) > eana_rdp(2, **sizes)
        True
    """
    sizes = {"min_count": min_count, "max_nonzero": max_nonzero}
    sharp = eana_rdp(order, **sizes, l2_norm_clip=l2_norm_clip, noise_stddev=noise_stddev)
    excess = (2 * order - 1) / (2 * (order - 1)) * math.log1p(1 / min_count)
    return sharp + max_nonzero * excess


def eana_rdp_coordinate(order: int, *, count: int, l2_norm_clip: float, noise_stddev: float) -> float:
    """The share of one coordinate with its own `count` of noise draws: the paper's (8), exact.

    Composing these over the coordinates an example touches pays for L² once per coordinate; use it
    for coordinates with large counts only, or `eana_rdp_instance` when the gradient is known. Other
    arguments as `eana_rdp`: `order`, `l2_norm_clip` and `noise_stddev`.

    Example:
        >>> norms = {"l2_norm_clip": 1.0, "noise_stddev": 1.0}
        >>> eana_rdp_coordinate(2, count=500, **norms) < eana_rdp_coordinate(2, count=5, **norms)
        True
    """
    return eana_rdp(order, min_count=count, max_nonzero=1, l2_norm_clip=l2_norm_clip, noise_stddev=noise_stddev)


def eana_rdp_instance(
    order: int, *, row_counts: ArrayLike, row_norms: ArrayLike, noise_stddev: float, width: int = 1
) -> float:
    """The divergence for one given example on one given data set: the paper's (9), exact.

    This number depends on private data. It is a diagnosis for the owner of the data, not a guarantee to
    publish.

    Args:
        order: α, an integer with 1 < α ≤ every count.
        row_counts: Noise draws of each row that the example touches, *without* the example, [rows].
        row_norms: Norm of the example's clipped gradient in each of these rows, [rows].
        noise_stddev: σ of one noise draw.
        width: Number of coordinates in a row; with 1 every row is one coordinate, as in the paper.

    Raises:
        TypeError: A count or the order is not an integer.
        ValueError: The shapes differ, a norm is negative, or a row was touched by too few others for
            a bound to exist.

    Example:
        >>> popular = eana_rdp_instance(2, row_counts=[900, 800], row_norms=[0.8, 0.6], noise_stddev=1.0)
        >>> rare = eana_rdp_instance(2, row_counts=[900, 2], row_norms=[0.8, 0.6], noise_stddev=1.0)
        >>> popular < rare
        True
    """
    counts, norms = _check_rows(row_counts, row_norms)
    _check_order(order, int(counts.min()))
    _check_scales(width, float(norms.max()), noise_stddev)
    return float(np.sum(_divergence(order, counts.astype(np.float64), norms, noise_stddev, width)))


def eana_epsilon(
    *, delta: float, min_count: int, max_nonzero: int, l2_norm_clip: float, noise_stddev: float, published: bool = False
) -> float:
    """The data-dependent ε at δ that follows from Theorem 3.1, by dp_accounting's conversion.

    It compares only data sets that meet the theorem's conditions. It is *not* an (ε, δ)-DP guarantee
    and must not be reported as one.

    Args:
        delta: δ, 0 < δ < 1.
        min_count: Size as in `eana_rdp`.
        max_nonzero: Size as in `eana_rdp`.
        l2_norm_clip: Scale as in `eana_rdp`.
        noise_stddev: Scale as in `eana_rdp`.
        published: Whether to convert the printed bound (1) rather than the exact divergence.

    Raises:
        TypeError: A count is not an integer.
        ValueError: A condition does not hold; `min_count` < 2 leaves no order at all.

    Example:
        >>> sizes = dict(delta=1e-7, max_nonzero=10, l2_norm_clip=1.0, noise_stddev=1.0)
        >>> eana_epsilon(min_count=1000, **sizes) < eana_epsilon(min_count=100, **sizes)
        True
    """
    _check_delta(delta)
    _check_order(2, min_count)
    bound, orders = eana_rdp_published if published else eana_rdp, orders_up_to(min_count)
    sizes = {"min_count": min_count, "max_nonzero": max_nonzero}
    values = [bound(order, **sizes, l2_norm_clip=l2_norm_clip, noise_stddev=noise_stddev) for order in orders]
    return epsilon_of_divergences(orders, values, delta)


def eana_instance_epsilon(
    *, delta: float, row_counts: ArrayLike, row_norms: ArrayLike, noise_stddev: float, width: int = 1
) -> float:
    """The per-instance ε at δ: `eana_rdp_instance` over all allowed orders, converted.

    Arguments as `eana_rdp_instance` and `eana_epsilon`.

    Example:
        >>> row = dict(delta=1e-6, row_norms=[1.0], noise_stddev=1.0)
        >>> eana_instance_epsilon(row_counts=[10_000], **row) < eana_instance_epsilon(row_counts=[100], **row)
        True
    """
    _check_delta(delta)
    counts, _ = _check_rows(row_counts, row_norms)
    _check_order(2, int(counts.min()))
    orders = orders_up_to(int(counts.min()))
    rows: dict[str, Any] = {"row_counts": row_counts, "row_norms": row_norms, "width": width}
    values = [eana_rdp_instance(order, noise_stddev=noise_stddev, **rows) for order in orders]
    return epsilon_of_divergences(orders, values, delta)


def _divergence(order: int, count: Any, norm: Any, noise_stddev: float, width: int) -> Any:
    # D_α(wide ‖ narrow) of rows, with log1p: the leading terms of the logarithms cancel for large counts.
    mean = order * np.square(norm) / (2 * (count + 1 - order) * noise_stddev**2)
    return mean + width * (-0.5 * np.log1p(1 / count) - np.log1p(-(order - 1) / count) / (2 * (order - 1)))


def orders_up_to(limit: int) -> list[int]:
    """Every order up to 512 and a geometric grid beyond."""
    tail = np.geomspace(_DENSE_ORDERS, max(limit, _DENSE_ORDERS), 400).astype(np.int64)
    return sorted({*range(2, min(limit, _DENSE_ORDERS) + 1), *(int(o) for o in tail if o <= limit)})


def _check_whole(**values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an integer, got {value!r}.")


def _check_order(order: Any, min_count: Any) -> None:
    _check_whole(order=order, min_count=min_count)
    if order < 2:
        raise ValueError(f"order must be an integer above 1, got {order}.")
    if order > min_count:
        raise ValueError(
            f"order must be at most the smallest count (alpha <= C0), got {order} and {min_count}: "
            "a row that too few others touch has no bound under EANA; use LazyDPSGD for a guarantee."
        )


def _check_scales(max_nonzero: Any, l2_norm_clip: float, noise_stddev: float) -> None:
    _check_whole(**{"The number of coordinates": max_nonzero})
    if max_nonzero < 1:
        raise ValueError(f"The number of coordinates must be at least 1, got {max_nonzero}.")
    if not (math.isfinite(l2_norm_clip) and l2_norm_clip >= 0):
        raise ValueError(f"l2_norm_clip must be finite and not negative, got {l2_norm_clip}.")
    if not (math.isfinite(noise_stddev) and noise_stddev > 0):
        raise ValueError(f"noise_stddev must be finite and positive, got {noise_stddev}.")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta}.")


def _check_rows(row_counts: ArrayLike, row_norms: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    counts, norms = np.asarray(row_counts), np.asarray(row_norms, dtype=np.float64)
    if counts.ndim != 1 or counts.shape != norms.shape or counts.size == 0:
        raise ValueError(
            "row_counts and row_norms must be two lists of the same length of at least 1, "
            f"got shapes {counts.shape} and {norms.shape}."
        )
    if not np.issubdtype(counts.dtype, np.integer):
        raise TypeError(f"row_counts must be integers, got {counts.dtype}.")
    if not np.all(np.isfinite(norms) & (norms >= 0)):
        raise ValueError("row_norms must be finite and not negative.")
    return counts, norms
