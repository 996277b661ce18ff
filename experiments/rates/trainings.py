"""The trainings of `python -m experiments.rates`.

A model is compiled once for a batch size: weights are put back before each training, and rate, clip and noise are
variables, so that a training costs its steps.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

import tfdp_rec
from experiments.adaptive.settings import Sizes as ClickSizes
from experiments.adaptive.trainings import Trainings as Clicks
from experiments.rates.settings import Grid, Sizes
from experiments.study import Study
from experiments.tables import markdown
from tfdp_rec.core.mechanism.noise_walk import noise_walk
from tfdp_rec.core.mechanism.rules import Recursion
from tfdp_rec.data import NextItemExamples, PoissonSampling
from tfdp_rec.datasets.movielens import generated
from tfdp_rec.job.evaluation import Evaluation
from tfdp_rec.models import TwoTower
from tfdp_rec.privacy import calibrate_noise


class Task(abc.ABC):
    """A model on its data, trained by LazyDPSGD at many settings.

    Args:
        sizes: of every training.
    """

    name: str
    measure: str
    units: int
    width: int

    def __init__(self, sizes: Sizes):
        self.sizes = sizes

    @functools.cache  # noqa: B019  # it lives as long as the study
    def noise(self, epsilon: float, batch: int) -> float:
        """σ of all steps."""
        sampling = PoissonSampling(self.units, batch)
        return calibrate_noise(epsilon, self.sizes.delta, sampling, self.sizes.steps, accountant="rdp")

    def rate(self, length: float, clip: float, noise: float, batch: int) -> float:
        """The rate at which noise alone gives a row that length."""
        alone = noise_walk(Recursion(), np.ones(self.sizes.steps), noise * clip / batch)
        return length / (alone * self.width**0.5)

    def train(self, epsilon: float, clip: float, batch: int, length: float, seed: int) -> dict[str, Any]:
        """One training's score, and the mean loss of its last steps."""
        noise, sampling = self.noise(epsilon, batch), PoissonSampling(self.units, batch, unit="user")
        keras.utils.set_random_seed(1 + seed)
        model, rate = self.new_model(), self.rate(length, clip, noise, batch)
        settings: dict[str, Any] = {"l2_norm_clip": clip, "noise_multiplier": noise, "expected_batch_size": batch}
        self.compile(model, tfdp_rec.LazyDPSGD(rate, dense_optimizer=self.dense_optimizer(), **settings))
        history = model.fit(self.batches(sampling), steps_per_epoch=self.sizes.steps // 4, epochs=4, verbose=0)
        loss = history.history["loss"][-1]
        return {"score": self.score(model), "loss": loss, "rate": rate, "sigma": noise}

    def dense_optimizer(self) -> Any:
        """Of what is no table."""
        return None

    @abc.abstractmethod
    def new_model(self) -> Any:
        """Untrained."""

    @abc.abstractmethod
    def compile(self, model: Any, optimizer: Any) -> None:
        """For its loss."""

    @abc.abstractmethod
    def batches(self, sampling: PoissonSampling) -> Any:
        """Of the training units."""

    @abc.abstractmethod
    def score(self, model: Any) -> float:
        """On units that it was not trained on."""


class Towers(Task):
    """The main job's two-tower without a hidden layer, on generated timelines."""

    name, measure = "two-tower", "recall@10"

    def __init__(self, sizes: Sizes):
        super().__init__(sizes)
        self.width = sizes.width
        timelines = generated.timelines(sizes.users, sizes.movies, 60 * sizes.users)
        train, test = timelines.split_users(0.8, seed=0, min_length=0)
        test = test[timelines.lengths[test] >= 2]
        self.units, self._ids = len(train), timelines.movie_ids
        self._examples = NextItemExamples(timelines, train, negatives=sizes.movies // 2)
        self._tests = Evaluation(NextItemExamples(timelines, test, negatives=0), 0)
        counts = np.bincount(np.concatenate([timelines[user] for user in train]), minlength=sizes.movies + 1)
        self._prior = counts[1:] + 1.0  # exact, which is for a study alone

    def new_model(self) -> Any:
        return TwoTower(self._ids, self.width, 0, self._prior)

    def compile(self, model: Any, optimizer: Any) -> None:
        model.compile(optimizer)

    def batches(self, sampling: PoissonSampling) -> Any:
        return sampling.batches(self._examples.fetch, shared=self._examples.shared)

    def score(self, model: Any) -> float:
        return self._tests.measure(model)["recall@10"].value


class ClickModel(Task):
    """The model of `experiments.adaptive`, whose dense variables have an Adam of their own."""

    name, measure = "clicks", "AUC"

    def __init__(self, sizes: Sizes):
        super().__init__(sizes)
        self._clicks = Clicks(ClickSizes(steps=sizes.steps), None)  # type: ignore[arg-type]  # keeps no cells of its own
        self.units, self.width = self._clicks.sizes.examples, self._clicks.sizes.width

    def dense_optimizer(self) -> Any:
        return keras.optimizers.Adam(0.005)

    def new_model(self) -> Any:
        return self._clicks._model()

    def compile(self, model: Any, optimizer: Any) -> None:
        model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))

    def batches(self, sampling: PoissonSampling) -> Any:
        return sampling.batches(lambda rows: self._clicks._fetch("train", rows))

    def score(self, model: Any) -> float:
        return self._clicks._score(model, "test")


