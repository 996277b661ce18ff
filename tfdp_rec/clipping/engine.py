"""The clipped sum: Σ over the batch of each example's gradient g_b scaled to w_b g_b, w_b = min(1, C / ‖g_b‖).

Removing or adding one example changes the sum by at most C, its sensitivity, whatever the other examples are. The sum
carries that number with it: whoever adds noise scales it by the sensitivity found here and computes none of their own.

An example whose gradient is not finite has weight zero: it counts as an example of gradient zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import factors
from tfdp_rec.clipping.batches import batch_size, hide_batch_axis
from tfdp_rec.clipping.folding import folded
from tfdp_rec.clipping.independence import CallRead, StepReading
from tfdp_rec.clipping.recorder import BeforeRead, Recording, no_settling, recording, refuse_unread, refuse_unrecorded
from tfdp_rec.clipping.rules import Call, NotPrivate, resource

Gradient = Any  # tf.Tensor, or tf.IndexedSlices for a table


@dataclasses.dataclass
class Reads:
    """Which examples read which rows of one table: `example[i]` read row `ids[i]`; `shared` rows all of them read."""

    example: tf.Tensor
    ids: tf.Tensor
    shared: tf.Tensor


Factors = dict[str, list[factors.Factor]]


class Weighted(Mapping[str, Gradient]):
    """Σ_b w_b g_b by variable path, added up when asked for.

    Args:
        collected: variable path -> the factors of its per-example gradients.
        weights: w, `[batch]`.
    """

    def __init__(self, collected: Factors, weights: tf.Tensor):
        self._collected, self._weights = collected, weights

    def __getitem__(self, path: str) -> Gradient:
        return factors.weighted_sum(self._collected[path], self._weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self._collected)

    def __len__(self) -> int:
        return len(self._collected)

    def scaled(self, path: str, scale: tf.Tensor) -> Gradient:
        """A sum times a scalar. The scalar goes into the weights, one number an example, and costs nothing."""
        return factors.weighted_sum(self._collected[path], tf.cast(scale, self._weights.dtype) * self._weights)


@dataclasses.dataclass
class ClippedSum:
    """The clipped sum of a batch, and what must travel with it.

    Attributes:
        gradients: variable path -> Σ_b w_b g_b, `tf.IndexedSlices` for tables (an id may stand in several places).
        norms: ‖g_b‖ over all variables together, `[batch]`. Private: computed from the examples.
        sensitivity: how far one example can move `gradients`: C.
        losses: the examples' losses, `[batch]`. Private.
        reads: table path -> which example read which rows. Private.
    """

    gradients: Mapping[str, Gradient]
    norms: tf.Tensor
    sensitivity: tf.Tensor
    losses: tf.Tensor
    reads: dict[str, Reads] = dataclasses.field(default_factory=dict)

    def scaled(self, path: str, scale: tf.Tensor) -> Gradient:
        """`gradients[path]` times a scalar, in float32."""
        if isinstance(self.gradients, Weighted):
            return _float32(self.gradients.scaled(path, scale))
        found = _float32(self.gradients[path])
        factor = tf.cast(scale, tf.float32)
        if isinstance(found, tf.IndexedSlices):
            return tf.IndexedSlices(factor * found.values, found.indices, found.dense_shape)
        return factor * found


def _float32(gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, tf.float32), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, tf.float32)


def shared_inputs(model: keras.Model) -> tuple[str, ...]:
    """The keys of a batch that all examples share (a model says so by its attribute of that name)."""
    return tuple(getattr(model, "shared_inputs", ()))


def collect(
    recorder: Recording, tape: tf.GradientTape, losses: tf.Tensor, reading: StepReading | None = None
) -> Factors:
    """The factors of every trainable variable from one backward pass; refused if `reading` finds examples mixed."""
    watched = [t for call in recorder.calls for t in call.watched]
    sources = [*watched, *(resource(v) for v in recorder.direct)]
    backward = tape.gradient(losses, sources, unconnected_gradients="zero")
    if reading is not None:
        read = reading.read(recorder.calls, losses, backward[: len(watched)], recorder.settling)
    else:
        refuse_unread(recorder)
        found = iter(backward)
        read = [CallRead(call, [next(found) for _ in call.watched]) for call in recorder.calls]
    collected: Factors = {}
    covered: set[str] = set()
    for one in read:
        call = one.call
        # The gradient of a concatenation, say, has lost the shape that its tensor had.
        gradients = [tf.ensure_shape(tf.convert_to_tensor(g), t.shape) for g, t in zip(one.gradients, call.watched)]
        for variable, factor in call.rule.factors(call, gradients):
            covered.add(variable.path)
            if one.merged:
                factor = folded(factor, tf.shape(losses)[0], call.layer.name)
            if variable.trainable:
                collected.setdefault(variable.path, []).append(factor)
    _refuse_uncovered(recorder.calls, covered)
    for variable, gradient in zip(recorder.direct if reading is not None else (), backward[len(watched) :]):
        shares = factors.PerExample(reading.shares(variable, gradient))  # type: ignore[union-attr]
        collected.setdefault(variable.path, []).append(shares)
    return {path: factors.merge(several) for path, several in collected.items()}


def _refuse_uncovered(calls: Sequence[Call], covered: set[str]) -> None:
    """Rules must speak for every weight of their layers: an activation, say, may be a layer with weights of its own."""
    for call in calls:
        lost = [v.path for v in call.layer.trainable_variables if v.path not in covered]
        if lost:
            raise NotPrivate(
                f"The clipping rule {type(call.rule).__name__} of layer '{call.layer.name}' gives no gradient for "
                f"{', '.join(lost)}; make what owns them a layer of its own in the model, or register a rule that does."
            )


def clip_weights(norms: tf.Tensor, l2_norm_clip: tf.Tensor) -> tf.Tensor:
    """min(1, C / norm), and zero where the norm is not finite."""
    weights = l2_norm_clip / tf.maximum(norms, l2_norm_clip)
    return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))


def total_norms(collected: Factors) -> tf.Tensor:
    """Each example's gradient norm over all variables; rounding below zero counts as zero, NaN stays NaN."""
    squares = [factors.squared_norm(several) for several in collected.values()]
    kind = tf.float64 if any(s.dtype == tf.float64 for s in squares) else tf.float32
    total = tf.add_n([tf.cast(s, kind) for s in squares])
    return tf.sqrt(tf.where(total < 0, tf.zeros_like(total), total))


