"""The mechanisms, each a Keras optimizer. What else is known of each is in `tfdp_rec.mechanisms`."""

from tfdp_rec.optimizers.base import PrivateOptimizer as PrivateOptimizer
from tfdp_rec.optimizers.dp_ftrl import DPFTRL as DPFTRL
from tfdp_rec.optimizers.dp_sgd import DPSGD as DPSGD
from tfdp_rec.optimizers.eana import EANA as EANA
from tfdp_rec.optimizers.lazy.lazy_dp_ftrl import LazyDPFTRL as LazyDPFTRL
from tfdp_rec.optimizers.lazy.lazy_dp_sgd import LazyDPSGD as LazyDPSGD
from tfdp_rec.optimizers.rules import Adagrad as Adagrad
from tfdp_rec.optimizers.rules import Adam as Adam
from tfdp_rec.optimizers.sparse.ada_fest import AdaFEST as AdaFEST
from tfdp_rec.optimizers.sparse.exponential import ExponentialSelectionSGD as ExponentialSelectionSGD
from tfdp_rec.optimizers.sparse.fest import FEST as FEST
from tfdp_rec.optimizers.sparse.preselection import Preselection as Preselection
from tfdp_rec.optimizers.sparse.preselection import noisy_frequencies as noisy_frequencies
