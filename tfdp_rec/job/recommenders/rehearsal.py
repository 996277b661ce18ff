"""Trainings tried out before anything is paid: each makes its model, its optimizer, and one step on nothing of the log.

A batch is drawn as in training, and every user in it is one invented user. So what refuses at a first step, or takes
more memory than there is, does so while it costs nothing.
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np

from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.job.recommenders import names, training, two_towers, upon_sums
from tfdp_rec.job.run import Run
from tfdp_rec.spectral import SpectralRecommender

_ITEMS, _MOST_ITEMS = 100, 10**5  # where they are yet to be found; of a public list


def rehearse(run: Run) -> None:
    """Raises what a training that is still to be done would raise at its first step."""
    ids = range(1, 1 + (min(len(run.public), _MOST_ITEMS) if run.public else _ITEMS))
    rows = {"user": [0, 0], "item": [1, 2], "time": [0, 1]}
    invented = Interactions.read(rows, user="user", item="item", time="time", items=ids)
    users = dataclasses.replace(run.users, train=np.zeros(1, np.int64), test=np.zeros(0, np.int64))
    trial = dataclasses.replace(run, log=invented, users=users)
    trial.prior = np.ones(len(ids))
    for name in filter(names.is_trained, run.settings.mechanism):
        if run.checkpoint.finished(name) is None:
            _step(name, trial)


def _step(name: str, run: Run) -> None:
    if name == names.upon_sums.name:
        run.upon = SpectralRecommender(
            run.log.catalogue.ids, None, run.delta, noise_multiplier=run.budget.sums_upon, ordered=True,
            recency=run.settings.recency, users_private=True,
        ).fit(run.log, verbose=0)  # fmt: skip
    makes = upon_sums if name == names.upon_sums.name else two_towers
    model, examples = makes.untrained_model(run), makes.examples_of(run)
    noise, correlation = run.checkpoint.noises[name], two_towers.correlation_for(name, run.settings, run.sampling)
    model.compile(optimizer=two_towers.optimizer_for(name, run.settings, noise, correlation))
    batches = run.sampling.batches(lambda units: examples.fetch(np.zeros(len(units), np.int64)), shared=examples.shared)
    with warnings.catch_warnings(), training.refusals_as_wrong_arguments():
        warnings.simplefilter("ignore", UserWarning)  # that nothing is counted, which nobody is to hear
        model.fit(batches, steps_per_epoch=1, verbose=0)
