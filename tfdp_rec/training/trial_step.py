"""A trial step: traced and read for all of its refusals, and never run.

A private step is refused at the first fault. A trial step runs a refused layer without a rule, skips a rule that
refuses, takes an operation at fault for what it should have been, and collects all refusals on the way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.batches import batch_size, hide_batch_axis, open_specs
from tfdp_rec.core.sensitivity.engine import check_losses, factors_of, refuse_uncovered, shared_inputs
from tfdp_rec.core.sensitivity.recorder import (
    Recording,
    Unit,
    refuse_added_losses,
    refuse_duplicate_paths,
    refuse_unrecorded,
    replace_calls,
    secret_seeds,
    settle_nothing,
    units_and_refusals,
)
from tfdp_rec.core.sensitivity.step_reading import StepReading


class TrialStep:
    """All refusals of a private step: `units` recorded or refused, `refusals` with layers' names, `tables` by path."""

    def __init__(self, model: keras.Model, loss: Callable[[Any], tf.Tensor]):
        self._model, self._loss = model, loss
        self._known: list[Any] = []  # operations of layers that are refused
        self.units = units_and_refusals(model)
        self.refusals = {unit.refusal: unit.layer.name for unit in self.units if unit.rule is None}
        self.tables: set[str] = set()

    def read(self, batch: Any) -> TrialStep:
        """Tries the step on a batch, of which nothing is computed."""
        specs = open_specs(batch, shared_inputs(self._model))
        tf.function(self._trace, autograph=False).get_concrete_function(specs)
        return self

    def _trace(self, batch: Any) -> tf.Tensor:
        shared = shared_inputs(self._model)
        batch = hide_batch_axis(batch, shared)
        size = batch_size(batch, shared)
        with secret_seeds(self._model):
            reading = StepReading(self._model, batch, shared)
            with self._noting():
                refuse_duplicate_paths(self._model)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                recorder = Recording(self._model, tape, settle_nothing)
                runs = [(unit.layer, functools.partial(self._run, recorder, unit)) for unit in self.units]
                losses = None
                with replace_calls(runs), recorder.outside, self._noting():
                    losses = self._checked(self._loss(batch), size)
            self._check_forward_pass(recorder)
            if losses is not None:  # None if the losses themselves are refused
                self._read_gradients(recorder, reading, losses)
        return size

    def _checked(self, losses: Any, size: tf.Tensor) -> tf.Tensor | None:
        """The losses, checked under the tape: later operations have no gradient."""
        try:
            return check_losses(losses, size)
        except ValueError as problem:
            self.refusals.setdefault(str(problem), "")
            return None

    def _run(self, recorder: Recording, unit: Unit, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        graph: Any = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        if unit.rule is not None:
            with self._noting(unit.layer.name):
                return recorder.run(unit, original, args, kwargs)
        with recorder.outside.stop_recording():
            output = original(*args, **kwargs)
        if unit.rule is None:
            self._known += graph.get_operations()[start:]
        return output

    def _check_forward_pass(self, recorder: Recording) -> None:
        refused = [v for layer in self._refused() for v in layer.trainable_variables]
        self.tables = set(recorder.tables())
        with self._noting():
            refuse_added_losses(self._model)
        with self._noting():
            recorder.refuse_reads_outside()
        with self._noting():
            refuse_unrecorded(self._model, recorder.calls, [*recorder.direct, *refused])

    def _refused(self) -> Iterator[keras.layers.Layer]:
        return (unit.layer for unit in self.units if unit.layer.name in self.refusals.values())

    def _read_gradients(self, recorder: Recording, reading: StepReading, losses: tf.Tensor) -> None:
        gradients, direct = recorder.differentiate(losses)
        size = tf.shape(losses)[0]
        found, read = reading.refusals(recorder.calls, losses, gradients, self._known)
        for refusal in found:
            self.refusals.setdefault(str(refusal), "")
        for one in read:
            with self._noting(one.call.layer.name):
                refuse_uncovered([one.call], {variable.path for variable, _ in factors_of(one, size, reading)})
        for variable, gradient in zip(recorder.direct, direct):
            with self._noting():
                reading.shares(variable, gradient)

    @contextlib.contextmanager
    def _noting(self, layer: str = "") -> Iterator[None]:
        """Ends a block at a refusal, and notes it under the name of a layer, or ""."""
        try:
            yield
        except NotPrivate as refusal:
            self.refusals.setdefault(str(refusal), layer)
