"""The trainings of `python -m experiments.adafest`: one model, one budget, several ways to choose rows.

Every training of one ε costs exactly that ε: the noise multiplier of the whole is calibrated once, and a
mechanism that also looks at which rows were read splits it (a twentieth for selection). FEST's choice is paid out of
the same ε. What is compared is then the score on other examples against how many table values a step updates:

  gradient size reduction = (values of all tables) / (table values updated in a step, on average)

All mechanisms have the same learning rates. `tuning` shows what DP-SGD and AdaFEST make of others, on examples that are
neither trained on nor in any other table.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from scipy.special import log_ndtr

from experiments.adafest.problems import Examples, Problem, bucket_frequencies
from experiments.adafest.report import times
from experiments.adafest.settings import CONFINED, FROZEN, PER_VALUE, Grid, Sizes
from experiments.generated.clicks import NUM_CATEGORICAL, SyntheticCriteo, auc
from experiments.study import Study, train
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.data import PoissonSampling
from tfdp_rec.mechanisms import ada_fest, dp_sgd, exponential, fest
from tfdp_rec.optimizers import DPSGD, FEST, AdaFEST, ExponentialSelectionSGD, Preselection, noisy_frequencies
from tfdp_rec.privacy import calibrate_noise
from tfdp_rec.sparse.draws import split_noise_multiplier

SELECTION_FRACTION = 0.05
CHOICE_NOISE = 10.0  # noise multiplier of FEST's one look at the frequencies
CHOSEN_ROWS = 1000  # of each table, by the choice that AdaFEST+ and the stream's FEST start from


@dataclasses.dataclass(frozen=True)
class Point:
    """One training: a mechanism, how sparse it is told to be, a budget, and which of several alike it is."""

    mechanism: str
    setting: float
    epsilon: float
    seed: int = 0

    @property
    def name(self) -> str:
        """File name."""
        mechanism = self.mechanism.replace("+", "plus").replace(" ", "-")
        return f"{mechanism}-{self.setting:g}-epsilon{self.epsilon:g}-seed{self.seed}"


def cells(grid: Grid) -> list[Point]:
    """All trainings of the frontier, all settings once before any is repeated."""
    settings: dict[str, Sequence[float]] = {
        dp_sgd.label: (0,), FROZEN: (0,), ada_fest.label: grid.thresholds, PER_VALUE: grid.thresholds,
        fest.label: grid.rows, CONFINED: (1.5, *grid.thresholds[:-1]), exponential.label: grid.draws,
    }  # fmt: skip
    return [
        Point(mechanism, setting, epsilon, seed)
        for seed in range(grid.seeds)
        for epsilon in grid.epsilons
        for mechanism in grid.mechanisms
        for setting in settings[mechanism]
    ]


class Trainings:
    """Data, model and budget that all trainings share.

    Args:
        sizes: of every training.
        problem: what is learnt.
        study: where results are kept: what is there is not trained again.
        say: called with a line of progress.
    """

    def __init__(self, sizes: Sizes, problem: Problem, study: Study, say: Callable[[str], None] = print):
        self.sizes, self.problem, self.study, self.say = sizes, problem, study, say

    def cell(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A cell's result, with the sizes it has."""
        return self.study.cell(name, lambda: {**work(), "sizes": dataclasses.asdict(self.sizes)})

    def model(self, seed: int = 0) -> Any:
        """The untrained model; the same weights for the same seed."""
        keras.utils.set_random_seed(1 + seed)
        return self.problem.make_model()

    def noise(self, epsilon: float, units: int, spent: Sequence[Any] = ()) -> float:
        """The noise multiplier of a whole step that spends `epsilon`."""
        sampling = PoissonSampling(units, self.sizes.batch_size)
        return calibrate_noise(epsilon, self.sizes.delta, sampling, self.sizes.steps, accountant="rdp", spent=spent)

    def frequencies(self, model: Any, examples: Examples) -> dict[str, np.ndarray]:
        """FEST's one look at some examples: how often each row is read, with noise."""
        parts = (slice(start, start + 50_000) for start in range(0, len(examples), 50_000))
        batches = (self.problem.reads(model, examples.fetch(part)[0]) for part in parts)
        return noisy_frequencies(batches, self.problem.rows(model), noise_multiplier=CHOICE_NOISE)

    def nothing_chosen(self, model: Any) -> Preselection:
        """The choice of no row at all: what "frozen" trains on."""
        return Preselection({path: [] for path in self.problem.rows(model)})

    def adam(self) -> keras.optimizers.Optimizer:
        """For the dense variables, under every mechanism."""
        return keras.optimizers.Adam(self.sizes.dense_learning_rate)

    def optimizer(
        self,
        mechanism: str,
        setting: float,
        noise: float,
        preselection: Preselection | None,
        dense_optimizer: keras.optimizers.Optimizer | None,
    ) -> PrivateOptimizer:
        """The mechanism, with a whole step's noise multiplier.

        Args:
            mechanism: as in `Point`.
            setting: AdaFEST's threshold in standard deviations of the count's noise; the number of draws of
                exponential selection; else unused.
            noise: of the whole step.
            preselection: of FEST and AdaFEST+.
            dense_optimizer: None for SGD.
        """
        common: dict[str, Any] = {
            "learning_rate": self.sizes.learning_rate, "l2_norm_clip": 1.0,
            "expected_batch_size": self.sizes.batch_size, "dense_optimizer": dense_optimizer,
        }  # fmt: skip
        if mechanism == dp_sgd.label:
            return DPSGD(noise_multiplier=noise, **common)
        if mechanism in (fest.label, FROZEN):
            assert preselection is not None
            return FEST(noise_multiplier=noise, preselection=preselection, **common)
        s1, s2 = split_noise_multiplier(noise, SELECTION_FRACTION)
        if mechanism == exponential.label:
            count = int(setting)
            draws: dict[str, Any] = {"num_survivors": count, "selection_epsilon": gumbel_epsilon(s1, count)}
            return ExponentialSelectionSGD(noise_multiplier=s2, **draws, **common)
        threshold: dict[str, Any] = {
            "contribution_clip": 1.0,
            "contribution_noise_multiplier": s1,
            "threshold": setting * s1,
        }
        threshold["per_value"] = mechanism == PER_VALUE
        return AdaFEST(noise_multiplier=s2, preselection=preselection, **threshold, **common)

    def train(self, model: Any, optimizer: PrivateOptimizer, examples: Examples) -> dict[str, Any]:
        """Trains, and says what it cost and how sparse it was."""
        sizes, sampling = self.sizes, PoissonSampling(len(examples), self.sizes.batch_size)
        batches = sampling.batches(examples.fetch)
        trained = train(model, optimizer, batches, sizes.steps, sampling, sizes.delta, loss=self.problem.loss)
        values = self.problem.values(model)
        updated = getattr(optimizer, "updated_values", values * sizes.steps) / sizes.steps
        return {
            "epsilon_spent": trained.epsilon,
            "values_per_step": updated,
            "reduction": values / updated if updated else None,
        }

    def score(self, model: Any, examples: Examples) -> float:
        """How good a trained model is on some examples."""
        features, labels = examples.fetch(slice(None))
        return self.problem.score(labels, model.predict(features, batch_size=2000, verbose=0))

    # The frontier.

    def frontier(self, grid: Grid) -> list[dict[str, Any]]:
        """The score against gradient size reduction, for every mechanism, setting, budget and seed."""
        known = self.problem.source.examples(self.sizes.examples)
        test = self.problem.source.examples(self.sizes.test_examples, part="test")
        results = []
        for cell in cells(grid):
            result = self.cell(cell.name, lambda: self._run(cell, known, test))  # noqa: B023
            self.say(
                f"epsilon {cell.epsilon:g}  {cell.mechanism:12s} {cell.setting:7g}  seed {cell.seed}  "
                f"{self.problem.metric} {result['score']:.4f}  reduction {times(result['reduction'])}"
            )
            results.append(result)
        return results

    def _run(self, cell: Point, known: Any, test: Any) -> dict[str, Any]:
        model, chosen, spent = self.model(cell.seed), None, []
        if cell.mechanism == FROZEN:
            chosen = self.nothing_chosen(model)
        elif cell.mechanism in (fest.label, CONFINED):
            rows = int(cell.setting) if cell.mechanism == fest.label else CHOSEN_ROWS
            chosen = Preselection.from_frequencies(self.frequencies(model, known), rows, noise_multiplier=CHOICE_NOISE)
            spent = [(chosen.dp_event(), chosen.label)]
        noise = self.noise(cell.epsilon, len(known), spent)
        optimizer = self.optimizer(cell.mechanism, cell.setting, noise, chosen, self.adam())
        found: dict[str, Any] = {**dataclasses.asdict(cell), "noise_multiplier": noise}
        found |= self.train(model, optimizer, known)
        found["score"] = self.score(model, test)
        if isinstance(optimizer, AdaFEST) and isinstance(self.problem.source, SyntheticCriteo) and chosen is None:
            widths = np.array([table.output_dim for table in model.tables])
            needed = optimizer.threshold * (widths / widths.mean() if optimizer.per_value else np.ones(len(widths)))
            shares = needed * math.sqrt(NUM_CATEGORICAL) / self.sizes.batch_size
            found["score_of_truth_on_rows"] = self.truth_on(known, test, shares)
        return found

    def truth_on(self, examples: Any, test: Any, shares: np.ndarray) -> float:
        """AUC of the planted logits if only rows that such shares of examples read, by table, had an effect."""
        logs, known = self.problem.source, []
        assert isinstance(logs, SyntheticCriteo)
        for column, counts, share in zip(test.categorical.T, bucket_frequencies(examples, logs.buckets), shares):
            known.append(counts[column] >= share * len(examples))
        return auc(test.labels, logs.logits(test, known=np.stack(known, axis=1)))

    # The learning rates.

    def tuning(self, grid: Grid) -> list[dict[str, Any]]:
        """Scores of DP-SGD and AdaFEST on validation examples, for every pair of learning rates."""
        known = self.problem.source.examples(self.sizes.examples)
        validation = self.problem.source.examples(self.sizes.test_examples, part="validation")
        settings = {dp_sgd.label: 0.0, ada_fest.label: grid.tuned_threshold}
        mechanisms = [name for name in settings if name in grid.mechanisms]
        results = []
        for seed, epsilon, mechanism, rate, dense in itertools.product(
            range(grid.seeds), grid.epsilons, mechanisms, grid.table_rates, grid.dense_rates
        ):
            sizes = dataclasses.replace(self.sizes, learning_rate=rate, dense_learning_rate=dense)
            other = Trainings(sizes, self.problem, self.study, self.say)
            cell = Point(mechanism, settings[mechanism], epsilon, seed)
            name = f"tuning-{cell.name}-rates-{rate:g}-{dense:g}"
            result = other.cell(name, lambda: other._run(cell, known, validation))  # noqa: B023
            self.say(
                f"epsilon {epsilon:g}  {mechanism:8s} rates {rate:g}, {dense:g}  seed {seed}  "
                f"{self.problem.metric} {result['score']:.4f}"
            )
            results.append(result)
        return results

    # The stream.

    def stream(self) -> list[dict[str, Any]]:
        """Days of drifting logs: train on each, test on the next; every example is in one day only."""
        ways = [dp_sgd.label, FROZEN, ada_fest.label, "FEST-first-day", "FEST-all-days", "FEST-streaming"]
        results = []
        for way in ways:
            result = self.cell(f"stream-{way}", lambda: self._follow(way))  # noqa: B023
            self.say(
                f"stream  {way:16s} {self.problem.metric} {result['score']:.4f}  "
                f"reduction {times(result['reduction'])}"
            )
            results.append(result)
        return results

    def _follow(self, way: str) -> dict[str, Any]:
        per_day = self.sizes.examples // 4
        days = [self.problem.source.examples(per_day, day) for day in range(self.sizes.days)]
        model, mechanism = self.model(), way.split("-")[0]
        fixed = self.nothing_chosen(model) if way == FROZEN else None
        scores, updated = [], []
        looks = [self.frequencies(model, day) for day in days] if mechanism == fest.label else []  # one a day, ever
        seen = {
            "first-day": lambda day: looks[:1],
            "all-days": lambda day: looks,
            "streaming": lambda day: looks[: day + 1],
        }
        source = seen.get(way.removeprefix("FEST-"))
        for day, examples in enumerate(days):
            if source is not None:
                total = {path: np.sum([look[path] for look in source(day)], axis=0) for path in looks[0]}
                fixed = Preselection.from_frequencies(total, CHOSEN_ROWS, noise_multiplier=CHOICE_NOISE)
            spent = [(fixed.dp_event(), fixed.label)] if source is not None and fixed is not None else []
            noise = self.noise(self.sizes.day_epsilon, per_day, spent)
            optimizer = self.optimizer(mechanism, 4.5, noise, fixed, self.adam())
            updated.append(self.train(model, optimizer, examples)["values_per_step"])
            tomorrow = self.problem.source.examples(self.sizes.test_examples, day + 1, "test")
            scores.append(self.score(model, tomorrow))
        return {
            "way": way,
            "score_by_day": scores,
            "score": float(np.mean(scores[len(scores) // 2 :])),
            "reduction": self.problem.values(model) / float(np.mean(updated)) if any(updated) else None,
        }


def gumbel_epsilon(noise_multiplier: float, num_survivors: int) -> float:
    """The e0 with which top-m selection counts as one Gaussian of that noise multiplier."""
    mu = 1.0 / (noise_multiplier * math.sqrt(num_survivors))
    return 2.0 * float(log_ndtr(0.5 * mu) - log_ndtr(-0.5 * mu))
