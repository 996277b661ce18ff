"""What reads a table, by whatever way, reads it settled, or is refused.

Every test here returned rows without their noise, or lost what they owed, before there were guards.
"""

import contextlib
import copy
import dataclasses
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from settling import EVERY_ID, ROWS, assert_settled, batches, in_training, model_of, raw

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.ground import withheld_rows
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import find_withheld
from tfdp_rec.noise import KeyedNoise

BATCHES = list(batches())
RAISES = pytest.raises(tf.errors.InvalidArgumentError, match="owes noise")


def table_of(model):
    return model.layers[1].embeddings


# Eager reads; test_release_methods.py has more.


@pytest.mark.fast_cases("<lambda>")
@pytest.mark.parametrize("read", [lambda table: table._value, copy.deepcopy, pickle.dumps])
def test_an_eager_read_is_refused(read):
    with pytest.raises(NotPrivate, match="owes noise"):
        read(table_of(in_training()))


def test_a_variable_of_tensorflow_holds_nothing():
    model = model_of()
    held = table_of(model).value
    model.train_on_batch(*BATCHES[0])
    assert held.numpy().size == tf.size(held.read_value()) == tf.size(tf.identity(held)) == 0
    for read in (lambda: held[0], lambda: tf.gather(held, [0]), lambda: tf.matmul(held, tf.ones([3, 1]))):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            read()


def test_a_copy_is_a_variable_of_its_own(eager_tables):
    model = in_training()
    model.settle()
    other = copy.deepcopy(table_of(model))
    model.train_on_batch(*BATCHES[3])
    assert_settled(other, eager_tables[2])
    assert not model.optimizer.releasable
    assert copy.copy(table_of(model)) is table_of(model)


def test_rows_owe_still_after_a_settling_that_was_interrupted(monkeypatch):
    model = in_training()

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(model.optimizer.debts, "settle_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.settle()
    assert not model.optimizer.releasable
    with pytest.raises(NotPrivate, match="owes noise"):
        table_of(model).numpy()
    model.settle()
    assert model.optimizer.releasable and np.isfinite(table_of(model).numpy()).all()


@pytest.mark.slow
def test_a_pickled_model_is_settled(eager_tables):
    assert_settled(table_of(pickle.loads(pickle.dumps(in_training()))), eager_tables[2])


@pytest.mark.fast_cases("options0")
@pytest.mark.parametrize("options", [{"momentum": 0.5}, {"momentum": 0.5, "nesterov": True}])
def test_momentum_is_read_settled(options):
    """A row's velocity holds the gradients that its noise is still to join."""
    lazy, eager = model_of(**options), model_of(tfdp_rec.DPSGD, **options)
    for model in (lazy, eager):
        for x, y in BATCHES[:3]:
            model.train_on_batch(x, y)
    assert not lazy.optimizer.releasable
    one, other = (next(v for v in m.optimizer.variables if v.shape == (ROWS, 3)) for m in (lazy, eager))
    with pytest.raises(NotPrivate, match="owes noise"):
        one.numpy()
    lazy.settle()
    np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)


# Reads by graphs that somebody compiled.


def assert_reads_nothing(read):
    with contextlib.suppress(tf.errors.InvalidArgumentError, tf.errors.InternalError, ValueError):
        found = read().numpy()
        assert not np.any(found), found


def trained_on(model):
    model.settle()
    model.train_on_batch(*BATCHES[3])
    assert not model.optimizer.releasable


@pytest.mark.slow
def test_a_compiled_layer_raises_until_settled(eager_tables):
    model = in_training()
    read = tf.function(model.layers[1])
    with RAISES:
        read(tf.range(ROWS))
    model.settle()
    assert_settled(read(tf.range(ROWS)), eager_tables[2])
    trained_on(model)
    with RAISES:
        read(tf.range(ROWS))
    model.get_weights()
    assert_settled(read(tf.range(ROWS)), eager_tables[3])


@pytest.mark.slow
def test_predict_of_a_part_raises_until_settled(eager_tables):
    model = in_training()
    part = keras.Model(model.input, model.layers[1].output)
    model.settle()
    assert_settled(part.predict(EVERY_ID, verbose=0).reshape(ROWS, 3), eager_tables[2])
    trained_on(model)
    with RAISES:
        part.predict(EVERY_ID, verbose=0)
    model.settle()
    assert_settled(part.predict(EVERY_ID, verbose=0).reshape(ROWS, 3), eager_tables[3])