def report(study: Study, sizes: Sizes, grid: Grid) -> str:
    """Scores by the length of noise in a row: a line for each ε, clip and batch."""
    lines = []
    for kind in (Towers, ClickModel):
        task = kind(sizes)
        head = [f"{task.name}, {task.measure}", *(f"length {length:g}" for length in grid.lengths)]
        lines += [*markdown(head, _rows(study, task, grid)), ""]
    return "\n".join([*lines, *_noises(sizes)])


def _noises(sizes: Sizes) -> list[str]:
    """What batches and steps cost, whatever the data: σ, and a weight's walk at rate · clip = 1, for 100,000 units."""
    rows = []
    for batch in (256, 1024, 4096, 16384):
        entries = []
        for steps in (100, 1000):
            noise = calibrate_noise(3.0, sizes.delta, PoissonSampling(100_000, batch), steps, accountant="rdp")
            walk = noise_walk(Recursion(), np.ones(steps), noise / batch)
            entries.append(f"σ {noise:.2f}, {1000 * noise / batch:.2f}, {1000 * walk:.1f}")
        rows.append([f"{batch:,}", *entries])
    return markdown(["B", *(f"{n} steps: σ, 1000 σ/B, 1000 σ √T / B" for n in (100, 1000))], rows)


def _rows(study: Study, task: Task, grid: Grid) -> list[list[str]]:
    found: list[list[str]] = []
    for batch in grid.batches:
        for epsilon in grid.epsilons:
            for clip in grid.clips:
                cells = [_cell(study, task, (epsilon, clip, batch, length), grid.seeds) for length in grid.lengths]
                noise = task.noise(epsilon, batch)
                found.append([f"B {batch}, ε {epsilon:g} (σ {noise:.2f}), C {clip:g}", *map(_shown, cells)])
    return found


def _cell(study: Study, task: Task, settings: tuple[float, float, int, float], seeds: int) -> list[Mapping[str, Any]]:
    epsilon, clip, batch, length = settings
    found: list[Mapping[str, Any]] = []
    for seed in range(seeds):
        name = f"{task.name}-epsilon{epsilon:g}-clip{clip:g}-batch{batch}-length{length:g}-seed{seed}"
        path = study.folder / "cells" / f"{name}.json"
        if not path.exists():  # not by way of `study.cell`, which clears the session and with it the compiled step
            study.write(f"cells/{name}.json", task.train(epsilon, clip, batch, length, seed))
        found.append(study.cell(name, dict))
    return found


def _shown(cells: list[Mapping[str, Any]]) -> str:
    scores, rate = [cell["score"] for cell in cells], cells[0]["rate"]
    return f"{np.mean(scores):.4f} (rate {rate:.3g}, loss {np.mean([cell['loss'] for cell in cells]):.3g})"
