"""Counts the steps of an optimizer in the graph of each step, before the step writes anything.

    step -> may one more be made?  -> counted, by source of its batch -> noise, update

An interrupted step was counted. Each count is an entry (`entries.py`) with an id and with the event of its steps, which
is fixed with the optimizer's settings. The entries are saved with the model. Under a ledger an entry has the id of its
payment: it is a receipt.

*The gate.* A step takes one of the meter's steps that are left, and is refused where none is. Without a budget there is
no limit; an `Allowance` (allowance.py) opens the gate for as many steps as are priced and paid for.

Keras restores an optimizer's `iterations` in more ways than this package knows. They are a check: if they exceed the
steps that entries describe, every accountant refuses to give an ε.

Models share layers. A variable remembers the meters whose steps have trained it:

    spent(model) = own entries ∪ spent(m) for every meter m that trained one of the model's variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from dp_accounting import DpEvent, NonPrivateDpEvent, NoOpDpEvent

from tfdp_rec.core.claim.entries import Entries, Entry, new_id
from tfdp_rec.core.claim.events import PlannedDpEvent
from tfdp_rec.core.claim.sampling_proof import Source
from tfdp_rec.core.ground.graph_checks import depend_on, require_all
from tfdp_rec.core.ground.refused import NotPrivate

_NO_LIMIT = 2**62
_KINDS = 4  # counters made in advance, enough for most models: a variable made during tracing has it done twice
_TRAINED_BY = "privacy_histories"  # attribute of a variable: the meters whose steps have trained it
_KNOWN_BY = "privacy_readers"  # attribute of a variable: the meters of all models that have it, frozen or not

SPENT = "The privacy budget is spent"
_NO_MORE = (
    f"Refused batch: {SPENT}: one more step would exceed what PrivacyBudget or the optimizer's plan allows. Continue "
    "with a PrivacyBudget of a larger target, or compile with more noise.\n"
)
_OTHER = (
    "Refused batch: the price of this step is not known. Either the model was compiled with another optimizer after "
    "this step was traced, or a budget has priced the steps on the batches of one sampling, and this is none of them. "
    "Make it after that fit, with the model as it is compiled now, under its own budget.\n"
)
_BY_HAND = (
    "Refused batch: a plan of correlated noise is kept in training checkpoints, so that each state must be written "
    "before its weights can be read, which is ensured in fit alone: train with fit.\n"
)
_UNPROVEN = (
    "Refused batch: no sampling drew it, as far as is proved, and the optimizer's plan pays for batches of its "
    "sampling alone. Train on plan.batches(fetch); after make_private call private.fit()."
)


class Meter:
    """Entries of the steps of one optimizer; of loaded weights alone, for a model that is not compiled."""

    def __init__(self, optimizer: Any = None):
        self.followed = False  # whether an accountant follows this meter, or the user was warned that none does
        self.version = 0  # number of changes, other than steps, of what was spent
        self.open_by_plan: Callable[[], None] | None = None  # opens the gate where no fit keeps a budget
        self._optimizer = optimizer
        self._closed = Entries()
        self._counters = dict[Any, Counter]()
        self._weights: list[keras.Variable] = []
        self._earlier = list[Meter]()  # of the optimizers that the model was compiled with before
        self._steps_before: int | None = 0  # entries' steps that are not in `iterations`; None after a restore
        self._left, self._allowed = _number(_NO_LIMIT), _number(1)
        self._priced: tuple[str, str] | None = None  # the sampling whose batches the gate is open for, and their id
        self.is_kept = self._is_replaced = False  # whether a fit keeps a budget; whether the model has a new optimizer
        self._spare = [_variables() for _ in range(_KINDS)]

    # In the graph of a step.

    def count(self, source: Source) -> list[Any]:
        """Operations that count a step, which must wait for them."""
        if self.open_by_plan is not None and source.sampling is None:
            raise NotPrivate(_UNPROVEN)
        counter = self._counter(source)
        with tf.control_dependencies(require_all((self._allowed > 0, _BY_HAND), (counter.allowed > 0, _OTHER))):
            taken = self._left.assign_sub(1)
        # Taken before it is compared: of two threads at the last step at most one finds that it is within.
        with tf.control_dependencies([taken]):
            gate = require_all((self._left.read_value() >= 0, _NO_MORE))
        # The increment is computed from the gate: without the gate there is no count, whatever rewrites the graph.
        with tf.control_dependencies(gate):
            return [counter.steps.assign_add(depend_on(tf.constant(1, tf.int64), gate))]

    def count_ordinary(self, optimizer: Any, id: str) -> list[Any]:
        """Operations that count a step of an optimizer that is not private, on weights that were trained privately."""
        if id not in self._counters:
            self._counters[id] = Counter(NoOpDpEvent, self._variables(), label=type(optimizer).__name__, ordinary=True)
            self._counters[id].id = id
            self.note_change()
        return [self._counters[id].steps.assign_add(1)]

    def _counter(self, source: Source) -> Counter:
        void = void_of(self._optimizer, source)
        name = source.sampling.name if source.sampling else None
        key = (name, void)
        if key not in self._counters:
            state = source.sampling.get_state() if source.sampling else None
            with tf.init_scope():
                counter = Counter(self._optimizer.dp_event, self._variables(), state, name, void)
                self._counters[key] = counter
                self._begin(counter)
                self._admit(counter)
            self.note_change()
        return self._counters[key]

    def _begin(self, counter: Counter) -> None:
        # A plan of noise has one entry, under its own id, which goes on where an earlier process has left it.
        counter.begin()
        taken = any(counter.plan == each.id for each in self._counters.values() if each is not counter)
        if counter.plan and counter.name and not counter.void and not taken:
            counter.go_on(counter.plan, self._closed)

    def _variables(self) -> list[tf.Variable]:
        return self._spare.pop() if self._spare else _variables()

    # Between steps.

    def prepare(self) -> None:
        """Makes variables ahead of a fit, no step of which may make any."""
        self._spare += [_variables() for _ in range(_KINDS - len(self._spare))]

    def add(self, source: Source, steps: int, id: str = "") -> None:
        """Counts steps that were made elsewhere, such as on the workers of a cluster, under the id of their payment."""
        counter = self._counter(source)
        self._count_under(counter, id)
        counter.steps.assign_add(steps)
        self.note_change()

    def add_entry(self, entry: Entry, id: str | None = None) -> None:
        """Adds steps that were counted elsewhere."""
        self._closed.add(entry, id)
        self.note_change()

    def merge(self, entries: Entries) -> None:
        """Adds the entries of a saved model or checkpoint, ahead of what else is restored from it."""
        self._closed.merge(entries)
        self.note_restore()

    def note_restore(self) -> None:
        """Notes that `iterations` may have been restored, to any number."""
        self._steps_before = None
        self.note_change()

    def note_change(self) -> None:
        """Has those who priced these entries, or what other models trained of these weights, price them anew."""
        for meter in (*self.related_meters, *self._readers):
            meter.version += 1

    @contextlib.contextmanager
    def change_plan(self) -> Iterator[None]:
        """A context in which planned noise begins anew or goes on; steps made before keep their event."""
        own = [counter for counter in self._counters.values() if not counter.ordinary]
        for counter in own:
            counter.close(self._closed)
        self.stop()
        try:
            yield
        finally:
            for counter in own:
                self._begin(counter)
            self.note_restore()
            if self.open_by_plan is not None:
                self.open_by_plan()

    # Totals.

    def snapshot(self) -> Entries:
        """The entries of all steps that trained the model's weights, as they stand now."""
        found = Entries()
        for meter in reversed(self.related_meters):  # the present optimizer's steps come last
            meter._write(found)
        return found

    def _write(self, found: Entries) -> None:
        found.merge(self._closed)
        for counter in self._counters.values():
            counter.write(found)
        # An optimizer holds what it was made of, also before its first step: a saved model has it.
        for use in getattr(self._optimizer, "events_before_training", list)():
            found.add(use.entry, use.id)

    @property
    def undescribed_steps(self) -> int:
        """Number of steps in the `iterations` of optimizers that no entry describes."""
        return sum(meter._count_undescribed() for meter in self.related_meters)

    def _count_undescribed(self) -> int:
        if self._optimizer is None:
            return 0
        own, made = Entries(), int(self._optimizer.iterations.numpy())
        self._write(own)
        if self._steps_before is None:  # of other optimizers, or made before `iterations` was reset
            self._steps_before = max(0, own.steps - made)
        return max(0, made - (own.steps - self._steps_before))

    # Meters that belong together.

    def attach(self, variables: Iterable[keras.Variable]) -> None:
        """Notes the variables that the steps write: each model with one of them has spent these steps."""
        variables = list(variables)
        for variable in variables:
            if not any(self is known for known in meters_of(variable)):
                vars(variable).setdefault(_TRAINED_BY, []).append(self)
        self.add_weights(variables)
        if any(meter.is_kept for meter in (*self.related_meters, *self._readers) if meter is not self):
            self._left.assign(0)  # a budget is kept for these weights: no step without it
        self.note_change()

    def add_weights(self, variables: Iterable[keras.Variable]) -> None:
        """Adds weights of the model, also frozen ones: other models may train them."""
        known = {id(variable) for variable in self._weights}
        if new := [variable for variable in variables if id(variable) not in known]:
            self._weights += new
            for variable in new:
                vars(variable).setdefault(_KNOWN_BY, []).append(self)
            self.version += 1

    @property
    def _readers(self) -> list[Meter]:
        # The meters of all models that have one of these weights, and so what is spent on it.
        return [each for variable in self._weights for each in vars(variable).get(_KNOWN_BY, ())]

    @property
    def related_meters(self) -> list[Meter]:
        """This meter, those before it, and those of all models that trained the same variables."""
        found, ahead = dict[int, Meter](), [self]
        while ahead:
            meter = ahead.pop()
            if id(meter) not in found:
                found[id(meter)] = meter
                ahead += meter._earlier
                ahead += [each for variable in meter._weights for each in meters_of(variable)]
        return list(found.values())

    def replace(self, earlier: Meter | None) -> None:
        """Takes the place of the earlier optimizer's meter, whose steps are told here too; further ones are refused."""
        if earlier is not None and earlier is not self:
            self._earlier += [] if any(earlier is known for known in self._earlier) else [earlier]
            self.followed |= earlier.followed
            earlier._close(self._closed)
        self._mark_replaced(False)
        self.note_change()

    def _close(self, entries: Entries) -> None:
        self._mark_replaced(True)
        if lost := self._count_undescribed():  # the optimizer goes, and with it the only trace of these steps
            label = f"{lost} steps of {type(self._optimizer).__name__} that its history does not describe"
            entries.add(Entry(NonPrivateDpEvent(), 1, label=label))
            self._steps_before = (self._steps_before or 0) - lost

    def _mark_replaced(self, is_replaced: bool) -> None:
        self._is_replaced = is_replaced
        for counter in self._counters.values():
            self._admit(counter)

    # The gate.

    def allow_steps(self, allowed: bool) -> None:
        """Whether a step may be made now; False refuses the steps of graphs that were traced before, too."""
        with tf.init_scope():  # not in the graph of a step, which would then allow itself
            self._allowed.assign(int(allowed))

    @property
    def made(self) -> int:
        """Number of steps that were counted in this process."""
        return sum(int(counter.steps.numpy()) for counter in self._counters.values() if not counter.ordinary)

    def id_of(self, sampling: str) -> str:
        """Id under which the next steps on batches of a sampling are counted; empty if there is none yet."""
        counter, (name, id) = self._counters.get((sampling, "")), self._priced or ("", "")
        return counter.id if counter is not None else id if name == sampling else ""

    @property
    def left(self) -> int:
        """Number of steps that the gate is open for."""
        return max(0, int(self._left.numpy()))

    def open(self, steps: int, sampling: str, id: str = "", in_fit: bool = False) -> None:
        """Opens the gate for so many steps on batches of a sampling, counted under the id of their payment."""
        # A fit keeps its budget until `lift`: till then the gate of all other meters of these weights is closed.
        for meter in self.related_meters if in_fit else ():
            meter._left.assign(0)
        self.is_kept, self._priced = in_fit, (sampling, id)
        for counter in self._counters.values():
            self._admit(counter)
        self._left.assign(steps)

    def lift(self) -> None:
        """Ends what `open` began: each meter is open as its optimizer's plan has it, or without a limit."""
        self.is_kept = False
        lifted = [meter for meter in self.related_meters if not meter.is_kept]  # not one whose own fit goes on
        for meter in lifted:
            meter._priced = None
            for counter in meter._counters.values():
                meter._admit(counter)
            meter._left.assign(_NO_LIMIT if meter.open_by_plan is None else 0)
        self.note_change()
        for meter in lifted:
            if meter.open_by_plan is not None:
                meter.open_by_plan()

    def stop(self) -> None:
        """Closes the gate until the next step is priced, if it was opened for a number of steps."""
        if self._priced is not None:
            self._left.assign(0)
            self.version += 1

    def _admit(self, counter: Counter) -> None:
        # Under a budget, steps on batches of its sampling alone, and none without a guarantee.
        name, id = self._priced or (counter.name, "")
        priced = not counter.ordinary and counter.name == name and not (self._priced and counter.void)
        if priced:
            self._count_under(counter, id)
        counter.allowed.assign(int(priced and not self._is_replaced))

    def _count_under(self, counter: Counter, id: str) -> None:
        # One counter at a time counts under an id: of two, the larger number alone would be told.
        if id and id != counter.id:
            for each in self._counters.values():
                if each is counter or each.id == id:
                    each.close(self._closed)
            counter.go_on(id, self._closed)


