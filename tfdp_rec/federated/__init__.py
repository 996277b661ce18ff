"""Federated training and serving under local differential privacy (PrivateRec).

The modules that do not need TensorFlow are imported here; `local`, `simulation`, `serving` and `flower` are
imported by name, so that a client that only adds noise starts at once.
"""

from tfdp_rec.federated.accounting import ClientAccountant
from tfdp_rec.federated.labels import LabelPermutation
from tfdp_rec.federated.mechanism import AnalyticGaussian, AttentionMechanism, PureLaplace

__all__ = [
    "AnalyticGaussian",
    "AttentionMechanism",
    "ClientAccountant",
    "LabelPermutation",
    "PureLaplace",
]
