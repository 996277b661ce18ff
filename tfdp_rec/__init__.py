"""Differentially private training of recommender models on Keras 3 and TensorFlow.

model = tfdp_rec.PrivateModel(inputs, outputs)
model.compile(optimizer=tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.1, expected_batch_size=1024),
              loss="binary_crossentropy")
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Loaded when first asked for, so that `tfdp-rec --help` or an accountant need not wait for TensorFlow.
_LAZY = {
    "PrivateModel": "training",
    "PrivateTraining": "training",
    "DPSGD": "optimizers",
    "EANA": "optimizers",
    "LazyDPSGD": "optimizers",
    "AdaFEST": "optimizers",
    "FEST": "optimizers",
    "ExponentialSelectionSGD": "optimizers",
    "Preselection": "optimizers",
    "NotPrivate": "clipping",
    "CandidateScores": "clipping",
}
_MODULES = (
    "audit",
    "callbacks",
    "clipping",
    "data",
    "distribute",
    "federated",
    "models",
    "noise",
    "optimizers",
    "privacy",
)

__all__ = [*_LAZY, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"tfdp_rec.{_LAZY[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"tfdp_rec.{name}")
    raise AttributeError(f"module 'tfdp_rec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
