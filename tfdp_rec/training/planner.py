"""Batch size, epochs and sampling of a training, of which an engineer chooses by time and by signal.

Every candidate (`signal.candidates`) has a share of the signal that ε allows, which is arithmetic, and takes

    T (a + b B)  seconds        T steps of batches of B, a and b from steps that were timed on made-up rows

with the smallest and the largest batch in question; memory is a line through both as well. Three are shown:

    the last     the least seconds with 95% of the largest share
    the first    the least seconds with a third of it
    between      the largest share within the geometric mean of their seconds

So none is shown beside which another has as much signal in less time, or more in the same. A row that saves less than a
fifth of the seconds of the next is left out, and there are fewer.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec import optimizers
from tfdp_rec.core.claim.calibration import calibrate_noise
from tfdp_rec.core.claim.events import DpEvent
from tfdp_rec.core.claim.schemes import PoissonSampling, Sampling
from tfdp_rec.core.mechanism.noise_walk import first_dense_optimizer, first_rate
from tfdp_rec.core.sensitivity.weights import Auto
from tfdp_rec.training.generated_rows import GeneratedRows
from tfdp_rec.training.private_form import PLAIN, compile_options, make_private_model
from tfdp_rec.training.private_plan import PrivatePlan
from tfdp_rec.training.rehearsal import remake
from tfdp_rec.training.signal import candidates, share_of_signal

_NEARLY_ALL, _SOME, _SAVED = 0.95, 1 / 3, 0.2
_SMALL = 1e-3  # a rate that is taken until the tables are known
_MADE_UP = 2**14  # rows, of which batches are made
_FEWEST, _MOST, _SECONDS = 5, 50, 2.0  # steps that are timed, and for how long

Prepare = Callable[[PrivatePlan], tuple[Any, Any]]
"""From a plan to a compiled model and batches of made-up rows."""


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A plan, and what it takes.

    Args:
        plan: Plan, with its sampling, steps and noise.
        seconds: Seconds of all its steps on this machine.
        memory: Most bytes of this process, by then, without the data and without an accelerator's.
    """

    plan: PrivatePlan
    seconds: float
    memory: int

    @property
    def numbers(self) -> dict[str, Any]:
        """What the table shows, and clip, ε and δ."""
        plan, sampling = self.plan, self.plan.sampling
        return {
            "sampling": type(sampling).__name__, "batch_size": sampling.expected_batch_size, "steps": plan.steps,
            "epochs": round(plan.steps * sampling.expected_batch_size / sampling.num_units),
            "noise_multiplier": plan.noise_multiplier, "share_of_signal": plan.share_of_signal,
            "seconds": self.seconds, "memory": self.memory, "l2_norm_clip": plan.l2_norm_clip,
            "epsilon": plan.epsilon, "delta": plan.delta, "num_units": sampling.num_units, "unit": sampling.unit,
        }  # fmt: skip


class Suggestions(tuple[Suggestion, ...]):
    """Suggestions, cheapest first; `print` shows a table."""

    __slots__ = ()

    def __str__(self) -> str:
        head = ("sampling", "batch", "steps", "epochs", "noise", "signal", "seconds", "memory")
        lines = [f"{head[0]:17}" + "".join(f"{each:>9}" for each in head[1:])]
        for row in (each.numbers for each in self):
            lines.append(
                f"{row['sampling']:17}{row['batch_size']:9,.0f}{row['steps']:9,}{row['epochs']:9}"
                f"{row['noise_multiplier']:9.3f}{row['share_of_signal']:9.0%}{row['seconds']:9,.0f}"
                f"{row['memory'] / 2**30:6.1f} GB"
            )
        if len(self) < 3:
            lines.append("There are no more rows: what has less of the signal would not save a fifth of the seconds.")
        return "\n".join(lines)


class Candidate(NamedTuple):
    """A sampling, a number of steps, their share of the signal, and their seconds."""

    sampling: Sampling
    steps: int
    share: float
    seconds: float