class Counter:
    """An entry that still grows."""

    # `variables` hold the number of steps, and whether a step is allowed; `name` is that of the sampling, and None if
    # none draws the batches.

    def __init__(
        self, event: Callable[[], DpEvent], variables: list[tf.Variable], sampling: Any = None,
        name: str | None = None, void: str = "", label: str = "", ordinary: bool = False,
    ):  # fmt: skip
        self.steps, self.allowed = variables
        self.name, self.void, self.ordinary = name, void, ordinary
        self._event, self._made = event, Entry(event(), 0, sampling, void, label, ordinary)
        self.id, self._written = new_id(), 0

    @property
    def plan(self) -> str:
        """Id of the plan of noise that the steps are of; empty if there is none."""
        return self._made.event.plan if isinstance(self._made.event, PlannedDpEvent) else ""

    def begin(self) -> None:
        """Begins an entry of the present event."""
        self._made = dataclasses.replace(self._made, event=self._event())

    def go_on(self, id: str, entries: Entries) -> None:
        """Goes on with the entry of an id, if it is none yet or of steps as these."""
        before = dict(entries.items()).get(id)
        if before is None or dataclasses.replace(before, steps=0) == self._made:
            self.id, self._written = id, self._written - entries.steps_of(id)

    def write(self, entries: Entries) -> None:
        """Adds the present entry."""
        if steps := int(self.steps.numpy()) - self._written:
            entries.add(dataclasses.replace(self._made, steps=steps), self.id)

    def close(self, entries: Entries) -> None:
        """Ends the entry."""
        self.write(entries)
        self._written, self.id = int(self.steps.numpy()), new_id()


def meters_of(variable: keras.Variable) -> list[Meter]:
    """The meters whose steps have trained a variable."""
    return vars(variable).get(_TRAINED_BY, [])


def _number(value: int) -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(value, dtype=tf.int64, trainable=False)


def _variables() -> list[tf.Variable]:
    return [_number(0), _number(1)]


def void_of(optimizer: Any, source: Source) -> str:
    """Reason why a step of an optimizer on a batch has no guarantee; empty if it has one."""
    reasons = []
    if source.sampling is None:
        reasons.append("no sampling drew the batches, as far as is proved (train on batches of accountant.sampling)")
    if source.seeded:
        reasons.append("the batches were drawn with a seed (leave out seed= in sampling.batches)")
    noise = getattr(optimizer, "noise", None)
    if noise is not None and not vars(type(noise)).get("secret", False):
        reasons.append(f"the noise came from {type(noise).__name__}, which can be computed again (leave out noise=)")
    return " and ".join(reasons)
