"""Growth: a larger or smaller model goes on where another stopped, with its rows, its optimizer and its history."""

import copy

import dp_accounting
import keras
import numpy as np
import pytest

import tfdp_rec
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.optimizers import Adagrad
from tfdp_rec.privacy import Accountant, FixedOrder, PoissonSampling, optimised_correlation

ROWS, MORE, WIDTH, BATCH = 12, 17, 4, 8


def model_of(rows=ROWS, seed=0, width=WIDTH):
    keras.utils.set_random_seed(seed)
    item = keras.Input([2], dtype="int64")
    x = keras.layers.Flatten()(keras.layers.Embedding(rows, width, name="items")(item))
    return tfdp_rec.PrivateModel(item, keras.layers.Dense(1, name="out")(x))


def optimizer_of(kind=tfdp_rec.LazyDPSGD, **settings):
    return kind(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH, **settings)


def batches(count, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.integers(rows, size=[BATCH, 2]), rng.normal(size=[BATCH, 1]).astype("f4")) for _ in range(count)]


def train(model, given):
    for x, y in given:
        model.train_on_batch(x, y)


def trained(kind=tfdp_rec.LazyDPSGD, steps=3, **settings):
    model = model_of()
    model.compile(optimizer_of(kind, **settings), "mse")
    train(model, batches(steps))
    return model


def table(model):
    model.settle()
    return model.get_layer("items").get_weights()[0]


def drawn(units):
    return np.ones([len(units), 2], int), np.ones([len(units), 1], "f4")


def accounted(model):
    accountant = Accountant(dp_accounting.GaussianDpEvent(1.0), PoissonSampling(1000, BATCH), 1e-4)
    accountant.follow(model)
    return accountant


@pytest.mark.slow
@pytest.mark.fast_cases("LazyDPSGD-settings0")
@pytest.mark.parametrize(
    "kind, settings",
    [(tfdp_rec.LazyDPSGD, {}), (tfdp_rec.LazyDPSGD, {"momentum": 0.9}), (tfdp_rec.DPSGD, {"table_rule": Adagrad()}),
     (tfdp_rec.DPSGD, {"momentum": 0.5, "dense_optimizer": "adam"}), (tfdp_rec.EANA, {"momentum": 0.9})],
)  # fmt: skip
def test_a_grown_training_equals_one_that_did_not_grow_on_the_rows_of_both(kind, settings):
    """Number for number, with noise that is a function of row and step: weights and state are all there."""
    first = trained(kind, **settings)
    larger = first.grow_into(model_of(MORE, seed=5))
    assert np.array_equal(table(larger)[:ROWS], table(first))
    first = copy.deepcopy(first)  # whose graphs do not know another noise yet
    for model in (first, larger):
        model.optimizer._noise = KeyedNoise(7)
        train(model, batches(4, seed=1))
    np.testing.assert_allclose(table(larger)[:ROWS], table(first), rtol=1e-5, atol=1e-6)
    for mine, other in zip(first.get_layer("out").get_weights(), larger.get_layer("out").get_weights()):
        np.testing.assert_allclose(other, mine, rtol=1e-5, atol=1e-6)
    assert int(larger.optimizer.iterations.numpy()) == 7


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_new_row_has_the_noise_of_the_steps_that_it_was_there_for(momentum):
    width, before, after = 4000, 6, 3
    first = model_of(width=width)
    first.compile(optimizer_of(momentum=momentum), "mse")
    read = [(np.zeros([BATCH, 2], int), y) for _, y in batches(before + after)]
    train(first, read[:before])
    started = model_of(MORE, 5, width)
    begun = table(started)[ROWS:]
    larger = first.grow_into(started)
    train(larger, read[before:])
    expected = model_of(MORE, 6, width)
    expected.compile(optimizer_of(momentum=momentum), "mse")
    start = table(expected)[ROWS:]
    train(expected, read[:after])
    found, wanted = np.std(table(larger)[ROWS:] - begun), np.std(table(expected)[ROWS:] - start)
    assert found == pytest.approx(wanted, rel=0.05)  # of 20,000 values each; noise of all nine steps: 1.7 times
    old = np.std(table(larger)[2:ROWS] - np.random.default_rng(0).normal(0, 0, [ROWS - 2, width]))
    assert old > 1.2 * wanted


