"""A rehearsal: what settings of a private training find of generated labels, before ε is spent on real ones.

A new model of the same layers is trained twice on generated rows (`generated_rows`): by Adam, and by the mechanism
with the plan's noise and number of steps. Batches hold at most `_MOST` rows: with noise and batch size divided by the
same number, a step has the same signal and the same noise. The answer is how much of what Adam finds beyond averages
(the effects of single ids, the most frequent classes) the mechanism finds: averages can be had for a small part of ε,
by a sum.

Public alone: the model's configuration, the plan, and the number, shapes and types of rows. No row is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from scipy import stats

from tfdp_rec.core.claim.schemes import PoissonSampling
from tfdp_rec.training.generated_rows import GeneratedRows
from tfdp_rec.training.model import PrivateModel
from tfdp_rec.training.private_plan import PrivatePlan

_ENOUGH = 0.5
_MOST = 1024  # units of a batch
_FEWEST = 50_000  # rows to train on, if there are so many units
_HELD_OUT = 5_000  # rows to judge by
_ROUNDS = 8  # of either training; Adam's best one counts
_ADAM_BATCH, _ADAM_STEPS = 256, 250  # of a round
_ANYTHING = 0.01  # less than that beyond averages is nothing


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What settings find of generated labels.

    Args:
        metric: "AUC" of clicks, or "recall@k" of classes.
        averages: Its value by what single ids say, or by the most frequent k classes.
        possible: That of the scores that labels were drawn by.
        without_privacy: That of the model, trained by Adam.
        private: That of the model, trained by the mechanism.
    """

    metric: str
    averages: float
    possible: float
    without_privacy: float
    private: float

    @property
    def share(self) -> float:
        """How much of what Adam finds beyond averages the mechanism finds; 0 if Adam finds nothing."""
        found, possible = (each - self.averages for each in (self.private, self.without_privacy))
        return min(max(found / possible, 0.0), 1.0) if possible > _ANYTHING else 0.0

    @property
    def learns(self) -> bool:
        """Whether that is at least half."""
        return self.share >= _ENOUGH

    def __str__(self) -> str:
        verdict = "They learn" if self.learns else "They learn little"
        return (
            f"Of generated labels ({self.metric} {self.possible:.3f} at best, {self.averages:.3f} by averages) this "
            f"model finds {self.without_privacy:.3f} without privacy and {self.private:.3f} with these settings: "
            f"{self.share:.0%} of what it can find beyond averages. {verdict}."
        )


def rehearse(
    model: keras.Model, plan: PrivatePlan, x: Any, y: tf.TensorSpec, loss: Any, of_clicks: bool,
    make_ready: Callable[[PrivateModel, PrivatePlan, tf.data.Dataset], None], verbose: Any = "auto",
) -> Rehearsal:
    """The rehearsal of a training.

    Args:
        model: Model, of which nothing but its configuration is used.
        plan: The training's plan.
        x: Features of rows, as a nest of `tf.TensorSpec`.
        y: Labels, as a `tf.TensorSpec`.
        loss: The compiled loss.
        of_clicks: Whether labels are clicks; otherwise they are classes.
        make_ready: Compiles a model for a plan and its batches, with the training's settings.
        verbose: As Keras' `fit` has it.

    Raises:
        ValueError: The values of an input, or the form of labels, are not known.
    """
    if math.prod(y.shape[1:]) != 1:
        raise ValueError(f"A rehearsal knows one label a row, and y has {math.prod(y.shape[1:])}.")
    size = plan.sampling.expected_batch_size
    taken = min(size, _MOST)
    units = min(plan.sampling.num_units, max(int(taken * plan.steps), _FEWEST))
    generated = GeneratedRows(_new(model), x, units + _HELD_OUT, np.random.default_rng(0))
    task = (_clicks if of_clicks else _classes)(model, generated, units)
    labels = np.reshape(task.labels, [-1, *y.shape[1:]]).astype(y.dtype.as_numpy_dtype)

    def rows(drawn: Any) -> Any:
        return tf.nest.map_structure(lambda array: array[drawn], generated.features), labels[drawn]

    rounds = keras.callbacks.LambdaCallback()
    if verbose != 0:
        print(f"Rehearsal on {units:,} generated rows: by Adam, then by {type(model.optimizer).__name__}.")
        bar = keras.utils.Progbar(2 * _ROUNDS, unit_name="round")
        rounds = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: bar.add(1))
    judged, _ = rows(slice(units, None))

    def judge(trained: Any) -> float:
        return task.judge(trained.predict(judged, batch_size=_HELD_OUT // 5, verbose=0))

    plain, best = _new(model), [task.averages]
    plain.compile("adam", loss)
    keep_best = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: best.append(judge(plain)))
    shuffled = tf.data.Dataset.from_tensor_slices(rows(slice(units))).shuffle(units).repeat().batch(_ADAM_BATCH)
    seen = {"steps_per_epoch": _ADAM_STEPS, "epochs": _ROUNDS, "shuffle": False, "verbose": 0}
    plain.fit(shuffled, callbacks=[keep_best, rounds], **seen)

    new, steps = _new(model), math.ceil(plan.steps / _ROUNDS)
    private = PrivateModel(new.input, new.output, name=model.name)
    # Not the plan: these steps are of no unit's data, and cost nothing.
    rehearsed = PrivatePlan(
        sampling=PoissonSampling(units, taken), noise_multiplier=plan.noise_multiplier * taken / size,
        delta=plan.delta, steps=steps * _ROUNDS, l2_norm_clip=plan.l2_norm_clip, accountant="rdp",
        allow_large_delta=True,
    )
    batches = rehearsed.batches(rows)
    make_ready(private, rehearsed, batches)
    private.fit(batches, steps_per_epoch=steps, epochs=_ROUNDS, callbacks=[rounds], verbose=0)
    return Rehearsal(task.metric, task.averages, task.possible, max(best), judge(private))


def _new(model: keras.Model) -> Any:
    layers = keras.models.clone_model(model)
    return keras.Model(layers.input, layers.output, name=model.name)


@dataclasses.dataclass(frozen=True)
class _Task:
    """Labels of rows, of which those behind the training rows judge a model's predictions."""

    metric: str
    labels: np.ndarray
    judge: Callable[[np.ndarray], float]
    averages: float
    possible: float


def _clicks(model: keras.Model, rows: GeneratedRows, units: int) -> _Task:
    scores, effects, clicked = rows.clicks()

    def area(predicted: np.ndarray) -> float:
        ranks = stats.rankdata(predicted.reshape(-1))
        positive, all_rows = clicked[units:], len(predicted)
        number = positive.sum()
        return float((ranks[positive].sum() - number * (number + 1) / 2) / (number * (all_rows - number)))

    return _Task("AUC", clicked, area, area(effects[units:]), area(scores[units:]))


def _classes(model: keras.Model, rows: GeneratedRows, units: int) -> _Task:
    if len(model.output.shape) != 2:
        raise ValueError(f"A rehearsal knows one class a row, and '{model.name}' predicts {model.output.shape}.")
    number = model.output.shape[-1]
    scores, drawn = rows.classes(number)
    k = 10 if number > 100 else 1

    def recall(predicted: np.ndarray) -> float:
        own = np.take_along_axis(predicted, drawn[units:, None], axis=1)
        return float(((predicted > own).sum(axis=1) < k).mean())

    most = np.tile(np.bincount(drawn[:units], minlength=number), [_HELD_OUT, 1])
    return _Task(f"recall@{k}", drawn, recall, recall(most), recall(scores(slice(units, None))))
