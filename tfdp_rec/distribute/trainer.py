"""Private training on parameter servers: `ParameterServerTrainer`.

    chief (this process)   makes rounds of steps (`rounds.py`), writes checkpoints, releases
    worker                 one step after another: `worker_step.py`
    parameter server       a private optimizer of its own over what it holds: `parameter_server.py`

Steps are asynchronous: workers do not wait for one another. What that means is in docs/scaling-semantics.md. A step is
counted before it is dispatched, and again when it is dispatched again because its worker died (`attempts.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.claim.entries import Entries
from tfdp_rec.core.claim.ledger import Ledger
from tfdp_rec.core.claim.sampling_proof import refuse_choosing, source_of
from tfdp_rec.core.claim.schemes import PoissonSampling
from tfdp_rec.core.ground.files import is_address, replace_atomically
from tfdp_rec.core.ground.keras_internals import iterator_spec, layers_within, random_states
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.distribute.attempts import open_attempts
from tfdp_rec.distribute.checkpoint import Checkpoints
from tfdp_rec.distribute.cluster import Cluster
from tfdp_rec.distribute.connection import Watch, connect
from tfdp_rec.distribute.hollow_model import export, hollow_tables, write_tables
from tfdp_rec.distribute.parameter_server import refuse_unserved
from tfdp_rec.distribute.rounds import Rounds
from tfdp_rec.distribute.served_model import ServedModel
from tfdp_rec.distribute.worker_step import WorkerStep
from tfdp_rec.training.batch import examples_of
from tfdp_rec.training.callback_checks import list_callbacks, refuse_forgetting
from tfdp_rec.training.model import PrivateTraining

_MAY_DIFFER = ("name", "learning_rate", "noise", "secure", "dense_optimizer")  # none of these touches the guarantee


class ParameterServerTrainer:
    """Trains a model whose tables are spread over parameter servers.

    Args:
        model_fn: Maker of the model (with `PrivateTraining`), without arguments.
        optimizer_fn: Maker of the mechanism: `DPSGD`, `EANA` or `LazyDPSGD`. Without privacy, to compare with: `EANA`
            with noise_multiplier=0 and a clip that no gradient reaches.
        dataset_fn: Maker of a worker's batches, a `tf.data.Dataset` without end; it runs on the worker, so every part
            of it must be a TensorFlow operation (`PoissonSampling.graph_batches`).
        cluster_resolver: Resolver that names the processes.
        loss: Loss for `compile`, for a model without a `per_example_loss` of its own.
        loss_weights: Weights of the losses for `compile`.
        microbatch_size: Size of microbatches for `compile`.
        sampling: The Poisson sampling that `dataset_fn` draws with.
        checkpoint_directory: Directory of training checkpoints and of the ledger that attempts are paid in, on a file
            system that all processes share; one training, one directory, one trainer at a time. None for neither.
        checkpoint_every: Attempts between two checkpoints, about; None for the ends of `fit` and releases alone.
        ledger: Open `Ledger` of this training alone, to pay attempts in, which its owner closes; one in
            checkpoint_directory if left out.
        earlier_steps: Number of steps in `ledger` that earlier trainings made, which this one goes on from.
        begin_with: Model in this process whose weights and privacy history the training begins with, such as an
            earlier release after `grow_into`; of the variables that model_fn makes. First weights of model_fn if left
            out. A checkpoint that `resume` finds is later.
        data_changed: Whether the training continues on other data than before, grown for instance. Steps on the old
            data keep their price.
        min_shard_bytes: Least size of a shard: a table is divided among servers only where no shard gets smaller.
        seconds_without_progress: Longest wait for any step to end, or for a silent server.
        seconds_to_connect: Longest wait until workers and servers answer.

    Raises:
        ValueError: for what is no cluster, or an optimizer that does not run on one.
        TimeoutError: naming the workers and servers that do not answer.
        NotPrivate: for what has no guarantee on parameter servers.
        BrokenLedger: the ledger of the directory was deleted or changed, or is about other data.

    Example:
        >>> with LocalCluster(workers=2, servers=2) as cluster:  # doctest: +SKIP
        ...     trainer = ParameterServerTrainer(
        ...         model_fn, optimizer_fn, dataset_fn, cluster.resolver(), loss="mse", sampling=sampling
        ...     )
        ...     trainer.fit(1000, callbacks=[PrivacyBudget(accountant, target_epsilon=8.0)])
        ...     trainer.export("servable")
    """

    def __init__(
        self,
        model_fn: Callable[[], Any],
        optimizer_fn: Callable[[], PrivateOptimizer],
        dataset_fn: Callable[[], tf.data.Dataset],
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        *,
        loss: Any = None,
        loss_weights: Any = None,
        microbatch_size: int | None = None,
        sampling: PoissonSampling | None = None,
        checkpoint_directory: str | None = None,
        checkpoint_every: int | None = None,
        ledger: Ledger | None = None,
        earlier_steps: int = 0,
        begin_with: PrivateTraining | None = None,
        data_changed: bool = False,
        min_shard_bytes: int = 1 << 18,
        seconds_without_progress: float = 300.0,
        seconds_to_connect: float = 60.0,
    ):
        self._model_fn, self._optimizer_fn, self._dataset_fn = model_fn, optimizer_fn, dataset_fn
        self._compile_options = {"loss": loss, "loss_weights": loss_weights}
        if microbatch_size is not None:
            self._compile_options["microbatch_size"] = microbatch_size
        self._every, self._saved, self._min_bytes = checkpoint_every, 0, min_shard_bytes
        self._begun_with = Entries()  # what was spent on the weights before this training
        cluster = Cluster(cluster_resolver.cluster_spec().as_dict())
        self._watch = Watch(cluster, seconds_without_progress)
        cluster.wait(seconds_to_connect)
        self.strategy = connect(cluster_resolver)  # first: it makes TensorFlow forget what was made before
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._optimizer = optimizer_fn()
        refuse_unserved(self._optimizer)
        if not isinstance(sampling, PoissonSampling):
            raise NotPrivate(
                "Workers draw their batches by themselves, so only Poisson sampling has a meaning for all of them "
                f"together: pass sampling=, a tfdp_rec.data.PoissonSampling; got {sampling!r}."
            )
        self.sampling = sampling
        with contextlib.ExitStack() as failed:
            # Before all that takes long: what may not train here is refused at once.
            self._attempts = open_attempts(checkpoint_directory, sampling, data_changed, ledger, earlier_steps)
            failed.callback(self._attempts.close)
            if checkpoint_directory is not None:
                self._attempts.refuse_forgetting(Checkpoints(checkpoint_directory, [], {}))
            self._spec = self._check_spec()
            devices = [f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(len(cluster.servers))]
            self._served = ServedModel(self._cluster_model, self._optimizer, self._spec, devices, min_shard_bytes)
            _refuse_shared_seeds(self._served.model)
            if begin_with is not None:
                self._begin_with(begin_with)
            self._served.settle()
            self._rounds = self._make_rounds()
            self._checkpoints = self._make_checkpoints(checkpoint_directory)
            failed.pop_all()
        self._resumed = self._attempts.count == 0

    # Making.

    def _begin_with(self, model: Any) -> None:
        """Takes a model's history, ahead of the weights that it is about, and its settled weights."""
        plan = getattr(model.optimizer, "plan", None)
        if plan is not None and self._optimizer.plan is None:
            raise NotPrivate(
                "begin_with was trained under a PrivatePlan, and these steps would not be counted in its budget: give "
                "the optimizer of optimizer_fn a plan, too."
            )
        self._begun_with = model.saved_history() or Entries()
        self._attempts.refuse_unpaid(self._begun_with)
        self._optimizer.privacy_history.merge(self._begun_with)
        with model.private_weights.exporting():
            self._served.send(model)

    def _check_spec(self) -> Any:
        streams = self.sampling.graph_streams
        dataset = self._dataset_fn()
        given = dataset.element_spec
        self._source = source_of(given, expected_batch_size=self._optimizer.expected_batch_size)
        if self._source.sampling is not None:
            refuse_choosing(dataset)
        if self.sampling.graph_streams == streams:
            raise NotPrivate("dataset_fn does not draw with the sampling given: use sampling.graph_batches(...) in it.")
        if self._source.sampling not in (None, self.sampling):
            raise NotPrivate(
                f"dataset_fn gives batches of another sampling ({self._source.sampling.describe()}) than sampling=: "
                "draw with the one that is given."
            )
        return examples_of(given)

    def _cluster_model(self) -> Any:
        model = self._model_fn()
        if not isinstance(model, PrivateTraining):
            raise TypeError("model_fn must make a model with tfdp_rec.PrivateTraining, such as a PrivateModel.")
        model.compile(optimizer=self._optimizer, **self._compile_options)
        return model

    @property
    def cluster_model(self) -> Any:
        """The model on the cluster: for callbacks, which may look at its optimizer. `model()` is the one to use."""
        return self._served.model

    def _make_rounds(self) -> Rounds:
        served = self._served
        make = WorkerStep(served.model.private_step, served.tables, served.servers, served.reader)
        function = tf.function(lambda iterator, rate: make(next(iterator), rate), autograph=False)
        make_data = tf.function(self._dataset_fn, autograph=False)
        self._dataset = self._coordinator.create_per_worker_dataset(make_data)
        iterator = iter(self._dataset)
        # Not under the strategy's scope: variables are updated where they are, which is nothing to the strategy.
        step = function.get_concrete_function(iterator_spec(iterator), tf.TensorSpec([], tf.float64))
        return Rounds(
            self._coordinator, step, iterator,
            optimizer=self._optimizer, source=self._source, attempts=self._attempts, watch=self._watch,
        )  # fmt: skip

    def _make_checkpoints(self, directory: str | None) -> Checkpoints | None:
        if directory is None:
            return None
        config = self._optimizer.get_config()
        identity = {
            "format": "tfdp_rec cluster checkpoint, in which no row owes noise",
            "mechanism": keras.saving.get_registered_name(type(self._optimizer)),
            "settings": {k: v for k, v in config.items() if k not in _MAY_DIFFER},
            "servers": [server.layout for server in self._served.servers],
        }
        return Checkpoints(directory, [server.state() for server in self._served.servers], identity)

    # Training.

    def resume(self, accountant: Any = None) -> int:
        """Puts the servers where the last checkpoint left them, and goes on counting where the count was.

        Steps between that checkpoint and the end of the program that wrote it are lost, and stay counted.

        Args:
            accountant: A fresh `tfdp_rec.privacy.Accountant`, which counts all attempts so far.

        Returns:
            The attempts so far.

        Raises:
            ValueError: there is no checkpoint directory, it is of another training or was changed, or the accountant
                is not fresh.
        """
        if self._checkpoints is None:
            raise ValueError("There is nothing to resume from: pass checkpoint_directory.")
        if accountant is not None:
            if accountant.steps:
                raise ValueError(f"The accountant knows of {accountant.steps} steps already: give a fresh one.")
            accountant.follow(self._optimizer)
        self._watch.during(self._checkpoints.restore)
        self._watch.during(self._served.settle)
        self._begun_with.merge(self._checkpoints.history())
        self._optimizer.privacy_history.merge(self._begun_with)
        for id, entry in self._attempts.paid_entries().items():
            self._optimizer.privacy_history.add_entry(entry, id)
        self._optimizer.iterations.assign(self._attempts.count)
        self._resumed, self._saved = True, self._attempts.count
        return self._attempts.count

    def save(self) -> None:
        """Writes a checkpoint, if there is a directory for it."""
        self._refuse_unresumed("save")
        if self._checkpoints is None:
            return
        with self._rounds.pause:
            count, mark, checkpoints = self._attempts.count, self._attempts.mark, self._checkpoints
            spent = self._find_other_uses()
            self._watch.during(lambda: checkpoints.save(count, mark, spent))
            self._saved = count

    def _find_other_uses(self) -> Entries:
        """What was spent on the weights before this training, and other uses, such as a plan's."""
        found = Entries()
        found.merge(self._begun_with)
        for id, entry in self._optimizer.privacy_history.snapshot().items():
            if entry.label:
                found.add(entry, id)
        return found

    @property
    def attempts(self) -> int:
        """Steps that were made, or may have been, each as often as it was dispatched."""
        return self._attempts.count

    def fit(
        self,
        steps: int,
        callbacks: list[keras.callbacks.Callback] | None = None,
        *,
        steps_per_report: int = 100,
        verbose: int = 1,
    ) -> keras.callbacks.History:
        """Makes `steps` attempts of a step, spread over the workers.

        Args:
            steps: Number of steps; a step that is made again because its worker died is one more of them.
            callbacks: Keras callbacks, called every `steps_per_report` steps as if these were one batch.
            steps_per_report: Steps between two calls of the callbacks. The workers wait for each other there.
            verbose: 1 for a progress bar.

        Raises:
            ServerLost: a parameter server died; start again and `resume()`.
            TimeoutError: no step ended for `seconds_without_progress`; naming the silent process.
        """
        self._refuse_unresumed("fit")
        model = self.cluster_model
        model.stop_training, model.feeding = False, self._source
        callbacks = list_callbacks(callbacks, self._optimizer.plan)
        refuse_forgetting(self._optimizer, callbacks)
        self._refuse_listeners(callbacks)
        rounds = [min(steps_per_report, steps - before) for before in range(0, steps, steps_per_report)]
        listeners = keras.callbacks.CallbackList(
            callbacks, add_history=True, add_progbar=verbose != 0, verbose=verbose, epochs=1, steps=len(rounds),
            model=model,
        )  # fmt: skip
        history = next(c for c in listeners.callbacks if isinstance(c, keras.callbacks.History))
        listeners.on_train_begin()
        self._refuse_listeners(listeners.callbacks)  # some begin to look at the sum
        listeners.on_epoch_begin(0)
        logs: dict[str, Any] = {}
        total = np.zeros(2)
        for report, number in enumerate(rounds):
            model.steps_per_execution = number
            listeners.on_train_batch_begin(report)
            total += self._rounds.make(number)
            logs = {"loss": float(total[0] / total[1]) if total[1] else float("nan")}
            listeners.on_train_batch_end(report, logs)
            if self._every is not None and self._attempts.count - self._saved >= self._every:
                self.save()
            if model.stop_training:
                break
        self.save()
        listeners.on_epoch_end(0, logs)
        listeners.on_train_end(logs)
        return history

    def _refuse_unresumed(self, act: str) -> None:
        """Before `resume` the servers hold new weights: training them forgets a cost, saving them the old ones."""
        if not self._resumed:
            raise ValueError(
                f"checkpoint_directory is that of a training that has made {self._attempts.count} attempts, which "
                f"would be forgotten: call trainer.resume() before {act}, or use another directory."
            )

    def _refuse_listeners(self, callbacks: list[keras.callbacks.Callback]) -> None:
        if self._optimizer.observers:
            raise ValueError("Callbacks that look at the clipped sum do not work here: it is on the workers.")
        saving = [type(c).__name__ for c in callbacks if hasattr(c, "resume")]
        if saving:
            raise ValueError(f"{saving[0]} knows one machine's variables; give the trainer a checkpoint_directory.")

    # Release.

    def model(self) -> Any:
        """The model as it stands, with all its noise, in this process: an ordinary one, to evaluate, save or export.

        During a `fit` of another thread it waits for the next report, where all steps are counted.

        What was released must not be forgotten: a checkpoint of the settled state is written before this returns.

        Raises:
            TimeoutError: naming the server that has said nothing for `seconds_without_progress`.
            ServerLost: a parameter server died.
            ValueError: `checkpoint_directory` holds a training that was not resumed.
        """
        with self._releasing(contextlib.nullcontext()) as local:
            return local

    @contextlib.contextmanager
    def _releasing(self, making: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
        """A block with a model of the settled weights, made within `making`, and at its end a checkpoint of them."""
        self._refuse_unresumed("model")
        self._watch.greet()
        with making:
            local = self._model_fn()
            local.compile(optimizer=self._optimizer_fn(), **self._compile_options)
            if not all(layer.built for layer in layers_within(local)):
                local.private_tables.find(self._spec)
        with self._rounds.pause:
            self._watch.during(lambda: self._served.fetch(local))
            local.open_history().merge(self._optimizer.privacy_history.snapshot())
            yield local
            self.save()

    def export(self, path: str, *, by_shards: bool = False) -> None:
        """Exports the model for serving, with all its noise; as Keras' `export`.

        By shards, each server writes its rows of the tables larger than `min_shard_bytes`, so that no process holds a
        table whole. The folder appears when it is complete; if a server fails, there is none, and the export can be
        repeated: rows that have got their noise owe none.

        Args:
            path: Path of the SavedModel; by shards, on a file system that all processes share.
            by_shards: Whether servers write their rows themselves.

        Raises:
            ValueError: The model cannot be released by shards, or path is an address of a cloud; see also `model`.
            OSError: A server does not share the file system.
        """
        if not by_shards:
            self.model().export(path)
            return
        if is_address(path):
            raise ValueError(f"{path} is an address, where no folder appears at once: export by shards to a folder.")
        with replace_atomically(path) as temporary, self._releasing(hollow_tables(self._min_bytes)) as local:
            export(temporary, local)
            self._watch.during(lambda: write_tables(temporary, local, self._served))

    def close(self) -> None:
        """Lets another trainer, in this program or another, go on from the checkpoint directory."""
        self._attempts.close()

    def __enter__(self) -> ParameterServerTrainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _refuse_shared_seeds(model: Any) -> None:
    """Refuses layers that draw: a worker that comes between another's new seed and its draw has the same masks."""
    random = [layer.name for layer in layers_within(model) if random_states(layer)]
    if random:
        raise NotPrivate(
            f"Layer '{random[-1]}' draws random numbers from a seed that the workers of a cluster would share, so "
            "that steps of different examples could have the same masks. Leave out Dropout and its kin (and Keras' "
            "recurrent layers, which always hold a seed), or train on one machine."
        )