def reads_of(collected: Factors) -> dict[str, Reads]:
    """Which example read which rows, for the variables that are read by row only."""
    found = {}
    for path, several in collected.items():
        if all(f.sparse for f in several):
            found[path] = _reads(several)
    return found


def _reads(several: list[factors.Factor]) -> Reads:
    example = [tf.zeros([0], tf.int64)]
    ids, shared = list(example), list(example)
    for factor in several:
        if isinstance(factor, factors.Rows):
            count = tf.shape(factor.ids, tf.int64)
            example.append(tf.repeat(tf.range(count[0]), count[1]))
            ids.append(tf.reshape(factor.ids, [-1]))
        elif isinstance(factor, factors.Scores):
            shared.append(factor.ids)
    return Reads(tf.concat(example, 0), tf.concat(ids, 0), tf.concat(shared, 0))


def _here(leaf: Any) -> Any:
    """A tensor of the graph that is being traced, in a loop over parts of a batch too."""
    return leaf if leaf is None or tf.executing_eagerly() else tf.identity(leaf)


def bookkeeping(
    model: keras.Model,
    loss: Callable[[Any], tf.Tensor],
    batch: Any,
    l2_norm_clip: tf.Tensor,
    before_read: BeforeRead = no_settling,
) -> ClippedSum:
    """One forward and one backward pass: norms and clipped sum both come from the same two tensors a call.

    Traced, it is read (`independence/`) before anything is made of it; run eagerly, as `check` does, it is not.
    """
    shared = shared_inputs(model)
    batch = hide_batch_axis(tf.nest.map_structure(_here, batch), shared)
    reading = None if tf.executing_eagerly() else StepReading(model, batch, shared)
    size = batch_size(batch, shared)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        with recording(model, tape, size, before_read) as recorder:
            losses = checked_losses(loss(batch), size)
    refuse_unrecorded(model, recorder.calls, recorder.direct)
    return clip(collect(recorder, tape, losses, reading), losses, l2_norm_clip)


def clip(collected: Factors, losses: tf.Tensor, l2_norm_clip: tf.Tensor) -> ClippedSum:
    """The clipped sum of factored per-example gradients."""
    norms = total_norms(collected)
    weights = clip_weights(norms, tf.cast(l2_norm_clip, norms.dtype))
    return ClippedSum(Weighted(collected, weights), norms, l2_norm_clip, losses, reads_of(collected))


def checked_losses(losses: Any, size: tf.Tensor) -> tf.Tensor:
    """One loss an example, or an error that says what came instead."""
    losses = tf.convert_to_tensor(losses)
    if losses.shape.rank != 1:
        raise ValueError(f"per_example_loss must return one loss an example, shape [batch]; got shape {losses.shape}.")
    same = tf.debugging.assert_equal(
        tf.shape(losses)[0], size, message="per_example_loss must return one loss an example"
    )
    with tf.control_dependencies([same] if same is not None else []):
        return tf.identity(losses)
