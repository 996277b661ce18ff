"""Clipping: each example's gradient norm, and the clipped sum, for any Keras model in one backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping import strategies
from tfdp_rec.clipping.batches import hide_batch_axis, tensors
from tfdp_rec.clipping.candidate_scores import CandidateScores, CandidateScoresRule
from tfdp_rec.clipping.check import check
from tfdp_rec.clipping.engine import ClippedSum, Reads, shared_inputs
from tfdp_rec.clipping.recorder import BeforeRead, no_settling
from tfdp_rec.clipping.rules import (
    Call,
    Conv1DRule,
    DenseRule,
    EinsumDenseRule,
    EmbeddingRule,
    Hooks,
    LayerNormalizationRule,
    NotPrivate,
    ReversibleEmbeddingRule,
    Rule,
    UniversalRule,
    refuse,
    register,
)
from tfdp_rec.clipping.strategies import STRATEGIES

__all__ = [
    "STRATEGIES", "Call", "CandidateScores", "CandidateScoresRule", "ClippedSum", "Conv1DRule", "DenseRule",
    "EinsumDenseRule", "EmbeddingRule", "Hooks", "LayerNormalizationRule", "NotPrivate", "Reads",
    "ReversibleEmbeddingRule", "Rule", "UniversalRule", "check", "clipped_sum", "refuse", "register",
]  # fmt: skip


@tf.autograph.experimental.do_not_convert
def clipped_sum(
    model: keras.Model,
    batch: Any,
    l2_norm_clip: float,
    strategy: str = "bookkeeping",
    microbatch_size: int | None = None,
    training: bool = True,
) -> ClippedSum:
    """The sum over a batch of each example's gradient scaled to a norm of at most `l2_norm_clip`.

    Rows that owe noise under the model's optimizer get it before they are read.

    Args:
        model: a built `PrivateModel` or model with `PrivateTraining`: anything with `per_example_loss`.
        batch: as the training data gives it.
        l2_norm_clip: C.
        strategy: one of `STRATEGIES`; all give the same sum.
        microbatch_size: examples at a time, to bound memory; the sum is the same.
        training: passed to `per_example_loss`.

    Raises:
        NotPrivate: for a model whose per-example gradients cannot be bounded.
        ValueError: for an unknown strategy or a clip that is not positive.

    Example:

    >>> import keras, numpy as np, tfdp_rec
    >>> inputs = keras.Input([3])
    >>> model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    >>> optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    >>> model.compile(optimizer=optimizer, loss="mse")
    >>> found = clipped_sum(model, (np.ones([4, 3], "float32"), np.zeros([4, 1], "float32")), l2_norm_clip=1.0)
    >>> found.norms.shape
    TensorShape([4])
    """
    if not l2_norm_clip > 0:
        raise ValueError(f"l2_norm_clip must be positive, got {l2_norm_clip}.")
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}.")
    chosen = strategies.strategy_named(strategy)
    clip = tf.constant(float(l2_norm_clip))
    loss = lambda data: model.per_example_loss(data, training=training)  # noqa: E731

    def run(batch: Any) -> ClippedSum:
        batch = hide_batch_axis(batch, shared_inputs(model))
        if microbatch_size is None:
            return chosen(model, loss, batch, clip, _guard(model))
        return strategies.in_parts(chosen, microbatch_size, model, loss, batch, clip, _guard(model))

    ticket = getattr(getattr(model, "optimizer", None), "ticket", lambda: None)()  # before anything of the step
    return dataclasses.replace(_as_function(run, tensors(batch)), ticket=ticket)


def _guard(model: keras.Model) -> BeforeRead:
    """What must be done before the model's tables are read: by duck typing, it is not of this floor."""
    return getattr(getattr(model, "release", None), "before_read", no_settling)


def _as_function(run: Callable[[Any], ClippedSum], batch: Any) -> ClippedSum:
    """`run(batch)` in a graph, as in training: there, an axis of known length is seen not to be the batch's."""
    if not tf.executing_eagerly():
        return run(batch)

    def parts(batch: Any) -> tuple[Any, ...]:
        found = run(batch)
        reads = {path: (r.example, r.ids, r.shared) for path, r in found.reads.items()}
        return dict(found.gradients), found.norms, found.sensitivity, found.losses, reads

    traced = tf.function(parts, autograph=False).get_concrete_function(batch)
    gradients, norms, sensitivity, losses, reads = traced(batch)
    return ClippedSum(gradients, norms, sensitivity, losses, {path: Reads(*r) for path, r in reads.items()})
