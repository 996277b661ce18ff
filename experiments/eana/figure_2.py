"""The paper's Figure 2: EANA's bound beside DP-SGD's ε at the same total noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import rdp

from tfdp_rec.sparse.eana_bound import eana_epsilon, orders_up_to


def figure_2(
    noise_stddevs: Sequence[float] = tuple(np.geomspace(0.05, 3.0, 25)),
    min_counts: Sequence[int] = (10, 100, 1000, 10_000),
    *, delta: float = 1e-7, max_nonzero: int = 10, l2_norm_clip: float = 1.0,
) -> dict[int, dict[str, list[float]]]:  # fmt: skip
    """The numbers behind the paper's Figure 2: ε of EANA and of DP-SGD with the same total noise.

    DP-SGD's noise is σ_g = √C₀ σ, as in the paper's Remark 1; both ε by the same conversion.

    Args:
        noise_stddevs: the σ of the horizontal axis.
        min_counts: one curve for each C₀.
        delta, max_nonzero, l2_norm_clip: the paper's are the defaults.

    Returns:
        For each C₀ the lists `noise_stddev`, `eana`, `eana_published`, `dp_sgd` and `ratio`.

    Raises:
        TypeError, ValueError: as `eana_epsilon`.

    Example:
        >>> curves = figure_2([0.5, 1.0], [100])
        >>> all(ratio > 1 for ratio in curves[100]["ratio"])
        True
    """
    curves = {}
    for count in min_counts:
        sizes: dict[str, Any] = dict(
            delta=delta, min_count=count, max_nonzero=max_nonzero, l2_norm_clip=l2_norm_clip
        )
        eana = [eana_epsilon(noise_stddev=s, **sizes) for s in noise_stddevs]
        published = [eana_epsilon(noise_stddev=s, published=True, **sizes) for s in noise_stddevs]
        dp_sgd = [_gaussian_epsilon(math.sqrt(count) * s / l2_norm_clip, delta) for s in noise_stddevs]
        curves[count] = {
            "noise_stddev": list(noise_stddevs), "eana": eana, "eana_published": published,
            "dp_sgd": dp_sgd, "ratio": [a / b if b > 0 else math.inf for a, b in zip(eana, dp_sgd)],
        }  # fmt: skip
    return curves


def plot_figure_2(
    path: str | Path, curves: Mapping[int, Mapping[str, Sequence[float]]] | None = None
) -> Path:
    """Draw Figure 2 (left: ε against σ; right: EANA's ε over DP-SGD's) into an image file.

    Args:
        path: where to write; the suffix chooses the format.
        curves: what `figure_2` returned; computed with its defaults when left out.

    Returns:
        The path written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    curves = figure_2() if curves is None else curves
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, (count, curve) in enumerate(sorted(curves.items())):
        sigma, colour = curve["noise_stddev"], f"C{index}"
        left.loglog(sigma, curve["eana"], color=colour, label=f"EANA, $C_0$ = {count:,}")
        left.loglog(sigma, curve["eana_published"], color=colour, linestyle=":", linewidth=1)
        left.loglog(sigma, curve["dp_sgd"], color=colour, linestyle="--", linewidth=1)
        right.semilogx(sigma, curve["ratio"], color=colour, label=f"$C_0$ = {count:,}")
    left.set(ylabel="data-dependent ε", title="ε (dashed: DP-SGD, dotted: as printed)")
    right.set(ylabel="ε of EANA / ε of DP-SGD", title="ratio")
    for axes in (left, right):
        axes.set_xlabel("σ of one noise draw")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return Path(path)


def _gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    orders = [1 + step / 10 for step in range(1, 100)] + orders_up_to(100_000)
    return float(rdp.compute_epsilon(orders, [a / (2 * noise_multiplier**2) for a in orders], delta)[0])