@pytest.mark.slow
def test_a_compiled_read_at_the_end_of_a_batch_raises():
    seen = []

    class Look(keras.callbacks.Callback):
        keeps_off_weights = True

        def on_train_batch_end(self, batch, logs=None):
            try:
                self.read = getattr(self, "read", None) or tf.function(self.model.layers[1])
                self.read(tf.range(ROWS))
            except tf.errors.InvalidArgumentError as error:
                seen.append("owes noise" in str(error))

    model_of(eager=False).fit(batches(), verbose=0, callbacks=[Look()])
    assert seen == [True] * 5


@pytest.mark.slow
def test_reads_inside_loops_and_pipelines_are_checked():
    model = in_training()
    rows = tf.data.Dataset.range(2).map(lambda i: model.layers[1](i))

    @tf.function
    def loop():
        return tf.while_loop(lambda i, _: i < 3, lambda i, _: (i + 1, model.layers[1](i)), (0, tf.zeros([3])))

    with RAISES:
        list(rows)
    with RAISES:
        loop()
    model.settle()
    assert len(list(rows)) == 2 and loop()[0] == 3


def test_xla_which_drops_checks_finds_no_rows():
    """Keras compiles by it where there is a GPU."""
    model = in_training()
    model.settle()
    read = tf.function(lambda: tf.reduce_sum(tf.abs(table_of(model))), jit_compile=True)
    assert read() > 0
    trained_on(model)
    assert_reads_nothing(read)
    model.settle()
    assert read() > 0


def test_a_plain_model_that_keras_compiles_by_xla_reads_what_was_released():
    """As Keras does where there is a GPU: `evaluate` after `make_private` ended in an error."""
    model = model_of(eager=False)
    part = part_of(model)
    part.compile(loss="mse", jit_compile=True)
    part.predict(EVERY_ID, verbose=0)

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with contextlib.suppress(tf.errors.OpError, ValueError, NotPrivate):
                assert not np.any(part.predict(EVERY_ID, verbose=0))

    model.fit(batches(), verbose=0, callbacks=[Look()])
    assert_settled(part.predict(EVERY_ID, verbose=0).reshape(ROWS, 3), raw(model))


# Reads by graphs that are older than the guard, of which nothing can be changed any more: there is nothing to read.


def part_of(model):
    return keras.Model(model.input, model.layers[1].output)


def compiled(layer):
    graph = tf.function(layer)
    return lambda: graph(EVERY_ID)


def pipeline(layer):
    rows = tf.data.Dataset.from_tensors(EVERY_ID).map(layer)
    return lambda: next(iter(rows))


def predicted(model, method="predict", **options):
    return lambda: getattr(model, method)(EVERY_ID, **options)


def gathered(table):
    return lambda: tf.gather(table, EVERY_ID)


def another_model_that_is_trained(model):
    """By an ordinary optimizer, on the same table."""
    other = keras.Model(model.input, keras.layers.Dense(1)(keras.layers.Flatten()(model.layers[1].output)))
    other.compile("sgd", loss="mse")
    return lambda: other.train_on_batch(*BATCHES[0])


OLDER = {
    "predict of a part": lambda model: predicted(part_of(model), verbose=0),
    "a Sequential's predict_on_batch": lambda model: predicted(keras.Sequential([model.layers[1]]), "predict_on_batch"),
    "tf.function(layer)": lambda model: compiled(model.layers[1]),
    "tf.function(layer.call)": lambda model: compiled(model.layers[1].call),
    "tf.function(model)": compiled,
    "Dataset.map(layer)": lambda model: pipeline(model.layers[1]),
    "a model under another optimizer": another_model_that_is_trained,
    "its own predict": lambda model: predicted(model, verbose=0),
    "a variable taken out of it": lambda model: gathered(table_of(model).value),
    "its dictionary": lambda model: gathered(vars(table_of(model))["_value"]),
}


@pytest.mark.slow
def test_what_was_compiled_before_the_first_step_reads_no_row_that_owes():
    model = model_of(eager=False)
    reads = {way: older(model) for way, older in OLDER.items()}
    for read in reads.values():
        read()
    for way, read in [*reads.items()] * 2:  # settling gives the rows back, and the next step takes them again
        for x, y in BATCHES[:3]:
            model.train_on_batch(x, y)
        assert not model.optimizer.releasable
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            read()
            assert model.optimizer.releasable, way
        model.settle()
        read()
        assert_settled(raw(model), table_of(model))


