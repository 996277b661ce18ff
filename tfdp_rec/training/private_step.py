"""The private step: from a batch to its clipped sum.

    Batch.from_data(data) -> PrivateStep.clipped_sum -> optimizer.apply

The model, a parameter server's worker and the benchmarks all make this step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.branches import choose
from tfdp_rec.core.ground.keras_internals import resource
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.batches import example_leaves, map_examples
from tfdp_rec.core.sensitivity.data_flow import refuse_data_read
from tfdp_rec.core.sensitivity.engine import ClippedSum, Clipping, Graph, Share
from tfdp_rec.core.sensitivity.microbatches import in_parts, on_devices
from tfdp_rec.training.batch import Batch, predictions_of

OPTIONS = ("microbatch_size", "diagnostics", "adapted_to_public_data")
"""The options of `compile` that are a step's own."""


@dataclasses.dataclass
class PrivateStep:
    """The private step of one model."""

    model: Any
    microbatch_size: int | None = None  # number of examples that are processed at a time; None for all
    diagnostics: bool = False  # whether logs show figures of the norms
    adapted_to_public_data: bool = False  # whether layers may know what `adapt` found
    devices: tuple[str, ...] = ()  # those that share the sum; none where it is made on the default device

    def __post_init__(self) -> None:
        self._predictions: Any = None
        self._outputs: list[Any] | None = None
        self._lengths: list[Any] | None = None
        self.forget_graph()

    @property
    def options(self) -> dict[str, Any]:
        """The step's options, as `compile` takes them."""
        return {name: getattr(self, name) for name in OPTIONS}

    def losses(self, batch: Batch, training: bool = True) -> tf.Tensor:
        """Each example's loss, `[batch]`; keeps the outputs of the model's call, for its metrics."""
        outputs: list[Any] = []
        self._outputs = outputs
        try:
            losses = self.model.per_example_loss(batch.examples, training=training)
        finally:
            self._outputs = None
        self._predictions = predictions_of(batch.examples, outputs)
        return losses

    def note_output(self, output: Any) -> None:
        """Keeps the output of the model's call, if it was within `losses`."""
        if self._outputs is not None:
            self._outputs.append(output)

    def clipped_sum(self, batch: Batch, clip: tf.Tensor) -> ClippedSum:
        """The clipped sum of a batch, always computed in a graph; rows that owe noise get it before they are read."""
        self._refuse_another_length(batch)
        with self.model.private_weights.in_step(), tf.control_dependencies(batch.tensors):
            clipped, self._predictions = self._graph(batch.examples, clip, batch.present)
        return clipped

    def _refuse_another_length(self, batch: Batch) -> None:
        # If batches are padded to their longest row, that row decides the shape of all others. `fit` reads a dataset's
        # type, in which such a length is open; in a loop over batches each batch has a shape and a graph of its own.
        lengths = [str(leaf.shape[1:]) for leaf in example_leaves(batch.examples, self.model.shared_inputs)]
        if self._lengths is None:
            self._lengths = lengths
        if lengths != self._lengths:
            now, earlier = (", ".join(shapes) for shapes in (lengths, self._lengths))
            raise NotPrivate(
                f"Examples of this batch have shapes {now}, and earlier ones {earlier}: if batches are padded "
                "to their longest row, that row changes all others. Pad all batches to one length; or compile anew, if "
                "the length does not depend on the data."
            )

    def _sum(self, examples: Any, clip: tf.Tensor, present: tf.Tensor | None = None) -> tuple[ClippedSum, Any]:
        def loss(examples: Any) -> tf.Tensor:
            return self.losses(Batch(examples))

        def sum_of(clipping: Clipping, examples: Any, share: Share | None = None) -> ClippedSum:
            clipped, present = clipping.sum(examples, share), clipping.present
            # The sum repeats examples up to a whole number of vectors; predictions are those of examples with data.
            counted = tf.range(clipping.batch_size(examples)) if present is None else tf.where(present)[:, 0]
            own = self.take_predictions()
            predictions.append(map_examples(lambda rows: tf.gather(rows, counted), own, self.model.shared_inputs))
            return clipped

        predictions: list[Any] = []
        rule, ahead = self.model.optimizer.clip_rule, self.model.private_tables.find_ids_ahead(examples)
        clipping = Clipping(self.model, loss, clip, rule=rule, present=present, ids_ahead=ahead)
        size = self.microbatch_size
        if self.devices:
            clipped = on_devices(clipping, examples, self.devices, sum_of, size)
        else:
            clipped = sum_of(clipping, examples) if size is None else in_parts(clipping, examples, size, sum_of)
        return clipped, self._join(predictions) if size is None else None

    def _join(self, predictions: Sequence[Any]) -> Any:
        """The predictions of several parts of a batch as those of the batch."""
        shared = self.model.shared_inputs
        leaves = zip(*(example_leaves(each, shared) for each in predictions), strict=True)
        joined = iter([tf.concat(several, axis=0) for several in leaves])
        return map_examples(lambda _: next(joined), predictions[0], shared)

    def forget_graph(self) -> None:
        """Has the sum traced again, as when another model begins to train a table."""
        self._graph = Graph(self._sum, self.model.shared_inputs)

    def regularization(self) -> dict[str, tf.Tensor]:
        """Gradients of the regularizers by path; they depend on no example, so they need neither clip nor noise."""
        # Tables would be read whole: a mechanism applies their regularizers as decay, or refuses them. The loss in logs
        # is that of the examples, without penalties.
        found = {}
        for variable in self.model.trainable_variables:
            if variable.regularizer is None:
                continue
            gradient = functools.partial(_gradient_of, variable.regularizer)
            spec = tf.TensorSpec(variable.shape, variable.dtype)
            refuse_data_read(f"The regularizer of '{variable.path}'", gradient, [spec])
            if variable not in self.model.private_tables:
                found[variable.path] = gradient(tf.convert_to_tensor(resource(variable)))
        return found

    def take_predictions(self) -> Any:
        """(x, y, y_pred, sample_weight) of the whole batch, once; None if there are none, or under microbatches."""
        found, self._predictions = self._predictions, None
        return found


