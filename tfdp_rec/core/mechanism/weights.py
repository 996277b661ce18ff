"""Private weights: one owner of the tables that a model trains, and one way out of it, `release()`.

A lazy mechanism owes noise to rows that no batch has read for a while. Until that is drawn nothing but a step reads
them. From the first step on

- their rows are *withheld* (`core/ground/withheld_rows.py`): the variable that layers and compiled functions hold is
  empty, whenever they were compiled;
- a read of the Keras variable raises, in one sentence that names the call; so does a graph that was compiled after the
  variable had its owner. Nothing settles by itself;
- `release()` draws all noise that is owed, and gives the rows back to their variables, till the next step takes them.

`fit` releases at its end, and at the ends of epochs if a callback may look; so do the model's own methods, such as
`predict` and `save` (`training/release_methods.py`).

Models that share a table share the owner, so that each settles what the others owe. Mechanisms whose every step is a
release, such as DPSGD, withhold nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import (
    RESOURCE_ATTRIBUTE,
    is_compiled_with_xla,
    layers_within,
    own_variables,
    resource,
    set_resource,
)
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import WithheldRows, find_withheld, require_rows
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.sensitivity.recorder import Read
from tfdp_rec.core.sensitivity.rules import Rule, rule_for

_OWNER = "private_weights"  # attribute of a variable, and of a model
_ONE_THREAD = threading.RLock()  # of the thread that trains privately
_ONE_RELEASE = threading.RLock()  # of the thread that releases: no training begins meanwhile
_TRAINED: list[tuple[int, Any]] = []  # threads, and the models that they train
_HERE = threading.local()  # models, a step of which this thread traces or runs, or a graph without checks
_WITHHELD = (
    "Table '{}' owes noise, and its rows are withheld: call settle() of the model that trains it, or read it after "
    "fit has ended, or by the model's own methods."
)


class PrivateWeights:
    """The tables of a model, and of all models that share one of them."""

    def __init__(self, model: Any):
        self._models: list[Any] = [model]
        self._trained: list[tuple[PrivateOptimizer, Any]] = []  # the optimizers, each with its model
        self._variables: list[keras.Variable] = []  # tables, and the velocities of their rows

    # Owning.

    def add_possible_tables(self, model: Any, guard: bool = True) -> PrivateWeights:
        """Owns the weights that may turn out to be tables; with a guard, graphs compiled before the first batch say so.

        Frozen ones too: another model may train them, and what leaves with this one is to be settled by both.
        """
        several = (own_variables(layer) for layer in filter(may_be_table, layers_within(model)))
        return self._own(itertools.chain.from_iterable(several), guard)

    def add(self, optimizer: PrivateOptimizer, model: Any) -> None:
        """Owns the tables of a built optimizer; the steps of other models are compiled anew, to settle for it too."""
        several = [v for table in optimizer.tables.values() for v in (table.variable, table.state) if v is not None]
        owner = self.add_possible_tables(model, optimizer.pays_late)._own(several, optimizer.pays_late)
        if any(optimizer is known for known, _ in owner._trained):
            return
        owner._trained.append((optimizer, model))
        for variable in several:
            if optimizer.pays_late and find_withheld(variable) is None:
                vars(variable)["withheld"] = WithheldRows(variable)
            if (places := find_withheld(variable)) is not None:
                places.admit(optimizer)
        for other in owner._models:
            if other is not model:
                other.compile_step_anew()

    def _own(self, variables: Iterable[keras.Variable], guard: bool) -> PrivateWeights:
        # The owner of the variables, and of all that shares one with them.
        owner = self
        for variable in variables:
            found = vars(variable).setdefault(_OWNER, owner)
            if found is owner and not any(variable is known for known in owner._variables):
                owner._variables.append(variable)
            if found is not owner:
                owner = found._absorb(owner)
            if guard and not isinstance(variable, _Guarded):
                variable.__class__ = _guard_class(type(variable))  # type: ignore[arg-type, assignment]
        return owner

    def _absorb(self, other: PrivateWeights) -> PrivateWeights:
        self._models += other._models
        self._trained += other._trained
        self._variables += other._variables
        for each in (*other._models, *other._variables):
            vars(each)[_OWNER] = self
        return self

    def find_debtors(self, variable: keras.Variable) -> list[tuple[PrivateOptimizer, Any]]:
        """The optimizers that may owe noise to a table, each with its model."""
        # By identity: two models may have tables of one path.
        found = ((each.tables.get(variable.path), (each, model)) for each, model in self._trained)
        return [pair for table, pair in found if table is not None and table.variable is variable]

    # Steps.

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """A block for private steps, which one thread of a process makes at a time."""
        # Whether a draw was used, how many steps are allowed and which rows owe noise is read first and written later
        # in a step: two steps at once would both find the draw unused, and the last step of a budget still to be made.
        models = list(self._models)
        with _ONE_RELEASE:
            if not _ONE_THREAD.acquire(blocking=False):
                raise NotPrivate(
                    "A private fit is going on in another thread, and steps are checked and counted one after the "
                    "other: train in one thread, or in processes with data and ledgers of their own."
                )
            _TRAINED.extend((threading.get_ident(), model) for model in models)
        try:
            yield
        finally:
            del _TRAINED[-len(models) :]
            _ONE_THREAD.release()

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A block for a step's own work, whose reads are not checked: it settles each row before it reads it."""
        with self._enter("steps"):
            yield

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Releases, and traces without checks in the block: the graphs leave training for good."""
        self.release_outside_steps()
        with self.unchecked():
            yield

    @contextlib.contextmanager
    def unchecked(self) -> Iterator[None]:
        """A block that traces without checks of reads: for graphs that never run."""
        with self._enter("unchecked"):
            yield

    @contextlib.contextmanager
    def _enter(self, kind: str) -> Iterator[None]:
        several = vars(_HERE).setdefault(kind, [])
        several.append(self._models)
        try:
            yield
        finally:
            several.pop()

    def _is_within(self, kind: str) -> bool:
        several = (model for models in vars(_HERE).get(kind, ()) for model in models)
        return any(model is own for model in several for own in self._models)

    @property
    def is_in_step(self) -> bool:
        """Whether the present reads are a step's own."""
        return self._is_within("steps")

    def settle_before_reads(self, reads: Sequence[Read]) -> None:
        """Settles rows of tables, for all optimizers that owe them noise, before a step reads them."""
        for debts, rows in self._find_debts(reads):
            debts.settle_before_reads(rows)

    def owe_noise(self, reads: Sequence[Read]) -> list[tf.Tensor]:
        """Whether rows of tables owe noise, by the optimizers that may owe them some."""
        return [debts.owe_noise(rows) for debts, rows in self._find_debts(reads)]

    def _find_debts(self, reads: Sequence[Read]) -> Iterator[tuple[Any, dict[str, tf.Tensor]]]:
        """What optimizers' rows owe, and the rows of their tables among some reads."""
        for optimizer in (optimizer for optimizer, _ in self._trained if optimizer.debts is not None):
            rows: dict[str, list[tf.Tensor]] = {}
            for variable, ids in reads:
                table = optimizer.tables.get(variable.path)
                if table is not None and table.variable is variable:  # two models may have tables of one path
                    rows.setdefault(table.path, []).append(tf.reshape(tf.cast(ids, tf.int64), [-1]))
            if rows:
                yield optimizer.debts, {path: tf.concat(parts, axis=0) for path, parts in rows.items()}

    # The way out.

    def release(self) -> None:
        """Draws all noise that is owed, and lets the weights out; quick if there is none."""
        if not tf.executing_eagerly():
            raise RuntimeError("settle() is for eager code; inside a graph it would be built, not run.")
        with _ONE_RELEASE:
            self._refuse_other_threads()
            kept = [(optimizer.keeper, optimizer) for optimizer, _ in self._trained if optimizer.keeper is not None]
            try:
                self.settle()
                for keeper, optimizer in kept:
                    keeper.save_before_release(optimizer)
            except BaseException:
                for keeper, optimizer in kept:
                    keeper.erase_unkept(optimizer)
                raise
            for variable in self._variables:  # last: where a checkpoint cannot be written, rows stay where they are
                if (places := find_withheld(variable)) is not None:
                    places.publish()
        for optimizer, _ in self._trained:
            if optimizer.debts is not None:
                optimizer.debts.bound.warn_of_steps_left_out()

    def release_outside_steps(self) -> None:
        """Releases, except within a step and while a graph is traced."""
        if tf.executing_eagerly() and not self.is_in_step:
            self.release()

    def settle(self) -> None:
        """Draws all noise that is owed to the tables; the rows stay where they are."""
        self._refuse_other_threads()
        # Each rounds all rows to its own grid. Were the finest last, rows that owe it nothing would show by theirs.
        for optimizer in sorted((optimizer for optimizer, _ in self._trained), key=_find_coarseness):
            optimizer.settle()

    def _refuse_other_threads(self) -> None:
        others = (model for thread, model in _TRAINED if thread != threading.get_ident())
        if any(model is own for model in others for own in self._models):
            raise RuntimeError("Another thread trains the model: release its weights when fit has ended.")

    def check_read(self, variable: keras.Variable) -> None:
        """Raises for an eager read of withheld rows; in a graph, adds a check that fails with the reason."""
        if self._is_within("unchecked") or (self.is_in_step and tf.executing_eagerly()):
            return
        if tf.executing_eagerly():
            self._refuse_other_threads()
            if (places := find_withheld(variable)) is not None and places.is_withheld:
                raise NotPrivate(_WITHHELD.format(variable.path))
        # A server guards its own tables. XLA drops checks, and finds no rows.
        elif isinstance(resource(variable), tf.Variable) and _builds_function() and not is_compiled_with_xla():
            require_rows(variable, _WITHHELD.format(variable.path))


