"""PrivateRec's noise and labels as published: baselines, which do not give the privacy that they are asked for.

`PublishedGaussian` and `PublishedLaplace` take θ for the sensitivity. `PublishedLabelPermutation` samples the k
negatives from the candidates that were not clicked and permutes the label among those k + 1: the sampled candidates
always hold the click, and the local gradient shows which candidates were sampled. Unless k = C - 1, no ε bounds that.
(The label by itself is private only when e^ε ≥ (C - 1)/k: below, the paper's β is cut at 0 and the ratio stays at
(C - 1)/k.)

docs/privacy-privaterec.md has the proofs and what each formula really gives.

Reference:
    Liu et al., "PrivateRec", 2022, Algorithm 2, line 9, and Algorithm 3, lines 16-18.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated.labels import LabelPermutation, categorical, choose
from tfdp_rec.federated.mechanism import AnalyticGaussian, PureLaplace


@dataclasses.dataclass(frozen=True)
class PublishedGaussian(AnalyticGaussian):
    """The paper's formula for Gaussian noise: it is not (ε, δ)-private.

    Example:
        >>> round(PublishedGaussian().scale(10.0, 1e-5, 0.0, 5, 1.0), 4)
        0.4845
    """

    holds = False

    def sensitivity(self, num_basis: int, clip_norm: float) -> float:
        return clip_norm

    def unit(self, epsilon: float, delta: float) -> float:
        return math.sqrt(2.0 * math.log(1.25 / delta)) / epsilon


@dataclasses.dataclass(frozen=True)
class PublishedLaplace(PureLaplace):
    """The paper's sensitivity θ with Laplace noise: it is not ε-private.

    Example:
        >>> PublishedLaplace().scale(10.0, 0.0, 0.0, 5, 1.0)
        0.1
    """

    holds = False

    def sensitivity(self, num_basis: int, clip_norm: float) -> float:
        return clip_norm


@dataclasses.dataclass(frozen=True)
class PublishedLabelPermutation(LabelPermutation):
    """Negatives first, as published: the sampled candidates give the click away.

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
        self.refuse_no_choice(num_candidates, clicked)
        others = np.delete(np.arange(num_candidates), clicked)
        negatives = choose(others, self.num_negatives, source)
        keep = self.keep_probability(num_candidates)
        distinct = min(self.num_negatives, num_candidates - 1)
        weights = np.full(distinct + 1, (1.0 - keep) / distinct)
        weights[0] = keep
        sampled = np.concatenate([[clicked], negatives[:distinct]])
        label = categorical(weights, source)
        return np.concatenate([[sampled[label]], np.resize(np.delete(sampled, label), self.num_negatives)])
