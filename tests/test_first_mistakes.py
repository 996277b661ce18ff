"""What a new user types wrongly in the first hour, and what is said: the line to write instead."""

import copy
import math
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
from keras import layers

import tfdp_rec
from tfdp_rec.cli import main
from tfdp_rec.core.ground.refused import refuse_below

ROWS, ITEMS = 400, 30
IDS = np.random.default_rng(0).integers(0, ITEMS, ROWS)
Y = (IDS[:, None] / ITEMS).astype("float32")
SETTINGS = {"epsilon": 3.0, "batch_size": 100, "epochs": 1, "learning_rate": 0.5, "accountant": "rdp"}


def sequential():
    model = keras.Sequential([layers.Embedding(ITEMS, 4), layers.Dense(1)])
    model.compile("adam", "mse")
    return model


# Names.


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("VectorizedDPKerasSGDOptimizer", r"write tfdp_rec\.DPSGD"),
        ("DPSequential", r"write tfdp_rec\.PrivateModel\(inputs, outputs\)"),
        ("ModuleValidator", r"write tfdp_rec\.validate\(model, batch\)"),
        ("compute_dp_sgd_privacy", r"write private\.plan\.accountant\.statement\(\)"),
        ("get_epsilon", r"write private\.plan\.accountant\.epsilon\(\)"),
        ("Retrieval", r"write tfdp_rec\.CandidateScores"),
        ("lazyDPSgd", r"did you mean LazyDPSGD\?"),
        ("PrivateModl", r"did you mean PrivateModel\?"),
        ("make_privat", r"did you mean make_private\?"),
    ],
)
def test_a_name_that_is_not_here_is_answered_with_one_that_is(name, hint):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; {hint}"):
        getattr(tfdp_rec, name)


def test_names_of_no_likeness_and_private_ones_are_left_alone():
    for name in ("tensorboard", "_PrivateModel", "__wrapped__"):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'$"):
            getattr(tfdp_rec, name)


# Models and loops that are not private.

TAKEN = "is taken by a private step, and no private step took this one"


def functional(kind=keras.Model):
    inputs = keras.Input([], dtype="int32", name="item")
    return kind(inputs, layers.Dense(1)(layers.Embedding(ITEMS, 4)(inputs)))


def plan():
    sampling = tfdp_rec.data.PoissonSampling(num_units=ROWS, expected_batch_size=100)
    return tfdp_rec.PrivatePlan(sampling=sampling, epsilon=3.0, delta=1e-4, steps=4, accountant="rdp")


def batches(planned):
    return planned.batches(lambda rows: (IDS[rows], Y[rows]))


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.table, self.top = layers.Embedding(ITEMS, 4), layers.Dense(1)

    def call(self, x):
        return self.top(self.table(x))

    def train_step(self, data):
        x, y = data
        return {"loss": keras.losses.mean_squared_error(y, self(x))}


class OwnLoss(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(ITEMS, 1)

    def compute_loss(self, inputs, training=False):
        return tf.reduce_mean(tf.square(self.table(inputs["x"]) - inputs["y"]))


def test_a_private_model_predicts_and_evaluates_on_drawn_batches():
    private = tfdp_rec.make_private(sequential(), (IDS, Y), **SETTINGS)
    assert private.predict(private.batches.take(1), verbose=0).shape[1] == 1
    assert private.evaluate(private.batches.take(1), verbose=0) > 0


def test_a_private_model_of_several_inputs_predicts_what_the_plain_one_does():
    """The tuple that Keras puts around the inputs was taken off, and the second input for targets."""
    inputs = [keras.Input([], dtype="int32") for _ in range(2)]
    rows = [layers.Embedding(ITEMS, 4)(one) for one in inputs]
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(rows)))
    model.compile("adam", "mse")
    private = tfdp_rec.make_private(model, ((IDS, IDS[::-1]), Y), **SETTINGS)
    expected = model.predict((IDS, IDS[::-1]), verbose=0)
    np.testing.assert_allclose(private.predict((IDS, IDS[::-1]), verbose=0), expected, rtol=1e-5)
    np.testing.assert_allclose(private.predict_on_batch((IDS, IDS[::-1])), expected, rtol=1e-5)


