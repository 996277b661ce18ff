"""What a step costs as the catalogue grows: the run's two-tower on more movies, the rest as it is.

A step of DP-SGD draws noise for every movie, a lazy one for the movies of two batches. On some ten thousand movies that
is nearly the same; what the package is for shows on more. Whoever takes part makes a step in turn, so that all see the
same machine; the time is the median of such steps. Ids are drawn uniformly: no data are read, nothing is learnt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec import mechanisms
from tfdp_rec.models import TwoTower
from tfdp_rec.movies.settings import Settings
from tfdp_rec.movies.two_towers import optimizer_for
from tfdp_rec.training.lookahead import lookahead

COMPARED = (mechanisms.sgd, mechanisms.dp_sgd, mechanisms.lazy_dp_sgd)
_ROUNDS = 3


def step_times(settings: Settings, own: int, verbose: int = 0) -> dict[str, dict[str, float]]:
    """Number of movies -> mechanism -> seconds of a step: with the run's own, then as many as were asked for.

    Args:
        settings: of the job; without `step_at`, there are none.
        own: movies of the run.
        verbose: see `seconds_a_step`.
    """
    sizes = (own, *settings.step_at) if settings.step_at else ()
    return {str(movies): seconds_a_step(settings, movies, verbose) for movies in sizes}


def seconds_a_step(settings: Settings, movies: int, verbose: int = 0) -> dict[str, float]:
    """Seconds of one step with so many movies, by mechanism. All of their tables are in memory at once.

    Args:
        settings: of the job; `batch_size`, `history`, `negatives`, `width` and `hidden` count.
        movies: of the catalogue.
        verbose: 0 prints nothing, 1 says what is being done.
    """
    if verbose:
        print(f"\nTiming a step with {movies:,} movies: {', '.join(m.label for m in COMPARED)} ...", flush=True)
    steppers = {each.name: _stepper(each.name, settings, movies) for each in COMPARED}
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(2 + _ROUNDS):  # the first traces, the second has the first's memory back
        for name, step in steppers.items():
            start = time.perf_counter()
            next(step)
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(several) for name, several in times.items()}


def _stepper(mechanism: str, settings: Settings, movies: int) -> Iterator[Any]:
    """Makes a step each time it is asked, and is done when that is."""
    ids = np.arange(1, movies + 1)
    model = TwoTower(ids, settings.width, settings.hidden, None, settings.history, ks=(1,), name="two_tower")
    model.compile(optimizer=optimizer_for(mechanism, settings, noise_multiplier=1.0))
    batches = _batches(settings, movies)
    if mechanisms.named(mechanism).rows != "none":
        model.prepare(batches.element_spec)
        batches = lookahead(batches, model)
    model.make_train_function()
    drawn = iter(batches)
    while True:
        yield {name: float(value) for name, value in model.train_function(drawn).items()}


def _batches(settings: Settings, movies: int) -> tf.data.Dataset:
    """Batches of nobody's."""
    negatives = min(settings.negatives or 4000, movies)

    def batch(_: tf.Tensor) -> dict[str, tf.Tensor]:
        shapes = {
            "context": [settings.batch_size, settings.history], "label": [settings.batch_size], "negatives": [negatives]
        }  # fmt: skip
        return {name: tf.random.uniform(shape, 1, movies + 1, tf.int32) for name, shape in shapes.items()}

    return tf.data.Dataset.counter().map(batch).prefetch(2)
