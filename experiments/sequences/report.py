"""The sequence study's table and plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import tables
from experiments.sequences.settings import METHODS, SUMS
from experiments.sequences.trainings import unpacked


def page(results: Sequence[dict[str, Any]], name: str, real: bool) -> str:
    """All figures as Markdown: a row a method and budget, a column a number of users."""
    users = sorted({result["users"] for result in results})
    rows = []
    for method, epsilon in sorted(
        {(r["method"], r["epsilon"]) for r in results}, key=lambda one: (one[1] == 0, one[1], METHODS.index(one[0]))
    ):
        cells = [_shown([r for r in results if (r["method"], r["epsilon"], r["users"]) == (method, epsilon, n)])
                 for n in users]  # fmt: skip
        rows.append([f"{epsilon:g}" if epsilon else "none", method, *cells])
    of = "its own users" if real else "users generated after it"
    told = f"HR@10 on {name}, {of}; ± is the error over users and, of several, over seeds."
    lines = ["# The next item", "", told, ""]
    lines += tables.markdown(["ε", "method", *(f"{count:,} users" for count in users)], rows)
    lines += ["", *_above_sums(results), "", *_seconds(results), "", "![HR@10 by users](users.png)", ""]
    return "\n".join(lines)


def _shown(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return ""
    means = [result["HR@10"] for result in found]
    between = np.var(means, ddof=1) / len(means) if len(means) > 1 else 0.0
    error = float(np.sqrt(np.mean([result["error"] for result in found]) ** 2 + between))
    return f"{np.mean(means):.4f} ± {error:.4f}"


def _above_sums(results: Sequence[dict[str, Any]]) -> list[str]:
    """Trained models less private sums of the same budget, user by user: the mean over seeds, and its error."""
    users = sorted({result["users"] for result in results})
    rows = []
    for method, epsilon in sorted({(r["method"], r["epsilon"]) for r in results if r["epsilon"]}):
        cells = [_difference(results, method, epsilon, count) for count in users]
        if method != SUMS and any(cells):
            rows.append([f"{epsilon:g}", method, *cells])
    return tables.markdown(["ε", "less sums, paired", *(f"{count:,} users" for count in users)], rows)


def _difference(results: Sequence[dict[str, Any]], method: str, epsilon: float, users: int) -> str:
    hits = {
        name: [unpacked(r["hits"], r["asked"]) for r in results
               if (r["method"], r["epsilon"], r["users"]) == (name, epsilon, users) and r.get("hits")]
        for name in (method, SUMS)
    }  # fmt: skip
    if not all(hits.values()):
        return ""
    each = np.mean(hits[method], axis=0) - np.mean(hits[SUMS], axis=0)  # of a user, over seeds
    seeds = [np.var([np.mean(one) for one in found], ddof=1) / len(found) for found in hits.values() if len(found) > 1]
    error = float(np.sqrt(np.var(each, ddof=1) / len(each) + sum(seeds)))
    return f"{np.mean(each):+.4f} ± {error:.4f}"


def _seconds(results: Sequence[dict[str, Any]]) -> list[str]:
    found: dict[tuple[str, int], list[float]] = {}
    for result in results:
        found.setdefault((result["method"], result["users"]), []).append(result["seconds"])
    users = sorted({result["users"] for result in results})
    rows = [[method, *(f"{np.mean(found[method, n]):.0f}" if (method, n) in found else "" for n in users)]
            for method in METHODS]  # fmt: skip
    return tables.markdown(["seconds", *(f"{count:,} users" for count in users)], rows)


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """HR@10 by the number of users, a panel each budget; dotted without privacy."""
    epsilons = sorted({result["epsilon"] for result in results if result["epsilon"]})
    figure, axes = tables.panels(max(1, len(epsilons)), 4.4, 3.6, sharey=True)
    for panel, epsilon in zip(axes, epsilons or [0.0]):
        for number, method in enumerate(METHODS):
            for budget, line in ((epsilon, "o-"), (0.0, ":")):
                points: dict[int, list[float]] = {}
                for result in results:
                    if (result["method"], result["epsilon"]) == (method, budget):
                        points.setdefault(result["users"], []).append(result["HR@10"])
                if points:
                    shown = sorted((users, float(np.mean(values))) for users, values in points.items())
                    label = method + ("" if budget else ", no privacy")
                    panel.plot(*zip(*shown), line, color=f"C{number}", label=label)
        panel.set(xscale="log", xlabel="users", title=f"ε = {epsilon:g}" if epsilon else "no privacy")
    axes[0].set_ylabel("HR@10")
    tables.save(figure, path)
