"""The page a run leaves behind: a table, plots, and what is promised to whom.

Losses and recalls are computed from users' data and no noise was added to them: the page says so, and is not covered by
the ε that it reports. Diagnostics of clipping never enter it.
"""

from __future__ import annotations

import math
from typing import Any

from tfdp_rec.metrics import Mean
from tfdp_rec.movies import contestants
from tfdp_rec.movies.run_folder import RunFolder

_SHOWN = ("recall@10", "nDCG@10")
_WARNING = """> Losses, recalls and nDCG below were computed from users' data without noise. They are for those who may
> see it; the ε of the table covers the released recommender, not this page.
"""


def label(name: str) -> str:
    """What to call a line of the report."""
    return contestants.named(name).label


def _colour(name: str) -> str:
    return contestants.named(name).colour


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the final table, the heading first."""
    rows = [["recommender", *_SHOWN, "ε (user-level)", "steps/s", "steps"]]
    for r in results:
        rows.append(
            [
                ("two-tower, " if contestants.is_two_tower(r["mechanism"]) else "") + label(r["mechanism"]),
                *(with_interval(r, metric) for metric in _SHOWN),
                _epsilon(r["epsilon"]),
                f"{r['steps_per_second']:.1f}" if r["steps_per_second"] else "–",
                str(r["steps"] or "–"),
            ]
        )
    return rows


def with_interval(result: dict[str, Any], metric: str) -> str:
    """A mean and its 95% interval."""
    mean = Mean(result["recalls"][metric], result["errors"][metric], result["test_users"])
    low, high = mean.interval()
    return f"{mean.value:.4f} [{max(low, 0.0):.4f}, {min(high, 1.0):.4f}]"


def _epsilon(value: float | None) -> str:
    if value is None:
        return "∞ (exact counts)"
    return "∞" if math.isinf(value) else f"{value:.2f}"


def as_text(rows: list[list[str]]) -> str:
    """Rows in columns, for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def as_markdown(rows: list[list[str]]) -> str:
    """Rows as a table of Markdown, the heading first."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def write(folder: RunFolder, config: dict[str, Any], results: list[dict[str, Any]], statements: dict[str, str]) -> None:
    """Writes plots and `report.md` from a run's metrics.

    Args:
        folder: the run's.
        config: what the run was asked to do, and what it `released`.
        results: one record a contestant: recalls, errors, ε, steps, steps_per_second.
        statements: contestant -> its privacy statement.
    """
    curves = folder.metrics()
    trained = {curve["mechanism"] for curve in curves}
    flat = {r["mechanism"]: r["recalls"]["recall@10"] for r in results if r["mechanism"] not in trained}
    _plot(folder, "loss", "training loss", curves, {})
    _plot(folder, "recall@10", "recall@10 on held-out users", curves, flat)
    _plot(folder, "epsilon", "ε spent (user-level)", curves, {})
    said = "\n".join(f"### {label(name)}\n\n```\n{text.strip()}\n```\n" for name, text in statements.items())
    folder.write_text(
        "report.md",
        f"# Run of {config['when']}\n\n{_WARNING}\n{as_markdown(table(results))}\n\n"
        f"{_tested(results[0]['test_users'])}\n\n"
        f"{config['users']:,} users, {config['movies']:,} movies, {config['events']:,} events. Two-towers: "
        f"{config['steps']} steps of {config['batch_size']} users on average out of {config['train_users']:,}; clip "
        f"{config['clip']}. δ = {config['delta']:.1e}.\n\n![loss](loss.png)\n![recall](recall.png)\n"
        f"![epsilon](epsilon.png)\n\n## What is released\n\n{_released(config['released'], statements)}\n\n"
        f"## What is promised\n\n{said}",
    )


def _tested(users: int) -> str:
    return (
        f"Tested on {users:,} users from whom nobody learnt; all are asked the same, and what they were told is left "
        "out. In brackets are 95% intervals of the mean over such users: 1.96 standard errors on either side, by the "
        "Gaussian approximation. The users are the same in all lines, so that differences are surer than these."
    )


def _released(name: str, statements: dict[str, str]) -> str:
    """Which recommender the folder holds, and what it would mean to let out another."""
    if not contestants.named(name).claims_epsilon:
        return f"**{label(name)}** is in `servable/`. It is not private: no ε holds for it."
    private = [each for each in statements if contestants.named(each).claims_epsilon]
    alone = f"**{label(name)}** is in `servable/`, and it alone; it was chosen by its name, not by how it tested."
    if len(private) < 2:
        return alone
    return (
        f"{alone} Each ε is of one recommender by itself, and {', '.join(map(label, private))} were made from the same "
        "users: whoever lets out several of them, or one more from another run on these users, has spent the sum of "
        "their ε, at the sum of their δ."
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
