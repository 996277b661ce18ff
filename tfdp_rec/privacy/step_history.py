"""The history that a model carries: its steps counted in the step's own graph, before anything of the step is written.

    step -> gate: may one more be made?  -> counted, by origin of the batch -> noise, update

A step that is cut short was counted. Steps are counted by the optimizer and by where the batch came from; an entry is
closed when the optimizer's settings change. The history is saved with the optimizer's variables, and goes from one
optimizer to the next when a model is compiled again. `iterations`, which Keras restores by more ways than we know of,
is the check: steps that it tells of and the history does not make every accountant silent.

Models share layers. A variable remembers whose steps have trained it, so that what a model has spent is what all those
have spent whose steps are in its weights:

    spent(model) = own steps ∪ spent(h) for every history h that trained one of the model's variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.demands import demand, given
from tfdp_rec.privacy.drawn import Source
from tfdp_rec.privacy.history import DRAWN, UNPROVEN, Entry, History, new_key

_NO_LIMIT = 2**62
_KINDS = 4  # of batches, by origin, that most models see at most
_TRAINED_BY = "privacy_histories"  # among a variable's attributes
SPENT = "The privacy budget is spent"
_OTHER = (
    "Refused batch: the model was compiled with another optimizer since this step was, or a PrivacyBudget is kept for "
    "steps on the batches of its fit, and this one is of another origin or another optimizer, whose steps may cost "
    "more. Train with the model as it is compiled now, after that fit, under a budget of its own.\n"
)


class StepHistory:
    """What the steps of one model have spent.

    Args:
        optimizer: whose steps these are; has `dp_event()`, `iterations` and `noise`.

    Attributes:
        known_of: whether an accountant follows it, or its owner was told that none does.
    """

    known_of = False

    def __init__(self, optimizer: Any):
        self._closed = History()
        self._open: dict[Any, _Open] = {}
        self._parts: list[StepHistory] = []
        self._rests_on: list[keras.Variable] = []
        self._joined: StepHistory | None = None
        self._optimizer, self._before, self._changes, self._key = optimizer, 0, 0, new_key()
        self._present = optimizer  # whose noise rows may owe: no other pays it
        self._made, self._limit = _number(0), _number(_NO_LIMIT)
        self._allowed: tuple[Any, list[Any]] | None = None  # whose steps, on batches of which origins, under a budget
        # Made now: a step in whose trace a variable is born is traced twice.
        self._spare = [(_number(0), _number(0), _number(1)) for _ in range(_KINDS)]

    # In a step's graph.

    def count(self, optimizer: Any, source: Source) -> list[Any]:
        """Operations that count a step; the step waits for them.

        Args:
            optimizer: that makes the step.
            source: of its batch.
        """
        sentence = (
            f"Refused batch: {SPENT}: a step more would exceed what PrivacyBudget allows. Train on with a "
            "PrivacyBudget of a larger target, or of more noise; who changes the noise in mid-fit comes before it in "
            "callbacks.\n"
        )
        counter = self._counter(optimizer, source)
        gate = demand(self._made < self._limit, sentence) + demand(counter.allowed > 0, _OTHER)
        with tf.control_dependencies(gate):
            return [
                self._made.assign_add(given(tf.constant(1, tf.int64), gate)),
                counter.steps.assign_add(given(tf.constant(1, tf.int64), gate)),
                counter.begun.assign_add(tf.cast(source.begins, tf.int64)),
            ]

    def _counter(self, optimizer: Any, source: Source) -> _Open:
        void = void_of(optimizer, source)
        name = source.sampling.name if source.sampling else None
        key = (id(optimizer), name, void)
        if key not in self._open:
            steps, begun, allowed = self._spare.pop() if self._spare else (_number(0), _number(0), _number(1))
            state = source.sampling.get_state() if source.sampling else None
            self._open[key] = _Open(optimizer, state, void, steps, begun, allowed)
            self._judge(self._open[key])
        return self._open[key]

    # Between steps.

    def add(self, optimizer: Any, source: Source, steps: int) -> None:
        """Counts steps that were made elsewhere, as on a cluster."""
        counter = self._counter(optimizer, source)
        counter.steps.assign_add(steps)
        self._made.assign_add(steps)

    def add_entry(self, entry: Entry) -> None:
        """Takes over steps that were counted elsewhere."""
        self._closed.add(entry)

    def take(self, history: History) -> None:
        """Takes over what was read from a file, once the optimizer's counter is that of the file too."""
        self._closed.merge(history)
        # The file's steps may be of several optimizers, and the counter is of the last alone.
        self._before = max(0, self._own_steps - int(self._optimizer.iterations.numpy()))

    def close(self, optimizer: Any) -> None:
        """The optimizer's settings are about to change: what was counted is of the old ones."""
        self._changes += 1
        for counter in self._open.values():
            if counter.optimizer is optimizer:
                counter.close(self._closed)
        if self._allowed is not None:
            self._limit.assign(self._made)  # the budget looks first

    def snapshot(self) -> History:
        """All entries as they stand, of all whose steps are in the model's weights."""
        found = History()
        for history in self._kin():
            history._write(found)
        return found

    def trains(self, variables: Iterable[keras.Variable]) -> None:
        """These variables are what the steps write; whoever rests on one of them has spent these steps too."""
        variables = list(variables)
        for variable in variables:
            trained_by = vars(variable).setdefault(_TRAINED_BY, [])
            if not any(self is known for known in trained_by):
                trained_by.append(self)
        self.rests_on(variables)
        if any(history._allowed is not None for history in self._kin() if history is not self):
            self._limit.assign(self._made)  # a budget is kept for these weights already

    def rests_on(self, variables: Iterable[keras.Variable]) -> None:
        """These are weights of the model, frozen ones too; others may train them, now or later."""
        known = {id(variable) for variable in self._rests_on}
        self._rests_on += [variable for variable in variables if id(variable) not in known]

    def _kin(self) -> list[StepHistory]:
        """This history, its parts, and the whole histories of all who trained what the model rests on."""
        found, ahead = dict[int, StepHistory](), [self]
        while ahead:
            history = ahead.pop()
            if id(history) in found:
                continue
            found[id(history)] = history
            ahead += history._parts
            ahead += [each.whole for v in history._rests_on for each in vars(v).get(_TRAINED_BY, ())]
        return list(found.values())

    def counters(self) -> dict[str, tuple[int, int]]:
        """How far everything that counts is, by an id: in a few reads, whether a snapshot would differ."""
        found = {}
        for history in self._kin():
            found[history._key] = (len(history._closed) + len(history._parts), history._changes)
            found |= {counter.key: counter.now() for counter in history._open.values()}
        return found

    def kinds_of(self, optimizer: Any, sampling: dict[str, Any]) -> list[str]:
        """The ids among `counters` of an optimizer's proved steps on batches of a sampling, by its state."""
        every = (counter for history in self._kin() for counter in history._open.values())
        return [c.key for c in every if c.optimizer is optimizer and c.sampling == sampling and not c.void]

    def _write(self, found: History) -> None:
        found.merge(self._closed)
        for counter in self._open.values():
            counter.write(found)
        for optimizer in {id(c.optimizer): c.optimizer for c in self._open.values() if int(c.steps.numpy())}.values():
            for event, label in getattr(optimizer, "events_before_training", list)():
                found.add(Entry(event, 1, DRAWN, label=label), f"{self._key}: {label}")

    @property
    def _own_steps(self) -> int:
        """Without those of others on shared weights."""
        found, ahead = History(), [self]
        while ahead:
            history = ahead.pop()
            history._write(found)
            ahead += history._parts
        return found.steps

    def hand_over(self, optimizer: Any, own: StepHistory) -> None:
        """Another optimizer goes on with the model.

        Args:
            optimizer: the one that goes on.
            own: its history so far.
        """
        self._before = self._own_steps
        self._parts.append(own)
        self._optimizer = optimizer
        own._joined, self.known_of = self, self.known_of or own.known_of

    def goes_on_under(self, optimizer: Any) -> None:
        """The model is compiled with this optimizer now; steps of others, still in somebody's hand, are refused."""
        self._present = optimizer
        for counter in self._open.values():
            self._judge(counter)

    @property
    def whole(self) -> StepHistory:
        """The history of the model, once this one has joined it: who followed an optimizer follows its model."""
        return self if self._joined is None else self._joined.whole

    @property
    def undescribed(self) -> int:
        """Steps that the counter of an optimizer tells of, and no entry."""
        return sum(history._missing for history in self._kin() if history._joined is None)

    @property
    def _missing(self) -> int:
        return max(0, int(self._optimizer.iterations.numpy()) - (self._own_steps - self._before))

    def allow(
        self, steps: int | None, optimizer: Any = None, origins: Sequence[dict[str, Any] | None] = ()
    ) -> None:
        """At most so many steps more, whoever makes them, and none by others on shared weights; None for any number.

        Args:
            steps: what a budget has left for.
            optimizer: whose.
            origins: states of the samplings whose batches the steps may be on, as they were priced; None for unproven.
        """
        for history in self._kin():
            left = _NO_LIMIT if steps is None else int(history._made.numpy()) + (steps if history is self else 0)
            history._limit.assign(left)
        self._allowed = None if steps is None else (optimizer, list(origins))
        for counter in self._open.values():
            self._judge(counter)

    def _judge(self, counter: _Open) -> None:
        optimizer, origins = self._allowed or (self._present, [counter.sampling])
        priced = counter.optimizer is optimizer and counter.sampling in origins
        with tf.init_scope():
            counter.allowed.assign(int(priced and not (self._allowed and counter.void)))


