"""Clipping: each example's gradient norm, and the clipped sum, for any Keras model in one backward pass."""

from __future__ import annotations

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.engine import ClippedSum, Clipping
from tfdp_rec.core.sensitivity.factors import Factor, Outer, PerExample, Reads, Rows, Scores
from tfdp_rec.core.sensitivity.microbatches import clipped_sum, in_parts, on_devices
from tfdp_rec.core.sensitivity.rules import (
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
from tfdp_rec.core.sensitivity.weights import LEAST_CLIP
from tfdp_rec.layers.candidate_scores import CandidateScores, CandidateScoresRule
from tfdp_rec.layers.negatives import Negatives
from tfdp_rec.layers.tower_scores import TowerScores
from tfdp_rec.training.numeric_checks import check

__all__ = [
    "LEAST_CLIP", "Call", "CandidateScores", "CandidateScoresRule", "ClippedSum", "Clipping", "Conv1DRule", "DenseRule",
    "EinsumDenseRule", "EmbedReduceRule", "EmbeddingRule", "Factor", "Hooks", "LayerNormalizationRule", "Negatives",
    "NotPrivate", "Outer", "PerExample", "Reads", "ReversibleEmbeddingRule", "Rows", "Rule", "Scores", "TowerScores",
    "UniversalRule", "check", "clipped_sum", "in_parts", "on_devices", "refuse", "register",
]  # fmt: skip
