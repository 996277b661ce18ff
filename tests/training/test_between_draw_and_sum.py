"""Programs between the draw of a batch and its clipped sum that mix its examples, or let them choose.

Each is refused before a step is made, or by brute force moves the sum by no more than C when one unit's loss is taken
away.
"""

import functools

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.data import PoissonSampling, lookahead
from tfdp_rec.privacy import Accountant

UNITS, CLIP = 8, 0.5
RNG = np.random.default_rng(4)
X = RNG.normal(size=[UNITS, 3]).astype("float32")
X[3] *= 100.0
Y = RNG.normal(size=[UNITS, 1]).astype("float32")
REFUSALS = (tfdp_rec.NotPrivate, TypeError, ValueError)


def fetch(indices):
    return X[indices], Y[indices]


def mechanism(**settings):
    settings = {"noise_multiplier": 1.0, **settings}
    return tfdp_rec.DPSGD(1.0, l2_norm_clip=CLIP, expected_batch_size=UNITS, **settings)


def model_of(kind=tfdp_rec.PrivateModel, layer=None, loss="mse", compiled=True, **options):
    seeding.seed(0)
    inputs = keras.Input([3])
    hidden = inputs if layer is None else layer(inputs)
    model = kind(inputs, keras.layers.Dense(1, name="score")(hidden))
    if compiled:
        model.compile(mechanism(), loss, **options)
    return model


def drawn(**options):
    return PoissonSampling(UNITS, UNITS).batches(fetch, **options)


def fitted(model, data=None, callbacks=(), steps=2, **options):
    model.fit(drawn() if data is None else data, steps_per_epoch=steps, verbose=0, callbacks=list(callbacks), **options)
    return model


def overriding(**methods):
    return type("Own", (tfdp_rec.PrivateModel,), methods)


# A train step of the user's own.


def around(change):
    """A model whose train step gives another batch to the private one."""

    def train_step(self, data):
        return tfdp_rec.PrivateModel.train_step(self, type(data)(change(*data.batch), data.draw))

    return lambda: fitted(model_of(overriding(train_step=train_step)))


def in_batch_items(x, y):
    return tf.concat([x, tf.broadcast_to(y[:1], tf.shape(y))], 1)[:, 1:], y


def deciding(self, data):
    step = lambda: {"loss": tfdp_rec.PrivateModel.train_step(self, data)["loss"]}  # noqa: E731
    return tf.cond(tf.reduce_mean(data.batch[0]) > 0.1, step, lambda: {"loss": 0.0})


def repeating(self, data):
    step = lambda i: (tfdp_rec.PrivateModel.train_step(self, data), i + 1)[1]  # noqa: E731
    tf.while_loop(lambda i: i < tf.cast(tf.reduce_max(data.batch[0]), tf.int32), step, [0])
    return {}


def returning_early(self, data):
    if tf.executing_eagerly() and float(tf.reduce_mean(data.batch[0])) > 0.1:
        return {}
    return tfdp_rec.PrivateModel.train_step(self, data)


@functools.wraps(tfdp_rec.PrivateModel.train_step)
def disguised(self, data):
    x, y = data.batch
    return tfdp_rec.PrivateModel.train_step(self, data._replace(batch=(x - tf.reduce_mean(x, 0), y)))


def kerass_own(self, data):
    return keras.Model.train_step(self, data.batch)


def assigned(name, value, first=False):
    def run():
        model = model_of(compiled=False)
        if first:
            setattr(model, name, value)
        model.compile(mechanism(), "mse")
        if not first:
            setattr(model, name, value)
        fitted(model)

    return run


def own_function(self, force=False):
    self.train_function = lambda iterator: tfdp_rec.PrivateModel.train_step(self, next(iterator))


def assigned_by_compile(self, *args, **options):
    tfdp_rec.PrivateModel.compile(self, *args, **options)
    self.train_step = lambda data: {}


class Mixin:
    def train_step(self, data):
        return super().train_step(data._replace(batch=(data.batch[0][::-1], data.batch[1])))


