"""Release: weights leave training only after their pending noise was settled.

A mechanism may owe noise to rows that no batch has read for a while. Every way for weights, or numbers computed from
them, to leave training settles that noise first. From the outside in:

- the model's own methods settle first (`release_methods.py`);
- callbacks at the end of an epoch find everything settled (`settling_ahead`);
- every table, and its rows' momentum, is *guarded*: any eager read of it settles first;
- rows that may owe noise are *withheld* (`withheld_rows.py`): a graph that reads a table, compiled at any time, finds
  no rows there. A graph that was compiled after the table was guarded fails with the reason.

The optimizers that may owe noise are listed with the table (`Debts`), not with a model: two models that share a table,
or a model that got another optimizer, keep each other's debts. `ReleaseGuard` has the state of one model: whether it is
within a step, and the listeners to its releases.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import (
    RESOURCE_ATTRIBUTE,
    compiles_with_xla,
    layers_within,
    metrics_variables,
    own_weights,
    resource,
    set_resource,
)
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import WithheldRows, demand_rows, withheld
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.sensitivity.data_flow import ours
from tfdp_rec.core.sensitivity.rules import Rule, rule_for

_LOGS_ONLY = (
    keras.callbacks.ModelCheckpoint,  # it saves through the model's own methods
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)


_ONE_THREAD = threading.RLock()  # of the thread that trains privately
_ONE_WRITER = threading.RLock()  # of the thread whose listeners act


class Listener(Protocol):
    """Object that acts before weights leave training, such as a callback that writes them to a file first.

    Attributes:
        place: Name of what it keeps; another listener of the same name replaces this one.
        is_needed: Whether it still has something to keep.
        is_done: Whether it has acted since the last step.
    """

    place: str

    @property
    def is_needed(self) -> bool: ...  # noqa: D102

    @property
    def is_done(self) -> bool: ...  # noqa: D102

    def before_release(self) -> None:
        """Acts, after pending noise was applied, also when it is not needed; releases nothing itself."""


class ReleaseGuard:
    """The releases of one model."""

    def __init__(self, model: Any):
        self.model = model
        self._guarded: list[keras.Variable] = []  # tables, and the velocities of their rows
        self._at_work = self._leaving = self._fitting = 0
        self._trained_by: int | None = None  # the thread that trains the model at present
        self._listeners: dict[str, Listener] = {}  # by place
        self._kept: list[WithheldRows] = []  # weights that leave after the listeners, beside tables that owe noise
        self._reached, self._kept_back = 0, False

    # Present state.

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A block for a step's own work, whose reads are not guarded: it settles each row before it reads it."""
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """A block for `fit`, which settles at its end and whose callbacks were checked."""
        with self.training(), contextlib.ExitStack() as around:
            for release in self._on_these_weights():
                around.enter_context(release.in_reach())
            self._fitting += 1
            try:
                self._allow_steps()
                yield
            finally:
                self._fitting -= 1
                self._allow_steps()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A block for private steps, which one thread of a process makes at a time."""
        # Whether a draw was used, how many steps are allowed and which rows owe noise is read first and written later
        # in a step: two steps at once would both find the draw unused, and the last step of a budget still to be made.
        if not _ONE_THREAD.acquire(blocking=False):
            raise NotPrivate(
                "A private fit is going on in another thread, and steps are checked and counted one after the other: "
                "train in one thread, or in processes with data and ledgers of their own."
            )
        before, self._trained_by = self._trained_by, threading.get_ident()
        try:
            yield
        finally:
            self._trained_by = before
            _ONE_THREAD.release()

    def refuse_other_threads(self) -> None:
        """Refuses a release while another thread trains the model."""
        if self._trained_by not in (None, threading.get_ident()):
            raise RuntimeError("Another thread trains the model: release its weights when fit has ended.")

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Settles, and traces without checks in the block: the graphs leave training for good."""
        self.settle_outside_steps()
        self._leaving += 1
        try:
            yield
        finally:
            self._leaving -= 1

    @property
    def at_work(self) -> bool:
        """Whether the present reads are a step's own."""
        return self._at_work > 0

    @property
    def is_open(self) -> bool:
        """Whether tables may be read without a check: within a step, or settled for `leaving`."""
        return self._at_work + self._leaving > 0

    # Tables.

    def guard(self, optimizer: PrivateOptimizer) -> None:
        """Guards the tables of a built optimizer, and the velocities of their rows."""
        several = [v for table in optimizer.tables.values() for v in (table.variable, table.state) if v is not None]
        for variable in several:
            if not any(variable is known for known in self._guarded):
                self._guarded.append(variable)
            guarded(variable).add(optimizer, self)
        if not getattr(optimizer, "releasable", True):
            self.withhold()
        if self._listeners:
            self._keep_weights(optimizer)

    def guard_possible_tables(self) -> None:
        """Guards every variable that may be a table, so that graphs compiled before the first batch have the check."""
        for layer in filter(may_be_table, layers_within(self.model)):
            for variable in own_weights(layer):
                guarded(variable).may_owe = True

    def withhold(self) -> None:
        """Withholds the rows of all tables (`withheld_rows.py`)."""
        for variable in self._guarded:
            if (places := withheld(variable)) is not None:
                places.withhold()

    def before_read(self, variable: keras.Variable, ids: tf.Tensor) -> None:
        """Settles rows of a table, for all optimizers that owe them noise, before a step reads them."""
        with ours():
            for optimizer in debts_of(variable):
                optimizer.before_read(variable, ids)

    # Settling.

    def settle(self) -> None:
        """Applies all noise that is owed to the tables, and calls the listeners of all models on these weights."""
        self.settle_all_models()
        listened = [release for release in self._on_these_weights() if release._listeners]
        with _ONE_WRITER if listened else contextlib.nullcontext():
            for release in listened:
                release.refuse_other_threads()
                with release.in_reach():
                    for listener in release._listeners.values():
                        listener.before_release()
                release._allow_steps()
        for variable in self._guarded:  # last: where a listener fails, rows stay out of reach of compiled functions
            guarded(variable).publish()

    def _on_these_weights(self) -> list[ReleaseGuard]:
        # This guard, and those of models that train some of the same weights and may be listened to.
        variables = [*self._guarded, *self.model.trainable_variables]
        found = {id(self): self}
        for debts in map(debts_of, variables):
            found |= {id(release): release for release in debts.releases} if isinstance(debts, Debts) else {}
        return list(found.values())

    def settle_all_models(self) -> None:
        """Settles all optimizers that reach these tables, directly or by a table that they share."""
        # Each rounds all rows to its own grid. Were the finest last, rows that owe it nothing would show by theirs.
        found: dict[int, PrivateOptimizer] = {}
        tables = list(self._guarded)
        for variable in tables:
            for release in guarded(variable).releases:
                release.refuse_other_threads()
            for optimizer in guarded(variable):
                if id(optimizer) not in found:
                    found[id(optimizer)] = optimizer
                    others = (table.variable for table in optimizer.tables.values())
                    tables += [each for each in others if not any(each is known for known in tables)]
        for optimizer in sorted(found.values(), key=lambda one: one.coarseness):
            optimizer.settle()

    def settle_outside_steps(self) -> None:
        """Settles, except within a step and while a graph is traced."""
        if not self.at_work and tf.executing_eagerly():
            self.settle()

    def listen(self, listener: Listener) -> None:
        """Has a listener act before every release from now on, as long as it is needed."""
        self._listeners[listener.place] = listener
        if self.model.optimizer.built:
            self._keep_weights(self.model.optimizer)
        self._allow_steps()

    def _keep_weights(self, optimizer: PrivateOptimizer) -> None:
        # Weights without pending noise are not settled before they are read; they leave after the listeners all the
        # same. An optimizer's numbers, such as that of its steps, are no weights.
        dense = optimizer.dense_optimizer
        several = [part.velocity for part in optimizer.dense.values()]
        several += [table.state for table in optimizer.tables.values()]
        several += [v for v in ([] if dense is None else dense.variables) if len(v.shape)]
        for variable in [*self.model.trainable_variables, *(each for each in several if each is not None)]:
            debts = guarded(variable)
            if not any(self is known for known in debts.releases):
                debts.releases.append(self)
            if withheld(variable) is None and not any(places.is_of(variable) for places in self._kept):
                self._kept.append(WithheldRows(variable))

    @contextlib.contextmanager
    def in_reach(self) -> Iterator[None]:
        """A block in which weights are where steps and listeners find them; afterwards only if they may leave."""
        self._reached += 1
        if self._kept_back:
            for places in self._kept:
                places.publish()
            self._kept_back = False
        try:
            yield
        finally:
            self._reached -= 1
            if self._listeners and not self._reached:
                self._keep_back()

    def _keep_back(self) -> None:
        # A compiled function that reads weights calls no listener: it finds none while a listener has yet to act.
        may_leave = False
        try:
            may_leave = all(listener.is_done for listener in self.listeners)
        finally:  # also where that cannot be known
            if not may_leave:
                self._kept_back = True
                for places in self._kept:
                    places.withhold()

    def _allow_steps(self) -> None:
        # In the graph of every step, also of one that was traced before there was a listener.
        if self._listeners:
            history = self.model.privacy_history
            history.allow_steps(False)  # stays so if a listener cannot tell whether it is needed
            history.allow_steps(bool(self._fitting) or not self.listeners)

    @property
    def listeners(self) -> list[Listener]:
        """The listeners that are needed."""
        return [each for each in self._listeners.values() if each.is_needed]

    @property
    def all_listeners(self) -> list[Listener]:
        """The listeners that are needed, of all models on these weights."""
        return [listener for release in self._on_these_weights() for listener in release.listeners]

    def refuse_steps_by_hand(self, in_fit: bool = False) -> None:
        """Refuses a step outside of `fit` if there are listeners: its weights may be read by ways that tell none."""
        self._allow_steps()
        listeners = self.all_listeners
        if listeners and not (in_fit and self._fitting):
            raise NotPrivate(
                f"A training of this model can be resumed from {listeners[0].place}, where every step must be "
                "written before its weights can be read. That is ensured in fit alone: train with fit, or remove the "
                "directory if the training is done."
            )


