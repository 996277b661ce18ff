"""EANA touches the rows of the batch and no other; and tables in bfloat16."""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from scipy import stats

import tfdp_rec
from tfdp_rec.clipping import ClippedSum
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.noise import KeyedNoise

ROWS, WIDTH = 50, 6


def apply(optimizer, table, ids, values, clip=2.0):
    """A step on slices by hand."""
    slices = tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(ids, tf.int64))
    optimizer.apply(ClippedSum({table.path: slices}, tf.ones([1]), tf.constant(clip), tf.ones([1])))


def table_of(rows=ROWS, width=WIDTH, dtype="float32"):
    start = np.random.default_rng(0).normal(size=[rows, width])
    return keras.Variable(tf.cast(start, dtype), dtype=dtype, name="table")


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}])
def test_other_rows_stay_bit_for_bit(options):
    table = table_of()
    optimizer = tfdp_rec.EANA(0.5, l2_norm_clip=2.0, noise_multiplier=1.0, expected_batch_size=4.0, **options)
    optimizer.build([table], {table.path: None})
    before = np.array(table).view(np.uint32)
    touched = [3, 17, 3, 41]
    for _ in range(3):
        apply(optimizer, table, touched, np.ones([4, WIDTH]))
    changed = np.flatnonzero(np.any(np.array(table).view(np.uint32) != before, axis=1))
    assert changed.tolist() == [3, 17, 41]
    assert np.all(np.array(table).view(np.uint32)[changed] != before[changed])


@pytest.mark.parametrize("scale", [1.0, 0.97, 1.03])
def test_noise_on_touched_rows(scale):
    """θ' = θ - η (g + n), n of standard deviation σ C / B; a scale wrong by 3% is noticed."""
    width, eta, sigma, clip, size = 300_000, 0.5, 0.8, 2.0, 4.0
    table = keras.Variable(np.zeros([3, width], "float32"), name="table")
    optimizer = tfdp_rec.EANA(
        eta, l2_norm_clip=clip, noise_multiplier=sigma * scale, expected_batch_size=size, noise=KeyedNoise(1)
    )
    optimizer.build([table], {table.path: None})
    apply(optimizer, table, [1, 2, 1], np.full([3, width], 1.0), clip)
    values, expected = np.array(table), eta * sigma * clip / size
    noise = values[1:] + eta * np.array([[2.0], [1.0]]) / size
    right = all(abs(np.mean(row**2) / expected**2 - 1) < 5.5 * np.sqrt(2 / width) for row in noise)
    assert right == (scale == 1.0)
    if right:
        assert stats.kstest(noise[0, :100_000] / expected, "norm").pvalue > 1e-6
        assert abs(np.corrcoef(noise)[0, 1]) < 5.5 / np.sqrt(width)
    assert np.all(values[0] == 0)


def test_a_row_whose_gradients_cancel_gets_its_noise():
    """The oracle: θ − η (0 + n) with n of the row's own key, whatever the sum is."""
    table, options = table_of(), {"l2_norm_clip": 2.0, "noise_multiplier": 1.0, "expected_batch_size": 4.0}
    optimizer = tfdp_rec.EANA(0.5, noise=KeyedNoise(1), **options)
    optimizer.build([table], {table.path: None})
    before = np.array(table)
    apply(optimizer, table, [3, 17, 3], np.array([[1.0], [1.0], [-1.0]]) * np.ones([3, WIDTH]))
    noise = KeyedNoise(1).normal(0, tf.constant([3], tf.int64), tf.constant(0, tf.int64), WIDTH)
    np.testing.assert_allclose(np.array(table)[3] - before[3], -0.5 * 2.0 / 4.0 * np.asarray(noise)[0], rtol=1e-4)


