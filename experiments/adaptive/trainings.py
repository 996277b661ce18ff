"""The trainings of `python -m experiments.adaptive`.

Dense variables have the same Adam under all contestants. AdaFEST splits the noise between votes and gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import tfdp_rec
from experiments.adaptive.settings import Grid, Sizes
from experiments.generated import clicks
from experiments.generated.clicks import SyntheticCriteo, auc
from experiments.study import Study, spent
from experiments.tables import markdown
from tfdp_rec.data import PoissonSampling
from tfdp_rec.mechanisms import ada_fest, dp_sgd, lazy_dp_sgd
from tfdp_rec.optimizers import AdaFEST, Adagrad, Adam, PrivateOptimizer
from tfdp_rec.privacy import calibrate_noise
from tfdp_rec.sparse.draws import split_noise_multiplier

DENSE_RATE = 0.005
SELECTION_FRACTION = 0.1
THRESHOLD = 2.0  # of AdaFEST, in standard deviations of the votes' noise


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A way to train the tables.

    Attributes:
        name: in the report.
        make: (learning rate, settings that all have) -> its optimizer.
        rates: among which it may choose.
    """

    name: str
    make: Callable[[float, dict[str, Any]], PrivateOptimizer]
    rates: Sequence[float]


def _lazily(rate: float, common: dict[str, Any]) -> PrivateOptimizer:
    return tfdp_rec.LazyDPSGD(rate, **common)


def _eagerly(rule: Any) -> Callable[[float, dict[str, Any]], PrivateOptimizer]:
    return lambda rate, common: tfdp_rec.DPSGD(rate, table_rule=rule, **common)


def _choosing(rule: Any) -> Callable[[float, dict[str, Any]], PrivateOptimizer]:
    def make(rate: float, common: dict[str, Any]) -> PrivateOptimizer:
        votes, gradients = split_noise_multiplier(common["noise_multiplier"], SELECTION_FRACTION)
        own = {"contribution_clip": 1.0, "contribution_noise_multiplier": votes, "threshold": THRESHOLD * votes}
        return AdaFEST(rate, table_rule=rule, **{**common, **own, "noise_multiplier": gradients})

    return make


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
        keras.utils.set_random_seed(1 + seed)
        model, dense = self._model(), keras.optimizers.Adam(DENSE_RATE)
        common = {"l2_norm_clip": 1.0, "noise_multiplier": self.noise(epsilon), "dense_optimizer": dense}
        optimizer = contestant.make(rate, {**common, "expected_batch_size": self.sizes.batch_size})
        model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
        batches = self.sampling.batches(lambda rows: self._fetch("train", rows), seed=100 + seed)
        model.fit(batches, steps_per_epoch=self.sizes.steps, verbose=0)
        found: dict[str, Any] = {part: self._score(model, part) for part in ("validation", "test")}
        return found | {"epsilon": spent(optimizer, self.sampling, self.sizes.delta, self.sizes.steps)}

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