def made_private():
    model = overriding(train_step=lambda self, data: super(type(self), self).train_step(data))
    model = model_of(model, compiled=False)
    model.compile("sgd", "mse")
    tfdp_rec.make_private(model, (X, Y), epsilon=3.0, batch_size=2, epochs=1, unit=np.arange(UNITS) // 2)


def on_a_batch(train_step):
    return lambda: model_of(overriding(train_step=train_step)).train_on_batch(next(iter(drawn())))


STEPS = {
    "centred": around(lambda x, y: (x - tf.reduce_mean(x, 0), y)),
    "mixup": around(lambda x, y: (0.5 * x + 0.5 * x[::-1], 0.5 * y + 0.5 * y[::-1])),
    "everybody's target is the first one's": around(lambda x, y: (x, tf.zeros_like(y) + y[:1])),
    "weights by the batch's rate": around(lambda x, y: (x, y, y / tf.reduce_mean(y))),
    "items of the batch": around(in_batch_items),
    "a step if the batch says so": lambda: fitted(model_of(overriding(train_step=deciding))),
    "as many steps as the batch says": lambda: fitted(model_of(overriding(train_step=repeating))),
    "an early return": lambda: fitted(model_of(overriding(train_step=returning_early), run_eagerly=True)),
    "disguised": lambda: fitted(model_of(overriding(train_step=disguised))),
    "Keras' own": lambda: fitted(model_of(overriding(train_step=kerass_own))),
    "Keras' own, by hand": lambda: keras.Model.train_step(model_of(), fetch(np.arange(UNITS))),
    "assigned to the instance before compile": assigned("train_step", lambda data: {}, first=True),
    "assigned to the instance after compile": assigned("train_step", lambda data: {}),
    "assigned by compile": lambda: fitted(model_of(overriding(compile=assigned_by_compile))),
    "make_train_function": lambda: fitted(model_of(overriding(make_train_function=own_function))),
    "make_train_function, assigned": assigned("make_train_function", lambda force=False: None),
    "train_function, assigned": assigned("train_function", lambda iterator: {}),
    "a class in front": lambda: fitted(model_of(type("Own", (Mixin, tfdp_rec.PrivateModel), {}))),
    "make_private with users": made_private,
    "train_on_batch": on_a_batch(deciding),
}


@pytest.mark.parametrize("program", STEPS)
def test_a_step_of_ones_own_is_refused(program):
    with pytest.raises(REFUSALS) as caught:
        STEPS[program]()
    told = str(caught.value)
    if program != "Keras' own, by hand":  # whose gradients no private step has made
        assert "per_example_loss" in told and "compute_metrics" in told and "map=" in told


def test_the_refusal_of_a_step_names_the_users_line():
    line = deciding.__code__.co_firstlineno
    with pytest.raises(tfdp_rec.NotPrivate, match=rf"train_step of its own in .*test_between_draw_and_sum.py:{line}"):
        model_of(overriding(train_step=deciding))


def test_under_an_ordinary_optimizer_a_step_is_the_users_own():
    seen = []
    model = model_of(overriding(train_step=lambda self, data: seen.append(data) or {"loss": 0.0}), compiled=False)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="not private"):
        model.fit(X, Y, verbose=0)
    assert seen
    with pytest.raises(tfdp_rec.NotPrivate, match="train_step of its own"):
        model.compile(mechanism(), "mse")


# map=.

SEEN = keras.metrics.Mean()
STATE = tf.Variable(tf.zeros([3]))
TABLE = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
CHANCE = tf.random.Generator.from_seed(1)


def python_if(x, y):
    if tf.reduce_mean(x) > 0:
        x = -x
    return x, y


def as_often_as_they_say(x, y):
    turns = tf.cast(tf.reduce_max(x), tf.int32)
    return tf.while_loop(lambda i, x: i < turns, lambda i, x: (i + 1, 1.1 * x), [0, x])[1], y


@tf.function
def in_a_function(x, y):
    return x - tf.reduce_mean(x, 0), y


def within(run, x):
    return tf.ensure_shape(run(lambda x: x - np.mean(x, 0), [x], tf.float32), [None, 3])


def checked(x, y):
    tf.debugging.assert_less(x, 50.0)
    return x, y


