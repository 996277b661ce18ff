"""A `compute_loss` of the model's own is honoured where its graph ends in a sum or mean over the examples.

The oracle is `compute_loss` on batches of one, one after the other; the graph's form is never asked there.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
from helpers import dense_gradients, evaluated, oracle

import tfdp_rec
from tfdp_rec.core.sensitivity.batches import ALIGNED

RNG = np.random.default_rng(4)
SIZE = 6
X, Y = RNG.normal(size=[SIZE, 4]).astype("float32"), RNG.normal(size=[SIZE, 2]).astype("float32")
WEIGHTS = RNG.uniform(0.2, 2.0, size=[SIZE]).astype("float32")


def private():
    return tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=SIZE)


class Model(tfdp_rec.PrivateModel):
    """Its loss is a function of y, y_pred, and of the sample weights."""

    def __init__(self, loss):
        super().__init__()
        self.dense, self.loss_of = keras.layers.Dense(2), loss

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.loss_of(y, y_pred, sample_weight)


class OfKeras(Model):
    """Asks Keras for the compiled loss, and adds a term."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        found = super(Model, self).compute_loss(x, y, y_pred, sample_weight, training)
        return found + 0.3 * keras.ops.mean(keras.ops.abs(y_pred))


def size_of(tensor):
    return tf.cast(tf.shape(tensor)[0], tensor.dtype)


def at_places(y, p):
    """Whole numbers [batch, 2], and predictions [batch, 2, 3] of them."""
    return tf.cast(y > 0, tf.int32), tf.nn.softmax(p[:, :, None] * tf.constant([1.0, -0.5, 0.2]))


AVERAGES = {
    "a Keras loss": lambda y, p, w: keras.losses.Huber()(y, p),
    "with sample weights": lambda y, p, w: keras.losses.MeanSquaredError()(y, p, sample_weight=w),
    "a mean of all": lambda y, p, w: tf.reduce_mean(tf.square(y - p)),
    "a class at each place": lambda y, p, w: keras.losses.SparseCategoricalCrossentropy()(*at_places(y, p)),
    "a mean of means": lambda y, p, w: tf.reduce_mean(tf.reduce_mean(tf.square(y - p), axis=-1)),
    "a mean of a mean over examples": lambda y, p, w: tf.reduce_mean(tf.reduce_mean(tf.square(y - p), axis=0)),
    "a sum of a mean of all": lambda y, p, w: tf.reduce_sum(tf.reduce_mean(tf.square(y - p), [0, 1], keepdims=True)),
    "of keras.ops": lambda y, p, w: keras.ops.mean(keras.ops.sum(keras.ops.abs(y - p), axis=1)),
    "several terms": lambda y, p, w: sum([tf.reduce_mean(tf.abs(y - p)), 2.0 * tf.reduce_mean(tf.square(p)[:, 0])]),
    "a difference": lambda y, p, w: tf.reduce_mean(tf.square(p)) - tf.reduce_mean(y * p),
    "by hand": lambda y, p, w: tf.reduce_sum(tf.square(y - p)) / size_of(p),
    "by hand, over entries": lambda y, p, w: tf.reduce_sum(tf.abs(y - p)) / tf.cast(tf.size(p), tf.float32),
    "less": lambda y, p, w: -tf.reduce_mean(y * p) / 3.0,
    "in another type": lambda y, p, w: tf.cast(tf.reduce_mean(tf.cast(tf.square(y - p), tf.float64)), tf.float32),
    "keras.ops.sum of terms": lambda y, p, w: keras.ops.sum([tf.reduce_mean(p**2), keras.losses.Huber()(y, p)]),
}
SUMS = {
    "a sum": lambda y, p, w: tf.reduce_sum(tf.square(y - p)),
    "a mean of a sum over examples": lambda y, p, w: tf.reduce_mean(tf.reduce_sum(tf.square(y - p), axis=-2)),
    "a Keras sum": lambda y, p, w: keras.losses.Huber(reduction="sum")(y, p),
}


def compiled(model, **options):
    model.compile(private(), **options)
    model(X)
    return model


def assert_as_one_after_the_other(model, data, clip=0.7):
    expected, norms = oracle(model, data, SIZE, clip)
    found = evaluated(model, data, clip)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    for path, gradient in dense_gradients(model, found).items():
        np.testing.assert_allclose(gradient, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)
    return found


def whole(model, data):
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    return float(model.compute_loss(x, y, model(x), weights))