class Debts:
    """The optimizers that may owe noise to one table, and the models that they train."""

    def __init__(self, variable: keras.Variable):
        self._variable = variable
        self._optimizers: list[PrivateOptimizer] = []
        self.releases: list[ReleaseGuard] = []
        self.may_owe = False  # True also for a variable that a first batch may show to be a table

    def __iter__(self) -> Iterator[PrivateOptimizer]:
        return iter(self._optimizers)

    def add(self, optimizer: PrivateOptimizer, release: ReleaseGuard) -> None:
        """Adds an optimizer; steps of other models on the table are compiled anew, to settle for it too."""
        if not any(optimizer is known for known in self._optimizers):
            self._refuse_beside_others(optimizer, release)
            self._optimizers.append(optimizer)
            self.may_owe |= optimizer.pays_late
            if optimizer.pays_late and withheld(self._variable) is None:
                vars(self._variable)["withheld"] = WithheldRows(self._variable)
            for other in self.releases:
                other.model.compile_step_anew()
        if not any(release is known for known in self.releases):
            self.releases.append(release)

    def settle(self) -> None:
        """Applies all pending noise, and publishes the rows."""
        for release in self.releases:
            release.refuse_other_threads()
        for optimizer in sorted(self._optimizers, key=lambda one: one.coarseness):
            optimizer.settle()
        self.publish()

    def publish(self) -> None:
        """Puts the rows, which owe nothing, where every read finds them."""
        if (places := withheld(self._variable)) is not None:
            places.publish()

    def before_a_read(self) -> None:
        """Settles before an eager read of the table; in a graph, adds a check that fails with the reason."""
        for release in self.releases:
            release.refuse_other_threads()
        if any(release.is_open for release in self.releases):
            return
        if tf.executing_eagerly():
            for release in self.releases:
                release.settle()
            return
        known_here = isinstance(resource(self._variable), tf.Variable)  # a server guards its own tables
        if not self.may_owe or not known_here or not tf.compat.v1.get_default_graph().building_function:
            return
        if compiles_with_xla():
            raise RuntimeError(
                f"Table '{self._variable.path}' may owe noise, and XLA would drop the check of that from its read: "
                "compile the reading function with jit_compile=False."
            )
        demand_rows(self._variable, _UNSETTLED.format(self._variable.path))

    def _refuse_beside_others(self, optimizer: PrivateOptimizer, release: ReleaseGuard) -> None:
        # Decay also shrinks the noise of other optimizers, in another order if that comes late. The earlier optimizer
        # of the same model has been settled and owes nothing.
        others = any(release is not known for known in self.releases)
        regularized = self._variable.regularizer is not None
        if others and (regularized or any(o.recursion.weight_decay for o in (optimizer, *self._optimizers))):
            raise NotPrivate(
                f"Table '{self._variable.path}' is trained by several optimizers, and has a regularizer or one of them "
                "has weight_decay, for which the late noise of others is not that of DP-SGD: leave them out, or give "
                "each model a table of its own."
            )


