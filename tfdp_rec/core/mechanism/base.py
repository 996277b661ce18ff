"""The base of the mechanisms: settings, the refusal of raw gradients, dense variables, saving.

A private step hands its optimizer a `ClippedSum`; nothing else is accepted. With B the expected batch size (a constant:
the realised size is private), C the sum's sensitivity and σ the noise multiplier,

    ĝ = clipped sum / B,    noise of standard deviation s = σ C / B on every coordinate.

Dense variables get the same treatment under every mechanism: u = ĝ + N(0, s²), then a step of SGD or of
`dense_optimizer`, which is post-processing. What a mechanism does with the tables is its own file; `rules.py` is to
their rows what `dense_optimizer` is to dense variables.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import keras
import tensorflow as tf

from tfdp_rec.core.claim.entries import new_id
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from tfdp_rec.core.claim.meter import Meter
from tfdp_rec.core.claim.sampling_proof import NO_SAMPLING, Source
from tfdp_rec.core.ground.graph_checks import HOST, Check, depend_on, require_all
from tfdp_rec.core.ground.keras_internals import learning_rate_now, learning_rate_of, outside_scopes, resource
from tfdp_rec.core.ground.refused import NotPrivate, refuse_no_number
from tfdp_rec.core.mechanism import checks
from tfdp_rec.core.mechanism.arguments import Numbers, Planned
from tfdp_rec.core.mechanism.dense import Dense, step_dense
from tfdp_rec.core.mechanism.noise.base import NoiseSource, Request
from tfdp_rec.core.mechanism.noise.gaussian import EntropyNoise
from tfdp_rec.core.mechanism.noise.meeting import grid_of
from tfdp_rec.core.mechanism.noise.secure import SecureNoise
from tfdp_rec.core.mechanism.rules import Recursion, Rows, TableRule
from tfdp_rec.core.mechanism.tables import Operations, Table, run_after
from tfdp_rec.core.sensitivity.engine import ClippedSum
from tfdp_rec.core.sensitivity.independence.reading import ours
from tfdp_rec.core.sensitivity.weights import Auto, WeightRule, clip_and_rule


class MechanismType(abc.ABCMeta):
    """Construction of a mechanism: settings by name; a plan completes them, and checks the result."""

    # The constructors of a mechanism and of those that it stands on pass `**settings` on to one another. A plan must
    # complete the settings ahead of the first, and can price the optimizer only after the last: hence here.

    def __call__(cls, learning_rate: Any, *positional: Any, plan: Any = None, **settings: Any) -> Any:
        if positional:  # a clip that lands where the batch size belongs would still train, without protection
            raise TypeError(
                f"{cls.__name__} takes its settings by name, so that none is taken for another: {cls.__name__}("
                "learning_rate, l2_norm_clip=..., noise_multiplier=..., expected_batch_size=..., ...)."
            )
        with outside_scopes():  # its variables belong to the step as a whole, not to a replica
            made = super().__call__(learning_rate, **(settings if plan is None else plan.complete(settings)))
            if plan is not None:
                plan.accept(made)
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """All settings by name, for help(): the mechanism's own, and those of the mechanisms that it stands on."""
        found = {"plan": inspect.Parameter("plan", inspect.Parameter.KEYWORD_ONLY, default=None)}
        for kind in (kind for kind in reversed(cls.__mro__) if isinstance(kind, MechanismType)):
            found |= inspect.signature(kind.__init__).parameters  # type: ignore[misc]
        own = [parameter for name, parameter in found.items() if name not in ("self", "settings")]
        return inspect.Signature(sorted(own, key=lambda p: (p.kind, p.default is not p.empty)))


class Setting:
    """A number given to a mechanism, which is fixed, since its steps are priced by it."""

    def __init__(self, check: Callable[[str, float], float] = checks.positive):
        self._check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: Any, owner: type | None = None) -> float:
        if optimizer is None:
            return self  # type: ignore[return-value]
        if self.name not in vars(optimizer):  # Keras asks before it is set
            raise AttributeError(self.name)
        return float(vars(optimizer)[self.name])

    def __set__(self, optimizer: Any, value: float) -> None:
        if self.name in optimizer.constructed_with:
            raise AttributeError(
                f"{self.name} of a {type(optimizer).__name__} is fixed, since its steps are priced by it: make another "
                "optimizer, and compile the model with it."
            )
        optimizer.constructed_with[self.name] = vars(optimizer)[self.name] = self._check(self.name, value)


class ClipSetting(Setting):
    """C, a number under "auto" too, which a config keeps."""

    def __set__(self, optimizer: Any, value: float | Auto) -> None:
        super().__set__(optimizer, clip_and_rule(value)[0])
        if value == "auto":
            optimizer.constructed_with[self.name] = value