MAPS = {
    "centred": lambda x, y: (x - tf.reduce_mean(x, 0), y),
    "centred in a function": in_a_function,
    "normalised": lambda x, y: (tf.nn.batch_normalization(x, *tf.nn.moments(x, [0]), None, None, 1e-3), y),
    "targets reversed": lambda x, y: (x, tf.reverse(y, [0])),
    "rolled": lambda x, y: (tf.roll(x, 1, 0), y),
    "shuffled": lambda x, y: (tf.random.shuffle(x), y),
    "with replacement": lambda x, y: (tf.gather(x, CHANCE.uniform(tf.shape(x)[:1], 0, 2, tf.int32)), y),
    "in order": lambda x, y: (tf.gather(x, tf.argsort(x[:, 0])), y),
    "the first one's target": lambda x, y: (x, tf.zeros_like(y) + y[:1]),
    "by their number": lambda x, y: (x / tf.cast(tf.shape(x)[0], tf.float32), y),
    "items of the batch": lambda x, y: (x, tf.tile(y[None, :, 0], [tf.shape(y)[0], 1])),
    "a branch": lambda x, y: tf.cond(tf.reduce_mean(x) > 0, lambda: (x, y), lambda: (-x, y)),
    "an if": python_if,
    "a loop": as_often_as_they_say,
    "Python": lambda x, y: (within(tf.py_function, x), y),
    "NumPy": lambda x, y: (within(tf.numpy_function, x), y),
    "a metric is counted": lambda x, y: (SEEN.update_state(x), (x, y))[1],
    "a metric is read": lambda x, y: (x - SEEN.result(), y),
    "a variable is written": lambda x, y: (STATE.assign(tf.reduce_mean(x, 0)), (x, y))[1],
    "a variable is read": lambda x, y: (x - STATE, y),
    "a table is filled": lambda x, y: (TABLE.insert(tf.constant([1], tf.int64), x[0, :1]), (x, y))[1],
    "an assertion": checked,
    "an assertion by the operation": lambda x, y: (tf.raw_ops.Assert(condition=x[0, 0] < 9.0, data=["x"]), (x, y))[1],
    "numbers that must be numbers": lambda x, y: (tf.debugging.check_numerics(x, "x"), y),
    "rows left out": lambda x, y: (tf.boolean_mask(x, y[:, 0] > 0), tf.boolean_mask(y, y[:, 0] > 0)),
    "rows of no unit": lambda x, y: (x, tf.zeros([UNITS, 1])),
    "printed": lambda x, y: (tf.print(x), (x, y))[1],
}


@pytest.mark.parametrize("program", MAPS)
def test_a_map_that_mixes_or_chooses_is_refused(program):
    with pytest.raises(tfdp_rec.NotPrivate) as caught:
        drawn(map=MAPS[program])
    if "variable" not in str(caught.value) and "longest example" not in str(caught.value):
        assert "test_between_draw_and_sum.py:" in str(caught.value), caught.value


@pytest.mark.slow
def test_rows_that_fetch_made_for_all_are_no_rows_for_a_map():
    """A graph's fetch that gives one row for the whole batch, which a map would lay out for each unit."""
    rows = lambda units: (tf.gather(X, units), tf.reduce_mean(tf.gather(Y, units), 0, keepdims=True))  # noqa: E731
    batches = PoissonSampling(UNITS, UNITS).graph_batches(rows, map=lambda x, y: (x, y + tf.zeros_like(x[:, :1])))
    with pytest.raises(REFUSALS, match="one row"):
        fitted(model_of(), batches)


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_a_map_of_rows_that_are_several_tensors_is_refused(kind):
    """Read leaf by leaf, the numbers of a sparse column stood where what the batch shares was expected."""

    def fetch(units):
        rows = tf.RaggedTensor.from_tensor(tf.gather(X, units)[:, :1])
        return {"a": rows if kind == "ragged" else rows.to_sparse()}

    def change(batch):
        rows = batch["a"]
        column = rows.values[:, None] if kind == "ragged" else tf.cast(rows.indices[:, 1:], tf.float32)
        return {"x": column + (tf.reduce_sum(rows.values) if kind == "sparse" else 0.0)}

    with pytest.raises(tfdp_rec.NotPrivate, match=f"(?i){kind}tensor"):
        PoissonSampling(UNITS, UNITS).graph_batches(fetch, map=change, shared=lambda: {"n": tf.zeros([4])})


ROW_BY_ROW = {
    "scaled": lambda x, y: (2.0 * x, y),
    "labels": lambda x, y: (x, tf.where(y > 0, 1.0, 0.0)),
    "a weight": lambda x, y: (x, y, tf.ones_like(y[:, 0])),
    "looked up": lambda x, y: (tf.gather(tf.constant(X), tf.cast(tf.abs(y[:, 0]), tf.int32)), y),
    "functions of the row": lambda x, y: (tf.stack([x[:, 0], tf.reduce_max(x, 1), tf.math.sin(x[:, 2])], 1), y),
}


