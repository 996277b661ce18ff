"""The noise that one Gaussian release needs for a target ε, exactly.

A release with ℓ₂ sensitivity 1 and noise N(0, σ²) is (ε, δ)-DP if and only if

    Φ(1/(2σ) - εσ) - e^ε Φ(-1/(2σ) - εσ) ≤ δ.

Reference:
    Balle and Wang, Improving the Gaussian mechanism for differential privacy, ICML 2018.
"""

from __future__ import annotations

import math

from scipy import optimize, special

from tfdp_rec.core.claim.composition import check_epsilon

_ROUNDED_UP = 1e-4  # most that the grid of dp_accounting's PLD overstates an ε up to 50; in proportion above


def noise_of_one_release(epsilon: float, delta: float) -> float:
    """The least σ with which a release costs at most ε at δ, also as an `Accountant` computes it.

    Args:
        epsilon: ε that the release may cost.
        delta: δ of the release.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> round(noise_of_one_release(8.0, 1e-6), 3)
        0.653
    """
    check_epsilon(epsilon)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta!r}.")
    # An accountant adds its grid's error to ε: the search aims below ε by that much.
    return _noise_of(max(epsilon - _ROUNDED_UP * max(1.0, epsilon / 50), epsilon / 2), delta)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """μ of the Gaussian that costs ε at δ: its two outcomes are as hard to tell apart as N(0, 1) and N(μ, 1)."""
    return 1.0 / _noise_of(epsilon, delta)


def _noise_of(epsilon: float, delta: float) -> float:
    return float(optimize.brentq(lambda s: _log_delta(s, epsilon) - math.log(delta), 1e-3, 1e6, rtol=1e-10))


def _log_delta(sigma: float, epsilon: float) -> float:
    # log of Φ(1/(2σ) - εσ) - e^ε Φ(-1/(2σ) - εσ), whose terms underflow for large ε.
    above = special.log_ndtr(0.5 / sigma - epsilon * sigma)
    below = epsilon + special.log_ndtr(-0.5 / sigma - epsilon * sigma)
    return float(above + math.log(max(-math.expm1(min(below - above, 0.0)), 1e-300)))
