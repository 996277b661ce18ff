"""The private step as compiled: examples that are not finite, diagnostics, policies, and what its graph holds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, assert_matches_oracle, dense_gradients, operations, sums_of, tensors_of_shape
from keras import layers
from zoo import built

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.sensitivity.engine import SLACK


def linear(**options):
    """y = x w, so that an example's gradient is 2 (x w - y) x."""
    inputs = keras.Input([2])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs))
    optimizer = tfdp_rec.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=2)
    model.compile(optimizer, "mse", **options)
    return model


@pytest.mark.parametrize("part", [None, 2])
def test_an_example_that_is_not_finite_counts_as_zero(part):
    model = linear()
    clipped = sums_of(model, 1.0, part)
    y = np.array([[0.0], [0.0], [1.0]], "float32")
    for bad in (np.nan, np.inf, 3e38):
        x = np.array([[1.0, 2.0], [bad, 1.0], [0.5, 0.0]], "float32")
        found, sound = clipped((x, y)), clipped((x[[0, 2]], y[[0, 2]]))
        assert not np.isfinite(found.norms[1])
        (gradient,), (expected,) = dense_gradients(model, found).values(), dense_gradients(model, sound).values()
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_the_step_goes_on_and_diagnostics_say_what_happened():
    x = np.array([[3.0, 4.0], [np.nan, 1.0], [0.0, 0.0], [0.03, 0.04]], "float32")
    model = linear(diagnostics=True)
    logs = model.train_on_batch(x, np.zeros([4, 1], "float32"), return_dict=True)
    # Gradients: 2 · 7 · (3, 4) of norm 70, clipped to (0.6, 0.8); none; 0; 2 · 0.07 · (0.03, 0.04) of norm 0.007.
    expected = 1.0 - (np.array([0.6, 0.8]) / (1 + SLACK) + 0.14 * np.array([0.03, 0.04])) / 2
    np.testing.assert_allclose(model.get_weights()[0][:, 0], expected, rtol=1e-5)
    assert logs["dropped_examples"] == 1 and logs["clipped_share"] == pytest.approx(1 / 3)
    assert logs["median_norm"] == pytest.approx(0.007, rel=1e-4)
    assert logs["loss"] == pytest.approx((49.0 + 0.0 + 0.0049) / 3)


def test_diagnostics_are_off_by_default():
    logs = linear().train_on_batch(np.ones([2, 2]), np.zeros([2, 1]), return_dict=True)
    assert set(logs) == {"loss"}


def test_a_batch_of_unsound_examples_leaves_the_weights_alone():
    model = linear()
    model.train_on_batch(np.full([2, 2], np.nan), np.zeros([2, 1]))
    np.testing.assert_array_equal(model.get_weights()[0], np.ones([2, 1]))


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [1, 3, 9])
def test_compiled_steps_are_the_same_in_parts(microbatch):
    model = linear(microbatch_size=microbatch)
    reference = linear()
    rng = np.random.default_rng(0)
    for size in (4, 1, 5, 0):
        x, y = rng.normal(size=[size, 2]), rng.normal(size=[size, 1])
        model.train_on_batch(x, y)
        reference.train_on_batch(x, y)
    np.testing.assert_allclose(model.get_weights()[0], reference.get_weights()[0], rtol=1e-5)


def test_mixed_bfloat16_computes_norms_in_float32():
    """Against the oracle in bfloat16 up to its precision; and the clip holds for the sum that was made."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        parts = [
            layers.Embedding(7, 8),
            layers.Dense(8, activation="tanh"),
            layers.LayerNormalization(),
            layers.Dense(3),
        ]

        def forward(p, b):
            return tf.cast(p[3](p[2](p[1](p[0](b["x"])))), tf.float32)

        model = Scored(parts, forward)
        x = np.random.default_rng(0).integers(0, 7, size=[4, 5])
        batch = {"x": x, "weight": np.ones([4], "float32")}
        model.per_example_loss(batch)
        found = assert_matches_oracle(model, batch, rtol=0.05)
    finally:
        keras.config.set_dtype_policy(before)
    assert found.norms.dtype == tf.float32
    assert all(g.dtype == tf.float32 for g in found.gradients.values())


# What the traced step holds.


def traced_step(name_of_optimizer, rows, width, batch_size=4):
    ids = keras.Input([3], dtype="int32")
    table = layers.Embedding(rows, width, embeddings_initializer="zeros", name="table")
    model = tfdp_rec.PrivateModel(ids, layers.Dense(1)(layers.GlobalAveragePooling1D()(table(ids))))
    mechanism = getattr(tfdp_rec, name_of_optimizer)
    model.compile(mechanism(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=batch_size), "mse")
    batch = (tf.zeros([batch_size, 3], tf.int32), tf.zeros([batch_size, 1]))
    model.prepare(batch)
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    return step.get_concrete_function(*batch).graph


@pytest.mark.fast_cases("LazyDPSGD")
@pytest.mark.parametrize("optimizer", ["LazyDPSGD", "EANA"])
def test_no_tensor_of_a_private_step_has_a_tables_shape(optimizer):
    graph = traced_step(optimizer, rows=977, width=5)
    assert tensors_of_shape(graph, [977, 5]) == []
    kinds = {o.type for o in operations(graph)}
    assert "ResourceGather" in kinds and kinds & {"ResourceScatterAdd", "ResourceScatterUpdate"}


def test_the_walk_finds_what_it_should():
    """Also inside loops and branches."""
    whole = tf.Variable(tf.zeros([977, 5]))

    def read(flag):
        return tf.cond(
            flag, lambda: tf.while_loop(lambda i: i < 1, lambda i: i + tf.reduce_sum(whole), [0.0])[0], lambda: 0.0
        )

    graph = tf.function(read, autograph=False).get_concrete_function(tf.TensorSpec([], tf.bool)).graph
    assert tensors_of_shape(graph, [977, 5])
    assert not tensors_of_shape(graph, [976, 5])


def test_dlrm_sums_have_no_tables_shape():
    model, batch = built("dlrm")
    found = clipped_sum(model, batch, 1.0)
    tables = [v for v in model.trainable_variables if "embeddings" in v.path]
    assert len(tables) == 3 and all(isinstance(found.gradients[v.path], tf.IndexedSlices) for v in tables)
