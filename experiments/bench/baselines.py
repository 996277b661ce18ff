"""Other ways to a clipped sum: the baselines of the LazyDP paper, for comparison and as oracles. Not for training.

They give the same sum for honest data, and no bound for other: `ghost` and `reweighted` take the norms from
one pass and
the gradient from another, which may have drawn another Dropout mask or rounded otherwise. No product code imports them.

===============  ==============================================================================================
`bookkeeping`    one backward pass; norms and sum from layer inputs and output gradients (`engine.Clipping.sum`)
`ghost`          the norms so, then a second backward pass of Σ_b w_b loss_b with w_b held fixed: DP-SGD(F)
`reweighted`     norms from formed per-example gradients, then the reweighted backward pass: DP-SGD(R)
`per_example`    every example's gradient formed by its own backward pass, scaled, summed: DP-SGD(B), the oracle
===============  ==============================================================================================

Reference:
    Denison et al. 2022 (reweighted); Lee and Kifer 2021 (ghost norms and reweighting); Bu et al. 2023
    (book-keeping); Lim et al., "LazyDP", 2024 (the names B, R and F).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import in_parts
from tfdp_rec.core.sensitivity import engine, factors, rules
from tfdp_rec.core.sensitivity.batches import hide_batch_axis, map_examples, tensors
from tfdp_rec.core.sensitivity.engine import ClippedSum, Clipping, shared_inputs
from tfdp_rec.core.sensitivity.microbatches import SumOf
from tfdp_rec.core.sensitivity.recorder import record_calls, refuse_unrecorded
from tfdp_rec.core.sensitivity.step_reading import CallRead
from tfdp_rec.training.batch import Batch
from tfdp_rec.training.model import PrivateTraining
from tfdp_rec.training.private_step import PrivateStep


class Unread:
    """In place of a reading: believes that every call has one row an example."""

    def read(self, calls: Sequence[rules.Call], losses: Any, gradients: Sequence[Any]) -> list[CallRead]:
        """The calls, with their gradients."""
        left = iter(gradients)
        return [CallRead(call, [next(left) for _ in call.watched]) for call in calls]

    def refuse_beside(self, call: rules.Call) -> None:
        """Refuses nothing."""


def _reweighted_pass(tape: tf.GradientTape, model: keras.Model, losses: tf.Tensor, weights: tf.Tensor):  # type: ignore[no-untyped-def]
    """Gradients of Σ_b w_b loss_b, the weights constant: an ordinary backward pass."""
    variables = model.trainable_variables
    with tape:
        # An undefined loss has weight zero, and must not turn the sum into NaN; its gradient is cut here too.
        kept = tf.where(weights > 0, losses, tf.zeros_like(losses))
        total = tf.reduce_sum(tf.stop_gradient(tf.cast(weights, losses.dtype)) * kept)
    found = tape.gradient(total, [rules.resource(v) for v in variables], unconnected_gradients="none")
    return {v.path: g for v, g in zip(variables, found) if g is not None}


def ghost(clipping: Clipping, batch: Any, share: Any = None) -> ClippedSum:
    """Ghost norms, then a reweighted backward pass. An example that is not finite is not supported: the sum is NaN."""
    model, size = clipping.model, clipping.batch_size(batch)
    with tf.GradientTape(persistent=True) as tape:
        with record_calls(model, tape, clipping.before_read) as recorder:
            losses = engine.check_losses(clipping.loss(batch), size)
    refuse_unrecorded(model, recorder.calls)
    collected = engine.collect(recorder, losses, Unread())  # type: ignore[arg-type]
    norms = engine.measure(collected).norms
    gradients = _reweighted_pass(tape, model, losses, _finite_weights(norms, clipping.l2_norm_clip))
    return ClippedSum(gradients, norms, clipping.l2_norm_clip, losses, engine.reads_by_table(collected))


def reweighted(clipping: Clipping, batch: Any, share: Any = None) -> ClippedSum:
    """Formed per-example gradients give the norms and are thrown away; then a reweighted backward pass."""
    collected, _ = _formed(clipping, batch)
    norms = engine.measure(collected).norms
    model, size = clipping.model, clipping.batch_size(batch)
    with tf.GradientTape(persistent=True) as tape:
        with record_calls(model, None, clipping.before_read):
            losses = engine.check_losses(clipping.loss(batch), size)
    gradients = _reweighted_pass(tape, model, losses, _finite_weights(norms, clipping.l2_norm_clip))
    return ClippedSum(gradients, norms, clipping.l2_norm_clip, losses, engine.reads_by_table(collected))


def per_example(clipping: Clipping, batch: Any, share: Any = None) -> ClippedSum:
    """The oracle: each example is a batch of one with its own backward pass."""
    collected, losses = _formed(clipping, batch)
    return engine.clip(collected, losses, clipping.l2_norm_clip, share)


def _finite_weights(norms: tf.Tensor, l2_norm_clip: tf.Tensor) -> tf.Tensor:
    """A second backward pass cannot leave one example out exactly (0·∞ is undefined): of one, all sums are NaN."""
    weights = engine.clip_weights(norms, tf.cast(l2_norm_clip, norms.dtype) / (1 + engine.SLACK))
    return weights + 0.0 * norms


def _formed(clipping: Clipping, batch: Any) -> tuple[engine.Factors, tf.Tensor]:
    """Every example's gradient of every variable by a loop of batches of one; tables stay slices."""
    model, shared = clipping.model, shared_inputs(clipping.model)
    size = clipping.batch_size(batch)
    batch = map_examples(_not_empty, batch, shared)
    variables = model.trainable_variables
    layout: list[bool] = []

    def one(index: tf.Tensor) -> tuple[Any, ...]:
        example = map_examples(lambda t: t[index : index + 1], batch, shared)
        with tf.GradientTape() as tape:
            with record_calls(model, None, clipping.before_read) as recorder:
                losses = engine.check_losses(clipping.loss(example), tf.constant(1))
        refuse_unrecorded(model, recorder.calls)
        found = tape.gradient(losses, [rules.resource(v) for v in variables], unconnected_gradients="zero")
        tables = recorder.tables()
        sparse = [isinstance(g, tf.IndexedSlices) and v.path in tables for v, g in zip(variables, found)]
        layout[:] = sparse
        parts = [
            (tf.cast(g.indices, tf.int64), factors.wide(g.values)) if s else factors.wide(tf.convert_to_tensor(g))
            for s, g in zip(sparse, found)
        ]
        return (losses[0], parts)

    losses, parts = tf.nest.map_structure(lambda t: t[:size], _map(one, tf.maximum(size, 1)))
    collected: engine.Factors = {}
    for variable, sparse, part in zip(variables, layout, parts):
        factor = factors.Rows(part[0], part[1], variable.shape) if sparse else factors.PerExample(part)
        collected[variable.path] = [factor]
    return collected, losses


