"""One plot for each figure of the paper: time of every contestant in every case, in units of sparse SGD's first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import tables

REFERENCE = "sparse-sgd"


def plot(experiment: str, found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws grouped bars on a logarithmic axis.

    Args:
        experiment: for the title.
        found: cases and their contestants' figures, as `bench lazydp --json` writes them.
        path: where to; the suffix tells the format.
    """
    names = list(dict.fromkeys(name for case in found for name in case["contestants"]))
    figure, (axes,) = tables.panels(1, 1.5 + 1.8 * len(found))
    width, unit = 0.8 / len(names), _reference_ms(found[0])
    for number, name in enumerate(names):
        bars = [(place, *_height(case, name, unit)) for place, case in enumerate(found) if name in case["contestants"]]
        places, heights, low, high = zip(*bars)
        errors = [[h - x for h, x in zip(heights, low)], [x - h for h, x in zip(heights, high)]]
        shift = (number - (len(names) - 1) / 2) * width
        axes.bar([place + shift for place in places], heights, width, yerr=errors, label=name, capsize=2)
    axes.set_xticks(range(len(found)), [case["case"]["label"] for case in found])
    axes.set_yscale("log")
    axes.set_ylabel(f"time a step / {REFERENCE}, {found[0]['case']['label']}")
    axes.set_title(f"bench lazydp {experiment}")
    tables.save(figure, path)


def _reference_ms(case: Mapping[str, Any]) -> float:
    contestants = case["contestants"]
    return contestants[REFERENCE if REFERENCE in contestants else next(iter(contestants))]["median_ms"]


def _height(case: Mapping[str, Any], name: str, unit: float) -> tuple[float, float, float]:
    """Middle, low and high: by ratios within a round where there are any, which drift does not touch."""
    figures, reference = case["contestants"][name], _reference_ms(case) / unit
    if "ratio" in figures:
        low, high = figures["ratio_range"]
        return figures["ratio"] * reference, low * reference, high * reference
    low, high = figures["spread_ms"]
    return figures["median_ms"] / unit, low / unit, high / unit


def plot_servers(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws steps a second and bytes a step of every mechanism, case by case.

    Args:
        found: cases, as `bench ps --json` writes them.
        path: where to; the suffix tells the format.
    """
    names = list(dict.fromkeys(name for case in found for name in case["mechanisms"]))
    figure, (rates, traffic) = tables.panels(2, 2 + 1.1 * len(found))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        for place, case in enumerate(found):
            if name not in case["mechanisms"]:
                continue
            at, figures = place + (number - (len(names) - 1) / 2) * width, case["mechanisms"][name]
            turns = [1e3 / turn["ms"] for turn in figures["rounds"]]
            middle = figures["steps_per_second"]
            label, colour = name if place == 0 else None, f"C{number}"
            around = [[middle - min(turns)], [max(turns) - middle]]
            rates.bar(at, middle, width, yerr=around, label=label, color=colour, capsize=2)
            traffic.bar(at, figures["bytes"] / 1e6, width, label=label, color=colour)
    for axes, title in ((rates, "steps a second"), (traffic, "megabytes on the wire a step")):
        axes.set_xticks(range(len(found)), [f"{case['label']}\n× {case['case']['dim']}" for case in found])
        axes.set_title(title)
    rates.set_yscale("log")
    figure.suptitle("bench ps: loopback, all processes on one machine")
    tables.save(figure, path)
