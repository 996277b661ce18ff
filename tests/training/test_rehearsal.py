"""A rehearsal: generated rows of a model's form, noise in proportion, a verdict, and no look at the data."""

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.training import rehearsal
from tfdp_rec.training.generated_rows import GeneratedRows

L = keras.layers
N = 2_000


@pytest.fixture(autouse=True)
def short_trainings_by_adam(monkeypatch):
    monkeypatch.setattr(rehearsal, "_ADAM_STEPS", 60)


def clicks_of(users, items, width=8):
    user, item = keras.Input([], dtype="int32"), keras.Input([], dtype="int32")
    match = L.Dot(1)([L.Embedding(users, width)(user), L.Embedding(items, width)(item)])
    model = keras.Model([user, item], L.Dense(1, activation="sigmoid")(match))
    model.compile("adam", "binary_crossentropy")
    return model


def private_of(model, x, y, **settings):
    settings = {"epsilon": 8.0, "unit": "row", "batch_size": 200, "epochs": 2, "accountant": "rdp"} | settings
    return tfdp_rec.make_private(model, (x, y), **settings)


def pair(**settings):
    rng = np.random.default_rng(1)
    x, y = (rng.integers(30, size=N), rng.integers(20, size=N)), rng.integers(2, size=N).astype("float32")
    return private_of(clicks_of(30, 20), x, y, **settings)


def rows_of(model, *specs, number=4_000):
    specs = tuple(tf.TensorSpec(*spec) for spec in specs)
    return GeneratedRows(model, specs, number, np.random.default_rng(0))


def auc(labels, scores):
    positive, negative = scores[labels], scores[~labels]
    return np.mean(positive[:, None] > negative[None])


def test_ids_are_those_that_the_layers_take():
    films = ["Alien", "Brazil", "Casablanca"]
    user, film = keras.Input([], dtype="int64"), keras.Input([], dtype="string")
    history = keras.Input([5], dtype="int32")
    price, kind, day = keras.Input([2]), keras.Input([], dtype="string"), keras.Input([1], dtype="int32")
    tower = keras.Sequential([keras.Input([], dtype="string"), L.StringLookup(vocabulary=films), L.Embedding(4, 3)])
    parts = [
        L.Embedding(7, 3)(user), tower(film), L.GlobalAveragePooling1D()(L.Embedding(11, 3, mask_zero=True)(history)),
        price, L.Embedding(8, 3)(L.Hashing(8)(kind)), L.CategoryEncoding(num_tokens=7)(day),
    ]  # fmt: skip
    inputs = [user, film, history, price, kind, day]
    model = keras.Model(inputs, L.Dense(1)(L.Concatenate()(parts)))
    found = rows_of(model, *(([None, *each.shape[1:]], each.dtype) for each in inputs)).features
    assert set(found[0]) == set(range(7)) and set(found[1]) == set(films)
    assert found[2].shape == (4_000, 5) and set(found[2].flat) == set(range(1, 11))  # 0 is padding
    assert found[3].dtype == np.float32 and abs(found[3].std() - 1) < 0.05
    assert set(found[4]) == {str(each) for each in range(8)} and set(found[5].flat) == set(range(7))


def test_an_embedding_of_an_embeddings_output_or_of_positions_says_nothing_of_an_input():
    history = keras.Input([5], dtype="int32")

    class Placed(L.Layer):
        def __init__(self):
            super().__init__()
            self.items, self.places = L.Embedding(50, 4), L.Embedding(5, 4)

        def call(self, ids):
            return self.places(tf.range(tf.shape(ids)[1])) + self.items(ids)

    model = keras.Model(history, L.Dense(1)(L.GlobalAveragePooling1D()(Placed()(history))))
    assert rows_of(model, ([None, 5], "int32")).features[0].max() == 49


def test_whole_numbers_that_no_layer_numbers_are_refused():
    number = keras.Input([1], dtype="int32")
    model = keras.Model(number, L.Dense(1)(L.Rescaling(0.1)(number)))
    with pytest.raises(ValueError, match="none of Embedding, .* takes it: a rehearsal does not know"):
        rows_of(model, ([None, 1], "int32"))


