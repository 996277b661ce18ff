"""Tables and plots of the news study."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import tables
from experiments.news.published import PublishedLaplace
from experiments.news.ranking import METRICS
from experiments.news.trainings import VARIED
from tfdp_rec.federated import AttentionMechanism, PureLaplace

TITLES = {
    "untrained": "Untrained",
    "centralized": "Centralized",
    "fedrec": "FedRec, no privacy",
    "dp-fedrec": "DP-FedRec",
    "published": "PrivateRec, published (claim does not hold)",
    "corrected": "PrivateRec, corrected, user encoder untrained",
    "corrected+user": "PrivateRec, corrected, noised user gradient",
    "corrected+consented": "PrivateRec, corrected, 5% consenting readers",
    "corrected+public": "PrivateRec, corrected, public pseudo-readers",
}
COLOURS = {"fedrec": "C7", "dp-fedrec": "C3", "published": "C1", "corrected": "C4", "corrected+public": "C0"}
Results = dict[str, dict[str, Any]]


def write(folder: Path, results: Results, encoders: Sequence[str]) -> str:
    """Write tables and figures into the folder; the report's text.

    Args:
        folder: Of the study.
        results: By cell name.
        encoders: In the order of the tables.
    """
    found = {"table_1": table(results, encoders, "train"), "table_2": table(results, encoders, "served")}
    for name, rows in found.items():
        (folder / f"{name}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    figures = [figure_4(folder, results), figure_5(folder, results), figure_6(folder, results, encoders[0]),
               figure_7(folder, results, encoders[0])]  # fmt: skip
    parts = ["# Federated news", "", NOTE, "", "## Table 1: training (no noise in serving)", ""]
    parts += [*markdown(found["table_1"]), "", "## Table 2: serving at epsilon 10 per answer", ""]
    parts += [*markdown(found["table_2"]), "", *(f"![{name}]({name})" for name in figures if name), ""]
    return "\n".join(parts)


NOTE = (
    "Epsilon is per round (training) or per answer (serving) and per clicked item: pure, by Laplace noise as in the "
    "paper's tables, or with delta 1e-5 where a row says Gaussian. `all rounds` is what the client that answered most "
    "often has spent in all, at delta 1e-5; ∞ where nothing bounds it. `no history` is the AUC of the same model when "
    "every reader is taken for the average one: what is above it is personal."
)


def pick(results: Results, **wanted: Any) -> list[dict[str, Any]]:
    """Results of all seeds of a cell; the defaults are ε 10, B = 5 and Laplace noise."""
    wanted = {"epsilon": 10.0, "num_basis": 5, "noise": "laplace", "most": 0} | wanted
    return [r for r in results.values() if all({"most": 0, **r}[name] == value for name, value in wanted.items())]


def table(results: Results, encoders: Sequence[str], how: str) -> list[dict[str, Any]]:
    """One row per encoder and method: means and standard deviations over seeds.

    Args:
        results: By cell name.
        encoders: In order.
        how: "train" or "served".
    """
    rows, kinds = [], {", Gaussian" * (noise == "gaussian"): {"noise": noise} for noise in ("laplace", "gaussian")}
    for epsilon, most in sorted({(r["epsilon"], r["most"]) for r in results.values() if r.get("most")}):
        words = f", Gaussian, ε {epsilon:g}, at most {most} answers"
        kinds[words] = {"noise": "gaussian", "epsilon": epsilon, "most": most}
    for encoder in encoders:
        for (method, title), (words, kind) in itertools.product(TITLES.items(), kinds.items()):
            found = pick(results, encoder=encoder, method=method, **kind)
            if not found or (how == "served" and method == "centralized"):
                continue
            values = {m: [r[how][m] for r in found] for m in METRICS}
            spent = [r["client_epsilon"] for r in found]
            rows.append(
                {"encoder": encoder, "method": title + words, "seeds": len(found)}
                | {m: float(np.mean(v)) for m, v in values.items()}
                | {f"{m} std": float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for m, v in values.items()}
                | {"no history": float(np.mean([r["no history"]["AUC"] for r in found]))}
                | {"all rounds": None if None in spent else max(spent)}
            )
    return rows


def markdown(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A table's rows as Markdown."""
    heading = ["encoder", "method", *METRICS, "no history", "all rounds"]
    return tables.markdown(heading, [_row(row) for row in rows])


