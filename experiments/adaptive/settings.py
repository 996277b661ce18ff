"""Settings of the study: sizes that all trainings share, and which trainings there are."""

from __future__ import annotations

import dataclasses

from tfdp_rec.settings import POSITIVE, option


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all trainings share."""

    examples: int = option(50_000, "training examples", POSITIVE)
    test_examples: int = option(30_000, "examples to choose a rate by, and as many to judge by", POSITIVE)
    largest_table: int = option(1000, "rows of the largest tables", POSITIVE)
    width: int = option(8, "of a row", POSITIVE)
    batch_size: int = option(256, "expected batch size", POSITIVE)
    steps: int = option(250, "training steps", POSITIVE)
    delta: float = option(1e-6, "of the guarantee", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which trainings."""

    seeds: int = option(3, "trainings of the best rate", POSITIVE)
    epsilons: tuple[float, ...] = option((1.0, 3.0, 8.0), "budgets", POSITIVE)
