"""Pairs of any two items, and near ones: counted as slow definitions count them; one user moves them by at most 1."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_rec.datasets.log import Catalogue, log_of
from tfdp_rec.spectral import pair_sums as module
from tfdp_rec.spectral.pair_sums import pair_sums
from tfdp_rec.sums.fixed_point import ONE

CATALOGUE = Catalogue([10, 20, 30, 40, 50, 60])
HEAD = np.array([3, 0, 5, 1])  # 40, 10, 60, 20
HISTORY = st.lists(st.sampled_from([10, 20, 30, 40, 50, 60, 99]), max_size=40)
KINDS = pytest.mark.parametrize("ordered", [False, True], ids=["any", "near"])


def exact(histories, ordered, catalogue=CATALOGUE, head=HEAD):
    """What is released of the sums: the part above the diagonal."""
    return np.triu(pair_sums(log_of(histories), catalogue, head, ordered), 1)


def slow(histories, ordered):
    """User by user, pair by pair or place by place, in Python's whole numbers."""
    row = {CATALOGUE.ids[place]: at for at, place in enumerate(HEAD)}
    total = np.zeros((len(HEAD), len(HEAD)), object)
    for history in histories:
        held = list(dict.fromkeys(row[item] for item in history if item in row))
        for cell, value in (near_cells if ordered else all_cells)(held).items():
            total[cell] += value
    return total


def all_cells(held):
    pairs = list(itertools.combinations(sorted(held), 2))
    return {pair: math.isqrt(ONE**2 // len(pairs)) for pair in pairs}


def near_cells(held):
    given = {}
    for at, one in enumerate(held):
        for distance, other in enumerate(held[at + 1 : at + 11], 1):
            given[min(one, other), max(one, other)] = int(math.sqrt(2**20 / distance))
    squares = sum(value**2 for value in given.values())
    root = math.isqrt(squares)
    root += root**2 < squares
    return {cell: value * ONE // root for cell, value in given.items()}


def norm_squared(difference):
    return sum(int(step) ** 2 for step in difference.reshape(-1))


@KINDS
@settings(deadline=None)
@given(histories=st.lists(HISTORY, min_size=1, max_size=7))
def test_pairs_are_those_of_the_definition(ordered, histories):
    assert (exact(histories, ordered) == slow(histories, ordered)).all()


@KINDS
@settings(deadline=None)
@given(histories=st.lists(HISTORY, min_size=1, max_size=6), at=st.integers(0, 5), other=HISTORY)
def test_one_user_more_less_or_other_moves_the_triangle_by_at_most_one(ordered, histories, at, other):
    at %= len(histories)
    emptied = exact(histories[:at] + [[]] + histories[at + 1 :], ordered)
    assert norm_squared(exact(histories, ordered) - emptied) <= ONE**2
    assert norm_squared(exact(histories[:at] + [other] + histories[at + 1 :], ordered) - emptied) <= ONE**2


EVERYTHING = np.arange(1, 100_001)


@pytest.mark.parametrize("ordered, items, history", [
    *((False, items, EVERYTHING) for items in (2, 3, 40, 1500)), (True, 1500, EVERYTHING),
    (True, 1500, [10, 20] * 50_000), (True, 1500, [10, 20, 40, 60] * 30_000), (True, 1500, [10] * 99_999 + [20]),
    (True, 1500, [20, 10]), (True, 1500, [1] * 12 + [20]),
])  # fmt: skip
def test_a_user_gives_no_more_than_one_and_hardly_less(ordered, items, history):
    moved = exact([history, [1, 1, 1], [], [100_000]], ordered, Catalogue(EVERYTHING), np.arange(items))
    assert 0.99 * ONE**2 < norm_squared(moved) <= ONE**2


def test_the_order_counts_and_its_direction_does_not():
    history = [10, 20, 60, 40]
    assert (exact([history], True) == exact([history[::-1]], True)).all()
    assert (exact([history], True) != exact([sorted(history)], True)).any()


def test_an_item_that_is_repeated_stands_where_it_first_occurs():
    assert (exact([[10, 20, 10, 10, 60, 20, 40]], True) == exact([[10, 20, 60, 40]], True)).all()


@KINDS
def test_parts_and_pieces_do_not_change_a_sum(ordered, monkeypatch):
    rng = np.random.default_rng(0)
    histories = [rng.integers(1, 7, rng.integers(0, 9)) * 10 for _ in range(300)]
    whole = exact(histories, ordered)
    monkeypatch.setattr(module, "_EVENTS_AT_ONCE", 50)
    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", 20)
    assert (exact(histories, ordered) == whole).all() and (whole == slow(histories, ordered)).all()
