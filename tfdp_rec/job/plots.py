"""Plots of a run as PNG files. No window opens, and no setting of matplotlib stays."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfdp_rec.job.evaluation import KS
from tfdp_rec.job.recommenders.names import named


class Picture(NamedTuple):
    """A plot as a file beside the report; `about` describes it to a screen reader."""

    file: str
    about: str
    png: bytes


def curves(
    lines: Sequence[Mapping[str, Any]], key: str, about: str, levels: Mapping[str, float]
) -> Picture | None:
    """A figure of metrics.jsonl over the steps, with levels of recommenders without steps; None if there is none."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        if _finite(line.get(key)):
            points.setdefault(line["recommender"], []).append((line["step"], line[key]))
    if not points:
        return None

    def draw(axes: Any) -> None:
        for name, found in points.items():
            axes.plot(*zip(*found), label=named(name).label, color=named(name).colour, marker=".")
        for name, level in levels.items():
            axes.axhline(level, label=named(name).label, color=named(name).colour, linestyle="--")
        axes.set(xlabel="steps", ylabel=about)

    return Picture(f"{key.split('@')[0]}.png", f"{about}, over the steps", _drawn(draw))


def recalls(results: Mapping[str, Mapping[str, Any]]) -> Picture:
    """recall@k for each k that was tested, with 95% intervals, of lines of results.json by recommender."""

    def draw(axes: Any) -> None:
        for number, (name, result) in enumerate(results.items()):
            # A little apart, so that intervals do not hide each other.
            places = [place + 0.05 * (number - (len(results) - 1) / 2) for place in range(len(KS))]
            means, errors = ([result[kind][f"recall@{k}"] for k in KS] for kind in ("recalls", "errors"))
            bars = [1.96 * error if _finite(error) else 0.0 for error in errors]
            axes.errorbar(places, means, bars, label=named(name).label, color=named(name).colour, marker=".")
        axes.set_xticks(range(len(KS)), [str(k) for k in KS])
        axes.set(xlabel="k", ylabel="recall@k")
        axes.set_ylim(bottom=0)

    about = "recall@k of those that were tested, for each k, with 95% intervals"
    return Picture("recall_at_k.png", about, _drawn(draw))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _drawn(draw: Callable[[Any], None]) -> bytes:
    from matplotlib.figure import Figure

    figure, file = Figure(figsize=(5.6, 4.2), layout="constrained"), io.BytesIO()
    axes = figure.subplots()
    draw(axes)
    axes.grid(alpha=0.2)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()
