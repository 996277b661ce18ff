"""A model that defines `per_example_loss` trains, validates, evaluates, predicts and exports by it: one definition."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tfdp_rec

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=[24, 4]).astype("float32"), RNG.normal(size=[24, 1]).astype("float32")
BATCH = {"user": np.arange(24) % 6, "item": np.arange(24) % 5, "negatives": np.array([1, 3])}


class Regression(tfdp_rec.PrivateModel):
    """Its loss is made from what its `call` gives."""

    def __init__(self, **options):
        super().__init__(**options)
        self.score = keras.layers.Dense(1)

    def call(self, inputs):
        return self.score(inputs)

    def per_example_loss(self, data, training=True):
        x, y = data[:2]
        return tf.abs(self(x, training=training) - y)[:, 0] ** 1.5


class PastCall(Regression):
    """Never calls itself in its loss."""

    def per_example_loss(self, data, training=True):
        x, y = data[:2]
        return tf.abs(self.score(x) - y)[:, 0] ** 1.5


class Counting(Regression):
    """Holds a metric of its own, which its loss updates."""

    def __init__(self):
        super().__init__()
        self.rmse = keras.metrics.RootMeanSquaredError(name="rmse")

    def per_example_loss(self, data, training=True):
        x, y = data[:2]
        predicted = self(x, training=training)
        self.rmse.update_state(y, predicted)
        return tf.square(predicted - y)[:, 0]


class Towers(tfdp_rec.PrivateTraining, tfrs.Model):
    """As the README's, with a `call` that recommends."""

    shared_inputs = ("negatives",)

    def __init__(self):
        super().__init__()
        self.users = keras.layers.Embedding(6, 4)
        self.scores = tfdp_rec.CandidateScores(vocabulary_size=5, width=4)

    def call(self, user):
        scores = tf.matmul(self.users(user), self.scores.embeddings, transpose_b=True)
        return tf.math.top_k(scores, 3).indices

    def per_example_loss(self, data, training=True):
        logits = self.scores(self.users(data["user"]), data["item"], data["negatives"])
        return tf.reduce_logsumexp(logits, axis=1) - logits[:, 0]


def private():
    return tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8)


def compiled(model, optimizer=None, **options):
    model.compile(optimizer or private(), **options)
    return model


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def towers_data():
    rows = {k: v for k, v in BATCH.items() if k != "negatives"}
    with_negatives = lambda batch: {**batch, "negatives": tf.constant(BATCH["negatives"])}  # noqa: E731
    return tf.data.Dataset.from_tensor_slices(rows).batch(8).map(with_negatives)


@pytest.mark.fast_cases("sgd")
@pytest.mark.parametrize("optimizer", ["private", "sgd"])
def test_it_evaluates_by_the_mean_of_its_loss(optimizer):
    model = compiled(Regression(), private() if optimizer == "private" else "sgd")
    model.fit(X, Y, batch_size=8, verbose=0)
    truth = np.mean(np.abs(np.array(model(X)) - Y) ** 1.5)
    np.testing.assert_allclose(model.evaluate(X, Y, batch_size=7, verbose=0), truth, rtol=1e-5)
    np.testing.assert_allclose(model.test_on_batch(X, Y), truth, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["arrays", "dataset"])
@pytest.mark.parametrize("kind", [Regression, Counting])
def test_it_validates_while_it_trains(kind, data):
    model = compiled(kind())
    given = (dataset(),) if data == "dataset" else (X, Y)
    held_out = dataset() if data == "dataset" else (X, Y)
    history = model.fit(*given, validation_data=held_out, epochs=2, verbose=0).history
    evaluated = model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(history["val_loss"][-1], evaluated, rtol=1e-5)
    assert len(history["loss"]) == 2


@pytest.mark.fast_cases("private-True")
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("optimizer", ["private", "sgd"])
def test_compiled_metrics_are_of_what_its_call_gave(optimizer, eagerly):
    model = compiled(
        Regression(), private() if optimizer == "private" else "sgd", metrics=["mae"], weighted_metrics=["mse"],
        run_eagerly=eagerly,
    )  # fmt: skip
    before = np.mean(np.abs(np.array(model(X)) - Y))
    history = model.fit(X, Y, batch_size=24, validation_data=(X, Y), verbose=0).history
    np.testing.assert_allclose(history["mae"], [before], rtol=1e-5)  # as Keras': of the weights before the step
    np.testing.assert_allclose(history["val_mae"], [np.mean(np.abs(np.array(model(X)) - Y))], rtol=1e-5)
    assert set(history) == {"loss", "mae", "mse", "val_loss", "val_mae", "val_mse"}


def test_metrics_of_its_own_are_shown():
    """Such a metric sees what is computed with: 16 examples as they are, 24 of them eight twice."""
    model = compiled(Counting())
    before = np.sqrt(np.mean((np.array(model(X[:16])) - Y[:16]) ** 2))
    history = model.fit(X[:16], Y[:16], batch_size=16, validation_data=(X, Y), verbose=0).history
    np.testing.assert_allclose(history["rmse"], [before], rtol=1e-5)
    np.testing.assert_allclose(history["val_rmse"], [np.sqrt(np.mean((np.array(model(X)) - Y) ** 2))], rtol=1e-5)


@pytest.mark.fast_cases("private")
@pytest.mark.parametrize("optimizer", ["private", "sgd"])
def test_where_the_loss_does_without_a_call_evaluation_calls_for_the_metrics(optimizer):
    model = compiled(PastCall(), private() if optimizer == "private" else "sgd", metrics=["mae"])
    history = model.fit(X, Y, batch_size=8, validation_data=(X, Y), epochs=2, verbose=0).history
    assert set(history) == {"loss", "val_loss", "val_mae"}  # a step of training predicts nothing
    error = np.mean(np.abs(np.array(model(X)) - Y))
    np.testing.assert_allclose(history["val_mae"][-1], error, rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0, return_dict=True)["mae"], error, rtol=1e-5)


