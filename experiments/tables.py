"""Tables in Markdown and plots in files, for every study and benchmark alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    r"""The lines of a table.

    Args:
        heading: of the columns.
        rows: a text for each column.

    Example:
        >>> print(*markdown(["way", "ms"], [["SGD", "8.8"]]), sep="\n")
        | way | ms |
        |---|---|
        | SGD | 8.8 |
    """
    lines = ["| " + " | ".join(row) + " |" for row in [heading, *rows]]
    return [lines[0], "|" + "---|" * len(heading), *lines[1:]]


def columns(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a terminal: the first column to the left, the others to the right.

    Args:
        heading: of the columns.
        rows: a text for each column.

    Example:
        >>> print(columns(["way", "ms"], [["SGD", "8.8"], ["DPSGD", "50.4"]]))
        way     ms
        SGD    8.8
        DPSGD 50.4
    """
    table = [list(heading), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(heading))]
    lines = [
        " ".join([row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:]))])
        for row in table
    ]
    return "\n".join(line.rstrip() for line in lines)


def panels(count: int = 1, width: float = 6.4, height: float = 4.0, **options: Any) -> tuple[Figure, list[Any]]:
    """A figure with panels side by side, drawn without a screen.

    Args:
        count: how many.
        width: of a panel, in inches.
        height: of the figure.
        **options: for `Figure.subplots`.
    """
    figure = Figure(figsize=(count * width, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


def save(figure: Figure, path: Path) -> str:
    """Writes a figure with the legends of its panels; its name.

    Args:
        figure: whose lines have labels.
        path: where to; the suffix says the format.
    """
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    return path.name
