"""How long a step takes under each mechanism, on the study's model and examples.

All mechanisms step in turn, round after round, in one process, so that a machine that slows down slows all of them;
a ratio is the median over the rounds. Examples are in memory; LazyDPSGD has its look-ahead, as in `fit`. What
LazyDPSGD still owes when training ends is not in it (one pass over the tables), nor is FEST's choice before training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from experiments.adafest.settings import CONFINED
from experiments.adafest.trainings import CHOICE_NOISE, CHOSEN_ROWS, Trainings
from experiments.bench.timing import rounds
from tfdp_rec.mechanisms import ada_fest, dp_sgd, eana, exponential, fest, lazy_dp_sgd
from tfdp_rec.optimizers import Preselection
from tfdp_rec.training.lookahead import lookahead

WAYS = {
    "SGD": 0.0, eana.label: 0.0, lazy_dp_sgd.label: 0.0, ada_fest.label: 4.5, CONFINED: 4.5, exponential.label: 300.0,
    fest.label: 0.0, dp_sgd.label: 0.0,
}  # fmt: skip


def step_times(trainings: Trainings, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a step of every way to train, and its ratio to Keras' SGD in the same round.

    Args:
        trainings: their model, examples, batch size and learning rates.
        repeats: rounds that count.
    """
    runs = {way: _stepper(trainings, way, setting) for way, setting in WAYS.items()}
    measured = rounds(runs, repeats)
    walls = {way: np.array([wall for wall, _ in times]) for way, times in measured.items()}
    return [
        {
            "way": way,
            "ms": float(np.median(wall)),
            "ms_lowest_tenth": float(np.quantile(wall, 0.1)),
            "steps_per_second": 1e3 / float(np.median(wall)),
            "ratio_to_sgd": float(np.median(wall / walls["SGD"])),
            "processor_ms": float(np.median([processor for _, processor in measured[way]])),
        }
        for way, wall in walls.items()
    ]


def _stepper(trainings: Trainings, way: str, setting: float) -> Callable[[], Any]:
    """A function that makes one training step."""
    sizes, model = trainings.sizes, trainings.model()
    examples = trainings.problem.source.examples(10 * sizes.batch_size)
    batches = tf.data.Dataset.from_tensor_slices(examples.fetch(slice(None))).batch(sizes.batch_size).cache().repeat()
    model.compile(_optimizer(trainings, model, way, setting, examples), loss=trainings.problem.loss)
    if model.is_private:
        model.prepare(batches.element_spec)
        batches = lookahead(batches, model)
    model.make_train_function()
    step, iterator = model.train_function, iter(batches.prefetch(2))
    return lambda: [np.asarray(value) for value in tf.nest.flatten(step(iterator))]


def _optimizer(trainings: Trainings, model: Any, way: str, setting: float, examples: Any) -> keras.optimizers.Optimizer:
    """SGD for the tables and for the dense variables: Adam would cost the same under all of them."""
    sizes = trainings.sizes
    if way == "SGD":
        return keras.optimizers.SGD(sizes.learning_rate)
    common: dict[str, Any] = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": sizes.batch_size}
    for mechanism in (eana, lazy_dp_sgd):
        if way == mechanism.label:
            return mechanism.optimizer(sizes.learning_rate, **common)
    chosen = None
    if way in (fest.label, CONFINED):
        chosen = Preselection.from_frequencies(
            trainings.frequencies(model, examples), CHOSEN_ROWS, noise_multiplier=CHOICE_NOISE
        )
    return trainings.optimizer(way, setting, 1.0, chosen, dense_optimizer=None)
