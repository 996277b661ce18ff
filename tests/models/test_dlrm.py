"""DLRM against the same forward pass in numpy, its shapes, its refusals, and training under every mechanism."""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf

import tfdp_rec
from tfdp_rec.core.sensitivity.engine import SLACK
from tfdp_rec.models import DLRM
from tfdp_rec.models.dlrm import DotInteraction

SIZES = [7, 11, 5]
SMALL = {"width": 4, "dense_features": 3, "bottom": [6], "top": [8, 5]}


def small(pooling=1):
    seeding.seed(1)
    return DLRM(SIZES, **SMALL, pooling=pooling)


def batch(rng, size, pooling):
    shape = [size, len(SIZES), pooling]
    ids = (rng.random(shape) * np.asarray(SIZES)[None, :, None]).astype("int32")
    return {"dense": rng.normal(size=[size, 3]).astype("float32"), "ids": ids[:, :, 0] if pooling == 1 else ids}


def by_hand(model, inputs):
    """The paper's definition, one example and one pair at a time."""
    weights = {v.path: v.numpy() for v in model.trainable_variables}

    def through(prefix, x, count):
        for i in range(count):
            x = np.maximum(x @ weights[f"{prefix}_{i}/kernel"] + weights[f"{prefix}_{i}/bias"], 0)
        return x

    answers = []
    for dense, ids in zip(inputs["dense"], inputs["ids"]):
        z = [through("bottom", dense, 2)]
        for table, bag in enumerate(ids):
            z.append(sum(weights[f"table_{table}/embeddings"][i] for i in np.atleast_1d(bag)))
        pairs = [z[i] @ z[j] for i in range(len(z)) for j in range(i)]
        x = through("top", np.concatenate([z[0], pairs]), 2)
        logit = x @ weights["logit/kernel"] + weights["logit/bias"]
        answers.append(1 / (1 + np.exp(-logit)))
    return np.stack(answers)


@pytest.mark.parametrize("pooling", [1, 3])
def test_the_forward_pass_is_the_papers(pooling):
    model, inputs = small(pooling), batch(np.random.default_rng(0), 6, pooling)
    np.testing.assert_allclose(model(inputs), by_hand(model, inputs), rtol=1e-5)


def test_the_interaction_has_every_pair_once():
    vectors = [tf.random.stateless_normal([5, 4], [1, i]) for i in range(4)]
    found = DotInteraction()(vectors).numpy()
    wanted = [tf.reduce_sum(vectors[i] * vectors[j], axis=1).numpy() for i in range(4) for j in range(i)]
    np.testing.assert_allclose(found, np.stack(wanted, axis=1), rtol=1e-4, atol=1e-5)


def test_mlperfs_configuration_by_default():
    model = DLRM([3] * 26)
    dense = [tuple(layer.kernel.shape) for layer in [*model.bottom, *model.top, model.logit]]
    assert dense == [
        (13, 512), (512, 256), (256, 128), (128 + 27 * 26 // 2, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1),
    ]  # fmt: skip
    assert [tuple(t.embeddings.shape) for t in model.tables] == [(3, 128)] * 26


@pytest.mark.slow
@pytest.mark.parametrize("pooling", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_clipping_agrees_with_each_examples_own_backward_pass(pooling):
    model, inputs = small(pooling), batch(np.random.default_rng(2), 9, pooling)
    optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=0.05, noise_multiplier=1.0, expected_batch_size=9)
    model.compile(optimizer, loss="binary_crossentropy")
    data = (inputs, np.ones([9, 1], "float32"))
    found = tfdp_rec.clipping.clipped_sum(model, data, l2_norm_clip=0.05)
    variables = [v.value for v in model.trainable_variables]
    total = {v.path: np.zeros(v.shape) for v in model.trainable_variables}
    for i in range(9):
        with tf.GradientTape() as tape:
            row = {k: v[i : i + 1] for k, v in inputs.items()}, data[1][i : i + 1]
            loss = model.per_example_loss(row, training=True)
        gradients = [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, variables)]
        norm = np.sqrt(sum(np.sum(g**2) for g in gradients))
        for variable, gradient in zip(model.trainable_variables, gradients):
            total[variable.path] += gradient * min(1, 0.05 / (1 + SLACK) / norm)
    for path, gradient in found.gradients.items():
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), total[path], atol=2e-6)


@pytest.mark.slow
def test_training_lowers_the_loss_and_noise_reaches_every_row():
    rng = np.random.default_rng(3)
    inputs = batch(rng, 512, 1)
    label = (inputs["ids"][:, :1] % 2).astype("float32")
    model = small()
    optimizer = tfdp_rec.LazyDPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0.1, expected_batch_size=64)
    model.compile(optimizer, loss="binary_crossentropy")
    data = tf.data.Dataset.from_tensor_slices((inputs, label)).batch(64)
    before = [table.embeddings.numpy() for table in model.tables]
    losses = model.fit(data, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < 0.8 * losses[0]
    for table, old in zip(model.tables, before):
        assert np.all(np.any(table.embeddings.numpy() != old, axis=1))


def test_saved_and_loaded(tmp_path):
    model, inputs = small(2), batch(np.random.default_rng(4), 3, 2)
    model.save(tmp_path / "dlrm.keras")
    loaded = keras.saving.load_model(tmp_path / "dlrm.keras")
    assert loaded.get_config() == model.get_config()
    np.testing.assert_array_equal(loaded(inputs), model(inputs))


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"table_sizes": []}, "table_sizes"), ({"table_sizes": [3, 0]}, "table_sizes"),
        ({"table_sizes": [3], "width": 0}, "width"), ({"table_sizes": [3], "pooling": -1}, "pooling"),
        ({"table_sizes": [3], "top": [0]}, "top"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        DLRM(**arguments)
