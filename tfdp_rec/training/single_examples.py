"""Each example alone and among others: an oracle of independence that shares no rule with the reading of a graph.

Clipping uses an example's loss, the inputs of recorded calls and their output gradients. One graph computes them for
batches of all sizes. It is run on batches that repeat a few examples, and on each of these alone; a difference shows
that other examples have an effect. An example that differs is tried again among copies of itself in a batch of the same
size, since products of one row and of several round differently, which may turn a ReLU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import random_states
from tfdp_rec.core.sensitivity.batches import batch_size, hide_batch_axis, map_examples, open_specs
from tfdp_rec.core.sensitivity.engine import check_losses, shared_inputs
from tfdp_rec.core.sensitivity.recorder import record_calls, settle_by_owner
from tfdp_rec.training.neighbour_check import still

SIZES = (2, 300)  # two examples, and more than one byte can count
EXAMPLES = 8  # number of examples of the batch that are repeated, at most
_TOLERANCE = 1e-3  # relative, for numbers computed in float32


class SingleExamples:
    """A comparison of a model's loss on examples alone and among others: `refusals`, and a `summary` in sentences."""

    def __init__(self, model: keras.Model, loss: Callable[[Any], tf.Tensor], batch: Any):
        self._model, self._loss, self._batch = model, loss, batch
        self._shared, self._names = shared_inputs(model), ["the loss"]
        self._traced = tf.function(self._parts, autograph=False)
        self.refusals: list[str] = []
        state = [*model.metrics_variables, *random_states(model)]
        before = [tf.identity(variable.value) for variable in state]
        try:
            with still(model):
                self.summary = self._compared()
        except tf.errors.OpError as problem:
            self.summary = f"Not compared with examples alone: TensorFlow stops ({type(problem).__name__})."
        finally:
            for variable, value in zip(state, before):
                variable.assign(value)

    def _compared(self) -> str:
        size = min(int(batch_size(self._batch, self._shared)), EXAMPLES)
        alone = [self._run([number]) for number in range(size)]
        if not alone:
            return "Not compared with examples alone: the batch holds none."
        if self._differ(alone[0], self._run([0])) is not None:
            return "Not compared with examples alone: the loss draws random numbers itself."
        different = 1 + sum(self._differ(alone[0], one) is not None for one in alone[1:])
        # A part is an example's own if two examples have twice the rows; the rest is shared and not compared.
        others = self._run([0, 0])
        own = [one.shape and two.shape and two.shape[0] == 2 * one.shape[0] for one, two in zip(alone[0], others)]
        rng = np.random.default_rng(0)
        for number in SIZES:
            rows = [*range(min(size, number)), *rng.integers(0, size, max(number - size, 0))]
            if not self.refusals:
                self._compare(alone, rows, own)
        left = sorted({name for name, is_own in zip(self._names, own) if not is_own})
        summary = (
            f"On batches of {SIZES[0]} and {SIZES[1]} examples, which repeat {different} distinct examples of this "
            "batch, each example's loss, its layers' inputs and their output gradients were compared with those of the "
            "example alone."
        )
        return summary + (f" Not compared: {', '.join(left)}, which all examples share." if left else "")

    def _compare(self, alone: list[list[np.ndarray]], rows: list[int], own: list[Any]) -> None:
        found = self._run(rows)
        for place, row in enumerate(rows):
            mine = self._rows_at(found, place, len(rows), own)
            name = self._differ(self._rows_at(alone[row], 0, 1, own), mine)
            if name is None:
                continue
            copies = self._rows_at(self._run([row] * len(rows)), place, len(rows), own)
            if self._differ(copies, mine) is not None:
                self.refusals.append(
                    f"In a batch of {len(rows)} made of this one's examples, {name} of the example at place {place} is "
                    "another than among copies of itself: examples change each other's gradients, so clipping bounds "
                    "nothing. Compute every example's loss from that example alone."
                )
                return

    def _run(self, rows: list[int]) -> list[np.ndarray]:
        batch = map_examples(lambda t: tf.gather(t, rows), self._batch, self._shared)
        graph = self._traced.get_concrete_function(open_specs(batch, self._shared))
        return [np.asarray(part) for part in graph(*tf.nest.flatten(batch))]

    def _rows_at(self, parts: list[np.ndarray], place: int, size: int, own: list[Any]) -> list[np.ndarray]:
        """One example's rows of the parts that are by example."""
        return [p.reshape([size, -1])[place] if is_own else np.zeros(0) for p, is_own in zip(parts, own)]

    def _differ(self, one: list[np.ndarray], other: list[np.ndarray]) -> str | None:
        """The name of the first part that differs."""
        for name, a, b in zip(self._names, one, other):
            if a.dtype.kind not in "fV":
                same = np.array_equal(a, b)
            else:
                a, b = a.astype(np.float64), b.astype(np.float64)
                largest = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
                same = np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
            if not same:
                return name
        return None

    def _parts(self, batch: Any) -> list[tf.Tensor]:
        """Losses, then inputs and output gradients of each recorded call."""
        batch = hide_batch_axis(batch, self._shared)
        size, graph = batch_size(batch, self._shared), tf.compat.v1.get_default_graph()
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            with record_calls(self._model, tape, settle_by_owner) as recorder:
                losses = check_losses(self._loss(batch), size)
        # The names are those of the last trace; every trace makes the same parts in the same order.
        parts: list[tf.Tensor] = [losses]
        watched = [t for call in recorder.calls for t in call.watched]
        left = iter(tape.gradient(losses, watched, unconnected_gradients="zero"))
        del self._names[1:]
        for call in recorder.calls:
            given = [t for t in tf.nest.flatten((call.args, call.kwargs)) if isinstance(t, tf.Tensor)]
            given = [t for t in given if t.graph is graph and t.dtype not in (tf.resource, tf.variant)]
            gradients = [tf.convert_to_tensor(g) for g in itertools.islice(left, len(call.watched))]
            for what, tensors in (("an input", given), ("an output gradient", gradients)):
                parts += tensors
                self._names += [f"{what} of layer '{call.layer.name}'"] * len(tensors)
        return parts