@pytest.mark.parametrize("make", [functional, OwnStep, OwnLoss])
def test_a_model_without_a_private_step_is_told_which_class_has_one(make):
    """It was told that its layers got three tensors for one, or that a tuple has no dtype."""
    planned, model = plan(), make()
    model.compile(tfdp_rec.LazyDPSGD(1.0, plan=planned), "mse")
    with pytest.raises(tfdp_rec.NotPrivate, match=f"{TAKEN}.*tfdp_rec.PrivateModel.*without a train_step of its own"):
        model.fit(batches(planned), steps_per_epoch=4, verbose=0, shuffle=False)


@pytest.mark.parametrize(
    "take",
    [
        lambda drawn: [functional()(x) for x, y in [drawn]],
        lambda drawn: drawn[0],
        lambda drawn: drawn["x"],
        lambda drawn: drawn.draw[:, None],
        lambda drawn: tf.reduce_mean(tf.zeros([100]) - drawn.draw),
        lambda drawn: keras.losses.mean_squared_error(drawn.draw, tf.zeros([100, 1])),
    ],
)
def test_a_loop_of_ones_own_is_told_what_a_drawn_batch_is(take):
    drawn = next(iter(batches(plan())))
    with pytest.raises(tfdp_rec.NotPrivate, match=f"{TAKEN}.*train_on_batch"):
        take(drawn)
    assert len(str(drawn)) < 120 and ".batch" in repr(drawn)
    with pytest.raises(ValueError, match="its rows are in .batch"):
        functional()(drawn)


# Arguments.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epsilon": "8"}, "epsilon must be a number, got '8'"),
        ({"delta": "1e-5"}, "delta must be a number, got '1e-5'"),
        ({"batch_size": "100"}, "expected_batch_size must be a number, got '100'"),
        ({"l2_norm_clip": None}, "l2_norm_clip must be a number, got None"),
        ({"momentum": "0.9"}, "momentum must be a number"),
        ({"unit": "user"}, "unit='user' is no column: give unit= the user id of each row, an array of 400 ids"),
        ({"mechanism": "LazyDP"}, "mechanism must be one of DPSGD, LazyDPSGD"),
        ({"batch_size": 0}, "expected_batch_size must be positive, got 0"),
        ({"batch_size": 0, "epochs": None}, "expected_batch_size must be positive, got 0"),
        ({"l2_norm_clp": 1.0}, "takes no l2_norm_clp=; did you mean l2_norm_clip="),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0, got -1"),
        ({"learning_rate": "0.1"}, "learning_rate must be a number, got '0.1'"),
        ({"dense_optimizer": "sgdd"}, "dense_optimizer='sgdd' is no optimizer of Keras"),
        ({"noise": "none"}, "noise must be a tfdp_rec.noise.NoiseSource, got 'none'"),
        ({"unit": [""] + ["a"] * 399}, "no user id in row 0"),
    ],
)
def test_settings_that_are_no_numbers_or_columns_are_named(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        tfdp_rec.make_private(sequential(), (IDS, Y), **{**SETTINGS, **options})


@pytest.mark.parametrize("mechanism", ["lazydpsgd", tfdp_rec.DPSGD])
def test_a_mechanism_is_taken_by_its_class_and_in_any_case(mechanism):
    made = tfdp_rec.make_private(sequential(), (IDS, Y), mechanism=mechanism, **SETTINGS)
    assert type(made.model.optimizer) is (tfdp_rec.LazyDPSGD if isinstance(mechanism, str) else tfdp_rec.DPSGD)


def test_what_is_no_model_is_said_to_be_none():
    with pytest.raises(TypeError, match=r"a Keras model and then its data, .*, got a str first"):
        tfdp_rec.make_private("model", (IDS, Y), **SETTINGS)


def test_targets_that_are_text_are_told_what_numbers_them():
    with pytest.raises(ValueError, match=r"y holds text.*labels == 'yes'"):
        tfdp_rec.make_private(sequential(), (IDS, np.where(Y > 0.5, "yes", "no")), **SETTINGS)


CLICKS = keras.losses.BinaryCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    ("data", "loss", "says"),
    [
        ((IDS + 2**32, Y), "mse", "'item' is int32, and has ids up to 4.29.*dtype='int64'"),
        ((IDS + 0.5, Y), "mse", "'item' is int32, and the data hold fractions"),
        ((IDS, Y * 2 - 1), CLICKS, r"from 0 to 1, and y has some from -1 to"),
        ((IDS, Y, -np.ones(ROWS)), "mse", "sample_weight must be at least 0"),
        ((np.array([None] + [1] * (ROWS - 1), object), Y), "mse", "an array of object .*missing"),
        ((np.array(["2026-01-01"] * ROWS, "datetime64[D]"), Y), "mse", "an array of datetime64"),
        (([{"item": 1}] * ROWS, Y), "mse", "a single value is no array: of records give columns"),
    ],
)
def test_numbers_that_a_model_would_read_as_others_are_refused(data, loss, says):
    """Ids past 2^31 were cast to others, labels of -1 trained to a loss above any, lists said [-1] rows."""
    model = functional()
    model.compile("adam", loss)
    with pytest.raises((TypeError, ValueError), match=says):
        tfdp_rec.make_private(model, data, **SETTINGS)


