"""One call from a Keras model to a private training: the same as by hand, and refused where it would not be."""

import os
import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp_rec

ROWS, ITEMS = 400, 30
IDS = np.random.default_rng(0).integers(0, ITEMS, ROWS)
Y = (IDS[:, None] / ITEMS).astype("float32")
SETTINGS = {"epsilon": 3.0, "batch_size": 100, "epochs": 2, "learning_rate": 0.5, "accountant": "rdp"}


def sequential(**compiled):
    model = keras.Sequential([layers.Embedding(ITEMS, 4), layers.Dense(1)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **compiled})
    return model


@pytest.mark.slow
def test_a_sequential_model_as_it_is():
    model = sequential()
    private = tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)
    history = private.fit(verbose=0, validation_data=(IDS, Y)).history
    optimizer = private.model.optimizer
    assert isinstance(optimizer, tfdp_rec.LazyDPSGD) and int(optimizer.iterations) == 8 == private.plan.steps
    assert optimizer.noise_multiplier == private.plan.noise_multiplier and optimizer.expected_batch_size == 100
    assert {"loss", "mae", "val_mae", "epsilon"} <= set(history)
    assert 2.9 < history["epsilon"][-1] <= 3.0
    assert private.plan.delta == 1e-4
    assert "8 steps of Gaussian noise" in " ".join(private.statement().split())
    np.testing.assert_array_equal(model.layers[0].get_weights()[0], private.model.layers[1].get_weights()[0])
    with pytest.raises(ValueError, match="budget"):
        private.fit(verbose=0)


@pytest.mark.slow
def test_the_plain_model_is_read_without_xla():
    """With a GPU, Keras compiles a model with XLA by itself, which drops the checks of a table's reads."""
    model = sequential()
    model.jit_compile = True  # as Keras sets it where there is a GPU
    before = model.evaluate(IDS, Y, verbose=0)
    private = tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)
    private.fit(verbose=0)
    assert model.evaluate(IDS, Y, verbose=0) != before and len(model.predict(IDS, verbose=0)) == ROWS
    with pytest.warns(UserWarning, match="not private"):
        model.fit(IDS, Y, verbose=0)


def test_users_give_one_of_their_rows_drawn_anew():
    users = np.array([f"user {n}" for n in np.arange(ROWS) % 150])
    labels, weights = np.arange(ROWS, dtype="float32")[:, None], np.arange(ROWS, dtype="float32")
    private = tfdp_rec.make_private(sequential(), (np.arange(ROWS), labels, weights), unit=users, **SETTINGS)
    sampling, seen = private.plan.sampling, {}
    assert (sampling.num_units, sampling.unit, private.steps_per_epoch) == (150, "user", 2)
    for drawn in private.batches.take(100):
        rows = drawn.batch[0].numpy()
        assert len(set(rows % 150)) == len(rows)  # no user twice
        assert all((part.numpy().reshape(-1) == rows).all() for part in drawn.batch[1:])  # of the same rows
        for row in rows:
            seen.setdefault(row % 150, set()).add(int(row))
    assert sum(map(len, seen.values())) == ROWS  # a row is missed by 100 batches once in 10^11


@pytest.mark.slow
def test_functional_models_and_their_nests():
    inputs = {"a": keras.Input([], dtype="int32", name="a"), "b": keras.Input([3], name="b")}
    joined = layers.Concatenate()([layers.Embedding(ITEMS, 4)(inputs["a"]), inputs["b"]])
    model = keras.Model(inputs, layers.Dense(1)(joined))
    model.compile(loss=keras.losses.Huber())
    data = {"a": IDS, "b": np.ones([ROWS, 3], "float32")}, Y, np.ones(ROWS, "float32")
    private = tfdp_rec.make_private(model, data, mechanism="DPSGD", delta=1e-5, momentum=0.5, **SETTINGS)
    private.fit(verbose=0, epochs=1, steps_per_epoch=2)
    assert int(private.model.optimizer.iterations) == 2 and private.model.optimizer.momentum == 0.5
    assert private.plan.delta == 1e-5
    assert private.model.predict({"a": IDS[:4], "b": data[0]["b"][:4]}, verbose=0).shape == (4, 1)


class Hinge(keras.losses.Loss):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.maximum(0.0, self.margin - y_true * y_pred), axis=-1)


