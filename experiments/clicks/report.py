"""The report of the study: a table of scores, and AUC against ε."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.clicks.log import ClickLog
from experiments.clicks.settings import Sizes
from experiments.tables import markdown, panels, save

Results = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


def page(log: ClickLog, sizes: Sizes, results: Results) -> str:
    """The study's page."""
    rows = log.parts["train"]
    units = len(np.unique(rows.units))
    head = ["way", "ε", "AUC", "relative log loss", "before correction", "seconds", "setting"]
    lines = [
        f"# {log.name}: {log.source}",
        "",
        f"{len(rows):,} rows of {units:,} units ({log.unit}) to train on, {sum(log.sizes):,} values in "
        f"{len(log.columns)} columns, {rows.labels.mean():.1%} clicks. δ = {sizes.delta:g}. Means over seeds "
        "with 95% intervals; log loss is relative to that of the rate of clicks.",
        "",
        *markdown(head, [_row(name, budget, cells) for name, by in results.items() for budget, cells in by.items()]),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, budget: str, cells: Sequence[Mapping[str, Any]]) -> list[str]:
    auc, loss, before = (_spread([cell["test"][key] for cell in cells]) for key in ("auc", "loss", "loss_before"))
    setting = ", ".join(f"{key} {_short(value)}" for key, value in cells[0]["setting"].items())
    seconds = np.mean([cell["seconds"] for cell in cells])
    return [name, "" if budget == "0" else budget, auc, loss, before, f"{seconds:.0f}", setting]


def _short(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, (list, tuple)) else f"{value:g}"


def _spread(values: Sequence[float]) -> str:
    """The mean, and half of its 95% interval over seeds, by Student's t."""
    if len(values) < 2:
        return f"{np.mean(values):.4f}"
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.4f} ± {half:.4f}"


def plot(results: Results, path: Path, title: str) -> str:
    """AUC against ε; ways without one are lines across."""
    figure, (axes,) = panels()
    dashes = itertools.cycle(("--", ":", "-."))
    for name, by in results.items():
        means = {float(budget): np.mean([cell["test"]["auc"] for cell in cells]) for budget, cells in by.items()}
        if list(means) == [0.0]:
            axes.axhline(means[0.0], linestyle=next(dashes), color="#777777", label=name)
        else:
            axes.plot(list(means), list(means.values()), marker="o", label=name)
    axes.set(title=title, xlabel="ε", ylabel="AUC on test rows", xscale="log")
    return save(figure, path)