def test_clicks_are_drawn_by_effects_and_tastes_of_the_strengths_that_are_said():
    rows = rows_of(clicks_of(300, 200), ([None], "int32"), ([None], "int32"), number=20_000)
    scores, effects, clicked = rows.clicks()
    # What each id does by itself, by the means of 20,000 rows; what is left is of pairs.
    by_id = np.zeros(20_000)
    for _ in range(8):
        for ids in rows.features:
            left = scores - by_id
            by_id += (np.bincount(ids, left) / np.maximum(np.bincount(ids), 1))[ids]
    assert scores.std() == pytest.approx(math.hypot(0.8, 2.5), rel=0.05)
    assert 0.7 < by_id.std() < 1.3 and 2.2 < (scores - by_id).std() < 2.6
    assert effects.std() == pytest.approx(0.8) and np.corrcoef(effects, by_id)[0, 1] > 0.6
    assert abs(np.corrcoef(effects, scores - effects)[0, 1]) < 0.1
    low, high = scores < np.quantile(scores, 0.1), scores > np.quantile(scores, 0.9)
    for part in (low, high):
        assert clicked[part].mean() == pytest.approx((1 / (1 + np.exp(-scores[part]))).mean(), abs=0.02)
    assert auc(clicked[:4_000], scores[:4_000]) > 0.85


def test_classes_are_drawn_by_the_softmax_of_their_scores():
    rows = rows_of(clicks_of(4, 3), ([None], "int32"), ([None], "int32"), number=60_000)
    scores, drawn = rows.classes(5)
    same = (rows.features[0] == 1) & (rows.features[1] == 0)
    expected = np.exp(scores(slice(None))[same][0])
    found = np.bincount(drawn[same], minlength=5) / same.sum()
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.02)


