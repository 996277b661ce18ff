"""The reading of a private step as it is traced: what must be by example for the clipped sum to have its sensitivity.

    losses              one an example
    watched outputs     of every recorded layer call, and their gradients: what factors are made of
    inputs of calls     the other half of the factors: by example likewise, or shared

The graph that is read is the one that will run, whoever had it traced: `fit`, `train_on_batch`, a loop of one's own, a
worker. The settling of rows before they are read, which this package adds to it, is passed over: it writes noise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping.batches import example_leaves, refuse_padding
from tfdp_rec.clipping.rules import NO_BATCH, Call, DenseRule, EmbeddingRule
from tfdp_rec.independence.gradient_shares import Shares
from tfdp_rec.independence.reading import Reading, Walk
from tfdp_rec.independence.refusals import forward, is_gradient
from tfdp_rec.independence.sizes import ONE, Size
from tfdp_rec.independence.values import ByExample, Mixed, Shared, Value
from tfdp_rec.keras_internals import layers_within, random_states, resource
from tfdp_rec.refused import NotPrivate
from tfdp_rec.withheld_rows import held_rows, withheld

_MOST_FAULTS = 64  # how often a loss is read anew to find more of them
_ONE_INPUT = (DenseRule, EmbeddingRule)  # whose factors come from one input and one gradient, position by position


@dataclasses.dataclass
class CallRead:
    """A recorded call that was read: its gradients are by example; `merged`, if on several rows an example."""

    call: Call
    gradients: list[tf.Tensor]
    merged: bool = False


class StepReading:
    """Begins where a step begins to be traced; reads it once its gradients are there.

    Args:
        model: whose loss it is.
        batch: its batch, the length of its first axis hidden.
        shared: keys of entries that all examples share.

    Raises:
        NotPrivate: for a batch whose examples have no fixed shape.
    """

    def __init__(self, model: keras.Model, batch: Any, shared: Sequence[str]):
        self._model, self._batch, self._shared = model, batch, shared
        self._graph = tf.compat.v1.get_default_graph()
        self._start = len(self._graph.get_operations())
        self._leaves = example_leaves(batch, shared)
        for leaf in self._leaves:
            refuse_padding(leaf)

    def read(
        self, calls: Sequence[Call], losses: tf.Tensor, gradients: Sequence[tf.Tensor], own: Any
    ) -> list[CallRead]:
        """Refuses what mixes examples, and gives every call with gradients that are by example.

        Args:
            calls: as recorded.
            losses: one an example.
            gradients: of the calls' watched tensors, in order.
            own: numbers of the operations that settle rows.

        Raises:
            NotPrivate: with the operation that mixes examples, and the line that made it.
        """
        self._seen = self._walk(own)
        self._require(losses, "the loss", ONE)
        left = iter(gradients)
        return [self._read_call(call, [next(left) for _ in call.watched], tf.shape(losses)[0]) for call in calls]

    def refusals(
        self, calls: Sequence[Call], losses: tf.Tensor, gradients: Sequence[tf.Tensor], own: Any, known: Iterable[Any]
    ) -> tuple[list[NotPrivate], list[CallRead]]:
        """All that `read` would refuse, every operation at fault once and nothing of what follows from it; other calls.

        What is at fault is taken for what it should have been, and all is read again, until nothing new is found.
        Faults of gradients follow from those before them, and are told where there are none.

        Args:
            calls: as recorded.
            losses: one an example.
            gradients: of the calls' watched tensors, in order.
            own: numbers of the operations that settle rows.
            known: operations whose faults have been told of.
        """
        forgiven = {id(operation): operation for operation in known}
        faulty = bool(forgiven)
        told: dict[Any, NotPrivate] = {}
        for _ in range(_MOST_FAULTS):
            new = {}
            faults, read = self._faults(calls, losses, gradients, own, list(forgiven.values()))
            for fault in faults:
                if fault.operation is None:
                    told.setdefault(str(fault), fault)
                    continue
                cause = id(forward(fault.operation))  # a gradient is at fault where what it is the gradient of is
                if cause not in forgiven:
                    told.setdefault(cause, fault)
                new[id(fault.operation)] = fault.operation
            if new.keys() <= forgiven.keys():
                break
            forgiven |= new
        follows = [fault for fault in told.values() if fault.operation is not None and is_gradient(fault.operation)]
        others = [fault for fault in told.values() if not any(fault is one for one in follows)]
        faulty |= any(fault.operation is not None for fault in others)
        return (others if faulty else list(told.values())), read

    def walk_to(self, tensor: tf.Tensor) -> Walk:
        """What is known of a tensor, and of all that it is made of.

        Args:
            tensor: of the graph that is read.
        """
        made, todo = {id(tensor.op)}, [tensor.op]
        while todo:
            before = [t.op for t in todo.pop().inputs if id(t.op) not in made]
            made |= {id(op) for op in before}
            todo += before
        operations = self._graph.get_operations()
        return self._walk([number for number, op in enumerate(operations) if id(op) not in made])

    def _faults(
        self, calls: Any, losses: Any, gradients: Any, own: Any, forgiven: list[Any]
    ) -> tuple[list[NotPrivate], list[CallRead]]:
        """What stops a reading for which some operations do what they should, a refusal a part; and what does not."""
        faults: list[NotPrivate] = []
        read: list[CallRead] = []
        left, size = iter(gradients), tf.shape(losses)[0]
        parts: list[Callable[[], Any]] = [lambda: self._require(losses, "the loss", ONE)]
        for call in calls:
            parts.append(functools.partial(self._read_call, call, [next(left) for _ in call.watched], size))
        try:
            self._seen = self._walk(own, forgiven)
        except NotPrivate as refusal:
            return [refusal], read
        for part in parts:
            try:
                found = part()
                read += [found] if isinstance(found, CallRead) else []
            except NotPrivate as refusal:
                faults.append(refusal)
        return faults, read

    def shares(self, variable: keras.Variable, gradient: Any) -> tf.Tensor:
        """Each example's share of the gradient of a variable that the loss reads outside all layers.

        Args:
            variable: of the model's own.
            gradient: of the sum of the losses.

        Raises:
            NotPrivate: if the examples' shares cannot be told apart.
        """
        if not isinstance(gradient, tf.Tensor):
            raise NotPrivate(f"Rows of '{variable.path}' are read outside a layer; make it a keras.layers.Embedding.")
        return Shares(self._seen, f"the gradient of '{variable.path}'").of(gradient)

    def _read_call(self, call: Call, gradients: list[tf.Tensor], size: tf.Tensor) -> CallRead:
        """One call: of tensors that are all by example, or of what the batch shares."""
        name = f"layer '{call.layer.name}'"
        if any(isinstance(self._seen.value(t), Shared) for t in call.watched):
            return self._read_shared_call(call, gradients, size)
        rows = None
        for tensor, gradient in zip(call.watched, gradients):
            rows = self._require(tensor, f"the output of {name}", rows).inner
            self._require(gradient, f"the gradient of {name}", rows)
        for tensor in self._inputs(call):
            if not isinstance(self._seen.value(tensor), Shared):
                self._require(tensor, f"what {name} is called with", rows)
        return CallRead(call, gradients, rows not in (None, ONE))

    def _read_shared_call(self, call: Call, gradients: list[tf.Tensor], size: tf.Tensor) -> CallRead:
        """A call on something shared is one on as many copies of it as there are examples, each with its own share."""
        if type(call.rule) not in _ONE_INPUT or len(call.watched) != 1:
            raise NotPrivate(f"Layer '{call.layer.name}' {NO_BATCH}.")
        (watched,), (gradient,) = call.watched, gradients
        name = f"the gradient of layer '{call.layer.name}'"
        shares = tf.ensure_shape(Shares(self._seen, name).of(gradient), [None, *watched.shape])
        given = tf.convert_to_tensor(call.input)
        copies = tf.broadcast_to(given, tf.concat([size[None], tf.shape(given)], axis=0))
        return CallRead(dataclasses.replace(call, args=(copies,), kwargs={}, watched=[shares]), [shares], False)

    def _inputs(self, call: Call) -> list[tf.Tensor]:
        flat = tf.nest.flatten((call.args, call.kwargs))
        return [t for t in flat if isinstance(t, tf.Tensor) and t.graph is self._graph]

    def _walk(self, own: Any, forgiven: Sequence[Any] = ()) -> Walk:
        ids = {id(operation) for operation in forgiven}
        excused = {n for n, o in enumerate(self._graph.get_operations()) if id(o) in ids} if ids else set()
        walk = Walk(_reading(self._model), self._graph, frozenset(own) | excused)
        for tensor in (tensor for operation in forgiven for tensor in operation.outputs):
            walk.leaf(tensor, bool(tensor.shape.rank) and tensor.shape[0] is None)
        for leaf in tf.nest.flatten(self._batch):
            if tf.is_tensor(leaf):
                walk.leaf(leaf, any(leaf is one for one in self._leaves))
        walk.read(self._start)
        return walk

    def _require(self, tensor: tf.Tensor, subject: str, rows: Size | None) -> ByExample:
        value, reading = self._seen.value(tensor), self._seen.reading
        if isinstance(value, Mixed):
            raise reading.refuse(value.operation, value.reason, value.detail, subject)
        fits = isinstance(value, ByExample) and not value.axis and value.outer == ONE
        if not isinstance(value, ByExample) or not fits or (rows is not None and value.inner != rows):
            raise reading.refuse(tensor.op, _misplaced(value), subject=subject)
        return value


def _misplaced(value: Value) -> str:
    return "order" if isinstance(value, ByExample) else "unknown"


def _reading(model: keras.Model) -> Reading:
    seeds = [_handle(state) for state in random_states(model)]
    metrics = {_handle(variable): "metric" for variable in model.metrics_variables}
    names = {_handle(variable): variable.path for variable in model.variables}
    own = [variable for variable in model.trainable_variables if withheld(variable) is not None]
    names |= {id(held_rows(variable).handle): variable.path for variable in own}
    layers = [layer.name for layer in layers_within(model)]
    return Reading({**metrics, **dict.fromkeys(seeds, "seed")}, names, layers)


def _handle(variable: keras.Variable) -> int | None:
    return id(getattr(resource(variable), "handle", None))