@pytest.mark.slow
def test_a_table_read_whole_by_an_older_graph_has_no_rows():
    model = model_of(eager=False)
    table = vars(table_of(model))["_value"]  # as what was compiled before the model was has it
    whole = tf.function(lambda: tf.identity(table))
    by_xla = tf.function(lambda: tf.reduce_sum(tf.abs(table)), jit_compile=True)
    assert whole().shape == [ROWS, 3] and by_xla() > 0
    model.train_on_batch(*BATCHES[0])
    assert_reads_nothing(whole)
    assert_reads_nothing(by_xla)
    model.settle()
    assert whole().shape == [ROWS, 3] and by_xla() > 0


def test_a_graph_compiled_after_compile_says_what_it_waits_for():
    model = model_of(eager=False)
    read = predicted(part_of(model), verbose=0)
    read()
    model.train_on_batch(*BATCHES[0])
    with RAISES:
        read()


@pytest.mark.slow
def test_a_part_that_predicts_in_mid_epoch_gives_no_row_that_owes():
    model, seen = model_of(eager=False), []
    part = part_of(model)
    part.predict(EVERY_ID, verbose=0)

    class Look(keras.callbacks.Callback):
        keeps_off_weights = True

        def on_train_batch_end(self, batch, logs=None):
            with RAISES:
                part.predict(EVERY_ID, verbose=0)
            seen.append(batch)

    model.fit(batches(), verbose=0, callbacks=[Look()])
    assert seen == [0, 1, 2, 3, 4]
    assert_settled(part.predict(EVERY_ID, verbose=0).reshape(ROWS, 3), raw(model))


def test_candidate_scores_outside_a_step_are_guarded():
    """The layer gathers from the table itself, in a step and elsewhere."""
    scores = tfdp_rec.clipping.CandidateScores(ROWS, 3)
    negatives = np.arange(5)

    class Scores(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.scores = scores

        def per_example_loss(self, data, training=True):
            return self.scores.cross_entropy(data["query"], data["item"], negatives)

    scores.build([None, 3])
    model = Scores()
    noise = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4, "noise": KeyedNoise(1)}
    model.compile(tfdp_rec.LazyDPSGD(0.5, **noise))
    query, rows = np.ones([ROWS, 3], "float32"), np.arange(ROWS)
    read = tf.function(lambda: scores(query, rows, negatives))
    read()
    for _ in range(2):
        model.train_on_batch({"query": query[:4], "item": rows[:4]})
    with RAISES:
        read()
    with pytest.raises(NotPrivate, match="owes noise"):
        scores(query, rows, negatives)
    model.settle()
    found = scores(query, rows, negatives)
    np.testing.assert_allclose(found, read(), rtol=1e-6)


def test_rows_move_without_being_copied():
    model = model_of()
    held = table_of(model)
    address = lambda variable: np.frombuffer(memoryview(variable.read_value()), "f4").ctypes.data  # noqa: E731
    for x, y in BATCHES[:3]:
        before = address(vars(held)["_value"])
        model.prepare((x, y))
        find_withheld(held).withhold()
        assert address(find_withheld(held).private) == before
        model.train_on_batch(x, y)
        model.settle()


# What is exported carries nothing of the training.


@pytest.mark.slow
def test_an_export_has_no_check_in_it(tmp_path):
    model = in_training()
    model.export(str(tmp_path / "servable"), verbose=False)
    assert b"owes noise" not in (tmp_path / "servable/saved_model.pb").read_bytes()


@pytest.mark.slow
def test_an_export_by_hand_serves_elsewhere(tmp_path):
    """It has a check, which holds on to nothing and finds nothing to complain of."""
    model = in_training()
    model.settle()
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", model.call, [tf.TensorSpec([None, 2], tf.int32)])
    archive.write_out(str(tmp_path / "by-hand"), verbose=False)
    model.train_on_batch(*BATCHES[3])
    assert tf.saved_model.load(str(tmp_path / "by-hand")).serve(EVERY_ID).shape == [15, 1]


# Several who owe one table.


def sharing(table, seed, eager=False, **options):
    ids = keras.Input([2], dtype="int32")
    hidden = keras.layers.Flatten()(table(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1, kernel_initializer="ones", name=f"score_{seed}")(hidden))
    options = {"aggregate_noise": False, **options}
    optimizer = tfdp_rec.LazyDPSGD(
        0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4, noise=KeyedNoise(seed), **options
    )
    model.compile(optimizer, loss="mse", run_eagerly=eager)
    return model


