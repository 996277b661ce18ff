"""Keras callbacks."""

from tfdp_rec.callbacks.exposure import Exposure
from tfdp_rec.callbacks.gradient_sparsity import GradientSparsity, Sparsity
from tfdp_rec.training.privacy_budget import PrivacyBudget
from tfdp_rec.training.training_checkpoint import Resumed, TrainingCheckpoint

__all__ = ["Exposure", "GradientSparsity", "PrivacyBudget", "Resumed", "Sparsity", "TrainingCheckpoint"]
