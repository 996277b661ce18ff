"""The plots and the page of EANA's studies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import tables
from experiments.eana.cells import MECHANISMS

Result = Mapping[str, Any]
_EXPOSURES = {"exposure": "by rank", "exposure_extrapolated": "extrapolated by a skew-normal"}


def averaged(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """(title, results of all seeds) of each mechanism and noise, in order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        title = f"{result['mechanism']}, {result['label']}" if result["label"] else result["mechanism"]
        groups.setdefault(title, []).append(result)
    yield from groups.items()


def median_exposure(result: Result, key: str = "exposure") -> dict[int, float]:
    """Median exposure by repeat count."""
    return {int(count): float(np.median(values)) for count, values in result[key].items()}


def plot_precision(results: Sequence[Result], path: Path, title: str) -> str:
    """precision@k against k, a line for each mechanism and noise (Figures 4 and 6)."""
    figure, (axes,) = tables.panels(1, 8, 5)
    axes.set(xlabel="k", ylabel="precision@k on test individuals", title=title)
    axes.grid(alpha=0.3)
    for name, seeds in averaged(results):
        depths = sorted(int(key.split("@")[1]) for key in seeds[0]["metrics"] if "precision" in key)
        means = [np.mean([result["metrics"][f"precision@{k}"] for result in seeds]) for k in depths]
        axes.plot(depths, means, **_style(name), label=name)
        axes.set_xticks(depths)
    return tables.save(figure, path)


def plot_exposure(results: Sequence[Result], path: Path, title: str) -> str:
    """Median exposure against repeats, by rank and extrapolated, a line a mechanism and noise (Figures 5 and 7).

    Several seeds give the mean and, shaded, the least and the greatest.
    """
    figure, both = tables.panels(2, 6, 5)
    figure.suptitle(title)
    for axes, (key, name) in zip(both, _EXPOSURES.items()):
        axes.set(xscale="log", xlabel="copies of the canary", ylabel="median exposure (bits)", title=name)
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
        axes.grid(alpha=0.3)
        for label, seeds in averaged(results):
            medians = [median_exposure(result, key) for result in seeds]
            counts = sorted(medians[0])
            values = np.array([[m[count] for count in counts] for m in medians])
            style = _style(label)
            axes.plot(counts, values.mean(axis=0), **style, label=label)
            if len(seeds) > 1:
                axes.fill_between(counts, values.min(axis=0), values.max(axis=0), color=style["color"], alpha=0.15)
    return tables.save(figure, path)


def _style(name: str) -> dict[str, Any]:
    """Colour by mechanism, dash by noise."""
    mechanism, _, noise = name.partition(", ")
    colour = MECHANISMS[mechanism].colour if mechanism in MECHANISMS else "black"
    dash = {"": "-", "0.001": "-", "0.01": "--"}.get(noise, ":")
    return {"color": colour, "linestyle": dash, "marker": "o", "markersize": 3}


def speed_table(results: Sequence[Result]) -> dict[str, float | None]:
    """Steps per second by mechanism, the best of its cells (Table 3)."""
    speeds: dict[str, float | None] = {}
    for result in results:
        known = [speed for speed in (speeds.get(result["mechanism"]), result["steps_per_second"]) if speed]
        speeds[result["mechanism"]] = max(known, default=None)
    return speeds


def report(results: Sequence[Result], title: str, figures: Sequence[str]) -> str:
    """A Markdown page of one study."""
    counts = sorted(median_exposure(results[0]))
    depths = sorted((key for key in results[0]["metrics"] if "precision" in key), key=lambda k: int(k.split("@")[1]))
    heading = ["cell", "noise multiplier", "ε", *depths, *(f"exposure, {count}×" for count in counts)]
    heading += [f"extrapolated, {counts[-1]}×", "steps/s"]
    rows = [_row(name, seeds, depths, counts) for name, seeds in averaged(results)]
    note = "ε is for one unit; a canary with n copies is n units. EANA and SGD have none. Exposure 1 is chance."
    lines = [f"# {title}", "", *tables.markdown(heading, rows), "", note, ""]
    return "\n".join([*lines, *(f"![{name}]({name})" for name in figures), ""])


def _row(name: str, seeds: Sequence[Result], depths: Sequence[str], counts: Sequence[int]) -> list[str]:
    first = seeds[0]
    epsilon = f"{first['epsilon']:.3g}" if first["epsilon"] is not None else "none"
    precisions = [np.mean([seed["metrics"][k] for seed in seeds]) for k in depths]
    exposures = [np.mean([median_exposure(seed)[count] for seed in seeds]) for count in counts]
    beyond = np.mean([median_exposure(seed, "exposure_extrapolated")[counts[-1]] for seed in seeds])
    speed = np.mean([seed["steps_per_second"] or math.nan for seed in seeds])
    return [
        name, f"{first['noise_multiplier']:.3g}", epsilon, *(f"{value:.4f}" for value in precisions),
        *(f"{value:.1f}" for value in exposures), f"{beyond:.1f}", f"{speed:.1f}",
    ]  # fmt: skip
