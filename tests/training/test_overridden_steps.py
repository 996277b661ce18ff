"""Nothing that a train step computes from its batch stays when training ends, but what was clipped and noised."""

import functools
import os

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from trainings import optimizer_of

import tfdp_rec
from tfdp_rec.core.ground.refused import NotPrivate

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=[8, 3]).astype("float32"), RNG.normal(size=[8, 1]).astype("float32")


def model_of(*layers, kind=tfdp_rec.PrivateModel, **options):
    """A compiled model of these layers, or of a dense one."""
    inputs = outputs = keras.Input([3])
    for layer in layers or [keras.layers.Dense(1)]:
        outputs = layer(outputs)
    model = kind(inputs, outputs)
    model.compile(optimizer_of(batch=8), **{"loss": "mse", **options})
    return model


def compiled(keeps, run_eagerly=False):
    """A model whose metrics are computed as ever, and then `keeps(model, x, logs)`."""
    seeding.seed(0)

    class Keeping(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.score = keras.layers.Dense(1, name="score")
            self.centre = self.add_weight(shape=[3], initializer="zeros", trainable=False, name="centre")
            self.number = self.add_weight(shape=[], initializer="zeros", trainable=False, name="number")
            self.seen = keras.metrics.Mean(name="seen")
            self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
            self.generator = tf.random.Generator.from_seed(1)
            self.build([None, 3])

        def build(self, shape):
            self.score.build(shape)
            self.built = True

        def call(self, x):
            return self.score(x)

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            self.keeps(self, x, logs)
            return logs

    model = Keeping()
    model.keeps = keeps
    model.compile(optimizer_of(batch=8), loss="mse", run_eagerly=run_eagerly)
    return model


def in_a_branch(model, x, logs):
    tf.cond(tf.reduce_sum(x) > 0, lambda: model.number.value.assign(1.0), lambda: model.number.value.assign(2.0))


def in_a_function(model, x, logs):
    tf.function(lambda x: model.centre.assign(tf.reduce_mean(x, axis=0)), autograph=False)(x)


def as_often_as_there_are_examples(model, x, logs):
    tf.while_loop(lambda i: i < tf.shape(x)[0], lambda i: (model.number.value.assign_add(1.0), i + 1)[1], [0])


def by_way_of_another(model, x, logs):
    model.centre.assign(model.centre + model.number)
    model.seen.update_state(x)
    model.number.assign(model.seen.result())


def by_its_gradient(model, x, logs):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model.score(x))
    model.score.kernel.assign_sub(tape.gradient(loss, model.score.kernel.value))


KEPT = {
    "a centre": lambda model, x, logs: model.centre.assign(tf.reduce_mean(x, axis=0)),
    "a running mean": lambda model, x, logs: model.centre.assign(0.9 * model.centre + 0.1 * tf.reduce_mean(x, axis=0)),
    "how many": lambda model, x, logs: model.number.assign_add(tf.cast(tf.shape(x)[0], tf.float32)),
    "the loss shown": lambda model, x, logs: model.number.assign(logs["loss"]),
    "a weight of its own": lambda model, x, logs: model.score.bias.assign(tf.reduce_mean(x, axis=0)[:1]),
    "a row of it": lambda model, x, logs: model.centre.value.scatter_nd_update([[0]], x[0, :1]),
    "a lookup table": lambda model, x, logs: model.table.insert(tf.constant([1], tf.int64), x[0, :1]),
    "a generator": lambda model, x, logs: model.generator.skip(tf.cast(x[0, 0] * 1e6, tf.int64)),
    "a file": lambda model, x, logs: tf.io.write_file(os.devnull, tf.strings.as_string(x[0, 0])),
    "a printed file": lambda model, x, logs: tf.print(x[0], output_stream=f"file://{os.devnull}"),
    "Python": lambda model, x, logs: tf.py_function(lambda x: None, [x], []),
    "a branch": in_a_branch,
    "a function": in_a_function,
    "a loop": as_often_as_there_are_examples,
    "a variable between": by_way_of_another,
    "a step of its own": by_its_gradient,
}


@pytest.fixture(scope="module")
def trained():
    """A model that keeps nothing, after a step; with another `keeps`, its step alone is traced anew."""
    model = compiled(lambda model, x, logs: None)
    model.fit(X, Y, verbose=0)
    return model


