"""Updated rows and bytes, counted by hand."""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf

import tfdp_rec
from tfdp_rec.callbacks import GradientSparsity
from tfdp_rec.callbacks.gradient_sparsity import Sparsity

BATCHES = [[[1, 1], [2, 9]], [[3, 3], [3, 3]], [[0, 5], [6, 7]]]  # 3, 1 and 4 distinct ids of 100


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("eager", [False, True])
def test_counts(eager):
    seeding.seed(0)
    ids = keras.Input([2], dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(100, 5)(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
    optimizer = tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2)
    model.compile(optimizer, loss="mse", run_eagerly=eager)
    data = tf.data.Dataset.from_tensor_slices((np.array(BATCHES, "int32"), np.ones([3, 2, 1], "float32")))
    sparsity = GradientSparsity()
    history = model.fit(data, epochs=2, verbose=0, callbacks=[sparsity]).history
    assert sparsity.total == Sparsity(6, 16, 16 * 5 * 4, 600, 600 * 5 * 4)
    assert history["updated_rows"] == pytest.approx([8 / 3] * 2)
    assert history["updated_bytes"] == pytest.approx([8 * 20 / 3] * 2)
    assert history["reduction"] == pytest.approx([300 / 8] * 2)
    model.fit(data, verbose=0)
    assert sparsity.total.steps == 6 and model.optimizer.observers == ()


def test_ordinary_optimizers_are_refused():
    inputs = keras.Input([2])
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", loss="mse")
    with pytest.raises(TypeError, match="private optimizer"):
        model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0, callbacks=[GradientSparsity()])


def test_nothing_yet():
    assert GradientSparsity().total == Sparsity(0, 0, 0, 0, 0) and GradientSparsity().total.reduction == float("inf")
