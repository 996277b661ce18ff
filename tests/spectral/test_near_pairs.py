"""Pairs near each other in order: counted as the slow definition counts them; one user moves them by at most 1."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_rec.datasets.log import Catalogue, log_of
from tfdp_rec.spectral import pair_sums
from tfdp_rec.spectral.near_pairs import near_pairs
from tfdp_rec.sums.fixed_point import ONE

CATALOGUE = Catalogue([10, 20, 30, 40, 50, 60])
HEAD = np.array([3, 0, 5, 1])  # 40, 10, 60, 20
HISTORY = st.lists(st.sampled_from([10, 20, 30, 40, 50, 60, 99]), max_size=40)


def exact(histories, catalogue=CATALOGUE, head=HEAD):
    return near_pairs(log_of(histories), catalogue, head)


def slow(histories, catalogue=CATALOGUE, head=HEAD):
    """Place by place, user by user, in Python's whole numbers."""
    row = {catalogue.ids[place]: at for at, place in enumerate(head)}
    total = np.zeros((len(head), len(head)), object)
    for history in histories:
        held = list(dict.fromkeys(row[item] for item in history if item in row))
        given = {}
        for at, one in enumerate(held):
            for distance, other in enumerate(held[at + 1 : at + 11], 1):
                given[min(one, other), max(one, other)] = int(math.sqrt(2**20 / distance))
        squares = sum(value**2 for value in given.values())
        root = math.isqrt(squares)
        root += root**2 < squares
        for cell, value in given.items():
            total[cell] += value * ONE // root
    return total


def norm_squared(difference):
    return sum(int(step) ** 2 for step in difference.reshape(-1))


@settings(deadline=None)
@given(st.lists(HISTORY, min_size=1, max_size=7))
def test_pairs_are_those_of_the_definition(histories):
    got = exact(histories)
    assert (got == slow(histories)).all()
    assert not np.tril(got).any()


@settings(deadline=None)
@given(st.lists(HISTORY, min_size=1, max_size=6), st.integers(0, 5), HISTORY)
def test_one_user_more_less_or_other_moves_the_triangle_by_at_most_one(histories, at, other):
    at %= len(histories)
    emptied = histories[:at] + [[]] + histories[at + 1 :]
    assert norm_squared(exact(histories) - exact(emptied)) <= ONE**2
    assert norm_squared(exact(histories[:at] + [other] + histories[at + 1 :]) - exact(emptied)) <= ONE**2


@pytest.mark.parametrize("history", [
    [10, 20] * 50_000, [10, 20, 40, 60] * 30_000, [10] * 99_999 + [20], np.arange(1, 100_001), [20, 10],
    [1] * 12 + [20],
], ids=["two", "four", "one, and another", "all different", "a pair", "a far pair"])  # fmt: skip
def test_a_user_gives_no_more_than_one_and_hardly_less(history):
    catalogue = Catalogue(np.arange(1, 100_001))
    moved = norm_squared(exact([history, [1, 1, 1], [], [100_000]], catalogue, np.arange(1500)))
    assert 0.99 * ONE**2 < moved <= ONE**2


def test_the_order_counts_and_its_direction_does_not():
    history = [10, 20, 60, 40]
    assert (exact([history]) == exact([history[::-1]])).all()
    assert (exact([history]) != exact([sorted(history)])).any()


def test_an_item_that_is_repeated_stands_where_it_first_occurs():
    assert (exact([[10, 20, 10, 10, 60, 20, 40]]) == exact([[10, 20, 60, 40]])).all()


def test_parts_do_not_change_a_sum(monkeypatch):
    rng = np.random.default_rng(0)
    histories = [rng.integers(1, 7, rng.integers(0, 9)) * 10 for _ in range(300)]
    whole = exact(histories)
    monkeypatch.setattr(pair_sums, "_EVENTS_AT_ONCE", 50)
    monkeypatch.setattr(pair_sums, "_PAIRS_AT_ONCE", 20)
    assert (exact(histories) == whole).all() and (whole == slow(histories)).all()