def eager_like(model, table, seed):
    model.compile(
        tfdp_rec.DPSGD(
            0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4, noise=KeyedNoise(seed)
        ),
        loss="mse",
        run_eagerly=True,
    )
    return model


def two_models(kind):
    seeding.seed(0)
    table = keras.layers.Embedding(ROWS, 3, name="items")
    models = [sharing(table, 1), sharing(table, 2)]
    if kind == "eager":
        models = [eager_like(model, table, seed) for seed, model in enumerate(models, 1)]
    for number, (x, y) in enumerate(BATCHES):  # the first model's step is compiled before there is a second
        models[0 if number < 2 else number % 2].train_on_batch(x, y)
    return models, table


def test_two_models_that_share_a_table_are_both_settled():
    (eager, expected), (lazy, table) = two_models("eager"), two_models("lazy")
    for number in (0, 1):
        assert not lazy[0].optimizer.releasable and not lazy[1].optimizer.releasable
        lazy[number].get_weights()
        assert lazy[0].optimizer.releasable and lazy[1].optimizer.releasable
        np.testing.assert_allclose(table.embeddings, expected.embeddings, rtol=1e-4, atol=1e-5)
        for models in (eager, lazy):
            for model, batch in zip(models, BATCHES):
                model.train_on_batch(*batch)


@pytest.mark.fast_cases("plain")
@pytest.mark.parametrize("kind", ["plain", "not compiled", "not prepared"])
def test_a_sum_by_hand_of_a_model_on_the_same_table_reads_settled_rows(kind):
    """Losses and gradients were those of rows that lacked their noise."""

    class Reads:
        def per_example_loss(self, data, training=False):
            return tf.reduce_sum(self.items(data), axis=[1, 2])

    class Private(Reads, tfdp_rec.PrivateTraining, keras.Model):
        pass

    class Plain(Reads, keras.Model):
        pass

    model = in_training()
    peer = (Plain if kind == "plain" else Private)()
    peer.items, every = model.layers[1], EVERY_ID
    if kind == "not prepared":
        settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4}
        peer.compile(tfdp_rec.DPSGD(0.1, **settings))
    found = clipped_sum(peer, every, l2_norm_clip=1.0)
    rows = raw(model)
    np.testing.assert_allclose(found.losses, rows[every].sum(axis=(1, 2)), rtol=1e-5)
    model.settle()
    np.testing.assert_array_equal(raw(model), rows)  # all of them had been settled, since all were read
    assert np.all(np.isfinite(clipped_sum(peer, every, l2_norm_clip=1.0).losses))


def test_no_training_begins_while_weights_are_released(monkeypatch):
    """A step in another thread, between settling and publishing, let rows out without its noise."""
    model, began = in_training(), []

    def train():
        model.train_on_batch(*BATCHES[3])
        began.append("trained")

    settle, other = model.optimizer.settle, threading.Thread(target=train)

    def settled_slowly():
        settle()
        if not other.ident:
            other.start()
            other.join(timeout=1.0)
            began.append("released")

    model.optimizer.settle = settled_slowly
    model.settle()
    other.join()
    assert began == ["released", "trained"]
    with pytest.raises(NotPrivate, match="owes noise"):
        table_of(model).numpy()


@pytest.mark.parametrize("late_first", [True, False])
def test_a_mechanism_that_adds_noise_at_once_is_refused_beside_one_that_adds_it_late(late_first):
    """Its moves kept to no bound: rows that the late one had read lost that one's noise in their last bits."""
    table = keras.layers.Embedding(ROWS, 3, name="items")
    models = [sharing(table, 1, eager=True), eager_like(sharing(table, 2), table, 2)]
    first, second = models if late_first else reversed(models)
    first.train_on_batch(*BATCHES[0])
    for _ in range(2):
        with pytest.raises(NotPrivate, match="late and one at once"):
            second.train_on_batch(*BATCHES[0])


@pytest.mark.slow
def test_a_mechanism_that_no_model_is_compiled_with_any_more_is_beside_nothing():
    table = keras.layers.Embedding(ROWS, 3, name="items")
    models = [sharing(table, seed, eager=True) for seed in (1, 2)]
    for model in models:
        model.train_on_batch(*BATCHES[0])
    with pytest.raises(NotPrivate, match="late and one at once"):
        eager_like(models[0], table, 1).train_on_batch(*BATCHES[0])
    for seed, model in enumerate(models):
        eager_like(model, table, seed)
    for model in models:
        model.train_on_batch(*BATCHES[0])


