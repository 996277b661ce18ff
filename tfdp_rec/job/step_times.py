"""Seconds of a step as the catalogue grows: the run's two-tower on more items, the rest as it is.

A step of DP-SGD draws noise for every item, a lazy one for the items of two batches, which shows on large catalogues.
The mechanisms make a step in turn, so that all see the same machine; a time is the median of such steps. Ids are drawn
uniformly: no data are read, nothing is learnt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec import mechanisms
from tfdp_rec.job.recommenders.two_towers import optimizer_for
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.models import TwoTower
from tfdp_rec.training.lookahead import lookahead

COMPARED = (mechanisms.sgd, mechanisms.dp_sgd, mechanisms.lazy_dp_sgd)
_ROUNDS = 3


def step_times(settings: JobSettings, own: int, verbose: int = 0) -> dict[str, dict[str, float]]:
    """Number of items -> mechanism -> seconds of a step: with the run's own, then as many as were asked for."""
    sizes = (own, *settings.step_at) if settings.step_at else ()
    return {str(items): _seconds_a_step(settings, items, verbose) for items in sizes}


def _seconds_a_step(settings: JobSettings, items: int, verbose: int) -> dict[str, float]:
    """Seconds of one step by mechanism. All of their tables are in memory at once."""
    if verbose:
        print(f"\nTiming a step with {items:,} items: {', '.join(m.label for m in COMPARED)} ...", flush=True)
    steppers = {each.name: _stepper(each.name, settings, items) for each in COMPARED}
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(2 + _ROUNDS):  # the first traces, the second has the first's memory back
        for name, step in steppers.items():
            start = time.perf_counter()
            next(step)
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(several) for name, several in times.items()}


def _stepper(mechanism: str, settings: JobSettings, items: int) -> Iterator[Any]:
    """Makes a step each time it is asked, and is done when that is."""
    ids = np.arange(1, items + 1)
    model = TwoTower(ids, settings.width, settings.hidden, None, settings.history, ks=(1,), name="two_tower")
    model.compile(optimizer=optimizer_for(mechanism, settings, noise_multiplier=1.0))
    batches = _batches(settings, items)
    if mechanisms.named(mechanism).rows != "none":
        model.prepare(batches.element_spec)
        batches = lookahead(batches, model)
    model.make_train_function()
    drawn = iter(batches)
    while True:
        yield {name: float(value) for name, value in model.train_function(drawn).items()}


def _batches(settings: JobSettings, items: int) -> tf.data.Dataset:
    """Batches of random ids."""
    negatives = min(settings.negatives or 4000, items)

    def batch(_: tf.Tensor) -> dict[str, tf.Tensor]:
        shapes = {
            "context": [settings.batch_size, settings.history], "label": [settings.batch_size], "negatives": [negatives]
        }  # fmt: skip
        return {name: tf.random.uniform(shape, 1, items + 1, tf.int32) for name, shape in shapes.items()}

    return tf.data.Dataset.counter().map(batch).prefetch(2)
