"""Settings of the study: sizes that all trainings share, and which trainings there are."""

from __future__ import annotations

import dataclasses

from tfdp_rec.settings import POSITIVE, option


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all trainings share."""

    users: int = option(20_000, "generated users of the timelines", POSITIVE)
    movies: int = option(1_000, "generated movies", POSITIVE)
    width: int = option(16, "of the two-tower's rows", POSITIVE)
    steps: int = option(200, "training steps", POSITIVE)
    delta: float = option(1e-6, "of the guarantee", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which trainings."""

    seeds: int = option(2, "trainings of each cell", POSITIVE)
    epsilons: tuple[float, ...] = option((1.0, 8.0), "budgets", POSITIVE)
    clips: tuple[float, ...] = option((0.1, 1.0), "bounds on an example's gradient norm", POSITIVE)
    batches: tuple[int, ...] = option((256, 1024), "users in a batch, on average", POSITIVE)
    lengths: tuple[float, ...] = option((0.1, 0.3, 1.0, 3.0, 10.0, 30.0), "of the noise in a row", POSITIVE)