def refuse_unlike_others(optimizer: PrivateOptimizer, model: Any, tables: Iterable[keras.Variable]) -> None:
    """Refuses an optimizer, before it is built, for tables that others train, if their noise would not be right."""
    # Decay also shrinks the noise of other optimizers, in another order if that comes late. The bound that weights
    # have where noise comes late binds no other mechanism. What a model was compiled with before has been settled.
    for table in tables:
        owner = vars(table).get(_OWNER)
        debtors = owner.find_debtors(table) if owner else []
        others = [each for each, of in debtors if of is not model and of.optimizer is each]
        if any(each.pays_late != optimizer.pays_late for each in others):
            raise NotPrivate(
                f"Table '{table.path}' is trained by {type(others[0]).__name__} and by {type(optimizer).__name__}, of "
                "which one adds noise late and one at once: train it by one of them, or give each model a table of its "
                "own."
            )
        decays = any(each.recursion.weight_decay for each in (optimizer, *others))
        if others and (decays or table.regularizer is not None):
            raise NotPrivate(
                f"Table '{table.path}' is trained by several optimizers, and has a regularizer or one of them has "
                "weight_decay, for which the late noise of others is not that of DP-SGD: leave them out, or give "
                "each model a table of its own."
            )


def owners_of(model: Any) -> list[PrivateWeights]:
    """The owners of a model's weights."""
    several = [model.private_weights, *(vars(variable).get(_OWNER) for variable in model.variables)]
    return list({id(owner): owner for owner in several if owner is not None}.values())


