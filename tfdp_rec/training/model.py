"""Private training for Keras models: `PrivateModel`, and the mix-in `PrivateTraining` it is made of.

Compiled with a mechanism of this package, a model trains privately; compiled with any other optimizer it is the Keras
model it was, and makes no claim. A private step is

    guard -> forward and backward pass under recording -> clipped sum -> optimizer

(`private_step.py`), and weights leave training by `release()` of their owner alone (`core/mechanism/weights.py`), which
the model's own methods call first (`release_methods.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.claim.entries import Use
from tfdp_rec.core.claim.events import DpEvent
from tfdp_rec.core.claim.sampling_proof import Source, refusals_in_words, strip_draw
from tfdp_rec.core.ground.graph_checks import HOST
from tfdp_rec.core.ground.keras_internals import (
    functional_class,
    is_functional,
    leave_strategy,
    metrics_container,
    outside_scopes,
)
from tfdp_rec.core.ground.refused import NotPrivate, refuse_below
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.kept import allow_steps
from tfdp_rec.core.mechanism.weights import owners_of
from tfdp_rec.core.sensitivity import engine
from tfdp_rec.core.sensitivity.arithmetic import ask_for_float32_products
from tfdp_rec.core.sensitivity.batches import open_specs
from tfdp_rec.core.sensitivity.independence.reading import ours
from tfdp_rec.training import own_loss
from tfdp_rec.training.adapted_layers import find_file_vocabularies, keep_vocabularies, refuse_adapted
from tfdp_rec.training.batch import Batch, examples_of, first_example, source_of_data
from tfdp_rec.training.callback_checks import prepare_callbacks
from tfdp_rec.training.growth import Kept, take_over
from tfdp_rec.training.lookahead import TableReader, disable_autotune, lookahead
from tfdp_rec.training.model_tables import ModelTables
from tfdp_rec.training.ordinary_steps import (
    count_ordinary_step,
    note_uncounted_steps,
    prepare_ordinary_steps,
    uncounted_steps,
)
from tfdp_rec.training.overridden_steps import predictions_read, read_step, refuse_hidden_metrics, refuse_own_step
from tfdp_rec.training.per_example_loss import per_example_loss as compiled_per_example_loss
from tfdp_rec.training.private_step import PrivateStep, diagnostics, loss_for_logs
from tfdp_rec.training.release_methods import ReleaseMethods, empty_metrics_at_end, release_outside_steps
from tfdp_rec.training.replicas import devices_of, refuse_ordinary, refuse_unshared
from tfdp_rec.training.trial_step import refusal_of_all

_BEFORE_SHUFFLE = 2  # positional arguments of Keras' `fit` between callbacks and shuffle


class PrivateTraining(ReleaseMethods):
    """Mix-in, ahead of `keras.Model` or `tfrs.Model`, for models that train under this package's mechanisms.

    A model that is compiled with a `loss` needs nothing more. Any other defines

        def per_example_loss(self, data, training): -> losses [batch]

    Attributes:
        shared_inputs: Keys of a dict batch that all examples share, such as public negatives.

    Example:
        >>> import keras, tensorflow as tf, tfdp_rec
        >>> class Scores(tfdp_rec.PrivateTraining, keras.Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.items = keras.layers.Embedding(10, 1)
        ...     def per_example_loss(self, data, training):
        ...         return tf.reduce_sum(tf.square(self.items(data["item"])[:, 0]), axis=-1)[:, None][:, 0]
    """

    shared_inputs: tuple[str, ...] = ()
    _loss: Any = None
    _loss_weights: Any = None
    feeding: Source | None = None  # source of the batches of the present fit

    def __init__(self, *args: Any, **kwargs: Any):
        if is_functional(args, kwargs) and not isinstance(self, functional_class()):
            self.__class__ = _functional(type(self))  # type: ignore[arg-type]
            functional_class().__init__(self, *args, **kwargs)  # type: ignore[misc]
        else:
            super().__init__(*args, **kwargs)

    @functools.cached_property
    def private_step(self) -> PrivateStep:
        """The model's `PrivateStep`."""
        return PrivateStep(self)

    @functools.cached_property
    def _uncounted_steps(self) -> dict[str, tuple[str, int]]:
        # Steps of the ordinary optimizers that were in the place of the present one.
        return {}

    @functools.cached_property
    def private_tables(self) -> ModelTables:
        """Which of the model's weights are tables."""
        return ModelTables(self)

    # Compiling.

    @property
    def optimizer(self) -> Any:
        """As Keras'. Replacing it, by `compile` or an assignment, applies pending noise and keeps the history."""
        return vars(self).get("optimizer")

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        if optimizer is self.optimizer:
            return
        release_outside_steps(self)
        if self.is_private:
            allow_steps(self.optimizer, False)  # also if it comes back
        self._uncounted_steps |= uncounted_steps(self, self.optimizer)
        if isinstance(optimizer, PrivateOptimizer):
            note_uncounted_steps(self, self._uncounted_steps)
            optimizer.privacy_history.replace(self.privacy_history)
            self.privacy_history = optimizer.privacy_history
            self.privacy_history.add_weights(self.weights)  # type: ignore[attr-defined]
        vars(self)["optimizer"] = optimizer
        self.compile_step_anew()

    def compile_step_anew(self) -> None:
        """Has the training step compiled anew before it is run again."""
        self.private_step.forget_graph()
        if getattr(self, "train_function", None) is not None:
            self.make_train_function(force=True)  # type: ignore[attr-defined]

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        *args: Any,
        microbatch_size: int | None = None,
        diagnostics: bool = False,
        adapted_to_public_data: bool = False,
        **kwargs: Any,
    ) -> None:
        """As `keras.Model.compile`, with options of a private optimizer.

        Args:
            optimizer: Mechanism of this package, or any Keras optimizer, under which nothing is private.
            loss: Loss, as for Keras.
            loss_weights: Weights of the outputs' losses, as for Keras.
            *args: Further arguments of Keras.
            microbatch_size: Number of examples that a step processes at a time, to bound memory; the result is the
                same.
            diagnostics: Whether logs show the share of clipped examples, the median norm and the number of examples
                dropped as not finite. These come from private data without noise: do not publish them.
            adapted_to_public_data: Whether what layers have learned by `adapt` comes from public data alone. Without
                that, layers that learn by `adapt` are refused.
            **kwargs: Further options of Keras.

        Raises:
            NotPrivate: An option would break the guarantee.
            ValueError: microbatch_size is below 1.
        """
        self.settle()  # for the noise that the earlier optimizer owes
        # By name or config: Keras would make the object too late for the checks below.
        optimizer = keras.optimizers.get(optimizer) if isinstance(optimizer, (str, dict)) else optimizer
        is_private = isinstance(optimizer, PrivateOptimizer)
        devices = devices_of(self) if is_private else self.private_step.devices
        made = PrivateStep(self, microbatch_size, diagnostics, adapted_to_public_data, devices)
        vars(self)["private_step"] = made
        self._loss, self._loss_weights = loss, loss_weights
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and isinstance(
            optimizer.inner_optimizer, PrivateOptimizer
        ):
            raise NotPrivate("LossScaleOptimizer scales gradients after the clip; use the mechanism by itself.")
        if is_private:
            refuse_options(self, kwargs)
            own_loss.refuse_unsaid_loss(self)
            refuse_own_step(self, PrivateTraining)
            ask_for_float32_products()
            refuse_below(1, microbatch_size=1 if microbatch_size is None else microbatch_size)
            kwargs["jit_compile"] = False
            with outside_scopes():
                leave_strategy(self, args, kwargs, optimizer.dense_optimizer)
        else:
            refuse_ordinary(self)
        with outside_scopes() if is_private else contextlib.nullcontext():
            super().compile(optimizer, loss, loss_weights, *args, **kwargs)  # type: ignore[misc]
        for step in ("test_step", "predict_step"):  # the most derived method, a user's included, is read
            vars(self)[step] = functools.partial(read_step, self, step, getattr(type(self), step))
        if isinstance(optimizer, PrivateOptimizer) and optimizer.pays_late:
            self.private_weights.add_possible_tables(self)

    def add_uses(self, uses: Iterable[tuple[DpEvent, str]]) -> None:
        """Adds to the privacy history what the model was made of before its training, such as a private count.

        It is saved with the model, and every accountant that follows the model counts it.

        Args:
            uses: `tfdp_rec.privacy.Use` objects, each of which counts once wherever it is declared; or (event, label)
                pairs, each of which is another use.

        Example:
            >>> import dp_accounting, tfdp_rec
            >>> model = tfdp_rec.models.TwoTower([318, 296], width=4, prior=[3.0, 1.0])
            >>> model.add_uses([(dp_accounting.GaussianDpEvent(20.0), "popularity counts of Monday")])
            >>> len(model.saved_history().uses)
            1
        """
        if not getattr(self, "built", False):  # other models on its layers would not know
            raise ValueError("Build the model before add_uses: call it, or prepare(batch), with any batch.")
        history = self.open_history()
        for use in map(Use.of, uses):
            history.add_entry(use.entry, use.id)

    @property
    def is_private(self) -> bool:
        """Whether the model was compiled with a mechanism of this package."""
        return isinstance(self.optimizer, PrivateOptimizer)

    def get_compile_config(self) -> dict[str, Any] | None:
        """As Keras', with the private options and the numbers of the tables."""
        config = super().get_compile_config()  # type: ignore[misc]
        if config and self.is_private:
            config |= {
                **self.private_step.options,
                "given_vocabularies": find_file_vocabularies(self),
                "table_numbers": self.private_tables.numbers,
            }
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model, and builds its optimizer so that its state can be loaded."""
        numbers = config.pop("table_numbers", None)
        keep_vocabularies(self, config.pop("given_vocabularies", ()))
        config.pop("jit_compile", None)
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is None or not self.built:  # type: ignore[attr-defined]
            return
        if not self.is_private:
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]
        elif numbers is not None:
            self.private_tables.build(numbers)

    def grow_into(self, model: Any, kept: Kept | None = None, replaced: Iterable[str] = ()) -> Any:
        """Has another model go on with this one's weights, privacy history and optimizer.

        A table keeps its number of rows for life. To give it more, or fewer, make a second model of the same layers
        with other table sizes. The rows that stay come first in it; the rows behind them keep its own values. Whatever
        the ids of new rows come from, they must be public, or chosen privately and paid for.

        Args:
            model: Second model, built. If it is not compiled, it is compiled as this one is and has the state of this
                one's private optimizer; a compiled one keeps its own optimizer.
            kept: Rows that stay, in their new order, by path of a table of this model; by default all rows.
            replaced: Paths of frozen weights of this model in whose place the second one has its own, of any shape.
                What these were computed from is not in the history that goes along: name it by `add_uses`.

        Returns:
            The second model.

        Raises:
            ValueError: The models differ in more than the number of rows of tables, or the optimizer or its plan cannot
                go along; then nothing was taken over.

        Example:
            >>> import keras, tfdp_rec
            >>> def scores(rows):
            ...     item = keras.Input([1], dtype="int64")
            ...     score = keras.layers.Flatten()(keras.layers.Embedding(rows, 1)(item))
            ...     return tfdp_rec.PrivateModel(item, score)
            >>> larger = scores(10).grow_into(scores(12))
            >>> tuple(larger.weights[0].shape)
            (12, 1)
        """
        take_over(self, model, kept or {}, frozenset(replaced))
        return model

    # The loss.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; a call within a loss also gives the predictions for compiled metrics."""
        own_loss.refuse_no_call(self)
        if self.is_private and not self.private_weights.is_in_step:
            with outside_scopes():  # variables that it makes have one copy
                output = predictions_read(self, super().__call__, args, kwargs)
        else:
            output = super().__call__(*args, **kwargs)
        self.private_step.note_output(output)
        return output

    def per_example_loss(self, data: Any, training: bool) -> tf.Tensor:
        """Each example's loss, `[batch]`. Override it in a model that is not compiled with a `loss`.

        Validation and `evaluate` then show the mean of these losses. Compiled metrics compare targets with the result
        of `self(x, training=training)`, called once in the override.

        Args:
            data: Batch: `(x, y)` or `(x, y, sample_weight)` for the loss given to `compile`.
            training: Whether layers such as dropout behave as in training.
        """
        if own_loss.find_own_losses(self) == ["compute_loss"]:
            return own_loss.read_averaged_losses(self, data, training)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        own_loss.refuse_no_loss(self, x)
        y_pred = self(x, training=training)
        return compiled_per_example_loss(self._loss, self._loss_weights, y, y_pred, sample_weight)

    # The step.

    @tf.autograph.experimental.do_not_convert  # as in Keras' fit; else a tf.function around it rewrites this package
    def train_step(self, data: Any) -> dict[str, Any]:
        """One step: private under a mechanism, Keras' own otherwise."""
        if not self.is_private:
            count_ordinary_step(self)
            if own_loss.find_own_losses(self) == ["per_example_loss"]:
                return own_loss.ordinary_step(self, examples_of(data))
            return super().train_step(examples_of(data))  # type: ignore[misc]
        return read_step(self, "train_step", PrivateTraining._private_train_step, data)

    def _private_train_step(self, data: Any) -> dict[str, Any]:
        with tf.init_scope():
            expected_batch_size = self.optimizer.expected_batch_size
        with ours():
            batch = Batch.from_draw(data, self.shared_inputs, expected_batch_size)
        self.prepare(batch.examples)
        # A dataset without a known length ends with a step without a batch, of which TensorFlow may run the operations
        # that need none, such as the count and the noise. So everything waits for the batch.
        with tf.control_dependencies(batch.tensors):
            with tf.device(HOST):
                clip = tf.cast(tf.constant(self.optimizer.l2_norm_clip, tf.float64), tf.float32)
            try:
                clipped = self.private_step.clipped_sum(batch, clip)
            except NotPrivate as first:
                with tf.init_scope():
                    raise refusal_of_all(self, open_specs(batch.examples, self.shared_inputs), first) from first
            regularization = self.private_step.regularization()
            with self.private_weights.in_step():  # which reads weights eagerly, if the model is run so
                self.optimizer.apply(
                    clipped, source=batch.source, upcoming=batch.upcoming, regularization=regularization
                )
            step = self.private_step
            found, at_once = step.take_predictions(), step.microbatch_size is None
            logs = own_loss.logs_of(self, *loss_for_logs(clipped), found, at_once)
            return logs | (diagnostics(clipped) if step.diagnostics else {})

    def make_train_function(self, force: bool = False) -> None:
        """As Keras'."""
        super().make_train_function(force)  # type: ignore[misc]
        vars(self)["_own_function"] = vars(self)["train_function"]

    def test_step(self, data: Any) -> dict[str, Any]:
        """As Keras', or by the model's own loss; ids from the look-ahead stage are ignored."""
        if own_loss.find_own_losses(self) == ["per_example_loss"]:
            return own_loss.evaluation_step(self, examples_of(data))
        return super().test_step(examples_of(data))  # type: ignore[misc]

    def predict_step(self, data: Any) -> Any:
        """As Keras'; the proof of a draw is ignored."""
        return super().predict_step(strip_draw(data))  # type: ignore[misc]

    def get_metrics_result(self) -> dict[str, Any]:
        """As Keras', without metrics that have no data yet, such as all in training under `microbatch_size`."""
        unseen = metrics_container(self)
        if unseen is None or unseen.built:
            return super().get_metrics_result()  # type: ignore[misc]
        return {m.name: m.result() for m in self.metrics if m is not unseen}  # type: ignore[attr-defined]

    # Preparing: layers, tables, optimizer.

    def prepare(self, data: Any) -> TableReader | None:
        """Builds layers and optimizer from a batch (or its spec), and finds out which variables are tables.

        `fit` and `train_on_batch` call this; a training loop of your own calls it before `optimizer.apply`.

        Args:
            data: Batch of the training data, or its spec.

        Returns:
            The reader of the tables' ids for such batches if one was traced, else None.
        """
        self._refuse_changes()
        if not self.is_private or (self.optimizer.built and self.private_tables.are_known):
            return None
        with tf.init_scope(), outside_scopes():
            leave_strategy(self)  # of what was built since it was compiled
            specs = open_specs(examples_of(data), self.shared_inputs)
            try:
                reader = self.private_tables.find(specs)
            except NotPrivate as first:
                raise refusal_of_all(self, specs, first) from first
            own_loss.refuse_nothing_to_train(self)
            refuse_hidden_metrics(self)  # here, so that make_private says it and not the first step
            self.private_tables.build_optimizer()
            return reader

    def _refuse_changes(self) -> None:
        # The optimizer keeps the variables it was built for, and adds noise to all of them: its `build` refuses others.
        if self.is_private:
            refuse_own_step(self, PrivateTraining)
            engine.refuse_other_arithmetic()  # that was turned on since the step was traced
        if self.is_private and self.optimizer.built and self.private_tables.are_known:
            refuse_adapted(self)
            self.private_tables.refuse_unlike_others()
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]
            self.private_weights.add(self.optimizer, self)  # again, if it was interrupted

    # fit and train_on_batch.

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As Keras', with look-ahead for a `tf.data.Dataset`, and with pending noise settled at every kind of end.

        Before the first step the loss is read, operation by operation, and refused if it mixes examples
        (`core/sensitivity/independence/`).

        Callbacks that may read weights find all noise settled at the end of an epoch. Within an epoch they read weights
        by the model's own methods, or after `self.model.settle()`.
        """
        if isinstance(x, tf.data.Dataset):
            x = disable_autotune(x)
            if len(args) <= _BEFORE_SHUFFLE:
                kwargs.setdefault("shuffle", False)  # Keras warns that it does not shuffle a dataset
        if not self.is_private:
            refuse_ordinary(self)
            prepare_ordinary_steps(self)
            with refusals_in_words():
                return super().fit(x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)  # type: ignore[misc]
        refuse_unshared(self, x)
        with outside_scopes(), self.private_weights.training(), refusals_in_words(), empty_metrics_at_end(self):
            self._refuse_changes()
            is_within = self.optimizer.privacy_history.gate.is_kept  # a callback calls this, in a fit with a budget
            callbacks = prepare_callbacks(self.optimizer, callbacks, x)
            allow_steps(self.optimizer, True)
            try:
                weighted = kwargs.get("class_weight") is not None
                self.feeding = source_of_data(x, self.shared_inputs, self.optimizer.expected_batch_size, weighted)
                self.optimizer.privacy_history.counters.prepare()
                x = self._prepare_data(x, y, weighted)
                return super().fit(x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)  # type: ignore[misc]
            finally:
                try:
                    self.settle()
                finally:
                    self.feeding = None
                    if self.is_private:  # a callback may have exchanged the optimizer
                        allow_steps(self.optimizer, False)
                        # A budget ends with its fit, also if that is interrupted; a plan keeps it where no fit does.
                        history = self.optimizer.privacy_history
                        if self.optimizer.plan is not None or (history.gate.is_kept and not is_within):
                            history.lift()

    def _prepare_data(self, x: Any, y: Any, weighted: bool = False) -> Any:
        # The training data, with look-ahead if they are a dataset. Builds the optimizer on the way, before the step is
        # traced: a step that makes variables is traced twice.
        if isinstance(x, tf.data.Dataset):
            reader = self.prepare(x.element_spec)
            # Keras maps class weights over plain batches; without look-ahead, rows are settled when they are read.
            return x if weighted else lookahead(x, self, reader)
        data = x if y is None else (x, y)
        if all(len(getattr(leaf, "shape", ())) > 0 for leaf in tf.nest.flatten(data)):
            self.prepare(first_example(data, self.shared_inputs))
        return x

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; errors from within the graph are raised with their sentence alone."""
        if not self.is_private:
            refuse_ordinary(self)
            prepare_ordinary_steps(self)
            return super().train_on_batch(x, y, *args, **kwargs)  # type: ignore[misc]
        refuse_unshared(self, x)
        with outside_scopes(), self.private_weights.training(), refusals_in_words(), empty_metrics_at_end(self):
            self._refuse_changes()
            self._prepare_data(x, y)
            if self.optimizer.plan is not None:
                self.optimizer.plan.pay(self.optimizer)
            return super().train_on_batch(x, y, *args, **kwargs)  # type: ignore[misc]

    def settle(self) -> None:
        """Applies all pending noise, so that weights may leave training; quick if none is pending."""
        for owner in owners_of(self):
            owner.release()


