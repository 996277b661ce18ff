"""Settings keep every bit they were given: the accountant reads them back."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import build_by_hand

import tfdp_rec
from tfdp_rec.clipping import ClippedSum
from tfdp_rec.noise import KeyedNoise


def test_settings_are_not_rounded():
    optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=0.3, noise_multiplier=0.9233898, expected_batch_size=1000.1)
    assert optimizer.noise_multiplier == 0.9233898
    assert optimizer.l2_norm_clip == 0.3
    assert optimizer.expected_batch_size == 1000.1
    assert optimizer.dp_event().noise_multiplier == 0.9233898


def step_with(kind, **settings):
    """One step of rows 0 and 1, of which row 0 has a gradient: the table after it."""
    table = keras.Variable(np.zeros([4, 8], "float32"), name="table")
    optimizer = kind(**{"learning_rate": 0.1, "l2_norm_clip": 10.0, "expected_batch_size": 1.0, **settings},
                     noise_multiplier=1.0)  # fmt: skip
    build_by_hand(optimizer, [table], [table])
    gradient = tf.IndexedSlices(tf.constant([[5.0] * 4 + [0.0] * 4, [0.0] * 8]), tf.constant([0, 1], tf.int64))
    clip = tf.constant(optimizer.l2_norm_clip, tf.float64)
    try:
        optimizer.apply(ClippedSum({table.path: gradient}, tf.zeros([1]), clip, tf.zeros([1])))
    finally:
        after = np.asarray(table._value)
    return after


@pytest.mark.parametrize("kind", [tfdp_rec.DPSGD, tfdp_rec.EANA, tfdp_rec.LazyDPSGD])
@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": 1e39}, {"learning_rate": 1e38}, {"learning_rate": np.nan}, {"learning_rate": -1e38},
     {"l2_norm_clip": 1e39}, {"expected_batch_size": 1e-38}],
    ids=str,
)  # fmt: skip
def test_a_step_whose_gradients_float32_does_not_hold_is_refused(kind, settings):
    """At a rate of 1e39 rows in the batch became NaN and others infinite; at 1e38 only gradients of 0 had noise."""
    with pytest.raises(tf.errors.InvalidArgumentError, match="more than float32 holds"):
        step_with(kind, **settings)
    assert np.isfinite(step_with(kind, learning_rate=1e25)).all()


@pytest.mark.parametrize("kind", [tfdp_rec.DPSGD, tfdp_rec.EANA, tfdp_rec.LazyDPSGD])
def test_noise_is_for_what_the_sum_was_clipped_to(kind):
    """A sum may be clipped to more than the optimizer's own C: its sensitivity tells."""
    moved = []
    for clip in (1.0, 3.0):
        table, dense = (keras.Variable(np.zeros([2, 500], "float32"), name=name) for name in ("table", "dense"))
        optimizer = kind(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4.0, noise=KeyedNoise(1))
        build_by_hand(optimizer, [table, dense], [table])
        rows = tf.IndexedSlices(tf.zeros([2, 500]), tf.constant([0, 1], tf.int64))
        optimizer.apply(ClippedSum({table.path: rows}, tf.zeros([2]), tf.constant(clip), tf.zeros([2])))
        optimizer.settle()
        moved.append([np.asarray(each, np.float64) for each in (table, dense)])
    for small, large in zip(*moved, strict=True):
        assert small.any()
        np.testing.assert_allclose(large, 3 * small, rtol=1e-4, atol=1e-5)