class Unread:
    """The shape and type of an array, and no more."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype

    def __getattr__(self, name):
        raise AssertionError(f"a rehearsal asked the data for {name}")


def test_no_row_is_read_and_nothing_is_spent():
    private = pair()
    before = private.model.get_weights()
    blind = dataclasses.replace(
        private, batches=None, _data=((Unread((N,), "int32"), Unread((N,), "int32")), Unread((N,), "float32"))
    )
    found = blind.rehearse(verbose=0)
    assert found.metric == "AUC" and 0.55 < found.averages < 0.7 and 0.85 < found.possible < 0.95
    # Nor by what is kept to compile the models with.
    held = [cell.cell_contents for cell in private._make_ready.__closure__]
    assert not any(isinstance(each, np.ndarray) for each in tf.nest.flatten(held))
    assert private.epsilon == 0 and int(private.model.optimizer.iterations) == 0
    assert all(map(np.array_equal, before, private.model.get_weights()))
    assert private.statement() == pair().statement()


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "taken"), [(500, 500), (4_096, 1_024)])
def test_noise_is_in_proportion_to_the_batch(batch_size, taken):
    n = 6_000
    ids = np.zeros(n, "int32")
    private = private_of(clicks_of(30, 20), (ids, ids), np.zeros(n, "float32"), batch_size=batch_size)
    seen = []

    def stop(model, plan, batches):
        seen.append(plan)
        raise Stop

    with pytest.raises(Stop):
        dataclasses.replace(private, _make_ready=stop).rehearse(verbose=0)
    plan = private.plan
    assert seen[0].sampling.expected_batch_size == taken
    assert seen[0].noise_multiplier / taken == pytest.approx(plan.noise_multiplier / batch_size)
    assert seen[0].steps == plan.steps and seen[0].l2_norm_clip == plan.l2_norm_clip


def test_the_settings_are_those_of_the_training():
    dense = keras.optimizers.Adam(0.123)
    private = pair(learning_rate=0.5, dense_optimizer=dense, mechanism="DPSGD", l2_norm_clip=0.7)
    plain, plan = clicks_of(30, 20), private.plan
    new = tfdp_rec.PrivateModel(plain.input, plain.output)
    private._make_ready(new, plan, private.batches)
    assert isinstance(new.optimizer, tfdp_rec.DPSGD) and float(new.optimizer.learning_rate) == 0.5
    assert new.optimizer.l2_norm_clip == 0.7
    assert float(new.optimizer.dense_optimizer.learning_rate) == pytest.approx(0.123)
    assert private.model.optimizer.dense_optimizer is dense and new.optimizer.dense_optimizer is not dense


@pytest.mark.slow
def test_little_noise_learns_and_much_does_not(capsys):
    settings = {"batch_size": 500, "epochs": 40}
    with pytest.warns(UserWarning, match="epsilon"):
        clear = pair(epsilon=1e4, **settings).rehearse()
    assert "Rehearsal on 2,000 generated rows: by Adam, then by LazyDPSGD." in capsys.readouterr().out
    lost = pair(epsilon=0.05, **settings).rehearse(verbose=0)
    assert clear.learns and clear.share > 0.6 and str(clear).endswith("These settings learn.")
    assert not lost.learns and lost.share < 0.3 and str(lost).endswith("These settings learn little.")


@pytest.mark.slow
def test_classes_are_rehearsed():
    history = keras.Input([4], dtype="int32")
    pooled = L.GlobalAveragePooling1D()(L.Embedding(21, 8)(history))
    model = keras.Model(history, L.Dense(20)(pooled))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    settings = {"epsilon": 20.0, "batch_size": 500, "epochs": 10}
    private = private_of(model, np.zeros([N, 4], "int32"), np.zeros(N, "int32"), **settings)
    found = private.rehearse(verbose=0)
    assert found.metric == "recall@1"
    assert 0 < found.averages < found.without_privacy <= found.possible + 0.02 and found.private < found.possible


def test_what_a_model_does_not_find_without_privacy_is_no_share():
    assert rehearsal.Rehearsal("AUC", 0.5, 0.9, 0.505, 0.52).share == 0.0
    assert rehearsal.Rehearsal("AUC", 0.5, 0.9, 0.8, 0.4).share == 0.0
    assert rehearsal.Rehearsal("AUC", 0.5, 0.9, 0.8, 0.85).share == 1.0
    assert rehearsal.Rehearsal("AUC", 0.5, 0.9, 0.51, 0.7).learns  # Adam was the slower one
    assert rehearsal.Rehearsal("AUC", 0.5, 0.9, 0.8, 0.65).learns


def test_near_a_half_no_verdict_is_told():
    """Of one model with 36 rows a user it told from 37% to 71%, and trainings found from 5% to 85%."""
    said = {share: rehearsal.Rehearsal("AUC", 0.5, 0.9, 0.9, 0.5 + 0.4 * share) for share in (0.25, 0.4, 0.7, 0.8)}
    assert [each.is_sure for each in said.values()] == [True, False, False, True]
    assert str(said[0.25]).endswith("These settings learn little.") and str(said[0.8]).endswith("These settings learn.")
    for share in (0.4, 0.7):
        assert "on the edge" in str(said[share]) and "These settings learn" not in str(said[share])


def test_other_models_are_told_what_a_rehearsal_is_for():
    ids = np.arange(N) % 30
    ratings = keras.Sequential([L.Embedding(30, 4), L.Dense(1)])
    ratings.compile("adam", "mse")
    with pytest.raises(ValueError, match="whose loss is a BinaryCrossentropy"):
        private_of(ratings, ids, np.zeros([N, 1], "float32")).rehearse()
    tags = keras.Sequential([L.Embedding(30, 4), L.Dense(3, activation="sigmoid")])
    tags.compile("adam", "binary_crossentropy")
    with pytest.raises(ValueError, match="one label a row, and y has 3"):
        private_of(tags, ids, np.zeros([N, 3], "float32")).rehearse()


@pytest.mark.slow
def test_fit_names_it_where_settings_reach_little(capsys):
    private = pair(epochs=1, batch_size=20)
    private.fit(verbose=2)
    assert "rehearse() tells, without the data" in capsys.readouterr().out


def test_a_history_alone_has_pairs_and_one_number_a_row_has_none():
    history, item = keras.Input([6], dtype="int32"), keras.Input([], dtype="int32")
    pooled = L.GlobalAveragePooling1D()(L.Embedding(30, 4)(history))
    scores, effects, _ = rows_of(keras.Model(history, pooled), ([None, 6], "int32")).clicks()
    assert (scores - effects).std() == pytest.approx(2.5)
    alone = keras.Model(item, L.Dense(1, activation="sigmoid")(L.Embedding(30, 4)(item)))
    alone.compile("adam", "binary_crossentropy")
    with pytest.raises(ValueError, match="nothing beyond averages to find"):
        private_of(alone, np.zeros(N, "int32"), np.zeros(N, "float32")).rehearse(verbose=0)


def test_the_smallest_of_an_inputs_tables_says_which_ids_there_are():
    item = keras.Input([], dtype="int32")
    both = L.Concatenate()([L.Embedding(50, 4)(item), L.Embedding(9, 4)(item)])
    assert rows_of(keras.Model(item, both), ([None], "int32")).features[0].max() == 8


def test_an_adapted_vocabulary_is_not_known():
    word = keras.Input([], dtype="string")
    lookup = L.StringLookup()
    lookup.adapt(["a", "b"])
    model = keras.Model(word, L.Embedding(3, 2)(lookup(word)))
    with pytest.raises(ValueError, match="with a size or vocabulary takes it"):
        rows_of(keras.models.clone_model(model), ([None], "string"))


def test_wrecked_predictions_of_classes_find_nothing():
    numbers = keras.Input([3])
    model = keras.Model(numbers, L.Dense(7)(numbers))
    task = rehearsal._classes(model, rows_of(model, ([None, 3], "float32"), number=6_000), 1_000)
    nothing = np.zeros([5_000, 7], "float32")
    assert task.judge(nothing) == task.judge(nothing * np.nan) == 0
    exact = np.eye(7, dtype="float32")[task.labels[1_000:]]
    assert task.judge(exact) == 1 and task.judge(-exact) == 0 and 0 < task.averages < task.possible < 1


class Holding(L.Layer):
    """Its configuration holds the layer that it has, not that layer's configuration."""

    def __init__(self, table, **kwargs):
        super().__init__(**kwargs)
        self.table = table

    def call(self, ids):
        return self.table(ids)

    def get_config(self):
        return {**super().get_config(), "table": self.table}