def suggest(
    prepare: Prepare, num_units: int, values: int, *, epsilon: float, delta: float, unit: str,
    spent: Iterable[tuple[DpEvent, str]], l2_norm_clip: float | Auto, accountant: str, verbose: Any,
) -> Suggestions:  # fmt: skip
    """Up to three plans, cheapest first; `values` is the number of values in a unit's row."""
    uses = list(spent)

    def make_plan(sampling: Sampling, steps: int) -> PrivatePlan:
        return PrivatePlan(
            sampling=sampling, steps=steps, epsilon=epsilon, delta=delta, l2_norm_clip=l2_norm_clip, spent=uses,
            accountant=accountant,
        )  # fmt: skip

    make_plan(PoissonSampling(num_units, 1, unit), 1)  # says what is wrong with the numbers
    choices = list(candidates(num_units, values, unit))
    bar = keras.utils.Progbar(len(choices) + 5, verbose=int(verbose != 0), unit_name="part")
    shares = []
    for sampling, steps in choices:
        noise = calibrate_noise(epsilon, delta, sampling, steps, "rdp", spent=uses)
        shares.append(share_of_signal(sampling, steps, noise, epsilon, delta))
        bar.add(1)
    sizes = sorted({math.ceil(sampling.expected_batch_size) for sampling, _ in choices})
    timed = {}
    for size in sorted({sizes[0], sizes[-1]}):
        tried = PrivatePlan(
            sampling=PoissonSampling(num_units, size, unit), steps=_MOST, noise_multiplier=1.0, delta=delta,
            l2_norm_clip=l2_norm_clip, accountant="rdp",
        )  # fmt: skip
        timed[size] = _measure(prepare, tried)
        bar.add(1)
    found = [
        Candidate(sampling, steps, share, steps * _on_line(timed, sampling.expected_batch_size, 0))
        for (sampling, steps), share in zip(choices, shares)
    ]
    rows = []
    for each in choose(found):
        plan = make_plan(each.sampling, each.steps)
        memory = _on_line(timed, each.sampling.expected_batch_size, 1)
        rows.append(Suggestion(plan, each.seconds, int(memory)))
        plan.noise_multiplier  # noqa: B018  (computed now, under the bar)
        bar.add(1)
    bar.update(bar.target)
    return Suggestions(rows)


def choose(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that are shown, cheapest first."""
    largest = max(each.share for each in found)

    def cheapest(part: float) -> Candidate:
        enough = [each for each in found if each.share >= part * largest]
        return min(enough, key=lambda each: (each.seconds, -each.share))

    first, last = cheapest(_SOME), cheapest(_NEARLY_ALL)
    within = [each for each in found if each.seconds <= math.sqrt(first.seconds * last.seconds)]
    rows = [last]
    for each in (max([first, *within], key=lambda each: (each.share, -each.seconds)), first):
        if each.seconds <= (1 - _SAVED) * rows[-1].seconds:
            rows.append(each)
    return rows[::-1]


def on_made_up_rows(model: Any, rows: Any) -> tuple[Prepare, int]:
    """What prepares a new model of the same layers, and the number of values in a row."""
    loss = compile_options(model).get("loss") if isinstance(model, PLAIN) and getattr(model, "built", False) else None
    if loss is None or not isinstance(rows, tuple) or len(rows) != 2:
        raise ValueError(
            "A suggestion is for models of layers that were built and compiled with a loss, and (x, y) as for "
            "make_private."
        )
    x, y = (tuple(each) if isinstance(each, list) else each for each in rows)
    x, y = tf.nest.map_structure(lambda each: tf.TensorSpec([None, *each.shape[1:]], each.dtype), (x, y))

    def prepare(plan: PrivatePlan) -> tuple[Any, Any]:
        plain = type(model) is keras.Sequential  # which has no input of its own
        new = remake(keras.Model(model.inputs[0], model.outputs[0], name=model.name) if plain else model)
        features = GeneratedRows(new, x, _MADE_UP, np.random.default_rng(0)).features
        labels = tf.nest.map_structure(lambda each: np.zeros([_MADE_UP, *each.shape[1:]], each.dtype.name), y)
        made_up = features, labels
        private = make_private_model(new, features)
        dense = first_dense_optimizer(plan.steps)
        private.compile(optimizers.LazyDPSGD(_SMALL, plan=plan, dense_optimizer=dense), loss=loss)
        batches = plan.batches(lambda units: tf.nest.map_structure(lambda each: each[units % _MADE_UP], made_up))
        private.prepare(batches.element_spec)
        private.optimizer.learning_rate = first_rate(private.optimizer, plan.steps)
        return private, batches

    return prepare, sum(math.prod(each.shape[1:]) for each in tf.nest.flatten((x, y)))


def _measure(prepare: Prepare, plan: PrivatePlan) -> tuple[float, float]:
    """Seconds of a step, and the most bytes that this process held so far."""
    clock = _Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of rates, which are not tried here
        model, batches = prepare(plan)
        model.fit(batches, steps_per_epoch=_MOST, callbacks=[clock], verbose=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(np.median(np.diff(clock.ends))), peak * (1.0 if sys.platform == "darwin" else 1024.0)


def _on_line(timed: dict[int, tuple[float, float]], size: float, which: int) -> float:
    """A measured quantity at a batch size, on the line through those that were measured."""
    return float(np.interp(size, list(timed), np.maximum.accumulate([each[which] for each in timed.values()])))


class _Clock(keras.callbacks.Callback):
    """Notes when steps end, the first of which is traced; enough of them end the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) > _FEWEST and self.ends[-1] - self.ends[0] > _SECONDS:
            self.model.stop_training = True
