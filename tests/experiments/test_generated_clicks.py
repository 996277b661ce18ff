"""The generator of click logs: its schema, its truth, its drift."""

import numpy as np
import pytest
from scipy import stats

from experiments.generated.clicks import HEAD_SHARES, KAGGLE_BUCKETS, SyntheticCriteo, auc
from experiments.generated.drawing import zipf_offset


@pytest.fixture(scope="module")
def generator():
    return SyntheticCriteo(seed=5, drift=0.1, churn=0.01)


def test_equal_arguments_give_equal_logs_and_parts_differ(generator):
    first, again, other = (generator.examples(500, day=2, part=p) for p in ("train", "train", "test"))
    np.testing.assert_array_equal(first.categorical, again.categorical)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert (first.categorical != other.categorical).mean() > 0.3


def test_labels_follow_the_planted_logits(generator):
    examples = generator.examples(60_000)
    probability = 1 / (1 + np.exp(-generator.logits(examples)))
    bins = np.digitize(probability, np.linspace(0.1, 0.9, 9))
    observed = np.bincount(bins, examples.labels)
    expected = np.bincount(bins, probability)
    variance = np.bincount(bins, probability * (1 - probability))
    assert stats.chi2.sf(((observed - expected) ** 2 / variance).sum(), len(variance)) > 1e-4


def test_buckets_cover_their_ranges_with_popular_heads(generator):
    examples = generator.examples(20_000)
    for feature, size in enumerate(KAGGLE_BUCKETS):
        column = examples.categorical[:, feature]
        assert column.min() == 0 and column.max() < size
        assert (column == 0).mean() == pytest.approx(0.05, abs=0.01)
    counts = np.sort(np.bincount(examples.categorical[:, 2]))[::-1]
    assert counts[0] > 0.03 * 20_000 and (counts == 1).sum() > 1_000


def test_popularity_has_the_stated_law():
    generator = SyntheticCriteo(buckets=[6] * 26, seed=1, zipf_exponent=1.5, head_shares=[0.4] * 26, missing=0.0)
    counts = np.bincount(generator.examples(50_000).categorical[:, 4], minlength=6)[1:]
    edges = (np.arange(6) + zipf_offset(5, 1.5, 0.4)) ** -0.5
    law = np.diff(edges) / (edges[-1] - edges[0])
    assert law[0] == pytest.approx(0.4)
    assert stats.chisquare(np.sort(counts), np.sort(law) * 50_000).pvalue > 1e-3


def test_heads_have_their_shares(generator):
    categorical = generator.examples(40_000).categorical
    for feature, (size, share) in enumerate(zip(KAGGLE_BUCKETS, HEAD_SHARES)):
        column = categorical[:, feature][categorical[:, feature] > 0]
        assert np.bincount(column).max() / len(column) == pytest.approx(max(share, 1 / (size - 1)), rel=0.15)


def test_drift_makes_yesterdays_truth_stale(generator):
    examples = generator.examples(30_000, day=6)
    fresh, stale = (auc(examples.labels, generator.logits(examples, day)) for day in (6, 0))
    assert 0.7 < fresh < 0.9 and stale < fresh - 0.01


def test_churn_brings_new_popular_buckets(generator):
    def popular(day):
        counts = np.bincount(generator.examples(20_000, day=day).categorical[:, 2])
        return set(np.argsort(-counts)[:20]) - {0}

    assert len(popular(0) & popular(3)) < len(popular(0) & popular(0))


@pytest.mark.parametrize(
    "wrong",
    [{"zipf_exponent": 1.0}, {"head_shares": [0.5] * 3}, {"missing": 1.0}, {"churn": -0.1}, {"buckets": [5] * 3}],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SyntheticCriteo(**wrong)


def test_auc_counts_pairs():
    rng = np.random.default_rng(0)
    labels, scores = rng.integers(0, 2, 60), rng.integers(0, 8, 60)
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels == 1] for n in scores[labels == 0]]
    assert auc(labels, scores) == pytest.approx(np.mean(pairs))
    with pytest.raises(ValueError, match="both labels"):
        auc(np.ones(3), np.ones(3))
