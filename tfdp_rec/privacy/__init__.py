"""What a guarantee costs, and what can be said where there is none.

These are the names for users. They live in the rooms that make them: `spending` keeps the record of what was spent.
"""

from tfdp_rec.lazily import imported_when_asked

_HOMES = {
    "Accountant": "spending.accountant",
    "BoundedStream": "sampling.bounded_stream",
    "BrokenLedger": "spending.ledger",
    "BufferedToeplitz": "pricing.correlated_noise",
    "Correlation": "pricing.correlated_noise",
    "FixedOrder": "sampling.orders",
    "GaussianFilter": "spending.filters",
    "Ledger": "spending.ledger",
    "Payment": "spending.ledger",
    "PoissonSampling": "sampling.schemes",
    "RenyiFilter": "spending.filters",
    "Sampling": "sampling.schemes",
    "Snapshot": "spending.ledger",
    "Unaccounted": "spending.accountant",
    "Use": "spending.entries",
    "calibrate_noise": "spending.calibration",
    "eana_epsilon": "pricing.eana_bound",
    "eana_instance_epsilon": "pricing.eana_bound",
    "eana_rdp": "pricing.eana_bound",
    "eana_rdp_coordinate": "pricing.eana_bound",
    "eana_rdp_instance": "pricing.eana_bound",
    "eana_rdp_published": "pricing.eana_bound",
    "epsilon_of": "pricing.composition",
    "noise_of_one_release": "pricing.gaussian_release",
    "optimised_correlation": "pricing.correlated_noise",
    "private_counts": "sums.counts",
    "private_items": "sums.set_union",
    "private_labels": "sums.private_labels",
    "private_moments": "sums.moments",
    "private_reliability": "sums.reliability",
    "private_terms": "sums.set_union",
}
__all__ = list(_HOMES)  # noqa: PLE0605
__getattr__ = imported_when_asked("tfdp_rec", _HOMES)
