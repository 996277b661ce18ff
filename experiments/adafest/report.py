"""The AdaFEST study's tables and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import tables
from experiments.adafest.settings import CONFINED, FROZEN, PER_VALUE
from tfdp_rec.mechanisms import ada_fest, dp_sgd, exponential, fest

LOSSES = (0.005, 0.01, 0.03)
Result = Mapping[str, Any]


def times(reduction: float | None) -> str:
    """A gradient size reduction in words; None stands for a training that updates no table at all."""
    return "no table" if reduction is None or math.isinf(reduction) else f"{reduction:.3g}"


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
    """(ε, mechanism) -> the largest gradient size reduction within a loss against DPSGD; 1 if none is."""
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
    tables = {"tuning": _tuning, "frontier": _frontier, "stream": _stream, "speed": _speed, "sparsity": _sparsity}
    for part, table in tables.items():
        if part in results:
            lines += ["", f"## {part.capitalize()}", "", *table(results[part], metric)]
    return "\n".join(lines) + "\n"


def _frontier(results: Sequence[Result], metric: str) -> Iterable[str]:
    rows = merged(results, "epsilon", "mechanism", "setting")
    reference = {row["epsilon"]: row for row in rows if row["mechanism"] == dp_sgd.label}
    heading = ["epsilon", "mechanism", "setting", metric, "against DPSGD", "reduction", "truth on its rows"]
    yield from tables.markdown(heading, [_point(row, reference.get(row["epsilon"])) for row in rows])
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


def _point(row: Result, base: Result | None) -> list[str]:
    truth = row.get("score_of_truth_on_rows")
    return [
        f"{row['epsilon']:g}", row["mechanism"], f"{row['setting']:g}", _spread(row), _difference(row, base),
        times(row["reduction"]), "" if truth is None else f"{truth:.4f}",
    ]  # fmt: skip


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
    yield from tables.markdown(
        ["epsilon", "mechanism", "table rate", "dense rate", "score"],
        [[f"{row['epsilon']:g}", row["mechanism"], *map("{:g}".format, row["rates"]), _spread(row)] for row in rows],
    )


def _stream(results: Sequence[Result], metric: str) -> Iterable[str]:
    rows = []
    for way in results:
        days = " ".join(f"{value:.4f}" for value in way["score_by_day"])
        rows.append([way["way"], days, f"{way['score']:.4f}", times(way["reduction"])])
    return tables.markdown(["way", f"{metric} by day", "second half", "reduction"], rows)


def _speed(results: Sequence[Result], metric: str) -> Iterable[str]:
    figures = {
        "ms": ".1f", "ms_lowest_tenth": ".1f", "steps_per_second": ".1f", "ratio_to_sgd": ".2f", "processor_ms": ".1f",
    }  # fmt: skip
    heading = ["way", "ms a step", "lowest tenth", "steps a second", "of SGD's time", "processor ms"]
    rows = [[row["way"], *(format(row[key], form) for key, form in figures.items())] for row in results]
    return tables.markdown(heading, rows)


def _sparsity(results: Sequence[Result], metric: str) -> Iterable[str]:
    heading = list(results[0])
    return tables.markdown(heading, [[f"{row[name]:g}" for name in heading] for row in results])


def plot_frontier(results: Sequence[Result], metric: str, path: Path) -> None:
    """The score against reduction, one panel an ε; bars are standard deviations over seeds."""
    rows = merged(results, "epsilon", "mechanism", "setting")
    epsilons = sorted({row["epsilon"] for row in rows})
    figure, axes = tables.panels(len(epsilons), 4.6, 3.8, sharey=True)
    for panel, epsilon in zip(axes, epsilons):
        here = [row for row in rows if row["epsilon"] == epsilon]
        for mechanism in (ada_fest.label, PER_VALUE, CONFINED, fest.label, exponential.label):
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
    axes[0].set_ylabel(metric)
    tables.save(figure, path)


def plot_stream(results: Sequence[Result], metric: str, path: Path) -> None:
    """The score on the next day, by day."""
    figure, (panel,) = tables.panels(1, 6, 3.8)
    days = range(len(results[0]["score_by_day"]))
    for way in results:
        panel.plot(days, way["score_by_day"], marker="o", label=f"{way['way']} ({times(way['reduction'])})")
    panel.set(xticks=days, xlabel="trained up to day", ylabel=f"{metric} on the next day")
    tables.save(figure, path)