@pytest.mark.parametrize("program", ROW_BY_ROW)
def test_a_map_row_by_row_is_taken(program):
    found = next(iter(drawn(map=ROW_BY_ROW[program])))
    assert all(len(tensor) == int(found.draw.size) for tensor in found.batch)


def test_a_map_may_take_the_labels_out_of_its_batch():
    def labelled(batch):
        y = batch.pop("y")
        return batch, y

    batches = PoissonSampling(UNITS, UNITS).batches(lambda i: {"x": X[i], "y": Y[i]}, map=labelled)
    x, y = next(iter(batches)).batch
    assert list(x) == ["x"] and len(y) == UNITS


# Dataset.map and the like, after sampling.

AFTER = {
    "map": lambda data: data.map(lambda drawn: drawn),
    "map in parallel": lambda data: data.map(lambda drawn: drawn, num_parallel_calls=2),
    "map that mixes": lambda data: data.map(centred),
    "filter": lambda data: data.filter(lambda drawn: tf.reduce_mean(drawn.batch[0]) > 0),
    "map and prefetch": lambda data: data.map(centred).prefetch(1).take(3),
}


def centred(drawn):
    x, y = drawn.batch
    return drawn._replace(batch=(x - tf.reduce_mean(x, 0), y))


@pytest.mark.parametrize("program", AFTER)
def test_a_dataset_that_is_changed_after_sampling_is_refused(program):
    model = model_of()
    with pytest.raises(REFUSALS, match="after sampling.*map=function"):
        fitted(model, AFTER[program](drawn()))
    with pytest.raises(REFUSALS, match="after sampling.*map=function"):
        lookahead(AFTER[program](drawn()), model)
    assert int(model.optimizer.iterations) == 0


def test_a_map_after_look_ahead_is_refused():
    model = model_of()
    with pytest.raises(REFUSALS, match="went through Map after sampling"):
        fitted(model, lookahead(drawn(), model).map(lambda ahead: ahead._replace(batch=centred(ahead.batch))))


# Losses, layers, metrics and callbacks.


class Applied(keras.layers.Layer):
    """A layer that does with its input what a function says."""

    def __init__(self, function, **state):
        super().__init__(name="applied")
        self.function = function
        self.seen = self.add_weight(shape=[3], initializer="zeros", trainable=False, name="seen")
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x, training=False):
        return self.function(self, x, training)


def layer(function):
    return lambda: fitted(model_of(layer=Applied(function)))


def written(self, x, training):
    self.seen.assign(tf.reduce_mean(x, 0))
    return x


def asserted(self, x, training):
    tf.debugging.assert_less(x, 50.0)
    return x


def asserted_barely(self, x, training):
    tf.raw_ops.Assert(condition=tf.reduce_all(x < 50.0), data=["a row is too large"])
    return x


def counted(metric):
    return lambda: fitted(model_of(metrics=[metric]))


class Asserts(keras.metrics.MeanSquaredError):
    def update_state(self, y, y_pred, sample_weight=None):
        tf.debugging.assert_less(tf.reduce_max(y_pred), 50.0)
        return super().update_state(y, y_pred, sample_weight)


class Keeps(keras.metrics.MeanSquaredError):
    def update_state(self, y, y_pred, sample_weight=None):
        STATE.assign(tf.zeros([3]) + tf.reduce_mean(y))
        return super().update_state(y, y_pred, sample_weight)


class Calls(keras.metrics.MeanSquaredError):
    def update_state(self, y, y_pred, sample_weight=None):
        tf.py_function(lambda y: None, [y], [])
        return super().update_state(y, y_pred, sample_weight)


def budgeted(*callbacks, data=None, **options):
    model, sampling = model_of(), PoissonSampling(UNITS, UNITS)
    budget = PrivacyBudget(Accountant(model.optimizer.dp_event(), sampling, 1e-2, "rdp"), 1e3)
    fitted(model, sampling.batches(fetch) if data is None else data, [*callbacks, budget], **options)


def mixing_fit(self, x, *args, **options):
    return tfdp_rec.PrivateModel.fit(self, x.map(centred), *args, **options)


def generated():
    for _ in range(4):
        yield X - X.mean(0), Y