def _gradient_of(penalty: Any, weight: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(weight)
        total = penalty(weight)
    return tape.gradient(total, weight)


def finite(clipped: ClippedSum) -> tf.Tensor:
    """Whether each example counts, `[batch]`: its norm and loss are finite."""
    return tf.math.is_finite(clipped.norms) & tf.math.is_finite(tf.cast(clipped.losses, clipped.norms.dtype))


def finite_loss(clipped: ClippedSum) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of the losses of the examples that count, and their number, float32."""
    counts = finite(clipped)
    losses = tf.where(counts, tf.cast(clipped.losses, tf.float32), 0.0)
    return tf.reduce_sum(losses), tf.reduce_sum(tf.cast(counts, tf.float32))


def loss_for_logs(clipped: ClippedSum) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean loss that logs show, of the examples that count, and their number; NaN if all of a batch do not."""
    # A model that has diverged drops all examples and trains on noise. The mean of earlier losses would hide that.
    total, number = finite_loss(clipped)
    lost = (number == 0) & (tf.size(clipped.losses) > 0)
    return tf.where(lost, float("nan"), tf.math.divide_no_nan(total, number)), tf.where(lost, 1.0, number)


def diagnostics(clipped: ClippedSum) -> dict[str, tf.Tensor]:
    """Share of examples clipped, median norm, number dropped: private figures, without noise."""
    counted = finite(clipped)
    norms = tf.sort(tf.boolean_mask(clipped.norms, counted))
    count = tf.size(norms)
    median = choose(count > 0, lambda: norms[count // 2], lambda: tf.zeros([], norms.dtype))
    over = tf.cast(norms > tf.cast(clipped.sensitivity, norms.dtype), tf.float32)
    return {
        "clipped_share": tf.math.divide_no_nan(tf.reduce_sum(over), tf.cast(count, tf.float32)),
        "median_norm": median,
        "dropped_examples": tf.reduce_sum(tf.cast(~counted, tf.int32)),
    }
