"""Counters of an optimizer's steps, each an entry (`entries.py`) that still grows.

Steps of one event, on batches of one sampling, are one entry. The event is fixed with the optimizer's settings. Under a
ledger an entry has the id of its payment: it is a receipt.

Keras restores an optimizer's `iterations` in more ways than this package knows. They are a check: if they exceed the
steps that entries describe, every accountant refuses to give an ε.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from dp_accounting import DpEvent, NonPrivateDpEvent, NoOpDpEvent

from tfdp_rec.core.claim.entries import Entries, Entry, Use, new_id
from tfdp_rec.core.claim.events import PlannedDpEvent
from tfdp_rec.core.claim.open_epoch import OpenEpoch
from tfdp_rec.core.claim.sampling_proof import Source

_KINDS = 4  # counters made in advance, enough for most models: a variable made during tracing has it done twice


class Counters:
    """The steps of one optimizer: entries that are closed, and counters of those that grow."""

    def __init__(self, optimizer: Any):
        self.closed = Entries()
        self._optimizer = optimizer
        self._by_kind = dict[Any, Counter]()
        self._steps_before: int | None = 0  # entries' steps that are not in `iterations`; None after a restore
        self._spare = [_variables() for _ in range(_KINDS)]

    def __iter__(self) -> Iterator[Counter]:
        return iter(self._by_kind.values())

    def prepare(self) -> None:
        """Makes variables ahead of a fit, no step of which may make any."""
        self._spare += [_variables() for _ in range(_KINDS - len(self._spare))]

    def find(self, source: Source) -> Counter | None:
        """The counter of steps on batches of a source; None if there was no such step."""
        return self._by_kind.get(self._kind_of(source))

    def add(self, source: Source) -> Counter:
        """Begins to count steps on batches of a source."""
        name, void = self._kind_of(source)
        state = source.sampling.get_state() if source.sampling else None
        together = source.sampling.steps_at_once if source.sampling else 1
        counter = Counter(self._optimizer.dp_event, self._take_variables(), state, name, void, together=together)
        self._by_kind[name, void] = counter
        self._begin(counter)
        return counter

    def count_ordinary(self, optimizer: Any, id: str) -> list[Any]:
        """Operations that count a step of an optimizer that is not private, under an id."""
        if id not in self._by_kind:
            label = type(optimizer).__name__
            self._by_kind[id] = Counter(NoOpDpEvent, self._take_variables(), label=label, ordinary=True)
            self._by_kind[id].id = id
        return [self._by_kind[id].steps.assign_add(1)]

    def count_under(self, counter: Counter, id: str) -> None:
        """Has a counter go on under an id, that of a payment, if one is given."""
        # One counter at a time counts under an id: of two, the larger number alone would be told.
        if id and id != counter.id:
            for each in self:
                if each is counter or each.id == id:
                    each.close(self.closed)
            counter.go_on(id, self.closed)

    def find_id(self, sampling: str) -> str:
        """Id of the entry of steps on batches of a sampling that have a guarantee; empty if there is none."""
        counter = self._by_kind.get((sampling, ""))
        return "" if counter is None else counter.id

    def close(self) -> list[Counter]:
        """Ends the entries of private steps; returns their counters."""
        own = [counter for counter in self if not counter.ordinary]
        for counter in own:
            counter.close(self.closed)
        return own

    def begin(self, counters: Iterable[Counter]) -> None:
        """Begins entries of the present event."""
        for counter in counters:
            self._begin(counter)

    def _begin(self, counter: Counter) -> None:
        # A plan of noise has one entry, under its own id, which goes on where an earlier process has left it.
        counter.begin()
        taken = any(counter.plan == each.id for each in self if each is not counter)
        if counter.plan and counter.name and not counter.void and not taken:
            counter.go_on(counter.plan, self.closed)

    def _kind_of(self, source: Source) -> tuple[str | None, str]:
        return source.sampling.name if source.sampling else None, void_of(self._optimizer, source)

    def _take_variables(self) -> list[tf.Variable]:
        return self._spare.pop() if self._spare else _variables()

    def tell_instead(self, use: Use) -> None:
        """Has one use stand for all steps so far, and `iterations` begin anew."""
        for counter in self:
            counter.close(Entries())
        self.closed, self._steps_before = Entries.of(use), 0
        self._optimizer.iterations.assign(0)

    # Totals.

    @property
    def made(self) -> int:
        """Number of private steps that were counted in this process."""
        return sum(int(counter.steps.numpy()) for counter in self if not counter.ordinary)

    def write(self, found: Entries) -> None:
        """Adds all entries, as they stand now."""
        found.merge(self.closed)
        for counter in self:
            counter.write(found)
        # An optimizer holds what it was made of, also before its first step: a saved model has it.
        for use in getattr(self._optimizer, "events_before_training", list)():
            found.add(use.entry, use.id)

    def note_restore(self) -> None:
        """Notes that `iterations` may have been restored, to any number."""
        self._steps_before = None

    def count_undescribed(self) -> int:
        """Number of steps in the optimizer's `iterations` that no entry describes."""
        if self._optimizer is None:
            return 0
        own, made = Entries(), int(self._optimizer.iterations.numpy())
        self.write(own)
        if self._steps_before is None:  # of other optimizers, or made before `iterations` was reset
            self._steps_before = max(0, own.steps - made)
        return max(0, made - (own.steps - self._steps_before))

    def hand_over_undescribed(self, entries: Entries) -> None:
        """Tells steps that no entry describes to the counters of another optimizer."""
        if lost := self.count_undescribed():  # the optimizer goes, and with it the only trace of these steps
            label = f"{lost} steps of {type(self._optimizer).__name__} that its history does not describe"
            entries.add(Entry(NonPrivateDpEvent(), 1, label=label))
            self._steps_before = (self._steps_before or 0) - lost


class Counter:
    """An entry that still grows."""

    # `variables` hold the number of steps, whether a step is allowed, and the epoch. `name` is that of the sampling,
    # None if none draws the batches; so many of its steps are counted `together`.

    def __init__(
        self, event: Callable[[], DpEvent], variables: list[tf.Variable], sampling: Any = None,
        name: str | None = None, void: str = "", label: str = "", ordinary: bool = False, together: int = 1,
    ):  # fmt: skip
        self.steps, self.allowed, epoch = variables
        self.epoch = OpenEpoch(epoch, together) if together > 1 else None
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


def make_number(value: int | list[int]) -> tf.Variable:
    """A variable for whole numbers that steps count in or ask for, whatever device they run on."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(value, dtype=tf.int64, trainable=False)


def _variables() -> list[tf.Variable]:
    return [make_number(0), make_number(1), make_number([0, 0, 0])]


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
