"""A cell of EANA's studies: one model trained under one mechanism at one noise, its precision and exposure measured.

All cells train on the same units with the same planted canaries. Noise is given as in the paper's Algorithms 1 and 2:
s, the standard deviation added to the *average* of clipped gradients, in units of the clipping norm C. A mechanism's
noise multiplier is relative to their sum, so it is s · B with B the expected batch size: 0.01 at B = 64 is a noise
multiplier of 0.64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from experiments.study import train
from tfdp_rec import mechanisms
from tfdp_rec.audit import Canaries, exposure_extrapolation, exposure_interpolation, skew_normal_fit_error
from tfdp_rec.callbacks.exposure import per_example_losses
from tfdp_rec.data import PoissonSampling
from tfdp_rec.privacy import calibrate_noise

MECHANISMS = {mechanism.label: mechanism for mechanism in mechanisms.COMMON}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One mechanism at one noise with one seed.

    Attributes:
        mechanism: "SGD" or a key of `MECHANISMS`.
        noise: s, as in the paper's algorithms; 0 for SGD.
        label: of the noise, for plots: "0.01", "ε = 8".
        seed: of the model's initial weights.
    """

    mechanism: str
    noise: float
    label: str
    seed: int = 0

    @property
    def name(self) -> str:
        """File name of the cell."""
        words = [self.mechanism, *([self.label.replace(" = ", "")] if self.label else []), str(self.seed)]
        return "-".join(words).replace("ε", "epsilon")

    @property
    def title(self) -> str:
        """For legends."""
        return f"{self.mechanism}, {self.label}" if self.label else self.mechanism


@dataclasses.dataclass
class Task:
    """A model, its data, and how to measure it.

    Attributes:
        name: of the study.
        make_model: seed -> an untrained model.
        fetch: unit indices -> features, canary units included.
        sampling: of the units.
        canaries: planted among the units.
        shared: inputs all examples share when losses are computed for exposure.
        measure: trained model -> metrics such as precision@10.
        steps, learning_rate, clip: of every training.
    """

    name: str
    make_model: Callable[[int], keras.Model]
    fetch: Callable[[np.ndarray], Any]
    sampling: PoissonSampling
    canaries: Canaries
    shared: Mapping[str, np.ndarray]
    measure: Callable[[keras.Model], dict[str, float]]
    steps: int
    learning_rate: float
    clip: float
    delta: float

    @property
    def batch_size(self) -> float:
        """B."""
        return self.sampling.expected_batch_size

    def noise_for(self, epsilon: float) -> float:
        """s that spends `epsilon` over the whole training."""
        found = calibrate_noise(epsilon, self.delta, self.sampling, self.steps, accountant="rdp")
        return found / self.batch_size


def cells_of(task: Task, mechanisms: Sequence[str], noises: Sequence[float], epsilon: float, seeds: int) -> list[Cell]:
    """SGD once a seed, and every mechanism at every noise.

    Args:
        task: whose noise for `epsilon` is added to `noises`; no such noise when `epsilon` is 0.
        mechanisms: of "SGD" and `MECHANISMS`.
        noises: s of the paper.
        epsilon: the budget of the last noise.
        seeds: how many times.
    """
    labelled = [(noise, f"{noise:g}") for noise in noises]
    if epsilon:
        labelled.append((task.noise_for(epsilon), f"ε = {epsilon:g}"))
    cells = []
    for seed in range(seeds):
        for mechanism in mechanisms:
            if mechanism == "SGD":
                cells.append(Cell("SGD", 0.0, "", seed))
            else:
                cells += [Cell(mechanism, noise, label, seed) for noise, label in labelled]
    return cells


def run_cell(task: Task, cell: Cell) -> dict[str, Any]:
    """Trains and measures one cell.

    Args:
        task: model and data.
        cell: mechanism, noise and seed.

    Returns:
        Metrics, exposures by repeat count (by rank and extrapolated), speed and ε (None where there is none).
    """
    keras.utils.set_random_seed(cell.seed)
    model = task.make_model(cell.seed)
    batches = task.sampling.batches(task.fetch)
    trained = train(model, optimizer_of(task, cell), batches, task.steps, task.sampling, task.delta)
    return {
        **dataclasses.asdict(cell),
        "noise_multiplier": cell.noise * task.batch_size,
        "epsilon": trained.epsilon,
        "steps": trained.steps,
        "steps_per_second": trained.clock.steps_per_second,
        "metrics": task.measure(model),
        **exposures_of(task, model),
    }


def optimizer_of(task: Task, cell: Cell) -> keras.optimizers.Optimizer:
    """The mechanism of a cell."""
    if cell.mechanism == "SGD":
        return keras.optimizers.SGD(task.learning_rate)
    return MECHANISMS[cell.mechanism].optimizer(
        task.learning_rate,
        l2_norm_clip=task.clip,
        noise_multiplier=cell.noise * task.batch_size,
        expected_batch_size=task.batch_size,
    )


def exposures_of(task: Task, model: keras.Model) -> dict[str, Any]:
    """Exposures of the canaries by repeat count, by rank and extrapolated."""
    losses = task.canaries.by_repeats(per_example_losses(model, task.canaries.features, task.shared))
    references = per_example_losses(model, task.canaries.references, task.shared)
    found: dict[str, Any] = {"exposure": _lists(exposure_interpolation(losses, references))}
    found["exposure_extrapolated"] = _lists(exposure_extrapolation(losses, references))
    found["skew_normal_fit_error"] = skew_normal_fit_error(references)
    return found


def _lists(exposures: Mapping[int, np.ndarray]) -> dict[str, list[float]]:
    return {str(count): np.round(values, 4).tolist() for count, values in exposures.items()}


def shuffled_ids(count: int, size: int) -> np.ndarray:
    """`size` distinct ids from 1 to `count`: negatives, uniform from the public catalogue."""
    return 1 + np.random.default_rng().choice(count, size, replace=False, shuffle=False)


def held_out(features: Mapping[str, np.ndarray], shared: Mapping[str, np.ndarray], size: int = 500) -> tf.data.Dataset:
    """Batches of fixed examples, each with what all examples share."""
    pieces = [
        {name: values[i : i + size] for name, values in features.items()} for i in range(0, _count(features), size)
    ]
    signature = {
        **{name: tf.TensorSpec([None, *v.shape[1:]], v.dtype) for name, v in features.items()},
        **{name: tf.TensorSpec(v.shape, v.dtype) for name, v in shared.items()},
    }
    batches = tf.data.Dataset.from_generator(
        lambda: ({**piece, **shared} for piece in pieces), output_signature=signature
    )
    return batches.apply(tf.data.experimental.assert_cardinality(len(pieces))).cache()


def _count(features: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(features.values())))
