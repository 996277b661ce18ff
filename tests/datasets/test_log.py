"""Logs: the same users in whatever form they are given, in parts of whole users."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_rec.datasets.log import Catalogue, Log, UserLists, log_of
from tfdp_rec.datasets.timelines import Timelines

CATALOGUE = Catalogue([5, 2, 9])


def flat(lists):
    return Log([i for items in lists for i in items], np.cumsum([0, *map(len, lists)]))


def read(histories, events=2**20, in_order=False):
    """Places of each user, as lists."""
    found = []
    for part in histories.parts(CATALOGUE, events, in_order):
        found += [part.places[part.users == user].tolist() for user in range(part.num_users)]
        assert part.lengths.tolist() == [len(places) for places in found[-part.num_users :]]
    return found


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([5, 2, 9, 4, 0, -7])), max_size=9), st.integers(1, 12))
def test_every_form_tells_the_same_users_whatever_the_parts(lists, events):
    expected = [sorted({CATALOGUE.ids.tolist().index(i) for i in items if i in (5, 2, 9)}) for items in lists]
    assert read(flat(lists), events) == expected
    assert read(UserLists(lists), events) == expected


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([5, 2, 9, 4, 0, -7])), max_size=9), st.integers(1, 12))
def test_in_order_items_stand_where_they_first_occur(lists, events):
    places = {5: 0, 2: 1, 9: 2}
    expected = [list(dict.fromkeys(places[i] for i in items if i in places)) for items in lists]
    assert read(flat(lists), events, in_order=True) == expected
    assert read(UserLists(lists), events, in_order=True) == expected


def test_timelines_are_read_by_raw_ids():
    watched = Timelines([1, 3, 3], [0, 2, 2, 3], [7, 8, 9], [9, 4, 5], ["A", "B", "C"])
    assert read(log_of(watched)) == [[0, 2], [], [0]]


def test_a_folder_is_mapped(tmp_path):
    flat([[5, 5], [], [9, 2]]).save(tmp_path)
    loaded = Log.load(tmp_path)
    assert isinstance(loaded.numbers, np.memmap) and read(loaded, 1) == [[0], [], [1, 2]]


def test_what_can_be_read_once_is_refused():
    with pytest.raises(TypeError, match="readable twice"):
        log_of(iter([[1]]))


@pytest.mark.parametrize("items, offsets", [([1, 2], [0, 1]), ([1], [0, 2, 1]), ([1], []), ([[1]], [0, 1])])
def test_offsets_that_do_not_fit_are_refused(items, offsets):
    with pytest.raises(ValueError, match="offsets must rise"):
        Log(items, offsets)


def test_items_that_are_no_ids_are_refused():
    with pytest.raises(ValueError, match="whole numbers"):
        Log(np.array([0.5]), [0, 1])
    with pytest.raises(ValueError, match="whole numbers"):
        Log([0.5], [0, 1])  # it was item 0
    with pytest.raises(ValueError, match="masked"):
        Log(np.ma.array([1, 2], mask=[True, False]), [0, 2])


@pytest.mark.parametrize("wrong", [[], [1, 1], [0, 0], [1.5], [[1]]])
def test_catalogues_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="item_ids must be"):
        Catalogue(wrong)


@pytest.mark.parametrize("wrong", [np.array([1, 2**63], np.uint64), [1, -(2**63)]])
def test_ids_of_more_than_64_bits_are_refused_and_so_is_the_one_that_fills_up(wrong):
    """2⁶³ was the item −2⁶³, and that one an item of all short histories of a request."""
    with pytest.raises(ValueError, match="item_ids must lie between"):
        Catalogue(wrong)
    Catalogue([2**63 - 1, 1 - 2**63])


@pytest.mark.parametrize(
    "ids, padding", [([1, 2, 3], 0), ([0, 1, 2], -1), ([2, 0, 1], -1), ([0, -1, -3], -2), ([-1, 3], 0), ([0, 2, 3], -1)]
)
def test_every_whole_number_can_be_an_id_and_another_one_is_padding(ids, padding):
    catalogue = Catalogue(ids)
    assert catalogue.padding == padding and catalogue.places(ids).tolist() == list(range(len(ids)))
    others = [number for number in range(-5, 6) if number not in ids]
    assert set(catalogue.places(others).tolist()) == {-1}
