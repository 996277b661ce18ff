"""What one run refutes of a claim that is a whole trade-off curve.

A claim says, for each canary: what has probability at most x when it is left out has probability at most F(x) when it
is taken in, and the other way round. F is concave; for μ-Gaussian privacy F(x) = Φ(Φ⁻¹(x) + μ). A `Curve` is its
inverse: the least x at which F reaches a power. Coins, guesses and counts are those of `one_run.py`. Let p_j be the
probability of exactly j right guesses of r, N = m slots, or m/2 if all guesses are "included" (or all "excluded").

- Whatever the canaries have to do with each other, for each k

      Σ_{j ≥ k} j p_j  ≤  N F( Σ_{j ≥ k−1} (r − j) p_j / N ).

  The least mass that satisfies this, given mass τ on j ≥ v, lies on v first and then on v − 1, v − 2, …, on each as
  little as its inequality needs. If it exceeds 1, then P[at least v right] < τ.
- If the score of a canary depends on its own coin alone, the guesses by fixed thresholds are independent, with a mean
  of right ones A and of wrong ones B per slot, and A ≤ F(B). The exact limits of two shares refute that much sooner.

The proofs are in docs/study-eana.md.

Reference:
    Mahloujifar, Melis and Chaudhuri, Auditing f-Differential Privacy in One Run, ICML 2025, for the first.
    Hoeffding, On the distribution of the number of successes in independent trials, 1956: unequal shares lie closer
    to their mean than equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from scipy import optimize, special, stats

Curve = Callable[[float], float]
"""Least probability without a canary of what has this probability with it."""


class Family(Protocol):
    """Claims in one order: a greater strength claims less privacy."""

    @property
    def tolerance(self) -> float:
        """Width to which a strength is searched for, in proportion."""

    def curve(self, strength: float) -> Curve:
        """The trade-off curve of one of the claims."""

    def epsilon(self, strength: float, delta: float) -> float:
        """ε at δ of one of the claims."""


class Gaussian:
    """Gaussian privacy, by its μ: what noise of multiplier 1/μ on a sum gives, or T such steps of multiplier √T/μ.

    Example:
        >>> round(Gaussian().epsilon(0.25 * 2**0.5, delta=1e-6), 2)
        1.54
    """

    tolerance = 1e-6

    def curve(self, strength: float) -> Curve:
        """x = Φ(Φ⁻¹(power) − μ)."""
        return lambda power: float(special.ndtr(special.ndtri(power) - strength))

    def epsilon(self, strength: float, delta: float) -> float:
        """ε with Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) = δ."""
        if strength <= 0 or special.erf(strength / 8**0.5) <= delta:
            return 0.0
        if delta <= 0:
            return math.inf

        def excess(epsilon: float) -> float:
            # both terms underflow where ε is large
            above = special.log_ndtr(strength / 2 - epsilon / strength)
            below = epsilon + special.log_ndtr(-strength / 2 - epsilon / strength)
            return above + math.log(max(-math.expm1(min(below - above, 0.0)), 1e-300)) - math.log(delta)

        return float(optimize.brentq(excess, 0.0, strength * (strength + 40), rtol=1e-10))


def is_refuted(curve: Curve, *, num_slots: float, num_guesses: int, num_correct: int, confidence: float) -> bool:
    """Whether so many right guesses have a probability below 1 − confidence, however canaries depend on each other."""
    mass = 1 - confidence
    right, wrong = num_correct * mass, (num_guesses - num_correct) * mass  # the sums of the inequality
    for k in range(num_correct, 0, -1):
        if right >= num_slots:  # no coin can be right so often
            return True
        more = (num_slots * curve(right / num_slots) - wrong) / (num_guesses - k + 1)
        if more <= 0:  # nor will be at smaller k
            return False
        mass, right, wrong = mass + more, right + (k - 1) * more, wrong + (num_guesses - k + 1) * more
        if mass > 1:
            return True
    return False


def greatest_refuted(is_refuted: Callable[[float], bool], tolerance: float) -> float:
    """The number up to which claims are refuted, from below; 0 when none is."""
    low, high = 0.0, 1.0
    if not is_refuted(low):
        return 0.0
    while high < 1e6 and is_refuted(high):
        low, high = high, 2 * high
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def strength_if_independent(
    family: Family, *, num_slots: float, num_canaries: int, num_correct: int, num_wrong: int, confidence: float,
    tolerance: float,
) -> float:  # fmt: skip
    """The strength up to which claims are refuted by the numbers of right and of wrong guesses, if independent."""
    # Clopper and Pearson's limits, which both hold at the confidence.
    missed = (1 - confidence) / 2
    right = stats.beta.ppf(missed, num_correct, num_canaries - num_correct + 1) if num_correct else 0.0
    wrong = stats.beta.isf(missed, num_wrong + 1, num_canaries - num_wrong) if num_wrong < num_canaries else 1.0
    power, level = min(1.0, right * num_canaries / num_slots), wrong * num_canaries / num_slots
    return greatest_refuted(lambda strength: family.curve(strength)(power) > level, tolerance)
