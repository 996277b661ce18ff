"""A private step that is tried, to find all that it would refuse and not the first fault alone.

The trial is the traced loss of a private step, read as a step reads it, and never run. It runs a refused layer without
a rule, skips a rule that refuses, takes an operation at fault for what it should have been, and collects all refusals
on the way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity import recorder as recording
from tfdp_rec.core.sensitivity.batches import batch_size, hide_batch_axis, open_specs
from tfdp_rec.core.sensitivity.engine import check_losses, factors_of, refuse_uncovered, shared_inputs
from tfdp_rec.core.sensitivity.step_reading import StepReading


class Refusals(dict[str, str]):
    """Sentences of refusals, each with the name of the layer that it is about, or ""."""

    @contextlib.contextmanager
    def note(self, layer: str = "", error: type[Exception] = NotPrivate) -> Iterator[None]:
        """Ends a block at a refusal, and notes it."""
        try:
            yield
        except error as refusal:
            self.setdefault(str(refusal), layer)


class TrialStep:
    """All refusals of a private step: `units` recorded or refused, `refusals` with layers' names, `tables` by path."""

    def __init__(self, model: keras.Model):
        self._model, self._shared = model, shared_inputs(model)
        self._known: list[Any] = []  # operations of layers that are refused
        self.units = recording.units_and_refusals(model)
        self.refusals = Refusals({unit.refusal: unit.layer.name for unit in self.units if unit.rule is None})
        self.tables: set[str] = set()

    def read(self, batch: Any) -> None:
        """Tries the step on a batch, of which nothing is computed."""
        tf.function(self._trace, autograph=False).get_concrete_function(open_specs(batch, self._shared))

    def _trace(self, batch: Any) -> tf.Tensor:
        batch = hide_batch_axis(batch, self._shared)
        size, losses = batch_size(batch, self._shared), None
        with recording.secret_seeds(self._model):
            reading = StepReading(self._model, batch, self._shared)
            with self.refusals.note():
                recording.refuse_duplicate_paths(self._model)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                recorder = recording.Recording(self._model, tape, recording.settle_nothing)
                runs = [(unit.layer, functools.partial(self._run, recorder, unit)) for unit in self.units]
                # Checked under the tape: later operations have no gradient.
                with recording.replace_calls(runs), recorder.outside, self.refusals.note():
                    found = self._model.per_example_loss(batch, training=True)
                    with self.refusals.note(error=ValueError):
                        losses = check_losses(found, size)
            self._check_forward_pass(recorder)
            if losses is not None:  # None if the losses themselves are refused
                self._read_gradients(recorder, reading, losses)
        return size

    def _run(
        self, recorder: recording.Recording, unit: recording.Unit, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if unit.rule is not None:
            with self.refusals.note(unit.layer.name):
                return recorder.run(unit, original, args, kwargs)
        graph: Any = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        with recorder.outside.stop_recording():
            output = original(*args, **kwargs)
        if unit.rule is None:
            self._known += graph.get_operations()[start:]
        return output

    def _check_forward_pass(self, recorder: recording.Recording) -> None:
        refused = [unit.layer for unit in self.units if unit.layer.name in self.refusals.values()]
        weights = [*recorder.direct, *(v for layer in refused for v in layer.trainable_variables)]
        self.tables = set(recorder.tables())
        with self.refusals.note():
            recording.refuse_added_losses(self._model)
        with self.refusals.note():
            recorder.refuse_reads_outside()
        with self.refusals.note():
            recording.refuse_unrecorded(self._model, recorder.calls, weights)

    def _read_gradients(self, recorder: recording.Recording, reading: StepReading, losses: tf.Tensor) -> None:
        gradients, direct = recorder.differentiate(losses)
        size = tf.shape(losses)[0]
        found, read = reading.refusals(recorder.calls, losses, gradients, self._known)
        for refusal in found:
            self.refusals.setdefault(str(refusal), "")
        for one in read:
            with self.refusals.note(one.call.layer.name):
                refuse_uncovered([one.call], {variable.path for variable, _ in factors_of(one, size, reading)})
        for variable, gradient in zip(recorder.direct, direct):
            with self.refusals.note():
                reading.shares(variable, gradient)


def refusal_of_all(model: Any, batch: Any, first: NotPrivate) -> NotPrivate:
    """A refusal that lists all that a private step on such a batch would refuse, in place of the first fault."""
    trial = TrialStep(model)
    with contextlib.suppress(Exception), model.private_weights.in_step():  # the first is told in any case
        trial.read(batch)
    said = list(trial.refusals)
    if str(first) not in said or len(said) == 1:  # else what the trial found may follow from the first
        return first
    listed = "".join(f"\n{number}. {each}" for number, each in enumerate(said, 1))
    return NotPrivate(
        f"'{model.name}' cannot be trained privately, for {len(said)} reasons, of which a later one may follow from an "
        f"earlier:{listed}"
    )