def test_numbers_of_models_with_losses_of_their_own_are_let_alone():
    class Own(tfdp_rec.PrivateModel):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(ITEMS, 1)

        def per_example_loss(self, data, training):
            item, shift, rating = data
            return tf.square(self.table(item)[:, 0] - rating + shift)

    model = Own()
    model.compile("adam", CLICKS)
    data = IDS, np.full(ROWS, 3.0, "float32"), -np.ones(ROWS, "float32")
    assert tfdp_rec.make_private(model, data, **SETTINGS).fit(verbose=0).history["loss"][0] > 0


def test_numbers_of_several_outputs_are_looked_at_one_by_one():
    inputs = keras.Input([], dtype="int32")
    rows = layers.Embedding(ITEMS, 4)(inputs)
    model = keras.Model(inputs, [layers.Dense(1, name="a")(rows), layers.Dense(1, name="b")(rows)])
    model.compile("adam", loss=CLICKS)
    ones = np.ones([ROWS, 1], "float32")
    tfdp_rec.make_private(model, (IDS, [ones, ones * 0]), **SETTINGS)
    with pytest.raises(ValueError, match="y has some from -1 to -1"):
        tfdp_rec.make_private(model, (IDS, [ones, -ones]), **SETTINGS)


def test_numbers_in_lists_are_arrays_and_those_that_are_none_are_warned_of():
    model = functional()
    model.compile("adam", "mse")
    y = Y.copy()
    y[:7] = np.nan
    with pytest.warns(UserWarning, match="7 rows hold what is no finite number"):
        private = tfdp_rec.make_private(model, (IDS.tolist(), y), **SETTINGS)
    assert private.batches.element_spec.batch[0].dtype == tf.int64


def test_an_epsilon_that_protects_nothing_is_warned_of():
    with pytest.warns(UserWarning, match=r"epsilon = 100 protects next to nothing: .* e\^100 times as likely"):
        tfdp_rec.make_private(sequential(), (IDS, Y), **{**SETTINGS, "epsilon": 100.0})


def by_name(name):
    inputs = keras.Input([], dtype="int32", name=name)
    model = keras.Model(inputs, layers.Dense(1)(layers.Embedding(ROWS, 4)(inputs)))
    model.compile("adam", "mse")
    return model


