"""A lower bound on ε from one training run.

Plant m canaries, each included by its own fair coin. After training guess, for r of them, whether the
coin fell on included; let v be the number of right guesses. If the training is (ε, δ)-DP, then with
W ~ Binomial(r, e^ε / (1 + e^ε)) and f(v) = P[W ≥ v],

    P[at least v right] ≤ f(v) + 2 m δ · max over i = 1..v of (f(v − i) − f(v)) / i.

The right side is a p-value for the claim "(ε, δ)-DP". The greatest ε whose p-value stays below
1 − confidence is refuted, so it bounds the true ε from below. The bound says that privacy is *at most*
so good; it never proves that it is as good.

`trade_off.py` has two bounds that say more, and assume more: that the claim is a whole trade-off curve, Gaussian if
nothing else is said; and, for the last, that a canary's score depends on no other canary's coin.

- The coins must be fair, independent, and unknown to the training.
- m, r and the rule that picks the guesses are fixed before the scores are seen.
- One canary is one privacy unit.

Reference:
    Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, Algorithm 1 and Theorem 5.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from tfdp_rec.audit.trade_off import Family, Gaussian, greatest_refuted, is_refuted, strength_if_independent

_UNFAIR = 1e-9  # probability below which a share of included canaries is not a fair coin's


@dataclass(frozen=True)
class OneRunAudit:
    """What a one-run audit found.

    Attributes:
        epsilon: Lower bound that, with probability `confidence`, the true ε (at `delta`) is not below. It assumes
            nothing about the mechanism.
        confidence: Probability that a correct mechanism's ε is not below `epsilon`.
        delta: δ of the claim under test.
        num_canaries: Number m of canaries.
        num_guesses: Number r of guesses.
        num_correct: Number v of correct guesses.
        strength: Lower bound on μ, if the mechanism is Gaussian; of another family, on its strength.
        curve_epsilon: ε at `delta` of `strength`.
        independent_strength: As `strength`, if moreover a canary's score depends on no other canary's coin.
        independent_epsilon: ε at `delta` of `independent_strength`.
    """

    epsilon: float
    confidence: float
    delta: float
    num_canaries: int
    num_guesses: int
    num_correct: int
    strength: float
    curve_epsilon: float
    independent_strength: float
    independent_epsilon: float

    @property
    def greatest_epsilon(self) -> float:
        """The greatest of the three bounds: with probability 1 − 3 (1 − confidence), if all assumptions hold."""
        return max(self.epsilon, self.curve_epsilon, self.independent_epsilon)

    def refutes(self, claimed_epsilon: float) -> bool:
        """Whether the claim of (`claimed_epsilon`, `delta`)-DP is refuted at `confidence`."""
        return self.epsilon > claimed_epsilon

    def __str__(self) -> str:
        return (
            f"With {self.confidence:.1%} confidence ε ≥ {self.epsilon:.3f} at δ = {self.delta:g}; "
            f"≥ {self.curve_epsilon:.3f} if its curve is the claim's; "
            f"≥ {self.independent_epsilon:.3f} if canaries are independent, too "
            f"({self.num_correct:,} of {self.num_guesses:,} guesses right, {self.num_canaries:,} canaries)."
        )


def flip_coins(num_canaries: int, seed: int | None = None) -> NDArray[np.bool_]:
    """One fair coin for each canary: True includes it in the training data.

    Args:
        num_canaries: Number m of canaries.
        seed: Seed, for tests; without it the operating system's entropy decides.

    Raises:
        ValueError: `num_canaries` is below 1.

    Example:
        >>> flip_coins(4, seed=1).shape
        (4,)
    """
    if num_canaries < 1:
        raise ValueError(f"num_canaries must be at least 1, got {num_canaries}.")
    return np.random.default_rng(seed).random(num_canaries) < 0.5


def one_run_audit(
    scores: ArrayLike,
    included: ArrayLike,
    *,
    num_guesses: int,
    delta: float,
    confidence: float = 0.95,
    share_included: float = 0.5,
    family: Family = Gaussian(),  # noqa: B008
) -> OneRunAudit:
    """Guess the best-scored canaries included, the worst-scored excluded, and bound ε from below in three ways.

    Args:
        scores: Scores [m], larger for a canary the model seems to have seen, such as minus its loss, computed without
            looking at `included`.
        included: Coins [m] that decided, from `flip_coins`.
        num_guesses: Number r of guesses, fixed beforehand; the m − r canaries in the middle are abstained from.
        delta: δ of the claim under test.
        confidence: Probability with which the bound holds.
        share_included: Share of the guesses spent on "included"; 1.0 suits mechanisms that sample, where
            an included canary may never have been read.
        family: Claims of which the mechanism's is one, for the two bounds that assume this.

    Returns:
        The bound, with the counts it came from.

    Raises:
        ValueError: lengths differ, a score is not finite, the coins are not fair, or a number is out of
            range.

    Example:
        >>> coins = flip_coins(1000, seed=0)
        >>> told_everything = one_run_audit(coins.astype(float), coins, num_guesses=400, delta=1e-6)
        >>> told_everything.refutes(4.0)
        True
        >>> noise = np.random.default_rng(1).random(1000)
        >>> told_nothing = one_run_audit(noise, coins, num_guesses=400, delta=1e-6)
        >>> told_nothing.refutes(0.5)
        False
    """
    scores, coins = _check_scores(scores, included)
    if not 1 <= num_guesses <= scores.size:
        raise ValueError(f"num_guesses must lie between 1 and {scores.size}, got {num_guesses}.")
    if not 0 <= share_included <= 1:
        raise ValueError(f"share_included must lie between 0 and 1, got {share_included}.")
    order = np.argsort(scores, kind="stable")
    best = round(num_guesses * share_included)
    top, bottom = order[scores.size - best :], order[: num_guesses - best]
    correct = int(np.sum(coins[top]) + np.sum(~coins[bottom]))
    bound = least_epsilon(
        num_canaries=scores.size,
        num_guesses=num_guesses,
        num_correct=correct,
        delta=delta,
        confidence=confidence,
    )
    is_one_sided = best in (0, num_guesses)
    slots = scores.size / (2 if is_one_sided else 1)
    counts = {"num_guesses": num_guesses, "num_correct": correct}
    strength = greatest_refuted(
        lambda at: is_refuted(family.curve(at), num_slots=slots, **counts, confidence=confidence), family.tolerance
    )
    alone = _independent_strength(scores, coins, is_one_sided, confidence, family)
    return OneRunAudit(
        bound, confidence, delta, scores.size, num_guesses, correct,
        strength, family.epsilon(strength, delta), alone, family.epsilon(alone, delta),
    )  # fmt: skip


def _independent_strength(
    scores: NDArray[np.float64], coins: NDArray[np.bool_], is_one_sided: bool, confidence: float, family: Family
) -> float:
    """Thresholds chosen by every fourth canary, guesses about the rest."""
    choosing = np.arange(scores.size) % 4 == 0
    if np.all(choosing):
        return 0.0

    def strength(among: NDArray[np.bool_], thresholds: tuple[float, float], sure: float, tolerance: float) -> float:
        counts = _counts(scores[among], coins[among], thresholds)
        return strength_if_independent(family, **counts, confidence=sure, tolerance=tolerance)

    # A guess about each canary is best for Gaussian noise, and few choose well: another must be better for certain.
    ordered, greatest, chosen = np.sort(scores[choosing]), -1.0, (math.inf, -math.inf)
    for share in (1.0, *2.0 ** -np.arange(0.5, 8.0, 0.5)):
        guesses = max(1, round(share * ordered.size))
        sides = (ordered[-((guesses + 1) // 2)], ordered[max(1, guesses // 2) - 1])
        for thresholds in (sides, (ordered[-guesses], -math.inf)):
            sure = 0.0 if thresholds is sides and share == 1 and not is_one_sided else 0.999
            if (found := strength(choosing, thresholds, sure, 0.02)) > greatest:
                greatest, chosen = found, thresholds
    return strength(~choosing, chosen, confidence, family.tolerance)


def _counts(scores: NDArray[np.float64], coins: NDArray[np.bool_], thresholds: tuple[float, float]) -> dict[str, Any]:
    """What guesses give: included from the first threshold up, excluded from the second down."""
    taken = scores >= thresholds[0]
    left = (scores <= thresholds[1]) & ~taken
    return {
        "num_slots": scores.size / (2 if thresholds[1] == -math.inf else 1),
        "num_canaries": scores.size,
        "num_correct": int(np.sum(taken & coins | left & ~coins)),
        "num_wrong": int(np.sum(taken & ~coins | left & coins)),
    }


def audit_p_value(*, num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float) -> float:
    """Greatest probability that (ε, δ)-DP training lets so many of the guesses be right (Theorem 5.2)."""
    if not (0 <= num_correct <= num_guesses <= num_canaries and num_canaries >= 1):
        raise ValueError(
            "Counts must be 0 <= num_correct <= num_guesses <= num_canaries with at least one canary, "
            f"got {num_correct}, {num_guesses}, {num_canaries}."
        )
    if not 0 <= delta <= 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}.")
    if not epsilon >= 0:
        raise ValueError(f"epsilon must not be negative, got {epsilon}.")
    right = 1 / (1 + np.exp(-epsilon))
    tail = float(special.bdtrc(num_correct - 1, num_guesses, right)) if num_correct else 1.0
    if delta == 0 or num_correct == 0:
        return tail
    steps = np.arange(1, num_correct + 1)
    between = np.cumsum(stats.binom.pmf(num_correct - steps, num_guesses, right))  # f(v − i) − f(v), not cancelled
    return float(min(1.0, tail + 2 * num_canaries * delta * np.max(between / steps)))


def least_epsilon(
    *, num_canaries: int, num_guesses: int, num_correct: int, delta: float, confidence: float = 0.95
) -> float:
    """The ε up to which the claim of (ε, δ)-DP is refuted; 0 when nothing is."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}.")
    counts = {"num_canaries": num_canaries, "num_guesses": num_guesses, "num_correct": num_correct}

    def is_refuted_at(epsilon: float) -> bool:
        return audit_p_value(**counts, epsilon=epsilon, delta=delta) < 1 - confidence

    return greatest_refuted(is_refuted_at, 1e-9)


def _check_scores(scores: ArrayLike, included: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    values, coins = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if values.ndim != 1 or values.shape != coins.shape or values.size == 0:
        raise ValueError(f"scores and included must be two lists of equal length, got {values.shape}, {coins.shape}.")
    if not np.all(np.isfinite(values)):
        raise ValueError("scores must be finite.")
    if coins.dtype != np.bool_:
        raise ValueError(f"included must be booleans, got {coins.dtype}.")
    if stats.binomtest(int(coins.sum()), coins.size).pvalue < _UNFAIR:
        raise ValueError(
            f"{int(coins.sum()):,} of {coins.size:,} canaries are included: no fair coin does that, and the "
            "bound would not hold. Draw `included` with flip_coins."
        )
    return values, coins
