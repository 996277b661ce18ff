"""`row_scale` against none: the two-tower on generated timelines, whose movies are as popular as Zipf has it.

Counts are those of users who are neither trained on nor tested, public as far as this study goes. Each way chooses rate
and clip by one training of each of as many cells, on users kept for that; then it is judged on others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.rates.command import Grid, Sizes
from experiments.rates.trainings import Towers
from experiments.study import Study
from experiments.tables import markdown
from tfdp_rec.data import NextItemExamples
from tfdp_rec.datasets.movielens import generated
from tfdp_rec.job.evaluation import Evaluation
from tfdp_rec.optimizers import scale_by_counts

BATCH = 1024
LENGTHS, CLIPS = (0.3, 1.0), (0.1, 1.0)  # among which each way may choose


class Scaled(Towers):
    """The two-tower with rows weighed by (c / (count + c))^power, c the mean count; power 0 for none."""

    def __init__(self, sizes: Sizes, power: float):
        super().__init__(sizes)
        self.power = power
        timelines = generated.timelines(sizes.users, sizes.movies, 60 * sizes.users)
        _, rest = timelines.split_users(0.8, seed=0, min_length=0)
        public, kept, test = np.array_split(rest[timelines.lengths[rest] >= 2], 3)
        watched = np.concatenate([timelines[user] for user in public])
        self._counts = np.bincount(watched, minlength=sizes.movies + 1).astype(np.float64)
        parts = {"validation": kept, "test": test}
        self._parts = {n: Evaluation(NextItemExamples(timelines, part, negatives=0), 0) for n, part in parts.items()}

    def row_scale(self) -> dict[str, np.ndarray] | None:
        if not self.power:
            return None
        scale = scale_by_counts(self._counts, self._counts.mean(), self.power)
        return {"context": scale, "label": scale}

    def scores(self, epsilon: float, clip: float, length: float, seed: int) -> dict[str, Any]:
        """One training's recalls on both parts."""
        self._found: dict[str, float] = {}
        return {**self.train(epsilon, clip, BATCH, length, seed), **self._found}

    def score(self, model: Any) -> float:
        self._found = {part: tests.measured(model)["recall@10"].value for part, tests in self._parts.items()}
        return self._found["validation"]


def report(study: Study, sizes: Sizes, grid: Grid) -> str:
    """recall@10, mean and standard error over seeds, with the clip and length that were chosen."""
    rows = []
    for power in (0.0, 0.25, 0.5):
        task = Scaled(sizes, power)
        entries = [_entry(study, task, epsilon, grid.seeds) for epsilon in grid.epsilons]
        rows.append([f"power {power:g}" if power else "none", *entries])
    return "\n".join(markdown(["row_scale", *(f"ε = {epsilon:g}" for epsilon in grid.epsilons)], rows)) + "\n"


def _entry(study: Study, task: Scaled, epsilon: float, seeds: int) -> str:
    tried = {(c, n): _cell(study, task, epsilon, c, n, 0)["validation"] for c in CLIPS for n in LENGTHS}
    clip, length = max(tried, key=tried.__getitem__)
    found = [_cell(study, task, epsilon, clip, length, 1 + seed)["test"] for seed in range(seeds)]
    error = np.std(found, ddof=1) / np.sqrt(seeds) if seeds > 1 else float("nan")
    return f"{np.mean(found):.4f} ± {error:.4f} (C {clip:g}, length {length:g})"


def _cell(study: Study, task: Scaled, epsilon: float, clip: float, length: float, seed: int) -> dict[str, Any]:
    name = f"scales-power{task.power:g}-epsilon{epsilon:g}-clip{clip:g}-length{length:g}-seed{seed}"
    if not (study.folder / "cells" / f"{name}.json").exists():
        study.write(f"cells/{name}.json", task.scores(epsilon, clip, length, seed))
    return study.cell(name, dict)