@pytest.mark.parametrize("step", ["train_on_batch", "test_on_batch"])
def test_metrics_without_any_predictions_are_refused(step):
    class Silent(tfdp_rec.PrivateTraining, keras.Model):
        def per_example_loss(self, data, training=True):
            return tf.abs(self.score(data[0]) - data[1])[:, 0]

    model = Silent()
    model.score = keras.layers.Dense(1)
    with pytest.raises(ValueError, match=r"predicts nothing: define call") as refused:
        getattr(compiled(model, metrics=["mae"]), step)(X, Y)
    assert len(str(refused.value)) < 500 and str(refused.value).endswith(".")


def test_metrics_without_targets_are_refused():
    class Untold(Regression):
        def per_example_loss(self, data, training=True):
            return self(data["x"])[:, 0]

    with pytest.raises(ValueError, match=r"\(x, y\)") as refused:
        compiled(Untold(), metrics=["mae"]).train_on_batch({"x": X})
    assert len(str(refused.value)) < 500 and str(refused.value).endswith(".")


@pytest.mark.slow
def test_metrics_and_microbatches_live_side_by_side():
    model = compiled(Regression(), metrics=["mae"], microbatch_size=2)
    history = model.fit(X, Y, batch_size=8, validation_data=(X, Y), epochs=2, verbose=0).history
    assert "val_mae" in history and "mae" not in history


@pytest.mark.slow
def test_without_a_call_it_evaluates_and_says_what_prediction_takes():
    class Silent(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.score = keras.layers.Dense(1)

        def per_example_loss(self, data, training=True):
            return tf.square(self.score(data[0]) - data[1])[:, 0]

    model = compiled(Silent())
    model.fit(X, Y, batch_size=8, verbose=0, validation_data=(X, Y))
    assert np.isfinite(model.evaluate(X, Y, verbose=0))
    for use in (lambda: model.predict(X, verbose=0), lambda: model(X)):
        with pytest.raises(NotImplementedError, match=r"Silent .* define call\(self, ") as refused:
            use()
        assert len(str(refused.value)) < 500 and str(refused.value).endswith(".")


def test_the_examples_of_an_odd_batch_count_alike():
    """24 examples in batches of 7, 7, 7 and 3."""
    model = compiled(Regression(), "sgd")
    model.optimizer.learning_rate = 0.0
    history = model.fit(X, Y, batch_size=7, verbose=0).history
    np.testing.assert_allclose(history["loss"], [np.mean(np.abs(np.array(model(X)) - Y) ** 1.5)], rtol=1e-5)


def test_an_ordinary_optimizer_trains_by_the_same_loss():
    """Regularisers included, as Keras' step has them."""
    model = Regression()
    model.score = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
    model(X)
    kernel, bias = (np.array(w) for w in model.get_weights())
    compiled(model, keras.optimizers.SGD(0.5)).train_on_batch(X, Y)
    off = X @ kernel + bias - Y
    slope = 1.5 * np.sqrt(np.abs(off)) * np.sign(off) / len(X)
    np.testing.assert_allclose(model.get_weights()[0], kernel - 0.5 * (X.T @ slope + 0.2 * kernel), rtol=1e-4)
    np.testing.assert_allclose(model.get_weights()[1], bias - 0.5 * slope.sum(0), rtol=1e-4)


@pytest.mark.fast_cases("sgd")
@pytest.mark.parametrize("optimizer", ["private", "sgd"])
def test_a_tfrs_model_does_all(tmp_path, optimizer):
    model = compiled(Towers(), private() if optimizer == "private" else "sgd")
    data = towers_data()
    history = model.fit(data, validation_data=data, verbose=0).history
    losses = np.concatenate([model.per_example_loss(batch, training=False) for batch in data])
    np.testing.assert_allclose(history["val_loss"], [losses.mean()], rtol=1e-5)
    assert set(history) == {"loss", "val_loss"}
    np.testing.assert_allclose(model.evaluate(data, verbose=0), losses.mean(), rtol=1e-5)
    best = model(tf.range(6))
    np.testing.assert_array_equal(model.predict(np.arange(6), verbose=0), best)
    ids = keras.InputSpec(shape=(None,), dtype="int32")
    model.export(str(tmp_path / "servable"), verbose=False, input_signature=[ids])
    served = tf.saved_model.load(str(tmp_path / "servable"))
    np.testing.assert_array_equal(served.serve(tf.range(6)), best)


@pytest.mark.fast_cases("sgd")
@pytest.mark.parametrize("optimizer", ["private", "sgd"])
def test_one_whose_call_the_loss_uses_is_exported_as_it_is(tmp_path, optimizer):
    model = compiled(Regression(), private() if optimizer == "private" else "sgd")
    model.fit(X, Y, batch_size=8, verbose=0)
    model.export(str(tmp_path / "servable"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "servable"))
    np.testing.assert_allclose(served.serve(X), model.predict(X, verbose=0), rtol=1e-5)


@pytest.mark.slow
def test_a_compute_loss_beside_it_evaluates_as_before():
    class Both(Towers):
        def compute_loss(self, inputs, training=False):
            return tf.constant(7.0)

    model = compiled(Both())
    model.fit(towers_data(), verbose=0)
    assert model.evaluate(towers_data(), verbose=0, return_dict=True)["loss"] == 7.0
