"""Private labels: which of the shown news was clicked.

The server showed C candidates, so it knows them; which one was clicked is private.

`LabelPermutation` (default) draws the private label l first, from all C candidates,

    Pr[l = j] = e^ε / (C - 1 + e^ε)  if j was clicked,   1 / (C - 1 + e^ε)  otherwise,

the latter rounded up to a multiple of 2^-52, of which a draw has one value each, so that ε bounds what is drawn,

and only then k negatives, uniformly from the other C - 1 (all of them, over and over, where C ≤ k). The negatives
depend on l alone, so the training sample (l, negatives) is post-processing of an (ε, 0)-private draw: every
probability changes by at most e^ε when the click moves.

The paper samples the negatives first, so that the sampled candidates give the click away: that form is a baseline in
`experiments.news.published`.

Reference:
    Liu et al., "PrivateRec", 2022, Algorithm 3, lines 16-18; Kairouz et al., "Extremal mechanisms
    for local differential privacy", 2014.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.events import DpEvent, NonPrivateDpEvent, PureDpEvent
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.sums.private_labels import response


@dataclasses.dataclass(frozen=True)
class LabelPermutation:
    """Label first, negatives after: (ε, 0)-private, whatever is sampled.

    Args:
        epsilon: Privacy of one clicked candidate; `inf` keeps the label.
        num_negatives: Number k of negatives that accompany the label.

    Raises:
        ValueError: On a value out of range.

    Example:
        >>> LabelPermutation(math.inf, num_negatives=2).sample(5, 3)[0].item()
        3
    """

    epsilon: float
    num_negatives: int = 4

    holds: ClassVar[bool] = True
    """Whether ε bounds what a label reveals."""

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}.")
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives must be at least 1, got {self.num_negatives}.")

    @staticmethod
    def refuse_no_choice(num_candidates: int, clicked: int) -> None:
        """Raises ValueError unless one of at least two news was clicked."""
        if num_candidates < 2:
            raise ValueError(f"num_candidates must be at least 2, got {num_candidates}: one news alone is no choice.")
        if not 0 <= clicked < num_candidates:
            raise ValueError(f"clicked must be in [0, {num_candidates}), got {clicked}.")

    @property
    def event(self) -> DpEvent:
        """What one label costs."""
        return PureDpEvent(self.epsilon) if self.holds and math.isfinite(self.epsilon) else NonPrivateDpEvent()

    def probabilities(self, num_candidates: int, clicked: int) -> NDArray[np.float64]:
        """Pr[label = j] for each candidate j.

        Example:
            >>> LabelPermutation(math.log(3), 1).probabilities(2, 0).round(2).tolist()
            [0.75, 0.25]
        """
        self.refuse_no_choice(num_candidates, clicked)
        own, other = response(self.epsilon, num_candidates)
        found = np.full(num_candidates, other)
        found[clicked] = own
        return found

    def sample(
        self, num_candidates: int, clicked: int, source: words.WordSource = words.os_entropy
    ) -> NDArray[np.int64]:
        """Positions of the private label (first) and of its k negatives.

        Args:
            num_candidates: Number of news that were shown.
            clicked: Position of the clicked one.
            source: Source of the random words.

        Raises:
            ValueError: If a position or the number of candidates does not fit.
        """
        label = categorical(self.probabilities(num_candidates, clicked), source)
        others = np.delete(np.arange(num_candidates), label)
        return np.concatenate([[label], choose(others, self.num_negatives, source)])


def categorical(probabilities: NDArray[np.float64], source: words.WordSource) -> int:
    """A position drawn with these probabilities."""
    cumulative = np.cumsum(probabilities)
    draw = words.uniform(source, (1,))[0] * cumulative[-1]
    return int(np.searchsorted(cumulative, draw, side="right"))


def choose(values: NDArray[np.int64], count: int, source: words.WordSource) -> NDArray[np.int64]:
    """`count` of the values without replacement, uniformly; where there are fewer, all of them, over and over."""
    return np.resize(values[np.argsort(source(len(values)), kind="stable")], count)
