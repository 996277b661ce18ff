"""What noise alone does to a weight, by formula and by eager steps; rates that are made from it; and the warning."""

import warnings

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from helpers import Seeded

import tfdp_rec
from tfdp_rec.clipping import ClippedSum
from tfdp_rec.core.mechanism import noise_walk as walks
from tfdp_rec.core.mechanism.noise_walk import first_dense_optimizer, first_rate, noise_in_rows, noise_walk
from tfdp_rec.core.mechanism.rules import Recursion
from tfdp_rec.job.recommenders.training import learning_rate_for
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.optimizers import Adagrad, PrivateOptimizer
from tfdp_rec.privacy import BufferedToeplitz, Correlation

ROWS, WIDTH, STEPS = 4000, 4, 7
SETTINGS = {"l2_norm_clip": 0.5, "noise_multiplier": 2.0, "expected_batch_size": 10.0}
BUFFERS = Correlation(BufferedToeplitz([0.4, 0.2], [0.9, 0.5]), steps=STEPS, separation=3)
WAYS = {
    "plain": (tfdp_rec.DPSGD, {}),
    "decay": (tfdp_rec.DPSGD, {"weight_decay": 0.6}),
    "momentum": (tfdp_rec.DPSGD, {"momentum": 0.8}),
    "Nesterov": (tfdp_rec.DPSGD, {"momentum": 0.6, "nesterov": True}),
    "correlated": (tfdp_rec.DPFTRL, {"correlation": BUFFERS}),
    "correlated, with momentum": (tfdp_rec.DPFTRL, {"correlation": BUFFERS, "momentum": 0.7}),
}


def built(kind, rate, **options):
    table = keras.Variable(np.zeros([ROWS, WIDTH], "float32"), name="items")
    optimizer = kind(rate, **{**SETTINGS, **options}, noise=Seeded(3))
    optimizer.build([table], {table.path: None})
    return optimizer, table


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("scheduled", [False, True])
def test_the_length_told_before_is_the_length_found_after(name, scheduled):
    kind, options = WAYS[name]
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.6) if scheduled else 0.5
    optimizer, table = built(kind, rate, **options)
    (told,) = noise_in_rows(optimizer, STEPS).values()
    for _ in range(STEPS):
        optimizer.apply(ClippedSum({}, tf.zeros([0]), tf.constant(0.5), tf.zeros([0])))
    found = np.sqrt(np.mean(np.sum(np.asarray(table._value) ** 2, axis=1)))
    assert abs(found / told - 1) < 6 / np.sqrt(2 * ROWS * WIDTH)


def test_a_regularizer_holds_the_noise_back():
    optimizer, table = built(tfdp_rec.LazyDPSGD, 0.5)
    held = keras.Variable(np.zeros([ROWS, WIDTH], "float32"), name="held")
    held.regularizer = keras.regularizers.L2(0.3)
    optimizer = tfdp_rec.LazyDPSGD(0.5, **SETTINGS)
    optimizer.build([table, held], {table.path: None, held.path: None})
    lengths = noise_in_rows(optimizer, 1000)
    assert lengths["items"] == pytest.approx(0.5 * 0.1 * (1000 * WIDTH) ** 0.5)
    assert lengths["held"] == pytest.approx(0.5 * 0.1 * (WIDTH / (1 - 0.7**2)) ** 0.5)


@pytest.mark.slow
def test_the_noise_of_a_long_schedule_is_known_from_some_of_its_steps(monkeypatch):
    """A walk of 3,000 steps by all values of a decaying schedule, and by the thousand that are asked for."""
    optimizer, _ = built(tfdp_rec.DPSGD, keras.optimizers.schedules.CosineDecay(0.5, 3000))
    (some,) = noise_in_rows(optimizer, 3000).values()
    monkeypatch.setattr(walks, "_ASKED", 3000)
    (every,) = noise_in_rows(optimizer, 3000).values()
    assert some != every and some == pytest.approx(every, rel=1e-4)


