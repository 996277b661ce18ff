"""A private step is made of operations that TensorFlow has for GPUs, but for the checks' own (docs/gpu.md).

No GPU was tried: this reads the kernels that the installed TensorFlow registers for GPUs, without one.
"""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels

import tfdp_rec

ON_THE_HOST = {"StringToNumber"}  # a check that fails with a sentence


def devices(operation):
    return {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(operation).kernel}


class Model(tfdp_rec.PrivateModel):
    def __init__(self):
        super().__init__()
        self.context = keras.layers.Embedding(30, 4)
        self.out = keras.layers.Dense(4)
        self.scores = tfdp_rec.CandidateScores(30, 4)
        self.shared_inputs = ("negatives",)

    def per_example_loss(self, data, training=True):
        query = self.out(tf.reduce_mean(self.context(data["context"]), axis=1))
        return self.scores.cross_entropy(query, data["label"], data["negatives"])


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["LazyDPSGD", "DPSGD", "EANA"])
def test_every_operation_of_a_step_has_a_kernel_for_gpus(mechanism):
    if "GPU" not in devices("MatMul"):
        pytest.skip("this TensorFlow is built without kernels for GPUs")
    rng = np.random.default_rng(0)
    batch = {"context": rng.integers(0, 30, (8, 3)), "label": rng.integers(0, 30, 8), "negatives": np.arange(10)}
    model, optimizer = Model(), getattr(tfdp_rec, mechanism)
    model.compile(optimizer(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8))
    model.prepare(batch)
    graph = tf.function(model.train_step).get_concrete_function(tf.nest.map_structure(tf.constant, batch))
    found = graph.graph.as_graph_def()
    nodes = [*found.node, *(node for function in found.library.function for node in function.node_def)]
    made = {node.op for node in nodes} - {function.signature.name for function in found.library.function}
    assert {"ResourceScatterUpdate", "MatMul", "UniqueWithCounts", "StringToNumber"} <= made
    assert {op for op in made if not devices(op) & {"GPU", "DEFAULT"}} == ON_THE_HOST


def test_a_step_copies_few_numbers_between_a_gpu_and_its_host():
    """Each is a wait of the device; a step as `fit` makes it, with the ids of the next batch."""
    if "GPU" not in devices("MatMul"):
        pytest.skip("this TensorFlow is built without kernels for GPUs")
    count_step = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "kernels"))["count_step"]
    three, five = ([part.total() for part in count_step("LazyDPSGD", tables).parts] for tables in (3, 5))
    a_table = [(more - less) / 2 for more, less in zip(five, three, strict=True)]
    assert a_table[0] <= 6 and a_table[1:] == [0, 0]
    assert three[0] <= 285 and three[1] <= 8 and three[2] <= 20  # of 26 tables 423 kernels


TRAINED = """
import contextlib, sys
from unittest import mock
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import tfdp_rec
from keras import layers
from tfdp_rec.core.mechanism import pending
from tfdp_rec.core.sensitivity import factors, float_sums
from tfdp_rec.noise import KeyedNoise

rng = np.random.default_rng(0)
X = {"a": rng.integers(0, 30, 300), "b": rng.integers(0, 20, (300, 4)), "c": rng.integers(0, 9, 300)}
Y = (X["a"] % 2)[:, None].astype("float32")

def train(name, device, tables, as_gpu, noise, **options):
    with contextlib.ExitStack() as stack:
        if device:
            stack.enter_context(tf.device(device))
        for room in (pending, factors, float_sums) if as_gpu else ():
            stack.enter_context(mock.patch.object(room, "has_gpu", lambda: True))
        keras.utils.set_random_seed(3)
        inputs = {key: keras.Input(ids.shape[1:], dtype="int64") for key, ids in X.items()}
        several = [layers.Embedding(rows, width) for rows, width in ((30, 4), (20, WIDTH), (9, 4))]
        with tf.device(tables):
            for each in several:
                each.build(None)
        rows = [layer(inputs[key]) for key, layer in zip("abc", several)]
        rows[1] = layers.GlobalAveragePooling1D()(rows[1])
        hidden = layers.Dense(6, activation="relu")(layers.Concatenate()(rows))
        model = tfdp_rec.PrivateModel(inputs, layers.Dense(1, activation="sigmoid")(hidden))
        settings = dict(l2_norm_clip=0.5, noise_multiplier=0.7, expected_batch_size=40, noise=noise, **options)
        model.compile(getattr(tfdp_rec, name)(0.3, **settings), "binary_crossentropy")
        model.fit(X, Y, batch_size=40, epochs=1, verbose=0, shuffle=False)
    where = [variable.value.handle.device[-5:] for variable in model.trainable_variables]
    assert where == [tables] * 3 + [device or "CPU:0"] * 4, where
    return model.get_weights()
"""


@pytest.mark.fast_cases("LazyDPSGD-0.0-CPU:1-4")
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("tables", ["CPU:1", "CPU:0"])
@pytest.mark.parametrize("name, momentum", [("LazyDPSGD", 0.0), ("LazyDPSGD", 0.9), ("EANA", 0.0), ("DPSGD", 0.0)])
def test_a_model_on_a_device_of_its_own_trains_as_on_the_host(name, momentum, tables, width):
    """Ids and public numbers stay on the host; and what is done for all tables at once on a GPU gives the same bits.

    So do tables, where they are built there.
    """
    script = f"""{TRAINED.replace("WIDTH", str(width))}
one = train({name!r}, "", "CPU:0", False, KeyedNoise(5), momentum={momentum})
two = train({name!r}, "CPU:1", {tables!r}, True, KeyedNoise(5), momentum={momentum})
for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a, b)
drawn = train({name!r}, "CPU:1", {tables!r}, True, None, momentum={momentum})
assert all(np.isfinite(each).all() for each in drawn) and not np.array_equal(drawn[0], one[0])
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.fast_cases("GRU")
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_loops_are_not_computed_by_cudnn_in_a_private_step(kind, monkeypatch):
    """Keras takes cuDNN's kernel where a GPU is, which the reading of a loss knows nothing of."""
    keras_loops = importlib.import_module("keras.src.backend.tensorflow.rnn")
    ids = keras.Input((4,), dtype="int32")
    loop = getattr(keras.layers, kind)(3)
    scores = keras.layers.Dense(1)(loop(keras.layers.Embedding(9, 2)(ids)))
    model = tfdp_rec.PrivateModel(ids, scores)
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8), "mse")
    batch = np.arange(32).reshape(8, 4) % 9, np.ones([8, 1], "float32")
    monkeypatch.setattr(keras_loops, "_is_gpu_available", lambda: True)
    clipped = tfdp_rec.clipping.clipped_sum(model, batch, 1.0)
    assert loop.use_cudnn == "auto" and np.isfinite(clipped.norms).all()
    with pytest.raises((tf.errors.OpError, ValueError)):  # where cuDNN's kernel is missing; or the test shows nothing
        tf.function(model, autograph=False)(batch[0])
