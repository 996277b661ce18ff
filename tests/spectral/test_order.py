"""The vote on order: each user's voice is bounded, counted as defined, and paid for within the budget."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.datasets.log import Catalogue, log_of
from tfdp_rec.spectral import SpectralRecommender, order, rules
from tfdp_rec.spectral.order import OrderVote, ballots, vote

CATALOGUE = Catalogue([10, 20, 30, 40, 50, 60])
HEAD = np.array([3, 0, 5, 1])  # 40, 10, 60, 20
WEIGHTS = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
PRIOR = np.array([0.3, 0.2, 0.1, 0.05], np.float32)
HISTORY = st.lists(st.sampled_from([10, 20, 30, 40, 50, 60, 99]), max_size=12)


def counted(histories, share=1.0, made=(CATALOGUE, HEAD, WEIGHTS, PRIOR)):
    return ballots(log_of(histories), share, *made)


def slow_vote(history, made=(CATALOGUE, HEAD, WEIGHTS, PRIOR)):
    """One user's vote, item by item."""
    catalogue, head, weights, prior = made
    row = {int(catalogue.ids[place]): at for at, place in enumerate(head)}
    known = list(dict.fromkeys(item for item in history if item in catalogue.ids))
    if len(known) < 2 or known[-1] not in row:
        return 0
    told = known[:-1][-20:]
    mean = np.mean([1 / (1 + age) for age in range(len(told))])
    ranks = []
    for recency in (1, 0):
        scores = prior.astype(float)
        for item in set(told) & set(row):
            age = told[::-1].index(item)
            scores = scores + (1 / (1 + age) / mean if recency else 1) * weights[row[item]]
        mine = scores[row[known[-1]]]
        ranks.append(sum(scores[at] > mine + 1e-6 for item, at in row.items() if item not in told))
    return int(np.sign(ranks[1] - ranks[0])) if min(ranks) < 50 else 0


@settings(deadline=None)
@given(st.lists(HISTORY, min_size=1, max_size=7))
def test_votes_are_those_of_the_definition(histories):
    assert counted(histories) == sum(map(slow_vote, histories))


@settings(deadline=None)
@given(st.lists(HISTORY, min_size=1, max_size=6), st.integers(0, 5))
def test_a_user_moves_the_sum_by_at_most_one(histories, at):
    at %= len(histories)
    emptied = histories[:at] + [[]] + histories[at + 1 :]
    assert abs(counted(histories) - counted(emptied)) <= 1


def test_votes_by_many_items_are_those_of_the_definition_and_one_each():
    rng = np.random.default_rng(3)
    made = Catalogue(np.arange(1, 101)), rng.permutation(100)[:80], rng.normal(size=(80, 80)), rng.random(80)
    histories = [rng.integers(1, 110, rng.choice([9, 40])).tolist() for _ in range(150)]
    votes = [counted([history], made=made) for history in histories]
    assert votes == [slow_vote(history, made) for history in histories]
    assert set(votes) == {-1, 0, 1} and counted(histories, made=made) == sum(votes)


def test_a_share_of_the_users_votes_others_each_time():
    history = next(h for h in map(list, np.random.default_rng(0).choice([10, 20, 40, 60], (900, 3))) if slow_vote(h))
    found = [abs(counted([history] * 4000, share=0.3)) for _ in range(3)]
    assert len(set(found)) > 1 and all(abs(each - 1200) < 5.5 * (4000 * 0.3 * 0.7) ** 0.5 for each in found)
    assert counted([history] * 4000, share=0.0) == 0 and abs(counted([history] * 40, share=2.0)) == 40


def test_votes_in_parts_are_the_same(monkeypatch):
    histories = [list(history) for history in np.random.default_rng(0).choice([10, 20, 40, 60, 99], (300, 6))]
    whole = counted(histories)
    monkeypatch.setattr(order, "_AT_ONCE", 40)
    assert counted(histories) == whole != 0


def test_the_noise_of_the_vote_is_what_it_says():
    """200 sums of no votes: a scale wrong by a fifth is rejected, and the right one fails once in a million."""
    found = [vote(log_of([[]]), 1, CATALOGUE, HEAD, WEIGHTS, PRIOR, 2.0, seeded(s)) for s in range(200)]
    assert {each.noise for each in found} == {20.0}
    spread = np.sum([(each.votes / 20.0) ** 2 for each in found])
    assert 114 < spread < 314  # chi-squared with 200 degrees of freedom beyond 1e-6 on each side
    assert not 114 < spread / 0.5**2 < 314 and not 114 < spread / 2.0**2 < 314


@pytest.mark.parametrize("votes, recency", [(100, 1), (10.1, 1), (9.9, 0.5), (0, 0.5), (-9.9, 0.5), (-10.1, 0)])
def test_in_doubt_order_is_kept_and_counts_less(votes, recency):
    assert OrderVote(votes, 5.0).recency == recency
    assert OrderVote(votes, 5.0).ordered == (recency > 0)


# In the recommender.

ITEMS = np.arange(1, 121)


def walks(users=2000, seed=0, shuffled=False):
    """Each user goes through the items in steps of one to three, from anywhere."""
    rng = np.random.default_rng(seed)
    for _ in range(users):
        path = ITEMS[(rng.integers(120) + np.cumsum(rng.integers(1, 4, 15))) % 120]
        yield rng.permutation(path) if shuffled else path


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_vote_tells_ordered_histories_from_shuffled_ones(shuffled):
    made = SpectralRecommender(ITEMS, epsilon=8.0, ordered=None, words=seeded(1))
    assert made.ordered is None
    made.fit(list(walks(shuffled=shuffled)), verbose=0)
    assert made.ordered == made.vote.ordered != shuffled
    assert made.recency == made.vote.recency == float(made.ordered) and made.released.ordered == made.ordered
    assert abs(made.vote.votes) > 5 * made.vote.noise


