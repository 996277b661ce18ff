"""Metrics against their definitions, written out for one user at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdp_rec.metrics import Mean, hit_at_k, hits, ndcg_at_k, popular_share, recall_at_k

RANKING = st.permutations(range(1, 9)).map(lambda order: order[:5])
RELEVANT = st.lists(st.integers(1, 12), min_size=1, max_size=7)


def slow_ndcg(ranking, relevant):
    gains = [1 / math.log2(place + 2) for place in range(len(ranking))]
    found = sum(gain for gain, item in zip(gains, ranking) if item in relevant)
    return found / sum(gains[: len(set(relevant))])


@given(st.lists(st.tuples(RANKING, RELEVANT), min_size=1, max_size=5))
def test_each_is_its_definition(users):
    rankings, relevant = [r for r, _ in users], [r for _, r in users]
    recalls = [len(set(ranking) & set(items)) / len(set(items)) for ranking, items in users]
    assert recall_at_k(rankings, relevant).tolist() == pytest.approx(recalls)
    assert hit_at_k(rankings, relevant).tolist() == [float(recall > 0) for recall in recalls]
    assert ndcg_at_k(rankings, relevant).tolist() == pytest.approx([slow_ndcg(*user) for user in users])


@given(st.lists(st.lists(st.integers(0, 6), min_size=4, max_size=4), min_size=1), st.sets(st.integers(0, 6)))
def test_the_share_of_popular_items_is_among_those_that_were_recommended(lists, popular):
    found = [[item for item in row if item] for row in lists]
    shares = [sum(item in popular for item in row) / len(row) if row else 0.0 for row in found]
    assert popular_share(lists, list(popular)).tolist() == pytest.approx(shares)


def test_an_answer_that_is_filled_up_has_no_hit_there():
    assert hits([[5, 0]], [[0, 5]]).tolist() == [[True, False]]


def test_a_mean_knows_how_uncertain_it_is():
    values = np.random.default_rng(0).random(10_000)
    found = Mean.of(values)
    assert found.error == pytest.approx(12**-0.5 / 100, rel=0.05)
    low, high = found.interval()
    assert low < 0.5 < high and high - low == pytest.approx(3.92 * found.error)
    assert Mean.of([1.0]).error == math.inf


@pytest.mark.parametrize(
    "recommended, relevant, words",
    [([[1, 2]], [[1], [2]], "a row a user"), ([1, 2], [[1], [2]], "a row a user"), ([[1, 2]], [[]], "no relevant")],
)
def test_what_does_not_fit_is_refused(recommended, relevant, words):
    with pytest.raises(ValueError, match=words):
        hits(recommended, relevant)
    with pytest.raises(ValueError, match="at least one user"):
        Mean.of([])
