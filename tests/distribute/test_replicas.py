"""Strategies of several replicas are refused, with what to use instead. On two real (logical) devices."""

import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfdp_rec

SCRIPT = """
import keras, tensorflow as tf, tfdp_rec
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert strategy.num_replicas_in_sync == 2
optimizer = lambda: tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)

def model():
    inputs = keras.Input([4])
    return tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))

def attempt(make, compile_inside):
    try:
        with strategy.scope():
            made = make()
            if compile_inside:
                made.compile(optimizer(), loss="mse")
        made.compile(optimizer(), loss="mse")
        print("not refused")
    except tfdp_rec.NotPrivate as problem:
        print(problem)

attempt(model, True)
attempt(model, False)
with strategy.scope():
    plain = model()
    plain.compile("sgd", loss="mse")  # makes no claim, and is let alone
print("plain", plain.fit(tf.ones([8, 4]), tf.ones([8, 1]), batch_size=4, verbose=0).history["loss"][0] > 0)
"""


def test_a_strategy_that_says_it_has_two_replicas_is_refused(monkeypatch):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    monkeypatch.setattr(tf.distribute.MirroredStrategy, "num_replicas_in_sync", property(lambda self: 2))
    with strategy.scope():
        inputs = keras.Input([4])
        model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    private = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    with pytest.raises(tfdp_rec.NotPrivate, match="ParameterServerTrainer"):
        model.compile(private, loss="mse")
    with strategy.scope(), pytest.raises(tfdp_rec.NotPrivate, match="ParameterServerTrainer"):
        model.compile(private, loss="mse")


def test_an_ordinary_optimizer_of_a_strategy_may_be_replaced():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        inputs = keras.Input([4])
        model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    model.fit(tf.ones([8, 4]), tf.ones([8, 1]), batch_size=4, verbose=0)
    with strategy.scope():
        model.compile("adam", "mse")  # its steps could not be read
    assert type(model.optimizer) is keras.optimizers.Adam


@pytest.mark.slow
def test_mirrored_strategies_are_refused_and_parameter_servers_named():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    inside, outside, plain = done.stdout.strip().splitlines()
    assert "ParameterServerTrainer" in inside and "ParameterServerTrainer" in outside
    assert plain == "plain True"
