"""The contestants of `python -m experiments.clicks`, each tuned on the validation rows and judged on the test rows.

    logistic, no privacy    a weight for each value, by Adam
    deep, no privacy        vectors and dense layers as well, by Adam
    private sums            `tfdp_rec.sums.ClickModel`; `choices.py` chooses what is counted, validation rows how
    logistic, LazyDPSGD     a weight for each value
    logistic, DPSGD with Adagrad      the same with a rate for each weight, since some values are rare
    deep, LazyDPSGD         vectors and dense layers
    deep, DPSGD with Adagrad          the same with a rate for each number of the tables
    deep, AdaFEST           the same model, noise on privately chosen rows
    deep, EANA              the same with noise on the rows that are read: no ε
    deep, LazyDPFTRL        the same with noise planned for units that come in one order, never drawn

    logistic, private labels          by Adam on labels of randomised response: units are labels, features are public
    deep, private labels    the same
    deep, labels then LazyDPSGD       a share of ε for private labels, on which Adam trains a model of the public
                            columns; it is frozen, and a model of all columns is trained upon it (units are rows)

All private ones but those of labels end with `private_reliability`, whose price is in their ε; sums by themselves. The
choice of settings is not in it, as in published comparisons: it is made on other rows, by seed 0, and the seeds that
are reported are others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from dp_accounting import GaussianDpEvent
from scipy import special

import tfdp_rec
from experiments.clicks.choices import Counted, Pair, choices
from experiments.clicks.log import ClickLog, Part, Rows, Units
from experiments.clicks.model import ClickModel
from experiments.clicks.settings import Grid, Sizes
from experiments.generated.clicks import auc
from experiments.study import Study
from tfdp_rec.core.mechanism.correlated_noise import INDEPENDENT, Correlation, optimised_correlation
from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.core.mechanism.noise_walk import noise_walk
from tfdp_rec.core.mechanism.rules import Recursion
from tfdp_rec.optimizers import Adagrad
from tfdp_rec.privacy import (
    FixedOrder,
    PoissonSampling,
    calibrate_noise,
    private_labels,
    private_reliability,
)
from tfdp_rec.sparse.draws import split_noise_multiplier
from tfdp_rec.sums import ClickModel as ClickSums
from tfdp_rec.sums.reliability import Reliability

Setting = Mapping[str, Any]
FREE_RATES = (1e-3, 3e-3)
SHRINKAGES, WEIGHTS = (0.8, 1.6), (1, 2)  # of sums; of a click
VOTES, THRESHOLD = 0.1, 2.0  # AdaFEST's share of the budget for votes, and its threshold in deviations of their noise
SHARES = (0.2, 0.5)  # of ε, for the labels of the public columns
_AT_ONCE = 1 << 15  # rows predicted at once


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A way to predict clicks.

    Attributes:
        name: Name in the report.
        deep: Whether the model has vectors and dense layers.
        make: Function from the settings that all private trainings have, and its own setting, to an optimizer; None
            for private sums.
        private: Whether it trains with noise.
        lengths: Lengths among which it may choose, if not the grid's.
        in_order: Whether units come in one order, for which its noise is planned.
        of_labels: Whether labels alone are private, and all of ε goes into their release.
        public_first: Whether a share of ε goes into labels, for a model of the public columns, on which it stands.
    """

    name: str
    deep: bool
    make: Callable[[dict[str, Any], Setting], Any] | None
    private: bool = True
    lengths: tuple[float, ...] = ()
    in_order: bool = False
    of_labels: bool = False
    public_first: bool = False


