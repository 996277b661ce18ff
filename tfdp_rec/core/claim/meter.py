"""Counts the steps of a model in the graph of each step, before the step writes anything.

    step -> may one more be made?  -> counted, by optimizer and by source of its batch -> noise, update

An interrupted step was counted. Each count is an entry (`entries.py`) with an id and with the event of its steps, which
is fixed with the optimizer's settings. The entries are saved with the model. Under a ledger an entry has the id of its
payment: it is a receipt.

Keras restores an optimizer's `iterations` in more ways than this package knows. They are a check: if they exceed the
steps that entries describe, every accountant refuses to give an ε.

Models share layers. A variable remembers the meters whose steps have trained it:

    spent(model) = own entries ∪ spent(m) for every meter m that trained one of the model's variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from dp_accounting import DpEvent, NonPrivateDpEvent, NoOpDpEvent

from tfdp_rec.core.claim.entries import Changes, Entries, Entry, new_id
from tfdp_rec.core.claim.sampling_proof import Source
from tfdp_rec.core.ground.demands import Check, demand_all, given
from tfdp_rec.core.ground.refused import NotPrivate

_NO_LIMIT = 2**62
_ORDINARY = "ordinary"  # key of the counter of an optimizer that is not private
_KINDS = 4  # counters made in advance, enough for most models: a variable made during tracing has it done twice
_TRAINED_BY = "privacy_histories"  # attribute of a variable: the meters whose steps have trained it
# Ids of the entries of optimizers that are not private. All meters use the same, since they count the same steps.
_ids_of_ordinary: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

SPENT = "The privacy budget is spent"
_NO_MORE = (
    f"Refused batch: {SPENT}: one more step would exceed what PrivacyBudget or the optimizer's plan allows. Continue "
    "with a PrivacyBudget of a larger target, or compile with more noise.\n"
)
_OTHER = (
    "Refused batch: the price of this step is not known. Either the model was compiled with another optimizer after "
    "this step was traced, or PrivacyBudget has priced the steps of one optimizer on the batches of one sampling, and "
    "this is not one of them. Make it after that fit, with the model as it is compiled now, under its own budget.\n"
)
_BY_HAND = (
    "Refused batch: a training of this model can be resumed from a training checkpoint, so that every step must be "
    "written before its weights can be read, which is ensured in fit alone. Train with fit; or, if the training is "
    "done, remove the directory of its checkpoints and call model.settle().\n"
)
_UNPROVEN = (
    "Refused batch: no sampling drew it, as far as is proved, and the optimizer's plan pays for batches of its "
    "sampling alone. Train on plan.batches(fetch); after make_private call private.fit()."
)
_ANEW = (
    "Refused batch: it begins another plan of noise than the one that the plan of the optimizer pays for. Train in fit "
    "with plan.budget(), which stops before epsilon is exceeded; or, in a loop by hand, train one model that is not "
    "loaded between.\n"
)


class Meter:
    """Entries of the steps of one model; `optimizer` is None for a model that was loaded and not compiled."""

    def __init__(self, optimizer: Any = None):
        self.followed = False  # whether an accountant follows this meter, or the user was warned that none does
        self._closed = Entries()
        self._counters = dict[Any, Counter]()
        self._parts: list[Meter] = []
        self._weights: list[keras.Variable] = []
        self._joined: Meter | None = None
        self._optimizer = optimizer  # the optimizer whose `iterations` are the check
        self._present = optimizer  # the optimizer of the last compile(): steps of earlier ones are refused
        self._earlier = 0  # steps that are not in the `iterations` of the optimizer
        self._half_restored = False  # whether `iterations` may have been restored after the entries
        self._made, self._limit = _number(0), _number(_NO_LIMIT)
        self._allowed = _number(1)
        self._budget: tuple[Any, str | None] | None = None  # optimizer, and name of the sampling, that were priced
        self._paid_ids = dict[Any, str]()  # ids of payments for steps that no counter counts yet
        self._spare = [_variables() for _ in range(_KINDS)]

    # In the graph of a step.

    def count(self, optimizer: Any, source: Source) -> list[Any]:
        """Operations that count a step, which must wait for them."""
        limit = getattr(optimizer, "step_limit", None)
        if limit is not None and source.sampling is None:
            raise NotPrivate(_UNPROVEN)
        counter = self._counter(optimizer, source)
        checks: list[Check] = [
            (self._made < self._limit, _NO_MORE),
            (self._allowed > 0, _BY_HAND),
            (counter.allowed > 0, _OTHER),
        ]
        if limit is not None:
            checks.append((limit.takes_one(), _NO_MORE))
            checks.append((limit.begins(_begins_plan(optimizer)), _ANEW))
        gate = demand_all(*checks)
        # The increment is computed from the gate: without the gate there is no count, whatever rewrites the graph.
        with tf.control_dependencies(gate):
            one = given(tf.constant(1, tf.int64), gate)
            return [
                self._made.assign_add(one),
                counter.steps.assign_add(one),
            ]

    def count_ordinary(self, optimizer: Any) -> list[Any]:
        """Operations that count a step of an optimizer that is not private, on weights that were trained privately."""
        key = (optimizer, _ORDINARY)
        if key not in self._counters:
            counter = Counter(optimizer, None, "", self._variables(), type(optimizer).__name__, ordinary=True)
            counter.id = _ids_of_ordinary.setdefault(optimizer, counter.id)
            self._counters[key] = counter
            Changes.made += 1
        return [self._counters[key].steps.assign_add(1)]

    def _counter(self, optimizer: Any, source: Source) -> Counter:
        void = void_of(optimizer, source)
        name = source.sampling.name if source.sampling else None
        key = (optimizer, name, void)
        if key not in self._counters:
            state = source.sampling.get_state() if source.sampling else None
            counter = Counter(optimizer, state, void, self._variables(), name=name)
            self._counters[key] = counter
            counter.id = self._paid_ids.pop(key, counter.id)
            self._allow_or_refuse(counter)
            Changes.made += 1
        return self._counters[key]

    def _variables(self) -> list[tf.Variable]:
        return self._spare.pop() if self._spare else _variables()

    # Between steps.

    def allow_steps(self, allowed: bool) -> None:
        """Whether a step may be made now; False refuses the steps of graphs that were traced before, too."""
        with tf.init_scope():  # not in the graph of a step, which would then allow itself
            self._allowed.assign(int(allowed))

    def begin_fit(self) -> None:
        """Prepares for the steps of a fit."""
        self._spare += [_variables() for _ in range(_KINDS - len(self._spare))]  # no step may make variables

    def add(self, optimizer: Any, source: Source, steps: int) -> None:
        """Counts steps that were made elsewhere, such as on the workers of a cluster."""
        self._counter(optimizer, source).steps.assign_add(steps)
        self._made.assign_add(steps)
        Changes.made += 1

    def add_entry(self, entry: Entry, id: str | None = None) -> None:
        """Adds steps that were counted elsewhere."""
        self._closed.add(entry, id)
        Changes.made += 1

    def merge_saved(self, entries: Entries) -> None:
        """Adds the entries of a saved model or checkpoint."""
        self._closed.merge(entries)
        self.restored()

    def merge_restored(self, entries: Entries) -> None:
        """Adds the entries of a TensorFlow checkpoint, which restores `iterations` before or after them."""
        self._closed.merge(entries)
        self._half_restored = True
        Changes.made += 1

    def restored(self) -> None:
        """Notes that `iterations` may have been restored, to any number; call after every restore."""
        # Steps beyond them were made by other optimizers, or before `iterations` was reset.
        if self._optimizer is not None:
            self._earlier = max(0, self._own_steps - int(self._optimizer.iterations.numpy()))
        Changes.made += 1

    @contextlib.contextmanager
    def changing_plan(self, optimizer: Any) -> Iterator[None]:
        """A context in which planned noise begins or goes on elsewhere; steps made before keep their event."""
        own = [counter for counter in self._counters.values() if counter.optimizer is optimizer]
        for counter in own:
            counter.close(self._closed)
        self._paid_ids.clear()  # later steps have another id, which is not paid for yet
        self.stop()
        try:
            yield
        finally:
            for counter in own:
                counter.open()
            Changes.made += 1
            if (plan := getattr(optimizer, "plan", None)) is not None:
                plan.renew_limit()

    def use_id(self, optimizer: Any, sampling: str | None, id: str) -> None:
        """Counts the next steps of one optimizer and sampling under the id of their payment."""
        key = (optimizer, sampling, "")
        counter = self._counters.get(key)
        if counter is None:
            self._paid_ids[key] = id
        elif counter.id != id:
            counter.close(self._closed)
            counter.id = id
        Changes.made += 1

    def id_in_use(self, optimizer: Any, sampling: str | None) -> str:
        """Id under which the next steps of one optimizer and sampling are counted."""
        key = (optimizer, sampling, "")
        return self._counters[key].id if key in self._counters else self._paid_ids.get(key, "")

    # Totals.

    def snapshot(self) -> Entries:
        """The entries of all steps that trained the model's weights, as they stand now."""
        found = Entries()
        for meter in self._related():
            meter._write(found)
        return found

    def _write(self, found: Entries) -> None:
        found.merge(self._closed)
        for counter in self._counters.values():
            counter.write(found)
        # An optimizer holds what it was made of, also before its first step: a saved model has it.
        several = [self._optimizer, self._present, *(counter.optimizer for counter in self._counters.values())]
        for optimizer in {id(each): each for each in several}.values():
            for use in getattr(optimizer, "events_before_training", list)():
                found.add(use.entry, use.id)

    @property
    def _own_steps(self) -> int:
        # Of this meter and its parts, without those of other models on shared weights.
        found, ahead = Entries(), [self]
        while ahead:
            meter = ahead.pop()
            meter._write(found)
            ahead += meter._parts
        return found.steps

    @property
    def undescribed(self) -> int:
        """Number of steps in the `iterations` of optimizers that no entry describes."""
        return sum(meter._undescribed for meter in self._related() if meter._joined is None)

    @property
    def _undescribed(self) -> int:
        if self._optimizer is None:
            return 0
        if self._half_restored:
            self._half_restored = False
            self.restored()
        return max(0, int(self._optimizer.iterations.numpy()) - (self._own_steps - self._earlier))

    # Meters that belong together.

    def trains(self, variables: Iterable[keras.Variable]) -> None:
        """Notes the variables that the steps write: each model with one of them has spent these steps."""
        variables = list(variables)
        for variable in variables:
            if not any(self is known for known in meters_of(variable)):
                vars(variable).setdefault(_TRAINED_BY, []).append(self)
        self.add_weights(variables)
        if any(meter._budget is not None for meter in self._related() if meter is not self):
            self._limit.assign(self._made)  # a budget is kept for these weights: no step without it

    def add_weights(self, variables: Iterable[keras.Variable]) -> None:
        """Adds weights of the model, also frozen ones: other models may train them."""
        known = {id(variable) for variable in self._weights}
        self._weights += [variable for variable in variables if id(variable) not in known]
        Changes.made += 1

    def _related(self) -> list[Meter]:
        """This meter, its parts, and the whole meters of all models that trained the same variables."""
        found, ahead = dict[int, Meter](), [self]
        while ahead:
            meter = ahead.pop()
            if id(meter) in found:
                continue
            found[id(meter)] = meter
            ahead += meter._parts
            ahead += [each.root for variable in meter._weights for each in meters_of(variable)]
        return list(found.values())

    def add_part(self, optimizer: Any, part: Meter) -> None:
        """Includes the meter of another optimizer, with which the training continues."""
        lost = self._undescribed
        if lost:  # the optimizer goes, and with it the only trace of these steps
            label = f"{lost} steps of {type(self._optimizer).__name__} that its history does not describe"
            self._closed.add(Entry(NonPrivateDpEvent(), 1, label=label))
        self._earlier = self._own_steps
        self._parts.append(part)
        self._optimizer = optimizer
        part._joined, self.followed = self, self.followed or part.followed
        Changes.made += 1

    def refuse_other_optimizers(self, optimizer: Any) -> None:
        """Refuses the steps of all optimizers but this one, with which the model was just compiled."""
        self._present = optimizer
        for counter in self._counters.values():
            self._allow_or_refuse(counter)

    @property
    def root(self) -> Meter:
        """The meter that includes this one and is itself included by none."""
        return self if self._joined is None else self._joined.root

    # Limits.

    def allow(self, steps: int | None, optimizer: Any = None, sampling: str | None = None) -> None:
        """Allows this many further steps to one optimizer and sampling, and none to other models on shared weights."""
        for meter in self._related():
            left = _NO_LIMIT if steps is None else meter.made + (steps if meter is self else 0)
            meter._limit.assign(left)
        self._budget = None if steps is None else (optimizer, sampling)
        for counter in self._counters.values():
            self._allow_or_refuse(counter)

    def stop(self) -> None:
        """Refuses further steps until a budget has priced the next one, if a budget is kept."""
        if self._budget is not None:
            self._limit.assign(self._made)

    @property
    def made(self) -> int:
        """Number of steps that were counted in this process."""
        return int(self._made.numpy())

    def _allow_or_refuse(self, counter: Counter) -> None:
        priced = counter.is_of(*(self._budget or (self._present, counter.name)))
        with tf.init_scope():
            counter.allowed.assign(int(priced and not (self._budget and counter.void)))


