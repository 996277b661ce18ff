"""Measured privacy: planted canaries, how exposed they are, a lower bound on ε from one run, membership attacks."""

from tfdp_rec.audit.canaries import NUM_REFERENCES, REPEATS, Canaries, Uniform
from tfdp_rec.audit.exposure import exposure_extrapolation, exposure_interpolation, skew_normal_fit_error
from tfdp_rec.audit.membership import AttackRate, MembershipAttack, attack_membership
from tfdp_rec.audit.one_run import OneRunAudit, flip_coins, one_run_audit
from tfdp_rec.audit.trade_off import Family, Gaussian

__all__ = [
    "NUM_REFERENCES", "REPEATS", "AttackRate", "Canaries", "Family", "Gaussian", "MembershipAttack", "OneRunAudit",
    "Uniform", "attack_membership", "exposure_extrapolation", "exposure_interpolation", "flip_coins", "one_run_audit",
    "skew_normal_fit_error",
]  # fmt: skip