@pytest.mark.fast_cases("a Keras loss", "by hand, over entries", "keras.ops.sum of terms")
@pytest.mark.parametrize("name", AVERAGES)
def test_a_mean_over_examples_is_honoured(name):
    model, data = compiled(Model(AVERAGES[name])), (X, Y, WEIGHTS)
    found = assert_as_one_after_the_other(model, data)
    np.testing.assert_allclose(np.mean(found.losses), whole(model, data), rtol=1e-5)
    if name in ("with sample weights", "several terms"):  # they take longer than the comparison above
        tfdp_rec.clipping.check(model, data, examples=1)
        assert tfdp_rec.validate(model, data).ok


@pytest.mark.parametrize("name", SUMS)
def test_so_is_a_sum(name):
    model, data = compiled(Model(SUMS[name])), (X, Y)
    found = assert_as_one_after_the_other(model, data)
    np.testing.assert_allclose(np.sum(found.losses), whole(model, data), rtol=1e-5)


@pytest.mark.slow
def test_a_loss_that_asks_keras_first():
    model, data = compiled(OfKeras(None), loss="mse", metrics=["mae"]), (X, Y)
    found = assert_as_one_after_the_other(model, data)
    np.testing.assert_allclose(np.mean(found.losses), whole(model, data), rtol=1e-5)
    before, error = whole(model, data), float(np.mean(np.abs(Y - model(X))))
    history = model.fit(X, Y, batch_size=SIZE, validation_data=(X, Y), verbose=0).history
    np.testing.assert_allclose([history["loss"][0], history["mae"][0]], [before, error], rtol=1e-5)
    np.testing.assert_allclose(history["val_loss"], [whole(model, data)], rtol=1e-5)


def test_a_function_of_ones_own_gives_what_eager_gives():
    """Where the length of the batch is known while tracing, too."""
    model, data = compiled(Model(AVERAGES["by hand"])), (tf.constant(X), tf.constant(Y))
    traced = tf.function(lambda batch: model.per_example_loss(batch, training=False), autograph=False)
    np.testing.assert_allclose(traced(data), model.per_example_loss(data, training=False), rtol=1e-5)


@pytest.mark.slow
def test_microbatches_give_the_same():
    model = compiled(Model(AVERAGES["a Keras loss"]))
    one, several = evaluated(model, (X, Y), 0.7), evaluated(model, (X, Y), 0.7, microbatch_size=2)
    np.testing.assert_allclose(one.norms, several.norms, rtol=1e-5)


@pytest.mark.slow
def test_a_tfrs_model_as_it_is():
    class Ratings(tfdp_rec.PrivateTraining, tfrs.Model):
        def __init__(self):
            super().__init__()
            self.users, self.score = keras.layers.Embedding(9, 3), keras.layers.Dense(1)
            self.task = tfrs.tasks.Ranking(
                loss=keras.losses.MeanSquaredError(), metrics=[keras.metrics.RootMeanSquaredError(name="rmse")]
            )

        def call(self, features):
            return self.score(self.users(features["user"]))

        def compute_loss(self, features, training=False):
            return self.task(labels=features["rating"], predictions=self(features))

    model, data = Ratings(), {"user": np.arange(SIZE), "rating": Y[:, :1]}
    model.compile(private())
    model(data)
    assert_as_one_after_the_other(model, data)
    error = np.sqrt(np.mean((Y[:, :1] - model(data)) ** 2))
    computed_with = np.arange(ALIGNED) % SIZE  # what a metric sees that the loss updates itself
    seen = np.sqrt(np.mean((Y[:, :1] - np.asarray(model(data)))[computed_with] ** 2))
    history = model.fit(tf.data.Dataset.from_tensors(data), verbose=0).history
    np.testing.assert_allclose([history["loss"][0], history["rmse"][0]], [error**2, seen], rtol=1e-5)
    assert np.isfinite(model.evaluate(tf.data.Dataset.from_tensors(data), verbose=0, return_dict=True)["rmse"])


@pytest.mark.parametrize("take", [dict.__getitem__, dict.pop])
def test_labels_that_a_loss_pops_out_of_its_features_stay_the_batchs(take):
    class Popping(Model):
        def compute_loss(self, features, training=False):
            y = take(features, "rating")
            return keras.losses.MeanSquaredError()(y, self(features["x"]))

    model, data = compiled(Popping(None)), {"x": X, "rating": Y}
    clipped = evaluated(model, data, 0.7)
    assert set(data) == {"x", "rating"}
    alone = [model.compute_loss({"x": X[n : n + 1], "rating": Y[n : n + 1]}) for n in range(SIZE)]
    np.testing.assert_allclose(clipped.losses[:SIZE], alone, rtol=1e-5)


