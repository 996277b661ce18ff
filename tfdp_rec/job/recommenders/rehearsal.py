"""Trainings tried out before anything is paid: each makes its model, its optimizer, and one step on nothing of the log.

A batch is drawn as in training, and every user in it is one invented user. So what refuses at a first step, or takes
more memory than there is, does so while it costs nothing.
"""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np

from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.job.budget import pretraining_release
from tfdp_rec.job.evaluation import Evaluation, NewItemExamples
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.recommenders.training import Training, refusals_as_wrong_arguments
from tfdp_rec.job.run_state import Job, Material
from tfdp_rec.spectral import SpectralRecommender

_ITEMS, _MOST_ITEMS = 100, 10**5  # where they are yet to be found; of a public list


def rehearse(job: Job) -> None:
    """Raises what a training that is still to be done would raise at its first step."""
    ids = range(1, 1 + (min(len(job.public), _MOST_ITEMS) if job.public else _ITEMS))
    rows = {"user": [0, 0], "item": [1, 2], "time": [0, 1]}
    invented = Interactions.read(rows, user="user", item="item", time="time", items=ids)
    users = dataclasses.replace(job.users, train=np.zeros(1, np.int64), test=np.zeros(0, np.int64))
    tests = Evaluation(NewItemExamples(invented, users.test), seed=0)
    for name in filter(names.is_trained, job.settings.mechanism):
        if job.state.result(name) is None:
            release = np.ones(len(ids)) if names.is_two_tower(name) else _make_sums(job, invented)
            _step(Training(name, job, Material(invented, users, {pretraining_release(name): release}, tests)))


def _make_sums(job: Job, log: Interactions) -> SpectralRecommender:
    return SpectralRecommender(
        log.catalogue.ids, None, job.budget.delta, noise_multiplier=job.budget.pretraining_sums, ordered=True,
        recency=job.settings.recency, users_private=True,
    ).fit(log, verbose=0)  # fmt: skip


def _step(training: Training) -> None:
    model, examples = training.untrained_model(), training.examples()
    model.compile(optimizer=training.optimizer())
    batches = training.sampling.batches(
        lambda units: examples.fetch(np.zeros(len(units), np.int64)), shared=examples.shared
    )  # fmt: skip
    with warnings.catch_warnings(), refusals_as_wrong_arguments():
        warnings.simplefilter("ignore", UserWarning)  # that nothing is counted, which nobody is to hear
        model.fit(batches, steps_per_epoch=1, verbose=0)
