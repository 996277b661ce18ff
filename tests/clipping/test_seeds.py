"""Random layers of a private step draw from secret seeds, which are replaced before and after it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp_rec
from tfdp_rec.core.sensitivity import recorder

X = np.ones([16, 64], "float32")


def noisy(kind=layers.Dropout):
    """A model that adds up what its random layer lets through, and notes it."""

    class Noted(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.random, self.dense = kind(0.5, seed=7), layers.Dense(1)

        def per_example_loss(self, data, training=True):
            return tf.reduce_sum(self.random(data, training=training) * self.dense(data), axis=-1)

    model = Noted()
    model.compile(tfdp_rec.DPSGD(0.0001, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4))
    return model


def found_out(model):
    """Whether a sum's masks can be drawn again from what stood in the seed's state before it, or stands there now."""
    state = model.random.seed_generator.state
    before = np.array(state)
    norms = tfdp_rec.clipping.clipped_sum(model, X, 1.0).norms.numpy()  # (sum of the mask) times the norm of (x, 1)
    after, found = np.array(state), []
    for known in (before, after, after - [0, 1]):
        state.assign(known)
        sums = np.sum(model.random(tf.constant(X), training=True), axis=1)
        found.append(np.allclose(sums * np.sqrt(X.shape[1] + 1), norms, rtol=1e-4))
    state.assign(after)
    return any(found)


@pytest.mark.slow
def test_what_is_saved_tells_of_no_mask():
    model = built()
    model.train_on_batch(X)
    assert not any(found_out(model) for _ in range(3))


@pytest.mark.fast_cases("after")
@pytest.mark.parametrize("left", ["before", "after", "both"])
def test_a_seed_that_is_not_replaced_is_found_out(left, monkeypatch):
    """So that the test above can fail: without the one replacement or the other, the masks are known."""
    replaced, calls = recorder._replace_seeds, []

    def replace(states):
        calls.append(states)
        if left == ("after" if len(calls) % 2 else "before"):
            replaced(states)

    monkeypatch.setattr(recorder, "_replace_seeds", replace)
    assert found_out(built())


def test_the_masks_of_two_runs_from_one_seed_differ():
    first, second = (tfdp_rec.clipping.clipped_sum(made(), X, 1.0).losses.numpy() for made in (built, built))
    assert not np.allclose(first, second)


def built():
    model = noisy()
    model.prepare(X)
    model.dense.kernel.assign(np.ones([64, 1]))
    model.dense.bias.assign(np.zeros([1]))
    return model


def test_two_layers_of_one_seed_draw_apart():
    inputs = keras.Input([64])
    both = layers.Concatenate()([layers.Dropout(0.5, seed=7)(inputs), layers.Dropout(0.5, seed=7)(inputs)])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1, use_bias=False)(both))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1e3, noise_multiplier=0.0, expected_batch_size=1), "mae")
    model.layers[-1].kernel.assign(np.ones([128, 1]))
    found = tfdp_rec.clipping.clipped_sum(model, (X[:1], 1e6 * X[:1, :1]), 1e3)
    left, right = np.split(np.array(tf.convert_to_tensor(next(iter(found.gradients.values())))), 2)
    assert left.any() and not np.allclose(left, right)


def test_a_step_without_random_layers_asks_nobody():
    inputs = keras.Input([64])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(inputs))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse")
    traced = tf.function(lambda x: tfdp_rec.clipping.clipped_sum(model, (x, x[:, :1]), 1.0).norms)
    kinds = {op.type for op in traced.get_concrete_function(tf.TensorSpec([None, 64])).graph.get_operations()}
    assert "TextLineDataset" not in kinds
