"""One plot for each figure of the paper: time of every contestant in every case, in units of sparse SGD's first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REFERENCE = "sparse-sgd"


def plot(experiment: str, found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws grouped bars on a logarithmic axis.

    Args:
        experiment: for the title.
        found: cases and their contestants' figures, as `bench lazydp --json` writes them.
        path: where to; the suffix tells the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for case in found for name in case["contestants"]))
    first = found[0]["contestants"]
    unit = first[REFERENCE if REFERENCE in first else names[0]]["median_ms"]
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.8 * len(found), 4), layout="constrained")
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [i + (number - (len(names) - 1) / 2) * width for i in range(len(found))]
        figures = [case["contestants"].get(name) for case in found]
        heights = [f["median_ms"] / unit if f else 0.0 for f in figures]
        errors = [
            [h - f["spread_ms"][0] / unit if f else 0.0 for h, f in zip(heights, figures)],
            [f["spread_ms"][1] / unit - h if f else 0.0 for h, f in zip(heights, figures)],
        ]
        axes.bar(places, heights, width, yerr=errors, label=name, capsize=2)
    axes.set_xticks(range(len(found)), [case["case"]["label"] for case in found])
    axes.set_yscale("log")
    axes.set_ylabel(f"time a step / {REFERENCE}, {found[0]['case']['label']}")
    axes.set_title(f"bench lazydp {experiment}")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def plot_servers(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws steps a second and bytes a step of every mechanism, case by case.

    Args:
        found: cases, as `bench ps --json` writes them.
        path: where to; the suffix tells the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for case in found for name in case["mechanisms"]))
    figure, (rates, traffic) = pyplot.subplots(1, 2, figsize=(4 + 2.2 * len(found), 4), layout="constrained")
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
            traffic.bar(at, figures["bytes"], width, label=label, color=colour)
    for axes, title in ((rates, "steps a second"), (traffic, "bytes on the wire a step")):
        axes.set_xticks(range(len(found)), [f"{case['label']} × {case['case']['dim']}" for case in found])
        axes.set_yscale("log")
        axes.set_title(title)
    rates.legend()
    figure.suptitle("bench ps: loopback, all processes on one machine")
    figure.savefig(path)
    pyplot.close(figure)
