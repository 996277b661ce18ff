"""One parameter server: it draws the noise of the whole table's rows under a key of its own, and counts no steps."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.distribute.parameter_server import ParameterServer, ServedNoise, ServerEntropy, source_on_server
from tfdp_rec.distribute.worker_step import WorkerStep
from tfdp_rec.noise import EntropyNoise, KeyedNoise, Request, SecureNoise

ROWS, STEP = tf.constant([0, 5], tf.int64), tf.constant(3, tf.int64)


def test_a_shard_gets_the_noise_of_its_rows_in_the_whole_table():
    whole, scale = KeyedNoise(7), tf.constant([[0.5, 2.0], [1.0, 3.0]])
    served = ServedNoise(whole, [(4, 0), (2, 100)])  # the server's variable 1 is rows 100 and on of the model's 2
    found = served.draw([Request(1, ROWS, 3, scale), Request(0, ROWS, 2)], STEP)
    expected = whole.draw([Request(2, ROWS + 100, 3, scale), Request(4, ROWS, 2)], STEP)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_server_has_a_key_of_its_own():
    sources = [ServerEntropy(jit_compile=False) for _ in range(3)]
    draws = [source.normal(0, ROWS, STEP, 4).numpy() for source in sources for _ in range(2)]
    assert len({draw.tobytes() for draw in draws}) == 6


def test_what_cannot_draw_there_is_refused():
    keyed = KeyedNoise(1)
    assert source_on_server(keyed)() is keyed and isinstance(source_on_server(EntropyNoise(False))(), ServerEntropy)
    with pytest.raises(NotPrivate, match="SecureNoise cannot draw on a parameter server"):
        source_on_server(SecureNoise())


def test_a_worker_reads_what_computes_the_numbers_that_servers_are_given():
    class Rate(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 + seen.result()

    seen, inputs = keras.metrics.Sum(), keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(tfdp_rec.DPSGD(Rate(), l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2), "mse")
    worker = WorkerStep(model.private_step, {}, [], None)
    with pytest.raises(NotPrivate, match="The learning rate of DPSGD depends on the batch, on a metric"):
        worker._send({}, tf.zeros([0]))


def test_a_server_declares_no_steps_of_its_own():
    ids = keras.Input([1], dtype="int32")
    model = tfdp_rec.PrivateModel(ids, keras.layers.Flatten()(keras.layers.Embedding(9, 2)(ids)))
    optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    model.compile(optimizer, loss="mse")
    server = ParameterServer("/device:CPU:0")
    server.hold(model.weights[0], True, 0)
    server.open(optimizer)
    server.optimizer.iterations.assign(4)  # steps that the coordinator counts, in its own optimizer
    assert optimizer.privacy_history.undescribed_steps == 0


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_weight_that_is_no_number_decides_nothing_about_the_rows_that_are_read(is_scheduled):
    """Bounded by it, the rows that a batch read became NaN, and others did not."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5) if is_scheduled else 0.1
    table = keras.Variable(np.full([9, 2], 0.05, "float32"), name="table")
    table.assign(np.where(np.arange(9)[:, None] == 8, np.nan, np.asarray(table)))
    server = ParameterServer("/device:CPU:0")
    server.hold(table, True, 0)
    server.open(tfdp_rec.LazyDPSGD(rate, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4))
    server.settle()
    gradient = {table.path: (tf.zeros([2, 2]), tf.constant([2, 5], tf.int64))}
    refused = pytest.raises(Exception, match="less than a hundred-thousandth")
    with contextlib.nullcontext() if is_scheduled else refused:
        server.land(gradient, tf.constant(0.1, tf.float64), {})
    server.settle()
    assert (np.asarray(table)[:8] == np.float32(0.05)).all()  # left out, or refused
