"""The mean of the examples' losses is Keras' own loss; weights, outputs and masks go where they belong."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp_rec
from tfdp_rec.training.per_example_loss import per_example_loss

RNG = np.random.default_rng(0)
SIZE = 4


def probabilities(*shape):
    raw = RNG.uniform(0.1, 1.0, size=[SIZE, *shape])
    return tf.constant(raw / raw.sum(-1, keepdims=True), tf.float32)


def signs(*shape):
    return tf.constant(RNG.choice([-1.0, 1.0], size=[SIZE, *shape]), tf.float32)


def numbers(*shape):
    return tf.constant(RNG.uniform(0.1, 1.0, size=[SIZE, *shape]), tf.float32)


def bits(*shape):
    return tf.constant(RNG.integers(0, 2, size=[SIZE, *shape]), tf.float32)


def classes(*shape):
    return tf.constant(RNG.integers(0, 3, size=[SIZE, *shape]), tf.int32)


REGRESSION = [
    "mse", "mae", "mape", "msle", "huber", "log_cosh", "mean_squared_error", "poisson", "cosine_similarity",
    "kl_divergence",
]  # fmt: skip
CASES = (
    [(name, numbers(3), numbers(3)) for name in REGRESSION]
    + [(name, numbers(5, 3), numbers(5, 3)) for name in REGRESSION]
    + [(name, signs(3), numbers(3)) for name in ("hinge", "squared_hinge", "categorical_hinge")]
    + [(name, bits(1), numbers(1)) for name in ("binary_crossentropy", "binary_focal_crossentropy")]
    + [("binary_crossentropy", bits(), numbers(1)), ("mse", numbers(), numbers(1)), ("mse", numbers(5), numbers(5, 1))]
    + [
        (name, probabilities(3), probabilities(3))
        for name in ("categorical_crossentropy", "categorical_focal_crossentropy")
    ]
    + [("sparse_categorical_crossentropy", classes(), probabilities(3))]
    + [("sparse_categorical_crossentropy", classes(1), probabilities(3))]
    + [("sparse_categorical_crossentropy", classes(5), probabilities(5, 3))]
    + [(keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), bits(1), numbers(1))]
    + [(keras.losses.Huber(delta=0.1), numbers(2), numbers(2))]
    + [(lambda y, p: tf.reduce_mean(tf.abs(y - p) ** 3, axis=-1), numbers(2), numbers(2))]
)


def keras_loss(loss, y, p, sample_weight=None):
    loss = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.Loss):
        function = loss
        loss = keras.losses.Loss()
        loss.call = function
        same = p.shape.rank == y.shape.rank or p.shape[-1] != 1 or y.shape.rank == p.shape.rank
        y = y if same else y[..., None]
    return float(loss(y, p, sample_weight=sample_weight))


@pytest.mark.parametrize("loss, y, p", CASES, ids=lambda v: getattr(v, "name", v) if isinstance(v, str) else "")
def test_the_mean_is_keras_own_loss(loss, y, p):
    found = per_example_loss(loss, None, y, p, None)
    assert found.shape == [SIZE]
    np.testing.assert_allclose(tf.reduce_mean(found), keras_loss(loss, y, p), rtol=1e-5)
    for number in range(SIZE):  # and a batch of one is no special case
        alone = per_example_loss(loss, None, y[number : number + 1], p[number : number + 1], None)
        np.testing.assert_allclose(alone, found[number : number + 1], rtol=1e-5)


@pytest.mark.parametrize("shape", [[SIZE], [SIZE, 1], [SIZE, 5]], ids=str)
def test_sample_weights_by_example_and_by_position(shape):
    y, p, weight = numbers(5, 3), numbers(5, 3), tf.constant(RNG.uniform(0.0, 2.0, size=shape), tf.float32)
    found = per_example_loss("mse", None, y, p, weight)
    by_position = tf.reduce_mean(tf.square(y - p), axis=-1) * tf.reshape(weight, [SIZE, -1])
    np.testing.assert_allclose(found, tf.reduce_mean(by_position, axis=1), rtol=1e-5)
    if len(shape) > 1:  # Keras takes no weight by example for a loss by position
        np.testing.assert_allclose(tf.reduce_mean(found), keras_loss("mse", y, p, weight), rtol=1e-5)


def test_a_loss_that_sums():
    y, p = numbers(5, 3), numbers(5, 3)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    found = per_example_loss(loss, None, y, p, None)
    np.testing.assert_allclose(tf.reduce_sum(found), float(loss(y, p)), rtol=1e-5)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_outputs_with_weights(kind):
    y, p, losses, weights = (
        [numbers(2), classes()],
        [numbers(2), probabilities(3)],
        ["mse", "sparse_categorical_crossentropy"],
        [0.5, 2.0],
    )
    together = (lambda v: dict(zip("ab", v))) if kind is dict else kind
    found = per_example_loss(*(together(v) for v in (losses, weights, y, p)), None)
    expected = sum(w * per_example_loss(one, None, a, b, None) for one, w, a, b in zip(losses, weights, y, p))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_an_output_without_a_loss():
    y, p = numbers(2), [numbers(2), numbers(7)]
    found = per_example_loss(["mse", None], None, [y, y], p, None)
    np.testing.assert_allclose(found, per_example_loss("mse", None, y, p[0], None))


def test_masked_positions_count_for_nothing():
    """Each example is averaged over its own positions: Keras' mean over all of them would couple the examples."""
    values, y = numbers(5, 3), numbers(5, 3)
    keep = tf.constant([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]) > 0
    p = keras.layers.Masking()(values)
    p._keras_mask = keep
    found = per_example_loss("mse", None, y, p, None).numpy()
    by_position = np.mean((y - values) ** 2, axis=-1)
    for number in range(SIZE):
        kept = by_position[number][keep[number].numpy()]
        np.testing.assert_allclose(found[number], kept.mean() if kept.size else 0.0, rtol=1e-5)


