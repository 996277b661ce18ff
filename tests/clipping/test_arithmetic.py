"""Products that drop bits between the norm and the sum: turned off, or the step is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp_rec
from tfdp_rec.clipping.arithmetic import refuse_coarse_products

X = np.ones([4, 3], "float32")


@pytest.fixture
def coarse():
    """TensorFloat-32 as TensorFlow has it by default."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(True)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


def compiled():
    inputs = keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(inputs))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse")
    return model


def test_compiling_a_private_model_turns_tensor_float_32_off(coarse):
    compiled()
    assert not tf.config.experimental.tensor_float_32_execution_enabled()


def test_a_step_is_refused_where_somebody_turned_it_on_again(coarse, monkeypatch):
    model = compiled()
    tf.config.experimental.enable_tensor_float_32_execution(True)
    model.train_on_batch(X, X[:, :1])  # no GPU: no matter
    model.compile_step_anew()
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0"])
    with pytest.raises(tfdp_rec.NotPrivate, match="TensorFloat-32 is on"):
        model.train_on_batch(X, X[:, :1])
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("mode", ["BF16", "tf32", "ANY"])
def test_onednns_coarse_modes_are_refused(mode, monkeypatch):
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        monkeypatch.setenv(name, "STRICT")
        refuse_coarse_products()
        monkeypatch.setenv(name, mode)
        with pytest.raises(tfdp_rec.NotPrivate, match=name):
            refuse_coarse_products()
        monkeypatch.delenv(name)
