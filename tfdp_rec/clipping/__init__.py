"""Clipping: each example's gradient norm, and the clipped sum, for any Keras model in one backward pass."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.clipping.batches import hide_batch_axis, tensors
from tfdp_rec.clipping.candidate_scores import CandidateScores, CandidateScoresRule
from tfdp_rec.clipping.engine import LEAST_CLIP, ClippedSum, Clipping, shared_inputs, traced
from tfdp_rec.clipping.factors import Factor, Outer, PerExample, Reads, Rows, Scores
from tfdp_rec.clipping.microbatches import in_parts
from tfdp_rec.clipping.negatives import Negatives
from tfdp_rec.clipping.neighbour_check import check
from tfdp_rec.clipping.recorder import guard_of
from tfdp_rec.clipping.rules import (
    Call,
    Conv1DRule,
    DenseRule,
    EinsumDenseRule,
    EmbeddingRule,
    EmbedReduceRule,
    Hooks,
    LayerNormalizationRule,
    ReversibleEmbeddingRule,
    Rule,
    UniversalRule,
    refuse,
    register,
)
from tfdp_rec.clipping.tower_scores import TowerScores
from tfdp_rec.refused import NotPrivate

__all__ = [
    "LEAST_CLIP", "Call", "CandidateScores", "CandidateScoresRule", "ClippedSum", "Clipping", "Conv1DRule", "DenseRule",
    "EinsumDenseRule", "EmbedReduceRule", "EmbeddingRule", "Factor", "Hooks", "LayerNormalizationRule", "Negatives",
    "NotPrivate", "Outer", "PerExample", "Reads", "ReversibleEmbeddingRule", "Rows", "Rule", "Scores", "TowerScores",
    "UniversalRule", "check", "clipped_sum", "in_parts", "refuse", "register",
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
        model: Built `PrivateModel`, or any other built model with `per_example_loss`.
        batch: Batch in the form in which the training data give it.
        l2_norm_clip: Largest norm C of an example's contribution.
        strategy: Name of the algorithm; "bookkeeping" is the only one whose sensitivity is proved.
        microbatch_size: Number of examples computed at a time, to bound memory; the sum is the same.
        training: Value of the argument `training` of `per_example_loss`.

    Raises:
        NotPrivate: The model's gradients do not split by example.
        ValueError: The strategy is unknown, or the clip or the microbatch size is too small.

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
    if not l2_norm_clip >= LEAST_CLIP:
        raise ValueError(f"l2_norm_clip must be at least {LEAST_CLIP}, got {l2_norm_clip}.")
    if strategy != "bookkeeping":
        raise ValueError(
            f"strategy must be 'bookkeeping', got {strategy!r}. Other algorithms, without a proved sensitivity, "
            "are in experiments/bench/baselines.py, for comparison."
        )
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size must be at least 1, got {microbatch_size}.")
    loss = functools.partial(model.per_example_loss, training=training)
    clipping = Clipping(model, loss, tf.constant(float(l2_norm_clip)), guard_of(model))

    def run(batch: Any) -> ClippedSum:
        batch = hide_batch_axis(batch, shared_inputs(model))
        if microbatch_size is None:
            return clipping.sum(batch)
        return in_parts(clipping, batch, microbatch_size)

    # Taken before the step is computed: a sum is good for the optimizer's present step alone.
    ticket = getattr(getattr(model, "optimizer", None), "ticket", lambda: None)()
    return dataclasses.replace(traced(run, tensors(batch), shared_inputs(model)), ticket=ticket)
