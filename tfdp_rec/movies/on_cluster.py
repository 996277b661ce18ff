"""The main job on parameter servers: the same model, mechanisms, budget and report, trained by a cluster's workers.

The training users' timelines are written where all workers can read them, and are gone when training is. What is
different from one machine: batches are drawn by the workers, steps are counted as attempts, and recall is computed
once, on the released model.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.data import NextItemExamples
from tfdp_rec.distribute import Cluster, ParameterServerTrainer
from tfdp_rec.distribute.connection import ServerLost, connect
from tfdp_rec.movies.kept import RunCheckpoint
from tfdp_rec.movies.laid_out import laid_out
from tfdp_rec.movies.problem import Run
from tfdp_rec.movies.trained import Trained
from tfdp_rec.movies.two_towers import accounting, new_model, optimizer_for, steps_left
from tfdp_rec.run_folder import RunFolder


class ClusterTraining:
    """Trains one mechanism after the other on a cluster; stands for `two_towers.train_one`.

    Args:
        resolver: of the cluster. The run's folder, and where it is kept, must be where all workers and servers can read
            and write them.

    Raises:
        TimeoutError: naming the workers and servers that do not answer within a minute.
    """

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver):
        self._resolver = resolver
        Cluster(resolver.cluster_spec().as_dict()).wait()
        connect(resolver)  # before the data are prepared: TensorFlow forgets what was traced ahead of this

    def __call__(self, mechanism: str, run: Run) -> Trained:
        """Trains, accounts and tests, as `two_towers.train_one`.

        Raises:
            ConnectionError: a server was lost; with what to do.
        """
        problem, settings = run.problem, run.settings
        examples = NextItemExamples(problem.timelines, problem.train, settings.history, problem.negatives)
        if run.kept:
            run.kept.ledger(mechanism, problem.sampling)  # for what that refuses
        with laid_out(examples, run.folder) as timelines, _in_words(run.kept):
            trainer = ParameterServerTrainer(
                lambda: new_model(problem, settings), lambda: optimizer_for(mechanism, settings, run.noises[mechanism]),
                lambda: timelines.batches(problem.sampling), self._resolver, sampling=problem.sampling,
                checkpoint_directory=run.kept.folder(mechanism) if run.kept else None,
                checkpoint_every=run.kept.every if run.kept else None,
            )  # fmt: skip
            with trainer:
                return _trained(trainer, mechanism, run)


@contextlib.contextmanager
def _in_words(kept: RunCheckpoint | None) -> Iterator[None]:
    """Says of a lost server what whoever gave the command can do."""
    try:
        yield
    except (ServerLost, TimeoutError) as problem:
        fact = getattr(problem, "fact", problem)
        if kept is None:
            raise ConnectionError(f"{fact} Nothing was kept: begin again, and give --checkpoint.") from problem
        raise ConnectionError(
            f"{fact} Go on from the last checkpoint, once all of them run: tfdp-rec train --checkpoint "
            f"{kept.directory} --resume."
        ) from problem


def _trained(trainer: ParameterServerTrainer, mechanism: str, run: Run) -> Trained:
    problem, settings = run.problem, run.settings
    accountant, within = accounting(mechanism, trainer.cluster_model.optimizer, problem, settings)
    made = trainer.resume() if run.kept and accountant is not None else 0
    curve = _Curve(run.folder, mechanism, trainer)
    left = steps_left(settings, made, within)
    if left:
        _fit(trainer, left, [*within, curve], run)
    model, steps = trainer.model(), trainer.attempts
    means = problem.tests.measured(model)
    trained = Trained(model, means, steps=steps, steps_per_second=curve.steps_per_second)
    trained = trained.accounted(accountant, run.noises[mechanism])
    last = {"mechanism": mechanism, "step": steps, "loss": curve.loss, "epsilon": trained.epsilon}
    run.folder.append({**last, **{name: mean.value for name, mean in means.items()}})
    return trained


def _fit(trainer: ParameterServerTrainer, left: int, callbacks: list[keras.callbacks.Callback], run: Run) -> None:
    a_report = -(-run.settings.steps // min(run.settings.evaluations, run.settings.steps))
    try:
        trainer.fit(left, callbacks, steps_per_report=a_report, verbose=run.verbose)
    except KeyboardInterrupt:
        trainer.save()
        raise


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
        if not self._reports:
            return None
        (first, began), (last, ended) = self._reports[0], self._reports[-1]
        return (last - first) / (ended - began) if last > first else None