def nested():
    inputs = keras.Input([3])
    inner = keras.Model(inputs, Applied(lambda self, x, training: (self.mean.update_state(x), x)[1])(inputs))
    inner.kept = keras.metrics.Mean(name="kept")
    call = inner.call
    inner.call = lambda x, **options: (inner.kept.update_state(x), call(x))[1]
    return fitted(model_of(layer=inner))


OTHERS = {
    "a loss of the whole batch": lambda: fitted(model_of(loss=lambda y, p: tf.square(y - p) / tf.reduce_mean(y))),
    "a loss that reads another row": lambda: fitted(model_of(loss=lambda y, p: tf.square(y - tf.roll(p, 1, 0)))),
    "a layer that centres": layer(lambda self, x, training: x - tf.reduce_mean(x, 0)),
    "a layer that branches": layer(lambda self, x, training: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x)),
    "a layer that keeps a mean": layer(written),
    "a layer that asserts": layer(asserted),
    "a layer that asserts by the operation": layer(asserted_barely),
    "a layer that checks its numbers": layer(lambda self, x, training: tf.debugging.check_numerics(x, "x")),
    "a layer that reads its metric": layer(lambda self, x, training: x - self.mean.result()),
    "a metric of a model within": nested,
    "BatchNormalization": lambda: fitted(model_of(layer=keras.layers.BatchNormalization())),
    "a metric that asserts": counted(Asserts()),
    "a metric that writes elsewhere": counted(Keeps()),
    "a metric that calls Python": counted(Calls()),
    "EarlyStopping by the loss": lambda: budgeted(keras.callbacks.EarlyStopping(monitor="loss")),
    "TerminateOnNaN": lambda: budgeted(keras.callbacks.TerminateOnNaN()),
    "a rate by the loss": lambda: budgeted(keras.callbacks.ReduceLROnPlateau(monitor="loss")),
    "class weights": lambda: budgeted(class_weight={0: 1.0, 1: 2.0}),
    "a generator": lambda: budgeted(data=generated()),
    "a fit that maps": lambda: fitted(model_of(overriding(fit=mixing_fit))),
}


@pytest.mark.parametrize("program", OTHERS)
def test_other_ways_to_mix_or_choose_are_refused(program):
    with pytest.raises(REFUSALS):
        OTHERS[program]()


# Harmless by brute force.


def moved(model, **options):
    """The largest move of the clipped sum of a step, in C, when the loss of one unit is zero."""
    start, sums, weights = model.get_weights(), [], np.ones([UNITS], np.float32)
    data = PoissonSampling(UNITS, UNITS).batches(lambda i: (X[i], Y[i], weights[i]))
    for without in range(-1, UNITS):
        weights[:] = np.arange(UNITS) != without
        model.set_weights(start)
        fitted(model, data, steps=1, **options)
        sums.append(np.concatenate([(a - b).ravel() for a, b in zip(start, model.get_weights())]) * UNITS)
    return max(np.linalg.norm(one - sums[0]) for one in sums[1:]) / CLIP / (int(model.optimizer.iterations) / len(sums))


def quiet(layer=None, kind=tfdp_rec.PrivateModel, **options):
    model = model_of(kind, layer, compiled=False)
    model.compile(mechanism(noise_multiplier=1e-6), options.pop("loss", "mse"), **options)
    return model


