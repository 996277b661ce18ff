"""The AdaFEST study's tables and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.adafest.trainings import CONFINED, FROZEN, times
from tfdp_rec.mechanisms import ada_fest, dp_sgd, exponential, fest

LOSSES = (0.005, 0.01, 0.03)
Result = Mapping[str, Any]


def merged(results: Sequence[Result], *keys: str) -> list[dict[str, Any]]:
    """One row for all seeds of a training: mean score, standard deviation over the seeds, mean reduction.

    Example:
        >>> runs = [{"way": "a", "score": 0.5, "reduction": 2.0}, {"way": "a", "score": 0.7, "reduction": None}]
        >>> row = merged(runs, "way")[0]
        >>> round(row["score"], 3), round(row["deviation"], 3), row["seeds"], row["reduction"]
        (0.6, 0.141, 2, 4.0)
    """
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result[key] for key in keys), []).append(result)
    rows = []
    for group in groups.values():
        scores = [result["score"] for result in group]
        share = float(np.mean([1 / result["reduction"] if result["reduction"] else 0.0 for result in group]))
        seeds: dict[str, Any] = {"score": float(np.mean(scores)), "seeds": len(group)}
        seeds["deviation"] = float(np.std(scores, ddof=1)) if len(group) > 1 else None
        rows.append({**group[0], **seeds, "reduction": 1 / share if share else None})
    return rows


def best_reductions(rows: Sequence[Result], loss: float) -> dict[tuple[float, str], float]:
    """(epsilon, mechanism) -> the largest gradient size reduction within a loss against DPSGD; 1 if none is."""
    reference = {row["epsilon"]: row["score"] for row in rows if row["mechanism"] == dp_sgd.label}
    best: dict[tuple[float, str], float] = {}
    for row in rows:
        key = (row["epsilon"], row["mechanism"])
        fine = row["score"] >= reference[row["epsilon"]] - loss
        best[key] = max(best.get(key, 1.0), row["reduction"] if fine and row["reduction"] else 1.0)
    return best


def report(results: Mapping[str, Any], metric: str) -> str:
    """All numbers as Markdown."""
    lines = ["# AdaFEST study", "", f"Data: {results['data']}. Sizes: {json.dumps(results['sizes'])}"]
    tables = {"tuning": _tuning, "frontier": _frontier, "stream": _stream, "speed": _speed}
    for part, table in tables.items():
        if part in results:
            lines += ["", f"## {part.capitalize()}", "", *table(results[part], metric)]
    return "\n".join(lines) + "\n"


def _frontier(results: Sequence[Result], metric: str) -> Iterable[str]:
    rows = merged(results, "epsilon", "mechanism", "setting")
    reference = {row["epsilon"]: row for row in rows if row["mechanism"] == dp_sgd.label}
    yield f"| epsilon | mechanism | setting | {metric} | against DPSGD | reduction | truth on its rows |"
    yield "|---" * 7 + "|"
    for row in rows:
        base, truth = reference.get(row["epsilon"]), row.get("score_of_truth_on_rows")
        bound = "" if truth is None else f"{truth:.4f}"
        yield (
            f"| {row['epsilon']:g} | {row['mechanism']} | {row['setting']:g} | {_spread(row)} "
            f"| {_difference(row, base)} | {times(row['reduction'])} | {bound} |"
        )
    if not reference:
        return
    yield ""
    yield f"Largest reduction within a loss of {' / '.join(map(str, LOSSES))} against DPSGD:"
    yield ""
    best = [best_reductions(rows, loss) for loss in LOSSES]
    for epsilon, mechanism in best[0]:
        if mechanism not in (dp_sgd.label, FROZEN):
            found = " / ".join(format(b[epsilon, mechanism], ".3g") for b in best)
            yield f"- epsilon {epsilon:g}, {mechanism}: {found}"


def _spread(row: Result) -> str:
    """The mean, and over how many seeds it spreads how far."""
    return f"{row['score']:.4f}" + (f" ± {row['deviation']:.4f} ({row['seeds']})" if row["deviation"] else "")


def _difference(row: Result, base: Result | None) -> str:
    """Mean minus DP-SGD's mean, with the standard error of the difference where both were repeated."""
    if base is None or row is base:
        return ""
    difference = f"{row['score'] - base['score']:+.4f}"
    if row["deviation"] is None or base["deviation"] is None:
        return difference
    error = math.hypot(row["deviation"] / math.sqrt(row["seeds"]), base["deviation"] / math.sqrt(base["seeds"]))
    return f"{difference} ± {error:.4f}"


