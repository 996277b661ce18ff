"""Click logs of Criteo's schema, with the truth known: planted logits, popular and rare buckets, and drift.

Feature f has V_f buckets. A bucket's popularity rank follows a shifted Zipf law (`drawing.py`); the shift c_f
gives the most popular bucket its share. Ranks map to buckets by a fixed permutation that moves on a little every day: a
share of each day's popular buckets are new. The planted logit of an example is

  bias + Σ_f w_f (cos(day d) A_f[b_f] + sin(day d) B_f[b_f]) + Σ_j u_j z_j,

with A, B standard Gaussians that are a function of (f, b), never stored, d the drift in radians a day, and
z_j the standardised numbers. As the truth is known, so is the best AUC that any model could reach.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from experiments.generated.drawing import GOLDEN, mixed, zipf_offset, zipf_ranks
from tfdp_rec.models.pctr import KAGGLE_BUCKETS, NUM_NUMERIC

NUM_CATEGORICAL = len(KAGGLE_BUCKETS)

# What share of examples has the most frequent category of each feature. A guess at the Kaggle logs from memory, neither
# measured nor from a source that could be named. What it keeps of them is that some features are nearly constant and
# others hardly repeat. How far rows can be left out depends on these numbers, so give your own where you know better.
HEAD_SHARES = (
    0.50, 0.11, 0.04, 0.04, 0.67, 0.40, 0.02, 0.60, 0.90, 0.22, 0.03, 0.04, 0.02,
    0.35, 0.02, 0.04, 0.46, 0.03, 0.44, 0.40, 0.04, 0.76, 0.44, 0.04, 0.44, 0.40,
)  # fmt: skip

_NUMERIC_SCALE = np.linspace(0.6, 2.0, NUM_NUMERIC)


@dataclasses.dataclass(frozen=True)
class CriteoExamples:
    """Examples in memory.

    Attributes:
        labels: Clicks, float32 [n]: 1 for a click.
        numeric: Logarithms of the numeric features, float32 [n, 13].
        categorical: Buckets of the categorical features, int32 [n, 26].

    Example:
        >>> examples = CriteoExamples(np.zeros(3), np.zeros([3, 13]), np.zeros([3, 26], np.int32))
        >>> features, labels = examples.fetch(np.array([0, 2]))
        >>> features["categorical"].shape, labels.shape
        ((2, 26), (2,))
    """

    labels: np.ndarray
    numeric: np.ndarray
    categorical: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray | slice) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The (features, labels) of some examples, as a model takes them."""
        features = {"numeric": self.numeric[indices], "categorical": self.categorical[indices]}
        return features, self.labels[indices]


