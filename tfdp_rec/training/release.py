"""Release: how weights leave training, settled first.

A mechanism may owe noise to rows that no batch has read for a while. Whatever lets weights, or numbers computed from
them, out of training settles that noise before. Who sees to it, from the outside in:

- the model's own methods (`release_methods.py`) settle before they open;
- callbacks at the end of an epoch find everything settled (`settle_for`);
- every table is *guarded*, and so is its rows' momentum: an eager read of it, by whatever way, settles first;
- rows that may owe noise are *withheld* (`withheld_rows.py`): a graph that reads a table, whenever it was compiled, finds
  no rows there. One that was compiled after the table was guarded says so in words.

What owes a table is kept with the table (`Debts`), not with a model: two models that share a table, or a model that got
another optimizer, do not lose each other's debts. `Release` is a model's own part: what it is in the middle of, and who
wants to know when weights are about to leave.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping.influence import ours
from tfdp_rec.clipping.rules import Rule, rule_for
from tfdp_rec.keras_internals import (
    RESOURCE_ATTRIBUTE,
    compiles_with_xla,
    layers_within,
    own_weights,
    resource,
    set_resource,
)
from tfdp_rec.optimizers import PrivateOptimizer
from tfdp_rec.optimizers.delayed import DelayedRMSprop
from tfdp_rec.refused import NotPrivate
from tfdp_rec.withheld_rows import WithheldRows, demand_rows, withheld

_LOGS_ONLY = (
    keras.callbacks.BackupAndRestore,  # these two save through the model's own methods
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TerminateOnNaN,
)


class Release:
    """One model's way out of training."""

    def __init__(self, model: Any):
        self.model = model
        self._guarded: list[keras.Variable] = []  # tables, and the velocities of their rows
        self._at_work = self._leaving = 0
        self._listeners: tuple[Callable[[], None], ...] = ()

    # What the model is in the middle of.

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """For the length of a step's own work, whose reads are not guarded: it pays row by row before each."""
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Settles; what is traced inside is for good, and carries no check along."""
        self.settle_outside_steps()
        self._leaving += 1
        try:
            yield
        finally:
            self._leaving -= 1

    @property
    def at_work(self) -> bool:
        """Whether reads are the step's own."""
        return self._at_work > 0

    @property
    def is_open(self) -> bool:
        """Whether tables may be read without a check: by the step, or settled already for what leaves for good."""
        return self._at_work + self._leaving > 0

    # Tables.

    def guard(self, optimizer: PrivateOptimizer) -> None:
        """From now on nothing reads a table of `optimizer` while it owes noise."""
        several = [v for table in optimizer.tables.values() for v in (table.variable, table.state) if v is not None]
        for variable in several:
            if not any(variable is known for known in self._guarded):
                self._guarded.append(variable)
            guarded(variable).add(optimizer, self)
        if not getattr(optimizer, "releasable", True):
            self.withhold()

    def guard_possible_tables(self) -> None:
        """Guards the variables that may turn out to be tables, so that graphs compiled from now on have the check."""
        for layer in layers_within(self.model):
            rule = rule_for(layer)
            if rule is not None and type(rule).tables is not Rule.tables:
                for variable in own_weights(layer):
                    guarded(variable).may_owe = True

    def withhold(self) -> None:
        """Keeps the rows of all tables from whatever is not a step; see `withheld_rows.py`."""
        for variable in self._guarded:
            if (places := withheld(variable)) is not None:
                places.withhold()

    def before_read(self, variable: keras.Variable, ids: tf.Tensor) -> None:
        """Pays what rows of a table owe, to whomever, before a step reads them."""
        with ours():
            for optimizer in debts_of(variable):
                optimizer.before_read(variable, ids)

    # Settling.

    def settle(self) -> None:
        """Applies all noise that is owed to the model's tables, and tells the listeners."""
        for variable in self._guarded:
            guarded(variable).settle()
        for listener in self._listeners:
            listener()

    def settle_outside_steps(self) -> None:
        """Settles unless this is a step's own work, or the building of a graph."""
        if not self.at_work and tf.executing_eagerly():
            self.settle()

    def listen(self, listener: Callable[[], None]) -> None:
        """Has `listener` called whenever weights are about to leave, pending noise applied."""
        if listener not in self._listeners:
            self._listeners = (*self._listeners, listener)

    def forget_listeners(self) -> None:
        """The fit that they were interested in is over."""
        self._listeners = ()