@pytest.mark.parametrize("shuffled", [False, True])
def test_all_releases_together_cost_one_gaussian(shuffled, monkeypatch):
    from tfdp_rec.spectral import counting as module

    used = []
    counts, pairs, votes = module.private_counts, module.release_pairs, order.release_sums
    monkeypatch.setattr(module, "private_counts", lambda *a, noise_multiplier, **o: used.append(noise_multiplier)
                        or counts(*a, noise_multiplier=noise_multiplier, **o))  # fmt: skip
    monkeypatch.setattr(module, "release_pairs", lambda t, s, w: used.append(s) or pairs(t, s, w))
    monkeypatch.setattr(order, "release_sums", lambda t, s, w: used.append(s) or votes(t, s, w))
    made = SpectralRecommender(ITEMS, epsilon=8.0, ordered=None, words=seeded(1))
    made.fit(list(walks(shuffled=shuffled)), verbose=0)
    assert len(used) == 4
    assert sum(sigma**-2 for sigma in used) == pytest.approx(made.noise_multiplier**-2, rel=1e-9)


def test_the_first_release_is_added_to_the_second():
    """The variance of the noise is what the release says, and not that of the second release alone."""
    nothing = [[1], [2]] * 400 + list(walks(300))
    made = SpectralRecommender(ITEMS, epsilon=4.0, ordered=None, words=seeded(3)).fit(nothing, verbose=0)
    exact = order_free_pairs(nothing, made.released.head)
    assert made.ordered
    noise = (made.released.pairs - exact)[np.triu_indices(len(exact), 1)] / made.released.pairs_noise[0]
    spread = np.sum(noise.astype(float) ** 2)
    count = noise.size  # a normal approximation of chi-squared, five standard deviations
    assert abs(spread - count) < 5 * (2 * count) ** 0.5
    assert abs(spread / 1.1 - count) > 5 * (2 * count) ** 0.5
    assert made.released.pairs_noise[0] == pytest.approx(made.split.gram / 0.99**0.5)


@pytest.mark.parametrize("votes", [100.0, -100.0])
def test_the_head_is_that_of_the_pairs_which_are_counted(votes, monkeypatch):
    """Long histories make any pairs' head smaller."""
    monkeypatch.setattr(order, "vote", lambda *asked: OrderVote(votes, 5.0))
    rng = np.random.default_rng(0)
    long = [ITEMS[rng.random(120) < np.linspace(1, 0.05, 120)] for _ in range(200)]
    made = SpectralRecommender(ITEMS, epsilon=4.0, delta=1e-4, ordered=None, words=seeded(1)).fit(long, verbose=0)
    noise = {True: made.split.gram, False: made.released.pairs_noise[0]}
    heads = {each: rules.head_of(made.released.counts, 200, noise[each], ordered=each) for each in noise}
    assert made.released.head.tolist() == heads[made.ordered].tolist() and made.ordered == (votes > 0)
    assert len(heads[False]) < 0.9 * len(heads[True])
    assert made.estimates.overlap.shape == made.released.head.shape == (len(made.released.pairs),)


def test_the_vote_is_by_few_items(monkeypatch):
    """The matrix for the vote is computed with and thrown away; the one that is released has its whole head."""
    sizes, voted = [], order.vote
    monkeypatch.setattr(order, "MOST_HEAD", 30)
    monkeypatch.setattr(order, "vote", lambda *asked: sizes.append(len(asked[3])) or voted(*asked))
    made = SpectralRecommender(ITEMS, epsilon=8.0, ordered=None, words=seeded(1)).fit(list(walks()), verbose=0)
    assert sizes == [30] and len(made.released.head) > 60 and made.ordered


def order_free_pairs(histories, head):
    from tfdp_rec.spectral.pair_sums import pair_sums
    from tfdp_rec.sums.fixed_point import ONE

    upper = pair_sums(log_of(histories), Catalogue(ITEMS), head, ordered=True) / ONE
    return upper + upper.T


def test_the_vote_is_kept_in_the_file_and_told_in_the_statement(tmp_path):
    made = SpectralRecommender(ITEMS, epsilon=8.0, ordered=None).fit(list(walks(600)), verbose=0)
    assert f"{made.vote.votes:+.0f}, with noise of" in str(made.statement())
    assert "took 1% of the budget" in str(made.vote) and "took 11% of" in str(OrderVote(-99.0, 1.0))
    made.save(tmp_path / "voted.npz")
    loaded = SpectralRecommender.load(tmp_path / "voted.npz")
    assert loaded.vote == made.vote and loaded.ordered == made.ordered and loaded.recency == made.recency
    assert str(loaded.statement()) == str(made.statement())


def test_a_further_fit_counts_as_the_first_one_did():
    first = SpectralRecommender(ITEMS, epsilon=8.0, ordered=None, words=seeded(1)).fit(list(walks()), verbose=0)
    second = SpectralRecommender(ITEMS, epsilon=8.0, ordered=None, before=first.released, words=seeded(2))
    assert second.ordered is True
    second.fit(list(walks(seed=5)), verbose=0)
    assert second.vote == first.vote and second.recency == 1.0 and second.released.fits == 2