def test_users_with_several_rows_are_spoken_of_unless_rows_are_meant():
    with pytest.warns(UserWarning, match=r"'user_id' holds users, who have several rows: unit= .*; unit=\"row\""):
        tfdp_rec.make_private(by_name("user_id"), (IDS, Y), **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tfdp_rec.make_private(by_name("user_id"), (IDS, Y), unit="row", **SETTINGS)
        tfdp_rec.make_private(by_name("user_id"), (np.arange(ROWS), Y), **SETTINGS)
        tfdp_rec.make_private(by_name("item_id"), (IDS, Y), **SETTINGS)
        others = np.arange(ROWS, dtype="int32") % 7
        made = tfdp_rec.make_private(by_name("item_id"), (others, Y), unit=IDS, **{**SETTINGS, "batch_size": 10})
    assert "each of 30 users" in repr(made)


def test_a_column_that_tells_the_user_is_spoken_of_where_users_are_units():
    settings = {**SETTINGS, "batch_size": 10}
    hidden = (np.random.default_rng(3).permutation(ROWS)[IDS]).astype("int32")  # another number for each user
    for column in (IDS, hidden):
        with pytest.warns(UserWarning, match="Input 'who' tells the user, and users are the units"):
            tfdp_rec.make_private(by_name("who"), (column, Y), unit=IDS, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        tfdp_rec.make_private(by_name("age"), (IDS // 10, Y), unit=IDS, **settings)  # few values: many users teach each
        tfdp_rec.make_private(by_name("item"), (np.arange(ROWS), Y), unit=np.arange(ROWS), **settings)


class Frame:
    """As far as it is asked, a table of pandas or Polars."""

    def __init__(self, **columns):
        self._of, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return self._of[name]

    def __array__(self, dtype=None, copy=None):
        return np.stack(list(self._of.values()), axis=1)


def test_a_table_gives_its_columns_to_the_inputs_of_their_names():
    frame = Frame(other=np.zeros(ROWS), item=IDS)
    model = functional()
    model.compile("adam", "mse")
    private = tfdp_rec.make_private(model, (frame, Frame(y=Y[:, 0])), **SETTINGS)
    x, y = private.batches.element_spec.batch
    assert list(x) == ["item"] and y.shape[1:] == 1
    assert np.isfinite(private.fit(verbose=0).history["loss"][0])
    with pytest.raises(ValueError, match="inputs of the names item, and the Frame has the columns sku, day: name"):
        tfdp_rec.make_private(model, (Frame(sku=IDS, day=IDS), Y), **SETTINGS)
    rows = keras.Sequential([keras.Input([2]), layers.Dense(2)])  # of one input, and two targets
    rows.compile("adam", "mse")
    both = Frame(a=IDS.astype("float32"), b=IDS.astype("float32"))
    x, y = tfdp_rec.make_private(rows, (both, both), **SETTINGS).batches.element_spec.batch
    assert x.shape[1:] == y.shape[1:] == 2


# What make_private returns.


def test_what_make_private_returns_is_used_like_its_model(tmp_path):
    private = tfdp_rec.make_private(sequential(), (IDS, Y), **SETTINGS)
    assert private.epsilon == 0 and re.fullmatch(
        r"<PrivateFit of '\w+': LazyDPSGD, epsilon 3 and delta 0.0001 for each of 400 rows, 4 steps of 100, noise "
        r"multiplier [\d.]+, \d+% of the signal that epsilon allows>",
        repr(private),
    )
    with pytest.warns(UserWarning, match="epochs=2, and make_private planned 1: training ends with the budget"):
        private.fit(verbose=0, epochs=2)
    assert private.predict(IDS, verbose=0).shape == (ROWS, 1) and private.evaluate(IDS, Y, verbose=0) > 0
    assert 0 < private.epsilon <= 3 and private.history.history["epsilon"][-1] == private.epsilon
    private.summary(print_fn=lambda *_: None)
    private.save(tmp_path / "model.keras")
    private.export(tmp_path / "servable", verbose=False)
    with pytest.raises(AttributeError, match="sumary"):
        private.sumary()
    assert private(IDS[:3]).shape == (3, 1)
    assert copy.copy(private).model is private.model


@pytest.mark.parametrize("rows", [(IDS, Y), (IDS[:50], Y[:50]), (IDS.copy(), Y[:, 0].copy(), np.ones(ROWS))])
def test_a_stop_by_training_rows_that_are_called_validation_data_is_refused(rows):
    private = tfdp_rec.make_private(sequential(), (IDS, Y), **SETTINGS)
    with pytest.raises(tfdp_rec.NotPrivate, match="EarlyStopping would act on validation_data that are rows of"):
        private.fit(verbose=0, validation_data=rows, callbacks=keras.callbacks.EarlyStopping("val_loss"))
    assert private.epsilon == 0


def test_all_refusals_are_listed_by_validate_and_by_make_private():
    inputs = keras.Input([6])
    x = layers.BatchNormalization(name="first")(layers.Dense(4)(inputs))
    x = layers.BatchNormalization(name="second")(layers.SpectralNormalization(layers.Dense(4), name="third")(x))
    x = layers.Lambda(lambda h: h - tf.reduce_mean(h, axis=0), name="fourth")(x)
    x = layers.Lambda(lambda h: h * tf.cast(tf.shape(h)[0], tf.float32), name="fifth")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    data = np.ones([ROWS, 6], "float32"), Y
    report = tfdp_rec.validate(model, data)
    with pytest.raises(tfdp_rec.NotPrivate, match="cannot be trained privately, for 5 reasons") as refused:
        tfdp_rec.make_private(model, data, **SETTINGS)
    assert len(report.refusals) == 5 and all(each in str(refused.value) for each in report.refusals)
    assert all(name in str(refused.value) for name in ("'first'", "'second'", "'third'", "Mean", "Mul"))


def test_a_fit_lists_all_refusals_of_a_loss_that_make_private_does_not_read():
    model = functional()
    hidden = layers.Lambda(lambda h: h - tf.reduce_mean(h, axis=0))(model.output)
    mixed = keras.Model(model.input, layers.Lambda(lambda h: h * tf.cast(tf.shape(h)[0], tf.float32))(hidden))
    mixed.compile("adam", "mse")
    private = tfdp_rec.make_private(mixed, (IDS, Y), **SETTINGS)
    with pytest.raises(tfdp_rec.NotPrivate, match="for 2 reasons(.|\n)*1. Mean in (.|\n)*2. Mul in "):
        private.fit(verbose=0)
    assert private.epsilon == 0


def test_training_that_came_before_is_in_the_statement():
    model = sequential()
    model.fit(IDS, Y, verbose=0)
    with pytest.warns(UserWarning, match="13 steps of Adam"):
        private = tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)
    private.fit(verbose=0)
    assert "none, since 13 steps of Adam before or after private training" in " ".join(private.statement().split())
    assert private.epsilon == math.inf
    private.compile("sgd", "mse")
    assert repr(private).endswith("which SGD trains now, without privacy>")


# Options of other calls.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"validation_split": 0.1}, r"make_private\(validation_split=\.\.\.\).*Hold rows out before make_private"),
        ({"class_weight": {0: 1.0}}, r"make_private\(class_weight=\.\.\.\).*give make_private \(x, y, sample_weight\)"),
        ({"y": Y}, r"x and y are one argument.*make_private\(model, \(x, y\), \.\.\.\)"),
        ({"validation_data": (IDS, Y)}, r"an option of fit: make_private\(\.\.\.\)\.fit\(validation_data=\.\.\.\)"),
        ({"verbose": 0}, r"an option of fit: make_private\(\.\.\.\)\.fit\(verbose=\.\.\.\)"),
        ({"optimizer": "adam"}, r"optimizer= is the mechanism's place.*dense_optimizer=keras.optimizers.Adam"),
        ({"metrics": ["mae"]}, r"an option of compile: model\.compile\(metrics=\.\.\.\) before make_private"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm= is l2_norm_clip= here"),
        ({"target_delta": 1e-5}, r"target_delta= is delta= here"),
    ],
)
def test_options_of_other_calls_are_told_whose_they_are(options, says):
    """Keras said that arguments are not recognized, with all rows of the validation data."""
    with pytest.raises(TypeError, match=says) as caught:
        tfdp_rec.make_private(sequential(), (IDS, Y), **options, **SETTINGS)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("y", "loss"), [(Y[:, 0], "mse"), (Y[:, 0], keras.losses.BinaryCrossentropy())])
def test_targets_that_would_be_stretched_over_the_batch_are_told_their_shapes(y, loss):
    """It was said of a line of Keras' that it puts examples together."""
    model = sequential()
    model.compile("adam", loss)
    match = r"targets have shape \[batch\] and the predictions \[batch, 1, 1\].*ids of shape \[batch\]"
    with pytest.raises(ValueError, match=match) as caught:
        tfdp_rec.make_private(model, (IDS[:, None], y), **SETTINGS).fit(verbose=0)
    assert len(str(caught.value)) < 500


def test_an_id_beyond_the_table_is_told_in_a_sentence():
    """It stood under 3,000 characters of TensorFlow's."""
    private = tfdp_rec.make_private(sequential(), (IDS + 1, Y), **SETTINGS)
    match = r"^Layer .* was given ids outside its table of 30 rows, which takes 0 to 29: make .*IntegerLookup\.$"
    with pytest.raises(Exception, match=match) as caught:
        private.fit(verbose=0)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("data", [(IDS, Y), (IDS,), (None, IDS)])
def test_a_fit_that_is_given_the_data_again_says_that_it_has_them(data):
    with pytest.raises(TypeError, match=r"fit\(\) takes no data: .*those of make_private.* options .*by name"):
        tfdp_rec.make_private(sequential(), (IDS, Y), **SETTINGS).fit(*data)


def test_a_fit_of_the_model_in_place_of_what_make_private_returned_says_so_once():
    model = sequential()
    tfdp_rec.make_private(model, (IDS, Y), **SETTINGS)
    with pytest.warns(UserWarning, match=r"trains under Adam, which is not private.*fit of what make_private returned"):
        model.fit(IDS, Y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.fit(IDS, Y, verbose=0)


# Logs of one's own.


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.csv"
    rows = [f"u{user},i{(user * 7 + 3 * turn) % 20}" for user in range(300) for turn in range(4)]
    path.write_text("\n".join(["user,item", *rows]))
    return path


def test_a_file_without_its_columns_is_told_which_to_name(log, tmp_path, capsys):
    assert main(["train", "--data", str(log), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "is a file: say which of its columns hold users and items, with --user and --item" in said
    assert "'user', 'item'" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["train", "--epsilom", "3"], "train: .*--epsilom 3; did you mean --epsilon"),
        (["train", "--itmes", "a.csv"], "train: .*did you mean --items"),
        (["recommend", "run", "--histroy", "3"], "recommend: .*did you mean --history"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest_of_its_command(typed, meant, capsys):
    with pytest.raises(SystemExit):
        main(typed)
    assert re.search(meant, said := capsys.readouterr().err) and said.count("\n") == 1


def test_item_0_is_an_item_like_others():
    """It was refused, since 0 pads histories: rows are numbered within."""
    histories = [[0, 10]] * 200 + [[20, 30]] * 200
    recommender = tfdp_rec.spectral.SpectralRecommender([0, 10, 20, 30], epsilon=8.0, delta=1e-4)
    assert recommender.fit(histories, verbose=0).recommend([[10], [0]], k=1)[0].tolist() == [[0], [10]]
    assert list(tfdp_rec.models.TwoTower(vocabulary=[0, 10, 20], width=4, hidden=0).vocabulary) == [0, 10, 20]


def test_a_public_list_of_another_column_is_seen_before_anything_is_paid(log, tmp_path, capsys):
    """Titles in front of the ids: all was paid, and the report said recall 0."""
    titles, run = tmp_path / "titles.csv", tmp_path / "run"
    titles.write_text("name,number\n" + "".join(f"Film {n},i{n}\n" for n in range(20)))
    own = ["--data", str(log), "--user", "user", "--item", "item", "--items", str(titles), "--epsilon", "4"]
    main(["train", *own, "--confidential", "--out", str(run)])
    said = "".join(capsys.readouterr())
    assert "the ids are taken from column 'name'" in said
    counted = (run / "private" / "confidential" / "log.jsonl").read_text()
    assert "0 of 1,200 rows are of listed items. Is another column that of the ids?" in counted and "1,200" not in said


# Ids that are text.


class OfIds(tfdp_rec.PrivateModel):
    """A retrieval model of a table of users, and of what scores candidates."""

    def __init__(self, scores):
        super().__init__()
        self.users, self.scores = layers.Embedding(ITEMS, 4), scores

    def call(self, user):
        return self.users(user)

    def per_example_loss(self, data, training=True):
        user, item = data
        return self.scores.cross_entropy(self.users(user), item)


@pytest.mark.parametrize(
    ("scores", "texts", "says"),
    [
        (lambda: tfdp_rec.CandidateScores(ITEMS, 4, negatives=5), 0, r"'embedding.*' is given text.*StringLookup"),
        (lambda: tfdp_rec.CandidateScores(ITEMS, 4, negatives=5), 1, r"is given text.*CandidateScores\(vocabulary=ids"),
        (
            lambda: tfdp_rec.TowerScores(layers.Embedding(ITEMS, 4), np.arange(ITEMS), negatives=5), 1,
            "is given text for candidates that are numbers.*of one type",
        ),
    ],
)  # fmt: skip
def test_text_that_a_model_of_ones_own_takes_for_ids_is_told_what_numbers_it(scores, texts, says):
    """TensorFlow said, in the middle of the first step, that it cannot cast text to int32."""
    model, data = OfIds(scores()), [IDS, IDS]
    data[texts] = IDS.astype(str)
    model.compile("adam")
    with pytest.raises(tfdp_rec.NotPrivate, match=says) as caught:
        tfdp_rec.make_private(model, tuple(data), **SETTINGS).fit(verbose=0)
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_step_of_an_ordinary_optimizer_by_hand_says_once_that_it_is_not_private():
    inputs = keras.Input([], dtype="int32")
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(layers.Embedding(ITEMS, 4)(inputs)))
    model.compile("adam", "mse")
    with pytest.warns(UserWarning, match="PrivateModel trains under Adam, which is not private"):
        model.train_on_batch(IDS, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.train_on_batch(IDS, Y)


@pytest.mark.parametrize("value", [0, math.nan, math.inf])
def test_what_is_no_number_is_too_small(value):
    with pytest.raises(ValueError, match="every must be at least 1"):
        refuse_below(1, every=value)
