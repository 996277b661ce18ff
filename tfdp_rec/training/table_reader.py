"""Which rows of which tables a batch will read, found out from the model's own loss.

The loss is traced once in a scratch graph while the layers are recorded; the graph is then pruned to the operations
that produce the ids, so that it runs in the data pipeline without the model's weights.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_rec.clipping.recorder import recording, refuse_added_losses
from tfdp_rec.keras_internals import layers_within
from tfdp_rec.training.batch import hidden_spec, normalised


class TableReader:
    """Which ids a batch reads, by table: the pruned graph of a model's loss.

    Attributes:
        tables: paths of the variables that are read by row only.
    """

    def __init__(self, tables: list[str], pruned: Any):
        self.tables, self._pruned = tables, pruned

    def __call__(self, batch: Any) -> dict[str, tf.Tensor]:
        """Table path -> ids `[n]`, int64."""
        if self._pruned is None:
            return {}
        return self._pruned(*tf.nest.flatten(normalised(batch)))


def trace_reader(model: Any, spec: Any) -> TableReader:
    """Traces a model's loss and keeps of it what decides the ids."""
    spec = normalised(spec)
    ids: dict[str, tf.Tensor] = {}

    def trace(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        batch = tf.nest.pack_sequence_as(spec, tensors)
        with model.release.in_step(), recording(model) as recorder:
            model.per_example_loss(batch, training=True)
        for path, reads in recorder.tables().items():
            ids[path] = tf.concat([tf.reshape(tf.cast(r, tf.int64), [-1]) for r in reads], axis=0)
        return ids

    hidden = [hidden_spec(s, spec, model.shared_inputs) for s in tf.nest.flatten(spec)]
    given = [s for s in hidden if s is not None]
    build_layers(model, spec, given)
    refuse_added_losses(model)
    wrapped = tf.compat.v1.wrap_function(trace, given)
    pruned = wrapped.prune(wrapped.inputs[: len(hidden)], wrapped.structured_outputs) if ids else None
    return TableReader(list(ids), pruned)


def build_layers(model: Any, spec: Any, flat_spec: list[tf.TensorSpec]) -> None:
    """Makes the variables of layers that have none yet, by a trace of its own: within `wrap_function` two layers'
    variables of one name ("embeddings") would collide.
    """
    if all(layer.built for layer in layers_within(model)):
        return

    def loss(*tensors: tf.Tensor) -> tf.Tensor:
        return model.per_example_loss(tf.nest.pack_sequence_as(spec, tensors), training=False)

    with model.release.in_step():  # nothing of it runs
        tf.function(loss, autograph=False).get_concrete_function(*flat_spec)