@pytest.mark.slow_cases("a running mean", "how many", "the loss shown", "a function", "a loop", "a step of its own")
@pytest.mark.parametrize("way", KEPT)
def test_a_step_that_keeps_something_of_its_batch_is_refused(way, trained):
    trained.keeps = KEPT[way]
    trained.make_train_function(force=True)
    with pytest.raises(NotPrivate, match="past the clip and the noise"):
        trained.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), verbose=0)  # whose length no graph knows
    assert int(trained.optimizer.iterations) == 1


def test_the_refusal_names_the_variable_and_the_line_before_the_first_step():
    model = compiled(KEPT["a centre"])
    with pytest.raises(NotPrivate, match=r"'.*centre' .*test_overridden_steps.py:\d+"):
        model.fit(X, Y, verbose=0)
    assert int(model.optimizer.iterations) == 0


def moving_average(model, x, logs):
    model.centre.assign(0.9 * model.centre + 0.1 * model.score.kernel[:, 0])
    model.number.assign_add(1.0)
    model.seen.update_state(x)


@pytest.mark.slow
def test_averages_of_weights_and_counts_of_steps_may_be_kept_and_metrics_too():
    model = compiled(moving_average)
    model.fit(X, Y, epochs=2, verbose=0)
    assert np.any(model.centre != 0) and model.number == 2 and model.seen.result() == 0  # emptied at the end of fit


def test_a_step_that_is_run_eagerly_is_not_read_and_so_refused():
    with pytest.raises(NotPrivate, match="run_eagerly"):
        compiled(moving_average, run_eagerly=True).train_on_batch(X, Y)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("method", ["test_step", "predict_step"])
def test_what_any_step_keeps_is_read(method, run_eagerly):
    def keeping(model, *data):
        given = getattr(tfdp_rec.PrivateModel, method)(model, *data)
        model.centre.assign(tf.reduce_mean(tf.nest.flatten(data)[0], axis=0))
        return given

    model = model_of(kind=type("Keeping", (tfdp_rec.PrivateModel,), {method: keeping}), run_eagerly=run_eagerly)
    model.centre = model.add_weight(shape=[3], initializer="zeros", trainable=False, name="centre")
    run = {"test_step": model.test_on_batch, "predict_step": model.predict_on_batch}
    with pytest.raises(NotPrivate, match=f"{method} gives '.*centre'"):
        run[method](*((X,) if method == "predict_step" else (X, Y)))
    assert not np.any(model.centre)


class KeepsAtRest(keras.layers.Layer):
    """A layer that keeps a row whenever it does not train: the reading of the loss does not see that."""

    def build(self, shape):
        self.bank = self.add_weight(shape=[3], initializer="zeros", trainable=False, name="bank")

    def call(self, x, training=False):
        if not training:
            self.bank.assign(x[0])
        return x


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("way", ["evaluate", "predict", "predict_on_batch", "validation", "call"])
def test_what_a_model_keeps_of_data_that_it_does_not_train_on_is_read(way, run_eagerly):
    """Under run_eagerly=True nothing read it."""
    model = model_of(layer := KeepsAtRest(), keras.layers.Dense(1), run_eagerly=run_eagerly)
    run = {
        "evaluate": lambda: model.evaluate(X, Y, verbose=0),
        "predict": lambda: model.predict(X, verbose=0),
        "predict_on_batch": lambda: model.predict_on_batch(X),
        "validation": lambda: model.fit(X, Y, validation_data=(X, Y), verbose=0),
        "call": lambda: model(X),
    }
    with pytest.raises(NotPrivate, match="bank'"):
        run[way]()
    assert not np.any(layer.bank)


def test_numbers_may_be_shown_on_the_screen(capfd):
    model = compiled(lambda model, x, logs: tf.print("a row", x[0, 0]))
    model.train_on_batch(X, Y)
    assert "a row" in capfd.readouterr().err


def test_metrics_that_are_computed_eagerly_are_not_read_and_so_refused():
    class Counting(tfdp_rec.PrivateModel):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.total.assign(tf.reduce_sum(x))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    model = model_of(kind=Counting, run_eagerly=True)
    model.total = model.add_weight(shape=[], initializer="zeros", trainable=False, name="total")
    with pytest.raises(NotPrivate, match="overrides compute_metrics.*run_eagerly"):
        model.train_on_batch(X, Y)
    assert float(model.total) == 0.0


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_batches_that_are_padded_to_their_longest_row_are_refused_by_hand_too(run_eagerly):
    inputs = keras.Input([None], dtype="int32")
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(10, 2)(inputs))
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(pooled))
    model.compile(optimizer_of(batch=8, kind=tfdp_rec.LazyDPSGD), loss="mse", run_eagerly=run_eagerly)
    model.train_on_batch(np.ones([8, 5], np.int32), Y)
    model.train_on_batch(np.ones([3, 5], np.int32), Y[:3])
    with pytest.raises(NotPrivate, match="Pad all batches to one length"):
        model.train_on_batch(np.ones([8, 4], np.int32), Y)


