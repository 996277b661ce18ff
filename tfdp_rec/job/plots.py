"""Plots of a run, each drawn twice: for light paper and for dark. No window opens, no setting of matplotlib stays."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp_rec.job.evaluation import KS
from tfdp_rec.job.page import Picture
from tfdp_rec.job.recommenders.names import named

_SIZE, _DPI, _COLOURS = (5.6, 4.2), 130, 128


@dataclasses.dataclass(frozen=True)
class Paper:
    """What a plot is drawn on: the colours of the paper and of words and axes, and the least luminance of a line."""

    back: str
    ink: str
    lightest: float

    def colour(self, name: str) -> tuple[float, float, float]:
        """A recommender's colour; one darker than `lightest` is mixed with white."""
        code = named(name).colour
        red, green, blue = (int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))
        light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
        if light >= self.lightest:
            return red, green, blue
        wanted = self.lightest + (1 - self.lightest) * (1 - light / self.lightest)  # the darkest becomes the lightest
        mixed = (wanted - light) / (1 - light)
        return red + (1 - red) * mixed, green + (1 - green) * mixed, blue + (1 - blue) * mixed


LIGHT, DARK = Paper("#ffffff", "#1d2430", 0.0), Paper("#14171c", "#c9d0da", 0.35)


def curves(
    lines: Sequence[Mapping[str, Any]], key: str, about: str, levels: Mapping[str, float]
) -> Picture | None:
    """A figure of metrics.jsonl over the steps, with levels of recommenders without steps; None if there is none."""
    points = {
        name: [(line["step"], line[key]) for line in lines if line["recommender"] == name and _finite(line.get(key))]
        for name in dict.fromkeys(line["recommender"] for line in lines)
    }
    points = {name: found for name, found in points.items() if found}
    if not points:
        return None

    def draw(axes: Any, paper: Paper) -> None:
        for name, found in points.items():
            axes.plot(*zip(*found), label=named(name).label, color=paper.colour(name), marker=".")
        for name, level in levels.items():
            axes.axhline(level, label=named(name).label, color=paper.colour(name), linestyle="--")
        axes.set_xlabel("steps")
        axes.set_ylabel(about)

    return _drawn(f"{key.split('@')[0]}.png", f"{about}, over the steps", draw)


def recalls(results: Mapping[str, Mapping[str, Any]]) -> Picture:
    """recall@k for each k that was tested, with 95% intervals, of lines of results.json by recommender."""

    def draw(axes: Any, paper: Paper) -> None:
        middle = (len(results) - 1) / 2
        for number, (name, result) in enumerate(results.items()):
            # A little apart, so that intervals do not hide each other.
            places = [place + 0.05 * (number - middle) for place in range(len(KS))]
            means, errors = ([result[kind][f"recall@{k}"] for k in KS] for kind in ("recalls", "errors"))
            bars = [1.96 * error if _finite(error) else 0.0 for error in errors]
            drawn = {"color": paper.colour(name), "marker": "o", "markersize": 3, "linewidth": 1.2, "elinewidth": 1.2}
            axes.errorbar(places, means, bars, label=named(name).label, **drawn)
        axes.set_xticks(range(len(KS)), [str(k) for k in KS])
        axes.set_xlabel("k")
        axes.set_ylabel("recall@k")
        axes.set_ylim(bottom=0)

    return _drawn("recall_at_k.png", "recall@k of those that were tested, for each k, with 95% intervals", draw)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _drawn(file: str, about: str, draw: Callable[[Any, Paper], None]) -> Picture:
    return Picture(file, about, *(_on(paper, draw) for paper in (LIGHT, DARK)))


def _on(paper: Paper, draw: Callable[[Any, Paper], None]) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "text.color")
    style: Any = {**dict.fromkeys(inked, paper.ink), "axes.facecolor": paper.back}
    plain: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10.5, "legend.fontsize": 8.5}
    file = io.BytesIO()
    with matplotlib.rc_context({**style, **plain}):
        figure = Figure(figsize=_SIZE, layout="constrained", facecolor=paper.back)
        axes = figure.subplots()
        draw(axes, paper)
        axes.grid(alpha=0.2)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(file, format="png", dpi=_DPI)
    return _smaller(file)


def _smaller(png: io.BytesIO) -> bytes:
    """With a table of colours: a third of the bytes, and no difference to the eye."""
    from PIL import Image

    file = io.BytesIO()
    few = Image.open(png).convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE)
    few.save(file, format="PNG", optimize=True)
    return file.getvalue()
