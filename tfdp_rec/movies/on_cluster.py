"""The main job on parameter servers: the same model, mechanisms, budget and report, trained by a cluster's workers.

The training users' timelines are written where all workers can read them, and are gone when training is. What is
different from one machine: batches are drawn by the workers, steps are counted as attempts, and recall is computed
once, on the released model.
"""

from __future__ import annotations

import shutil
import time
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.data import NextItemExamples
from tfdp_rec.datasets.shared_timelines import SharedTimelines
from tfdp_rec.distribute import Cluster, ParameterServerTrainer
from tfdp_rec.distribute.connection import connect
from tfdp_rec.movies.job import Problem, Trained, accounting, new_model, optimizer_for, test_batches
from tfdp_rec.movies.run_folder import RunFolder
from tfdp_rec.movies.settings import Settings


class ClusterTraining:
    """Trains one mechanism after the other on a cluster; stands for `job.train_one`.

    Args:
        resolver: of the cluster. The run's folder must be where all workers can read it.

    Raises:
        TimeoutError: naming the workers and servers that do not answer within a minute.
    """

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver):
        self._resolver = resolver
        Cluster(resolver.cluster_spec().as_dict()).wait()
        connect(resolver)  # before the data are prepared: TensorFlow forgets what was traced ahead of this

    def __call__(
        self, mechanism: str, problem: Problem, settings: Settings, folder: RunFolder, noise: float, verbose: int
    ) -> Trained:
        """Trains, accounts and tests, as `job.train_one`."""
        examples = NextItemExamples(problem.timelines, problem.train, settings.history, problem.negatives)
        timelines = SharedTimelines(examples, folder / "timelines")
        try:
            trainer = ParameterServerTrainer(
                lambda: new_model(problem, settings), lambda: optimizer_for(mechanism, settings, noise),
                lambda: timelines.batches(problem.sampling), self._resolver, sampling=problem.sampling,
            )  # fmt: skip
            return _trained(trainer, mechanism, problem, settings, folder, verbose)
        finally:
            shutil.rmtree(timelines.folder)


def _trained(
    trainer: ParameterServerTrainer, mechanism: str, problem: Problem, settings: Settings, folder: RunFolder,
    verbose: int,
) -> Trained:  # fmt: skip
    accountant, callbacks = accounting(mechanism, trainer.cluster_model.optimizer, problem, settings)
    curve, reports = _Curve(folder, mechanism, trainer), min(settings.evaluations, settings.steps)
    trainer.fit(settings.steps, [*callbacks, curve], steps_per_report=-(-settings.steps // reports), verbose=verbose)
    model, steps = trainer.model(), trainer.attempts
    recalls = model.recall(test_batches(problem, settings))
    trained = Trained(model, accountant, steps, curve.steps_per_second, recalls)
    last = {"mechanism": mechanism, "step": steps, "loss": curve.loss, "epsilon": trained.epsilon}
    folder.append({**last, **recalls})
    return trained


class _Curve(keras.callbacks.Callback):
    """Writes a line of metrics a report; the last one comes with the recalls."""

    def __init__(self, folder: RunFolder, mechanism: str, trainer: ParameterServerTrainer):
        super().__init__()
        self._folder, self._mechanism, self._trainer, self.loss = folder, mechanism, trainer, float("nan")
        self._reports: list[tuple[int, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.loss = float((logs or {})["loss"])
        self._reports.append((self._trainer.attempts, time.perf_counter()))
        self._folder.append({"mechanism": self._mechanism, "step": self._trainer.attempts, "loss": self.loss})

    @property
    def steps_per_second(self) -> float | None:
        """Since the first report, which had everything made and sent to the servers; None if there was no other."""
        (first, began), (last, ended) = self._reports[0], self._reports[-1]
        return (last - first) / (ended - began) if last > first else None