@dataclasses.dataclass
class Counter:
    """An entry that still grows."""

    optimizer: Any
    sampling: Mapping[str, Any] | None  # state of the sampling that draws the batches
    void: str  # reason why the steps have no guarantee
    variables: dataclasses.InitVar[list[tf.Variable]]  # number of steps, whether a step is allowed
    label: str = ""
    name: str | None = None  # of the sampling; None if none draws the batches
    ordinary: bool = False

    def is_of(self, optimizer: Any, sampling: str | None) -> bool:
        """Whether the steps are an optimizer's on a sampling's batches; a name belongs to one sampling object."""
        return self.optimizer is optimizer and not self.ordinary and self.name == sampling

    def __post_init__(self, variables: list[tf.Variable]) -> None:
        self.steps, self.allowed = variables
        self.written = 0
        self.open()

    def open(self) -> None:
        """Begins an entry."""
        self.id = new_id()
        with tf.init_scope():
            self.event: DpEvent = NoOpDpEvent() if self.ordinary else self.optimizer.dp_event()

    def write(self, entries: Entries) -> int:
        """Adds the present entry; returns the number of steps that it stands for."""
        now = int(self.steps.numpy())
        if now > self.written:
            steps = now - self.written
            entries.add(Entry(self.event, steps, self.sampling, self.void, self.label, self.ordinary), self.id)
        return now

    def close(self, entries: Entries) -> None:
        """Ends the entry."""
        self.written, self.id = self.write(entries), new_id()