@dataclasses.dataclass(frozen=True)
class SyntheticCriteo:
    """A generator of click logs; equal arguments give equal logs.

    Args:
        buckets: 26 bucket counts, each at least 2. Bucket 0 stands for a missing category.
        seed: Seed of everything that is random.
        zipf_exponent: Exponent a, other than 1; a larger one is more skewed.
        head_shares: Share of each feature's most popular bucket among examples that have the feature.
        signal: Standard deviation of the planted logit; it sets the best possible AUC.
        numeric_share: Share of the logit's variance that comes from the numbers.
        click_bias: Logit of an average example; -1.2 gives about a quarter clicks.
        drift: Angle d, in radians, by which the effects turn every day.
        churn: Share of a feature's buckets that the popularity order moves by every day.
        missing: Probability that a field is missing.

    Example:
        >>> generator = SyntheticCriteo(seed=1)
        >>> examples = generator.examples(1000)
        >>> examples.categorical.shape, bool(0.1 < examples.labels.mean() < 0.5)
        ((1000, 26), True)
    """

    buckets: Sequence[int] = KAGGLE_BUCKETS
    seed: int = 0
    zipf_exponent: float = 1.2
    head_shares: Sequence[float] = HEAD_SHARES
    signal: float = 1.3
    numeric_share: float = 0.4
    click_bias: float = -1.2
    drift: float = 0.0
    churn: float = 0.0
    missing: float = 0.05

    def __post_init__(self) -> None:
        check_buckets(self.buckets)
        if self.zipf_exponent <= 0.0 or self.zipf_exponent == 1.0:
            raise ValueError(f"zipf_exponent must be positive and other than 1, got {self.zipf_exponent!r}.")
        if len(self.head_shares) != len(self.buckets) or not all(0.0 < share < 1.0 for share in self.head_shares):
            raise ValueError(
                f"head_shares must be {len(self.buckets)} numbers between 0 and 1, got {self.head_shares!r}."
            )
        for name in ("numeric_share", "churn", "missing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)!r}.")

    def examples(self, num_examples: int, day: int = 0, part: str = "train") -> CriteoExamples:
        """Examples of one day. Equal arguments give equal examples; two parts of a day are independent."""
        return self.draw(num_examples, day, part)[0]

    def logits(self, examples: CriteoExamples, day: int = 0, known: np.ndarray | None = None) -> np.ndarray:
        """The planted logits, float64 [n]: what a model that knows the truth would answer.

        Args:
            examples: Examples whose features count.
            day: Day whose effects hold.
            known: Buckets whose effect counts, bool [n, 26]; the others' is 0. None for all.
        """
        angle = self.drift * day
        total = np.full(len(examples), self.click_bias)
        for feature, weight in enumerate(self._feature_weights()):
            first, second = self._effects(feature, examples.categorical[:, feature])
            effect = weight * (math.cos(angle) * first + math.sin(angle) * second)
            total += effect if known is None else effect * known[:, feature]
        standardised = (examples.numeric - 1.5 * _NUMERIC_SCALE) / _NUMERIC_SCALE
        return total + standardised @ self._numeric_weights()

    def draw(self, num_examples: int, day: int, part: str) -> tuple[CriteoExamples, np.ndarray]:
        """Examples, and their numbers before the logarithm; NaN is missing."""
        rng = np.random.default_rng([self.seed, day, *part.encode()])
        categorical = np.stack(
            [self._categories(rng, f, size, num_examples, day) for f, size in enumerate(self.buckets)], axis=1
        )
        raw = self._numbers(rng, num_examples)
        numeric = np.log1p(np.maximum(np.nan_to_num(raw), 0.0)).astype(np.float32)
        unlabelled = CriteoExamples(np.zeros(num_examples, np.float32), numeric, categorical)
        probability = 1.0 / (1.0 + np.exp(-self.logits(unlabelled, day)))
        labels = (rng.random(num_examples) < probability).astype(np.float32)
        return dataclasses.replace(unlabelled, labels=labels), raw

    def _categories(self, rng: np.random.Generator, feature: int, size: int, count: int, day: int) -> np.ndarray:
        """Buckets of one feature: a Zipf rank, moved on by the day's churn, through a fixed permutation."""
        present = size - 1
        offset = zipf_offset(present, self.zipf_exponent, self.head_shares[feature])
        rank = zipf_ranks(rng.random(count), present, self.zipf_exponent, offset)
        moved = (rank + int(day * self.churn * present)) % present
        bucket = 1 + (moved * _coprime(0x9E3779B1 + 2 * feature, present)) % present
        return np.where(rng.random(count) < self.missing, 0, bucket).astype(np.int32)

    def _numbers(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Whole numbers, their logarithms of mean 1.5 and deviation 1 in units of a scale; NaN is missing."""
        logs = (1.5 + rng.normal(size=(count, NUM_NUMERIC))) * _NUMERIC_SCALE
        numbers = np.floor(np.expm1(np.clip(logs, -1.0, 14.0)))
        return np.where(rng.random(numbers.shape) < self.missing, np.nan, np.maximum(numbers, -1.0))

    def _feature_weights(self) -> np.ndarray:
        """Unequal weights, as in real logs, whose squares add up to the categories' share of the variance."""
        weights = np.random.default_rng([self.seed, 1]).lognormal(sigma=0.6, size=NUM_CATEGORICAL)
        return weights * self.signal * math.sqrt((1.0 - self.numeric_share) / np.square(weights).sum())

    def _numeric_weights(self) -> np.ndarray:
        weights = np.random.default_rng([self.seed, 2]).normal(size=NUM_NUMERIC)
        return weights * self.signal * math.sqrt(self.numeric_share / np.square(weights).sum())

    def _effects(self, feature: int, buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Two standard Gaussians for each bucket of a feature, a function of the seed, by Box and Muller."""
        key = buckets.astype(np.uint64) + np.uint64((self.seed * 1_000_003 + feature) % 2**31 << 32)
        u, v = (_uniforms(key, salt) for salt in (1, 2))
        radius = np.sqrt(-2.0 * np.log(u))
        return radius * np.cos(2.0 * math.pi * v), radius * np.sin(2.0 * math.pi * v)


def check_buckets(buckets: Sequence[int]) -> None:
    """Raises ValueError unless `buckets` are 26 counts between 2 and 2^31."""
    if len(buckets) != NUM_CATEGORICAL:
        raise ValueError(f"buckets must have {NUM_CATEGORICAL} counts, got {len(buckets)}.")
    for feature, size in enumerate(buckets):
        if not 2 <= size < 2**31:
            raise ValueError(f"buckets[{feature}] must lie between 2 and 2^31 - 1, got {size!r}.")


def _uniforms(keys: np.ndarray, salt: int) -> np.ndarray:
    words = mixed(keys + np.uint64((salt + 1) * GOLDEN % 2**64)) % np.uint64(2**31 - 2)
    return (1 + words.astype(np.int64)) / float(2**31)


def _coprime(start: int, size: int) -> int:
    """The first number from `start` on that shares no divisor with `size`: multiplying by it permutes."""
    return next(number for number in range(start, start + size + 2) if math.gcd(number, size) == 1)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: how often `scores` of clicks (`labels` of 1) exceed others, ties counting half.

    Raises:
        ValueError: There are no clicks, or nothing but clicks.

    Example:
        >>> auc(np.array([0, 1, 1]), np.array([0.1, 0.9, 0.1]))
        0.75
    """
    from scipy.stats import rankdata

    positive = np.asarray(labels) > 0.5
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        raise ValueError("the AUC needs both labels, but all examples have the same.")
    ranks = rankdata(np.asarray(scores, np.float64))[positive].sum()
    return float((ranks - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))