@pytest.mark.parametrize(
    ("noise", "clip", "momentum"), [(2.0, 0.5, 0.0), (200.0, 0.5, 0.0), (200.0, 0.1, 0.9), (0.0, 1.0, 0.0)]
)
@pytest.mark.parametrize("dense", [None, "adam"])
def test_a_first_rate_keeps_within_noise_and_clip(noise, clip, momentum, dense):
    options = {"noise_multiplier": noise, "l2_norm_clip": clip, "momentum": momentum, "dense_optimizer": dense}
    table, weight = (keras.Variable(np.zeros([ROWS, WIDTH], "float32"), name=name) for name in ("items", "weight"))
    optimizer = tfdp_rec.DPSGD(0.1, **{**SETTINGS, **options})
    optimizer.build([table, weight], {table.path: None})
    optimizer.learning_rate = first_rate(optimizer, 100)
    rate, (length,) = float(optimizer.learning_rate.numpy()), noise_in_rows(optimizer, 100).values()
    most = 0.1 * SETTINGS["expected_batch_size"] if dense else 0.5
    reach = rate * clip / (1 - momentum)
    assert length <= 0.7001 and reach <= most * 1.0001
    assert length >= 0.6999 or reach >= most * 0.9999


def test_rates_of_dense_weights_fall_with_the_steps():
    rates = [float(first_dense_optimizer(steps).learning_rate) for steps in (1, 400, 40_000)]
    assert rates == pytest.approx([0.01, 0.01, 0.001])
    assert first_dense_optimizer(1, weight_decay=0.2).weight_decay == 0.2


# The warning, and the end.


def model_of(rate, optimizer=tfdp_rec.LazyDPSGD, **options):
    seeding.seed(0)
    ids = keras.Input([], dtype="int32")
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Embedding(9, 16, name="items")(ids)))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4, **options}
    model.compile(optimizer(rate, **settings), loss="mse")
    return model


IDS, Y = np.arange(8) % 9, np.ones([8, 1], "float32")


class OneEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


def foreseen(model, **options):
    """What `fit` says ahead of its first step: the others need not be made."""
    model.run_eagerly = True
    return said(model, callbacks=[OneEpoch()], **options)


