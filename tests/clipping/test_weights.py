"""Under "auto" each gradient is scaled by C / (norm + γ): the oracle's sum, within the clip, and carried to wherever a
model goes.
"""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from helpers import assert_matches_oracle, dense_gradients, double_precision
from zoo import built

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.sensitivity import weights
from tfdp_rec.core.sensitivity.engine import SLACK, clip_weights

BOUND = 1 / (1 + SLACK)
BASICS = {"l2_norm_clip": "auto", "noise_multiplier": 0.0, "expected_batch_size": 4}


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_no_weight_takes_a_gradient_past_the_clip(dtype):
    norms = tf.constant([0.0, 1e-38, 1e-9, 1e-3, 0.01, 0.5, 1.0, 7.0, 1e9, 3e38, np.inf, np.nan], dtype)
    found = clip_weights(norms, tf.constant(BOUND, dtype), weights.normalise_weight)
    np.testing.assert_allclose(found[:-2], BOUND / (np.asarray(norms[:-2], np.float64) + 0.01), rtol=1e-6, atol=1e-37)
    np.testing.assert_array_equal(found[-2:], [0, 0])
    assert np.all(np.asarray(found[:-2], np.float64) * np.asarray(norms[:-2], np.float64) <= BOUND * (1 + 2**-22))


@pytest.mark.fast_cases("dlrm-None")
@pytest.mark.parametrize(("name", "part"), [("two_tower", None), ("dlrm", None), ("dlrm", 2), ("text", None)])
def test_the_sum_is_that_of_single_examples(name, part):
    with double_precision():
        model, batch = built(name)
        assert_matches_oracle(model, batch, clip="auto", microbatch_size=part)


def linear():
    inputs = keras.Input([2])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs))
    model.compile(tfdp_rec.DPSGD(0.5, **BASICS), "mse")  # weights are zero: the gradient is −2 y x
    return model


def sum_of(x, y):
    model = linear()
    (found,) = dense_gradients(model, clipped_sum(model, (x, y), "auto")).values()
    return found[:, 0]


@pytest.mark.fast_cases("0.0-0.0", "1000000000000.0-1.0", "nan-0.0")
@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (0.0, 0.0),  # a gradient of zero stays zero
        (1e-4, 2e-4 / 1.02e-2),  # one shorter than γ is not brought to the clip
        (1.0, 2 / 2.01),
        (1e12, 1.0),
        (np.inf, 0.0),
        (np.nan, 0.0),
    ],
)
def test_a_gradient_of_any_size(y, expected):
    x, other = np.float32([[1, 0], [0, 1]]), -2 / 2.01 * BOUND
    found = sum_of(x, np.float32([[y], [1.0]]))
    np.testing.assert_allclose(found, [-expected * BOUND, other], rtol=1e-5)


def test_a_step_moves_by_the_mean_direction():
    model = linear()
    x, y = np.float32([[3, 0], [0, 4]]), np.float32([[1.0], [100.0]])
    model.fit(tf.data.Dataset.from_tensors((x, y)), verbose=0)
    moved = 0.5 * BOUND * np.array([6 / 6.01, 800 / 800.01]) / 4
    np.testing.assert_allclose(model.get_weights()[0][:, 0], moved, rtol=1e-5)


def test_the_noise_is_that_of_a_clip_of_1():
    moves = []
    for clip in ("auto", 1.0):
        model = linear()
        settings = {**BASICS, "l2_norm_clip": clip, "noise_multiplier": 3.0}
        model.compile(tfdp_rec.DPSGD(0.5, noise=tfdp_rec.noise.KeyedNoise(1), **settings), "mse")
        model.fit(tf.data.Dataset.from_tensors((np.ones([2, 2], "float32"), np.zeros([2, 1], "float32"))), verbose=0)
        moves.append(model.get_weights()[0])
        assert model.optimizer.dp_event() == tfdp_rec.DPSGD(0.5, **settings).dp_event()
    assert np.any(moves[0])
    np.testing.assert_array_equal(*moves)


def test_a_saved_model_goes_on_by_the_same_rule(tmp_path):
    model = linear()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config()["l2_norm_clip"] == "auto" and loaded.optimizer.l2_norm_clip == 1.0
    data = tf.data.Dataset.from_tensors((np.float32([[1, 0]]), np.float32([[1e-4]])))
    for each in (model, loaded):
        each.fit(data, verbose=0)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    np.testing.assert_allclose(loaded.get_weights()[0][0], 0.5 * BOUND * 2e-4 / 1.02e-2 / 4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["LazyDPSGD", "DPSGD"])
def test_make_private_takes_it(mechanism):
    seeding.seed(0)
    ids = np.arange(200) % 20
    model = keras.Sequential([keras.layers.Embedding(20, 4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    settings = {"epsilon": 3.0, "batch_size": 50, "epochs": 1, "accountant": "rdp", "mechanism": mechanism}
    private = tfdp_rec.make_private(model, (ids, ids[:, None] / 20.0), l2_norm_clip="auto", **settings)
    optimizer, plan = private.model.optimizer, private.plan
    assert optimizer.clip_rule is weights.normalise_weight and optimizer.noise_multiplier == plan.noise_multiplier
    assert 2.5 < private.fit(verbose=0).history["epsilon"][-1] <= 3.0


@pytest.mark.parametrize("given", ["automatic", "", 0.0, -1.0, np.nan, np.inf, 1e-10])
def test_what_is_no_clip_is_refused(given):
    with pytest.raises(ValueError, match='l2_norm_clip must be a .*"auto"'):
        tfdp_rec.DPSGD(0.1, **{**BASICS, "l2_norm_clip": given})
    with pytest.raises(ValueError, match='l2_norm_clip must be a .*"auto"'):
        clipped_sum(linear(), (np.zeros([1, 2]), np.zeros([1, 1])), given)
