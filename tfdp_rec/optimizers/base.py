"""What the mechanisms share: settings, the refusal of raw gradients, dense variables, what is saved.

A private step hands its optimizer a `ClippedSum`; nothing else is accepted. With B the expected batch size (a constant:
the realised size is private), C the sum's sensitivity and σ the noise multiplier,

    ĝ = clipped sum / B,    noise of standard deviation s = σ C / B on every coordinate.

Dense variables get the same treatment under every mechanism: u = ĝ + N(0, s²), then a step of SGD or of
`dense_optimizer`, which is post-processing. What a mechanism does with the tables is its own file; `rules.py` is to
their rows what `dense_optimizer` is to dense variables.
"""

from __future__ import annotations

import abc
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import dp_accounting
import keras
import tensorflow as tf

from tfdp_rec import noise as noise_sources
from tfdp_rec.clipping import ClippedSum
from tfdp_rec.clipping.data_flow import ours
from tfdp_rec.demands import demand, given
from tfdp_rec.keras_internals import learning_rate_now, learning_rate_of, resource
from tfdp_rec.optimizers import checks
from tfdp_rec.optimizers.recursion import Recursion
from tfdp_rec.optimizers.rules import TableRule
from tfdp_rec.optimizers.step import Dense, Step, step_dense
from tfdp_rec.optimizers.tables import Table, after
from tfdp_rec.refused import NotPrivate
from tfdp_rec.sampling.sampling_proof import NO_SAMPLING, Source
from tfdp_rec.spending.entries import SAVED_AS, Entries
from tfdp_rec.spending.meter import Meter, StepLimit

# Each mechanism's constructor names what it adds and passes `**settings` on to the one that it stands on; `plan=` gives
# what is not given, from a `tfdp_rec.PrivatePlan`.