def test_rows_that_stay_take_their_velocity_along_and_others_are_gone():
    first = trained(momentum=0.9)
    kept = [11, 3, 4]
    smaller = first.grow_into(model_of(5, seed=3), kept={first.weights[0].path: kept})
    assert np.array_equal(table(smaller)[:3], table(first)[kept])
    velocities = [np.asarray(next(iter(m.optimizer.tables.values())).state) for m in (first, smaller)]
    assert np.array_equal(velocities[1][:3], velocities[0][kept]) and np.abs(velocities[1][:3]).max() > 0
    assert not velocities[1][3:].any()
    gone = np.delete(table(first), kept, axis=0)
    assert not any(np.array_equal(row, other) for row in table(smaller) for other in gone)


@pytest.mark.slow
def test_the_history_goes_along_and_is_counted_once(tmp_path):
    first = trained(steps=3)
    larger = first.grow_into(model_of(MORE))
    assert accounted(larger).spending.history.steps == 3
    train(larger, batches(2, MORE))
    both = accounted(larger)
    both.follow(first)
    assert both.spending.history.steps == 5, "the first three are steps of both"
    larger.save(tmp_path / "larger.keras")
    assert accounted(keras.models.load_model(tmp_path / "larger.keras")).spending.history.steps == 5
    largest = larger.grow_into(model_of(MORE + 3))
    train(largest, batches(1, MORE + 3))
    assert accounted(largest).spending.history.steps == 6


@pytest.mark.slow
def test_a_model_that_is_compiled_keeps_its_optimizer_and_has_the_history():
    first, other = trained(steps=3), model_of(MORE)
    own = optimizer_of(tfdp_rec.DPSGD)
    other.compile(own, "mse")
    first.grow_into(other)
    assert other.optimizer is own and accounted(other).spending.history.steps == 3
    train(other, batches(2, MORE))
    assert accounted(other).spending.history.steps == 5 and int(own.iterations.numpy()) == 2


@pytest.mark.slow
def test_a_grown_model_is_within_the_same_plan():
    sampling = PoissonSampling(1000, BATCH)
    plan = tfdp_rec.PrivatePlan(sampling=sampling, epsilon=4.0, delta=1e-4, steps=5)
    first = model_of()
    first.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, plan=plan), "mse")
    rng = np.random.default_rng(0)

    def fetch(units):
        return rng.integers(ROWS, size=[len(units), 2]), np.ones([len(units), 1], "f4")

    first.fit(sampling.batches(fetch), steps_per_epoch=3, verbose=0)
    larger = first.grow_into(model_of(MORE))
    larger.fit(sampling.batches(fetch), steps_per_epoch=9, verbose=0)
    assert int(larger.optimizer.iterations.numpy()) == 5, "three steps of five were made before it grew"
    assert plan.accountant.epsilon() <= 4.0


def test_a_model_without_privacy_grows_too_and_is_not_compiled():
    first = model_of()
    first.compile("adam", "mse")
    train(first, batches(2))
    larger = first.grow_into(model_of(MORE))
    assert np.array_equal(table(larger)[:ROWS], table(first)) and larger.optimizer is None


@pytest.mark.slow
def test_what_is_no_growth_is_refused_in_words_before_anything_is_taken():
    first = trained()
    untouched = model_of(MORE)
    before = table(untouched)
    refused = [
        (model_of(ROWS - 1), {}, "to remove rows say which ones stay"),
        (model_of(MORE, width=WIDTH + 1), {}, "only the number of rows of tables may change"),
        (first, {}, "this one"),
        (untouched, {first.weights[1].path: [0]}, "no table of this model"),
        (untouched, {first.weights[0].path: [0, 0]}, "distinct rows between 0 and 11"),
        (untouched, {first.weights[0].path: [12]}, "distinct rows between 0 and 11"),
        (tfdp_rec.models.TwoTower([1, 2], width=4), {}, "takes another"),
    ]
    for model, kept, words in refused:
        with pytest.raises(ValueError, match=words):
            first.grow_into(model, kept=kept)
    for wrong in (3, [0.5, 1.0], ["0"]):
        with pytest.raises(ValueError, match="distinct rows"):
            first.grow_into(untouched, kept={first.weights[0].path: wrong})
    assert np.array_equal(table(untouched), before) and untouched.privacy_history is None
    dense = [tfdp_rec.PrivateModel(x := keras.Input([n]), keras.layers.Dense(1)(x)) for n in (3, 4)]
    dense[0].compile(optimizer_of(), "mse")
    dense[0].train_on_batch(np.ones([BATCH, 3]), np.ones([BATCH, 1]))
    with pytest.raises(ValueError, match="is read as a whole"):
        dense[0].grow_into(dense[1])


def two_tables(names, frozen=None):
    inputs = [keras.Input([1], dtype="int64", name=name) for name in ("x", "y")]
    tables = [keras.layers.Embedding(ROWS, WIDTH, name=name, trainable=name != frozen) for name in names]
    both = [keras.layers.Flatten()(table(x)) for table, x in zip(tables, inputs)]
    return tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1, name="out")(keras.layers.Add()(both)))


