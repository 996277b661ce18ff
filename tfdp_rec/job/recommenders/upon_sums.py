"""A model of the latest items that begins with the answers of private sums, and is trained to better them.

`SASRec.upon` without a transformer: a query is the sum of the latest items' rows. The sums are of its own, released for
0.8 of ε, and the steps of LazyDPSGD have the rest. Users give a window of their items each time they are in a batch,
with a label at each place, all of them one gradient that is clipped as one.

On a further day the sums have that day's added, and the tables go on from the released model.
"""

from __future__ import annotations

from typing import Any

import keras

from tfdp_rec.datasets.next_item import NextItemExamples
from tfdp_rec.job.evaluation import HISTORY
from tfdp_rec.job.recommenders import training
from tfdp_rec.job.recommenders.names import upon_sums
from tfdp_rec.job.recommenders.two_towers import optimizer_for
from tfdp_rec.job.run import MadeRecommender, Run
from tfdp_rec.models import SASRec


def made(run: Run) -> MadeRecommender:
    """Trains and accounts, in this process."""
    optimizer = optimizer_for(upon_sums.name, run.settings, run.checkpoint.noises[upon_sums.name])
    model = training.go_on(run, untrained_model(run))  # on a further day with the tables of the released model
    return training.trained(upon_sums.name, run, model, optimizer, lambda made: _batches(run))


def untrained_model(run: Run) -> SASRec:
    """A model of the released sums."""
    keras.utils.set_random_seed(run.settings.seed)
    # What the sums have cost comes into the model's history with the ledger's other payments.
    arguments = {"width": run.settings.width, "history_length": HISTORY, "num_blocks": 0, "name": "upon_sums"}
    return SASRec.upon(run.upon, spent=(), **arguments)


def _batches(run: Run) -> Any:
    examples = examples_of(run)
    return run.sampling.batches(examples.fetch, shared=examples.shared, present=examples.present)


def examples_of(run: Run) -> NextItemExamples:
    """The training users' windows."""
    return NextItemExamples(
        run.log, run.users.train, HISTORY, run.negatives(upon_sums.name), every_place=True, repeats=False,
        released_counts=run.upon.popularity,
    )  # fmt: skip
