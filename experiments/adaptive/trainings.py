"""The trainings of `python -m experiments.adaptive`.

A contestant's model is compiled once: weights and optimizer are put back before each training, and noise
and learning rate are variables, so that a training costs its steps. Dense variables have the same Adam under all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp_rec
from experiments.adaptive.settings import Grid, Sizes
from experiments.generated import clicks
from experiments.generated.clicks import SyntheticCriteo, auc
from experiments.study import Study, spent
from experiments.tables import markdown
from tfdp_rec.data import PoissonSampling
from tfdp_rec.mechanisms import ada_fest, dp_sgd, lazy_dp_sgd
from tfdp_rec.optimizers import AdaFEST, Adagrad, Adam, PrivateOptimizer
from tfdp_rec.optimizers.sparse.draws import split_noise_multiplier
from tfdp_rec.privacy import calibrate_noise

DENSE_RATE = 0.005
SELECTION_FRACTION = 0.1
THRESHOLD = 2.0  # of AdaFEST, in standard deviations of the votes' noise


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A way to train the tables.

    Attributes:
        name: in the report.
        make: (settings that all have, sizes) -> its optimizer.
        rates: among which it may choose.
    """

    name: str
    make: Callable[[dict[str, Any], Sizes], PrivateOptimizer]
    rates: Sequence[float]


def _lazily(common: dict[str, Any], sizes: Sizes) -> PrivateOptimizer:
    return tfdp_rec.LazyDPSGD(1.0, **common)


def _eagerly(rule: Any) -> Callable[[dict[str, Any], Sizes], PrivateOptimizer]:
    return lambda common, sizes: tfdp_rec.DPSGD(1.0, table_rule=rule, **common)


def _choosing(rule: Any) -> Callable[[dict[str, Any], Sizes], PrivateOptimizer]:
    own: dict[str, Any] = {"contribution_clip": 1.0, "contribution_noise_multiplier": 1.0, "threshold": 1.0}
    return lambda common, sizes: AdaFEST(1.0, table_rule=rule, **own, **common)


CONTESTANTS = (
    Contestant(lazy_dp_sgd.label, _lazily, (2, 4, 8, 16)),
    Contestant(f"{dp_sgd.label}, Adagrad", _eagerly(Adagrad()), (0.03, 0.06, 0.12, 0.24)),
    Contestant(ada_fest.label, _choosing(None), (2, 4, 8, 16)),
    Contestant(f"{ada_fest.label}, Adagrad", _choosing(Adagrad()), (0.03, 0.06, 0.12, 0.24)),
    Contestant(f"{dp_sgd.label}, Adam", _eagerly(Adam()), (0.003, 0.006, 0.012, 0.024)),
)


