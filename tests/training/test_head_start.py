"""A head start: what is counted and chosen, on which units, for how much, and that the model holds what is claimed."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

import tfdp_rec
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.sums import reliability
from tfdp_rec.sums.fixed_point import ONE
from tfdp_rec.training import head_start
from tfdp_rec.training.head_start import HeadStart, gain_sums, hold_out, log_odds, log_shares

L = keras.layers
USERS, ITEMS, ROWS, CLASSES = 20, 12, 4_000, 6
RNG = np.random.default_rng(0)
USER, ITEM = RNG.integers(USERS, size=ROWS), RNG.integers(ITEMS, size=ROWS)
LIKELY = np.linspace(0.1, 0.9, ITEMS)
CLICKS = (RNG.random(ROWS) < LIKELY[ITEM]).astype("float32")
KINDS = RNG.choice(CLASSES, p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05], size=ROWS)
NOTHING = RNG.integers(2, size=ROWS).astype("float32")


def of_clicks(activation=None, names=("user", "item")):
    user, item = (keras.Input([], dtype="int32", name=name) for name in names)
    match = L.Dot(1)([L.Embedding(USERS, 4)(user), L.Embedding(ITEMS, 4)(item)])
    model = keras.Model([user, item], L.Dense(1, activation)(match))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=activation is None))
    return model


def of_classes(activation=None, items=ITEMS):
    item = keras.Input([], dtype="int32")
    model = keras.Model(item, L.Dense(CLASSES, activation)(L.Embedding(items, 4)(item)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=activation is None))
    return model


def private_of(model, data, **options):
    options = {"epsilon": 8.0, "unit": "row", "batch_size": 600, "epochs": 2, "accountant": "rdp"} | options
    return tfdp_rec.make_private(model, data, begin_at="counts", **options)


def beside(private):
    """The layer that scales what training adds."""
    return next(layer for layer in private.model.layers if layer.name.startswith("beside_counts"))


def logit(private, x):
    predicted = private.predict(x, verbose=0).astype(np.float64)
    return predicted[:, 0] if predicted.shape[1] == 1 else special.log_softmax(predicted, axis=1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-9, 9), st.floats(-9, 9)), max_size=20), st.integers(0, 3))
def test_one_user_less_moves_the_gains_by_at_most_one(rows, user):
    owners = np.array([row[0] for row in rows], int)
    gains = np.array([row[1:] for row in rows]).reshape(-1, 2)
    moved = gain_sums(gains, owners) - gain_sums(gains[owners != user], owners[owners != user])
    assert sum(int(step) ** 2 for step in moved) <= ONE**2


def test_gains_are_means_of_users_and_use_what_there_is():
    gains, owners = np.array([[0.5, -0.25], [0.1, 0.25], [7.0, -7.0]]), np.array([4, 4, 2])
    np.testing.assert_allclose(gain_sums(gains, owners) / ONE * 2**0.5, [0.3 + 1.0, -1.0], atol=1e-5)


@pytest.mark.parametrize("data", [((USER, ITEM), CLICKS), (ITEM, KINDS)], ids=["clicks", "classes"])
@pytest.mark.parametrize("by", ["row", "user"])
def test_one_unit_less_moves_what_is_released_by_at_most_one(monkeypatch, data, by):
    sums = []

    def release(total, noise, *words):
        sums[-1].append(np.asarray(total).reshape(-1))
        return total / ONE

    def released(rows):
        """Sums without noise of a start on some rows, of which all are trained on."""
        some = tuple(np.array(column)[rows] for column in data[0]) if len(data[0]) == 2 else data[0][rows]
        sums.append([])
        model = of_clicks() if len(data[0]) == 2 else of_classes()
        start = HeadStart(model, (some, data[1][rows]), units[rows], np.array([], int), len(data[0]) == 2, True)
        start.price(8.0, 1e-5, by)
        start.begin()
        return sums.pop()

    monkeypatch.setattr(head_start, "release_sums", release)
    monkeypatch.setattr(reliability, "release_sums", release)
    units = np.arange(ROWS) if by == "row" else USER
    whole = released(np.arange(300))
    for gone in units[:3]:
        moved = np.concatenate([a - b for a, b in zip(whole[:2], released(np.flatnonzero(units[:300] != gone))[:2])])
        assert 0.9 * ONE < np.linalg.norm(moved) <= ONE


def test_the_noise_of_counts_is_what_is_paid_for(monkeypatch):
    noises, add = [], head_start.release_sums
    for room in (head_start, reliability):
        monkeypatch.setattr(room, "release_sums", lambda total, noise, *_: noises.append(noise) or add(total, noise))
    private = private_of(of_clicks(), ((USER, ITEM), CLICKS))
    by_user, by_item, by_logit = noises
    assert by_user == by_item and 1 / by_item**2 + 1 / by_logit**2 == pytest.approx(1 / private._start._noise**2)


def test_what_it_costs_by_the_accountant_beside():
    private = private_of(of_clicks(), ((USER, ITEM), CLICKS), accountant="pld")
    private.fit(verbose=0)
    plan, by_hand = private.plan, PLDAccountant()
    (counts, choice), labels = zip(*plan.accountant.spending.history.uses)
    assert labels == ("counts to begin at", "choice of what training added")
    counts, choice = counts.noise_multiplier, choice.noise_multiplier
    chance = plan.sampling.expected_batch_size / (0.9 * ROWS)
    step = PoissonSampledDpEvent(chance, GaussianDpEvent(plan.noise_multiplier))
    for event in (GaussianDpEvent(counts), GaussianDpEvent(choice), SelfComposedDpEvent(step, plan.steps)):
        by_hand.compose(event)
    assert private.epsilon == pytest.approx(by_hand.get_epsilon(plan.delta), rel=1e-3) and 7.8 < private.epsilon <= 8


def test_the_model_holds_the_counts_and_so_does_what_is_exported(tmp_path):
    yours = of_clicks()
    private = private_of(yours, ((USER, ITEM), CLICKS))
    found = logit(private, (np.zeros(ITEMS, int), np.arange(ITEMS)))
    off = np.abs(found - found.mean() - special.logit(LIKELY))  # by noise; 1.04 on average without counts
    assert off.mean() < 0.6 and off.max() < 2.0 and (np.diff(found) > -0.8).all()
    before = yours.layers[-1].bias.numpy()
    private.fit(verbose=0)
    assert (yours.layers[-1].bias.numpy() == before).all()
    whole, x = logit(private, (USER[:99], ITEM[:99])), (USER[:99], ITEM[:99])
    scaled = beside(private)
    tables = [each for each in private.model.layers if each.name.startswith("counts_")]
    by_user, by_item = (each.get_weights()[0][:, 0] for each in tables)
    oracle = scaled.kernel.numpy()[0] * yours.predict(x, verbose=0)[:, 0] + scaled.bias.numpy()[0]
    oracle = oracle + by_user[USER[:99]] + by_item[ITEM[:99]]
    np.testing.assert_allclose(whole, oracle, atol=1e-5)
    private.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(logit(loaded, (USER[:99], ITEM[:99])), whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation", [None, "softmax"])
def test_classes_begin_at_their_shares(activation):
    private = private_of(of_classes(activation), (ITEM, KINDS), epsilon=20.0, accountant="pld")
    found = private.predict(np.arange(ITEMS), verbose=0)
    shares = np.exp(special.log_softmax(found, axis=1)) if activation is None else found
    assert np.abs(shares - np.bincount(KINDS) / ROWS).max() < 0.03  # beside the weights that the model began with


def test_rare_classes_have_the_mean_of_those_like_them():
    shares = np.exp(log_shares(np.array([100.0, 50.0, 3.0, -1.0]), noise=2.0))
    np.testing.assert_allclose(shares, np.array([100, 50, 2**0.5, 2**0.5]) / (150 + 2 * 2**0.5))


def test_odds_of_exact_counts_are_those_of_the_counts():
    counts = np.array([[900.0, 100.0], [500.0, 500.0], [100.0, 900.0], [4.0, 4.0]])
    offsets, common = log_odds(counts, noise=1e-3)
    np.testing.assert_allclose(offsets[:3] + common, np.log(counts[:3, 0] / counts[:3, 1]), atol=0.05)


@pytest.mark.parametrize("noise", [0.5, 4.0])
def test_values_are_ordered_by_clicks_where_rows_without_are_spread_evenly(noise):
    rng = np.random.default_rng(1)
    likely = rng.permutation(np.geomspace(0.3, 300, 2000))
    clicks, others = rng.poisson(likely), rng.poisson(5.0, 2000)
    noisy = np.stack([clicks, others], axis=1) + noise * rng.normal(size=(2000, 2))

    def order(scores):
        return stats.spearmanr(scores, likely)[0]

    offsets, _ = log_odds(noisy, noise)
    assert order(offsets) > order(noisy[:, 0]) - 0.002
    assert order(offsets) > order(np.maximum(noisy[:, 0], 0.1) / np.maximum(noisy.sum(axis=1), 0.1)) + 0.01


def test_what_is_noise_alone_gives_no_offsets_and_a_wrong_scale_of_it_does():
    noisy = 50 + 30 * np.random.default_rng(2).normal(size=(3000, 2))
    assert log_odds(noisy, noise=30.0)[0].std() < 0.1 < log_odds(noisy, noise=15.0)[0].std()


@pytest.mark.parametrize("epsilon, rows, share", [(19.0, 4_000, 0.02), (1.0, 300, 0.7), (3.0, 4_000, None)])
def test_counts_have_the_share_that_their_noise_needs(epsilon, rows, share):
    private = private_of(of_clicks(), ((USER[:rows], ITEM[:rows]), CLICKS[:rows]), epsilon=epsilon, batch_size=60)
    noise, whole = private._start._noise, noise_of_one_release(epsilon, private.plan.delta)
    if share:
        assert whole / noise == pytest.approx(share**0.5)
    else:  # noise² is a quarter of what chance does to a usual count
        assert noise**2 == pytest.approx(0.25 * rows / (2 * (USERS + ITEMS)), rel=1e-3)


def test_units_that_choose_are_counted_and_not_trained_on(monkeypatch):
    trained, held_out = hold_out(200)
    assert len(held_out) == 20 and sorted([*trained, *held_out]) == list(range(200))
    units, seen, counted = np.arange(ROWS) % 200, set(), []
    add = head_start.unit_sums
    monkeypatch.setattr(head_start, "unit_sums", lambda units, *others: counted.append(units) or add(units, *others))
    private = private_of(of_classes(items=200), (units, KINDS), unit=units, batch_size=60, epochs=3)
    for drawn in private.batches.take(20):
        seen |= set(drawn.batch[0].numpy().tolist())  # the unit is its own feature
    assert set(counted[0]) == set(units) and private.plan.sampling.num_units == 180
    assert len(seen) > 150 and seen <= set(trained)


@pytest.mark.slow
def test_what_training_found_stays_and_what_is_noise_goes():
    taste = (RNG.random(ROWS) < np.where((USER + ITEM) % 2, 0.95, 0.05)).astype("float32")
    useful = private_of(of_clicks(), ((USER, ITEM), taste), epsilon=19.0, epochs=40, learning_rate=10.0)
    useful.fit(verbose=0)
    assert beside(useful).kernel.numpy()[0] > 0
    assert ((logit(useful, (USER, ITEM)) > 0) == (taste > 0)).mean() > 0.6  # counts have nothing to tell
    noise = private_of(of_clicks(), ((USER, ITEM), NOTHING), epochs=6, learning_rate=400.0)
    kernel = beside(noise).kernel
    kernel.assign([0.0])
    begun = logit(noise, (USER, ITEM))
    kernel.assign([1.0])
    noise.fit(verbose=0, epochs=5)
    assert np.abs(logit(noise, (USER, ITEM)) - begun).max() > 0.1  # in the middle of the plan nothing is chosen yet
    noise.fit(verbose=0, epochs=6, initial_epoch=5)
    assert kernel.numpy()[0] == 0
    np.testing.assert_allclose(logit(noise, (USER, ITEM)), begun, atol=1e-6)


def test_one_choice_and_no_copies():
    private = private_of(of_classes(), (ITEM, KINDS))
    with pytest.raises(TypeError):
        copy.deepcopy(private)
    private.fit(verbose=0)
    chosen = beside(private).kernel.numpy()
    beside(private).kernel.assign(np.full(CLASSES, 7.0))
    private._start.end(private.model)
    assert (beside(private).kernel.numpy() == 7).all() and (chosen <= 1).all()


def test_a_choice_that_is_cut_off_leaves_the_counts(monkeypatch):
    private = private_of(of_clicks(), ((USER, ITEM), CLICKS), epochs=1)
    ask, asked = private._start.predictions.of, []

    def stop(model):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(model)
        return ask(model)

    monkeypatch.setattr(private._start.predictions, "of", stop)
    with pytest.raises(KeyboardInterrupt):
        private.fit(verbose=0)
    assert beside(private).kernel.numpy() == [0.0]


@pytest.mark.slow
def test_a_model_that_was_loaded_begins_at_counts_again(tmp_path):
    private = private_of(of_clicks(), ((USER, ITEM), CLICKS), epochs=1)
    private.fit(verbose=0)
    private.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    again = private_of(loaded, ((USER, ITEM), CLICKS), epochs=1, epsilon=16.0)
    assert len(again.model.layers) > len(private.model.layers)


def test_a_model_that_was_refused_is_as_it_was():
    model = of_clicks()
    with pytest.raises(ValueError):
        private_of(model, ((USER, ITEM), CLICKS), epsilon=1e-9)
    assert all(each.trainable for each in model.weights)


def test_probabilities_are_begun_as_logits_are():
    private = private_of(of_clicks("sigmoid"), ((USER, ITEM), CLICKS), epsilon=19.0)
    assert np.abs(private.predict((USER, ITEM), verbose=0)[:, 0] - LIKELY[ITEM]).max() < 0.2


def test_columns_of_a_dict_are_counted_by_their_names():
    private = private_of(of_clicks(names=("user", "item")), ({"item": ITEM, "user": USER}, CLICKS))
    found = logit(private, {"user": np.zeros(ITEMS, int), "item": np.arange(ITEMS)})
    assert np.corrcoef(found, special.logit(LIKELY))[0, 1] > 0.97


def numbers():
    model = keras.Sequential([keras.Input([3]), L.Dense(1)])
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


HELD_OUT = hold_out(ROWS)[1][0]


def with_one(values, value, at=HELD_OUT):
    values = values.copy()
    values[at] = value
    return values


def squared():
    model = keras.Sequential([L.Embedding(ITEMS, 4), L.Dense(1)])
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    "model, data, options, reason",
    [
        (of_clicks, ((USER, ITEM), CLICKS), {"begin_at": "popularity"}, "must be left out, or 'counts'"),
        (squared, (ITEM, CLICKS), {}, "BinaryCrossentropy or a\\s+SparseCategorical"),
        (numbers, (np.ones([ROWS, 3], "float32"), CLICKS), {}, "hold one id a row.*has none"),
        (of_clicks, ((USER, ITEM), CLICKS, np.ones(ROWS, "float32")), {}, "without weights"),
        (of_classes, (ITEM, with_one(KINDS, CLASSES)), {}, "from 0 to 5"),
        (of_classes, (ITEM, with_one(KINDS, -1, at=0)), {}, "from 0 to 5"),
        (of_clicks, ((USER[:9], ITEM[:9]), CLICKS[:9]), {"batch_size": 2}, "needs at least ten"),
        (of_classes, (np.stack([ITEM, ITEM], 1), np.stack([KINDS, KINDS], 1)), {}, "one label a row"),
    ],
)
def test_refused_before_anything_is_counted(monkeypatch, model, data, options, reason):
    monkeypatch.setattr(HeadStart, "begin", lambda self: pytest.fail("counted"))
    options = {"epsilon": 8.0, "unit": "row", "batch_size": 600, "epochs": 2, "begin_at": "counts"} | options
    with pytest.raises(ValueError, match=reason):
        tfdp_rec.make_private(model(), data, **options)


def test_an_id_outside_a_table_fails_before_anything_is_counted(monkeypatch):
    """Whether it fails afterwards would hang on one row that no price covers."""
    monkeypatch.setattr(HeadStart, "begin", lambda self: pytest.fail("counted"))
    with pytest.raises(tf.errors.InvalidArgumentError):
        private_of(of_clicks(), ((USER, with_one(ITEM, ITEMS)), CLICKS))


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("saved", [False, True])
def test_counts_of_rows_are_no_counts_of_users(tmp_path, saved):
    """A user may have many rows: a model that holds counts of rows is not trained by user, before a step either."""
    model = private_of(of_clicks(), ((USER, ITEM), CLICKS), reliability=30.0).model
    if saved:
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
        model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    with pytest.raises(tfdp_rec.privacy.Unaccounted, match="made for another unit, one row"):
        options = {"epsilon": 8.0, "batch_size": 5, "epochs": 1}
        tfdp_rec.make_private(model, ((USER, ITEM), CLICKS), unit=USER, **options).fit(verbose=0)


def test_ids_that_a_lookup_takes_are_not_counted():
    """It admits what it does not know, and no table of offsets has a row for that."""
    user, word = (keras.Input([], dtype="int32", name=name) for name in ("user", "word"))
    known = L.IntegerLookup(vocabulary=[100, 200])(word)
    joined = L.Concatenate()([L.Embedding(USERS, 4)(user), L.Embedding(4, 4)(known)])
    model = keras.Model([user, word], L.Dense(1)(joined))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    words = RNG.choice([100, 200, 300], size=ROWS)
    private = private_of(model, ((USER, words), CLICKS))
    assert [each.name for each in private.model.layers if each.name.startswith("counts_")] == ["counts_7"]
    private.fit(verbose=0)
    assert private.model.is_private


@pytest.mark.slow
def test_earlier_steps_on_the_same_weights_count():
    model = of_clicks()
    with pytest.warns(UserWarning, match="trained before"):
        model.fit((USER, ITEM), CLICKS, verbose=0)
        private = private_of(model, ((USER, ITEM), CLICKS))
    private.fit(verbose=0)
    assert private.epsilon == np.inf
