"""The mechanisms, each a Keras optimizer. What else is known of each is in `tfdp_rec.mechanisms`."""

from tfdp_rec.core.mechanism.base import PrivateOptimizer as PrivateOptimizer
from tfdp_rec.core.mechanism.dp_sgd import DPSGD as DPSGD
from tfdp_rec.core.mechanism.lazy_dp_sgd import LazyDPSGD as LazyDPSGD
from tfdp_rec.core.mechanism.rules import Adagrad as Adagrad
from tfdp_rec.core.mechanism.rules import Adam as Adam
from tfdp_rec.correlated.dp_ftrl import DPFTRL as DPFTRL
from tfdp_rec.correlated.lazy_dp_ftrl import LazyDPFTRL as LazyDPFTRL
from tfdp_rec.sparse.ada_fest import AdaFEST as AdaFEST
from tfdp_rec.sparse.eana import EANA as EANA
from tfdp_rec.sparse.exponential import ExponentialSelectionSGD as ExponentialSelectionSGD
from tfdp_rec.sparse.fest import FEST as FEST
from tfdp_rec.sparse.preselection import Preselection as Preselection
from tfdp_rec.sparse.preselection import noisy_frequencies as noisy_frequencies
