"""What a sampler that ends at T standard deviations adds to δ.

A Box-Muller pair whose radius has k bits lies in the disc |z| ≤ T, T = √(2 k ln 2); it is the Gaussian
pair conditioned on the disc, which cuts off the mass 2^-k. Let two neighbouring data sets shift the noise
of one step by s in units of its standard deviation, |s| ≤ μ = 1 / noise_multiplier, spread over m pairs.

Where both densities are positive, their ratio is the untruncated one: there the untruncated δ holds, raised by the
factor 1 / (1 - 2^-k)^m of the conditioning. The rest is the chance that z_i lies in the disc but not in the disc
shifted by s_i, for some pair i. Such a z_i has T - |s_i| < |z_i| ≤ T, so the chance is below

  exp(-(T - |s_i|)^2 / 2) - exp(-T^2 / 2) < 2^-k (exp(T |s_i|) - 1).

Summed over pairs with sum |s_i|^2 ≤ μ^2: the linear part of exp(x) - 1 is at most T μ √(m) (all pairs
shifted alike), and the rest, exp(x) - 1 - x = x^2 psi(x) with psi increasing, at most exp(a) - 1 - a for
a = T μ (one pair takes the whole shift). Together, for n steps that the example takes part in,

  δ' ≤ (1 - 2^-k)^(-n m) δ + n 2^-k [T μ √(m) + exp(T μ) - 1 - T μ] / (1 - 2^-k).

Coordinates that the example does not move add nothing, nor do steps that it takes no part in: there both data
sets have the same noise. Under Poisson sampling let n be all the steps: where no shifted disc is left in any of
them, the mixtures' ratio is the untruncated one too. Under lazy noise a draw holds the noise of one step that
moved the row and of later ones that did not, so its own standard deviation is no smaller, and the bound holds.
"""

from __future__ import annotations

import math


def truncation_delta(
    bits: float, noise_multiplier: float, participations: int, coordinates: int, delta: float = 0.0
) -> float:
    """An upper bound on what a sampler's missing tail adds to δ.

    Args:
        bits: Random bits of a pair's radius: the sampler ends at √(2 bits ln 2) standard deviations.
        noise_multiplier: Noise standard deviation over sensitivity.
        participations: Steps that one example may take part in; under Poisson sampling, all steps.
        coordinates: Coordinates that one example's gradient can move: its rows' widths and the dense weights.
        delta: The δ accounted for without truncation.

    Returns:
        The increase of δ; at most 1 - δ, which is no privacy.

    Raises:
        ValueError: If an argument is not positive (δ: not in [0, 1)).

    Example:
        >>> truncation_delta(23, noise_multiplier=1.0, participations=1000, coordinates=1_000_000) > 1e-6
        True
        >>> truncation_delta(64, noise_multiplier=1.0, participations=1000, coordinates=1_000_000) < 1e-11
        True
    """
    positive = {"bits": bits, "noise_multiplier": noise_multiplier}
    positive |= {"participations": participations, "coordinates": coordinates}
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}.")
    if not 0 <= delta < 1:
        raise ValueError(f"delta must lie in [0, 1), got {delta}.")
    end, cut, pairs = math.sqrt(2.0 * bits * math.log(2.0)), 2.0**-bits, (coordinates + 1) // 2
    shift = end / noise_multiplier
    if shift > end * end:  # the shift is longer than the disc's radius
        return 1.0 - delta
    outside = participations * cut / (1.0 - cut) * (shift * math.sqrt(pairs) + math.expm1(shift) - shift)
    conditioning = math.expm1(min(-participations * pairs * math.log1p(-cut), 700.0))
    return min(conditioning * delta + outside, 1.0 - delta)