def said(model, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(IDS, Y, batch_size=4, verbose=0, **{"epochs": 8, **options})
    words = [str(each.message) for each in found]
    return [each for each in words if any(part in each for part in ("noise alone", "not a number", "takes a weight"))]


@pytest.mark.slow
def test_noise_that_will_drown_a_table_is_foreseen_once_with_the_rate_that_would_do():
    model = model_of(1.0)  # sd 1/4 a step, 16 steps, width 16: a length of 4
    (words,) = foreseen(model)
    assert "rows of 'items/embeddings' a length of 4.0" in words and "Multiply the learning rate by 0.25" in words
    assert len(words) < 500 and words.endswith(".")
    assert foreseen(model) == []
    assert foreseen(model_of(0.25)) == [] and foreseen(model_of(0.74)) == []
    assert foreseen(model_of(1.0), epochs=4) == []


@pytest.mark.slow
def test_a_rate_that_teaches_tables_nothing_is_foreseen_with_one_that_would():
    long = {"epochs": 50}  # 100 steps
    (words,) = foreseen(model_of(3e-4), **long)  # sd 1/4 a step at a rate of 1: a length of 0.003
    assert "rows of 'items/embeddings' a length of no more than 0.003" in words
    assert "Multiply the learning rate by 2e+02" in words and len(words) < 500
    assert foreseen(model_of(3e-3), **long) == [] and foreseen(model_of(3e-4), epochs=8) == []
    assert foreseen(model_of(3e-4, noise_multiplier=0.1), **long) == []


@pytest.mark.slow
def test_a_bound_that_rows_would_soon_reach_is_foreseen():
    """A schedule leaves weights less room; what was released makes more."""
    cosine = keras.optimizers.schedules.CosineDecay(1e-3, 100, alpha=0.1)  # η s is 1/4000 at most, times 2^12
    (words,) = foreseen(model_of(cosine, noise_multiplier=0.5))
    assert "past 0.51" in words and len(words) < 500
    assert foreseen(model_of(1e-3, noise_multiplier=0.5)) == []
    released = model_of(cosine, noise_multiplier=0.5)
    released.layers[1].embeddings.assign(np.full([9, 16], 0.3))
    assert foreseen(released) == []


@pytest.mark.fast_cases("options0")
@pytest.mark.parametrize("options", [
    {"table_rule": Adagrad(), "optimizer": tfdp_rec.DPSGD},
    {"optimizer": tfdp_rec.EANA},
])  # fmt: skip
def test_where_the_walk_is_another_nothing_is_foreseen(options):
    assert foreseen(model_of(1.0, **options)) == []


@pytest.mark.slow
def test_training_without_numbers_says_what_to_change_and_makes_as_many_steps_as_any():
    model = model_of(0.1)
    model.layers[-1].kernel.assign(np.full([16, 1], 1e30))
    words = said(model)
    assert len(words) == 8 and len(set(words)) == 1  # an epoch each
    assert "smaller learning_rate" in words[0] and words[0].endswith("covers that.") and len(words[0]) < 500
    assert int(model.optimizer.iterations) == 16  # how many they are, no data decide
    assert np.isnan(model.train_on_batch(IDS, Y))


@pytest.mark.slow
def test_one_example_without_a_number_among_others_is_nothing_to_tell():
    model, y = model_of(0.1), Y.copy()
    y[::4] = np.nan
    assert said(model) == []
    model.fit(IDS, y, batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 18 and np.isfinite(model.train_on_batch(IDS, y))


@pytest.mark.slow
def test_an_empty_batch_has_a_number():
    model = model_of(0.1)
    loss = model.train_on_batch(np.zeros([0], "int32"), np.zeros([0, 1], "float32"))
    assert np.isfinite(loss)


# Rates that nobody gave.


def test_the_main_job_takes_less_rate_from_smaller_batches_and_more_noise():
    usual = JobSettings()
    assert learning_rate_for(usual, "lazydpsgd", 0.923) == 25.0
    small = JobSettings(batch_size=512)
    rate = learning_rate_for(small, "lazydpsgd", 0.8)
    stddev = rate * 0.8 / 512
    assert noise_walk(Recursion(), np.ones(600), stddev) * 32**0.5 == pytest.approx(0.8)
    assert 3 < rate < 4
    assert learning_rate_for(JobSettings(clip=0.1), "lazydpsgd", 0.923) == 250.0
    assert learning_rate_for(JobSettings(batch_size=512, learning_rate=25.0), "lazydpsgd", 0.8) == 25.0
    assert learning_rate_for(JobSettings(steps=2400, epsilon=1.0), "lazydpsgd", 4.0) < 25 / 4


@pytest.mark.slow
def test_make_private_begins_with_a_rate_of_its_own():
    ids = np.arange(1000) % 50
    model = keras.Sequential([keras.layers.Embedding(50, 4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    options = {"epsilon": 3.0, "batch_size": 100, "epochs": 2, "accountant": "rdp"}
    private = tfdp_rec.make_private(model, (ids, ids[:, None] / 50.0), **options)
    optimizer = private.model.optimizer
    assert isinstance(optimizer, PrivateOptimizer) and isinstance(optimizer.dense_optimizer, keras.optimizers.Adam)
    assert optimizer.learning_rate.numpy() == pytest.approx(first_rate(optimizer, 20))
    assert private.fit(verbose=0).history["epsilon"][-1] <= 3.0
    with pytest.raises(ValueError, match="needs learning_rate="):
        tfdp_rec.make_private(model, (ids, ids[:, None] / 50.0), table_rule=Adagrad(), **options)
    own = tfdp_rec.make_private(model, (ids, ids[:, None] / 50.0), dense_optimizer=None, **options).model.optimizer
    assert own.dense_optimizer is None and own.learning_rate.numpy() == pytest.approx(0.5)
