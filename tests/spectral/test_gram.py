"""Pairs: counted as the slow definition counts them, and one user moves them by at most 1, by brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_rec.datasets.log import Catalogue, log_of
from tfdp_rec.spectral import pair_sums
from tfdp_rec.spectral.gram import grid_gram
from tfdp_rec.sums.fixed_point import ONE

CATALOGUE = Catalogue([10, 20, 30, 40, 50, 60])
HEAD = np.array([3, 0, 5, 1])  # 40, 10, 60, 20
HISTORY = st.lists(st.sampled_from([10, 20, 30, 40, 50, 60, 99]), max_size=12)


def exact(histories, catalogue=CATALOGUE, head=HEAD):
    return grid_gram(log_of(histories), catalogue, head)


def slow(histories):
    """Pair by pair, user by user, in Python's whole numbers."""
    row = {CATALOGUE.ids[place]: at for at, place in enumerate(HEAD)}
    total = np.zeros((len(HEAD), len(HEAD)), object)
    for history in histories:
        held = sorted({row[item] for item in history if item in row})
        pairs = list(itertools.permutations(held, 2))
        for pair in pairs:
            total[pair] += math.isqrt(ONE**2 // (len(pairs) // 2))
    return total


def norm_squared(difference):
    return sum(int(step) ** 2 for step in difference[np.triu_indices(len(difference), 1)])


@settings(deadline=None)
@given(st.lists(HISTORY, min_size=1, max_size=7))
def test_pairs_are_those_of_the_definition(histories):
    got = exact(histories)
    assert (got == slow(histories)).all() and (got == got.T).all()


@settings(deadline=None)
@given(st.lists(HISTORY, min_size=1, max_size=6), st.integers(0, 5), HISTORY)
def test_one_user_more_less_or_other_moves_the_triangle_by_at_most_one(histories, at, other):
    at %= len(histories)
    emptied = histories[:at] + [[]] + histories[at + 1 :]
    assert norm_squared(exact(histories) - exact(emptied)) <= ONE**2
    assert norm_squared(exact(histories[:at] + [other] + histories[at + 1 :]) - exact(emptied)) <= ONE**2


@pytest.mark.parametrize("items", [2, 3, 40, 1500])
def test_a_user_of_a_hundred_thousand_items_gives_no_more_and_hardly_less(items):
    catalogue = Catalogue(np.arange(1, 100_001))
    given = norm_squared(exact([catalogue.ids, [1, 1, 1], [], [100_000]], catalogue, np.arange(items)))
    assert 0.99 * ONE**2 < given <= ONE**2


def test_parts_and_pieces_do_not_change_a_sum(monkeypatch):
    rng = np.random.default_rng(0)
    histories = [rng.integers(1, 7, rng.integers(0, 9)) * 10 for _ in range(300)]
    whole = exact(histories)
    monkeypatch.setattr(pair_sums, "_EVENTS_AT_ONCE", 50)
    monkeypatch.setattr(pair_sums, "_PAIRS_AT_ONCE", 20)
    assert (exact(histories) == whole).all()