def test_every_row_that_a_batch_read_gets_noise():
    """A masked id has no gradient, nor has a row that a dead activation hides: what moves goes by reads, not values."""
    seeding.seed(0)
    ids = keras.Input([4], dtype="int32")
    rows = keras.layers.Embedding(ROWS, WIDTH, mask_zero=True, name="items")(ids)
    out = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(rows))
    model = tfdp_rec.PrivateModel(ids, out)
    model.compile(
        tfdp_rec.EANA(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4.0),
        loss="mse",
        run_eagerly=True,
    )
    before = model.get_weights()[0]
    model.train_on_batch(np.array([[5, 0, 0, 0], [7, 8, 0, 0]]), np.ones([2, 1]))
    changed = np.flatnonzero(np.any(model.get_weights()[0] != before, axis=1))
    assert changed.tolist() == [0, 5, 7, 8]


def test_an_empty_batch_moves_no_row():
    table = table_of()
    optimizer = tfdp_rec.EANA(0.5, l2_norm_clip=2.0, noise_multiplier=1.0, expected_batch_size=4.0)
    optimizer.build([table], {table.path: None})
    before = np.array(table)
    apply(optimizer, table, np.zeros([0]), np.zeros([0, WIDTH]))
    assert np.array_equal(np.array(table), before) and int(optimizer.iterations) == 1


# bfloat16 tables.


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("kind", [tfdp_rec.DPSGD, tfdp_rec.EANA])
def test_bfloat16_rounds_gradient_and_noise_together(kind, options):
    """What stands in the table is the exact step rounded once: rounding is post-processing."""
    table = table_of(dtype="bfloat16")
    start = np.asarray(tf.cast(table._value, tf.float32))
    optimizer = kind(
        0.5, l2_norm_clip=2.0, noise_multiplier=0.3, expected_batch_size=4.0, noise=KeyedNoise(1), **options
    )
    optimizer.build([table], {table.path: None})
    ids, values = [3, 17, 3], np.full([3, WIDTH], 0.01)
    apply(optimizer, table, ids, values)
    rows = np.arange(ROWS) if kind is tfdp_rec.DPSGD else np.array([3, 17])
    gradient = np.zeros([ROWS, WIDTH], "float32")
    np.add.at(gradient, ids, values.astype("float32") / 4)
    noise = KeyedNoise(1).normal(0, tf.constant(rows, tf.int64), tf.constant(0, tf.int64), WIDTH)
    update = gradient[rows] + np.float32(0.3 * 2.0 / 4.0) * np.asarray(noise)
    expected = start.copy()
    expected[rows] = (1 - 0.5 * options.get("weight_decay", 0.0)) * start[rows] - 0.5 * update
    rounded = np.asarray(tf.cast(tf.cast(expected, tf.bfloat16), tf.float32))
    found = np.asarray(tf.cast(table._value, tf.float32))
    assert np.mean(found == rounded) > 0.995  # ties that float32 arithmetic breaks otherwise
    np.testing.assert_allclose(found, rounded, rtol=2**-7)


def test_lazy_refuses_bfloat16_tables():
    table = table_of(dtype="bfloat16")
    with pytest.raises(NotPrivate, match="float32"):
        tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=2.0, noise_multiplier=0.3, expected_batch_size=4.0).build(
            [table], {table.path: None}
        )


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_dp_sgd_in_chunks_is_dp_sgd_in_one(rows, monkeypatch):
    results = []
    for values in (rows * WIDTH, 1 << 22):
        monkeypatch.setattr("tfdp_rec.core.mechanism.tables.CHUNK_VALUES", values)
        table = table_of()
        optimizer = tfdp_rec.DPSGD(
            0.5, l2_norm_clip=2.0, noise_multiplier=0.3, expected_batch_size=4.0, noise=KeyedNoise(1)
        )
        optimizer.build([table], {table.path: None})
        apply(optimizer, table, [49, 0, 6, 7, 8, 0, 49], np.arange(7 * WIDTH).reshape(7, WIDTH))
        results.append(np.array(table))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
