"""What a guarantee costs, and what can be said where there is none.

These are the names for users. They live in the rooms that make them: `spending` keeps the record of what was spent.
"""

from tfdp_rec.lazily import imported_when_asked

_HOMES = {
    "Accountant": "spending.accountant",
    "BoundedStream": "privacy.bounded_stream",
    "BrokenLedger": "spending.ledger_lines",
    "BufferedToeplitz": "privacy.correlated",
    "Correlation": "privacy.correlated",
    "FixedOrder": "privacy.fixed_order",
    "GaussianFilter": "spending.filters",
    "Ledger": "spending.ledger",
    "Payment": "spending.ledger_lines",
    "PoissonSampling": "privacy.sampling",
    "RenyiFilter": "spending.filters",
    "Sampling": "privacy.sampling",
    "ShuffledEpochs": "privacy.sampling",
    "Snapshot": "spending.ledger_lines",
    "Unaccounted": "spending.accountant",
    "calibrate_noise": "spending.calibration",
    "eana_epsilon": "privacy.eana_bound",
    "eana_instance_epsilon": "privacy.eana_bound",
    "eana_rdp": "privacy.eana_bound",
    "eana_rdp_coordinate": "privacy.eana_bound",
    "eana_rdp_instance": "privacy.eana_bound",
    "eana_rdp_published": "privacy.eana_bound",
    "epsilon_of": "privacy.composing",
    "noise_of_one_release": "privacy.gaussian",
    "optimised_correlation": "privacy.correlated",
    "private_counts": "privacy.counts",
    "private_items": "privacy.set_union",
    "private_terms": "privacy.set_union",
}
__all__ = list(_HOMES)  # noqa: PLE0605
__getattr__ = imported_when_asked("tfdp_rec", _HOMES)