class Sum(keras.metrics.Metric):
    def __init__(self, scale):
        super().__init__(name="sum")
        self.scale, self.total = scale, self.add_weight(initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(self.scale * keras.ops.sum(y_true))

    def result(self):
        return self.total


@pytest.mark.slow
@pytest.mark.parametrize("loss", [lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1), Hinge(0.5)])
def test_losses_and_metrics_of_ones_own(loss):
    def bias(y, p):
        return keras.ops.mean(p - y, axis=-1)

    private = tfdp_rec.make_private(sequential(loss=loss, metrics=[bias, Sum(2.0)]), (IDS, Y), **SETTINGS)
    history = private.fit(verbose=0, epochs=1, validation_data=(IDS, Y)).history
    assert {"bias", "val_bias"} <= set(history) and history["val_sum"][0] == pytest.approx(2 * Y.sum(), rel=1e-5)


def test_ids_of_a_sequential_model_stay_whole_numbers():
    private = tfdp_rec.make_private(sequential(), (IDS + 0, Y), **SETTINGS)
    assert private.model.inputs[0].dtype == "int64"  # float32 has no 2^24 + 1


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)


class OwnPrivate(tfdp_rec.PrivateTraining, Own):
    pass


def test_classes_of_ones_own():
    x = np.ones([ROWS, 2], "float32")
    model = OwnPrivate()
    model.compile("sgd", "mse")
    private = tfdp_rec.make_private(model, (x, Y), **SETTINGS)
    assert private.model is model and isinstance(model.optimizer, tfdp_rec.LazyDPSGD)
    with pytest.raises(TypeError, match="class Own\\(tfdp_rec.PrivateTraining, keras.Model\\)"):
        tfdp_rec.make_private(Own(), (x, Y), **SETTINGS)


def test_earlier_steps_are_spoken_of():
    model = sequential()
    model.fit(IDS, Y, verbose=0, batch_size=200)
    with pytest.warns(UserWarning, match="for 2 steps of Adam. No epsilon covers"):
        tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)


@pytest.mark.slow
def test_a_sequential_model_that_was_changed_is_made_private_as_it_is_now():
    model = sequential()
    tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)
    model.pop()
    model.add(keras.layers.Dense(3))
    model.add(keras.layers.Dense(1))
    model.compile("adam", "mse")
    again = tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)
    assert again.model.layers[1:] == model.layers
    again.fit(verbose=0, epochs=1)
    assert again.plan.accountant.steps == 4


@pytest.mark.parametrize("way", ["compile", "make_private"])
def test_options_of_compile_are_kept_and_taken(way):
    inputs = keras.Input([], dtype="int32")
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Embedding(50, 4)(inputs)))
    options = {"microbatch_size": 10, "diagnostics": True}
    model.compile("adam", "mse", **(options if way == "compile" else {}))
    private = tfdp_rec.make_private(model, (IDS, Y), **SETTINGS, **(options if way == "make_private" else {}))
    assert (private.model.private_step.microbatch_size, private.model.private_step.diagnostics) == (10, True)


@pytest.mark.slow
def test_fit_takes_one_callback_none_and_whole_numbers_of_dtype_object():
    private = tfdp_rec.make_private(sequential(), (IDS.astype(object), Y), **SETTINGS)
    private.fit(keras.callbacks.Callback(), verbose=0, epochs=1)
    private.fit(None, verbose=0, epochs=1)
    assert int(private.model.optimizer.iterations) == 8


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        ((IDS, Y[:-1]), {}, "same number of rows"),
        ((IDS[:0], Y[:0]), {}, "at least one"),
        ((IDS, 3.0), {}, "same number of rows"),
        ((IDS, Y), {"unit": IDS[:-1]}, "unit must give one id for each of the 400 rows"),
        ((IDS, Y), {"mechanism": "Adam"}, "mechanism must be one of DPSGD"),
        ((IDS, Y), {"mechanism": "AdaFEST"}, "AdaFEST needs .* cannot choose: compile .* with tfdp_rec.AdaFEST"),
        ((IDS, Y), {"epochs": 2.5}, "epochs must be a whole number from 1, got 2.5"),
        ((IDS, Y), {"epochs": 0}, "epochs must be a whole number"),
        ((IDS, Y), {"unit": ["a", None] * 200}, "no user id in row 1"),
        ((IDS, Y), {"mechanism": "EANA"}, "EANA has no epsilon .* compile with tfdp_rec.EANA"),
        (IDS, {}, r"with y: give make_private\(model, \(x, y\), ...\)"),
        ({"x": IDS, "y": Y}, {}, "compares predictions with y"),
        ((IDS.astype(str), Y), {}, "text, and the model has no layer that numbers it"),
        ((IDS, Y), {"epsilon": -1.0}, "epsilon"),
        ((IDS, Y), {"batch_size": 500}, "larger than num_units"),
    ],
)
def test_misuse_is_one_line(data, options, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        tfdp_rec.make_private(sequential(), data, **{**SETTINGS, **options})
    assert len(str(caught.value)) < 500


class Frame:
    """As far as it is asked, a table of pandas or Polars."""

    columns = ("x", "y")

    def __getitem__(self, name):
        return IDS

    def __array__(self, dtype=None, copy=None):
        return np.stack([IDS, IDS], axis=1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([IDS, Y], "x and y are one argument"),
        ([tf.data.Dataset.from_tensor_slices((IDS, Y)).batch(10)], "draws its own batches; got a _BatchDataset"),
        ([iter([(IDS, Y)])], "draws its own batches; got a list_iterator"),
        ([Frame()], "is one Frame: give its columns as arrays"),
    ],
)
def test_data_that_are_no_arrays_are_refused_with_the_way(data, reason):
    with pytest.raises(TypeError, match=reason):
        tfdp_rec.make_private(sequential(), *data, **SETTINGS)


