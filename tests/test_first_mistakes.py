"""What a new user types wrongly in the first hour, and what is said: the line to write instead."""

import math
import re
import warnings

import keras
import numpy as np
import pytest
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


# Arguments.


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
    main(["train", *own, "--out", str(run)])
    said = "".join(capsys.readouterr())
    assert "the ids are taken from column 'name'" in said
    assert "for you alone: 0 of 1,200 rows are of listed items. Is another column that of the ids?" in said


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