def test_a_tfrs_model_that_pops_its_labels_is_evaluated_too():
    """As TFRS' guides write it; the training went through, and `evaluate` after it was refused by Keras."""

    class Popping(tfdp_rec.PrivateTraining, tfrs.Model):
        def __init__(self):
            super().__init__()
            self.score, self.task = keras.layers.Dense(2), tfrs.tasks.Ranking(loss=keras.losses.MeanSquaredError())

        def call(self, features):
            return self.score(features["x"])

        def compute_loss(self, features, training=False):
            labels = features.pop("rating")
            return self.task(labels=labels, predictions=self(features))

    model, data = Popping(), {"x": X, "rating": Y}
    model.compile(private())
    found = model.evaluate(tf.data.Dataset.from_tensors(data), verbose=0, return_dict=True)
    assert found["loss"] == pytest.approx(np.mean((Y - model(data)) ** 2), rel=1e-5)


def in_batch(y, p, w):
    return tf.reduce_mean(tf.reduce_logsumexp(tf.matmul(p, p, transpose_b=True), axis=1))


def centred(y, p, w):
    return tf.reduce_mean(tf.square(p - tf.reduce_mean(p, axis=0)))


REFUSED = {
    "a root of a mean": (lambda y, p, w: tf.sqrt(tf.reduce_mean(tf.square(y - p))), "ends in Sqrt in .*per_example"),
    "the worst": (lambda y, p, w: tf.reduce_max(tf.square(y - p)), "ends in Max"),
    "a mean and a sum": (lambda y, p, w: tf.reduce_mean(y - p) + tf.reduce_sum(p), "ends in Add"),
    "a mean of sums, and a mean": (
        lambda y, p, w: tf.reduce_mean(tf.reduce_sum(p, axis=0)) + tf.reduce_mean(p), "ends in Add",
    ),
    "by the weights": (
        lambda y, p, w: tf.reduce_sum(p) / tf.reduce_sum(w),
        r"Sum in .*the loss is divided by.*return keras\.ops\.mean",
    ),
    "by one less": (lambda y, p, w: tf.reduce_sum(p) / (size_of(p) - 1.0), "ends in RealDiv"),
    "by the batch twice": (lambda y, p, w: tf.reduce_mean(p) / size_of(p), "ends in RealDiv"),
    "times the batch": (lambda y, p, w: tf.reduce_mean(p) * size_of(p), "ends in Mul"),
    "times the data": (lambda y, p, w: tf.reduce_mean(p) * tf.reduce_mean(w), "ends in Mul"),
    "a product of losses": (lambda y, p, w: tf.reduce_mean(p) * tf.stop_gradient(tf.reduce_mean(p)), "ends in Mul"),
    "in-batch negatives": (in_batch, r"MatMul in .*\(in_batch\) multiplies examples .*CandidateScores\(vocabulary"),
    "centred on the batch": (centred, r"Mean in .*\(centred\)"),
    "of the first": (lambda y, p, w: tf.square(p)[0, 0], "ends in StridedSlice"),
    "of some": (lambda y, p, w: tf.reduce_mean(tf.square(p)[1:]), "example"),
    "on the other axis": (lambda y, p, w: tf.reduce_mean(tf.transpose(tf.square(p))), "ends in Mean"),
}  # fmt: skip


@pytest.mark.slow_cases("by the weights")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_or_mean_is_refused(name):
    loss, match = REFUSED[name]
    model = compiled(Model(loss))
    with pytest.raises(tfdp_rec.NotPrivate, match=match) as refused:
        evaluated(model, (X, Y, WEIGHTS), 0.7)
    assert len(str(refused.value)) < 500 and str(refused.value).endswith(".")
    assert not tfdp_rec.validate(model, (X, Y, WEIGHTS)).ok


def test_a_tfrs_model_without_any_loss():
    class Lossless(tfdp_rec.PrivateTraining, tfrs.Model):
        pass

    with pytest.raises(tfdp_rec.NotPrivate, match="has no loss: define per_example_loss"):
        Lossless().compile(private())


@pytest.mark.slow
def test_a_loss_of_a_batch_trains_under_an_ordinary_optimizer():
    model = Model(AVERAGES["a Keras loss"])
    model.compile("sgd")
    losses = model.fit(X, Y, epochs=30, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