class Debts:
    """The optimizers that may owe noise to one table, and the models that they train.

    Attributes:
        may_owe: whether there are such optimizers, or may be once a batch was seen.
    """

    def __init__(self, variable: keras.Variable):
        self._variable = variable
        self._optimizers: list[PrivateOptimizer] = []
        self._releases: list[Release] = []
        self.may_owe = False

    def __iter__(self) -> Iterator[PrivateOptimizer]:
        return iter(self._optimizers)

    def add(self, optimizer: PrivateOptimizer, release: Release) -> None:
        """Enters an optimizer; steps that others compiled without knowing of it are compiled anew."""
        if not any(optimizer is known for known in self._optimizers):
            self._refuse_beside_others(optimizer, release)
            self._optimizers.append(optimizer)
            self.may_owe |= optimizer.pays_late
            if optimizer.pays_late and withheld(self._variable) is None:
                vars(self._variable)["withheld"] = WithheldRows(self._variable)
            for other in self._releases:
                other.model.compile_step_anew()
        if not any(release is known for known in self._releases):
            self._releases.append(release)

    def settle(self) -> None:
        """Applies what is owed, and gives the rows back to all that read the table."""
        for optimizer in self._optimizers:
            optimizer.settle()
        if (places := withheld(self._variable)) is not None:
            places.publish()

    def before_a_read(self) -> None:
        """Settles ahead of an eager read of the table; in a graph, adds the check that says why there are no rows."""
        if any(release.is_open for release in self._releases):
            return
        if tf.executing_eagerly():
            for release in self._releases:
                release.settle()
            self.settle()
            return
        known_here = isinstance(resource(self._variable), tf.Variable)  # a server's table is guarded there
        if not self.may_owe or not known_here or not tf.compat.v1.get_default_graph().building_function:
            return
        if compiles_with_xla():
            raise RuntimeError(
                f"Table '{self._variable.path}' may owe noise, and XLA would compile a read of it without the check "
                "that it does not: compile what reads it with jit_compile=False."
            )
        demand_rows(self._variable, _UNSETTLED.format(self._variable.path))

    def _refuse_beside_others(self, optimizer: PrivateOptimizer, release: Release) -> None:
        """Decay acts on the noise of others as well, in another order when lazy; a delayed rule looks at all of it.

        A model that got another optimizer settled the one before: that one owes nothing any more.
        """
        minds = lambda o: o.recursion.weight_decay or isinstance(o.table_rule, DelayedRMSprop)  # noqa: E731
        others = any(release is not known for known in self._releases)
        regularized = self._variable.regularizer is not None
        if others and (regularized or any(map(minds, (optimizer, *self._optimizers)))):
            raise NotPrivate(
                f"Table '{self._variable.path}' is trained by several optimizers, and has a regularizer or one of them "
                "has weight_decay or a delayed table_rule, for which the late noise of others is not that of DP-SGD: "
                "leave them out, or give each model a table of its own."
            )


_UNSETTLED = (
    "Table '{}' owes noise: what was compiled to read it must wait until model.settle() was called, or fit has ended."
)


def debts_of(variable: keras.Variable) -> Debts | tuple[()]:
    """Who may owe noise to a variable; nobody, if it is not guarded."""
    return getattr(variable, "debts", ())


def guarded(variable: keras.Variable) -> Debts:
    """Makes a variable one that is never read while it owes noise, and says who owes it.

    Keras reads its variables through one attribute, which on a guarded variable is a property. The class of the live
    object is exchanged for that, since everybody who will read it holds this object already.
    """
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
        """Copies and pickles are ordinary variables with settled values."""
        vars(variable)["debts"].before_a_read()
        state = {name: value for name, value in vars(variable).items() if name not in ("debts", "withheld")}
        return object.__new__, (kind,), state

    members = {
        RESOURCE_ATTRIBUTE: property(read, set_resource),
        "__reduce_ex__": as_unguarded,
        "__copy__": lambda variable: variable,  # one that shares the values owes what this one owes
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), members)


class _SettleAtEpochEnd(keras.callbacks.Callback):
    """Goes ahead of callbacks that may look at weights."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.settle()


def settle_for(callbacks: Any) -> Any:
    """The callbacks of a fit, with a settling one ahead of them if any of them may look at weights."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise TypeError("Pass callbacks to fit as a list of callbacks: pending noise must be settled ahead of them.")
    several = list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
    if all(type(c) in _LOGS_ONLY or getattr(c, "keeps_off_weights", False) for c in several):
        return several
    return [_SettleAtEpochEnd(), *several]