@pytest.mark.slow
def test_text_is_numbered_by_a_layer():
    lookup = layers.StringLookup(vocabulary=[str(number) for number in range(ITEMS)])
    model = keras.Sequential([lookup, layers.Embedding(ITEMS + 1, 4), layers.Dense(1)])
    model.compile(loss="mse")
    private = tfdp_rec.make_private(model, (IDS.astype(str), Y), **SETTINGS)
    private.fit(verbose=0, epochs=1)
    assert private.model.inputs[0].dtype == "string" and int(private.model.optimizer.iterations) == 4


def test_text_that_the_model_takes_apart_is_refused_with_the_way():
    vectorize = layers.TextVectorization(max_tokens=20, output_sequence_length=4, vocabulary=["good", "bad"])
    words = keras.Input([], dtype="string")
    rows = layers.GlobalAveragePooling1D()(layers.Embedding(20, 4)(vectorize(words)))
    model = keras.Model(words, layers.Dense(1)(rows))
    model.compile("adam", "mse")
    with pytest.raises(tfdp_rec.NotPrivate, match="takes text apart.*Do it in the data.*in front again"):
        tfdp_rec.make_private(model, (np.array(["good film"] * ROWS), Y), **SETTINGS).fit(verbose=0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"x": IDS}, "those of make_private"),
        ({"batch_size": 10}, "those of make_private"),
        ({"validation_split": 0.1}, "Hold rows out before make_private"),
        ({"class_weight": {0: 1.0}}, r"give make_private \(x, y, sample_weight\)"),
    ],
)
def test_what_fit_does_not_take_is_refused_with_the_way(options, reason):
    with pytest.raises(TypeError, match=reason):
        tfdp_rec.make_private(sequential(), (IDS, Y), **SETTINGS).fit(**options)


@pytest.mark.slow
def test_a_planned_end_is_no_news_and_what_comes_after_it_says_what_to_do(capsys, tmp_path, recwarn):
    private = tfdp_rec.make_private(sequential(), (IDS, Y), **SETTINGS)
    with pytest.raises(ValueError, match=r"After make_private call private.fit\(\)"):
        private.model.fit(IDS, Y, verbose=0)
    private.fit(verbose=2)
    assert "budget" not in capsys.readouterr().out and not [w for w in recwarn if "shuffle" in str(w.message)]
    with pytest.raises(ValueError, match="Release what was trained; to train on, give a larger epsilon"):
        private.fit(verbose=0)
    private.model.export(str(tmp_path / "servable"))
    assert f"Saved artifact at '{tmp_path}/servable'" in capsys.readouterr().out


@pytest.mark.slow
def test_models_that_share_weights_are_told_whose_steps_count():
    table = layers.Embedding(ITEMS, 4)
    models = [keras.Sequential([table, layers.Dense(1)]) for _ in range(2)]
    for model in models:
        model.compile(loss="mse")
    tfdp_rec.make_private(models[0], (IDS, Y), **SETTINGS).fit(verbose=0)
    with pytest.raises(ValueError, match="8 of them by another model or optimizer of the same weights"):
        tfdp_rec.make_private(models[1], (IDS, Y), **SETTINGS).fit(verbose=0)


