"""Differentially private training of recommender models on Keras 3 and TensorFlow.

model = tfdp_rec.PrivateModel(inputs, outputs)
model.compile(optimizer=tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=1024),
              loss="binary_crossentropy")
"""

from __future__ import annotations

from collections.abc import Iterator

from tfdp_rec.lazily import imported_when_asked
from tfdp_rec.mechanisms import MECHANISMS
from tfdp_rec.registration import register

__version__ = "0.4.0"

# Loaded when first asked for, so that `tfdp-rec --help` or an accountant need not wait for TensorFlow.
_HOMES = {
    "PrivateModel": "training",
    "PrivateTraining": "training",
    "validate": "training",
    "RecallAtK": "training",
    "PrivatePlan": "private_plan",
    "make_private": "private_fit",
    **{mechanism.class_name: "optimizers" for mechanism in MECHANISMS},
    "Preselection": "optimizers",
    "NotPrivate": "refused",
    "CandidateScores": "clipping",
    "TowerScores": "clipping",
    "Negatives": "clipping",
    "audit": "audit",
    "callbacks": "callbacks",
    "clipping": "clipping",
    "data": "data",
    "datasets": "datasets",
    "distribute": "distribute",
    "federated": "federated",
    "mechanisms": "mechanisms",
    "models": "models",
    "noise": "noise",
    "optimizers": "optimizers",
    "metrics": "metrics",
    "privacy": "privacy",
    "spectral": "spectral",
}

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

__all__ = [*_HOMES, "__version__"]
__getattr__ = imported_when_asked(__name__, _HOMES, _ELSEWHERE)


def _classes() -> Iterator[tuple[str, str]]:
    # The classes that a saved model may name.
    from tfdp_rec import models

    for module, homes in (("tfdp_rec", _HOMES), ("tfdp_rec.models", models.HOMES)):
        yield from ((module, name) for name, home in homes.items() if name != home)


register(__name__, _classes)


def __dir__() -> list[str]:
    return sorted(__all__)
