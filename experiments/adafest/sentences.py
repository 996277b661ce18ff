"""Labelled sentences of a sentiment corpus' shape, with the truth known.

A sentence is 5 to L tokens (uniformly many), drawn independently by rank from a shifted Zipf law,

  P(rank ≤ r) = ((r + c)^(1-a) - c^(1-a)) / ((V + c)^(1-a) - c^(1-a)),    a = 1.1, c = 2.7,

as words are in English. Token 0 is padding, token r + 1 has rank r. A share of the tokens is polar: they have a
Gaussian weight, all others weight 0, and the most frequent ones (function words) are never polar. The planted logit is
the sum of a sentence's weights, and its label a coin. Word order means nothing here. In the part "public", which stands
for texts of another kind, a token's weight has the correlation `agreement` with its weight elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from experiments.generated.drawing import zipf_ranks
from tfdp_rec.core.ground.refused import refuse_below

_EXPONENT, _SHIFT = 1.1, 2.7
_FUNCTION_WORDS = 20
_SHORTEST = 5


@dataclasses.dataclass(frozen=True)
class TextExamples:
    """Sentences in memory: `labels` int32 [n], `tokens` int32 [n, L], 0 for padding."""

    labels: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """The (tokens, labels) of some examples, as a model takes them."""
        return self.tokens[indices], self.labels[indices]


@dataclasses.dataclass(frozen=True)
class SyntheticText:
    """A generator of labelled sentences; equal arguments give equal sentences.

    Args:
        vocabulary_size: Number of token ids V + 1, padding included.
        max_length: Length L of the longest sentence.
        seed: Seed of everything that is random.
        polar_share: Share of the tokens that have a weight.
        signal: Standard deviation of an average sentence's logit; it sets the best possible accuracy.
        agreement: Correlation of a token's weights in public and in other sentences.

    Raises:
        ValueError: for sizes that hold no polar token or no sentence, or a share outside (0, 1].

    Example:
        >>> text = SyntheticText(seed=1)
        >>> examples = text.examples(2000)
        >>> examples.tokens.shape, bool(0.4 < examples.labels.mean() < 0.6)
        ((2000, 32), True)
        >>> bool(np.mean((text.logits(examples) > 0) == examples.labels) > 0.8)
        True
    """

    vocabulary_size: int = 30_522
    max_length: int = 32
    seed: int = 0
    polar_share: float = 0.3
    signal: float = 3.0
    agreement: float = 0.7

    def __post_init__(self) -> None:
        refuse_below(2 * _FUNCTION_WORDS, vocabulary_size=self.vocabulary_size)
        refuse_below(_SHORTEST, max_length=self.max_length)
        if not 0.0 < self.polar_share <= 1.0:
            raise ValueError(f"polar_share must lie above 0 and be at most 1, got {self.polar_share!r}.")

    def examples(self, num_examples: int, day: int = 0, part: str = "train") -> TextExamples:
        """Examples of one part; different days and parts are independent."""
        rng = np.random.default_rng([self.seed, day, *part.encode()])
        uniform = rng.random((num_examples, self.max_length))
        ranks = zipf_ranks(uniform, self.vocabulary_size - 1, _EXPONENT, _SHIFT)
        lengths = rng.integers(_SHORTEST, self.max_length + 1, num_examples)
        tokens = np.where(np.arange(self.max_length) < lengths[:, None], ranks + 1, 0).astype(np.int32)
        logits = (self._public_weights if part == "public" else self._weights)[tokens].sum(axis=1)
        labels = rng.random(num_examples) < 1.0 / (1.0 + np.exp(-logits))
        return TextExamples(labels.astype(np.int32), tokens)

    def logits(self, examples: TextExamples) -> np.ndarray:
        """The planted logits, float64 [n]: what a model that knows the truth would answer."""
        return self._weights[examples.tokens].sum(axis=1)

    @functools.cached_property
    def _public_weights(self) -> np.ndarray:
        other = dataclasses.replace(self, seed=self.seed + 1_000_003)._weights
        return self.agreement * self._weights + np.sqrt(1.0 - self.agreement**2) * other

    @functools.cached_property
    def _weights(self) -> np.ndarray:
        """float64 [V + 1]; of the padding 0."""
        rng = np.random.default_rng([self.seed, 1])
        weights = rng.normal(size=self.vocabulary_size) * (rng.random(self.vocabulary_size) < self.polar_share)
        weights[: 1 + _FUNCTION_WORDS] = 0.0
        ranks = np.arange(self.vocabulary_size) + _SHIFT
        shares = -np.diff(ranks ** (1.0 - _EXPONENT))  # of ranks 0 .. V - 1, up to a factor
        variance = np.sum(shares / shares.sum() * weights[1:] ** 2) * (_SHORTEST + self.max_length) / 2
        return weights * (self.signal / np.sqrt(variance))