class Trainings:
    """Data, models and cells.

    Args:
        sizes: of every training.
        study: keeps the results.
    """

    def __init__(self, sizes: Sizes, study: Study):
        self.sizes, self.study = sizes, study
        buckets = [min(size, sizes.largest_table) for size in clicks.KAGGLE_BUCKETS]
        self.logs, self.rows = SyntheticCriteo(buckets=buckets, seed=1), sum(buckets)
        self._first = np.concatenate([[0], np.cumsum(buckets)[:-1]]).astype(np.int32)
        self.sampling = PoissonSampling(sizes.examples, sizes.batch_size)
        self._ready: tuple[str, Any] = ("", None)

    @functools.cache  # noqa: B019  # it lives as long as the study
    def examples(self, part: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Features, the features' tables laid end to end, and labels."""
        found = self.logs.examples(self.sizes.examples if part == "train" else self.sizes.test_examples, part=part)
        return {"ids": found.categorical + self._first, "numeric": found.numeric}, found.labels

    @functools.cache  # noqa: B019
    def noise(self, epsilon: float) -> float:
        """σ of a whole step."""
        sizes = self.sizes
        return calibrate_noise(epsilon, sizes.delta, self.sampling, sizes.steps, accountant="rdp")

    def best_rate(self, contestant: Contestant, epsilon: float) -> float:
        """The rate of the best AUC on examples kept for that."""
        scores = {rate: self.cell(contestant, epsilon, rate, 0)["validation"] for rate in contestant.rates}
        return max(scores, key=scores.__getitem__)

    def cell(self, contestant: Contestant, epsilon: float, rate: float, seed: int) -> dict[str, Any]:
        """One training's AUC, on the examples of both parts."""
        name = f"{contestant.name.replace(', ', '-')}-epsilon{epsilon:g}-rate{rate:g}-seed{seed}"
        path = self.study.folder / "cells" / f"{name}.json"
        if not path.exists():
            self.study.write(f"cells/{name}.json", self._train(contestant, epsilon, rate, seed))
        return self.study.cell(name, dict)

    def _train(self, contestant: Contestant, epsilon: float, rate: float, seed: int) -> dict[str, Any]:
        model, blank = self._compiled(contestant)
        optimizer = model.optimizer
        keras.utils.set_random_seed(1 + seed)
        model.set_weights(self._model().get_weights())
        optimizer.load_own_variables(blank)
        optimizer.learning_rate = rate
        self._add_noise(optimizer, self.noise(epsilon))
        batches = self.sampling.batches(lambda rows: self._fetch("train", rows), seed=100 + seed)
        model.fit(batches, steps_per_epoch=self.sizes.steps, verbose=0)
        found: dict[str, Any] = {part: self._score(model, part) for part in ("validation", "test")}
        return found | {"epsilon": spent(optimizer, self.sampling, self.sizes.delta, self.sizes.steps)}

    def _add_noise(self, optimizer: PrivateOptimizer, noise: float) -> None:
        """All of it, or split between votes and gradients."""
        if isinstance(optimizer, AdaFEST):
            votes, noise = split_noise_multiplier(noise, SELECTION_FRACTION)
            settings = {"contribution_noise_multiplier": votes, "threshold": THRESHOLD * votes}
            optimizer.take({name: tf.constant(value, tf.float64) for name, value in settings.items()})
        optimizer.noise_multiplier = noise

    def _compiled(self, contestant: Contestant) -> tuple[Any, dict[str, np.ndarray]]:
        """A model that has its step, and its optimizer's variables before the first."""
        if self._ready[0] != contestant.name:
            model, sizes = self._model(), self.sizes
            common = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": sizes.batch_size}
            optimizer = contestant.make({**common, "dense_optimizer": keras.optimizers.Adam(DENSE_RATE)}, sizes)
            model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
            model.prepare(self._fetch("train", np.arange(2)))
            store: dict[str, Any] = {}
            optimizer.save_own_variables(store)
            self._ready = contestant.name, (model, {key: np.array(value) for key, value in store.items()})
        return self._ready[1]

    def _fetch(self, part: str, rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        features, labels = self.examples(part)
        return {name: values[rows] for name, values in features.items()}, labels[rows]

    def _model(self) -> Any:
        ids = keras.Input([clicks.NUM_CATEGORICAL], dtype="int32", name="ids")
        numeric = keras.Input([clicks.NUM_NUMERIC], name="numeric")
        rows = keras.layers.Flatten()(keras.layers.Embedding(self.rows, self.sizes.width)(ids))
        hidden = keras.layers.Dense(32, activation="relu")(keras.layers.Concatenate()([rows, numeric]))
        return tfdp_rec.PrivateModel({"ids": ids, "numeric": numeric}, keras.layers.Dense(1)(hidden))

    def _score(self, model: Any, part: str) -> float:
        features, labels = self.examples(part)
        return auc(labels, model.predict(features, batch_size=5000, verbose=0)[:, 0])


def report(trainings: Trainings, grid: Grid) -> str:
    """AUC of every contestant at every ε: mean and standard error over seeds, and its rate."""
    rows = [[c.name, *(_entry(trainings, c, epsilon, grid.seeds) for epsilon in grid.epsilons)] for c in CONTESTANTS]
    examples = trainings.logs.examples(trainings.sizes.test_examples, part="test")
    best = auc(examples.labels, trainings.logs.logits(examples))
    head = f"AUC on {len(examples):,} examples, {grid.seeds} seeds, ± standard error; the truth has {best:.4f}."
    return "\n".join([head, "", *markdown(["tables", *(f"ε = {e:g}" for e in grid.epsilons)], rows)]) + "\n"


def _entry(trainings: Trainings, contestant: Contestant, epsilon: float, seeds: int) -> str:
    rate = trainings.best_rate(contestant, epsilon)
    scores = [trainings.cell(contestant, epsilon, rate, 1 + seed)["test"] for seed in range(seeds)]
    error = np.std(scores, ddof=1) / np.sqrt(seeds) if seeds > 1 else float("nan")
    return f"{np.mean(scores):.4f} ± {error:.4f} (rate {rate:g})"