def test_a_layer_that_would_be_trained_itself_is_refused():
    user, item = keras.Input([], dtype="int32"), keras.Input([], dtype="int32")
    match = L.Dot(1)([Holding(L.Embedding(30, 4))(user), L.Embedding(20, 4)(item)])
    model = keras.Model([user, item], L.Dense(1, activation="sigmoid")(match))
    model.compile("adam", "binary_crossentropy")
    before = model.get_weights()
    with pytest.raises(ValueError, match="keeps its weights when it is made from its configuration"):
        rehearsal.remake(model)
    assert all(map(np.array_equal, before, model.get_weights()))


def a_metric(true, predicted):
    return true


@pytest.mark.slow
def test_metrics_are_left_alone_and_settings_are_taken():
    area = keras.metrics.AUC()
    area.update_state([0, 1], [0.2, 0.8])
    seen = area.get_weights() if hasattr(area, "get_weights") else [v.numpy() for v in area.variables]
    model = clicks_of(30, 20)
    model.compile("adam", "binary_crossentropy", metrics=[area, a_metric])
    rng = np.random.default_rng(1)
    x, y = (rng.integers(30, size=N), rng.integers(20, size=N)), rng.integers(2, size=N).astype("float32")
    private = private_of(model, x, y, weight_decay=0.01, dense_optimizer="adam")
    assert isinstance(private.model.optimizer.dense_optimizer, keras.optimizers.Adam)
    private.rehearse(verbose=0)
    assert all(map(np.array_equal, seen, [v.numpy() for v in area.variables]))


@pytest.mark.slow
def test_users_have_several_rows():
    n = 4_000
    private = private_of(
        clicks_of(30, 20), (np.arange(n) % 30, np.arange(n) % 20), np.zeros(n, "float32"), unit=np.arange(n) // 8,
    )
    seen = []

    def stop(model, plan, batches):
        seen.append(plan.sampling.num_units)
        picked = {ids for drawn in batches.take(40) for ids in zip(*(leaf.numpy() for leaf in drawn.batch[0]))}
        assert len(picked) > 500  # pairs of ids, of 600; a user's one row would have shown at most 500
        raise Stop

    with pytest.raises(Stop):
        dataclasses.replace(private, _make_ready=stop).rehearse(verbose=0)
    assert seen == [500]


def test_many_classes_and_several_outputs_are_refused():
    item = keras.Input([], dtype="int32")
    rows = L.Embedding(30, 2)(item)
    many = keras.Model(item, L.Dense(20_001)(rows))
    many.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids, y = np.zeros(N, "int32"), np.zeros(N, "int32")
    with pytest.raises(ValueError, match="one of at most 20,000 classes a row"):
        private_of(many, ids, y).rehearse(verbose=0)
    named = keras.Model(item, {"click": L.Dense(1, activation="sigmoid")(rows)})
    named.compile("adam", "binary_crossentropy")
    with pytest.raises(ValueError, match="with one output"):
        private_of(named, ids, {"click": y.astype("float32")}).rehearse(verbose=0)