class Switched(tfdp_rec.PrivateModel):
    """Its figures are chosen by the batch."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return tf.cond(tf.reduce_mean(x) > 0, lambda: logs, lambda: {key: -value for key, value in logs.items()})


class Meddling(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        logs.clear()


class Unlike(tfdp_rec.PrivateModel):
    """Its loss is nothing but numbers that are not finite for one unit."""

    def per_example_loss(self, data, training=True):
        x, y, weights = data
        losses = tf.square(y - self(x, training=training))[:, 0]
        return weights * tf.where(x[:, 0] > 20.0, losses / 0.0, losses)


def remembering(self, x, training):
    self.last = x
    return x


def shown(self, x, training):
    self.mean.update_state(x)
    return x if training else x - self.mean.result()


HARMLESS = {
    "figures by the batch": lambda: moved(quiet(kind=Switched)),
    "a callback that empties the logs": lambda: moved(quiet(), callbacks=[Meddling()]),
    "two steps at once": lambda: moved(quiet(steps_per_execution=2)),
    "eagerly": lambda: moved(quiet(run_eagerly=True)),
    "a loss that is not finite": lambda: moved(quiet(kind=Unlike, loss=None)),
    "a layer with an attribute": lambda: moved(quiet(layer=Applied(remembering))),
    "a layer that shows its metric": lambda: moved(quiet(layer=Applied(shown))),
    "a sum, and not a mean": lambda: moved(quiet(loss=keras.losses.MeanSquaredError(reduction="sum"))),
}


@pytest.mark.fast_cases("a layer with an attribute")
@pytest.mark.parametrize("program", HARMLESS)
def test_a_program_that_is_taken_moves_the_sum_by_no_more_than_the_clip(program):
    found = HARMLESS[program]()
    print(f"{program}: {found:.4f} C")
    assert (program == "a loss that is not finite" or found > 0.5) and found <= 1.0 + 1e-4


@pytest.mark.slow
def test_the_brute_force_notices_what_mixes(monkeypatch):
    """With the refusal taken away: a step that takes off the batch's mean."""

    def train_step(self, data):
        x, y, weights = data.batch.batch  # within the look-ahead
        changed = data.batch._replace(batch=(x - tf.reduce_mean(x * weights[:, None], 0), y, weights))
        return tfdp_rec.PrivateModel.train_step(self, data._replace(batch=changed))

    monkeypatch.setattr("tfdp_rec.training.model.refuse_own_step", lambda model, base: None)
    assert moved(quiet(kind=overriding(train_step=train_step))) > 1.5


# What metrics of layers leave behind.


def part(model):
    """A plain model of an inner layer's output, which predicts the mean that the layer's metric holds."""
    return keras.Model(model.input, model.get_layer("applied").output)


def served(model, folder):
    part(model).export(folder / "part", verbose=False)
    found = tf.saved_model.load(folder / "part")
    return found.serve(np.zeros([1, 3], np.float32)).numpy()


class Keeping(keras.metrics.Mean):
    """A metric that its own reset does not empty."""

    def reset_state(self):
        pass


def showing(metric=None):
    inner = Applied(shown)
    inner.mean = metric or inner.mean
    return model_of(layer=inner)


def trained_twice(model):
    model.fit(X, Y, epochs=2, verbose=0)


def stopped_midway(model):
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / (batch - 1))
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, batch_size=2, verbose=0, callbacks=[stop])


TRAININGS = {
    "fit": trained_twice,
    "fit, ended by an error": stopped_midway,
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "evaluate": lambda model: model.get_layer("applied").mean.update_state(X),
}


@pytest.mark.fast_cases("Keeping-fit")
@pytest.mark.parametrize("way", ["fit", "fit, ended by an error", "train_on_batch", "test_on_batch"])
@pytest.mark.parametrize("metric", [None, Keeping])
def test_no_part_of_a_model_is_exported_with_the_mean_of_the_data(way, metric, tmp_path):
    model = showing(metric and metric(name="mean"))
    run = {**TRAININGS, "test_on_batch": lambda model: counted_in_evaluation(model)}[way]
    run(model)
    assert not np.any(served(model, tmp_path)) and not np.any(model.get_layer("applied").mean.total)


def counted_in_evaluation(model):
    model.get_layer("applied").function = lambda self, x, training: (self.mean.update_state(x), x)[1]
    model.test_on_batch(X, Y)
    model.evaluate(X, Y, verbose=0)
    model.get_layer("applied").function = shown


def test_at_the_end_of_an_epoch_callbacks_find_no_mean_of_the_data(tmp_path):
    found, model = [], showing()
    look = lambda epoch, logs: found.append((float(model.get_layer("applied").mean.total), logs["loss"]))  # noqa: E731
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=look)])
    assert [total for total, _ in found] == [0.0, 0.0]
    assert [loss for _, loss in found] == history.history["loss"] and all(loss > 0 for _, loss in found)


def test_a_file_that_is_written_within_an_epoch_holds_no_mean_of_the_data(tmp_path):
    model = showing(Keeping(name="mean"))

    def save(batch, logs):
        assert float(model.get_layer("applied").mean.total) != 0.0
        model.save_weights(tmp_path / "now.weights.h5")
        assert float(model.get_layer("applied").mean.total) == 0.0

    model.fit(X, Y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=save)])
    assert (tmp_path / "now.weights.h5").exists()
