"""Counts the steps of an optimizer in the graph of each step, before the noise of the step is drawn.

    step -> may one more be made? (gate.py)  -> counted, by source of its batch (counters.py) -> noise, update

An interrupted step was counted. Entries are saved with the model.

Models share layers. A variable remembers the meters whose steps have trained it:

    spent(model) = own entries ∪ spent(m) for every meter m that trained one of the model's variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from dp_accounting import NoOpDpEvent

from tfdp_rec.core.claim.counters import Counter, Counters
from tfdp_rec.core.claim.entries import Entries, Entry, Use
from tfdp_rec.core.claim.gate import Gate
from tfdp_rec.core.claim.sampling_proof import Source
from tfdp_rec.core.ground.graph_checks import depend_on, place_on_host
from tfdp_rec.core.ground.refused import NotPrivate

_TRAINED_BY = "privacy_histories"  # attribute of a variable: the meters whose steps have trained it
_KNOWN_BY = "privacy_readers"  # attribute of a variable: the meters of all models that have it, frozen or not

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
        self.counters = Counters(optimizer)
        self.gate = Gate(self.counters)
        self._weights: list[keras.Variable] = []
        self._earlier = list[Meter]()  # of the optimizers that the model was compiled with before

    # In the graph of a step.

    @place_on_host
    def count(self, source: Source) -> list[Any]:
        """Operations that count a step, which must wait for them."""
        if self.open_by_plan is not None and source.sampling is None:
            raise NotPrivate(_UNPROVEN)
        counter = self._find_counter(source)
        price = tf.constant(1, tf.int64) if counter.epoch is None else counter.epoch.price_step(source.draw)
        gate = self.gate.take_step(counter, price)
        # The increment is computed from the gate: without the gate there is no count, whatever rewrites the graph.
        with tf.control_dependencies(gate):
            counted = [counter.steps.assign_add(depend_on(price, gate))]
        if counter.epoch is None:
            return counted
        with tf.control_dependencies(counted):  # an epoch that is not counted does not go on
            return counter.epoch.note_step(source.draw)

    def count_ordinary(self, optimizer: Any, id: str) -> list[Any]:
        """Operations that count a step of an optimizer that is not private, on weights that were trained privately."""
        counted = self.counters.count_ordinary(optimizer, id)
        self.note_change()
        return counted

    def _find_counter(self, source: Source) -> Counter:
        counter = self.counters.find(source)
        if counter is None:
            with tf.init_scope():
                counter = self.counters.add(source)
                self.gate.admit(counter)
            self.note_change()
        return counter

    # Between steps.

    def add(self, source: Source, steps: int, id: str = "") -> None:
        """Counts steps that were made elsewhere, such as on the workers of a cluster, under the id of their payment."""
        counter = self._find_counter(source)
        self.counters.count_under(counter, id)
        counter.steps.assign_add(steps)
        self.note_change()

    def add_entry(self, entry: Entry, id: str | None = None) -> None:
        """Adds steps that were counted elsewhere."""
        self.counters.closed.add(entry, id)
        self.note_expense()

    def add_ordinary(self, name: str, steps: int, id: str) -> None:
        """Adds steps of an optimizer that is not private, which were not counted in a graph."""
        self.add_entry(Entry(NoOpDpEvent(), steps, label=name, ordinary=True), id)

    def merge(self, entries: Entries) -> None:
        """Adds the entries of a saved model or checkpoint, ahead of what else is restored from it."""
        self.counters.closed.merge(entries)
        self.note_restore()

    def tell_instead(self, use: Use) -> None:
        """Tells one use in place of all steps of this optimizer, which it contains (`best_run.py`)."""
        self.counters.tell_instead(use)
        self.note_expense()

    def note_restore(self) -> None:
        """Notes that `iterations` may have been restored, to any number."""
        self.counters.note_restore()
        self.note_expense()
        if self.open_by_plan is not None:
            self.open_by_plan()

    def note_change(self) -> None:
        """Has those who priced these entries, or what other models trained of these weights, price them anew."""
        for meter in (*self.related_meters, *self._readers):
            meter.version += 1

    def note_expense(self) -> None:
        """Has no model that has these weights make a step at the price of before."""
        for meter in (*self.related_meters, *self._readers):
            meter.price_anew()

    @contextlib.contextmanager
    def change_plan(self) -> Iterator[None]:
        """A context in which planned noise begins anew or goes on; steps made before keep their event."""
        own = self.counters.close()
        self.stop()
        try:
            yield
        finally:
            self.counters.begin(own)
            self.note_restore()

    # Totals.

    def snapshot(self) -> Entries:
        """The entries of all steps that trained the model's weights, as they stand now."""
        found = Entries()
        for meter in reversed(self.related_meters):  # the present optimizer's steps come last
            meter.counters.write(found)
        return found

    @property
    def undescribed_steps(self) -> int:
        """Number of steps in the `iterations` of optimizers that no entry describes."""
        return sum(meter.counters.count_undescribed() for meter in self.related_meters)

    # Meters that belong together.

    def attach(self, variables: Iterable[keras.Variable]) -> None:
        """Notes the variables that the steps write: each model with one of them has spent these steps."""
        variables = list(variables)
        for variable in variables:
            if not any(self is known for known in meters_of(variable)):
                vars(variable).setdefault(_TRAINED_BY, []).append(self)
        self.add_weights(variables)
        if any(meter.gate.is_kept for meter in (*self.related_meters, *self._readers) if meter is not self):
            self.gate.close()  # a budget is kept for these weights: no step without it
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
            earlier.gate.replace(True)
            earlier.counters.hand_over_undescribed(self.counters.closed)
        self.gate.replace(False)
        self.note_change()

    # The gates of meters that belong together.

    def open(self, steps: int, sampling: str, id: str = "", in_fit: bool = False) -> None:
        """Opens the gate for so many steps on batches of a sampling, counted under the id of their payment."""
        # A fit keeps its budget until `lift`: till then the gate of all other meters of these weights is closed.
        for meter in self.related_meters if in_fit else ():
            meter.gate.close()
        self.gate.open(steps, sampling, id, in_fit)

    def lift(self) -> None:
        """Ends what `open` began: each meter is open as its optimizer's plan has it, or without a limit."""
        self.gate.is_kept = False
        lifted = [meter for meter in self.related_meters if not meter.gate.is_kept]  # not one whose own fit goes on
        for meter in lifted:
            meter.gate.lift(is_planned=meter.open_by_plan is not None)
        self.note_change()
        for meter in lifted:
            if meter.open_by_plan is not None:
                meter.open_by_plan()

    def stop(self) -> None:
        """Closes the gate until the next step is priced, if it was opened for a number of steps."""
        self.version += 1
        if self.gate.is_limited:
            self.gate.close()

    def price_anew(self) -> None:
        """Closes the gate, and opens it at once for what is left by now if a plan had opened it."""
        was_open = self.gate.left > 0
        self.stop()
        if was_open and self.open_by_plan is not None:
            self.open_by_plan()


def meters_of(variable: keras.Variable) -> list[Meter]:
    """The meters whose steps have trained a variable."""
    return vars(variable).get(_TRAINED_BY, [])
