"""Settings of the study: the sizes of a training, and which trainings it makes."""

from __future__ import annotations

import dataclasses

from tfdp_rec.settings import POSITIVE, option


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the trainings of a log share."""

    batch_size: int = option(4096, "expected units in a step", POSITIVE)
    steps: int = option(200, "of a private training", POSITIVE)
    free_batch_size: int = option(1024, "of trainings without privacy", POSITIVE)
    free_steps: tuple[int, ...] = option((500, 1000, 2000, 4000), "of these, to choose from", POSITIVE)
    width: int = option(8, "of a category's vector", POSITIVE)
    hidden: tuple[int, ...] = option((32,), "widths of dense layers", POSITIVE)
    delta: float = option(1e-6, "of the guarantee", POSITIVE)
    per_user: int = option(0, "rows of a user in a step, whose users are the units then; 0: the log's units")
    rows_alone: bool = option(False, "each row is a unit, in a log whose units are users")
    correction: float = option(30.0, "noise multiplier of the release that corrects predictions", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which trainings there are."""

    epsilons: tuple[float, ...] = option((1.0, 3.0, 8.0), "budgets", POSITIVE)
    seeds: int = option(5, "trainings of each chosen setting", POSITIVE)
    lengths: tuple[float, ...] = option((0.2, 0.4, 0.8), "of the noise in a row, which decide the rate", POSITIVE)
    clips: tuple[float, ...] = option((1.0, 3.0), "bounds on a unit's gradient norm", POSITIVE)
