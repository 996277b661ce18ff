"""How well impressions are ranked: AUC, MRR, nDCG@5 and nDCG@10, each averaged over impressions.

Ties share their ranks (AUC) or are broken against the clicked news (the others), so that constant scores earn
nothing.

Reference:
    Wu et al., "MIND: a large-scale dataset for news recommendation", ACL 2020.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

METRICS = ("AUC", "MRR", "nDCG@5", "nDCG@10")


def impression_metrics(scores: ArrayLike, clicks: Sequence[int]) -> NDArray[np.float64]:
    """AUC, MRR, nDCG@5, nDCG@10 of one impression.

    Args:
        scores: One score per candidate.
        clicks: Positions that were clicked, at least one and not all.

    Raises:
        ValueError: If no candidate or every candidate was clicked.

    Example:
        >>> impression_metrics([0.1, 0.9, 0.3], [1]).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    values = np.asarray(scores, dtype=np.float64)
    clicked = np.zeros(len(values), dtype=bool)
    clicked[list(clicks)] = True
    positives = int(clicked.sum())
    negatives = len(values) - positives
    if not positives or not negatives:
        raise ValueError(f"clicks must name some of the {len(values)} candidates, got {positives} of them.")
    ranks = stats.rankdata(values)
    auc = (ranks[clicked].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    order = np.lexsort((clicked, -values))
    hits = clicked[order]
    reciprocal = (hits / np.arange(1, len(hits) + 1)).sum() / positives
    return np.array([auc, reciprocal, _ndcg(hits, 5), _ndcg(hits, 10)])


def average_metrics(scores: Sequence[ArrayLike], clicks: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean metrics over impressions, in percent.

    Args:
        scores: Scores of each impression.
        clicks: Clicked positions of each impression.

    Raises:
        ValueError: If there is no impression.

    Example:
        >>> average_metrics([[0.2, 0.1]], [[0]])["AUC"]
        100.0
    """
    if not len(scores):
        raise ValueError("scores must hold at least one impression.")
    rows = np.array([impression_metrics(s, c) for s, c in zip(scores, clicks)])
    return dict(zip(METRICS, (100.0 * rows.mean(axis=0)).tolist()))


def _ndcg(hits: NDArray[np.bool_], depth: int) -> float:
    discounts = 1.0 / np.log2(np.arange(2, depth + 2))
    gain = (hits[:depth] * discounts[: len(hits)]).sum()
    return float(gain / discounts[: int(hits.sum())].sum())
