"""What the AdaFEST study's trainings depend on, and which of them it makes."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp_rec.mechanisms import ada_fest, dp_sgd, exponential, fest
from tfdp_rec.settings import NOT_NEGATIVE, POSITIVE, option

FROZEN, CONFINED = "frozen", "AdaFEST+"  # no table is updated; AdaFEST among rows that were chosen before training
PER_VALUE = "AdaFEST per value"  # thresholds in proportion to tables' widths
MECHANISMS = (dp_sgd.label, FROZEN, ada_fest.label, PER_VALUE, fest.label, CONFINED, exponential.label)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one training depends on; `days` and `day_epsilon` are the stream's."""

    examples: int = option(400_000, "to train on", POSITIVE)
    test_examples: int = 40_000
    batch_size: int = option(2000, "expected examples in a step", POSITIVE)
    steps: int = option(200, "of each training", POSITIVE)
    hidden: tuple[int, ...] = option((64, 64), "widths of hidden layers; the paper: 598, four times", POSITIVE)
    learning_rate: float = option(20.0, "of the tables", POSITIVE, metavar="ETA")
    dense_learning_rate: float = option(1e-2, "of Adam, for all else", POSITIVE, metavar="ETA")
    public: int = option(0, "public sentences to train on before, of --task text", NOT_NEGATIVE)
    delta: float = 1e-6
    days: int = option(6, "of the stream", POSITIVE)
    day_epsilon: float = 3.0


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which trainings the study makes. Thresholds are in standard deviations of the votes' noise."""

    epsilons: tuple[float, ...] = option((1.0, 3.0, 8.0), "of each training", POSITIVE, metavar="EPSILON")
    mechanisms: tuple[str, ...] = option(
        MECHANISMS, "of the frontier and of tuning", choices=MECHANISMS, metavar="NAME"
    )
    thresholds: tuple[float, ...] = option(
        (3.0, 4.5, 7.0, 8.0, 10.0, 15.0, 25.0, 35.0), "AdaFEST's, in deviations of noise", metavar="Z"
    )
    rows: tuple[int, ...] = (100, 1000, 10_000)
    draws: tuple[int, ...] = (30, 300, 3000)
    seeds: int = option(1, "trainings of each point", POSITIVE)
    tuned_threshold: float = 15.0
    table_rates: tuple[float, ...] = option((10.0, 20.0, 40.0), "that tuning tries", POSITIVE, metavar="ETA")
    dense_rates: tuple[float, ...] = option((3e-3, 1e-2, 3e-2), "that tuning tries", POSITIVE, metavar="ETA")


# DP-SGD's best of nine pairs, on validation sentences.
_TEXT_RATES = {"learning_rate": 3.0, "dense_learning_rate": 1e-3}
SMALL: dict[str, dict[str, Any]] = {
    "clicks": {"examples": 100_000, "test_examples": 40_000, "batch_size": 1000, "steps": 100, "days": 3},
    "text": {
        "examples": 60_000, "test_examples": 10_000, "batch_size": 1000, "steps": 60, "public": 60_000, **_TEXT_RATES,
    },
}  # fmt: skip
TEXT: dict[str, Any] = {
    "examples": 200_000, "test_examples": 20_000, "batch_size": 2000, "steps": 200, "public": 200_000, **_TEXT_RATES,
}  # fmt: skip


def defaults(task: str, quick: bool) -> tuple[Sizes, Grid]:
    """What holds where the command line says nothing.

    Args:
        task: clicks or text.
        quick: whether small sizes and ε = 1 are asked for.
    """
    sizes, grid = Sizes(**(SMALL[task] if quick else TEXT if task == "text" else {})), Grid()
    if task == "text":  # of a single table
        grid = dataclasses.replace(grid, mechanisms=tuple(name for name in MECHANISMS if name != PER_VALUE))
    if quick:
        grid = dataclasses.replace(grid, epsilons=(1.0,), rows=grid.rows[:2], draws=grid.draws[:2])
    return sizes, grid
