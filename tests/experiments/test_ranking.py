"""Ranking metrics against their definitions, counted pair by pair."""

import numpy as np
import pytest

from experiments.news.ranking import average_metrics, impression_metrics


def slow(scores, clicks):
    pairs = [(scores[c], scores[n]) for c in clicks for n in range(len(scores)) if n not in clicks]
    auc = np.mean([1.0 if c > n else 0.5 if c == n else 0.0 for c, n in pairs])
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i in clicks))
    ranks = [order.index(c) + 1 for c in clicks]
    ndcg = []
    for depth in (5, 10):
        ideal = sum(1 / np.log2(r + 1) for r in range(1, min(len(clicks), depth) + 1))
        ndcg.append(sum(1 / np.log2(r + 1) for r in ranks if r <= depth) / ideal)
    return [auc, np.mean([1 / r for r in ranks]), *ndcg]


@pytest.mark.parametrize("seed", range(20))
def test_metrics_are_their_definitions(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 30))
    scores = rng.integers(0, 6, size=count).astype(float)
    clicks = rng.choice(count, size=int(rng.integers(1, count)), replace=False).tolist()
    np.testing.assert_allclose(impression_metrics(scores, clicks), slow(scores, clicks))


def test_random_scores_are_worth_half_and_constant_ones_no_more():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(4000, 20))
    assert average_metrics(scores, [[0]] * 4000)["AUC"] == pytest.approx(50, abs=2)
    constant = average_metrics(np.zeros((3, 20)), [[0], [4], [19]])
    assert constant["AUC"] == 50 and constant["MRR"] == pytest.approx(5)


@pytest.mark.parametrize("clicks", ([], [0, 1]))
def test_an_impression_without_contrast_is_refused(clicks):
    with pytest.raises(ValueError, match="clicks"):
        impression_metrics([0.1, 0.2], clicks)
    with pytest.raises(ValueError, match="scores"):
        average_metrics([], [])
