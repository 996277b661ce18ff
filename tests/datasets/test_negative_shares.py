"""How likely each candidate is a negative, and that draws follow it."""

import numpy as np
import pytest

from tfdp_rec.datasets.negative_shares import check_counts, different, inclusion, shares

COUNTS = [400.0, 0.0, -3.0, 100.0, 0.0, 100.0, 30.0, 1.0]


def chances_by_hand(counts, number):
    """Candidates whose chance would pass 1 are certain; the others share what is left."""
    likely, sure = shares(counts), set()
    while True:
        others = [i for i in range(len(likely)) if i not in sure]
        scale = (number - len(sure)) / likely[others].sum()
        more = {i for i in others if scale * likely[i] > 1}
        if not more:
            return np.array([1.0 if i in sure else scale * likely[i] for i in range(len(likely))])
        sure |= more


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("counts", [COUNTS, [1.0] * 8, [0.0] * 8, list(np.random.default_rng(0).pareto(0.7, 8))])
def test_chances_are_those_by_hand(counts, number):
    found = inclusion(counts, number)
    np.testing.assert_allclose(found, chances_by_hand(counts, number), rtol=1e-12)
    assert found.sum() == pytest.approx(number) and found.max() <= 1.0


def test_all_candidates_are_certain():
    assert inclusion(COUNTS, 8).tolist() == [1.0] * 8


def test_draws_are_different_and_follow_their_chances():
    """A wrong chance would have to be within 6σ of its own: once in 10⁸ for each candidate."""
    chances, rng, times = inclusion(COUNTS, 4), np.random.default_rng(1), 20_000
    seen = np.zeros(8)
    for _ in range(times):
        drawn = different(chances, rng)
        assert len(set(drawn.tolist())) == 4
        seen[drawn] += 1
    spread = 6 * np.sqrt(times * chances * (1 - chances))
    assert (np.abs(seen - times * chances) <= spread).all() and (chances == 1.0).sum() == 1
    assert (np.abs(seen - times / 2) > spread).any()  # another law is seen to be one


@pytest.mark.parametrize("counts", [[1.0], [1.0, np.nan], [[1.0, 2.0]]])
def test_counts_that_are_not_one_a_candidate_are_refused(counts):
    with pytest.raises(ValueError, match="released_counts must be 2 numbers"):
        check_counts(counts, 2)
