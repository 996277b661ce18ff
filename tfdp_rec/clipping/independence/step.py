"""The reading of a private step as it is traced: what must be by example for the clipped sum to have its sensitivity.

    losses              one an example
    watched outputs     of every recorded layer call, and their gradients: what factors are made of
    inputs of calls     the other half of the factors: by example likewise, or shared

The graph that is read is the one that will run, whoever had it traced: `fit`, `train_on_batch`, a loop of one's own, a
worker. The settling of rows before they are read, which this package adds to it, is passed over: it writes noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping.batches import example_leaves
from tfdp_rec.clipping.independence.reading import Reading, Walk
from tfdp_rec.clipping.independence.sizes import ONE, Size
from tfdp_rec.clipping.independence.values import ByExample, Mixed, Shared, Value, Within
from tfdp_rec.clipping.rules import Call, NotPrivate


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
            _refuse_padding(leaf)

    def refuse_mixing(
        self, calls: Sequence[Call], losses: tf.Tensor, gradients: Sequence[tf.Tensor], own: Any
    ) -> list[bool]:
        """Raises unless everything that factors are made of is by example.

        Args:
            calls: as recorded.
            losses: one an example.
            gradients: of the calls' watched tensors, in order.
            own: numbers of the operations that settle rows.

        Returns:
            For each call, whether it was made on several rows an example, merged in one axis.

        Raises:
            NotPrivate: with the operation that mixes examples, and the line that made it.
        """
        walk = self._walk(own)
        self._require(walk, losses, "the loss", ONE)
        left = iter(gradients)
        return [self._require_call(walk, call, [next(left) for _ in call.watched]) != ONE for call in calls]

    def _require_call(self, walk: Walk, call: Call, gradients: list[tf.Tensor]) -> Size:
        """How many rows an example has in a call of which all tensors are by example."""
        name = f"layer '{call.layer.name}'"
        rows = None
        for tensor, gradient in zip(call.watched, gradients):
            if isinstance(walk.value(tensor), Shared):
                raise NotPrivate(f"L{name[1:]} {NO_BATCH}")
            rows = self._require(walk, tensor, f"the output of {name}", rows).inner
            self._require(walk, gradient, f"the gradient of {name}", rows)
        for tensor in tf.nest.flatten((call.args, call.kwargs)):
            here = isinstance(tensor, tf.Tensor) and tensor.graph is self._graph
            if here and not isinstance(walk.value(tensor), Shared):
                self._require(walk, tensor, f"what {name} is called with", rows)
        return rows or ONE

    def _walk(self, own: Any) -> Walk:
        walk = Walk(_reading(self._model), self._graph, frozenset(own))
        for leaf in tf.nest.flatten(self._batch):
            if tf.is_tensor(leaf):
                walk.leaf(leaf, any(leaf is one for one in self._leaves))
        walk.read(self._start)
        return walk

    def _require(self, walk: Walk, tensor: tf.Tensor, subject: str, rows: Size | None) -> ByExample:
        value = walk.value(tensor)
        if isinstance(value, Mixed):
            raise walk.reading.refuse(value.operation, value.reason, value.detail, subject)
        fits = type(value) in (ByExample, Within) and not value.axis and value.outer == ONE  # type: ignore[attr-defined]
        if not isinstance(value, ByExample) or not fits or (rows is not None and value.inner != rows):
            raise walk.reading.refuse(tensor.op, _misplaced(value), subject=subject)
        return value


def _misplaced(value: Value) -> str:
    return "order" if type(value) is ByExample else "position" if isinstance(value, ByExample) else "unknown"


def _refuse_padding(leaf: tf.Tensor) -> None:
    if not isinstance(leaf, tf.Tensor):
        raise NotPrivate(
            f"The batch holds a {type(leaf).__name__}, whose rows no axis keeps apart; convert it to a tensor of "
            "fixed length in the data pipeline (to_tensor(shape=[None, length]), tf.sparse.to_dense)."
        )
    if leaf.shape.rank is None or None in leaf.shape[1:]:
        raise NotPrivate(
            f"The batch has a tensor of shape {leaf.shape}: where batches are padded to their longest example, that "
            "one changes everybody's input. Pad to a fixed length: padded_batch(..., padded_shapes=...), or "
            "Dataset.map with tf.ensure_shape."
        )


def _reading(model: keras.Model) -> Reading:
    generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", [])]
    seeds = {_handle(g.state): g._initial_seed for g in generators}
    metrics = {_handle(variable): "metric" for variable in model.metrics_variables}
    names = {_handle(variable): variable.path for variable in model.variables}
    return Reading({**metrics, **dict.fromkeys(seeds, "seed")}, names, seeds, [o.name for o in model._flatten_layers()])


def _handle(variable: keras.Variable) -> int | None:
    return id(getattr(variable._value, "handle", None))


NO_BATCH = (
    "was called on something without the batch as its first axis, so its gradient does not split by example. Give it "
    "one row an example (a position embedding: ids of shape [batch, T]), or, for candidates shared by the batch, use "
    "tfdp_rec.clipping.CandidateScores."
)