def test_a_loop_of_ones_own_over_the_train_step_is_read():
    step = tf.function(compiled(KEPT["a centre"]).train_step, autograph=False)
    with pytest.raises(NotPrivate, match="centre"):
        step((tf.constant(X), tf.constant(Y)))


def test_an_ordinary_optimizer_keeps_what_it_likes():
    model = compiled(KEPT["a centre"])
    model.compile("sgd", loss="mse")
    model.train_on_batch(X, Y)
    np.testing.assert_allclose(model.centre, X.mean(0), rtol=1e-5)


@pytest.mark.fast_cases("LazyDPSGD")
@pytest.mark.parametrize("kind", [tfdp_rec.DPSGD, tfdp_rec.EANA, tfdp_rec.LazyDPSGD])
def test_a_step_by_hand_is_this_packages_own(kind):
    """Rows that are paid, written and counted: all of that depends on the batch, and has its noise."""
    seeding.seed(0)
    ids = keras.Input([2], dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(ids))

    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(rows))
    model.compile(optimizer_of(batch=8, kind=kind), loss="mse")

    @functools.partial(tf.function, autograph=False)
    def step(*data):
        model.prepare(data)
        model.optimizer.apply(tfdp_rec.clipping.clipped_sum(model, data, l2_norm_clip=1.0))

    for _ in range(2):
        step(tf.constant(RNG.integers(0, 9, [8, 2]), tf.int32), tf.constant(Y))
    assert int(model.optimizer.iterations) == 2


# What predictions depend on.


class Centred(keras.layers.Layer):
    """Takes off the mean of what it was trained on."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x, training=False):
        if training:
            self.mean.update_state(x)
            return x
        return x - self.mean.result()


class TiesAtRandom(keras.metrics.Mean):
    """Like the rankings of keras-rs, in that it draws."""

    def __init__(self):
        super().__init__(name="ties")
        self.seed_generator = keras.random.SeedGenerator(1)

    def update_state(self, values):
        return super().update_state(values + keras.random.uniform(tf.shape(values), seed=self.seed_generator))


class Counted(tfdp_rec.PrivateModel):
    def __init__(self):
        super().__init__()
        self.dense, self.ties = keras.layers.Dense(1), TiesAtRandom()

    def call(self, x):
        return self.dense(x)

    def per_example_loss(self, data, training=True):
        losses = tf.square(self(data[0])[:, 0])
        self.ties.update_state(losses)
        return losses


def test_a_metric_of_the_loss_may_draw():
    model = Counted()
    model.compile(optimizer_of(batch=8))
    before = int(model.ties.seed_generator.state[0])
    for _ in range(2):
        logs = model.train_on_batch(X, Y, return_dict=True)
    assert int(model.optimizer.iterations) == 2 and logs["ties"] > 0
    assert int(model.ties.seed_generator.state[0]) != before  # secret, as those of layers


@pytest.fixture(scope="module")
def centred():
    model = model_of(Centred(), keras.layers.Dense(1))
    model.train_on_batch(X, Y)
    return model


PREDICTIONS = {
    "predict": lambda model, folder: model.predict(X, verbose=0),
    "call": lambda model, folder: model(X),
    "evaluate": lambda model, folder: model.evaluate(X, Y, verbose=0),
    "export": lambda model, folder: model.export(folder / "servable", verbose=False),
    "tf.function": lambda model, folder: tf.function(model, autograph=False)(X),
}


@pytest.mark.parametrize("way", PREDICTIONS)
def test_a_prediction_from_a_metric_is_refused(way, tmp_path, centred):
    with pytest.raises(NotPrivate, match="one of its metrics"):
        PREDICTIONS[way](centred, tmp_path)


def test_a_prediction_from_a_metric_that_was_given_to_compile_is_refused():
    seen = keras.metrics.MeanSquaredError()

    class Shifted(keras.layers.Layer):
        def call(self, x, training=False):
            return x if training else x + seen.result()

    model = model_of(keras.layers.Dense(1), Shifted(), metrics=[seen])
    model.train_on_batch(X, Y)
    for predict in (model, functools.partial(model.predict, verbose=0)):
        with pytest.raises(NotPrivate, match="one of its metrics"):
            predict(X)


def test_a_metric_that_joins_later_is_looked_for_again():
    late = []

    class Shifted(keras.layers.Layer):
        def call(self, x, training=False):
            return x + late[0].result() if late and not training else x

    model = model_of(keras.layers.Dense(1), Shifted(), metrics=["mae"])
    model(X)
    late.append(keras.metrics.MeanSquaredError())
    model.compile(model.optimizer, loss="mse", metrics=late)
    with pytest.raises(NotPrivate, match="one of its metrics"):
        model(X)


@pytest.mark.slow
def test_a_metric_that_is_counted_beside_a_prediction_is_not_read_for_it():
    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean(name="mean")

        def call(self, x):
            self.mean.update_state(x)
            return x

    model = model_of(Counting(), keras.layers.Dense(1))
    model.fit(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == model(X).shape == (8, 1)


@pytest.mark.parametrize("own_loss", [True, False])
def test_a_metrics_property_that_hides_keras_own_is_told_what_to_do(own_loss):
    """What it said before, that train_step gives a variable something, was about no line of the user's."""

    class Hiding(tfdp_rec.PrivateModel):
        def __init__(self):
            super().__init__()
            self.score, self.loss_tracker = keras.layers.Dense(1), keras.metrics.Mean(name="loss")

        def call(self, x):
            return self.score(x)

        @property
        def metrics(self):
            return [self.loss_tracker]

    class WithALoss(Hiding):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            loss = keras.ops.mean(keras.ops.square(y - y_pred))
            self.loss_tracker.update_state(loss)
            return loss

    model = (WithALoss if own_loss else Hiding)()
    model.compile(optimizer_of(batch=8), None if own_loss else "mse")
    line = Hiding.metrics.fget.__code__.co_firstlineno
    match = rf"overrides metrics in [^ ]*test_overridden_steps.py:{line}, and hides Keras' own.*Leave the property out"
    with pytest.raises(NotPrivate, match=match) as caught:
        model.fit(X, Y, verbose=0)
    assert len(str(caught.value)) < 500
    with pytest.raises(NotPrivate, match="overrides metrics"):  # before any step
        model.prepare((X, Y))
    assert any("overrides metrics" in each for each in tfdp_rec.validate(model, (X, Y)).refusals)