_UNSETTLED = (
    "Table '{}' owes noise: a compiled function may read it only after model.settle(), or after fit has ended."
)


def may_be_table(layer: keras.layers.Layer) -> bool:
    """Whether the rule of a layer's kind reads weights by row."""
    rule = rule_for(layer)
    return rule is not None and type(rule).tables is not Rule.tables


def debts_of(variable: keras.Variable) -> Debts | tuple[()]:
    """The optimizers that may owe noise to a variable; none if it is not guarded."""
    return getattr(variable, "debts", ())


def guarded(variable: keras.Variable) -> Debts:
    """Guards a variable, which is then never read while it owes noise; returns its `Debts`."""
    # Keras reads its variables through one attribute, here a property that settles. The class of the object itself is
    # exchanged: layers and functions hold this object already, so that a wrapper would come too late.
    if not isinstance(debts_of(variable), Debts):
        vars(variable)["debts"] = Debts(variable)
        variable.__class__ = _guarded_class(type(variable))  # type: ignore[arg-type]
    return vars(variable)["debts"]


@functools.cache
def _guarded_class(kind: type) -> type:
    def read(variable: Any) -> Any:
        vars(variable)["debts"].before_a_read()
        return resource(variable)

    def as_unguarded(variable: Any, protocol: Any) -> Any:
        # Copies and pickles are ordinary variables with settled values.
        vars(variable)["debts"].before_a_read()
        state = {name: value for name, value in vars(variable).items() if name not in ("debts", "withheld")}
        return object.__new__, (kind,), state

    members = {
        RESOURCE_ATTRIBUTE: property(read, set_resource),
        "__reduce_ex__": as_unguarded,
        "__copy__": lambda variable: variable,  # a copy that shares the values would owe the same noise
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), members)


class _SettleAtEpochEnd(keras.callbacks.Callback):

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.settle()
        empty_metrics(self.model)


def empty_metrics(model: Any) -> None:
    """Sets a model's metrics, and those of its layers, to their first values."""
    # A layer may read its metric, and any part of the model be exported. A metric's own reset may keep something.
    for variable in metrics_variables(model):
        variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
    model.reset_metrics()


@contextlib.contextmanager
def metrics_emptied(model: Any) -> Iterator[None]:
    """A block after which the metrics of a private model hold nothing of what was computed in it."""
    try:
        yield
    finally:
        if model.is_private:
            empty_metrics(model)


def settling_ahead(callbacks: list[Any]) -> list[Any]:
    """The callbacks of a fit, with a settling one ahead of them if any of them may look at weights."""
    if all(type(c) in _LOGS_ONLY or getattr(c, "keeps_off_weights", False) for c in callbacks):
        return callbacks
    return [_SettleAtEpochEnd(), *callbacks]
