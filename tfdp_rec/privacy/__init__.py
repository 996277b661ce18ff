"""What a guarantee costs, and what can be said where there is none."""

from tfdp_rec.privacy.accounting import Accountant, Unaccounted
from tfdp_rec.privacy.bounded_stream import BoundedStream
from tfdp_rec.privacy.calibration import calibrate_noise
from tfdp_rec.privacy.composing import epsilon_of
from tfdp_rec.privacy.correlated import BufferedToeplitz, Correlation, optimised_correlation
from tfdp_rec.privacy.counts import private_counts
from tfdp_rec.privacy.eana_bound import (
    eana_epsilon,
    eana_instance_epsilon,
    eana_rdp,
    eana_rdp_coordinate,
    eana_rdp_instance,
    eana_rdp_published,
)
from tfdp_rec.privacy.fixed_order import FixedOrder
from tfdp_rec.privacy.gaussian import noise_of_one_release
from tfdp_rec.privacy.ledger import Ledger
from tfdp_rec.privacy.ledger_lines import BrokenLedger, Payment, Snapshot
from tfdp_rec.privacy.sampling import PoissonSampling, Sampling, ShuffledEpochs
from tfdp_rec.privacy.set_union import private_items, private_terms

__all__ = [
    "Accountant",
    "BrokenLedger",
    "BoundedStream",
    "BufferedToeplitz",
    "Correlation",
    "FixedOrder",
    "Ledger",
    "Payment",
    "PoissonSampling",
    "Sampling",
    "ShuffledEpochs",
    "Snapshot",
    "Unaccounted",
    "calibrate_noise",
    "eana_epsilon",
    "eana_instance_epsilon",
    "eana_rdp",
    "eana_rdp_coordinate",
    "eana_rdp_instance",
    "eana_rdp_published",
    "epsilon_of",
    "noise_of_one_release",
    "optimised_correlation",
    "private_counts",
    "private_items",
    "private_terms",
]
