"""The rules: from σ, public sizes and released numbers alone."""

import dataclasses

import numpy as np
import pytest

from tfdp_rec.spectral import Release, rules


@pytest.mark.parametrize(
    "total, users, items, share", [(4.2, 30_000, 40_000, 1 / 9), (1.0, 600, 6400, 0.4), (9.0, 50, 900, 0.9)]
)
def test_counts_get_more_where_few_users_meet_many_items(total, users, items, share):
    split = rules.Split.from_budget(total, users, items)
    assert (total / split.counts) ** 2 == pytest.approx(share)
    assert split.counts**-2 + split.gram**-2 == pytest.approx(total**-2)


def test_the_head_ends_where_counts_drown_in_a_rows_noise():
    counts = np.arange(1000, 0, -1.0)
    users, sigma = 50_000, 3.0
    head = rules.head_of(counts, users, sigma, ordered=True)
    least = rules.ROW_NOISE * np.sqrt(rules.mean_root(counts, users)) * sigma
    assert counts[head[-1]] >= least * np.sqrt(len(head)) and head.tolist() == list(range(len(head)))
    assert counts[len(head)] < least * np.sqrt(len(head) + 1)


def head_in_words(counts, users, sigma, wide=False):
    """The rule of any pairs, item by item; or without what widens it."""
    r = rules.mean_root(counts, users)
    length, last = 0.0, 0
    for place, count in enumerate(counts, start=1):
        length += count * r / users
        ratio = 0.25 * r**0.5
        if wide and length < 30:
            ratio = min(ratio, 0.7 * (1 + length) / (r * length**0.5))
        if count >= ratio * sigma * place**0.5 * max(1.0, length / 30):
            last = place
    return last


def test_a_head_ends_earlier_where_its_items_make_long_histories():
    counts, users, sigma = np.linspace(4000, 10, 1000), 20_000, 1.0
    r = rules.mean_root(counts, users)
    last = head_in_words(counts, users, sigma)
    assert rules.head_of(counts, users, sigma).tolist() == list(range(last))
    assert rules.history_lengths(counts, np.arange(1000), users)[-1] > 60
    assert last < np.flatnonzero(counts >= 0.25 * r**0.5 * sigma * np.arange(1, 1001) ** 0.5)[-1]


@pytest.mark.parametrize("users, widened", [(1000, True), (40_000, False)])
def test_a_wide_head_ends_later_where_it_holds_little_of_long_histories(users, widened):
    """The same counts are of few users with long histories, or of many with short ones."""
    counts = 300 * np.arange(3, 5003.0) ** -0.3
    counts *= 28 * min(users, 5000) / 5 / counts.sum()
    usual, wide = (head_in_words(counts, users, 0.7, wide) for wide in (False, True))
    assert rules.head_of(counts, users, 0.7, "wide").tolist() == list(range(wide))
    assert rules.head_of(counts, users, 0.7).tolist() == list(range(usual))
    assert (wide > 1.3 * usual) == widened and (wide >= usual)
    assert len(rules.head_of(counts, users, 0.7, "wide", ordered=True)) == len(
        rules.head_of(counts, users, 0.7, ordered=True)
    )


def test_a_wide_head_is_the_usual_one_where_it_already_makes_long_histories():
    counts, users, sigma = np.linspace(4000, 10, 1000), 20_000, 1.0
    head = rules.head_of(counts, users, sigma)
    assert rules.history_lengths(counts, head, users)[-1] > 30
    assert head.tolist() == rules.head_of(counts, users, sigma, "wide").tolist()
    r, length = rules.mean_root(counts, users), rules.history_lengths(counts, head, users)[-1]
    assert 0.7 * (1 + length) / (r * length**0.5) < 0.25 * r**0.5  # by L alone it would be wider


def test_counts_that_are_all_noise_below_zero_have_the_least_head():
    for counts in (np.zeros(100), np.full(100, -5.0), np.r_[1e-300, np.full(99, -1.0)]):
        with np.errstate(all="raise"):
            assert len(rules.head_of(counts, 10, 5.0, "wide")) == rules.LEAST_HEAD


def test_a_head_that_was_asked_for_is_given():
    counts = np.array([5.0, 9.0, -3.0, 7.0])
    assert rules.head_of(counts, 100, 1.0, size=3).tolist() == [1, 3, 0]


def test_a_head_is_never_too_large_to_compute_with():
    assert len(rules.head_of(np.full(9000, 1e5), 10**9, 1.0)) == rules.MOST_HEAD
    assert len(rules.head_of(np.full(9000, -1.0), 1000, 1.0)) == rules.LEAST_HEAD


def test_the_prior_is_a_share_of_users():
    """Every user has the same nine items, and weighs each a third."""
    counts = np.concatenate([np.full(9, 1000 / 3), np.zeros(5)])
    prior = rules.prior_of(counts, num_users=1000, sigma=2.0)
    assert prior[:9] == pytest.approx(1.0) and (prior[9:] > 0).all() and (prior[9:] < 0.01).all()


def test_histories_are_long_from_30_items_of_the_head_on():
    counts = np.array([10.0, 90.0, 40.0, -1.0, 90.0])  # √d of 100 users is 2.29 on average
    for head, items in (([1, 3], 90 * 2.29 / 100), ([1, 4, 2, 0], 230 * 2.29 / 100)):
        made = Release(users=100, counts=counts, head=np.array(head))
        assert rules.kappa(made) == pytest.approx(items / 30)
        assert rules.kappa(dataclasses.replace(made, counts=100 * counts)) == 1


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_what_prior_and_histories_both_tell_is_told_once(share):
    """The longer histories are, the more of it; an item's weight for itself is not for what a user has not."""
    prior = np.array([0.3, 0.5, 0.2])
    weights = np.array([[0.9, 0.2, 0.1], [0.4, 0.8, 0.7], [0.0, -0.1, 0.6]], np.float32)
    by_histories = [0.5 * 0.4, 0.3 * 0.2 - 0.2 * 0.1, 0.3 * 0.1 + 0.5 * 0.7]
    expected = [0.5 * min(share * both, mine) for both, mine in zip(by_histories, prior)]
    overlap = rules.overlap_of(prior, weights, share)
    np.testing.assert_allclose(overlap, expected, rtol=1e-6)
    assert (overlap[2] == 0.5 * prior[2]) == (share == 1)


def test_the_diagonal_is_told_by_the_sum_of_the_matrix():
    """1,000 users with the same nine items: each gives 1/√36 to a pair, so the diagonal would be 1000/6."""
    noisy = np.full((9, 9), 1000 / 6, np.float32)
    np.fill_diagonal(noisy, 0)
    diagonal = rules.diagonal_of(np.full(9, 1000 / 3), noisy, num_users=1000, sigma=1.0)
    assert diagonal == pytest.approx(1000 / 6, rel=0.05)
