"""A lower bound on ε from one training run.

Plant m canaries, each included by its own fair coin. After training guess, for r of them, whether the
coin fell on included; let v be the number of right guesses. If the training is (ε, δ)-DP, then with
W ~ Binomial(r, e^ε / (1 + e^ε)) and f(v) = P[W ≥ v],

    P[at least v right] ≤ f(v) + 2 m δ · max over i = 1..v of (f(v − i) − f(v)) / i.

The right side is a p-value for the claim "(ε, δ)-DP". The greatest ε whose p-value stays below
1 − confidence is refuted, so it bounds the true ε from below. The bound says that privacy is *at most*
so good; it never proves that it is as good.

- The coins must be fair, independent, and unknown to the training.
- m, r and the rule that picks the guesses are fixed before the scores are seen.
- One canary is one privacy unit.

Reference:
    Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023, Algorithm 1 and Theorem 5.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

_UNFAIR = 1e-9  # probability below which a share of included canaries is not a fair coin's


@dataclass(frozen=True)
class OneRunAudit:
    """What a one-run audit found.

    Attributes:
        epsilon: Lower bound that, with probability `confidence`, the true ε (at `delta`) is not below.
        confidence: Probability that a correct mechanism's ε is not below `epsilon`.
        delta: δ of the claim under test.
        num_canaries: Number m of canaries.
        num_guesses: Number r of guesses.
        num_correct: Number v of correct guesses.
    """

    epsilon: float
    confidence: float
    delta: float
    num_canaries: int
    num_guesses: int
    num_correct: int

    def refutes(self, claimed_epsilon: float) -> bool:
        """Whether the claim of (`claimed_epsilon`, `delta`)-DP is refuted at `confidence`."""
        return self.epsilon > claimed_epsilon

    def __str__(self) -> str:
        return (
            f"With {self.confidence:.1%} confidence ε ≥ {self.epsilon:.3f} at δ = {self.delta:g} "
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
) -> OneRunAudit:
    """Guess the best-scored canaries included, the worst-scored excluded, and bound ε from below.

    Args:
        scores: Scores [m], larger for a canary the model seems to have seen, such as minus its loss, computed without
            looking at `included`.
        included: Coins [m] that decided, from `flip_coins`.
        num_guesses: Number r of guesses, fixed beforehand; the m − r canaries in the middle are abstained from.
        delta: δ of the claim under test.
        confidence: Probability with which the bound holds.
        share_included: Share of the guesses spent on "included"; 1.0 suits mechanisms that sample, where
            an included canary may never have been read.

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
    return OneRunAudit(bound, confidence, delta, scores.size, num_guesses, correct)


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

    def is_refuted(epsilon: float) -> bool:
        return audit_p_value(**counts, epsilon=epsilon, delta=delta) < 1 - confidence

    low, high = 0.0, 1.0
    if not is_refuted(low):
        return 0.0
    while is_refuted(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


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