def test_tables_of_another_order_or_frozen_in_one_model_alone_are_refused():
    first = two_tables(["user", "item"])
    with pytest.raises(ValueError, match="in the place of"):
        first.grow_into(two_tables(["item", "user"]))
    with pytest.raises(ValueError, match="in one of the models alone"):
        first.grow_into(two_tables(["user", "item"], frozen="item"))
    assert two_tables(["user", "item"], frozen="item").grow_into(two_tables(["user", "item"], frozen="item"))
    with pytest.raises(ValueError, match="read as a whole|only the number of rows of tables"):  # before any batch, too
        model_of().grow_into(model_of(width=WIDTH + 1))


@pytest.mark.slow
def test_rows_chosen_by_number_keep_their_numbers():
    first = model_of()
    chosen = tfdp_rec.optimizers.Preselection({"items/embeddings": [0, 1]}, noise_multiplier=20.0)
    first.compile(optimizer_of(tfdp_rec.optimizers.FEST, preselection=chosen), "mse")
    train(first, batches(2))
    for kept in ([1, 0, *range(2, ROWS)], range(1, ROWS)):
        with pytest.raises(ValueError, match="chosen by number"):
            first.grow_into(model_of(MORE), kept={"items/embeddings": kept})
    larger = first.grow_into(model_of(MORE, seed=4))
    before = table(larger)
    train(larger, batches(2, MORE))
    assert np.flatnonzero((table(larger) != before).any(axis=1)).tolist() == [0, 1]


@pytest.mark.slow
def test_a_plan_that_refuses_the_optimizer_leaves_the_second_model_as_it_was():
    sampling = PoissonSampling(1000, BATCH)
    plan = tfdp_rec.PrivatePlan(sampling=sampling, epsilon=4.0, delta=1e-4, steps=5)
    first, other = model_of(), model_of(MORE)
    first.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, plan=plan), "mse")
    first.fit(plan.batches(drawn), steps_per_epoch=1, verbose=0)
    plan.make_event = lambda noise: dp_accounting.GaussianDpEvent(1.1 * noise)
    before = table(other)
    for _ in range(2):  # the second time it is no compiled model either
        with pytest.raises(ValueError, match="costs more than the plan's"):
            first.grow_into(other)
    assert other.optimizer is None and np.array_equal(table(other), before)


@pytest.mark.slow
def test_planned_noise_does_not_grow_and_a_copy_of_it_makes_no_step_of_the_plan():
    order = FixedOrder(800, BATCH)
    correlation = optimised_correlation(steps=6, separation=order.separation)
    plan = tfdp_rec.PrivatePlan(sampling=order, epsilon=4.0, delta=1e-4, steps=6, correlation=correlation)
    first = model_of()
    first.compile(tfdp_rec.LazyDPFTRL(0.5, l2_norm_clip=1.0, plan=plan), "mse")
    first.fit(order.batches(drawn), steps_per_epoch=2, verbose=0)
    with pytest.raises(ValueError, match="plans its noise for one model"):
        first.grow_into(model_of(MORE))
    copied = copy.deepcopy(first)
    with pytest.raises(tfdp_rec.NotPrivate, match="budget is spent"):
        copied.train_on_batch(next(iter(order.batches(drawn))))
    assert int(copied.optimizer.iterations.numpy()) == 2 and plan.accountant.epsilon() <= 4.0
    assert first.grow_into(compiled(model_of(MORE))).privacy_history.snapshot().steps == 2


def compiled(model):
    model.compile(optimizer_of(), "mse")
    return model


@pytest.mark.slow
def test_a_plan_allows_no_step_to_weights_that_have_spent_other_than_planned():
    first = model_of()
    first.compile(tfdp_rec.DPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=0.3, expected_batch_size=BATCH), "mse")
    train(first, batches(4))
    plan = tfdp_rec.PrivatePlan(sampling=PoissonSampling(1000, BATCH), epsilon=4.0, delta=1e-4, steps=8)
    other = model_of(MORE)
    other.compile(tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, plan=plan), "mse")
    several = iter(plan.batches(drawn))
    other.train_on_batch(next(several))
    first.grow_into(other)
    with pytest.raises(tfdp_rec.NotPrivate, match="budget is spent"):
        other.train_on_batch(next(several))


def test_steps_that_no_history_describes_do_not_go_along():
    first = trained()
    first.optimizer.iterations.assign(10)
    for other in (model_of(MORE), compiled(model_of(MORE))):
        with pytest.raises(ValueError, match="7 steps that the model's privacy history does not describe"):
            first.grow_into(other)