class Trainings:
    """A log, its contestants and their results.

    Args:
        log: Click log.
        sizes: Sizes that all trainings share.
        grid: Settings among which contestants choose.
        study: Study that keeps the results.
    """

    def __init__(self, log: ClickLog, sizes: Sizes, grid: Grid, study: Study):
        self.log, self.sizes, self.grid, self.study = log, sizes, grid, study
        self.train, self.units = log.parts["train"], Units(log.parts["train"], log.per_unit)
        self.mean = float(self.train.labels.mean())  # the study treats it as public
        self.sampling = PoissonSampling(len(self.units), sizes.batch_size, unit=log.unit)
        self.order = FixedOrder(len(self.units), sizes.batch_size, unit=log.unit)
        self.places = np.random.default_rng(0).permutation(len(self.units))  # units in a public order
        self.spent = [(GaussianDpEvent(sizes.correction), "reliability of predictions")]

    # What everything costs.

    @functools.cached_property
    def correlation(self) -> Correlation:
        """What planned noise takes back of what it added before."""
        order, steps = self.order, self.sizes.steps
        return optimised_correlation(
            steps=steps, separation=order.separation, participations=order.participations(steps)
        )

    @functools.cache  # noqa: B019  # it lives as long as the study
    def noise(self, epsilon: float, in_order: bool) -> float:
        """σ of all steps, beside the correction."""
        sizes = self.sizes
        if in_order:
            plan = tfdp_rec.PrivatePlan(
                sampling=self.order, epsilon=epsilon, delta=sizes.delta, steps=sizes.steps, spent=self.spent,
                correlation=self.correlation,
            )  # fmt: skip
            return plan.noise_multiplier
        return calibrate_noise(epsilon, sizes.delta, self.sampling, sizes.steps, accountant="rdp", spent=self.spent)

    def settings(self, contestant: Contestant, epsilon: float, setting: Setting) -> dict[str, Any]:
        """What all private optimizers are given; at their rate, noise alone gives a row of the table a length."""
        sizes, noise, clip = self.sizes, self.noise(epsilon, contestant.in_order), setting["clip"]
        strategy = self.correlation.strategy if contestant.in_order else INDEPENDENT
        walk = noise_walk(Recursion(), np.ones(sizes.steps), noise * clip / sizes.batch_size, strategy)
        return {
            "learning_rate": setting["length"] / (walk * (sizes.width if contestant.deep else 1) ** 0.5),
            "l2_norm_clip": clip,
            "noise_multiplier": noise,
            "expected_batch_size": sizes.batch_size,
            "dense_optimizer": keras.optimizers.Adam(min(0.01, 0.2 / sizes.steps**0.5)),
            **({"correlation": self.correlation} if contestant.in_order else {}),
        }

    # Data.

    def batches(self, in_order: bool, offsets: np.ndarray | None = None) -> tf.data.Dataset:
        """Batches of units, drawn or in order; with a logit for each row, to which the model's is added."""
        rng = np.random.default_rng()

        def fetch(units: np.ndarray) -> Any:
            units = self.places[units] if in_order else units
            rows, there = self.units.numbers_of(units, rng)
            added = {} if offsets is None else {"offset": offsets[rows]}
            return self.inputs(self.train.taken(rows)) | added, self.train.labels[rows], there.astype(np.float32)

        return (self.order if in_order else self.sampling).batches(fetch)

    def free_batches(self, epsilon: float | None, columns: np.ndarray | None = None) -> tf.data.Dataset:
        """Shuffled batches of rows, for training without noise; with an ε of labels, these are released once."""
        rows, labels = self.train if columns is None else _of_columns(self.train, columns), self.train.labels
        if epsilon is not None:
            labels = private_labels(labels.astype(int), epsilon=epsilon).debiased()
        alone = self.inputs(rows.taken(np.arange(len(rows))[:, None]))
        whole = (alone, labels[:, None], np.ones((len(rows), 1), np.float32))
        data = tf.data.Dataset.from_tensor_slices(whole).shuffle(min(len(rows), 1 << 20)).repeat()
        return data.batch(self.sizes.free_batch_size).prefetch(4)

    def inputs(self, rows: Rows) -> dict[str, np.ndarray]:
        """What the model takes."""
        return {"ids": rows.ids + self.log.first, "numbers": rows.numbers}

    def model(self, deep: bool, seed: int, upon: bool = False) -> ClickModel:
        """Untrained; `upon` another one's logits it begins with a logit of 0."""
        keras.utils.set_random_seed(1 + seed)
        log, bias = self.log, 0.0 if upon else float(special.logit(self.mean))
        width, hidden = (self.sizes.width, self.sizes.hidden) if deep else (0, ())
        return ClickModel(sum(log.sizes), len(log.columns), self.train.numbers.shape[1], width, hidden, bias)

    def logits(self, model: ClickModel, part: Part, columns: np.ndarray | None = None) -> np.ndarray:
        """Of all rows of a part."""
        rows = self.log.parts[part] if columns is None else _of_columns(self.log.parts[part], columns)
        parts = np.split(np.arange(len(rows))[:, None], range(_AT_ONCE, len(rows), _AT_ONCE))
        return np.concatenate([model(self.inputs(rows.taken(some))).numpy()[:, 0] for some in parts])

    def public_logits(self, epsilon: float, seed: int) -> dict[Part, np.ndarray]:
        """Logits by the public columns alone, of a model trained on labels that were released for ε."""
        public = np.isin(self.log.columns, self.log.public)
        model = self.model(True, seed)
        model.compile(keras.optimizers.Adam(FREE_RATES[0]))
        steps = max(self.sizes.free_steps)
        model.fit(self.free_batches(epsilon, public), steps_per_epoch=steps, verbose=0)
        return {part: self.logits(model, part, public) for part in self.log.parts}

    # Scores.

    def scored(
        self, logits: Mapping[Any, np.ndarray], correction: Reliability | None, seconds: float
    ) -> dict[str, Any]:
        """AUC and log loss ÷ that of the rate of clicks, of validation and test rows, corrected and not."""
        found: dict[str, Any] = {"seconds": seconds}
        for part in ("validation", "test"):
            labels, z = self.log.parts[part].labels, logits[part]
            corrected = correction.corrected(z) if correction else z
            before, loss = self._loss(labels, z), self._loss(labels, corrected)
            found[part] = {"auc": auc(labels, z), "loss": loss, "loss_before": before}
        if correction:
            found |= {"scale": correction.scale, "offset": correction.offset}
        return found

    def _correction(self, logits: np.ndarray) -> Reliability:
        units = None if self.log.per_unit == 1 else self.train.units
        return private_reliability(logits, self.train.labels, noise_multiplier=self.sizes.correction, unit=units)

    def _loss(self, labels: np.ndarray, z: np.ndarray) -> float:
        mean = special.logit(self.mean)
        own, trivial = (np.mean(np.logaddexp(0.0, each) - labels * each) for each in (z, np.full(len(z), mean)))
        return float(own / trivial)

    # Contestants.

    def best(self, contestant: Contestant, epsilon: float | None) -> list[dict[str, Any]]:
        """The results of the setting that is best on validation rows, of every seed but the one that chose."""
        settings = list(self._settings(contestant, epsilon))
        found = {k: self._cell(contestant, epsilon, setting, 0) for k, setting in enumerate(settings)}
        chosen = settings[max(found, key=lambda k: found[k]["validation"]["auc"])]
        seeds = range(1, 1 + self.grid.seeds)
        return [{**self._cell(contestant, epsilon, chosen, seed), "setting": chosen} for seed in seeds]

    def _settings(self, contestant: Contestant, epsilon: float | None) -> list[dict[str, Any]]:
        if contestant.make is None:
            alike = {"shrinkage": SHRINKAGES[0], "weight": WEIGHTS[0]}

            def score(counted: Counted, factors: Pair) -> float:
                setting = {"counted": counted, "factors": factors, **alike}
                return float(self._sums(epsilon, setting, 0)["validation"]["auc"])

            counted, factors = choices(self.log.sizes, score)
            options: dict[str, Any] = {"counted": [counted], "factors": [factors]}
            options |= {"shrinkage": SHRINKAGES, "weight": WEIGHTS}
        elif epsilon is None or contestant.of_labels:
            options = {"rate": FREE_RATES, "steps": self.sizes.free_steps}
        else:
            options = {"share": SHARES} if contestant.public_first else {}
            options |= {"length": contestant.lengths or self.grid.lengths, "clip": self.grid.clips}
        return [dict(zip(options, values)) for values in itertools.product(*options.values())]

    def _cell(self, contestant: Contestant, epsilon: float | None, setting: Any, seed: int) -> dict[str, Any]:
        values = "-".join(f"{key}{value}" for key, value in setting.items())
        budget = "free" if epsilon is None else f"{epsilon:g}"
        name = "".join(c if c.isalnum() or c in ".-" else "_" for c in f"{contestant.name}-{budget}-{values}-{seed}")
        return self.study.cell(name, lambda: self._trained(contestant, epsilon, setting, seed))

    def _trained(self, contestant: Contestant, epsilon: float | None, setting: Any, seed: int) -> dict[str, Any]:
        if contestant.make is None:
            return self._sums(epsilon, setting, seed)
        began, upon = time.monotonic(), None
        if contestant.public_first and epsilon is not None:
            of_labels = setting["share"] * epsilon
            upon, epsilon = self.public_logits(of_labels, seed), epsilon - of_labels
        model = self.model(contestant.deep, seed, upon is not None)
        private, noisy = {}, False
        if epsilon is not None and not contestant.of_labels:
            private, noisy = self.settings(contestant, epsilon, setting), True
        steps = int(setting.get("steps", self.sizes.steps))
        model.compile(contestant.make(private, setting))
        if noisy:
            batches = self.batches(contestant.in_order, upon["train"].astype(np.float32) if upon else None)
        else:
            batches = self.free_batches(epsilon)
        model.fit(batches, steps_per_epoch=steps, verbose=0)
        seconds = time.monotonic() - began
        logits = {part: self.logits(model, part) + (upon[part] if upon else 0.0) for part in self.log.parts}
        found = self.scored(logits, self._correction(logits["train"]) if noisy else None, seconds)
        return found | ({"public_auc": auc(self.log.parts["test"].labels, upon["test"])} if upon else {})

    def _sums(self, epsilon: float | None, setting: Any, seed: int) -> dict[str, Any]:
        began, log = time.monotonic(), self.log
        names = [name.replace(" ", "_") for name in log.columns]
        counted = [tuple(names[column] for column in each) for each in setting["counted"]]
        model = ClickSums(
            dict(zip(names, log.sizes)), counted, epsilon, self.sizes.delta, shrinkage=setting["shrinkage"],
            click_weight=setting["weight"], factors=[names[column] for column in setting["factors"]],
            words=seeded(seed),
        )  # fmt: skip
        named = {part: dict(zip(names, rows.ids.T)) for part, rows in log.parts.items()}
        model.fit(named["train"], self.train.labels, None if log.per_unit == 1 else self.train.units)
        seconds = time.monotonic() - began
        logits = {part: model.logits(rows) for part, rows in named.items() if part != "train"}
        return self.scored(logits, model.reliability, seconds)


