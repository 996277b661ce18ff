"""The private step, in one place: a batch goes in, its clipped sum comes out.

    Batch.from_data(data) -> PrivateStep.clipped_sum -> optimizer.apply

The model, a parameter server's worker and the benchmarks hold one of these each and make the same step with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdp_rec.clipping import ClippedSum, Clipping, in_parts
from tfdp_rec.clipping.batches import example_leaves, map_examples
from tfdp_rec.clipping.engine import Graph
from tfdp_rec.keras_internals import resource
from tfdp_rec.refused import NotPrivate
from tfdp_rec.training.batch import Batch, predictions_of


@dataclasses.dataclass
class PrivateStep:
    """How a model's batch becomes a clipped sum."""

    model: Any
    microbatch_size: int | None = None
    diagnostics: bool = False

    def __post_init__(self) -> None:
        self._predictions: Any = None
        self._outputs: list[Any] | None = None
        self._lengths: list[Any] | None = None
        self.forget_graph()

    def losses(self, batch: Batch, training: bool = True) -> tf.Tensor:
        """Each example's loss, `[batch]`; what the model's own call gives meanwhile is noted, for its metrics."""
        outputs: list[Any] = []
        self._outputs = outputs
        try:
            losses = self.model.per_example_loss(batch.examples, training=training)
        finally:
            self._outputs = None
        self._predictions = predictions_of(batch.examples, outputs)
        return losses

    def note_output(self, output: Any) -> None:
        """Notes what the model's own call gave, if it was for a loss."""
        if self._outputs is not None:
            self._outputs.append(output)

    def clipped_sum(self, batch: Batch, clip: tf.Tensor) -> ClippedSum:
        """The clipped sum of a batch; rows that owe noise get it before they are read. A graph, whatever else is eager."""
        self._refuse_another_length(batch)
        with self.model.release.in_step(), tf.control_dependencies(batch.tensors):
            clipped, self._predictions = self._graph(batch.examples, clip)
        return clipped

    def _refuse_another_length(self, batch: Batch) -> None:
        # Where batches are padded to their longest row, that row decides all shapes. `fit` reads a dataset's type, in
        # which such a length is open; in a loop over batches each has a shape of its own, and a graph.
        lengths = [leaf.shape[1:].as_list() for leaf in example_leaves(batch.examples, self.model.shared_inputs)]
        if self._lengths is None:
            self._lengths = lengths
        if lengths != self._lengths:
            raise NotPrivate(
                f"Examples of this batch have shapes {lengths}, and earlier ones had {self._lengths}: if batches "
                "are padded to their longest row, that row changes all others. Pad all batches to one length; or "
                "compile anew, if the length does not depend on the data."
            )

    def _sum(self, examples: Any, clip: tf.Tensor) -> tuple[ClippedSum, Any]:
        loss = lambda examples: self.losses(Batch(examples))  # noqa: E731
        scales, size = getattr(self.model.optimizer, "row_scales", {}), self.microbatch_size
        clipping = Clipping(self.model, loss, clip, self.model.release.before_read, scales)
        if size is not None:
            return in_parts(clipping, examples, size), None
        clipped = clipping.sum(examples)
        # What was computed with holds examples more than once, up to a whole number of vectors.
        first = lambda t: t[: tf.size(clipped.losses)]  # noqa: E731
        return clipped, map_examples(first, self.take_predictions(), self.model.shared_inputs)

    def forget_graph(self) -> None:
        """What was traced is of tables that others have come to share."""
        self._graph = Graph(self._sum, self.model.shared_inputs)

    def regularization(self) -> dict[str, tf.Tensor]:
        """Gradients of the weights' own regularisers by path: no example decides them, so they need no clip, no noise.

        Not those of tables, which would be read whole: the mechanism has them as a decay, or refuses them. The loss
        that is shown is that of the examples, without any penalty.
        """
        found = {}
        for variable in self.model.trainable_variables:
            if variable.regularizer is not None and not self.model.is_table(variable):
                weight = tf.convert_to_tensor(resource(variable))
                with tf.GradientTape() as tape:
                    tape.watch(weight)
                    penalty = variable.regularizer(weight)
                found[variable.path] = tape.gradient(penalty, weight)
        return found

    def take_predictions(self) -> Any:
        """(x, y, y_pred, sample_weight) of the whole batch, if the loss had them at once; None otherwise."""
        found, self._predictions = self._predictions, None
        return found


def finite(clipped: ClippedSum) -> tf.Tensor:
    """Which examples count: those whose norm and loss are finite, `[batch]`."""
    return tf.math.is_finite(clipped.norms) & tf.math.is_finite(tf.cast(clipped.losses, clipped.norms.dtype))


def finite_losses(clipped: ClippedSum) -> tf.Tensor:
    """The losses of the examples that count."""
    return tf.boolean_mask(clipped.losses, finite(clipped))


def shown_losses(clipped: ClippedSum) -> tf.Tensor:
    """Those that training shows the mean of: of the examples that count; not a number where there are none but others.

    A model that has diverged drops all its examples and trains on noise: the mean of those before would hide it.
    """
    none = tf.reduce_any(~finite(clipped)) & ~tf.reduce_any(finite(clipped))
    lost = tf.fill([tf.cast(none, tf.int32)], tf.constant(float("nan"), clipped.losses.dtype))
    return tf.concat([finite_losses(clipped), lost], axis=0)


def diagnostics(clipped: ClippedSum) -> dict[str, tf.Tensor]:
    """Share of examples clipped, median norm, examples dropped. Private: nothing protects them."""
    counted = finite(clipped)
    norms = tf.sort(tf.boolean_mask(clipped.norms, counted))
    count = tf.size(norms)
    median = tf.cond(count > 0, lambda: norms[count // 2], lambda: tf.zeros([], norms.dtype))
    over = tf.cast(norms > tf.cast(clipped.sensitivity, norms.dtype), tf.float32)
    return {
        "clipped_share": tf.math.divide_no_nan(tf.reduce_sum(over), tf.cast(count, tf.float32)),
        "median_norm": median,
        "dropped_examples": tf.reduce_sum(tf.cast(~counted, tf.int32)),
    }
