"""The mechanisms, each a Keras optimizer."""

from tfdp_rec.optimizers.base import PrivateOptimizer
from tfdp_rec.optimizers.dp_sgd import DPSGD
from tfdp_rec.optimizers.eana import EANA
from tfdp_rec.optimizers.lazy.lazy_dp_sgd import LazyDPSGD
from tfdp_rec.optimizers.sparse.ada_fest import AdaFEST
from tfdp_rec.optimizers.sparse.exponential import ExponentialSelectionSGD
from tfdp_rec.optimizers.sparse.fest import FEST
from tfdp_rec.optimizers.sparse.preselection import Preselection, noisy_frequencies

__all__ = [
    "DPSGD",
    "EANA",
    "FEST",
    "AdaFEST",
    "ExponentialSelectionSGD",
    "LazyDPSGD",
    "Preselection",
    "PrivateOptimizer",
    "noisy_frequencies",
]
