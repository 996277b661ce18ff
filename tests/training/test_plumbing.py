"""What users put around a model works around a private one, and changes nothing of it but what it says.

With a noise that is a function of table, row and step, each way of training ends with the very same weights.
"""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from keras import layers

import tfdp_rec
from tfdp_rec.noise import KeyedNoise

ROWS, SIZE, BATCH = 12, 24, 8
IDS, Y = np.arange(SIZE) * 5 % ROWS, (np.arange(SIZE) % 3 == 0).astype("float32")[:, None]
WORDS = np.array([f"w{n:02}" for n in range(ROWS)])


def trained(fit, rate=0.5, dtype=None, words=False, unknown=1, loss="binary_crossentropy", **compiled):
    """The weights after two epochs of three batches; of `words`, with so many numbers for unknown ones."""
    seeding.seed(1)
    x = inputs = keras.Input([], dtype="string" if words else "int32")
    if words:
        x = layers.StringLookup(vocabulary=list(WORDS), num_oov_indices=unknown)(x) - unknown
    row = layers.Embedding(ROWS, 4, embeddings_initializer="normal", dtype=dtype)(x)
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1, activation="sigmoid", dtype=dtype)(row))
    private = {"l2_norm_clip": 2.0, "noise_multiplier": 0.1, "expected_batch_size": BATCH}
    optimizer = tfdp_rec.LazyDPSGD(rate, **private, noise=KeyedNoise(7), aggregate_noise=False)
    model.compile(optimizer, loss, **compiled)
    with pytest.warns(UserWarning, match="No epsilon is being counted"):
        fit(model)
    assert int(optimizer.iterations) == 6
    return [np.array(w, "float32") for w in model.get_weights()]


def arrays(model, x=IDS, y=Y, **options):
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **options)


def dataset(model, **options):
    data = tf.data.Dataset.from_tensor_slices((IDS, Y)).batch(BATCH).cache().prefetch(2)
    model.fit(data, epochs=2, verbose=0, **options)


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return SIZE // BATCH

    def __getitem__(self, number):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return IDS[rows], Y[rows]


@pytest.fixture(scope="module")
def plain():
    return trained(arrays)


def of_keras(folder):
    return [
        keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.EarlyStopping("val_loss", patience=5),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=5),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    ]


schedule = keras.optimizers.schedules.PiecewiseConstantDecay
SAME = {
    "a dataset": lambda folder: trained(dataset),
    "a PyDataset": lambda folder: trained(lambda m: m.fit(Sequence(), epochs=2, shuffle=False, verbose=0)),
    "steps_per_execution": lambda folder: trained(dataset, steps_per_execution=3),
    "run_eagerly": lambda folder: trained(arrays, run_eagerly=True),
    "metrics": lambda folder: trained(arrays, metrics=["accuracy"], weighted_metrics=["mae"]),
    "microbatch_size": lambda folder: trained(arrays, microbatch_size=3),
    "callbacks and validation": lambda folder: trained(
        lambda m: arrays(m, validation_data=(IDS, Y), callbacks=of_keras(folder))
    ),
    "a schedule": lambda folder: trained(arrays, rate=schedule([100], [0.5, 0.1])),
    "weights of one": lambda folder: trained(lambda m: arrays(m, sample_weight=np.ones(SIZE, "float32"))),
    "classes of one": lambda folder: trained(lambda m: arrays(m, class_weight={0: 1.0, 1: 1.0})),
    "a preprocessing layer": lambda folder: trained(lambda m: arrays(m, tf.constant(WORDS[IDS])), words=True),
    "words that are all known": lambda folder: trained(
        lambda m: arrays(m, tf.constant(WORDS[IDS])), words=True, unknown=0
    ),
    "a loss object": lambda folder: trained(arrays, loss=keras.losses.BinaryCrossentropy()),
}


@pytest.mark.fast_cases("words that are all known")
@pytest.mark.parametrize("name", SAME)
def test_it_changes_nothing(name, plain, tmp_path):
    for one, other in zip(SAME[name](tmp_path), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_what_should_change_something_does(plain):
    """Class weights are weights of examples, a schedule is a rate by step, and bfloat16 is nearly float32."""
    by_class = trained(lambda m: arrays(m, class_weight={0: 1.0, 1: 3.0}))
    by_example = trained(lambda m: arrays(m, sample_weight=np.where(Y[:, 0] > 0, 3.0, 1.0).astype("float32")))
    falling = trained(arrays, rate=schedule([3], [0.5, 0.05]))
    for one, other, before, fell in zip(by_class, by_example, plain, falling, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
        assert np.abs(one - before).max() > 1e-3 and np.abs(fell - before).max() > 1e-3
    for one, other in zip(trained(arrays, dtype="mixed_bfloat16"), plain, strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)


def test_a_word_that_must_be_known_and_is_not_ends_a_step_as_an_id_outside_a_table_does():
    with pytest.raises(tf.errors.InvalidArgumentError, match="OOV values"):
        trained(lambda m: arrays(m, tf.constant(["new", *WORDS[IDS[1:]]])), words=True, unknown=0)