@dataclasses.dataclass(frozen=True)
class Step:
    """A step, as a mechanism sees it when it updates its tables."""

    # `batch_size` is B and `stddev` s = σ C / B, both float64; moves of tables are multiples of `pace`: η, 1 where a
    # rule takes gradients themselves, or 0 where tables leave the step out. `noise_scale` is −η s: what a unit Gaussian
    # moves a weight by, float64.

    clipped: ClippedSum
    batch_size: tf.Tensor
    stddev: tf.Tensor
    learning_rate: tf.Tensor
    pace: tf.Tensor
    noise_scale: tf.Tensor
    upcoming: Mapping[str, tf.Tensor]
    bound: Any = None  # of the weights of tables whose noise comes late, ahead of the step
    _moves: dict[str, tf.IndexedSlices] = dataclasses.field(default_factory=dict, init=False, repr=False)
    _rows: dict[str, Rows] = dataclasses.field(default_factory=dict, init=False, repr=False)
    places: list[tf.Tensor] = dataclasses.field(default_factory=list, init=False, repr=False)  # of its rows' marks

    def move(self, table: Table) -> tf.IndexedSlices:
        """−η ĝ of a table, an id standing once, added up when first asked for; nothing, if no layer read the table."""
        if table.path not in self._moves:
            self._moves[table.path] = self._move(table)
        return self._moves[table.path]

    def rows(self, table: Table) -> Rows:
        """A table's rows of this move, as they were when first asked for."""
        if table.path not in self._rows:
            self._rows[table.path] = table.read(self.move(table).indices)
        return self._rows[table.path]

    @functools.cached_property
    def _scale(self) -> tf.Tensor:
        with tf.device(HOST):
            return -tf.cast(self.pace, tf.float64) / self.batch_size

    def _move(self, table: Table) -> tf.IndexedSlices:
        if table.path not in self.clipped.gradients:
            return tf.IndexedSlices(tf.zeros([0, table.width]), tf.zeros([0], tf.int64))
        found = self.clipped.scaled(table.path, self._scale)
        if not isinstance(found, tf.IndexedSlices):
            raise ValueError(f"'{table.path}' is a table, but the clipped sum has a gradient of its whole shape.")
        return found