@dataclasses.dataclass
class _Open:
    """An entry that is still growing."""

    optimizer: Any
    sampling: dict[str, Any] | None
    void: str
    steps: tf.Variable
    begun: tf.Variable
    allowed: tf.Variable
    written: tuple[int, int] = (0, 0)
    key: str = dataclasses.field(default_factory=new_key)

    def now(self) -> tuple[int, int]:
        """Steps, and times the batches were begun."""
        return int(self.steps.numpy()), int(self.begun.numpy())

    def write(self, history: History) -> tuple[int, int]:
        now = self.now()
        steps, begun = now[0] - self.written[0], now[1] - self.written[1]
        if steps:
            origin = UNPROVEN if self.sampling is None else DRAWN
            event = self.optimizer.dp_event()
            history.add(Entry(event, steps, origin, self.sampling, begun, self.void), self.key)
        return now

    def close(self, history: History) -> None:
        self.written, self.key = self.write(history), new_key()


def _number(value: int) -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(value, dtype=tf.int64, trainable=False)


def void_of(optimizer: Any, source: Source) -> str:
    """Why a step of this optimizer on such a batch has no guarantee; empty if it has."""
    reasons = []
    if source.seeded:
        reasons.append("the batches were drawn with a seed (leave out seed= in sampling.batches)")
    noise = getattr(optimizer, "noise", None)
    if noise is not None and not vars(type(noise)).get("secret", False):
        reasons.append(f"the noise came from {type(noise).__name__}, which can be computed again (leave out noise=)")
    return " and ".join(reasons)