def _not_empty(tensor: tf.Tensor) -> tf.Tensor:
    """A batch of no examples with one of zeros, so that a loop over examples knows the shapes of its results."""
    missing = tf.cast(tf.equal(tf.shape(tensor)[:1], 0), tf.int32)
    return tf.concat([tensor, tf.zeros(tf.concat([missing, tf.shape(tensor)[1:]], axis=0), tensor.dtype)], axis=0)


def _map(one: Callable[[tf.Tensor], Any], size: tf.Tensor) -> Any:
    """`tf.map_fn` over example numbers, whose results may have axes of unknown length."""
    if tf.executing_eagerly():
        return tf.nest.map_structure(lambda *several: tf.stack(several), *[one(i) for i in tf.range(size)])
    function = tf.function(one, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
    signature = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), function.structured_outputs)
    return tf.map_fn(lambda i: one(i), tf.range(size), fn_output_signature=signature)


STRATEGIES: dict[str, SumOf] = {
    "bookkeeping": Clipping.sum,
    "ghost": ghost,
    "reweighted": reweighted,
    "per_example": per_example,
}


class ComparedStep(PrivateStep):
    """A private step by another strategy. For comparison: nothing is proved of it."""

    strategy = "bookkeeping"

    def clipped_sum(self, batch: Batch, clip: tf.Tensor) -> ClippedSum:
        """As `PrivateStep`, by `strategy`."""
        loss = lambda examples: self.losses(Batch(examples))  # noqa: E731
        clipping = Clipping(self.model, loss, clip)
        sum_of, size = STRATEGIES[self.strategy], self.microbatch_size
        with self.model.private_weights.in_step(), tf.control_dependencies(batch.tensors):
            if size is None:
                return sum_of(clipping, batch.examples, None)
            return in_parts(clipping, batch.examples, size, sum_of)


def compare_by(model: PrivateTraining, name: str, microbatch_size: int | None = None) -> None:
    """Has a compiled model take its clipped sums by a strategy."""
    step = ComparedStep(model, microbatch_size)
    step.strategy = name
    vars(model)["private_step"] = step


def clipped_sum_by(
    name: str, model: Any, batch: Any, l2_norm_clip: float, microbatch_size: int | None = None
) -> ClippedSum:
    """As `tfdp_rec.clipping.clipped_sum` without training behaviour, by a strategy."""
    clipping = Clipping(model, lambda data: model.per_example_loss(data, training=False), tf.constant(l2_norm_clip))
    sum_of = STRATEGIES[name]

    def run(batch: Any) -> ClippedSum:
        hidden = hide_batch_axis(batch, shared_inputs(model))
        if microbatch_size is None:
            return sum_of(clipping, hidden, None)
        return in_parts(clipping, hidden, microbatch_size, sum_of)

    return engine.run_as_graph(run, tensors(batch), shared_inputs(model))