@pytest.mark.slow
def test_towers_that_were_trained_before_and_frozen_are_told_of_in_words():
    """It said: epsilon is 3.996 after 0 steps. So it goes in two stages: of towers, and of a ranking model on them."""
    tower = layers.Embedding(ITEMS, 4)
    retrieval = keras.Sequential([tower, layers.Dense(1)])
    retrieval.compile(loss="mse")
    half = IDS[: ROWS // 2], Y[: ROWS // 2]
    tfdp_rec.make_private(retrieval, half, **SETTINGS).fit(verbose=0)
    tower.trainable = False
    ranking = keras.Sequential([tower, layers.Dense(3), layers.Dense(1)])
    ranking.compile(loss="mse")
    match = r"No step fits the budget: epsilon is (2.99|3).* before .*target 3 .* 4 steps under another.*frozen ones"
    with pytest.raises(ValueError, match=match) as caught:
        tfdp_rec.make_private(ranking, (IDS, Y), **SETTINGS).fit(verbose=0)
    assert len(str(caught.value)) < 500
    private = tfdp_rec.make_private(ranking, (IDS, Y), **{**SETTINGS, "epsilon": 6.0})
    private.fit(verbose=0)
    assert 3.0 < private.plan.accountant.epsilon() <= 6.0 and "Spent besides" in private.statement()


def test_a_model_with_nothing_to_train_says_so():
    model = sequential()
    for layer in model.layers:
        layer.trainable = False
    with pytest.raises(ValueError, match="nothing to train: it has 3 weights, all of them frozen.*Leave a layer"):
        tfdp_rec.make_private(model, (IDS, Y), **SETTINGS).fit(verbose=0)


def test_a_loss_that_is_added_and_no_other_is_told_how_to_be_returned():
    class Pairs(tfdp_rec.PrivateModel):
        def __init__(self):
            super().__init__()
            self.items = layers.Embedding(ITEMS, 1)

        def call(self, ids):
            better, worse = keras.ops.unstack(self.items(ids), axis=1)
            self.add_loss(-keras.ops.mean(keras.ops.log_sigmoid(better - worse)))
            return better

    model = Pairs()
    model.compile("adam")
    with pytest.raises(tfdp_rec.NotPrivate, match=r"add_loss in .*test_private_fit.py:\d+ \(call\).*per_example_loss"):
        tfdp_rec.make_private(model, np.stack([IDS, IDS[::-1]], axis=1), **SETTINGS).fit(verbose=0)


def test_a_private_model_under_an_ordinary_optimizer_says_once_that_it_is_not_private():
    inputs = keras.Input([], dtype="int32")
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(layers.Embedding(ITEMS, 4)(inputs)))
    model.compile("adam", "mse")
    with pytest.warns(UserWarning, match="PrivateModel trains under Adam, which is not private"):
        model.fit(IDS, Y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.fit(IDS, Y, verbose=0)


@pytest.mark.parametrize(
    ("name", "here"),
    [("DPKerasAdamOptimizer", "LazyDPSGD"), ("DPKerasSGDOptimizer", "DPSGD"), ("PrivacyEngine", "make_private")],
)
def test_names_of_other_libraries_are_answered_with_those_of_this_one(name, here):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; write tfdp_rec.{here}"):
        getattr(tfdp_rec, name)


@pytest.mark.slow
def test_a_second_call_counts_what_the_first_has_spent():
    """The two are trained on the same weights: a cell that is run again is no new beginning."""
    model = sequential()
    tfdp_rec.make_private(model, (IDS, Y), **SETTINGS).fit(verbose=0)
    again = tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)
    with pytest.raises(ValueError, match="budget"):
        again.fit(verbose=0)
    more = tfdp_rec.make_private(model, (IDS, Y), **{**SETTINGS, "epsilon": 6.0})
    more.fit(verbose=0, epochs=1)
    assert more.plan.accountant.steps > 8
    assert 3.0 < more.plan.accountant.epsilon() <= 6.0


@pytest.mark.slow
def test_a_program_ends_without_a_word():
    """A generator of batches that Python has outlived is an error to TensorFlow, which writes a page of it."""
    program = """
import keras, numpy as np, tfdp_rec
ids = np.arange(100) % 5
model = keras.Sequential([keras.layers.Embedding(5, 2), keras.layers.Dense(1)])
model.compile("sgd", "mse")
settings = {"epsilon": 3.0, "batch_size": 10, "epochs": 1, "learning_rate": 0.1, "accountant": "rdp"}
tfdp_rec.make_private(model, (ids, ids[:, None] / 5), **settings).fit(verbose=0)
"""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "finalizing" not in ran.stderr