def takes_plan(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose missing settings come from `plan`, which then sees the optimizer."""

    @functools.wraps(init)
    def __init__(self: Any, learning_rate: Any, *positional: Any, plan: Any = None, **settings: Any) -> None:
        init(self, learning_rate, *positional, **(settings if plan is None else plan.complete(settings)))
        if plan is not None:
            plan.accept(self)

    own = list(inspect.signature(init).parameters.values())
    plan = inspect.Parameter("plan", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Any")
    __init__.__signature__ = inspect.Signature([*own[:-1], plan, own[-1]])  # type: ignore[attr-defined]
    return __init__


def signature_of(kind: type, base: type) -> inspect.Signature:
    """All settings by name: the mechanism's own, and those of its bases down to `base`."""
    found: dict[str, inspect.Parameter] = {}
    for each in reversed(kind.__mro__[: kind.__mro__.index(base) + 1]):
        own = inspect.signature(each.__init__).parameters  # type: ignore[misc]
        found |= {name: parameter for name, parameter in own.items() if name != "settings"}
    del found["self"]
    return inspect.Signature(sorted(found.values(), key=lambda p: (p.kind, p.default is not p.empty)))


class PrivateOptimizer(keras.optimizers.Optimizer, abc.ABC):
    """Base of the mechanisms. Not for use by itself.

    Args:
        learning_rate: Learning rate: a number or a Keras schedule.
        l2_norm_clip: C, the bound on each example's gradient norm.
        noise_multiplier: σ, the noise's standard deviation in units of the sensitivity.
        expected_batch_size: B, the constant that every step divides by, whatever the batch's size.
        momentum: Momentum of SGD.
        nesterov: Nesterov's form of the momentum.
        weight_decay: Decoupled weight decay, or None; a table's own keras.regularizers.L2(l2) adds 2 l2 to it.
        dense_optimizer: Any Keras optimizer for the variables that are not tables; SGD as above if None.
        table_rule: Adagrad or Adam (docs/adaptive.md) for the tables; SGD as above if None.
        noise: A `tfdp_rec.noise.NoiseSource`, for tests. Never saved: a loaded optimizer draws anew.
        secure: Whether noise is drawn from `SecureNoise`.
        name: Name of the optimizer.

    Raises:
        ValueError: for values out of range, or options that would break the guarantee.
    """

    observers: tuple[Callable[[ClippedSum], None], ...] = ()
    """Called with every step's clipped sum, in its graph: for counting, by callbacks."""

    plan: Any = None  # the `PrivatePlan` that the optimizer was made with
    step_limit: StepLimit | None = None  # steps that the optimizers of one plan may make in all
    counts_steps = True  # False where the coordinator of a cluster counts them
    why_no_table_rule = ""  # why the mechanism takes no `table_rule`; empty if it does
    moves_every_row = False  # whether all rows make every step, at once or when due, so that a decay reaches them
    pays_late = False  # whether rows may owe noise, so that nothing but a step may read them until they are settled

    def __new__(cls, *positional: Any, **settings: Any) -> PrivateOptimizer:
        # A clip that lands where the batch size belongs still trains, without protection.
        if len(positional) > 1:
            raise TypeError(
                f"{cls.__name__} takes its settings by name, so that none is taken for another: {cls.__name__}("
                "learning_rate, l2_norm_clip=..., noise_multiplier=..., expected_batch_size=..., ...)."
            )
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = signature_of(cls, PrivateOptimizer)  # type: ignore[attr-defined]  # or help() would show that of __new__

    @takes_plan
    def __init__(
        self,
        learning_rate: Any,
        *,
        l2_norm_clip: float,
        noise_multiplier: float,
        expected_batch_size: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        dense_optimizer: keras.optimizers.Optimizer | str | None = None,
        table_rule: TableRule | None = None,
        noise: noise_sources.NoiseSource | None = None,
        secure: bool = False,
        name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            float(learning_rate) if isinstance(learning_rate, int) else learning_rate,
            name=name,
            **checks.admitted(type(self).__name__, kwargs),
        )
        if noise is not None and secure:
            raise ValueError("Give noise= or secure=True, not both.")
        self.recursion = Recursion(momentum, nesterov, weight_decay or 0.0)
        self.momentum, self.nesterov, self.decoupled_weight_decay = momentum, nesterov, weight_decay
        self.secure = secure
        self.noise = noise or (noise_sources.SecureNoise() if secure else noise_sources.EntropyNoise())
        self.dense_optimizer = checks.checked_dense(dense_optimizer)
        self.table_rule = checks.checked_rule(self, table_rule)
        self.constructed_with: dict[str, float] = {}
        self._priced: tuple[str, ...] = ()
        self._l2_norm_clip = self._setting("l2_norm_clip", checks.checked_clip(l2_norm_clip))
        self._noise_multiplier = self._setting("noise_multiplier", noise_multiplier, zero=True, priced=True)
        self._expected_batch_size = self._setting("expected_batch_size", expected_batch_size)
        self.privacy_history = Meter(self)

    # Settings: variables, so that a change in mid-training reaches the compiled step, and so that they are saved.

    def _setting(self, name: str, value: float, zero: bool = False, priced: bool = False) -> keras.Variable:
        """A setting as a variable; `priced` if it decides what a step costs."""
        checked = checks.positive(name, value, zero)
        self.constructed_with[name] = checked
        variable = self.add_variable((), "zeros", dtype="float64", name=name)
        variable.assign(checked)  # an initializer would round it to float32 on the way
        if priced:
            self._priced += (f"_{name}",)
        return variable

    @property
    def price_settings(self) -> list[tf.Variable]:
        """The settings that decide what a step costs: a step that was priced by others is refused."""
        return [resource(getattr(self, name)) for name in self._priced]

    @property
    def l2_norm_clip(self) -> float:
        """C, the bound on each example's gradient norm."""
        return float(self._l2_norm_clip.numpy())

    @l2_norm_clip.setter
    def l2_norm_clip(self, value: float) -> None:
        self._l2_norm_clip.assign(checks.checked_clip(value))

    @property
    def noise_multiplier(self) -> float:
        """σ, in units of the sensitivity."""
        return float(self._noise_multiplier.numpy())

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        checked = checks.positive("noise_multiplier", value, zero=True)
        with self.privacy_history.repricing(self):
            self._noise_multiplier.assign(checked)

    @property
    def expected_batch_size(self) -> float:
        """B, what every step divides by."""
        return float(self._expected_batch_size.numpy())

    @expected_batch_size.setter
    def expected_batch_size(self, value: float) -> None:
        self._expected_batch_size.assign(checks.positive("expected_batch_size", value))

    @property
    def clip(self) -> tf.Tensor:
        """C as a tensor, for the step that clips."""
        return tf.identity(resource(self._l2_norm_clip))

    def take(self, settings: Mapping[str, tf.Tensor]) -> None:
        """Sets settings from float64 scalars, in the graph of a step; a learning rate that is a schedule stays."""
        settings = dict(settings)
        rate = settings.pop("learning_rate", None)
        held = learning_rate_of(self)
        if rate is not None and isinstance(held, keras.Variable):
            resource(held).assign(tf.cast(rate, tf.float32))
        for name, value in settings.items():
            resource(getattr(self, f"_{name}")).assign(value)

    def dp_event(self) -> dp_accounting.DpEvent:
        """The privacy event of one step on one batch, before any amplification by sampling."""
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    # Building.

    def build(self, variables: list[keras.Variable], tables: Mapping[str, Any] | None = None) -> None:
        """Makes the mechanism's state.

        Args:
            variables: The model's trainable variables.
            tables: Paths of the variables that are read by row only, as `PrivateTraining` finds them.

        Raises:
            ValueError: if `tables` is missing, or the optimizer was built for another model.
        """
        if self.built:
            checks.refuse_other_model(self, variables)
            return
        if tables is None:
            raise ValueError(
                f"{type(self).__name__} must know which variables are tables: call model.prepare(batch), or fit, which "
                "finds out."
            )
        self.tables: dict[str, Table] = {}
        self.dense: dict[str, Dense] = {}
        for number, variable in enumerate(variables):
            if variable.path in tables:
                checks.refuse_on_table(variable)
                self.tables[variable.path] = self._table(number, variable)
            else:
                has_velocity = self.recursion.has_velocity and self.dense_optimizer is None
                velocity = self._kept("velocity", number, variable.shape) if has_velocity else None
                self.dense[variable.path] = Dense(number, variable, velocity)
        if self.dense_optimizer is not None:
            self.dense_optimizer.build([dense.variable for dense in self.dense.values()])
        self.build_tables()
        self.privacy_history.trains(variables)
        super().build(list(variables))

    def _table(self, number: int, variable: keras.Variable) -> Table:
        recursion = checks.recursion_of_table(self, variable)
        rule = self.table_rule or recursion
        name, width = "velocity" if rule is recursion else "state", rule.state_width(variable.shape[1])
        state = self._kept(name, number, (variable.shape[0], width)) if width else None
        return Table(number, variable, state, rule)

    def _kept(self, name: str, number: int, shape: Any) -> keras.Variable:
        return self.add_variable(shape, dtype="float32", name=f"{name}_{number}")

    def build_tables(self) -> None:
        """Makes what the mechanism keeps beside its tables: nothing, by default."""

    # A step.

    def apply(
        self, clipped: Any, trainable_variables: Any = None, source: Source = NO_SAMPLING, **kwargs: Any
    ) -> None:
        """One private step.

        Args:
            clipped: The `ClippedSum` of this step's batch.
            trainable_variables: Refused, if not None.
            source: Proof of the draw that gave the batch.
            upcoming: Table path -> ids that the next batch will read, if known.
            regularization: Variable path -> gradient of the regularisation losses, which no example decides.

        Raises:
            NotPrivate: for anything but a `ClippedSum`.
        """
        if not isinstance(clipped, ClippedSum) or trainable_variables is not None:
            raise NotPrivate(
                f"{type(self).__name__} takes no raw gradients: they are not clipped by example, so noise would "
                "protect no example. Train with tfdp_rec.PrivateModel (or the mix-in tfdp_rec.PrivateTraining), or "
                "pass the result of tfdp_rec.clipping.clipped_sum to apply()."
            )
        # All of the step waits for the sum: a step that gets none, or fails on the way to it, changes nothing.
        admitted = self.admission(clipped, source)
        with ours(), tf.control_dependencies([clipped.norms]), after(admitted):
            with after(self.privacy_history.count(self, source) if self.counts_steps else []):
                for observe in self.observers:
                    observe(clipped)
                self._step(clipped, source, admitted, **kwargs)

    def ticket(self) -> tuple[PrivateOptimizer, tf.Tensor]:
        """What a clipped sum is taken for: this optimizer, at this step."""
        return self, tf.identity(self.step_number)

    def admission(self, clipped: ClippedSum, source: Source) -> list[Any]:
        """Checks of a clipped sum, and of where its batch came from, ahead even of counting the step."""
        if clipped.ticket is None:
            return []
        optimizer, step = clipped.ticket
        if optimizer is not self:
            raise NotPrivate(f"The clipped sum was taken for another optimizer than this {type(self).__name__}.")
        return demand(step == self.step_number, _STALE)

    def apply_gradients(self, grads_and_vars: Any) -> None:
        """Refused: see `apply`."""
        self.apply(grads_and_vars)

    def _step(
        self,
        clipped: ClippedSum,
        source: Source,
        admitted: list[Any],
        upcoming: Mapping[str, tf.Tensor] | None = None,
        regularization: Mapping[str, tf.Tensor] | None = None,
    ) -> None:
        unknown = set(clipped.gradients) - set(self.tables) - set(self.dense)
        if unknown:
            raise ValueError(f"The optimizer was not built for {', '.join(sorted(unknown))}.")
        # Every scale of the step is computed from B, and B from the checks: what is not admitted moves no weight.
        batch = given(tf.identity(resource(self._expected_batch_size)), admitted)
        stddev = resource(self._noise_multiplier) * tf.cast(clipped.sensitivity, tf.float64) / batch
        learning_rate = tf.cast(learning_rate_now(self), tf.float32)
        pace = tf.ones_like(learning_rate) if self.table_rule else learning_rate
        step = Step(clipped, batch, stddev, learning_rate, upcoming or {}, source, pace)
        with after([check for check in self.refusals(step) if check is not None]):
            self.write(step, regularization or {})

    def write(self, step: Step, regularization: Mapping[str, tf.Tensor]) -> None:
        """All that a step writes, once nothing refuses it; `regularization` as in `apply`."""
        for table in self.tables.values():
            table.withhold()
        step_dense(self, step, regularization, self.dense_noise())
        self.step_tables(step)
        self.iterations.assign_add(1)

    def dense_noise(self) -> dict[str, tf.Tensor]:
        """Unit Gaussians for every dense variable at this step, in its shape."""
        sizes = {path: int(tf.TensorShape(dense.variable.shape).num_elements()) for path, dense in self.dense.items()}
        one = tf.zeros([1], tf.int64)
        requests = [noise_sources.Request(self.dense[path].number, one, size) for path, size in sizes.items()]
        drawn = self.noise.draw(requests, self.step_number) if requests else []
        return {path: tf.reshape(u, dense.variable.shape) for u, (path, dense) in zip(drawn, self.dense.items())}

    def table_noise(self, table: Table, ids: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """Unit Gaussians for some rows of a table at a step."""
        return self.noise.normal(table.number, ids, step, table.width)

    @property
    def step_number(self) -> tf.Tensor:
        """How many steps were made, int64."""
        return tf.cast(resource(self.iterations), tf.int64)

    def refusals(self, step: Step) -> Iterable[Any]:
        """Checks that the step may be made, ahead of all it writes."""
        return ()

    @abc.abstractmethod
    def step_tables(self, step: Step) -> None:
        """What the mechanism does with the tables."""

    # Pending noise: none, unless a mechanism says otherwise.

    def before_read(self, variable: keras.Variable, ids: tf.Tensor) -> None:
        """Called when rows of a table are about to be read by the model."""

    def settle(self) -> None:
        """Applies all noise that is owed, so that the weights may be released. Cheap when nothing is owed."""

    def settle_all(self) -> None:
        """What `settle` does, as operations, for code that is in a graph already."""

    @property
    def ledger_variables(self) -> dict[str, tf.Variable]:
        """What a training checkpoint keeps beside `variables`, by name; no release does."""
        return {}

    def ledger_restored(self) -> None:
        """Called when `variables` and `ledger_variables` were set to those of a training checkpoint."""

    def finalize_variable_values(self, var_list: Any) -> None:
        """Keras' hook at the end of fit."""
        self.settle()

    # Saving.

    def go_on_with(self, history: Meter | None) -> None:
        """Takes over the history of a model that another optimizer trained before."""
        if history is not None and history is not self.privacy_history:
            history.add_part(self, self.privacy_history)
            self.privacy_history = history
        self.privacy_history.refuse_other_optimizers(self)

    def load_own_variables(self, store: Any) -> None:
        """As every Keras optimizer. The history is saved with the model; before version 0.3 it was saved here."""
        with self.privacy_history.repricing(self):
            super().load_own_variables({key: store[key] for key in store.keys() if key != SAVED_AS})
        if SAVED_AS in store.keys():
            self.privacy_history.merge_saved(Entries.from_array(store[SAVED_AS]))
        self.privacy_history.restored()

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer's variables, those of `dense_optimizer` included."""
        dense = getattr(self, "dense_optimizer", None)
        return super().variables + ([] if dense is None else dense.variables)

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument; the noise source is left out, since its key must never be saved."""
        dense = self.dense_optimizer
        return {
            "name": self.name,
            "learning_rate": checks.serialized_rate(self),
            "l2_norm_clip": self.l2_norm_clip,
            "noise_multiplier": self.noise_multiplier,
            "expected_batch_size": self.expected_batch_size,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.decoupled_weight_decay,
            "dense_optimizer": None if dense is None else keras.optimizers.serialize(dense),
            "table_rule": None if self.table_rule is None else keras.saving.serialize_keras_object(self.table_rule),
            "noise": None,
            "secure": self.secure,
            "plan": None,  # its settings are those above
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateOptimizer:
        """A copy with the history of this one, under the same plan: a config and a pickle know of neither."""
        reduced: Any = self.__reduce__()
        copied = reduced[0](*reduced[1])
        copied.privacy_history.merge_saved(self.privacy_history.snapshot())
        if self.plan is not None:
            self.plan.accept(copied)
        return copied

    def __copy__(self) -> PrivateOptimizer:
        return copy.deepcopy(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> PrivateOptimizer:
        """Rebuilds an optimizer from `get_config`."""
        config = dict(config)
        for key in ("learning_rate", "dense_optimizer", "table_rule"):
            if isinstance(config.get(key), dict):
                config[key] = keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
        return cls(**config)


_STALE = (
    "The clipped sum was taken for an earlier step, or was applied before: take it with "
    "tfdp_rec.clipping.clipped_sum just before optimizer.apply, once a step"
)