class StepLimit:
    """A number of steps, and of plans of noise that are begun, that several optimizers may make together."""

    def __init__(self, most: int):
        self.made, self.most = _number(0), _number(most)
        self.begun, self.most_begun = _number(0), _number(_NO_LIMIT)

    def takes_one(self) -> tf.Tensor:
        """Counts one step; whether it is within the limit."""
        # Taken before it is compared: of two threads at the last step at most one finds that it is within.
        with tf.control_dependencies([self.made.assign_add(1)]):
            return self.made.read_value() <= self.most

    def begins(self, number: tf.Tensor) -> tf.Tensor:
        """Counts a step that begins `number` plans; whether it is within the limit, as one that goes on is."""
        with tf.control_dependencies([self.begun.assign_add(number)]):
            return tf.equal(number, 0) | (self.begun.read_value() <= self.most_begun)

    def set_left(self, steps: int | None, begun: int | None = None) -> None:
        """Sets the number of further steps, and of further plans; None for no limit."""
        self.most.assign(_NO_LIMIT if steps is None else self.made + steps)
        self.most_begun.assign(_NO_LIMIT if begun is None else self.begun + begun)


def _begins_plan(optimizer: Any) -> tf.Tensor:
    # 1 if a step begins this process's part of a plan of correlated noise, else 0.
    course = getattr(optimizer, "course", None)
    begins = False if course is None else tf.equal(course.made, course.variables["start"])
    return tf.cast(begins, tf.int64)


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
