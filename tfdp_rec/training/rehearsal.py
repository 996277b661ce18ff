"""A rehearsal: what settings of a private training find of generated labels, before ε is spent on real ones.

A new model of the same layers is trained twice on generated rows (`generated_rows`): by Adam, and by the mechanism
with the plan's noise and number of steps. Batches hold at most `_MOST` rows: with noise and batch size divided by the
same number, a step has the same signal and the same noise. The answer is how much of what Adam finds beyond averages
(the effects of single ids, the most frequent classes) the mechanism finds: averages can be had for a small part of ε,
by a sum.

Public alone: the model's configuration, the plan, and the number, shapes and types of rows. No row is read, and no
weight: weights that were loaded count for nothing.
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
_EDGE = 0.3, 0.75  # shares between which half of the verdicts were wrong, and a second rehearsal told another
_MOST = 1024  # units of a batch
_FEWEST, _MOST_ROWS = 50_000, 300_000  # to train on, if there are so many units
_ROWS_OF_A_USER = 10  # where users are units: how many they have is not public
_HELD_OUT = 5_000  # rows to judge by
_MOST_CLASSES = 20_000
_ADAM_BATCH, _ADAM_STEPS, _ADAM_ROUNDS = 256, 250, 8  # its best round counts
_ANYTHING = 0.03  # less than that beyond averages is nothing: of five thousand rows it may be chance


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What settings find of generated labels.

    Args:
        metric: "AUC" of clicks, or "recall@k" of classes.
        averages: Its value by the effects of single ids, or by the most frequent k classes.
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
        """How much of what the model can find beyond averages the mechanism finds; 0 if there is nothing to find."""
        found, by_adam = (each - self.averages for each in (self.private, self.without_privacy))
        return max(found, 0.0) / max(by_adam, found) if max(by_adam, found) > _ANYTHING else 0.0

    @property
    def learns(self) -> bool:
        """Whether that is at least half."""
        return self.share >= _ENOUGH

    @property
    def is_sure(self) -> bool:
        """Whether that is to be relied on: the share is not on the edge, between 30% and 75%.

        Where ids have few rows, a little more or less signal decides whether anything is learnt. How often the data
        read each id, and how strong its labels are, is not public; and trainings of the same settings differ.
        """
        return not _EDGE[0] < self.share < _EDGE[1]

    def __str__(self) -> str:
        verdict = f"These settings learn{'' if self.learns else ' little'}."
        if not self.is_sure:
            verdict = (
                "These settings are on the edge: of the data they may learn as much, or nearly nothing. Larger "
                "batches, more epochs, a larger epsilon or more rows for each id lead away from it."
            )
        return (
            f"Of generated labels ({self.metric} {self.possible:.3f} at best, {self.averages:.3f} by averages) this "
            f"model finds {self.without_privacy:.3f} without privacy and {self.private:.3f} with these settings: "
            f"{self.share:.0%} of what it can find beyond averages. {verdict}"
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
        verbose: 0 for no progress.

    Raises:
        ValueError: The values of an input, or the form of labels, are not known, or a layer cannot be made anew.
    """
    if math.prod(y.shape[1:]) != 1:
        raise ValueError(f"A rehearsal knows one label a row, and y has {math.prod(y.shape[1:])}.")
    size, sampling = plan.sampling.expected_batch_size, plan.sampling
    batch = min(size, _MOST)
    rows_of_unit = _ROWS_OF_A_USER if sampling.unit == "user" else 1
    units = min(sampling.num_units, max(min(int(batch * plan.steps), _MOST_ROWS), _FEWEST) // rows_of_unit)
    rows, progress = units * rows_of_unit, []
    if verbose != 0:
        print(f"Rehearsal on {rows:,} generated rows: by Adam, then by {type(model.optimizer).__name__}.")
        bar = keras.utils.Progbar(_ADAM_STEPS * _ADAM_ROUNDS + plan.steps)
        progress = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: bar.add(1))]
    rng = np.random.default_rng(0)
    generated = GeneratedRows(remake(model), x, rows + _HELD_OUT, rng)
    task = (_clicks if of_clicks else _classes)(model, generated, rows)
    dtype = y.dtype.as_numpy_dtype if of_clicks else np.int32
    labels = np.reshape(task.labels, [-1, *y.shape[1:]]).astype(dtype)

    def select(chosen: Any) -> Any:
        return tf.nest.map_structure(lambda array: array[chosen], generated.features), labels[chosen]

    judged, _ = select(slice(rows, None))

    def judge(trained: Any) -> float:
        return task.judge(np.asarray(trained.predict(judged, batch_size=_HELD_OUT // 5, verbose=0), np.float32))

    plain, best = remake(model), [task.averages]
    plain.compile("adam", loss)
    keep_best = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: best.append(judge(plain)))
    shuffled = tf.data.Dataset.from_tensor_slices(select(slice(rows))).shuffle(rows).repeat().batch(_ADAM_BATCH)
    seen = {"steps_per_epoch": _ADAM_STEPS, "epochs": _ADAM_ROUNDS, "shuffle": False, "verbose": 0}
    plain.fit(shuffled, callbacks=[keep_best, *progress], **seen)

    new = remake(model)
    private = PrivateModel(new.input, new.output, name=model.name)
    # Not the plan: these steps are of no unit's data, and cost nothing.
    rehearsed = PrivatePlan(
        sampling=PoissonSampling(units, batch), noise_multiplier=plan.noise_multiplier * batch / size,
        delta=plan.delta, steps=plan.steps, l2_norm_clip=plan.l2_norm_clip, accountant="rdp", allow_large_delta=True,
    )
    batches = rehearsed.batches(lambda drawn: select(drawn + units * rng.integers(rows_of_unit, size=len(drawn))))
    make_ready(private, rehearsed, batches)
    private.fit(batches, steps_per_epoch=plan.steps, callbacks=progress, verbose=0)
    return Rehearsal(task.metric, task.averages, task.possible, max(best), judge(private))


def remake(model: keras.Model) -> Any:
    """A plain model of the same layers, with weights of its own."""
    new = keras.models.clone_model(keras.Model(model.input, model.output, name=model.name))
    shared = {id(each) for each in model.variables} & {id(each) for each in new.variables}
    if shared:
        raise ValueError(
            f"A layer of '{model.name}' keeps its weights when it is made from its configuration: get_config() gives "
            "the layers that it holds themselves. Give their configurations."
        )
    return new


@dataclasses.dataclass(frozen=True)
class _Task:
    """Labels of rows, of which those behind the training rows judge a model's predictions."""

    metric: str
    labels: np.ndarray
    judge: Callable[[np.ndarray], float]
    averages: float
    possible: float


def _clicks(model: keras.Model, generated: GeneratedRows, rows: int) -> _Task:
    scores, effects, clicked = generated.clicks()
    if np.allclose(scores, effects):
        raise ValueError("A row of one number has nothing beyond averages to find: count clicks of each, with noise.")

    def area(predicted: np.ndarray) -> float:
        ranks = stats.rankdata(np.nan_to_num(predicted.reshape(-1)))
        positive, number = clicked[rows:], clicked[rows:].sum()
        return float((ranks[positive].sum() - number * (number + 1) / 2) / (number * (len(positive) - number)))

    return _Task("AUC", clicked, area, area(effects[rows:]), area(scores[rows:]))


def _classes(model: keras.Model, generated: GeneratedRows, rows: int) -> _Task:
    number = model.output.shape[-1]
    if len(model.output.shape) != 2 or number > _MOST_CLASSES:
        raise ValueError(
            f"A rehearsal knows one of at most {_MOST_CLASSES:,} classes a row, and '{model.name}' predicts "
            f"{model.output.shape}."
        )
    scores, drawn = generated.classes(number)
    k = 10 if number > 100 else 1

    def recall(predicted: np.ndarray) -> float:
        own = np.take_along_axis(predicted, drawn[rows:, None], axis=1)
        above = (predicted >= own).sum(axis=1)  # itself, and what is level with it; nothing is, if it is no number
        return float(((above >= 1) & (above <= k)).mean())

    often = np.bincount(drawn[:rows], minlength=number) + np.linspace(0, 0.5, number)  # without ties
    most = recall(np.broadcast_to(often, [_HELD_OUT, number]))
    return _Task(f"recall@{k}", drawn, recall, most, recall(scores(slice(rows, None))))