class PrivateOptimizer(keras.optimizers.Optimizer, metaclass=MechanismType):
    """Base of the mechanisms. Not for use by itself.

    Args:
        learning_rate: Learning rate: a number or a Keras schedule.
        l2_norm_clip: C, the bound on each example's gradient norm; or "auto", C = 1 and every gradient g scaled to
            g / (‖g‖ + 0.01). That is biased: a sum of directions, in which an example whose loss is nearly at its least
            weighs as much as any other, unless its gradient is shorter than 0.01; zero stays zero.
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
    counts_steps = True  # False where the coordinator of a cluster counts them
    why_no_table_rule = ""  # why the mechanism takes no `table_rule`; empty if it does
    moves_every_row = False  # whether all rows make every step, at once or when due, so that a decay reaches them
    correlates_noise = False  # whether a plan of noise is paid for as a whole, and has one course
    keeper: Any = None  # the `TrainingCheckpoint` that keeps the states of this training
    pays_late = False  # whether rows may owe noise, so that nothing but a step may read them until they are settled
    debts: Any = None  # what its rows owe, if it pays late: `RowDebts`
    course: Any = None  # the plan of its noise, if that is correlated

    # C, the bound on each example's gradient norm; σ, in units of the sensitivity; B, what every step divides by.
    l2_norm_clip = ClipSetting()
    noise_multiplier = Setting(checks.check_not_negative)
    expected_batch_size = Setting()

    @overload
    def __init__(self, learning_rate: Any, **settings: Unpack[Numbers]) -> None: ...
    @overload
    def __init__(self, learning_rate: Any, **settings: Unpack[Planned]) -> None: ...
    def __init__(  # type: ignore[misc]  # the metaclass takes the plan
        self,
        learning_rate: Any,
        *,
        l2_norm_clip: float | Auto,
        noise_multiplier: float,
        expected_batch_size: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        dense_optimizer: keras.optimizers.Optimizer | str | None = None,
        table_rule: TableRule | None = None,
        noise: NoiseSource | None = None,
        secure: bool = False,
        name: str | None = None,
        **kwargs: Any,
    ):
        if isinstance(learning_rate, str):
            refuse_no_number("learning_rate", learning_rate)
        super().__init__(
            float(learning_rate) if isinstance(learning_rate, int) else learning_rate,
            name=name,
            **checks.admit(type(self).__name__, kwargs),
        )
        if not isinstance(noise, NoiseSource | None):
            raise TypeError(f"noise must be a tfdp_rec.noise.NoiseSource, got {noise!r}; leave it out.")
        if noise is not None and secure:
            raise ValueError("Give noise= or secure=True, not both.")
        self.recursion = Recursion(momentum, nesterov, weight_decay or 0.0)
        self.momentum, self.nesterov, self.decoupled_weight_decay = momentum, nesterov, weight_decay
        self.secure = secure
        self._noise = noise or (SecureNoise() if secure else EntropyNoise())
        self.dense_optimizer = checks.check_dense(dense_optimizer)
        self.table_rule = checks.check_rule(self, table_rule)
        self.constructed_with: dict[str, Any] = {}
        self.l2_norm_clip, self.noise_multiplier = l2_norm_clip, noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.privacy_history = Meter(self)
        # Ids of the training, and of the last of its states that is in a checkpoint.
        self.training_id, self.state_id = new_id(), ""

    @property
    def noise(self) -> NoiseSource:
        """Where noise comes from. It is fixed once the optimizer is built, since it decides what steps guarantee."""
        return self._noise

    @noise.setter
    def noise(self, noise: NoiseSource) -> None:
        if self.built:
            raise AttributeError(
                f"noise of a {type(self).__name__} that was built is fixed, since it decides what its steps guarantee: "
                "make another optimizer, and compile the model with it."
            )
        self._noise = noise

    @property
    def clip_rule(self) -> WeightRule:
        """How examples are weighed to keep to the clip."""
        return clip_and_rule(self.constructed_with["l2_norm_clip"])[1]

    def dp_event(self) -> DpEvent:
        """The privacy event of one step on one batch, before any amplification by sampling."""
        if self.noise_multiplier == 0:
            return NonPrivateDpEvent()
        return GaussianDpEvent(self.noise_multiplier)

    # Building.

    def build(self, variables: list[keras.Variable], tables: Mapping[str, Any] | None = None) -> None:
        """Makes the mechanism's state for a model's trainable variables.

        Args:
            variables: The model's trainable variables.
            tables: Paths of the variables that are read by row only, as `PrivateTraining` finds them.
        """
        if self.built:
            checks.refuse_other_model(self, variables)
            return
        if tables is None:
            raise ValueError(
                f"{type(self).__name__} must know which variables are tables: call model.prepare(batch), or fit, which "
                "finds out."
            )

        def add_state(name: str, number: int, shape: Any) -> keras.Variable:
            return self.add_variable(shape, dtype="float32", name=f"{name}_{number}")

        self.tables: dict[str, Table] = {}
        self.dense: dict[str, Dense] = {}
        for number, variable in enumerate(variables):
            if variable.path in tables:
                checks.refuse_on_table(variable)
                recursion = checks.recursion_of_table(self, variable)
                rule = self.table_rule or recursion
                name, width = "velocity" if rule is recursion else "state", rule.state_width(variable.shape[1])
                state = add_state(name, number, (variable.shape[0], width)) if width else None
                self.tables[variable.path] = Table(number, variable, state, rule)
            else:
                has_velocity = self.recursion.has_velocity and self.dense_optimizer is None
                velocity = add_state("velocity", number, variable.shape) if has_velocity else None
                self.dense[variable.path] = Dense(number, variable, velocity)
        if self.dense_optimizer is not None:
            self.dense_optimizer.build([dense.variable for dense in self.dense.values()])
        self.build_tables()
        if self.counts_steps:  # otherwise the history is that of the coordinator's optimizer
            self.privacy_history.attach(variables)
            if self.plan is not None:
                with tf.init_scope():
                    self.plan.open(self)
        super().build(list(variables))

    def build_tables(self) -> None:
        """Makes what the mechanism keeps beside its tables: nothing, by default."""

    # A step.

    def apply(  # noqa: D417, as kwargs are Keras'
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
        variables = [part.variable for group in (self.tables, self.dense) for part in group.values()]
        checks.refuse_data_beside_the_sum(self, variables)
        checks.refuse_replicas()
        # All of the step waits for the sum: a step that gets none, or fails on the way to it, changes nothing.
        planned = [] if self.course is None else self.course.checks(source)
        with tf.device(HOST):
            admitted = require_all(*_check_ticket(self, clipped), *planned)
        with ours(), tf.control_dependencies([clipped.norms]), run_after(admitted):
            with run_after(self.privacy_history.count(source) if self.counts_steps else []):
                for observe in self.observers:
                    observe(clipped)
                self._step(clipped, source, admitted, **kwargs)

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
        for table in self.tables.values():
            table.withhold(self)
        rate, late = learning_rate_now(self), self.debts if self.tables else None
        with tf.device(HOST):  # public numbers: on a GPU each operation of one would be a kernel
            # Every scale of the step is computed from B, and B from the checks: what is not admitted moves no weight.
            batch = depend_on(tf.constant(self.expected_batch_size, tf.float64), admitted)
            stddev = tf.constant(self.noise_multiplier, tf.float64) * tf.cast(clipped.sensitivity, tf.float64) / batch
            learning_rate = tf.cast(rate, tf.float32)
            bound = None if late is None else late.bound.find()
            by_rate = learning_rate if late is None else late.bound.pace_of(learning_rate, stddev, bound)
            pace = tf.ones_like(learning_rate) if self.table_rule else by_rate
            scale = -tf.cast(pace, tf.float64) * stddev
            # What is more than float32 holds is infinite, or no number, whatever noise is added to it.
            most = tf.maximum(tf.abs(tf.cast(learning_rate, tf.float64)), 1.0) / tf.minimum(batch, 1.0)
            held = (most * tf.cast(clipped.sensitivity, tf.float64) <= _LARGEST_MOVE) | (stddev == 0)
        step = Step(clipped, batch, stddev, learning_rate, pace, scale, upcoming or {}, bound)
        refusals = [] if late is None else late.refusals(step)
        within = contextlib.nullcontext() if self.course is None else self.course.writes_of_step(source)
        with tf.device(HOST):
            held_all = require_all((held, _TOO_LARGE), *refusals)
        with run_after(held_all), within:
            step_dense(self, step, regularization or {})
            self.step_tables(step)
            resource(self.iterations).assign_add(1)

    def meet(
        self, wanted: Sequence[tuple[str, Request]], number: tf.Tensor
    ) -> list[tuple[tf.Tensor, Operations]]:
        """What some variables' requests are added to, with noise, on their grids; and writes that belong to it."""
        # One draw for all variables. Data and noise meet here and nowhere else.
        return [(each, []) for each in self.noise.noisy([request for _, request in wanted], number)]

    def noisy_moves(
        self, step: Step, moves: Sequence[tuple[Table, tf.Tensor, tf.Tensor]]
    ) -> list[tuple[tf.Tensor, Operations]]:
        """Moves of rows, `(table, ids, moves)`, with the step's noise; and writes that belong to it."""
        scale, grid = step.noise_scale, grid_of(step.noise_scale)
        return self.meet(
            [(table.path, Request(table.number, ids, table.width, scale, (move,), grid)) for table, ids, move in moves],
            self.step_number,
        )

    @property
    def step_number(self) -> tf.Tensor:
        """Number of steps made, int64."""
        return tf.cast(resource(self.iterations), tf.int64)

    @abc.abstractmethod
    def step_tables(self, step: Step) -> None:
        """Updates the tables."""

    def settle(self) -> None:
        """Applies all noise that is owed, so that the weights may be released. Cheap when nothing is owed."""
        if self.debts is not None:
            self.debts.settle()

    # Saving.

    def load_own_variables(self, store: Any) -> None:
        """As every Keras optimizer. The history is saved with the model."""
        super().load_own_variables(store)
        self.privacy_history.note_restore()

    @property
    def variables(self) -> list[keras.Variable]:
        """The optimizer's variables, those of `dense_optimizer` included."""
        dense = getattr(self, "dense_optimizer", None)
        return super().variables + ([] if dense is None else dense.variables)

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument; the noise source is left out, since its key must never be saved."""
        rate = learning_rate_of(self)
        return {
            "name": self.name,
            "learning_rate": float(rate.numpy()) if isinstance(rate, keras.Variable) else checks.serialize(rate),
            **self.constructed_with,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.decoupled_weight_decay,
            "dense_optimizer": checks.serialize(self.dense_optimizer),
            "table_rule": checks.serialize(self.table_rule),
            "noise": None,
            "secure": self.secure,
            "plan": None,  # its settings are those above
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateOptimizer:
        """A copy with the history of this one, under the same plan: a config and a pickle know of neither."""
        reduced: Any = self.__reduce__()
        copied = reduced[0](*reduced[1])
        copied.privacy_history.merge(self.privacy_history.snapshot())
        if self.plan is not None:
            self.plan.accept(copied)
        return copied

    __copy__ = copy.deepcopy


def _check_ticket(own: PrivateOptimizer, clipped: ClippedSum) -> list[Check]:
    """Refuses a sum that was taken for another optimizer, and checks that it is of the present step."""
    if clipped.ticket is None:
        return []
    optimizer, step = clipped.ticket
    if optimizer is not own:
        raise NotPrivate(f"The clipped sum was taken for another optimizer than this {type(own).__name__}.")
    return [(step == own.step_number, _STALE)]


_STALE = (
    "The clipped sum was taken for an earlier step, or was applied before: take it with "
    "tfdp_rec.clipping.clipped_sum just before optimizer.apply, once a step."
)
_LARGEST_MOVE = 2.0**100  # of one example; with a batch of them 2^-28 of what float32 holds
_TOO_LARGE = (
    "At this learning_rate or l2_norm_clip a gradient is more than float32 holds, and would show beside any noise: use "
    "smaller ones."
)
