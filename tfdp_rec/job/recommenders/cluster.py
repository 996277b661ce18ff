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
from tfdp_rec.job.recommenders.training import EVALUATIONS, Training
from tfdp_rec.job.run_folder import RunFolder
from tfdp_rec.job.run_state import TIMELINES, MadeRecommender


class ClusterTraining:
    """Trains one two-tower after the other on a cluster; stands for `training.train_here`."""

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver):
        self._resolver = resolver
        Cluster(resolver.cluster_spec().as_dict()).wait()
        connect(resolver)  # before the data are prepared: TensorFlow forgets what was traced ahead of this

    def __call__(self, training: Training) -> MadeRecommender:
        """Trains, accounts and tests."""
        name, state, sampling = training.name, training.job.state, training.sampling
        path = state.directory / TIMELINES  # where all workers can read it, as long as the training lasts
        remove(path)
        try:
            timelines = SharedTimelines(training.examples(), path)
            trainer = ParameterServerTrainer(
                training.make_model, lambda: _make_optimizer(training),
                lambda: timelines.batches(sampling), self._resolver, sampling=sampling,  # type: ignore[arg-type]
                checkpoint_directory=state.training_folder(name) if name != mechanisms.sgd.name else None,
                checkpoint_every=state.every, ledger=training.ledger, earlier_steps=state.steps_before(name),
                begin_with=training.first_model() if state.earlier is not None else None,
            )  # fmt: skip
            with trainer:
                return _train(trainer, training)
        except (ServerLost, TimeoutError) as problem:
            fact = getattr(problem, "fact", problem)
            raise ConnectionError(f"{fact} Go on from the last checkpoint, once all of them run.") from problem
        finally:
            remove(path)


def _make_optimizer(training: Training) -> Any:
    # Servers train by mechanisms alone: SGD is EANA without noise, at a clip that no example's gradient reaches.
    own, settings = training.optimizer(), training.job.settings
    if training.name != mechanisms.sgd.name:
        return own
    plain = {"l2_norm_clip": 1e6, "noise_multiplier": 0.0, "expected_batch_size": settings.batch_size}
    return mechanisms.eana.optimizer(float(own.learning_rate), **plain)


def _train(trainer: ParameterServerTrainer, training: Training) -> MadeRecommender:
    settings, folder = training.job.settings, training.job.state.folder
    accountant, within = training.make_accountant(trainer.cluster_model.optimizer, pays=False)
    made = trainer.resume() if accountant is not None else 0
    curve, left = _ClusterCurve(folder, training.name, trainer), training.steps_to_make(made, within)
    a_report = -(-settings.steps // min(EVALUATIONS, settings.steps))
    try:
        if left:
            callbacks = [*within, *([curve] if settings.confidential else [])]
            trainer.fit(left, callbacks, steps_per_report=a_report, verbose=0)  # else losses are printed
    except KeyboardInterrupt:
        trainer.save()
        raise
    model, steps = trainer.model(), trainer.attempts
    tests = training.material.tests
    means = None if tests is None else tests.measure(model)
    found = training.add_costs(MadeRecommender(model, model, steps=steps, means=means), accountant)
    if means is None:
        return found
    last = {"recommender": training.name, "step": steps, "loss": curve.loss, "epsilon": found.epsilon}
    folder.append({**last, **{each: mean.value for each, mean in means.items()}})
    return found


class _ClusterCurve(keras.callbacks.Callback):
    """Writes a line of metrics a report; the last one comes with the recalls."""

    def __init__(self, folder: RunFolder, name: str, trainer: ParameterServerTrainer):
        super().__init__()
        self._folder, self._name, self._trainer, self.loss = folder, name, trainer, float("nan")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.loss = float((logs or {})["loss"])
        self._folder.append({"recommender": self._name, "step": self._trainer.attempts, "loss": self.loss})
