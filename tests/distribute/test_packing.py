"""Packed and opened again, a nest is what it was; also where sizes are known only when the graph runs."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_rec.distribute.sections import Parcel

NEST = (
    {"b": (np.ones([2, 3], "float32"), np.array([5, 7], "int64")), "a": np.float32(2.5)},
    np.array([0.1, 0.2], "float64"),
    np.zeros([0, 4], "float32"),
    {},
    np.array(3, "int64"),
)


def same(found, expected):
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected)):
        assert one.dtype == tf.as_dtype(np.asarray(other).dtype) and one.shape == np.shape(other)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("known", [True, False])
def test_what_is_packed_is_opened(known):
    def of(leaf):
        shape = np.shape(leaf)
        return tf.TensorSpec(shape if known or not shape else [None, *shape[1:]], np.asarray(leaf).dtype)

    @tf.function(autograph=False)
    def through(*nest):
        parcel = Parcel(nest)
        assert len(parcel.tensors) == 3
        opened = parcel.open([tf.identity(tensor) for tensor in parcel.tensors])
        for one, other in zip(tf.nest.flatten(opened), tf.nest.flatten(nest)):
            assert one.shape.as_list() == other.shape.as_list()
        return opened

    traced = through.get_concrete_function(*tf.nest.map_structure(of, NEST))
    same(traced(*map(tf.convert_to_tensor, tf.nest.flatten(NEST))), NEST)


def test_one_tensor_and_none():
    parcel = Parcel((tf.range(4),))
    same(parcel.open(parcel.tensors), (np.arange(4, dtype="int32"),))
    assert Parcel(({},)).open(Parcel(({},)).tensors) == ({},)