def test_a_metrics_property_that_shows_keras_own_is_taken():
    class Showing(tfdp_rec.PrivateModel):
        @property
        def metrics(self):
            return super().metrics[::-1]

    model = model_of(kind=Showing, metrics=["mae"])
    assert {"loss", "mae"} <= set(model.fit(X, Y, verbose=0).history)


# Parts of a batch, in which layers draw as often as there are parts.


def in_parts(kind=tfdp_rec.PrivateModel, layer=keras.layers.Dropout):
    return model_of(layer(0.5, name="random"), keras.layers.Dense(1), kind=kind, microbatch_size=2)


@pytest.mark.slow
def test_layers_of_parts_may_draw_and_leave_secret_seeds():
    model = in_parts()
    model.fit(X, Y, batch_size=5, verbose=0)
    assert int(model.optimizer.iterations) == 2
    state = model.get_layer("random").seed_generator.state.numpy()
    model.train_on_batch(X, Y)
    assert int(state[1]) > 10 and not set(state.tolist()) & set(model.get_layer("random").seed_generator.state.numpy())


class Counting(keras.layers.Dropout):
    """Counts its calls, which are as many as a batch has parts."""

    def build(self, shape):
        super().build(shape)
        self.calls = self.add_weight(shape=[], initializer="zeros", trainable=False, name="calls", dtype="int32")

    def call(self, inputs, training=False):
        self.calls.assign_add(1)
        return super().call(inputs, training=training)


def test_a_count_of_the_parts_is_refused():
    with pytest.raises(NotPrivate, match="calls"):
        in_parts(layer=Counting).fit(X, Y, batch_size=5, verbose=0)


def test_under_logs_of_the_users_own_nothing_of_parts_may_be_drawn():
    class Own(tfdp_rec.PrivateModel):
        def get_metrics_result(self):
            return super().get_metrics_result()

    with pytest.raises(NotPrivate, match="seed_generator"):
        in_parts(Own).fit(X, Y, batch_size=5, verbose=0)
