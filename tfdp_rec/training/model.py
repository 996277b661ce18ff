"""Private training for Keras models: `PrivateModel`, and the mix-in `PrivateTraining` it is made of.

Compiled with a mechanism of this package, a model trains privately; compiled with any other optimizer it is the Keras
model it was, and makes no claim. A private step is

    guard -> forward and backward pass under recording -> clipped sum -> optimizer

and every way for weights to leave training settles pending noise first (`release.py`): end of fit, evaluate, predict,
calling the model, get_weights, save, save_weights, export, TensorFlow's own checkpoints and SavedModels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import NotPrivate, batches, strategies
from tfdp_rec.clipping.engine import ClippedSum
from tfdp_rec.optimizers import PrivateOptimizer
from tfdp_rec.training.lookahead import LookAhead, is_lookahead, lookahead
from tfdp_rec.training.per_example_loss import per_example_loss as compiled_per_example_loss
from tfdp_rec.training.release import RELEASING, WRITING, guard, releasing, settle_for, settle_outside_steps, writing
from tfdp_rec.training.table_reader import TableReader, first_example, loose_spec, normalised, trace_reader


class PrivateTraining:
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
    _private_options: dict[str, Any] = {"strategy": "bookkeeping", "microbatch_size": None, "diagnostics": False}
    _table_paths: dict[str, None] | None = None
    _in_step = False
    _last: Any = None
    _when_settled: tuple[Callable[[], None], ...] = ()
    optimizer: Any

    # Compiling.

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        *args: Any,
        clipping_strategy: str = "bookkeeping",
        microbatch_size: int | None = None,
        diagnostics: bool = False,
        **kwargs: Any,
    ) -> None:
        """As `keras.Model.compile`, and for a private optimizer:

        Args:
            optimizer: a mechanism of this package, or any Keras optimizer (then nothing is private).
            loss: as for Keras.
            loss_weights: as for Keras.
            *args: as for Keras.
            clipping_strategy: "bookkeeping", "ghost", "reweighted" or "per_example"; all give the same sum.
            microbatch_size: examples at a time within a step, to bound memory; the step is the same.
            diagnostics: also report the share of examples clipped, the median norm and how many were dropped as not
                finite. These are computed from private data and protected by nothing: for your eyes, not for a report.
            **kwargs: as for Keras.

        Raises:
            NotPrivate: for options that would break the guarantee.
        """
        self.settle()  # what the optimizer before this one still owes
        optimizer = keras.optimizers.get(optimizer) if isinstance(optimizer, (str, dict)) else optimizer
        self._private_options = {
            "strategy": clipping_strategy, "microbatch_size": microbatch_size, "diagnostics": diagnostics,
        }  # fmt: skip
        self._loss, self._loss_weights = loss, loss_weights
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and isinstance(
            optimizer.inner_optimizer, PrivateOptimizer
        ):
            raise NotPrivate("LossScaleOptimizer scales gradients past the clip; use the mechanism by itself.")
        if isinstance(optimizer, PrivateOptimizer):
            _refuse_options(self, kwargs)
            strategies.strategy_named(clipping_strategy)
            if microbatch_size is not None and microbatch_size < 1:
                raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}.")
            kwargs["jit_compile"] = False
        super().compile(optimizer, loss, loss_weights, *args, **kwargs)  # type: ignore[misc]

    @property
    def is_private(self) -> bool:
        """Whether the model was compiled with a mechanism of this package."""
        return isinstance(getattr(self, "optimizer", None), PrivateOptimizer)

    def get_compile_config(self) -> dict[str, Any] | None:
        """What `compile_from_config` needs to compile a loaded model again, the layout of its tables included."""
        config = super().get_compile_config()  # type: ignore[misc]
        if config and self.is_private:
            options = self._private_options
            config |= {
                "clipping_strategy": options["strategy"],
                "microbatch_size": options["microbatch_size"],
                "diagnostics": options["diagnostics"],
                "table_numbers": self.table_numbers(),
            }
        return config

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model, and builds its optimizer so that its state can be loaded."""
        numbers = config.pop("table_numbers", None)
        config.pop("jit_compile", None)
        self.compile(**keras.saving.deserialize_keras_object(config))
        if getattr(self, "optimizer", None) is None or not self.built:  # type: ignore[attr-defined]
            return
        if not self.is_private:
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]
        elif numbers is not None:
            self.build_tables(numbers)

    def build_tables(self, numbers: list[int]) -> None:
        """Builds the optimizer of a model whose tables are known, without looking at a batch (see `table_numbers`)."""
        variables = self.trainable_variables  # type: ignore[attr-defined]
        self._table_paths = {variables[number].path: None for number in numbers}
        self._build_optimizer()

    def table_numbers(self) -> list[int] | None:
        """Which of the trainable variables are tables, by number: names may differ when the model is loaded."""
        if self._table_paths is None:
            return None
        return [i for i, v in enumerate(self.trainable_variables) if v.path in self._table_paths]  # type: ignore[attr-defined]

    # The loss.

    def per_example_loss(self, data: Any, training: bool = True) -> tf.Tensor:
        """Each example's loss, `[batch]`. Override for a model that is not compiled with a `loss`.

        Args:
            data: a batch: `(x, y)` or `(x, y, sample_weight)` for the loss given to `compile`.
            training: for layers that behave otherwise in training.
        """
        if getattr(self, "_loss", None) is None:
            raise ValueError(f"{type(self).__name__} needs compile(loss=...) or a per_example_loss(data, training).")
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=training)  # type: ignore[operator]
        self._last = (x, y, y_pred, sample_weight)
        return compiled_per_example_loss(self._loss, self._loss_weights, y, y_pred, sample_weight)

    # The step.

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step: private under a mechanism, Keras' own otherwise."""
        if not self.is_private:
            return super().train_step(normalised(data.batch if isinstance(data, LookAhead) else data))  # type: ignore[misc]
        upcoming = data.upcoming if isinstance(data, LookAhead) else {}
        batch = batches.tensors(normalised(data.batch if isinstance(data, LookAhead) else data))
        self.prepare(batch)
        batch = batches.hide_batch_axis(batch, self.shared_inputs)
        # A dataset without a known length ends with a step that gets no batch. TensorFlow may by then have run whatever
        # of the step needs none (counting it, its noise), so that all of it is made to wait for the batch.
        with self._stepping(), tf.control_dependencies(tf.nest.flatten((batch, upcoming))):
            self._last = None
            clipped = self._clipped_sum(batch, tf.cast(self.optimizer.clip, tf.float32))
            self.optimizer.apply(clipped, upcoming=upcoming, regularization=self._regularization())
            return self._logs(clipped)

    def test_step(self, data: Any) -> dict[str, Any]:
        """As Keras'; a batch of the look-ahead stage counts without its announcement."""
        return super().test_step(normalised(data.batch if isinstance(data, LookAhead) else data))  # type: ignore[misc]

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        self._in_step, before = True, self._in_step
        try:
            yield
        finally:
            self._in_step = before

    def _clipped_sum(self, batch: Any, clip: tf.Tensor) -> ClippedSum:
        options, optimizer = self._private_options, self.optimizer
        strategy = strategies.strategy_named(options["strategy"])
        loss: Callable[[Any], tf.Tensor] = lambda data: self.per_example_loss(data, training=True)  # noqa: E731
        if options["microbatch_size"] is None:
            return strategy(self, loss, batch, clip, optimizer.before_read)
        self._last = None
        size = options["microbatch_size"]
        return strategies.in_parts(strategy, size, self, loss, batch, clip, optimizer.before_read)

    def _regularization(self) -> dict[str, tf.Tensor]:
        """Gradients of the weights' own regularisers: no example decides them, so they need no clip and no noise."""
        found = {}
        for variable in self.trainable_variables:  # type: ignore[attr-defined]
            if variable.regularizer is not None and variable.path not in (self._table_paths or {}):
                weight = tf.convert_to_tensor(variable._value)
                with tf.GradientTape() as tape:
                    tape.watch(weight)
                    penalty = variable.regularizer(weight)
                found[variable.path] = tape.gradient(penalty, weight)
        return found

    def _logs(self, clipped: ClippedSum) -> dict[str, Any]:
        finite = tf.math.is_finite(clipped.norms) & tf.math.is_finite(tf.cast(clipped.losses, clipped.norms.dtype))
        losses = tf.boolean_mask(clipped.losses, finite)
        self._loss_tracker.update_state(  # type: ignore[attr-defined]
            tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(tf.size(losses), losses.dtype)),
            sample_weight=tf.cast(tf.size(losses), tf.float32),
        )
        logs = {}
        if self._last is not None and self._private_options["microbatch_size"] is None:
            x, y, y_pred, sample_weight = self._last
            if self._private_options["strategy"] in ("bookkeeping", "ghost"):
                logs = self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)  # type: ignore[attr-defined]
        self._last = None
        logs["loss"] = self._loss_tracker.result()  # type: ignore[attr-defined]
        if self._private_options["diagnostics"]:
            logs.update(_diagnostics(clipped, finite))
        return logs

    # Preparing: layers, tables, optimizer.

    def prepare(self, data: Any) -> None:
        """Builds layers and optimizer from a batch (or its spec), and finds out which variables are tables.

        Called by fit and train_on_batch; call it yourself before `optimizer.apply` in a loop of your own.

        Args:
            data: a batch, as the training data gives it.
        """
        if self.is_private and not (self.optimizer.built and self._table_paths is not None):
            with tf.init_scope():
                spec = tf.nest.map_structure(lambda t: None if t is None else loose_spec(t), normalised(data))
                self.table_reader(spec)
                self._build_optimizer()

    def _build_optimizer(self) -> None:
        """Builds the mechanism, and sees to it that whoever reads a table from now on reads it settled."""
        self.optimizer.build(self.trainable_variables, self._table_paths)  # type: ignore[attr-defined]
        for variable in self.trainable_variables:  # type: ignore[attr-defined]
            if variable.path in self._table_paths:  # type: ignore[operator]
                guard(variable, lambda: settle_outside_steps(self))

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
        (`clipping/independence`).

        Callbacks other than Keras' that only look at logs find all noise settled at the end of an epoch; in the middle
        of one they call `self.model.settle()` first, unless they go through the model's own methods.
        """
        if self.is_private:
            callbacks = settle_for(callbacks)
            x = self._ahead(x, y, weighted=kwargs.get("class_weight") is not None)
        try:
            return super().fit(x, y, batch_size, epochs, verbose, callbacks, *args, **kwargs)  # type: ignore[misc]
        finally:
            try:
                self.settle()
            finally:
                self._when_settled = ()

    def _ahead(self, x: Any, y: Any, weighted: bool) -> Any:
        """Training data with look-ahead, if it is of a kind that allows it; the optimizer built, if data tells how."""
        if isinstance(x, tf.data.Dataset):
            self.prepare(x.element_spec.batch if is_lookahead(x) else x.element_spec)
            # Keras maps class weights over plain batches; without look-ahead, rows are settled when they are read.
            return x if weighted else lookahead(x, self)
        if x is not None and all(hasattr(leaf, "shape") for leaf in tf.nest.flatten(x)):
            self.prepare(tf.nest.map_structure(first_example, x if y is None else (x, y)))
        return x

    def settle(self) -> None:
        """Applies all pending noise, so that weights may leave training. Cheap when none is pending."""
        if self.is_private:
            self.optimizer.settle()
            for listener in self._when_settled:
                listener()

    def when_settled(self, listener: Callable[[], None]) -> None:
        """Has `listener` called whenever weights are about to leave the present fit, pending noise applied.

        Args:
            listener: called without arguments; must not release anything itself.
        """
        if listener not in self._when_settled:
            self._when_settled = (*self._when_settled, listener)


for _name in RELEASING:
    setattr(PrivateTraining, _name, releasing(PrivateTraining, _name))
for _name in WRITING:
    setattr(PrivateTraining, _name, writing(PrivateTraining, _name))


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


def _diagnostics(clipped: ClippedSum, finite: tf.Tensor) -> dict[str, tf.Tensor]:
    norms = tf.sort(tf.boolean_mask(clipped.norms, finite))
    count = tf.size(norms)
    median = tf.cond(count > 0, lambda: norms[count // 2], lambda: tf.zeros([], norms.dtype))
    over = tf.cast(norms > tf.cast(clipped.sensitivity, norms.dtype), tf.float32)
    return {
        "clipped_share": tf.math.divide_no_nan(tf.reduce_sum(over), tf.cast(count, tf.float32)),
        "median_norm": median,
        "dropped_examples": tf.reduce_sum(tf.cast(~finite, tf.int32)),
    }


def _refuse_options(model: Any, options: dict[str, Any]) -> None:
    strategies_of = (tf.distribute.get_strategy(), model.distribute_strategy)  # of now, and when the model was made
    if any(strategy.num_replicas_in_sync > 1 for strategy in strategies_of):
        raise NotPrivate(
            "Under a strategy of several replicas each would clip and noise by itself. Train on one device, or, on "
            "several machines, with parameter servers: tfdp_rec.distribute.ParameterServerTrainer."
        )
    if options.get("jit_compile") is True:
        raise NotPrivate(
            "jit_compile=True is refused under a private optimizer: XLA compiles neither the de-duplication of ids nor "
            "a fast Gaussian sampler; leave it out."
        )
    policy = getattr(model, "dtype_policy", None)
    if policy is not None and policy.compute_dtype == "float16":
        raise NotPrivate("float16 needs loss scaling, which breaks the clip; use the policy mixed_bfloat16.")
