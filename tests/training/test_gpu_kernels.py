"""A private step is made of operations that TensorFlow has for GPUs, but for the checks' own (docs/gpu.md).

No GPU was tried: this reads the kernels that the installed TensorFlow registers for GPUs, without one.
"""

import importlib
import runpy
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
    assert a_table[0] <= 9 and a_table[1:] == [0, 0]
    assert three[0] <= 570 and three[1] <= 19 and three[2] <= 28


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
