"""Private training for Keras models: `PrivateModel`, and the mix-in `PrivateTraining` it is made of.

Compiled with a mechanism of this package, a model trains privately; compiled with any other optimizer it is the Keras
model it was, and makes no claim. A private step is

    guard -> forward and backward pass under recording -> clipped sum -> optimizer

(`step.py`), and every way for weights to leave training settles pending noise first (`release_methods.py`, `release.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import ClippedSum
from tfdp_rec.clipping.arithmetic import ask_for_float32_products
from tfdp_rec.clipping.influence import ours
from tfdp_rec.keras_internals import compiled_metrics, functional_class, makes_functional
from tfdp_rec.optimizers import PrivateOptimizer
from tfdp_rec.refused import NotPrivate
from tfdp_rec.sampling.sampling_proof import NO_SAMPLING, Source, in_words, source_of
from tfdp_rec.spending.entries import SAVED_AS, Entries
from tfdp_rec.spending.meter import Meter, meters_of
from tfdp_rec.training.batch import Batch, examples_of, first_example, loose_spec, normalised
from tfdp_rec.training.callback_refusals import refuse_data_dependent
from tfdp_rec.training.callback_warnings import WarnIfNoBudget, WarnIfNoiseDrowns, WarnOnDivergence
from tfdp_rec.training.lookahead import is_lookahead, lookahead
from tfdp_rec.training.ordinary_steps import count_ordinary_step, count_ordinary_steps_of
from tfdp_rec.training.overridden_steps import predictions_read, read_step
from tfdp_rec.training.own_loss import (
    averaged_losses,
    averages_its_loss,
    evaluation_step,
    has_own_loss_alone,
    logs_of,
    ordinary_step,
    refuse_no_call,
    refuse_no_loss,
    refuse_unsaid_loss,
)
from tfdp_rec.training.per_example_loss import per_example_loss as compiled_per_example_loss
from tfdp_rec.training.private_step import PrivateStep, diagnostics, shown_losses
from tfdp_rec.training.release import settle_for
from tfdp_rec.training.release_methods import ReleaseMethods
from tfdp_rec.training.table_reader import TableReader, trace_reader


class PrivateTraining(ReleaseMethods):
    """Mix-in, ahead of `keras.Model` or `tfrs.Model`, for models that train under this package's mechanisms.

    A model that is compiled with a `loss` needs nothing more. Any other defines

        def per_example_loss(self, data, training): -> losses [batch]

    Class attribute `shared_inputs`: keys of a dict batch that all examples share (public negatives, say).

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
    _table_paths: dict[str, None] | None = None
    _loss: Any = None
    _loss_weights: Any = None
    privacy_history: Meter | None = None  # what its steps have spent, under whichever optimizers
    feeding: Source | None = None  # where the batches of the present fit come from

    def __init__(self, *args: Any, **kwargs: Any):
        if makes_functional(args, kwargs) and not isinstance(self, functional_class()):
            self.__class__ = _functional(type(self))  # type: ignore[arg-type]
            functional_class().__init__(self, *args, **kwargs)  # type: ignore[misc]
        else:
            super().__init__(*args, **kwargs)

    @functools.cached_property
    def private_step(self) -> PrivateStep:
        """How this model makes a private step."""
        return PrivateStep(self)

    # Compiling.

    @property
    def optimizer(self) -> Any:
        """As Keras'. Set to another, what the one before owes is applied, its history goes on, and the step is compiled
        anew: by `compile` or by an assignment.
        """
        return vars(self).get("optimizer")

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        if optimizer is self.optimizer:
            return
        self.release.settle_outside_steps()
        if isinstance(optimizer, PrivateOptimizer):
            optimizer.go_on_with(self.privacy_history)
            self.privacy_history = optimizer.privacy_history
            self.privacy_history.add_weights(self.weights)  # type: ignore[attr-defined]
        vars(self)["optimizer"] = optimizer
        self.compile_step_anew()

    def compile_step_anew(self) -> None:
        """Forgets the compiled training step, if there is one."""
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
        **kwargs: Any,
    ) -> None:
        """As `keras.Model.compile`, with what a private optimizer needs besides.

        Args:
            optimizer: a mechanism of this package, or any Keras optimizer (then nothing is private).
            loss: as for Keras.
            loss_weights: as for Keras.
            *args: as for Keras.
            microbatch_size: examples at a time within a step, to bound memory; the step is the same.
            diagnostics: also report the share of examples clipped, the median norm and how many were dropped as not
                finite. These are computed from private data and protected by nothing: for your eyes, not for a report.
            **kwargs: as for Keras.

        Raises:
            NotPrivate: for options that would break the guarantee.
        """
        self.settle()  # what the optimizer before this one still owes
        vars(self)["private_step"] = PrivateStep(self, microbatch_size, diagnostics)
        optimizer = keras.optimizers.get(optimizer) if isinstance(optimizer, (str, dict)) else optimizer
        self._loss, self._loss_weights = loss, loss_weights
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and isinstance(
            optimizer.inner_optimizer, PrivateOptimizer
        ):
            raise NotPrivate("LossScaleOptimizer scales gradients past the clip; use the mechanism by itself.")
        if isinstance(optimizer, PrivateOptimizer):
            refuse_options(self, kwargs)
            refuse_unsaid_loss(self)
            ask_for_float32_products()
            if microbatch_size is not None and microbatch_size < 1:
                raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}.")
            kwargs["jit_compile"] = False
        super().compile(optimizer, loss, loss_weights, *args, **kwargs)  # type: ignore[misc]
        for step in ("train_step", "test_step", "predict_step"):  # whichever class overrides it
            vars(self)[step] = functools.partial(read_step, self, step)
        if isinstance(optimizer, PrivateOptimizer) and optimizer.pays_late:
            self.release.guard_possible_tables()

    @property
    def is_private(self) -> bool:
        """Whether the model was compiled with a mechanism of this package."""
        return isinstance(self.optimizer, PrivateOptimizer)

    def save_own_variables(self, store: Any) -> None:
        """As Keras', with the privacy history, which is the model's: it is there however the model is loaded."""
        super().save_own_variables(store)
        if self._has_history():
            store[SAVED_AS] = self.privacy_history.snapshot().to_array()  # type: ignore[union-attr]

    def load_own_variables(self, store: Any) -> None:
        """As Keras'; a privacy history joins the present one."""
        super().load_own_variables({key: store[key] for key in store.keys() if key != SAVED_AS})  # type: ignore[misc]
        if SAVED_AS in store.keys():
            self._take_history(store[SAVED_AS])

    def get_state_tree(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Keras', with the privacy history, and without the state of metrics."""
        tree = super().get_state_tree(*args, **kwargs)
        if self._has_history():
            tree[SAVED_AS] = self.privacy_history.snapshot().to_array()  # type: ignore[union-attr]
        return tree

    def set_state_tree(self, state_tree: Any) -> None:
        """As Keras'; a privacy history joins the present one."""
        super().set_state_tree({key: value for key, value in state_tree.items() if key != SAVED_AS})
        if SAVED_AS in state_tree:
            self._take_history(state_tree[SAVED_AS])

    def _has_history(self) -> bool:
        """Whether steps of this model, or of another on its layers, are in its weights."""
        if self.privacy_history is None and any(meters_of(variable) for variable in self.weights):  # type: ignore[attr-defined]
            self.privacy_history = Meter()
        if self.privacy_history is not None:
            self.privacy_history.add_weights(self.weights)  # type: ignore[attr-defined]
        return self.privacy_history is not None

    def _take_history(self, saved: Any) -> None:
        if self.privacy_history is None:  # loaded without being compiled
            self.privacy_history = Meter()
            self.privacy_history.trains(self.weights)  # type: ignore[attr-defined]
        self.privacy_history.merge_saved(Entries.from_array(saved))

    def get_compile_config(self) -> dict[str, Any] | None:
        """What `compile_from_config` needs to compile a loaded model again, the layout of its tables included."""
        config = super().get_compile_config()  # type: ignore[misc]
        if config and self.is_private:
            step = self.private_step
            config |= {
                "microbatch_size": step.microbatch_size,
                "diagnostics": step.diagnostics,
                "table_numbers": self.table_numbers(),
            }
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model, and builds its optimizer so that its state can be loaded."""
        numbers = config.pop("table_numbers", None)
        config.pop("jit_compile", None)
        config.pop("clipping_strategy", None)  # of models saved when there was a choice
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is None or not self.built:  # type: ignore[attr-defined]
            return
        if not self.is_private:
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]
        elif numbers is not None:
            self.build_tables(numbers)

    def build_tables(self, numbers: list[int]) -> None:
        """Builds the optimizer of a model whose tables are known, without looking at a batch (see `table_numbers`)."""
        variables = self.trainable_variables  # type: ignore[attr-defined]
        if max(numbers, default=-1) >= len(variables):
            raise ValueError(
                f"{type(self).__name__} has fewer weights when it is loaded than when it was saved, and they would "
                "stay at their first values: let its build(input_shape) build all its layers."
            )
        self._table_paths = {variables[number].path: None for number in numbers}
        self._build_optimizer()

    def table_numbers(self) -> list[int] | None:
        """Which of the trainable variables are tables, by number: names may differ when the model is loaded."""
        if self._table_paths is None:
            return None
        return [i for i, v in enumerate(self.trainable_variables) if self.is_table(v)]  # type: ignore[attr-defined]

    def is_table(self, variable: keras.Variable) -> bool:
        """Whether a variable is read by row only, as far as is known yet."""
        return variable.path in (self._table_paths or {})

    # The loss.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; what it gives for a loss is what metrics are made of."""
        refuse_no_call(self)
        if self.is_private and not self.release.at_work:
            output = predictions_read(self, super().__call__, args, kwargs)
        else:
            output = super().__call__(*args, **kwargs)
        self.private_step.note_output(output)
        return output

    def per_example_loss(self, data: Any, training: bool = True) -> tf.Tensor:
        """Each example's loss, `[batch]`. Override for a model that is not compiled with a `loss`.

        A model that does is validated and evaluated by the mean of these too, and its compiled metrics are of what it
        gives when this calls it: `self(x, training=training)`, once.

        Args:
            data: a batch: `(x, y)` or `(x, y, sample_weight)` for the loss given to `compile`.
            training: for layers that behave otherwise in training.
        """
        if self.averages_its_loss:
            return averaged_losses(self, data, training)
        refuse_no_loss(self)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=training)
        return compiled_per_example_loss(self._loss, self._loss_weights, y, y_pred, sample_weight)

    @property
    def averages_its_loss(self) -> bool:
        """Whether the loss is a `compute_loss` of the model's own, from whose graph each example's is told."""
        return averages_its_loss(self)

    # The step.

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step: private under a mechanism, Keras' own otherwise."""
        if not self.is_private:
            count_ordinary_step(self)
            if has_own_loss_alone(self):
                return ordinary_step(self, examples_of(data))
            return super().train_step(examples_of(data))  # type: ignore[misc]
        with tf.init_scope():
            expected_batch_size = self.optimizer.expected_batch_size
        with ours():
            batch = Batch.proved(data, self.shared_inputs, expected_batch_size)
        self.prepare(batch.examples)
        # A dataset without a known length ends with a step that gets no batch. TensorFlow may by then have run whatever
        # of the step needs none (counting it, its noise), so that all of it is made to wait for the batch.
        with tf.control_dependencies(batch.tensors):
            clipped = self.private_step.clipped_sum(batch, tf.cast(self.optimizer.clip, tf.float32))
            regularization = self.private_step.regularization()
            self.optimizer.apply(clipped, source=batch.source, upcoming=batch.upcoming, regularization=regularization)
            return self._logs(clipped)

    def _source_of(self, x: Any) -> Source:
        """Where the batches of a fit come from, as far as a dataset's type tells."""
        if not isinstance(x, tf.data.Dataset):
            return NO_SAMPLING
        spec: Any = x.element_spec
        spec = spec.batch if is_lookahead(x) else spec
        return source_of(spec, self.shared_inputs, self.optimizer.expected_batch_size)

    def test_step(self, data: Any) -> dict[str, Any]:
        """As Keras', or by the model's own loss; what the look-ahead stage announced beside a batch is left aside."""
        if has_own_loss_alone(self):
            return evaluation_step(self, examples_of(data))
        return super().test_step(examples_of(data))  # type: ignore[misc]

    def get_metrics_result(self) -> dict[str, Any]:
        """As Keras'; metrics that have seen nothing yet are left out (under `microbatch_size`, training shows none)."""
        unseen = compiled_metrics(self)
        if unseen is None or unseen.built:
            return super().get_metrics_result()  # type: ignore[misc]
        return {m.name: m.result() for m in self.metrics if m is not unseen}  # type: ignore[attr-defined]

    def _logs(self, clipped: ClippedSum) -> dict[str, Any]:
        step = self.private_step
        logs = logs_of(self, shown_losses(clipped), step.take_predictions(), whole=step.microbatch_size is None)
        return logs | (diagnostics(clipped) if step.diagnostics else {})

    # Preparing: layers, tables, optimizer.

    def prepare(self, data: Any) -> TableReader | None:
        """Builds layers and optimizer from a batch (or its spec), and finds out which variables are tables.

        Called by fit and train_on_batch; call it yourself before `optimizer.apply` in a loop of your own.

        Args:
            data: a batch, as the training data gives it.

        Returns:
            The `table_reader` for such batches, where it took one to find out.
        """
        self._refuse_thawed_or_frozen()
        if not self.is_private or (self.optimizer.built and self._table_paths is not None):
            return None
        with tf.init_scope():
            spec = tf.nest.map_structure(lambda t: None if t is None else loose_spec(t), normalised(data))
            reader = self.table_reader(spec)
            self._build_optimizer()
            return reader

    def _refuse_thawed_or_frozen(self) -> None:
        """The optimizer goes on with the variables it was built for, and adds noise to all of them."""
        if self.is_private and self.optimizer.built and self._table_paths is not None:
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]

    def _build_optimizer(self) -> None:
        """Builds the mechanism, and sees to it that whoever reads a table from now on reads it settled."""
        self.optimizer.build(self.trainable_variables, self._table_paths)  # type: ignore[attr-defined]
        self.optimizer.privacy_history.add_weights(self.weights)  # type: ignore[attr-defined]
        self.release.guard(self.optimizer)

    def table_reader(self, spec: Any) -> TableReader:
        """A function from a batch to the ids it reads, by table; traces the loss once (see `data.lookahead`).

        Args:
            spec: the batches' element spec.
        """
        reader = trace_reader(self, spec)
        self._table_paths = dict.fromkeys(reader.tables)
        return reader

    # fit and its kin.

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
        """As Keras', with look-ahead added to a `tf.data.Dataset`, and pending noise settled however it ends.

        Before the first step the loss is read, operation by operation, and refused if it mixes examples
        (`independence/`).

        Callbacks other than Keras' that only look at logs find all noise settled at the end of an epoch; in the middle
        of one they call `self.model.settle()` first, unless they go through the model's own methods.
        """
        self._refuse_thawed_or_frozen()
        count_ordinary_steps_of(self)
        if self.is_private:
            callbacks = with_budget_of_plan(self.optimizer, callbacks)
            self.feeding = self._source_of(x)
            if self.feeding.sampling is not None and kwargs.get("class_weight") is not None:
                raise ValueError(
                    "fit(class_weight=...) takes sampled batches apart: let fetch give (x, y, sample_weight) instead, "
                    "with each row's weight by its class."
                )
            callbacks = settle_for(callbacks)
            refuse_data_dependent(callbacks)
            callbacks = [*callbacks, WarnIfNoBudget(), WarnIfNoiseDrowns(), WarnOnDivergence()]
            x = self._ahead(x, y, weighted=kwargs.get("class_weight") is not None)
        try:
            with in_words():
                return super().fit(x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)  # type: ignore[misc]
        finally:
            try:
                self.settle()
            finally:
                self.release.forget_listeners()
                self.feeding = None

    def _ahead(self, x: Any, y: Any, weighted: bool) -> Any:
        """Training data with look-ahead, if it is of a kind that allows it; the optimizer built, if data tells how."""
        if isinstance(x, tf.data.Dataset):
            reader = self.prepare(x.element_spec.batch if is_lookahead(x) else x.element_spec)
            # Keras maps class weights over plain batches; without look-ahead, rows are settled when they are read.
            return x if weighted else lookahead(x, self, reader)
        self._prepare_from(x, y)
        return x

    def _prepare_from(self, x: Any, y: Any) -> None:
        """Before the step is traced, where data tell how: one that makes variables is traced twice."""
        data = x if y is None else (x, y)
        if all(len(getattr(leaf, "shape", ())) > 0 for leaf in tf.nest.flatten(data)):
            self.prepare(tf.nest.map_structure(first_example, data))

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Keras'; refusals come in words."""
        self._refuse_thawed_or_frozen()
        count_ordinary_steps_of(self)
        if self.is_private and self.optimizer.plan is not None:
            self.optimizer.plan.limit_steps()
        self._prepare_from(x, y)
        with in_words():
            return super().train_on_batch(x, y, *args, **kwargs)  # type: ignore[misc]

    def settle(self) -> None:
        """Applies all pending noise, so that weights may leave training. Cheap when none is pending."""
        self.release.settle()

    def when_settled(self, listener: Callable[[], None]) -> None:
        """Has `listener` called whenever weights are about to leave the present fit, pending noise applied.

        Args:
            listener: called without arguments; must not release anything itself.
        """
        self.release.listen(listener)


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


