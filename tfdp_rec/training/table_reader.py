"""The ids that a batch reads from each table, derived from the model's loss.

The loss is traced once in a scratch graph while the layers are recorded. The graph is then pruned to the operations
that produce the ids, and runs in the data pipeline without the model's weights.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_rec.clipping.recorder import recording, refuse_added_losses
from tfdp_rec.keras_internals import layers_within
from tfdp_rec.training.batch import hidden_spec, normalised


class TableReader:
    """A function from a batch to the ids that it reads, by table."""

    def __init__(self, tables: list[str], pruned: Any):
        self.tables = tables  # paths of the variables that are read by rows only
        self._pruned = pruned

    def __call__(self, batch: Any) -> dict[str, tf.Tensor]:
        """Ids `[n]`, int64, by table path."""
        if self._pruned is None:
            return {}
        return self._pruned(*tf.nest.flatten(normalised(batch)))


def trace_reader(model: Any, spec: Any) -> TableReader:
    """The table reader of a model, from one trace of its loss."""
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
    """Makes the variables of layers that have none yet."""
    # By a trace of its own: within `wrap_function` variables of one name, such as "embeddings", would collide.
    if all(layer.built for layer in layers_within(model)):
        return

    def loss(*tensors: tf.Tensor) -> tf.Tensor:
        return model.per_example_loss(tf.nest.pack_sequence_as(spec, tensors), training=False)

    with model.release.in_step():  # traced, not run
        tf.function(loss, autograph=False).get_concrete_function(*flat_spec)
