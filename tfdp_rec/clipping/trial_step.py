"""A step that is traced and read, and neither made nor stopped by the first thing that is refused.

A private step is refused at the first fault. Here a layer that is refused is run as it is, a rule that refuses is
passed over, an operation at fault is taken for what it should have been, and all that is said on the way is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping.batches import batch_size, hide_batch_axis, open_specs
from tfdp_rec.clipping.engine import checked_losses, factors_of, refuse_uncovered, shared_inputs
from tfdp_rec.clipping.own_rows import own_rows
from tfdp_rec.clipping.recorder import (
    Recording,
    Unit,
    no_settling,
    own_direct,
    refuse_added_losses,
    refuse_duplicate_paths,
    refuse_unrecorded,
    replaced,
    secret_seeds,
    units_and_refusals,
)
from tfdp_rec.clipping.rules import resource
from tfdp_rec.clipping.step_reading import StepReading
from tfdp_rec.refused import NotPrivate


class TrialStep:
    """What a private step of a model would refuse.

    Args:
        model: a built model.
        loss: a batch -> each example's loss, `[batch]`.

    Attributes:
        units: the layers that are recorded whole, or refused.
        refusals: what is refused, each with the name of the layer that it is about, or "".
        tables: paths of the variables that are read by row only.
    """

    def __init__(self, model: keras.Model, loss: Callable[[Any], tf.Tensor]):
        self._model, self._loss = model, loss
        self._known: list[Any] = []  # operations of layers that are refused
        self.units = units_and_refusals(model)
        self.refusals = {unit.refusal: unit.layer.name for unit in self.units if unit.rule is None}
        self.tables: set[str] = set()

    def of(self, batch: Any) -> TrialStep:
        """Tries the step on a batch, of which nothing is computed.

        Args:
            batch: of tensors, each of a fixed shape but for its first axis.
        """
        specs = open_specs(batch, shared_inputs(self._model))
        tf.function(self._trace, autograph=False).get_concrete_function(specs)
        return self

    def _trace(self, batch: Any) -> tf.Tensor:
        shared = shared_inputs(self._model)
        batch = hide_batch_axis(batch, shared)
        size = batch_size(batch, shared)
        with secret_seeds(self._model):
            reading = StepReading(self._model, batch, shared)
            with self._listening():
                refuse_duplicate_paths(self._model)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                recorder = Recording(tape, size, no_settling, own_direct(self._model, tape))
                runs = [(unit.layer, functools.partial(self._run, recorder, unit)) for unit in self.units]
                losses = None
                with replaced(runs), recorder.outside, self._listening():
                    losses = self._one_an_example(self._loss(batch), size)
            self._look_back(recorder)
            if losses is not None:  # or else it refused itself
                self._read(recorder, reading, tape, losses)
        return size

    def _one_an_example(self, losses: Any, size: tf.Tensor) -> tf.Tensor | None:
        """The losses, under the tape: what comes after it has no gradient."""
        try:
            return checked_losses(losses, size)
        except ValueError as problem:
            self.refusals.setdefault(str(problem), "")
            return None

    def _run(self, recorder: Recording, unit: Unit, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        graph: Any = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        if unit.rule is not None:
            with self._listening(unit.layer.name):
                return recorder.run(unit.layer, unit.rule, original, args, kwargs)
        with recorder.outside.stop_recording():
            output = original(*args, **kwargs)
        if unit.rule is None:
            self._known += graph.get_operations()[start:]
        return output

    def _look_back(self, recorder: Recording) -> None:
        """At what the forward pass left."""
        refused = [v for layer in self._refused() for v in layer.trainable_variables]
        self.tables = set(recorder.tables())
        with self._listening():
            refuse_added_losses(self._model)
        with self._listening():
            recorder.refuse_reads_outside(self._model)
        with self._listening():
            refuse_unrecorded(self._model, recorder.calls, [*recorder.direct, *refused])

    def _refused(self) -> Iterator[keras.layers.Layer]:
        return (unit.layer for unit in self.units if unit.layer.name in self.refusals.values())

    def _read(self, recorder: Recording, reading: StepReading, tape: tf.GradientTape, losses: tf.Tensor) -> None:
        watched = [t for call in recorder.calls for t in call.watched]
        sources = [*watched, *(resource(v) for v in recorder.direct)]
        with own_rows():
            backward = tape.gradient(losses, sources, unconnected_gradients="zero")
        found, read = reading.refusals(recorder.calls, losses, backward[: len(watched)], (), self._known)
        for refusal in found:
            self.refusals.setdefault(str(refusal), "")
        for one in read:
            with self._listening(one.call.layer.name):
                refuse_uncovered([one.call], {variable.path for variable, _ in factors_of(one, tf.shape(losses)[0])})
        for variable, gradient in zip(recorder.direct, backward[len(watched) :]):
            with self._listening():
                reading.shares(variable, gradient)

    def _listening(self, layer: str = "") -> _Listening:
        return _Listening(self.refusals, layer)


class _Listening:
    """A block that ends where something is refused, which is noted.

    Args:
        refusals: where.
        layer: that it is about, or "".
    """

    def __init__(self, refusals: dict[str, str], layer: str):
        self._refusals, self._layer = refusals, layer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, refusal: Any, trace: Any) -> bool:
        if isinstance(refusal, NotPrivate):
            self._refusals.setdefault(str(refusal), self._layer)
            return True
        return False