def test_an_optimizer_that_no_model_has_built_moves_no_rows_that_another_one_withholds():
    """It was asked for nothing, and took weights past the bound of the other."""
    model = sharing(keras.layers.Embedding(ROWS, 3, name="items"), 1, eager=True)
    model.train_on_batch(*BATCHES[0])
    by_hand = tfdp_rec.DPSGD(1e4, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    clipped = clipped_sum(model, BATCHES[0], 1.0)
    model.settle()
    by_hand.build(model.trainable_variables, {table_of(model).path: None})
    model.train_on_batch(*BATCHES[0])
    with pytest.raises(NotPrivate, match="has no owner"):
        by_hand.apply(dataclasses.replace(clipped, ticket=None))


def test_decay_on_a_shared_table_is_refused():
    table = keras.layers.Embedding(ROWS, 3, name="items")
    sharing(table, 1, eager=True).train_on_batch(*BATCHES[0])
    other = sharing(table, 2, eager=True, weight_decay=0.1)
    for _ in range(2):  # at the second call the optimizer had been built, and its debts had no owner
        with pytest.raises(NotPrivate, match="weight_decay"):
            other.train_on_batch(*BATCHES[0])
    assert not other.optimizer.built


def apply_by_hand(model, batch):
    model.optimizer.apply(clipped_sum(model, batch, l2_norm_clip=1.0))


@pytest.mark.fast_cases("train_step")
@pytest.mark.parametrize("step", [tfdp_rec.PrivateModel.train_step, apply_by_hand])
def test_a_graph_that_is_older_than_another_optimizer_makes_no_step(step):
    """It settles nothing for that optimizer: the rows that it reads would lack the noise that they owe it."""
    table = keras.layers.Embedding(ROWS, 3, name="items")
    model, other = sharing(table, 1), sharing(table, 2)
    model.prepare(BATCHES[0])

    def trace():
        def run(x, y):
            step(model, (x, y))
            return tf.constant(True)

        return tf.function(run, autograph=False)

    older, batch = trace(), [tf.constant(part) for part in BATCHES[0]]
    older(*batch)
    model.settle()
    other.train_on_batch(*BATCHES[1])
    before = [other.optimizer.debts.marks.marks.numpy(), int(model.optimizer.iterations)]
    for _ in range(2):  # whether or not rows are withheld
        with pytest.raises(tf.errors.InvalidArgumentError, match="Another optimizer"):
            older(*batch)
        after = [other.optimizer.debts.marks.marks.numpy(), int(model.optimizer.iterations)]
        assert (after[0] == before[0]).all() and after[1] == before[1]
        model.settle()
        before[0] = other.optimizer.debts.marks.marks.numpy()
    other.train_on_batch(*BATCHES[1])
    trace()(*batch)
    read = np.unique(BATCHES[0][0])
    assert (other.optimizer.debts.marks.marks.numpy()[read] == 2).all()


def test_a_frozen_table_that_owes_noise_is_read_by_no_step():
    table = keras.layers.Embedding(ROWS, 3, name="items")
    model, other = sharing(table, 1), sharing(table, 2)
    table.trainable = False
    model.train_on_batch(*BATCHES[0])
    table.trainable = True
    other.train_on_batch(*BATCHES[1])
    table.trainable = False
    with RAISES:
        model.train_on_batch(*BATCHES[0])
    model.settle()
    model.train_on_batch(*BATCHES[0])


def test_a_table_of_2_to_the_31_values_has_rows(monkeypatch):
    monkeypatch.setattr(tf.raw_ops, "VariableShape", lambda input: tf.constant([1 << 16, 1 << 15]))
    assert withheld_rows._has_rows(None)


@pytest.mark.slow
def test_a_model_with_decay_may_be_compiled_anew():
    """What the optimizer before owed was settled when it was exchanged."""
    table = keras.layers.Embedding(ROWS, 3, name="items")
    model = sharing(table, 1, eager=True, weight_decay=0.1)
    model.train_on_batch(*BATCHES[0])
    first = model.optimizer
    assert not first.releasable
    model.compile(tfdp_rec.LazyDPSGD.from_config(first.get_config()), loss="mse", run_eagerly=True)
    assert first.releasable
    model.train_on_batch(*BATCHES[0])
    assert not model.optimizer.releasable


def test_a_dense_read_of_anothers_table_is_checked():
    """For the second model the table is an ordinary weight, read whole."""
    model = in_training()
    tied = keras.Sequential([keras.Input([3]), keras.layers.Lambda(lambda h: h @ tf.transpose(table_of(model)))])
    with RAISES:
        tied.predict(np.ones([1, 3]), verbose=0)


# What would forget a debt.


def test_another_optimizer_in_mid_training_settles_first(eager_tables):
    model = in_training()
    model.optimizer = keras.optimizers.SGD(0.1)
    assert_settled(raw(model), eager_tables[2])
    model.train_on_batch(*BATCHES[3])
    assert int(model.optimizer.iterations) == 1  # the new one's step was made, not the one compiled before


@pytest.mark.slow
def test_loading_an_optimizer_settles_first(eager_tables):
    model, store = in_training(), {}
    in_training(1).optimizer.save_own_variables(store)
    model.optimizer.load_own_variables({key: np.array(value) for key, value in store.items()})
    assert_settled(raw(model), eager_tables[2])


def test_loading_weights_that_do_not_fit_settles_first(tmp_path, eager_tables):
    other = model_of()
    wider = keras.Sequential([keras.Input([2], dtype="int32"), keras.layers.Embedding(ROWS + 1, 3)])
    wider.save_weights(tmp_path / "other.weights.h5")
    model = in_training()
    model.load_weights(tmp_path / "other.weights.h5", skip_mismatch=True)
    assert_settled(raw(model), eager_tables[2])
    assert other.optimizer.releasable


# A clipped sum is good for one step.


@pytest.mark.fast_cases("DPSGD")
@pytest.mark.parametrize("kind", [tfdp_rec.DPSGD, tfdp_rec.LazyDPSGD, tfdp_rec.EANA])
def test_a_sum_is_applied_once_and_changes_nothing_the_second_time(kind):
    model = model_of(kind)
    model.train_on_batch(*BATCHES[0])
    taken = clipped_sum(model, BATCHES[1], l2_norm_clip=1.0)
    model.optimizer.apply(taken)
    model.settle()
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="once a step"):
        model.optimizer.apply(taken)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_sensitivity_of_a_sum_cannot_be_rewritten():
    model = model_of()
    model.train_on_batch(*BATCHES[0])
    taken = clipped_sum(model, BATCHES[1], l2_norm_clip=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        taken.sensitivity = tf.constant(1e-3)


@pytest.mark.slow
def test_a_sum_for_another_optimizer_is_refused():
    one, other = model_of(), model_of()
    for model in (one, other):
        model.train_on_batch(*BATCHES[0])
    with pytest.raises(NotPrivate, match="another optimizer"):
        other.optimizer.apply(clipped_sum(one, BATCHES[1], l2_norm_clip=1.0))


@pytest.mark.slow
def test_a_sum_of_rows_that_owe_changes_no_dense_weight_either():
    """One made by hand, so that nothing but its rows tells that it is stale."""
    model = in_training()
    taken = clipped_sum(model, BATCHES[3], l2_norm_clip=1.0)
    model.train_on_batch(*BATCHES[0])
    taken = dataclasses.replace(taken, ticket=None)
    dense = [np.array(v) for v in model.layers[-1].trainable_variables]
    with pytest.raises(tf.errors.InvalidArgumentError, match="pending noise"):
        model.optimizer.apply(taken)
    for variable, before in zip(model.layers[-1].trainable_variables, dense, strict=True):
        np.testing.assert_array_equal(variable, before)


# Threads.


def in_another_thread(work):
    """The error that a function raises in another thread; None if it ends."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).exception()


def test_one_thread_of_a_process_trains(eager_tables):
    model, other, found = model_of(tfdp_rec.LazyDPSGD), model_of(tfdp_rec.DPSGD), []

    def ask(batch, logs):
        found.extend(in_another_thread(lambda each=each: each.train_on_batch(*BATCHES[3])) for each in (model, other))
        found.extend(map(in_another_thread, (model.get_weights, table_of(model).numpy)))
        found.append(in_another_thread(lambda: other.predict_on_batch(BATCHES[0][0])))

    model.fit(batches().take(3), verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=ask)])
    for first, second, whole, table, unrelated in zip(*[iter(found)] * 5):
        assert isinstance(first, NotPrivate) and isinstance(second, NotPrivate), "one draw could be used by two steps"
        assert "Another thread trains" in str(whole) and "Another thread trains" in str(table)
        assert unrelated is None
    assert len(found) == 15 and int(model.optimizer.iterations) == 3
    assert_settled(raw(model), eager_tables[2])
    assert in_another_thread(lambda: model.train_on_batch(*BATCHES[3])) is None  # later, another thread may