def with_budget_of_plan(optimizer: PrivateOptimizer, callbacks: Any) -> Any:
    """The callbacks of a fit, with the budget of the optimizer's plan if they have none."""
    several = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    plan = optimizer.plan
    if plan is None or any(getattr(each, "keeps_budget", False) for each in several):
        return callbacks
    return [*several, plan.budget()]


@functools.cache
def _functional(kind: type) -> type:
    """A class like `kind`, but of models made from inputs and outputs.

    Keras would put `Functional` among the bases of `kind` itself, and of the classes above it, and from then on no
    other model of those classes could be made.
    """
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    made = type(kind)(kind.__name__, (kind, functional_class()), {**named, "functional_of": kind})
    package, _, name = keras.saving.get_registered_name(kind).rpartition(">")
    for each in (made, kind) if package else ():  # a file names them alike, and `kind` answers to the name
        keras.saving.register_keras_serializable(package, name)(each)
    return made


def refuse_options(model: Any, options: dict[str, Any]) -> None:
    """What a private optimizer cannot be compiled with."""
    strategies_of = (tf.distribute.get_strategy(), model.distribute_strategy)  # of now, and when the model was made
    if any(strategy.num_replicas_in_sync > 1 for strategy in strategies_of):
        raise NotPrivate(
            "Under a strategy of several replicas each would clip and noise by itself. Train on one device, or, on "
            "several machines, with parameter servers: tfdp_rec.distribute.ParameterServerTrainer."
        )
    if "clipping_strategy" in options:
        raise NotPrivate(
            "There is no choice of clipping_strategy: one is proved to bound what an example can do, and it is the "
            "fastest; leave the argument out. Others, for comparison, are in experiments/bench/baselines.py."
        )
    if options.get("jit_compile") is True:
        raise NotPrivate(
            "jit_compile=True is refused under a private optimizer: XLA compiles neither the de-duplication of ids nor "
            "a fast Gaussian sampler; leave it out."
        )
    policy = getattr(model, "dtype_policy", None)
    if policy is not None and policy.compute_dtype == "float16":
        raise NotPrivate("float16 needs loss scaling, which breaks the clip; use the policy mixed_bfloat16.")
