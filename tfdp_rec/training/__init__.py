"""Private training of Keras models: the model, the step, the look-ahead, and how weights are released."""

from tfdp_rec.training.lookahead import lookahead
from tfdp_rec.training.model import PrivateModel, PrivateTraining
from tfdp_rec.training.recall import RecallAtK
from tfdp_rec.training.validation import validate

__all__ = ["PrivateModel", "PrivateTraining", "RecallAtK", "lookahead", "validate"]
