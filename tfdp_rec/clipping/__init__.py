"""Clipping: each example's gradient norm, and the clipped sum, for any Keras model in one backward pass."""

from __future__ import annotations

from tfdp_rec.clipping.candidate_scores import CandidateScores, CandidateScoresRule
from tfdp_rec.clipping.engine import ClippedSum, Clipping
from tfdp_rec.clipping.factors import Factor, Outer, PerExample, Reads, Rows, Scores
from tfdp_rec.clipping.microbatches import clipped_sum, in_parts
from tfdp_rec.clipping.negatives import Negatives
from tfdp_rec.clipping.neighbour_check import check
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
from tfdp_rec.clipping.weights import LEAST_CLIP
from tfdp_rec.refused import NotPrivate

__all__ = [
    "LEAST_CLIP", "Call", "CandidateScores", "CandidateScoresRule", "ClippedSum", "Clipping", "Conv1DRule", "DenseRule",
    "EinsumDenseRule", "EmbedReduceRule", "EmbeddingRule", "Factor", "Hooks", "LayerNormalizationRule", "Negatives",
    "NotPrivate", "Outer", "PerExample", "Reads", "ReversibleEmbeddingRule", "Rows", "Rule", "Scores", "TowerScores",
    "UniversalRule", "check", "clipped_sum", "in_parts", "refuse", "register",
]  # fmt: skip