def _tuning(results: Sequence[Result], metric: str) -> Iterable[str]:
    rated = [
        {**r, "rates": (r["sizes"]["learning_rate"], r["sizes"]["dense_learning_rate"])} for r in results
    ]  # as "sizes" is not a key that can be compared
    rows = merged(rated, "epsilon", "mechanism", "rates")
    yield f"{metric} on validation examples:"
    yield ""
    yield "| epsilon | mechanism | table rate | dense rate | score |"
    yield "|---" * 5 + "|"
    for row in rows:
        rate, dense = row["rates"]
        yield f"| {row['epsilon']:g} | {row['mechanism']} | {rate:g} | {dense:g} | {_spread(row)} |"


def _stream(results: Sequence[Result], metric: str) -> Iterable[str]:
    yield f"| way | {metric} by day | second half | reduction |"
    yield "|---" * 4 + "|"
    for way in results:
        days = " ".join(f"{value:.4f}" for value in way["score_by_day"])
        yield f"| {way['way']} | {days} | {way['score']:.4f} | {times(way['reduction'])} |"


def _speed(results: Sequence[Result], metric: str) -> Iterable[str]:
    yield "| way | ms a step | lowest tenth | steps a second | of SGD's time | processor ms |"
    yield "|---" * 6 + "|"
    for row in results:
        yield (
            f"| {row['way']} | {row['ms']:.1f} | {row['ms_lowest_tenth']:.1f} | {row['steps_per_second']:.1f} "
            f"| {row['ratio_to_sgd']:.2f} | {row['processor_ms']:.1f} |"
        )


def plot_frontier(results: Sequence[Result], metric: str, path: Path) -> None:
    """The score against reduction, one panel an epsilon; bars are standard deviations over seeds."""
    plt, rows = _pyplot(), merged(results, "epsilon", "mechanism", "setting")
    epsilons = sorted({row["epsilon"] for row in rows})
    figure, panels = plt.subplots(1, len(epsilons), figsize=(4.6 * len(epsilons), 3.8), sharey=True, squeeze=False)
    for panel, epsilon in zip(panels[0], epsilons):
        here = [row for row in rows if row["epsilon"] == epsilon]
        for mechanism in (ada_fest.label, CONFINED, fest.label, exponential.label):
            points = [row for row in here if row["mechanism"] == mechanism and row["reduction"]]
            points.sort(key=lambda row: row["reduction"])
            bars = [row["deviation"] or 0.0 for row in points]
            if points:
                panel.errorbar(
                    [row["reduction"] for row in points], [row["score"] for row in points], bars, marker="o",
                    markersize=4, capsize=2, label=mechanism,
                )  # fmt: skip
        for mechanism, style in ((dp_sgd.label, "-"), (FROZEN, ":")):
            for row in (row for row in here if row["mechanism"] == mechanism):
                panel.axhline(row["score"], color="black", linestyle=style, linewidth=1, label=mechanism)
        panel.set(xscale="log", xlabel="gradient size reduction", title=f"ε = {epsilon:g}")
    panels[0][0].set_ylabel(metric)
    panels[0][0].legend(fontsize=8)
    _save(plt, figure, path)


def plot_stream(results: Sequence[Result], metric: str, path: Path) -> None:
    """The score on the next day, by day."""
    plt = _pyplot()
    figure, panel = plt.subplots(figsize=(6, 3.8))
    for way in results:
        label = f"{way['way']} ({times(way['reduction'])})"
        panel.plot(range(len(way["score_by_day"])), way["score_by_day"], marker="o", label=label)
    panel.set(
        xticks=range(len(results[0]["score_by_day"])), xlabel="trained up to day", ylabel=f"{metric} on the next day"
    )
    panel.legend(fontsize=8)
    _save(plt, figure, path)


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