def _row(row: dict[str, Any]) -> list[str]:
    numbers = [_spread(row[m], row[f"{m} std"], row["seeds"]) for m in METRICS]
    spent = "∞" if row["all rounds"] is None else f"{row['all rounds']:.0f}"
    return [row["encoder"], row["method"], *numbers, f"{row['no history']:.1f}", spent]


def _spread(mean: float, deviation: float, seeds: int) -> str:
    return f"{mean:.1f}" + (f" ± {deviation:.1f}" if seeds > 1 else "")


def _mean(found: list[dict[str, Any]], *keys: str) -> float:
    values: list[Any] = list(found)
    for key in keys:
        values = [value[key] for value in values]
    return float(np.mean(values))


def _with(results: Results, measured: str, method: str) -> list[dict[str, Any]]:
    """Results of a method with NRMS that hold a measurement."""
    return [r for r in pick(results, encoder="nrms", method=method) if measured in r]


def figure_4(folder: Path, results: Results) -> str | None:
    """AUC against the serving ε."""
    if not _with(results, "by serving epsilon", "fedrec"):
        return None
    figure, (axes,) = tables.panels(1, 6, 4)
    for method in COLOURS:
        found = _with(results, "by serving epsilon", method)
        epsilons = list(found[0]["by serving epsilon"])
        values = [_mean(found, "by serving epsilon", e, "AUC") for e in epsilons]
        axes.semilogx([float(e) for e in epsilons], values, "o-", color=COLOURS[method], label=TITLES[method])
        axes.axhline(_mean(found, "train", "AUC"), color=COLOURS[method], linestyle=":", linewidth=1)
    axes.set(xlabel="ε of one answer", ylabel="AUC", title="Serving (dotted: without noise in serving)")
    return tables.save(figure, folder / "figure_4.png")


def figure_5(folder: Path, results: Results) -> str | None:
    """Noise and AUC against the padding probability."""
    found = _with(results, "by padding", "corrected+public")
    if not found:
        return None
    figure, (left, right) = tables.panels(2, 4.5, 4)
    probabilities = np.linspace(0, 0.9, 19)
    for colour, epsilon in zip(("C0", "C1", "C2"), (0.1, 1.0, 10.0)):
        for calibration, line in ((PureLaplace(), "-"), (PublishedLaplace(), "--")):
            scales = [
                AttentionMechanism(5, epsilon, 0.0, padding=p, calibration=calibration).noise_scale
                for p in probabilities
            ]
            left.semilogy(probabilities, scales, line, color=colour, label=f"ε = {epsilon:g}" * (line == "-"))
        keys = [key for key in found[0]["by padding"] if key.startswith(f"{epsilon:g} ")]
        values = [_mean(found, "by padding", key, "AUC") for key in keys]
        right.plot([float(key.split()[1]) for key in keys], values, "o-", color=colour, label=f"ε = {epsilon:g}")
    left.set(xlabel="padding p", ylabel="scale of the Laplace noise", title="Noise (dashed: as published)")
    right.set(xlabel="padding p", ylabel="AUC", title="Serving, corrected + public")
    return tables.save(figure, folder / "figure_5.png")


def figure_6(folder: Path, results: Results, encoder: str) -> str | None:
    """AUC against the training ε."""
    return _lines(folder, results, encoder, "epsilon", "figure_6.png", "ε of one round")


def figure_7(folder: Path, results: Results, encoder: str) -> str | None:
    """AUC against the number of basis vectors."""
    return _lines(folder, results, encoder, "num_basis", "figure_7.png", "basis vectors B")


def _lines(folder: Path, results: Results, encoder: str, vary: str, name: str, label: str) -> str | None:
    figure, (axes,) = tables.panels(1, 6, 4)
    methods = VARIED
    points = sorted({r[vary] for r in results.values() if r["method"] in methods[1:] and r["encoder"] == encoder})
    for method in methods if vary == "epsilon" else methods[1:]:
        source = {p: pick(results, encoder=encoder, method=method, **{vary: p}) for p in points}
        if method == "dp-fedrec":
            source[float("inf")] = pick(results, encoder=encoder, method="fedrec")
        shown = [(i, _mean(found, "train", "AUC")) for i, found in enumerate(source.values()) if found]
        if shown:
            axes.plot(*zip(*shown), "o-", color=COLOURS[method], label=TITLES[method])
    axes.set_xticks(range(len(points)), ["∞" if p == float("inf") else f"{p:g}" for p in points])
    axes.set(xlabel=label, ylabel="AUC", title=f"Training, {encoder.upper()} (no noise in serving)")
    return tables.save(figure, folder / name)
