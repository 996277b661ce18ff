"""Two-towers on parameter servers: the same model, mechanisms and budget, trained by a cluster's workers.

The training users' timelines are written where all workers can read them, and are gone when training is. Batches are
drawn by the workers, steps are counted as attempts, and recall is computed once, on the released model.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp_rec import mechanisms
from tfdp_rec.core.ground.files import remove
from tfdp_rec.datasets.shared_timelines import SharedTimelines
from tfdp_rec.distribute import Cluster, ParameterServerTrainer
from tfdp_rec.distribute.connection import ServerLost, connect
from tfdp_rec.job.checkpoint import TIMELINES
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.recommenders.training import EVALUATIONS, accounting, steps_left, with_costs
from tfdp_rec.job.recommenders.two_towers import examples_of, new_model, optimizer_for, untrained_model
from tfdp_rec.job.run import MadeRecommender, Run
from tfdp_rec.job.run_folder import RunFolder
from tfdp_rec.job.settings import JobSettings


class ClusterTraining:
    """Trains one two-tower after the other on a cluster; stands for `two_towers.train_one`."""

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver):
        self._resolver = resolver
        Cluster(resolver.cluster_spec().as_dict()).wait()
        connect(resolver)  # before the data are prepared: TensorFlow forgets what was traced ahead of this

    def __call__(self, name: str, run: Run) -> MadeRecommender:
        """Trains, accounts and tests."""
        settings, checkpoint, sampling = run.settings, run.checkpoint, run.sampling
        path = checkpoint.directory / TIMELINES  # where all workers can read it, as long as the training lasts
        remove(path)
        try:
            timelines = SharedTimelines(examples_of(run), path)
            trainer = ParameterServerTrainer(
                lambda: untrained_model(run), lambda: _optimizer_for(name, settings, checkpoint.noises[name]),
                lambda: timelines.batches(sampling), self._resolver, sampling=sampling,  # type: ignore[arg-type]
                checkpoint_directory=checkpoint.training_folder(name) if name != mechanisms.sgd.name else None,
                checkpoint_every=checkpoint.every,
                ledger=run.ledger(name) if names.named(name).claims_epsilon else None,
                earlier_steps=checkpoint.steps_before(name),
                begin_with=new_model(run) if checkpoint.earlier is not None else None,
            )  # fmt: skip
            with trainer:
                return _made(trainer, name, run)
        except (ServerLost, TimeoutError) as problem:
            fact = getattr(problem, "fact", problem)
            raise ConnectionError(f"{fact} Go on from the last checkpoint, once all of them run.") from problem
        finally:
            remove(path)


def _optimizer_for(name: str, settings: JobSettings, noise_multiplier: float) -> Any:
    # Servers train by mechanisms alone: SGD is EANA without noise, at a clip that no example's gradient reaches.
    own = optimizer_for(name, settings, noise_multiplier)
    if name != mechanisms.sgd.name:
        return own
    plain = {"l2_norm_clip": 1e6, "noise_multiplier": 0.0, "expected_batch_size": settings.batch_size}
    return mechanisms.eana.optimizer(float(own.learning_rate), **plain)


def _made(trainer: ParameterServerTrainer, name: str, run: Run) -> MadeRecommender:
    accountant, within = accounting(name, trainer.cluster_model.optimizer, run, run.ledger(name), pays=False)
    made = trainer.resume() if accountant is not None else 0
    curve, settings = _ClusterCurve(run.folder, name, trainer), run.settings
    left = steps_left(settings, made, within)
    a_report = -(-settings.steps // min(EVALUATIONS, settings.steps))
    try:
        if left:
            trainer.fit(left, [*within, curve], steps_per_report=a_report, verbose=run.show.verbose)
    except KeyboardInterrupt:
        trainer.save()
        raise
    model, steps = trainer.model(), trainer.attempts
    means = run.evaluation.measured(model)
    found = with_costs(MadeRecommender(model, model, steps=steps, means=means), name, accountant, run)
    last = {"recommender": name, "step": steps, "loss": curve.loss, "epsilon": found.epsilon}
    run.folder.append({**last, **{each: mean.value for each, mean in means.items()}})
    return found


class _ClusterCurve(keras.callbacks.Callback):
    """Writes a line of metrics a report; the last one comes with the recalls."""

    def __init__(self, folder: RunFolder, name: str, trainer: ParameterServerTrainer):
        super().__init__()
        self._folder, self._name, self._trainer, self.loss = folder, name, trainer, float("nan")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.loss = float((logs or {})["loss"])
        self._folder.append({"recommender": self._name, "step": self._trainer.attempts, "loss": self.loss})
