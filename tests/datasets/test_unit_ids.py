"""Numbers of units: equal ids are one unit in every type, and ids that are none are refused."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfdp_rec
from tfdp_rec.datasets.unit_ids import unit_numbers

KINDS = [
    st.integers(-(2**70), 2**70), st.text(min_size=1, max_size=3), st.binary(min_size=1, max_size=2), st.booleans(),
    st.frozensets(st.integers(0, 3)), st.tuples(st.integers(0, 2), st.text(max_size=1)),
]  # fmt: skip


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_two_rows_are_one_unit_if_their_ids_are_equal(kind):
    @given(st.lists(KINDS[kind], max_size=20))
    def holds(ids):
        found = unit_numbers(ids, len(ids))
        same = [[a == b for a in ids] for b in ids]
        assert (found[:, None] == found[None, :]).tolist() == same
        assert set(found) == set(range(len(set(ids))))

    holds()


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float32", "<U3", "S2", "datetime64[s]"])
def test_arrays_of_every_type(dtype):
    ids = np.array([3, 1, 3, 2]).astype(dtype)
    found = unit_numbers(ids, 4)
    assert found[0] == found[2] and len(set(found)) == 3


@pytest.mark.parametrize(
    "ids, words",
    [
        ([1.0, float("nan")], "row 1"),
        (np.array([1.0, np.nan]), "row 1"),
        (np.array([np.datetime64("NaT"), np.datetime64("2020-01-01")]), "row 0"),
        (np.array([None, "a"], object), "row 0"),
        ([1, "1"], "several kinds"),
        (np.array([2.0**53, 1.0]), "float64 numbers so large"),
        (np.array([2.0**24, 1.0], np.float32), "float32 numbers so large"),
        (np.array([2048, 1], np.float16), "float16 numbers so large"),
        (np.ma.array([1, 2], mask=[False, True]), "row 1"),
        ([(float("nan"), 1), (float("nan"), 1)], "row 0"),
        (np.array([(1, 1.0), (1, np.nan)], [("a", int), ("b", float)]), "row 1"),
        (pa.array(["a", None]), "row 1"),
        (pa.chunked_array([[None, 2]], pa.int64()), "row 0"),
        (pa.array(["a", None]).dictionary_encode(), "row 1"),
        (list(pa.array(["a", None])), "row 1"),
        ([1], "one id"),
        (np.array([[1], [2]]), "one id"),
    ],
)
def test_ids_that_are_none_are_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        unit_numbers(ids, 2)


def test_arrow_ids_are_numbered_as_lists_are():
    ids = ["b", "a", "b", "c"]
    for each in (pa.array(ids), pa.chunked_array([ids[:1], ids[1:]])):
        assert unit_numbers(each, 4).tolist() == unit_numbers(ids, 4).tolist()


def test_the_largest_floats_that_are_told_apart_and_records():
    assert unit_numbers(np.array([2.0**24 - 1, 2.0**24 - 2], np.float32), 2).tolist() == [1, 0]
    assert unit_numbers(np.array([(1, 2), (3, 4), (1, 2)], [("a", int), ("b", int)]), 3).tolist() == [0, 1, 0]
    assert unit_numbers(np.ma.array([4, 3, 4]), 3).tolist() == [1, 0, 1]


def test_large_whole_numbers_in_a_list_stay_apart():
    assert len(set(unit_numbers([2**63, 2**63 + 1, -1], 3))) == 3


def test_make_private_does_not_split_a_user_whose_column_lacks_ids():
    import keras

    model = keras.Sequential([keras.layers.Embedding(5, 2), keras.layers.Dense(1)])
    model.compile(loss="mse")
    rng, users = np.random.default_rng(0), np.empty(1000, object)
    users[:] = [float("nan") if rng.random() < 0.3 else int(u) for u in rng.integers(0, 20, 1000)]
    data = np.zeros(1000, int), np.zeros((1000, 1), "float32")
    settings = {"epsilon": 3.0, "batch_size": 5, "epochs": 1, "accountant": "rdp"}
    with pytest.raises(ValueError, match="no user id"):  # np.unique found 486 users of 20
        tfdp_rec.make_private(model, data, unit=users, **settings)
    users[users != users] = 7
    assert tfdp_rec.make_private(model, data, unit=users, **settings).plan.sampling.num_units == 20