@keras.saving.register_keras_serializable(package="tfdp_rec")
class PrivateModel(PrivateTraining, keras.Model):
    """A Keras model, functional or subclassed, that trains privately when compiled with a mechanism of this package.

    Example:
        >>> import keras, tfdp_rec
        >>> inputs = keras.Input([4])
        >>> model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
        >>> optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=8)
        >>> model.compile(optimizer=optimizer, loss="mse")
    """


@functools.cache
def _functional(kind: type) -> type:
    # A subclass of `kind` for models made from inputs and outputs. Keras would put `Functional` among the bases of
    # `kind` itself, and of the classes above it, after which these classes could make no other models.
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = type(kind)(kind.__name__, (kind, functional_class()), {**named, "functional_of": kind})
    package, _, name = keras.saving.get_registered_name(kind).rpartition(">")
    for each in (made, kind) if package else ():  # one name in files; the last is loaded
        keras.saving.register_keras_serializable(package, name)(each)
    return made


def refuse_options(model: Any, options: dict[str, Any]) -> None:
    """Refuses options that a private optimizer cannot be compiled with."""
    refuse_adapted(model)
    if options.get("jit_compile") is True:
        raise NotPrivate(
            "jit_compile=True is refused under a private optimizer: XLA compiles neither the removal of repeated ids "
            "nor a fast Gaussian sampler; leave it out."
        )
    policy = getattr(model, "dtype_policy", None)
    if policy is not None and policy.compute_dtype == "float16":
        raise NotPrivate("float16 needs loss scaling, which breaks the clip; use the policy mixed_bfloat16.")
