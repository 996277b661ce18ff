"""What the tests of release share: a lazy model in mid-training, and the tables that eager DP-SGD has after each step.

Noise is a pure function of (table, row, step) here, so the settled weights are those of eager DP-SGD, number for
number: a path is right if what it lets out are those, and wrong if a single row lacks a single step's noise.
"""

import keras
import numpy as np
import seeding
import tensorflow as tf

import tfdp_rec
from tfdp_rec.core.ground.withheld_rows import rows_of
from tfdp_rec.noise import KeyedNoise

ROWS = 30
RNG = np.random.default_rng(2)
IDS = RNG.integers(0, 6, [20, 2]).astype("int32")  # most rows are never read
LABELS = RNG.normal(size=[20, 1]).astype("float32")
EVERY_ID = np.arange(ROWS, dtype="int32").reshape(15, 2)


def model_of(kind=tfdp_rec.LazyDPSGD, eager=True, **options):
    seeding.seed(0)
    options = {"aggregate_noise": False, **options} if kind is tfdp_rec.LazyDPSGD else options
    ids = keras.Input([2], dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 3, name="items")(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
    optimizer = kind(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4, noise=KeyedNoise(1), **options)
    model.compile(optimizer, loss="mse", run_eagerly=eager)
    return model


def batches():
    return tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(4)


def assert_settled(table, expected):
    np.testing.assert_allclose(np.asarray(table), expected, rtol=1e-5, atol=1e-6)


def in_training(steps=3):
    """A model in the middle of a hand-written loop, with rows that owe noise."""
    model = model_of()
    for x, y in batches().take(steps):
        model.train_on_batch(x, y)
    assert not model.optimizer.releasable
    return model


def raw(model):
    """The table as it stands, by a read that nothing guards."""
    return rows_of(model.layers[1].embeddings).numpy()


def loaded_table(path):
    return keras.models.load_model(path).layers[1].embeddings
