"""Differentially private training of recommender models on Keras 3 and TensorFlow.

model = tfdp_rec.PrivateModel(inputs, outputs)
model.compile(optimizer=tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=1024),
              loss="binary_crossentropy")
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfdp_rec.core.ground.lazy_imports import lazy_getattr, names_for_checkers
from tfdp_rec.core.ground.registration import register

__version__ = "0.5.0"

# Names of TF Privacy, Opacus and TFRS, and what does their work here.
_SGD = "tfdp_rec.DPSGD, or tfdp_rec.LazyDPSGD, which is as private and faster on large tables"
_MODEL = "tfdp_rec.PrivateModel(inputs, outputs), or class Mine(tfdp_rec.PrivateModel)"
_STATEMENT = "private.plan.accountant.statement(), of what make_private returned; beforehand: tfdp-rec epsilon"
_ELSEWHERE = {
    **dict.fromkeys(("DPKerasSGDOptimizer", "VectorizedDPKerasSGDOptimizer"), _SGD),
    "DPKerasAdamOptimizer": "tfdp_rec.LazyDPSGD(..., dense_optimizer=keras.optimizers.Adam(1e-3))",
    "DPKerasAdagradOptimizer": "tfdp_rec.LazyDPSGD(..., dense_optimizer=keras.optimizers.Adagrad(0.1))",
    "PrivacyEngine": "tfdp_rec.make_private(model, (x, y), epsilon=..., batch_size=..., epochs=...)",
    "make_private_with_epsilon": "tfdp_rec.make_private",
    **dict.fromkeys(("DPModel", "DPSequential"), _MODEL),
    "ModuleValidator": "tfdp_rec.validate(model, batch)",
    **dict.fromkeys(("compute_dp_sgd_privacy", "compute_dp_sgd_privacy_statement"), _STATEMENT),
    "get_epsilon": "private.plan.accountant.epsilon(), of what make_private returned",
    "Retrieval": "tfdp_rec.CandidateScores(vocabulary=ids, width=32, negatives=100), or tfdp_rec.TowerScores",
}

# Loaded when first asked for, so that `tfdp-rec --help` or an accountant need not wait for TensorFlow.
if TYPE_CHECKING:
    from tfdp_rec import audit as audit
    from tfdp_rec import callbacks as callbacks
    from tfdp_rec import clipping as clipping
    from tfdp_rec import data as data
    from tfdp_rec import datasets as datasets
    from tfdp_rec import distribute as distribute
    from tfdp_rec import federated as federated
    from tfdp_rec import mechanisms as mechanisms
    from tfdp_rec import metrics as metrics
    from tfdp_rec import models as models
    from tfdp_rec import noise as noise
    from tfdp_rec import optimizers as optimizers
    from tfdp_rec import privacy as privacy
    from tfdp_rec import spectral as spectral
    from tfdp_rec import sums as sums
    from tfdp_rec.core.ground.refused import NotPrivate as NotPrivate
    from tfdp_rec.core.mechanism.dp_sgd import DPSGD as DPSGD
    from tfdp_rec.core.mechanism.lazy_dp_sgd import LazyDPSGD as LazyDPSGD
    from tfdp_rec.correlated.dp_ftrl import DPFTRL as DPFTRL
    from tfdp_rec.correlated.lazy_dp_ftrl import LazyDPFTRL as LazyDPFTRL
    from tfdp_rec.layers.candidate_scores import CandidateScores as CandidateScores
    from tfdp_rec.layers.negatives import Negatives as Negatives
    from tfdp_rec.layers.tower_scores import TowerScores as TowerScores
    from tfdp_rec.sparse.ada_fest import AdaFEST as AdaFEST
    from tfdp_rec.sparse.eana import EANA as EANA
    from tfdp_rec.sparse.exponential import ExponentialSelectionSGD as ExponentialSelectionSGD
    from tfdp_rec.sparse.fest import FEST as FEST
    from tfdp_rec.sparse.preselection import Preselection as Preselection
    from tfdp_rec.training.model import PrivateModel as PrivateModel
    from tfdp_rec.training.model import PrivateTraining as PrivateTraining
    from tfdp_rec.training.private_fit import make_private as make_private
    from tfdp_rec.training.private_plan import PrivatePlan as PrivatePlan
    from tfdp_rec.training.recall import RecallAtK as RecallAtK
    from tfdp_rec.training.tuning import tune as tune
    from tfdp_rec.training.validation import validate as validate


def _classes() -> Iterator[tuple[str, str]]:
    # The classes that a saved model may name.
    for module in ("tfdp_rec", "tfdp_rec.models"):
        yield from ((module, name) for name, home in names_for_checkers(module).items() if home != module)


register(__name__, _classes)

if not TYPE_CHECKING:
    __getattr__, __all__ = lazy_getattr(__name__, _ELSEWHERE)
    __all__ += ["__version__"]

    def __dir__():
        return sorted(__all__)