def _of_columns(rows: Rows, columns: np.ndarray) -> Rows:
    # Some columns as they are, the others and all numbers without a value.
    return dataclasses.replace(rows, ids=np.where(columns, rows.ids, 0), numbers=np.zeros_like(rows.numbers))


def adam(settings: dict[str, Any], own: Setting) -> Any:
    """Adam for everything."""
    return keras.optimizers.Adam(own["rate"])


def adagrad(settings: dict[str, Any], own: Setting) -> Any:
    """DPSGD whose table has Adagrad; its "length" is the rate."""
    return tfdp_rec.DPSGD(**{**settings, "learning_rate": own["length"]}, table_rule=Adagrad())


def lazily(settings: dict[str, Any], own: Setting) -> Any:
    """LazyDPSGD."""
    return tfdp_rec.LazyDPSGD(**settings)


def planned(settings: dict[str, Any], own: Setting) -> Any:
    """LazyDPFTRL."""
    return tfdp_rec.LazyDPFTRL(**settings)


def eana(settings: dict[str, Any], own: Setting) -> Any:
    """EANA with the noise of LazyDPSGD, on the rows that a batch reads."""
    return tfdp_rec.EANA(**settings)


def choosing(settings: dict[str, Any], own: Setting) -> Any:
    """AdaFEST."""
    votes, gradients = split_noise_multiplier(settings["noise_multiplier"], VOTES)
    choice: dict[str, Any] = {"contribution_clip": 1.0, "contribution_noise_multiplier": votes}
    choice["threshold"] = THRESHOLD * votes
    return tfdp_rec.AdaFEST(**{**settings, "noise_multiplier": gradients}, **choice)


SUMS = Contestant("private sums", False, None)
CONTESTANTS = (
    Contestant("logistic, private labels", False, adam, of_labels=True),
    Contestant("deep, private labels", True, adam, of_labels=True),
    Contestant("deep, labels then LazyDPSGD", True, lazily, public_first=True),
    Contestant("logistic, no privacy", False, adam, private=False),
    Contestant("deep, no privacy", True, adam, private=False),
    SUMS,
    Contestant("logistic, LazyDPSGD", False, lazily, lengths=(0.005, 0.01, 0.02, 0.05, 0.1)),
    Contestant("logistic, DPSGD with Adagrad", False, adagrad, lengths=(0.03, 0.1, 0.3, 0.6, 1.0)),
    Contestant("deep, LazyDPSGD", True, lazily),
    Contestant("deep, DPSGD with Adagrad", True, adagrad, lengths=(0.03, 0.1, 0.3)),
    Contestant("deep, LazyDPFTRL", True, planned, in_order=True),
    Contestant("deep, AdaFEST", True, choosing),
    Contestant("deep, EANA (no epsilon)", True, eana),
)