def may_be_table(layer: keras.layers.Layer) -> bool:
    """Whether the rule of a layer's kind reads weights by row."""
    rule = rule_for(layer)
    return rule is not None and type(rule).tables is not Rule.tables


def _find_coarseness(optimizer: PrivateOptimizer) -> float:
    """How coarse the grid is that settling rounds all rows to."""
    return 0.0 if optimizer.debts is None else float(optimizer.debts.marks.largest.numpy())


def _builds_function() -> bool:
    return tf.compat.v1.get_default_graph().building_function


class _Guarded:
    """Mark of the classes of variables that check each read."""


@functools.cache
def _guard_class(kind: type) -> type:
    # Keras reads its variables through one attribute, here a property that checks. The class of the object itself is
    # exchanged: layers and functions hold this object already, so that a wrapper would come too late.
    def read(variable: Any) -> Any:
        vars(variable)[_OWNER].check_read(variable)
        return resource(variable)

    def as_unguarded(variable: Any, protocol: Any) -> Any:
        # Copies and pickles are ordinary variables with settled values.
        vars(variable)[_OWNER].check_read(variable)
        state = {name: value for name, value in vars(variable).items() if name not in (_OWNER, "withheld")}
        return object.__new__, (kind,), state

    members = {
        RESOURCE_ATTRIBUTE: property(read, set_resource),
        "__reduce_ex__": as_unguarded,
        "__copy__": lambda variable: variable,  # a copy that shares the values would owe the same noise
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind, _Guarded), members)
