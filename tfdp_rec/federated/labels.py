"""Private labels: which of the shown news was clicked.

The server showed C candidates, so it knows them; which one was clicked is private.

`LabelPermutation` (default) draws the private label l first, from all C candidates,

    Pr[l = j] = e^ε / (C - 1 + e^ε)  if j was clicked,   1 / (C - 1 + e^ε)  otherwise,

and only then k negatives, uniformly from the other C - 1 (all of them, over and over, where C ≤ k). The negatives
depend on l alone, so the training sample (l, negatives) is post-processing of an (ε, 0)-private draw: every
probability changes by at most e^ε when the click moves.

`PublishedLabelPermutation` samples the k negatives from the candidates that were not clicked and permutes the
label among those k + 1. The sampled candidates always hold the click, and the local gradient shows which
candidates were sampled: unless k = C - 1, no ε bounds that. (The label by itself is private only when
e^ε ≥ (C - 1)/k: below, the paper's β is cut at 0 and the ratio stays at (C - 1)/k.) It is kept for
comparison only.

Reference:
    Liu et al., "PrivateRec", 2022, Algorithm 3, lines 16-18; Kairouz et al., "Extremal mechanisms
    for local differential privacy", 2014.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from dp_accounting import DpEvent, NonPrivateDpEvent
from numpy.typing import NDArray

from tfdp_rec.noise import words
from tfdp_rec.pricing.events import PureDpEvent


@dataclasses.dataclass(frozen=True)
class _Permutation:
    epsilon: float
    num_negatives: int = 4

    holds: ClassVar[bool]
    """Whether ε bounds what a label tells."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}.")
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives must be at least 1, got {self.num_negatives}.")

    def _check(self, num_candidates: int, clicked: int) -> None:
        if num_candidates < 2:
            raise ValueError(f"num_candidates must be at least 2, got {num_candidates}: one news alone is no choice.")
        if not 0 <= clicked < num_candidates:
            raise ValueError(f"clicked must be in [0, {num_candidates}), got {clicked}.")

    @property
    def event(self) -> DpEvent:
        """What one label costs."""
        return PureDpEvent(self.epsilon) if self.holds and math.isfinite(self.epsilon) else NonPrivateDpEvent()


@dataclasses.dataclass(frozen=True)
class LabelPermutation(_Permutation):
    """Label first, negatives after: (ε, 0)-private, whatever is sampled.

    Args:
        epsilon: Privacy of one clicked candidate; `inf` keeps the label.
        num_negatives: How many negatives k accompany the label.

    Raises:
        ValueError: On a value out of range.

    Example:
        >>> LabelPermutation(math.inf, num_negatives=2).sample(5, 3)[0].item()
        3
    """

    holds = True

    def probabilities(self, num_candidates: int, clicked: int) -> NDArray[np.float64]:
        """Pr[label = j] for each candidate j.

        Example:
            >>> LabelPermutation(math.log(3), 1).probabilities(2, 0).round(2).tolist()
            [0.75, 0.25]
        """
        self._check(num_candidates, clicked)
        weights = np.full(num_candidates, math.exp(-self.epsilon))
        weights[clicked] = 1.0
        return weights / weights.sum()

    def sample(
        self, num_candidates: int, clicked: int, source: words.WordSource = words.os_entropy
    ) -> NDArray[np.int64]:
        """Positions of the private label (first) and of its k negatives.

        Args:
            num_candidates: How many news were shown.
            clicked: Position of the clicked one.
            source: Where the randomness comes from.

        Raises:
            ValueError: If a position or the number of candidates does not fit.
        """
        label = _categorical(self.probabilities(num_candidates, clicked), source)
        others = np.delete(np.arange(num_candidates), label)
        return np.concatenate([[label], _choose(others, self.num_negatives, source)])


@dataclasses.dataclass(frozen=True)
class PublishedLabelPermutation(_Permutation):
    """Negatives first, as published: the sampled candidates give the click away. For comparison only.

    Args:
        epsilon: What the paper calls epsilon_t.
        num_negatives: How many negatives k are sampled.

    Raises:
        ValueError: On a value out of range.

    Example:
        >>> 3 in PublishedLabelPermutation(0.1, num_negatives=2).sample(5, 3)
        True
    """

    holds = False

    def keep_probability(self, num_candidates: int) -> float:
        """Probability that the click keeps its label: e^β / (k + e^β)."""
        negatives = min(self.num_negatives, num_candidates - 1)
        beta = max(0.0, math.log(negatives / (num_candidates - 1)) + self.epsilon)
        return 1.0 / (1.0 + negatives * math.exp(-beta))

    def sample(
        self, num_candidates: int, clicked: int, source: words.WordSource = words.os_entropy
    ) -> NDArray[np.int64]:
        """Positions of the permuted label (first) and of the other sampled candidates."""
        self._check(num_candidates, clicked)
        others = np.delete(np.arange(num_candidates), clicked)
        negatives = _choose(others, self.num_negatives, source)
        keep = self.keep_probability(num_candidates)
        distinct = min(self.num_negatives, num_candidates - 1)
        weights = np.full(distinct + 1, (1.0 - keep) / distinct)
        weights[0] = keep
        sampled = np.concatenate([[clicked], negatives[:distinct]])
        label = _categorical(weights, source)
        return np.concatenate([[sampled[label]], np.resize(np.delete(sampled, label), self.num_negatives)])


def _categorical(probabilities: NDArray[np.float64], source: words.WordSource) -> int:
    cumulative = np.cumsum(probabilities)
    draw = words.uniform(source, (1,))[0] * cumulative[-1]
    return int(np.searchsorted(cumulative, draw, side="right"))


def _choose(values: NDArray[np.int64], count: int, source: words.WordSource) -> NDArray[np.int64]:
    """`count` of the values without replacement, uniformly: those with the smallest random words.

    Where there are fewer, all of them, over and over.
    """
    return np.resize(values[np.argsort(source(len(values)), kind="stable")], count)
