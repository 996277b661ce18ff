"""The reading of a private step as it is traced: the tensors that must be by example for the clip to bound them.

    losses              one an example
    watched outputs     of every recorded layer call, and their gradients: one half of the factors
    inputs of calls     the other half of the factors: by example too, or shared

The graph that is read is the one that will run, in `fit`, `train_on_batch`, a loop of one's own or a worker. Operations
of this package that settle rows before they are read are skipped: they write noise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import (
    layers_within,
    metrics_variables,
    random_states,
    resource,
    resource_key,
)
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import find_withheld, rows_of
from tfdp_rec.core.sensitivity.batches import example_leaves, refuse_padding
from tfdp_rec.core.sensitivity.independence.gradient_shares import GradientShares
from tfdp_rec.core.sensitivity.independence.reading import Reading, Walk
from tfdp_rec.core.sensitivity.independence.refusals import forward, is_gradient, users_line
from tfdp_rec.core.sensitivity.independence.sizes import ONE, Size
from tfdp_rec.core.sensitivity.independence.values import ByExample, Handle, Shared
from tfdp_rec.core.sensitivity.rules import NO_BATCH, NO_ROWS, Call, DenseRule, EmbeddingRule, UniversalRule

_MOST_FAULTS = 64  # readings of one loss, each of which finds further faults
_ONE_INPUT = (DenseRule, EmbeddingRule)  # their factors are made of one input and one gradient, position by position


@dataclasses.dataclass
class CallRead:
    """A recorded call with gradients by example; `merged` if an example has several rows."""

    call: Call
    gradients: list[tf.Tensor]
    merged: bool = False


class StepReading:
    """The reading of one step: made before the loss is traced, used once its gradients are."""

    def __init__(self, model: keras.Model, batch: Any, shared: Sequence[str]):
        self._model, self._batch, self._shared = model, batch, shared
        self._graph = tf.compat.v1.get_default_graph()
        self._start = len(self._graph.get_operations())
        self._leaves = example_leaves(batch, shared)
        for leaf in self._leaves:
            refuse_padding(leaf)

    def read(self, calls: Sequence[Call], losses: tf.Tensor, gradients: Sequence[tf.Tensor]) -> list[CallRead]:
        """The calls, with gradients by example; raises `NotPrivate` if examples are mixed."""
        # At the first fault, since what comes after one may be of a form that no further reading expects.
        self._seen = self._walk()
        self._seen.require_rows(losses, "the loss")
        return [read() for read in self._readings(calls, losses, gradients)]

    def read_rows(self, tensor: tf.Tensor, subject: str) -> None:
        """Raises `NotPrivate` unless a tensor has a row for each example, made of that example alone."""
        self._seen = self._walk()
        self._seen.require_rows(tensor, subject)

    def refusals(
        self, calls: Sequence[Call], losses: tf.Tensor, gradients: Sequence[tf.Tensor], known: Sequence[Any]
    ) -> tuple[list[NotPrivate], list[CallRead]]:
        """All refusals of `read`, each operation at fault once, and the calls that are not refused."""
        # An operation at fault is then taken for what it should have been, and the step is read again, until no new
        # fault is found. A fault of a gradient follows from one of the forward pass, and counts only without one.
        forgiven = {id(operation): operation for operation in known}
        refusals: dict[Any, NotPrivate] = {}
        for _ in range(_MOST_FAULTS):
            new = {}
            faults, read = self._find_faults(calls, losses, gradients, list(forgiven.values()))
            for fault in faults:
                if fault.operation is None:
                    refusals.setdefault(str(fault), fault)
                    continue
                cause = id(forward(fault.operation))  # a fault of a gradient is that of its forward operation
                if cause not in forgiven:
                    refusals.setdefault(cause, fault)
                new[id(fault.operation)] = fault.operation
            if new.keys() <= forgiven.keys():
                break
            forgiven |= new
        every = list(refusals.values())
        others = [fault for fault in every if fault.operation is None or not is_gradient(fault.operation)]
        faulty = known or any(fault.operation is not None for fault in others)
        return (others if faulty else every), read

    def walk_to(self, tensor: tf.Tensor) -> Walk:
        """The reading of a tensor and of the operations that it is computed by."""
        made, todo = {id(tensor.op)}, [tensor.op]
        while todo:
            before = [t.op for t in todo.pop().inputs if id(t.op) not in made]
            made |= {id(op) for op in before}
            todo += before
        operations = self._graph.get_operations()
        return self._walk(skipped=[number for number, op in enumerate(operations) if id(op) not in made])

    def _find_faults(
        self, calls: Sequence[Call], losses: tf.Tensor, gradients: Sequence[tf.Tensor], forgiven: Sequence[Any]
    ) -> tuple[list[NotPrivate], list[CallRead]]:
        """The refusals of a reading that excuses the `forgiven` operations, and the calls that are not refused."""
        faults: list[NotPrivate] = []
        read: list[CallRead] = []
        try:
            self._seen = self._walk(forgiven)
        except NotPrivate as refusal:
            return [refusal], read
        # Every part is read by itself, so that a refusal of one does not hide those of others.
        parts: list[Callable[[], Any]] = [lambda: self._seen.require_rows(losses, "the loss")]
        parts += self._readings(calls, losses, gradients)
        for part in parts:
            try:
                found = part()
                read += [found] if isinstance(found, CallRead) else []
            except NotPrivate as refusal:
                faults.append(refusal)
        return faults, read

    def _readings(
        self, calls: Sequence[Call], losses: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> list[Callable[[], CallRead]]:
        """For each call a function that reads it."""
        left, size = iter(gradients), tf.shape(losses)[0]
        return [functools.partial(self._read_call, call, [next(left) for _ in call.watched], size) for call in calls]

    def shares(self, variable: keras.Variable, gradient: Any) -> tf.Tensor:
        """Each example's share of the gradient of one of the model's own variables, read outside all layers."""
        if not isinstance(gradient, tf.Tensor):
            raise NotPrivate(f"Rows of '{variable.path}' are read outside a layer; make it a keras.layers.Embedding.")
        return GradientShares(self._seen, f"the gradient of '{variable.path}'").find(gradient)

    def _read_call(self, call: Call, gradients: list[tf.Tensor], size: tf.Tensor) -> CallRead:
        name = f"layer '{call.layer.name}'"
        if any(isinstance(self._seen.value(t), Shared) for t in call.watched):
            return self._read_shared_call(call, gradients, size)
        rows = None
        for tensor, gradient in zip(call.watched, gradients):
            rows = self._seen.require_rows(tensor, f"the output of {name}", rows).inner
            self._seen.require_rows(gradient, f"the gradient of {name}", rows)
        for tensor in (t for t in call.inputs if isinstance(t, tf.Tensor) and t.graph is self._graph):
            if not isinstance(self._seen.value(tensor), Shared):
                self._seen.require_rows(tensor, f"what {name} is called with", rows)
            elif tensor.shape.rank and isinstance(call.rule, UniversalRule):  # it would be split among the examples
                raise NotPrivate(f"Layer '{call.layer.name}' {NO_ROWS}.")
        self._refuse_other_masks(call, rows)
        return CallRead(call, gradients, rows not in (None, ONE))

    def _refuse_other_masks(self, call: Call, rows: Size | None) -> None:
        # Each example is given its row of a mask, which has as many rows as the output.
        for mask in (mask for mask in call.masks if mask is not None and mask.graph is self._graph):
            value = self._seen.value(mask)
            if not isinstance(value, ByExample) or value.axis or value.inner != rows:
                line = users_line(mask.op)
                raise NotPrivate(
                    f"Layer '{call.layer.name}' draws a dropout mask{f' in {line}' * bool(line)} whose first axis is "
                    "not the batch (but batch times length, say), so that no example has a row of it. Call Dropout on "
                    "[batch, T, n], before a reshape to [batch * T, n] or after the one back."
                )

    def refuse_beside(self, call: Call) -> None:
        """Refuses a layer that, run for one example, read more than its arguments and what all examples share."""
        for tensor in call.beside:
            value = self._seen.value(tensor)
            if not isinstance(value, Shared) and not (
                isinstance(value, Handle) and value.key not in self._seen.reading.writable
            ):
                raise NotPrivate(
                    f"Layer '{call.layer.name}' is run again for each example, and reads {tensor.op.type} "
                    f"'{tensor.op.name}', which is no argument of its call: all examples would enter the gradient of "
                    "each. Give it to the layer as an argument."
                )

    def _read_shared_call(self, call: Call, gradients: list[tf.Tensor], size: tf.Tensor) -> CallRead:
        # A call on a shared input is one on a copy for each example, each with its own share of the gradient.
        if type(call.rule) not in _ONE_INPUT or len(call.watched) != 1:
            raise NotPrivate(f"Layer '{call.layer.name}' {NO_BATCH}.")
        (watched,), (gradient,) = call.watched, gradients
        name = f"the gradient of layer '{call.layer.name}'"
        shares = tf.ensure_shape(GradientShares(self._seen, name).find(gradient), [None, *watched.shape])
        given = tf.convert_to_tensor(call.input)
        copies = tf.broadcast_to(given, tf.concat([size[None], tf.shape(given)], axis=0))
        alone = dataclasses.replace(call, args=(copies,), kwargs={}, watched=[shares], bag=None)
        return CallRead(alone, [shares], False)

    def _walk(self, forgiven: Sequence[Any] = (), skipped: Iterable[int] = ()) -> Walk:
        ids = {id(operation) for operation in forgiven}
        excused = {n for n, o in enumerate(self._graph.get_operations()) if id(o) in ids} if ids else set()
        walk = Walk(_reading(self._model), self._graph, frozenset(skipped) | excused)
        for tensor in (tensor for operation in forgiven for tensor in operation.outputs):
            walk.leaf(tensor, bool(tensor.shape.rank) and tensor.shape[0] is None)
        for leaf in tf.nest.flatten(self._batch):
            if tf.is_tensor(leaf):
                walk.leaf(leaf, any(leaf is one for one in self._leaves))
        walk.read(self._start)
        return walk


def _reading(model: keras.Model) -> Reading:
    seeds = [_handle(state) for state in random_states(model)]
    metrics = {_handle(variable): "metric" for variable in metrics_variables(model)}
    names = {_handle(variable): variable.path for variable in model.variables}
    own = [variable for variable in model.trainable_variables if find_withheld(variable) is not None]
    names |= {resource_key(rows_of(variable).handle): variable.path for variable in own}
    layers = [layer.name for layer in layers_within(model)]
    return Reading({**metrics, **dict.fromkeys(seeds, "seed")}, names, layers)


def _handle(variable: keras.Variable) -> Any:
    return resource_key(getattr(resource(variable), "handle", None))