def test_a_mask_made_by_an_embedding_reaches_the_loss():
    inputs = keras.Input([4], dtype="int32")
    outputs = layers.Dense(1)(layers.Embedding(5, 3, mask_zero=True)(inputs))
    model = tfdp_rec.PrivateModel(inputs, outputs)
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2), "mse")
    ids, y = np.array([[1, 2, 0, 0], [3, 3, 3, 3]]), np.ones([2, 4, 1], "float32")
    found = model.per_example_loss((ids, y), training=False)
    squares = np.square(np.asarray(model(ids)) - y)[..., 0]
    np.testing.assert_allclose(found, [squares[0, :2].mean(), squares[1].mean()], rtol=1e-5)


def test_what_cannot_be_an_examples_own_is_refused():
    with pytest.raises(ValueError, match="sum of the batch's sample weights"):
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        per_example_loss(loss, None, numbers(2), numbers(2), None)
    inputs = keras.Input([3])
    together = (keras.losses.Circle(), "several examples of the batch together")
    for loss, match in (("dice", "one loss an example"), together):
        model = tfdp_rec.PrivateModel(inputs, layers.Dense(3, activation="sigmoid")(inputs))
        model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), loss)
        y = np.array([0, 1, 1, 0]) if loss != "dice" else np.ones([4, 3], "float32")
        with pytest.raises(ValueError, match=match):
            model.train_on_batch(np.random.default_rng(0).normal(size=[4, 3]).astype("float32"), y)


@pytest.mark.parametrize(
    "loss, y, p, match",
    [
        (["mse", "mse"], [numbers(1)], [numbers(1), numbers(1)], "list of 2 outputs"),
        ({"a": "mse", "c": "mse"}, {"a": numbers(1)}, {"a": numbers(1), "b": numbers(1)}, "outputs are"),
        (["mse", "mse"], numbers(1), numbers(1), "one output"),
        (None, numbers(1), numbers(1), "no loss"),
    ],
)
def test_structures_that_do_not_fit(loss, y, p, match):
    with pytest.raises(ValueError, match=match):
        per_example_loss(loss, None, y, p, None)


@pytest.mark.slow
def test_the_loss_that_fit_reports_is_keras_loss():
    """Clipping comes after the weight, and the report is of the loss as it is."""
    inputs = keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, [layers.Dense(1, name="a")(inputs), layers.Dense(3, name="b")(inputs)])
    losses = ["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)]
    plain = keras.Model(model.inputs, model.outputs)
    plain.compile("sgd", losses, loss_weights=[0.3, 2.0])
    model.compile(
        tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=8),
        losses,
        loss_weights=[0.3, 2.0],
    )
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=[8, 3]), [rng.normal(size=[8, 1]), rng.integers(0, 3, size=[8])]
    expected = plain.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)["loss"]
    assert model.train_on_batch(x, y, return_dict=True)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_compiled_function_that_averages_over_the_batch_is_told_to_return_each_examples():
    def neg_ll(y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred))

    with pytest.raises(ValueError, match="neg_ll given to compile.*one loss an example"):
        per_example_loss(neg_ll, None, numbers(1), numbers(1), None)
