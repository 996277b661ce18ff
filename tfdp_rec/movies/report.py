"""The page a run leaves behind: a table, plots, and what is promised to whom.

Losses and recalls are computed from users' data and no noise was added to them: the page says so, and is not covered by
the ε that it reports. Diagnostics of clipping never enter it.
"""

from __future__ import annotations

import math
from typing import Any

from tfdp_rec import mechanisms
from tfdp_rec.movies.run_folder import RunFolder

POPULARITY = "popularity"  # what everybody watches, recommended to everybody: no mechanism, but a line of the table

_WARNING = """> Losses and recalls below were computed from users' data without noise. They are for those who may see
> it; the ε of the table covers the released model, not this page.
"""


def label(name: str) -> str:
    """What to call a line of the report."""
    return name if name == POPULARITY else mechanisms.named(name).label


def _colour(name: str) -> str:
    return "#999999" if name == POPULARITY else mechanisms.named(name).colour


def table(results: list[dict[str, Any]], cutoff: int) -> list[list[str]]:
    """The rows of the final table, the heading first."""
    rows = [["mechanism", f"recall@{cutoff}", "ε (user-level)", "steps/s", "steps"]]
    for r in results:
        rows.append(
            [
                label(r["mechanism"]),
                f"{r['recalls'][f'recall@{cutoff}']:.4f}",
                _epsilon(r["epsilon"]),
                f"{r['steps_per_second']:.1f}" if r["steps_per_second"] else "–",
                str(r["steps"] or "–"),
            ]
        )
    return rows


def _epsilon(value: float | None) -> str:
    if value is None:
        return "– (counts of the data, no privacy)"
    return "∞" if math.isinf(value) else f"{value:.2f}"


def as_text(rows: list[list[str]]) -> str:
    """Rows in columns, for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _as_markdown(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def write(folder: RunFolder, config: dict[str, Any], results: list[dict[str, Any]], statements: dict[str, str]) -> None:
    """Writes plots and `report.md` from a run's metrics.

    Args:
        folder: the run's.
        config: what the run was asked to do.
        results: one record a mechanism: recalls, ε, steps, steps_per_second.
        statements: mechanism -> its privacy statement.
    """
    cutoff = 10 if "recall@10" in results[0]["recalls"] else max(int(k.split("@")[1]) for k in results[0]["recalls"])
    curves = folder.metrics()
    _plot(folder, "loss", "training loss", curves, {})
    flat = {r["mechanism"]: r["recalls"][f"recall@{cutoff}"] for r in results if r["mechanism"] == "popularity"}
    _plot(folder, f"recall@{cutoff}", f"recall@{cutoff} on held-out users", curves, flat)
    _plot(folder, "epsilon", "ε spent (user-level)", curves, {})
    rows = table(results, cutoff)
    said = "\n".join(f"### {label(name)}\n\n```\n{text.strip()}\n```\n" for name, text in statements.items())
    folder.write_text(
        "report.md",
        f"# Run of {config['when']}\n\n{_WARNING}\n{_as_markdown(rows)}\n\n"
        f"{config['users']:,} users, {config['movies']:,} movies, {config['events']:,} events; {config['steps']} steps "
        f"of {config['batch_size']} users on average out of {config['train_users']:,}; clip {config['clip']}; "
        f"δ = {config['delta']:.1e}.\n\n![loss](loss.png)\n![recall](recall.png)\n![epsilon](epsilon.png)\n\n"
        f"## What is promised\n\n{said}",
    )


def _plot(folder: RunFolder, key: str, title: str, curves: list[dict[str, Any]], levels: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), constrained_layout=True)
    for name in dict.fromkeys(c["mechanism"] for c in curves):
        points = [(c["step"], c[key]) for c in curves if c["mechanism"] == name and c.get(key) is not None]
        points = [p for p in points if math.isfinite(p[1])]
        if points:
            axes.plot(*zip(*points), label=label(name), color=_colour(name), marker=".")
    for name, level in levels.items():
        axes.axhline(level, label=label(name), color=_colour(name), linestyle="--")
    axes.set_xlabel("steps")
    axes.set_ylabel(title)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(folder / f"{key.split('@')[0]}.png", dpi=130)
    plt.close(figure)
