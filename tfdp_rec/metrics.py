"""Metrics of recommendations on held-out items, and the standard error of their mean.

For a user with the relevant items R, and recommendations r_1 … r_k (best first, without the items of the history),

    recall@k = |R ∩ {r_1 … r_k}| / |R|           hit@k = 1 if any of them is in R, else 0
    DCG@k = Σ over places p with r_p in R of 1/log₂(p + 1),   nDCG@k = DCG@k / (DCG@k of the best possible order).

Each function gives a value per user, and `Mean` their mean. No ε covers these numbers: they are for those who may see
the data. `tfdp_rec.privacy.private_metrics` releases means of them within ε (docs/privacy-metrics.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over users, and its standard error.

    Example:
        >>> Mean.of([0.0, 0.5, 1.0, 0.5])
        Mean(value=0.5, error=0.204..., users=4)
        >>> print(Mean.of([0.0, 0.5, 1.0, 0.5]))
        .5000 ± .2041
    """

    value: float
    error: float
    users: int

    @classmethod
    def of(cls, values: ArrayLike) -> Mean:
        """The mean of one value per user."""
        found = np.asarray(values, np.float64)
        if found.ndim != 1 or not found.size:
            raise ValueError("A mean needs one value per user, for at least one user.")
        error = found.std(ddof=1) / found.size**0.5 if found.size > 1 else np.inf
        return cls(float(found.mean()), float(error), found.size)

    def interval(self, errors: float = 1.96) -> tuple[float, float]:
        """Interval of some standard errors about the mean; by default a 95% confidence interval."""
        return self.value - errors * self.error, self.value + errors * self.error

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.4f}".replace("0.", ".")


def hits(recommended: ArrayLike, relevant: Sequence[ArrayLike]) -> NDArray[np.bool_]:
    """Whether each recommended item is one of its user's relevant ones, `[users, k]`.

    Args:
        recommended: Item ids, best first, `[users, k]`; 0 stands for none.
        relevant: Ids of each user's relevant items, at least one.

    Raises:
        ValueError: The numbers of users differ, or a user has no relevant item.

    Example:
        >>> hits([[3, 1], [2, 4]], [[1], [4, 2]]).tolist()
        [[False, True], [True, True]]
    """
    rows = np.asarray(recommended)
    if rows.ndim != 2 or len(rows) != len(relevant):
        raise ValueError(f"recommended must be a row a user of {len(relevant)} users, got shape {rows.shape}.")
    if not all(np.size(items) for items in relevant):
        raise ValueError("A user has no relevant item: leave such users out of both.")
    return np.stack([np.isin(row, items) & (row != 0) for row, items in zip(rows, relevant)]) if len(rows) else rows > 0


def recall_at_k(recommended: ArrayLike, relevant: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """recall@k of each user; arguments as for `hits`."""
    return hits(recommended, relevant).sum(1) / np.array([len(np.unique(items)) for items in relevant])


def hit_at_k(recommended: ArrayLike, relevant: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """hit@k of each user; arguments as for `hits`."""
    return np.asarray(hits(recommended, relevant).any(1), np.float64)


def ndcg_at_k(recommended: ArrayLike, relevant: Sequence[ArrayLike]) -> NDArray[np.float64]:
    """nDCG@k of each user; arguments as for `hits`."""
    found = hits(recommended, relevant)
    gains = 1 / np.log2(np.arange(2, found.shape[1] + 2))
    most = np.array([min(len(np.unique(items)), found.shape[1]) for items in relevant], np.int64)
    return found @ gains / np.cumsum(gains)[most - 1]


def popular_share(recommended: ArrayLike, popular: ArrayLike) -> NDArray[np.float64]:
    """Share of each user's recommended items that are among the popular ones; 0 for a user without any.

    Args:
        recommended: Item ids, `[users, k]`; 0 stands for none.
        popular: Ids of the popular items, which are public or released.

    Example:
        >>> popular_share([[3, 1], [2, 0], [0, 0]], [1, 2]).tolist()
        [0.5, 1.0, 0.0]
    """
    rows = np.asarray(recommended)
    there = rows != 0
    return (np.isin(rows, popular) & there).sum(1) / np.maximum(there.sum(1), 1)


def ranks(scores: NDArray[np.floating], label: NDArray[np.integer]) -> NDArray[np.int64]:
    """The rank of each user's label, from 0, among all items; with one relevant item recall@k is [rank < k].

    Of equal scores the first item of the catalogue stands first; a score that is no number stands last.

    Args:
        scores: Score of each item, `[users, items]`.
        label: Number of the user's item, from 1; 0 for one that is not among them, whose rank is the last.

    Example:
        >>> ranks(np.array([[0.5, 0.9, 0.5], [0.1, 0.2, 0.3]]), np.array([3, 0])).tolist()
        [2, 3]
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    own = scores[np.arange(len(label)), label - 1][:, None]
    earlier = np.arange(scores.shape[1]) < label[:, None] - 1
    found = np.sum((scores > own) | ((scores == own) & earlier), axis=1)
    return np.where(label > 0, found, scores.shape[1])
