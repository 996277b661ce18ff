"""Choices made from σ, from public sizes and from earlier releases, and never from a user's data.

**Split.** Counts and pairs are two Gaussians on the same users, σ_c⁻² + σ_g⁻² = σ⁻². Counts get the share 3 σ√M / n
of σ⁻² (M items, n users), no less than 1/9 and no more than 9/10. σ√M is the norm of the noise that all counts would
have for the whole budget: where it is not small beside the number of users, even counts are mostly noise, and pairs are
noise alone. Where the number of users is private, too, a hundredth of σ⁻² pays for counting them before that.

**Head.** An item gets a row of the matrix as long as its count exceeds the noise of a row, σ_g √m:

    m is the greatest for which the m-th best noisy count is at least ¼ √r σ_g √m · max(1, d_m / 30),

r the mean of √d over users, which is the sum of the counts over n, and d_m the mean number of items of the head that a
user has, r Σ c / n over the head (long histories: more pairs share a user's weight). So m falls as the noise grows, and
does not depend on the catalogue's tail. Near pairs of ordered histories are fewer, and have the head without max.

**A wide head**, for any pairs, has min(¼ √r, L) in place of ¼ √r where d_m < 30: larger where histories are long and
the head holds little of them, never smaller. About c√d users have an item. Each gives √(2 d_m / (1 + d_m)) to its row
in all, which is spread over 1 + d_m other items, so that of the row's length c√d √(2 d_m) / (1 + d_m) is left. For that
to be above a multiple of the row's noise, c has to be at least

    L σ_g √m,   L = 0.7 (1 + d_m) / (r √d_m).

**Prior.** The share of users that have an item: μ_j = c_j r / n, c_j its noisy count, no less than half of the noise.
What histories add to a score holds popularity too: one of mean μ adds μB₀ to the items of the head, B₀ the weights B
without their diagonal. So a score is βμ for a history without items of the head, and else, h the history,

    βμ + hB - o,   o = β min(κ μB₀, μ),   κ = min(1, d_m / 30).

**Features**, where they are given (`features.py`), have the weight 1 - κ/2: pairs tell more where histories are long.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.spectral.pair_sums import OWN
from tfdp_rec.spectral.release import Release

USERS = 0.01
LEAST_COUNTS, MOST_COUNTS, COUNTS = 1 / 9, 9 / 10, 3
ROW_NOISE, WIDE_NOISE = 0.25, 0.7
LEAST_HEAD, MOST_HEAD = 16, 6000
LONG_HISTORY = 30.0
PRIOR = 0.5  # β
Noise: TypeAlias = float | NDArray[np.float64]
Size: TypeAlias = int | Literal["wide"] | None  # of the head; None for the usual rule's


@dataclasses.dataclass(frozen=True)
class Split:
    """Noise multipliers of the two releases: σ_c of the counts, σ_g of the Gram matrix."""

    counts: float
    gram: float

    @classmethod
    def from_budget(cls, total: float, num_users: int, num_items: int) -> Split:
        """The split of σ, the noise multiplier of the one Gaussian that both releases cost together."""
        share = min(max(COUNTS * total * num_items**0.5 / num_users, LEAST_COUNTS), MOST_COUNTS)
        return cls(total / share**0.5, total / (1 - share) ** 0.5)


def mean_root(counts: NDArray[np.float64], num_users: float) -> float:
    """r, the mean over users of √d, at least 1."""
    return max(1.0, float(counts.sum()) / num_users)


def history_lengths(counts: NDArray[np.float64], head: NDArray[np.int64], num_users: float) -> NDArray[np.float64]:
    """d_m for each m, the mean number of a user's items among the first m of the head."""
    return np.cumsum(np.maximum(counts[head], 0)) * (mean_root(counts, num_users) / num_users)


def head_of(
    counts: NDArray[np.float64], num_users: float, sigma: float, size: Size = None, ordered: bool = False
) -> NDArray[np.int64]:
    """Places of the items that get a row, the best noisy count first; `sigma` is σ_g."""
    # By a rule at most 6,000, for which dense algebra takes a minute or two.
    best = np.argsort(-counts, kind="stable")[: size if isinstance(size, int) else MOST_HEAD]
    if isinstance(size, int):
        return best
    r = mean_root(counts, num_users)
    ratio = np.full(len(best), ROW_NOISE * np.sqrt(r))
    if not ordered:
        lengths = np.maximum(history_lengths(counts, best, num_users), 1e-9)
        if size == "wide":
            wide = np.minimum(ratio, WIDE_NOISE * (1 + lengths) / (r * np.sqrt(lengths)))
            ratio = np.where(lengths < LONG_HISTORY, wide, ratio)
        ratio *= np.maximum(lengths / LONG_HISTORY, 1)
    worth = np.flatnonzero(counts[best] >= ratio * sigma * np.sqrt(np.arange(1, len(best) + 1)))
    return best[: max(int(worth[-1]) + 1 if len(worth) else 0, LEAST_HEAD)]


def prior_of(counts: NDArray[np.float64], num_users: float, sigma: Noise) -> NDArray[np.float64]:
    """μ, an estimate of the share of users that have each item; `sigma` is σ_c, of all or of each."""
    return np.maximum(counts, 0.5 * sigma) * mean_root(counts, num_users) / num_users


def kappa(made: Release) -> float:
    """κ, from 0 for short histories to 1 for long ones."""
    return min(1.0, float(history_lengths(made.counts, made.head, made.users)[-1]) / LONG_HISTORY)


def overlap_of(mine: NDArray[np.float64], weights: NDArray[np.float32], share: float) -> NDArray[np.float64]:
    """o, what prior and histories both tell of the head: `mine` is μ of the head, `weights` B, `share` κ."""
    by_histories = mine @ weights - mine * np.diag(weights)
    return PRIOR * np.minimum(share * by_histories, mine)


def diagonal_of(
    counts: NDArray[np.float64], noisy: NDArray[np.float32], num_users: float, sigma: Noise, ordered: bool = False
) -> NDArray[np.float64]:
    """D, an estimate of the diagonal of the Gram matrix, which is not released; `sigma` is σ_c, of all or of each."""
    if ordered:
        return np.maximum(counts, 0.5 * sigma) * OWN
    # A user with d items of the head gives √2 d to the sum of the matrix, nearly: the sum over √2 n is the mean d, and
    # a count at weight 1/√d becomes one at weight √2/√(d(d-1)).
    mean = float(noisy.sum(dtype=np.float64)) / (np.sqrt(2) * num_users)
    return np.maximum(counts, 0.5 * sigma) * np.sqrt(2 / max(mean - 1, 1.0))