@pytest.mark.slow
def test_a_loss_and_metrics_of_ones_own_go_along():
    def own_loss(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    first = model_of()
    first.compile(optimizer_of(), own_loss, metrics=[keras.metrics.MeanAbsoluteError()])
    train(first, batches(2))
    larger = first.grow_into(model_of(MORE))
    train(larger, batches(1, MORE))
    assert accounted(larger).spending.history.steps == 3


def test_a_table_that_another_model_trains_lazily_is_settled_first():
    first = trained()
    beside = tfdp_rec.PrivateModel(first.inputs, first.outputs)  # on the same layers, never compiled
    with first.private_weights.training():  # rows owe noise
        first.train_on_batch(*batches(1, rows=2)[0])
    larger = beside.grow_into(model_of(MORE))
    assert np.array_equal(table(larger)[:ROWS], table(first)) and accounted(larger).spending.history.steps == 4
    with pytest.raises(ValueError, match="the same table"):
        first.grow_into(tfdp_rec.PrivateModel(first.inputs, first.outputs), kept={first.weights[0].path: range(ROWS)})


def test_a_model_that_another_one_has_trained_tells_of_steps_that_are_not_described():
    """The outer model's accountant refused, and the inner one grew and told four steps of nine."""
    inner, other = (scores_of(rows) for rows in (10, 12))
    item = keras.Input([1], dtype="int64")
    outer = tfdp_rec.PrivateModel(item, inner(item))
    outer.compile(optimizer_of(), "mse")
    outer.train_on_batch(np.ones([4, 1], "int64"), np.ones([4, 1]))
    outer.optimizer.iterations.assign(9)
    with pytest.raises(ValueError, match="The optimizer has made 8 steps that"):
        inner.grow_into(other)


def scores_of(rows):
    item = keras.Input([1], dtype="int64")
    return tfdp_rec.PrivateModel(item, keras.layers.Flatten()(keras.layers.Embedding(rows, 1)(item)))


# Two-towers.


@pytest.mark.slow
def test_a_frozen_two_tower_and_one_of_another_precision_grow():
    model = two_tower()
    model.hidden_layer.trainable = model.out_layer.trainable = False
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        half = tfdp_rec.models.TwoTower(vocabulary=[1, 2, 3], width=4, hidden=0)
    finally:
        keras.config.set_dtype_policy("float32")
    larger = half.grow(4)
    assert larger.vocabulary.tolist() == [1, 2, 3, 4]
    assert larger.context_table.compute_dtype == half.context_table.compute_dtype == "bfloat16"
    frozen = tfdp_rec.models.TwoTower(vocabulary=[1, 2, 3], width=4, hidden=3)
    frozen.hidden_layer.trainable = frozen.context_table.trainable = False
    again = frozen.grow([4, 5])
    assert [v.path for v in again.trainable_variables] == [v.path for v in frozen.trainable_variables]
    assert np.array_equal(again.context_table.embeddings[:4], frozen.context_table.embeddings)


def two_tower():
    keras.utils.set_random_seed(0)
    model = tfdp_rec.models.TwoTower(
        vocabulary=[318, 296, 593, 356], width=4, hidden=3, ks=(1,), prior=[4, 3, 2, 1], history_length=2
    )
    model.compile(optimizer_of())
    batch = {"context": np.array([[1, 2], [3, 0]]), "label": np.array([4, 1]), "negatives": np.array([2, 3])}
    for _ in range(3):
        model.train_on_batch(batch)
    return model


@pytest.mark.slow
def test_a_two_tower_takes_in_items_and_scores_the_others_as_before():
    model, told = two_tower(), np.array([[1, 2], [4, 0]])
    larger = model.grow([50, 527])
    assert larger.vocabulary.tolist() == [318, 296, 593, 356, 50, 527] and larger.ks == model.ks
    np.testing.assert_allclose(larger.prior, np.array([4, 3, 2, 1, 1, 1]) / 12)
    shift = np.asarray(larger(told))[:, :4] - np.asarray(model(told))
    np.testing.assert_allclose(shift, np.log(10 / 12), atol=1e-5)  # of the prior, which has more items to share
    assert accounted(larger).spending.history.steps == 3
    assert model.grow([50], prior=[1, 1, 1, 1, 6]).prior[-1] == pytest.approx(0.6)
    with pytest.raises(ValueError, match="318"):
        model.grow([318])
    with pytest.raises(ValueError, match="5 positive numbers"):
        model.grow([50], prior=[1, 2])
