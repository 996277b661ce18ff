"""An expense is one entry with an id: under a ledger the model carries receipts, and its history is its own."""

import contextlib
import copy
import math
import pickle
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from counting import count
from dp_accounting import GaussianDpEvent
from trainings import (
    DELTA,
    REFUSED,
    SAMPLING,
    accountant_of,
    after_step,
    bare_model,
    model_of,
    optimizer_of,
    rows,
    train,
)

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.entries import Entries, Entry
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.meter import Meter
from tfdp_rec.core.claim.sampling_proof import Source
from tfdp_rec.core.claim.spending import Spending
from tfdp_rec.privacy import BrokenLedger, PoissonSampling, Unaccounted

TARGET = 30.0


def epsilon_of_steps(steps):
    return accountant_of().epsilon(steps)


# Receipts.


@pytest.mark.fast_cases("epsilon")
@pytest.mark.parametrize("tell", ["epsilon", "statement"])
def test_a_model_that_was_trained_before_its_ledger_was_begun_has_no_epsilon(tmp_path, tell):
    """One after another, 986fe75 told 10 steps."""
    for model in [model_of() for _ in range(3)]:
        train(model, 10)
        accountant = accountant_of(model, ledger=tmp_path / "ledger.jsonl")
        with pytest.raises(Unaccounted, match="10 steps were made"):
            getattr(accountant, tell)()
        accountant.close()
    assert not read(tmp_path / "ledger.jsonl").paid


@pytest.mark.slow
def test_a_model_does_not_hide_behind_the_payments_of_another(tmp_path):
    accountant, first, second = accountant_of(ledger=tmp_path / "ledger.jsonl"), model_of(), model_of()
    train(first, 10, PrivacyBudget(accountant, TARGET))
    accountant.close()
    train(second, 10)
    accountant = accountant_of(second, ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(Unaccounted, match="10 steps were made .* or another model made them"):
        accountant.epsilon()


@pytest.mark.slow
def test_an_older_backup_is_noticed_by_a_model_whose_steps_another_model_equals(tmp_path):
    path, older = tmp_path / "ledger.jsonl", tmp_path / "older.jsonl"
    accountant, first, second = accountant_of(ledger=path), model_of(), model_of()
    train(first, 5, PrivacyBudget(accountant, TARGET))
    shutil.copy(path, older)
    train(second, 5, PrivacyBudget(accountant, TARGET))
    accountant.close()
    again = accountant_of(second, ledger=older)
    with pytest.raises(Unaccounted, match="5 steps were made"):
        again.epsilon()


@pytest.mark.slow
def test_blocks_of_one_training_are_one_entry(tmp_path, monkeypatch):
    monkeypatch.setattr("tfdp_rec.core.claim.spending.BLOCK", 4)
    accountant, model = accountant_of(ledger=tmp_path / "ledger.jsonl"), model_of()
    train(model, 10, PrivacyBudget(accountant, TARGET))
    ((id, entry),) = model.privacy_history.snapshot().items()
    assert entry.steps == 10 == accountant.spending.payments.steps_of(id)
    train(model, 3, PrivacyBudget(accountant, TARGET))
    assert [entry.steps for entry in model.privacy_history.snapshot()] == [10, 3]
    assert accountant.steps == read(tmp_path / "ledger.jsonl").steps == 13


def test_batches_of_an_equal_sampling_are_not_counted_under_the_payment_of_another(tmp_path):
    """Two samplings with equal settings shared an id, and the smaller count was lost."""
    accountant, model = accountant_of(ledger=tmp_path / "ledger.jsonl"), model_of()
    equal = iter(PoissonSampling(num_units=500, expected_batch_size=25).batches(rows))

    def besides(batch):
        if batch == 1:
            with pytest.raises(REFUSED, match="Refused batch"):
                model.train_on_batch(next(equal))

    train(model, 4, PrivacyBudget(accountant, TARGET), after_step(besides))
    assert int(model.optimizer.iterations) == accountant.steps == read(tmp_path / "ledger.jsonl").steps == 4


@pytest.mark.slow
def test_a_choice_before_training_is_paid_for_once_however_many_models_use_it(tmp_path):
    from tfdp_rec.optimizers import Preselection

    chosen = Preselection({"embedding/embeddings": [0, 2]}, noise_multiplier=20.0)
    ids = keras.Input([1], dtype="int32")
    accountant = accountant_of(ledger=tmp_path / "ledger.jsonl")
    for _ in range(2):
        table = keras.layers.Embedding(4, 2, name="embedding")
        model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
        model.compile(optimizer_of(kind=tfdp_rec.FEST, preselection=chosen), "mse", run_eagerly=True)
        batches = SAMPLING.batches(lambda i: (np.zeros([len(i), 1], np.int32), np.ones([len(i), 1], np.float32)))
        model.fit(batches, steps_per_epoch=2, verbose=0, callbacks=[PrivacyBudget(accountant, TARGET)])
    assert accountant.spent_besides == [(GaussianDpEvent(20.0), chosen.label)]
    assert accountant.steps == 4


# A history is the model's.


@pytest.mark.fast_cases("options0")
@pytest.mark.parametrize("options", [{"compile": False}, {}])
def test_a_model_is_loaded_with_its_history_compiled_or_not(tmp_path, options):
    model = model_of()
    train(model, 10)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", **options)
    assert accountant_of(loaded).steps == 10
    loaded.compile(optimizer_of(), "mse", run_eagerly=True)
    train(loaded, 4)
    assert accountant_of(loaded).steps == 14
    beside = model_of(layer=loaded.layers[-1])
    train(beside, 2)
    assert accountant_of(beside).steps == 16


def test_a_history_given_to_an_optimizer_that_made_no_step_stays_with_the_model():
    """As a checkpoint gives it: the optimizer has it, and has moved no variable yet that would carry it."""
    other, model = model_of(), model_of()
    train(other, 10)
    model.privacy_history.merge(other.privacy_history.snapshot())
    model.compile(optimizer_of(), "mse", run_eagerly=True)
    assert accountant_of(model).steps == 10
    train(model, 4)
    assert accountant_of(model).steps == 14


def test_steps_that_no_history_describes_are_seen_after_an_optimizers_state_was_read():
    model, fresh, store = model_of(), model_of(), {}
    train(model, 10)
    fresh.prepare(rows(range(4)))
    fresh.optimizer.save_own_variables(store)
    model.optimizer.load_own_variables({key: np.array(value) for key, value in store.items()})
    assert int(model.optimizer.iterations) == 0 and model.privacy_history.undescribed_steps == 0
    model.optimizer.iterations.assign(5)
    assert model.privacy_history.undescribed_steps == 5


def test_a_model_that_comes_to_share_the_weights_in_mid_fit_changes_the_price_of_steps():
    model, trained = model_of(), model_of()
    train(trained, 10)

    class Join(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                beside = model_of(layer=model.layers[-1])
                beside.privacy_history.merge(trained.privacy_history.snapshot())
                beside.prepare(rows(range(4)))

    accountant = accountant_of(model)
    budget = PrivacyBudget(accountant, epsilon_of_steps(5) * 1.001)
    with pytest.raises(ValueError, match="by another model"):
        train(model, 8, budget, Join())
    assert int(model.optimizer.iterations) == 2 and accountant.steps == 12


@pytest.mark.slow
def test_a_history_that_was_loaded_without_compiling_goes_with_its_weights(tmp_path):
    model = model_of()
    train(model, 10)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    beside = model_of(layer=loaded.layers[-1])
    train(beside, 2)
    assert accountant_of(beside).steps == 12
    loaded.compile("adam", "mse", run_eagerly=True)
    loaded.fit(*rows(range(40)), batch_size=10, verbose=0)
    assert accountant_of(beside).spending.history.ordinary == {"Adam": 4}, "the same steps in two histories"


def test_weights_carry_the_history_into_a_model_that_is_not_compiled(tmp_path):
    model, other = model_of(), bare_model()
    train(model, 10)
    model.save_weights(tmp_path / "some.weights.h5")
    other.load_weights(tmp_path / "some.weights.h5")
    assert accountant_of(other).steps == 10


WAYS_IN = {
    "weights": lambda of, into, path: [do(path / "a.weights.h5") for do in (of.save_weights, into.load_weights)],
    "state tree": lambda of, into, path: into.set_state_tree(of.get_state_tree()),
    "checkpoint": lambda of, into, path: tf.train.Checkpoint(model=into).read(
        tf.train.Checkpoint(model=of).write(str(path / "a"))
    ),
}


@pytest.mark.fast_cases("state tree")
@pytest.mark.parametrize("way", WAYS_IN.values(), ids=WAYS_IN)
def test_layers_that_were_loaded_take_the_history_into_other_models(tmp_path, way):
    """The optimizer of the loaded model was never built, and ten steps were told as none to models of its layers."""
    trained, loaded = (model_of(layer=keras.layers.Dense(1, name="same")) for _ in range(2))
    train(trained, 10)
    way(trained, loaded, tmp_path)
    beside = model_of(layer=loaded.layers[-1])
    np.testing.assert_array_equal(beside.get_weights()[0], trained.get_weights()[0])
    train(beside, 2)
    assert accountant_of(beside).steps == 12


class TwoParts(tfdp_rec.PrivateModel):
    """A model with a weight of its own, of some size."""

    def __init__(self, size, **options):
        super().__init__(**options)
        self.size, self.dense = size, keras.layers.Dense(1)

    def build(self, shape):
        for number in range(self.size):
            self.add_weight(shape=(1,), trainable=False, name=f"own_{number}")
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


@pytest.mark.slow
def test_what_is_loaded_past_an_error_has_its_history(tmp_path):
    models = [TwoParts(size) for size in (1, 2)]
    for model in models:
        model.build((None, 2))
    models[0].compile(optimizer_of(), "mse", run_eagerly=True)
    train(models[0], 10)
    models[0].save_weights(tmp_path / "one.weights.h5")
    models[1].load_weights(tmp_path / "one.weights.h5", skip_mismatch=True)
    np.testing.assert_array_equal(models[1].dense.get_weights()[0], models[0].dense.get_weights()[0])
    models[1].compile(optimizer_of(), "mse", run_eagerly=True)
    train(models[1], 2)
    assert accountant_of(models[1]).steps == 12


@pytest.mark.slow
def test_a_tensorflow_checkpoint_brings_its_history(tmp_path):
    """The steps of a model with less noise were told at the price of this one's: ε = .15 for 27."""
    other = model_of(optimizer_of(noise=0.5))
    train(other, 5)
    path = tf.train.Checkpoint(model=other).write(str(tmp_path / "other"))
    for steps in (0, 3, 8):  # fewer and more than the other has
        model = model_of(optimizer_of(noise=5.0))
        train(model, steps) if steps else None
        tf.train.Checkpoint(model=model).read(path).assert_consumed()
        np.testing.assert_array_equal(model.get_weights()[0], other.get_weights()[0])
        accountant = accountant_of(model)
        assert (GaussianDpEvent(0.5), 5) in accountant.runs() and accountant.steps == steps + 5
        assert accountant.epsilon() >= accountant_of(other).epsilon()
        train(model, 2)
        assert accountant.steps == steps + 7
        model.optimizer.iterations.assign_add(3)
        with pytest.raises(Unaccounted, match="has made 3 steps that its privacy history does not describe"):
            accountant.epsilon()


def test_a_tensorflow_checkpoint_brings_its_history_to_a_model_that_is_not_compiled(tmp_path):
    other, model = model_of(), bare_model()
    train(other, 5)
    path = tf.train.Checkpoint(model=other).write(str(tmp_path / "other"))
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    model.save(tmp_path / "model.keras")
    assert accountant_of(model).steps == accountant_of(keras.models.load_model(tmp_path / "model.keras")).steps == 5


def pickled(model, folder):
    (folder / "pickled").write_bytes(pickle.dumps(model))


WITHOUT_HISTORY = {
    "save": lambda model, folder: model.save(folder / "m.keras"),
    "save as HDF5": lambda model, folder: model.save(folder / "m.h5"),
    "keras.saving": lambda model, folder: keras.saving.save_model(model, folder / "m.keras"),
    "a folder": lambda model, folder: keras.saving.save_model(model, folder / "m", zipped=False),
    "HDF5 by keras.saving": lambda model, folder: keras.saving.save_model(model, folder / "m.hdf5"),
    "weights": lambda model, folder: model.save_weights(folder / "m.weights.h5"),
    "sharded weights": lambda model, folder: model.save_weights(folder / "m.weights.json", max_shard_size=1),
    "a pickle": pickled,
    "a copy": lambda model, folder: copy.deepcopy(model),
    "a copy of a layer": lambda model, folder: copy.deepcopy(model.layers[-1]),
    "another model": lambda model, folder: keras.Model(model.inputs, model.outputs).save(folder / "m.keras"),
}
HDF5 = [name for name in WITHOUT_HISTORY if "HDF5" in name]


@pytest.fixture(scope="module")
def trained():
    """A plain model, and the private one on its layers, which has made a step."""
    plain = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    settings = {"epsilon": 3.0, "batch_size": 10, "epochs": 1, "learning_rate": 0.1, "accountant": "rdp"}
    private = tfdp_rec.make_private(plain, rows(range(50)), **settings)
    copy.deepcopy(plain.layers[-1])  # as yet there is no history to lose
    private.fit(steps_per_epoch=1, verbose=0)
    return plain, private.model


@pytest.mark.parametrize("way", WITHOUT_HISTORY)
def test_no_file_or_copy_of_a_plain_model_leaves_the_history_behind(trained, way, tmp_path):
    """A private training that continued from one was told ε = 3.00 for 3.75."""
    with pytest.raises(ValueError, match="would not hold the privacy history"):
        WITHOUT_HISTORY[way](trained[0], tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 10_000]


@pytest.mark.parametrize("way", HDF5)
def test_hdf5_is_refused_for_the_private_model_too(trained, way, tmp_path):
    with pytest.raises(ValueError, match="An HDF5 file would not hold"):
        WITHOUT_HISTORY[way](trained[1], tmp_path)


def test_a_plain_model_around_a_private_one_saves_its_history(trained, tmp_path):
    inputs = keras.Input([2])
    around = keras.Model(inputs, trained[1](inputs))
    around.save_weights(tmp_path / "around.weights.h5")
    other = keras.Model(inputs, model_of()(inputs))
    other.load_weights(tmp_path / "around.weights.h5")
    assert other.layers[-1].privacy_history.snapshot().steps == 1


# Steps keep the price that they were made at.


@pytest.mark.fast_cases("load")
@pytest.mark.parametrize("way", ["restore", "load", "variables"])
def test_no_file_changes_what_an_optimizer_was_made_with(tmp_path, way):
    """Restored into a variable, the noise was another than the price's: a step was refused."""
    quiet, loud = model_of(optimizer_of(noise=4.0)), model_of(optimizer_of(noise=0.5))
    train(quiet, 1)
    train(loud, 10)
    before = accountant_of(loud).epsilon()
    if way == "restore":
        checkpoint = tf.train.Checkpoint(optimizer=quiet.optimizer).write(str(tmp_path / "quiet"))
        tf.train.Checkpoint(optimizer=loud.optimizer).restore(checkpoint)
    elif way == "load":
        store = {}
        quiet.optimizer.save_own_variables(store)
        loud.optimizer.load_own_variables(store)
    else:
        for variable, other in zip(loud.optimizer.variables, quiet.optimizer.variables):
            variable.assign(other)
    accountant = accountant_of(loud)
    assert loud.optimizer.noise_multiplier == 0.5 and accountant.epsilon() == before
    train(loud, 2)
    assert accountant.runs() == [(GaussianDpEvent(0.5), 12)]


@pytest.mark.parametrize("name", ["noise_multiplier", "l2_norm_clip", "expected_batch_size"])
def test_what_decides_a_price_is_fixed(name):
    """Steps were told at the noise of their time, by a record of its changes."""
    optimizer = optimizer_of()
    for change in (lambda: setattr(optimizer, name, 3.0), lambda: setattr(model_of(optimizer).optimizer, name, 3.0)):
        with pytest.raises(AttributeError, match=f"{name} of a DPSGD is fixed"):
            change()
    assert optimizer.get_config()[name] == getattr(optimizer_of(), name)


@pytest.mark.parametrize("given", ["epsilon", "noise_multiplier"])
def test_an_optimizer_that_costs_more_than_its_plan_is_refused(given):
    """A count of steps is no bound on epsilon: 20 planned for 2.0 cost 9.49, fifteen of them at a noise of .5."""
    plan = tfdp_rec.PrivatePlan(sampling=SAMPLING, delta=DELTA, steps=6, accountant="rdp", **{given: 2.0})
    with pytest.raises(ValueError, match="costs more than the plan's"):
        optimizer_of(plan=plan, noise_multiplier=plan.noise_multiplier / 4)
    assert optimizer_of(plan=plan, noise_multiplier=plan.noise_multiplier * 2).plan is plan


# What no ε covers is said.


@pytest.mark.slow
def test_steps_of_an_ordinary_optimizer_after_private_training_are_said(tmp_path):
    model = model_of()
    train(model, 3)
    accountant = accountant_of(model)
    assert "Adam" not in accountant.statement()
    before = accountant.statement().fields["Guarantee"]
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(*rows(range(40)), batch_size=10, verbose=0)
    assert "4 steps of Adam before or after private training" in " ".join(accountant.statement().split())
    first = accountant.statement().fields["Guarantee"]
    assert first.startswith("none, since 4 steps of Adam")
    assert first.endswith(f"The private training alone has {before}")
    assert "Covers" not in accountant.statement().fields and "TF Privacy" not in accountant.statement()
    with pytest.warns(UserWarning, match="also trained for 4 steps of Adam"):
        model.export(tmp_path / "servable", verbose=False)
    with pytest.warns(UserWarning, match="also trained for 4 steps of Adam"):
        model.save(tmp_path / "model.keras")
    again = accountant_of(keras.models.load_model(tmp_path / "model.keras"))
    assert again.steps == 3 and "4 steps of Adam" in " ".join(again.statement().split())


@pytest.mark.fast_cases("not trained before")
@pytest.mark.parametrize("first", ["trained before", "not trained before"])
def test_the_model_that_was_made_private_says_its_own_steps(first):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, y = rows(range(50))
    if first == "trained before":
        model.fit(x, y, batch_size=10, verbose=0)  # a graph that is older than the private training
    with pytest.warns() if first == "trained before" else contextlib.nullcontext():
        private = tfdp_rec.make_private(
            model, (x, y), epsilon=3.0, batch_size=10, epochs=1, learning_rate=0.1, accountant="rdp"
        )
    before = 5 if first == "trained before" else 0
    model.fit(x, y, batch_size=10, verbose=0)  # on weights that are private training's by now
    private.fit(verbose=0)
    assert f"{before + 5} steps of Adam" in " ".join(private.statement().split())
    model.fit(x, y, batch_size=10, verbose=0)
    model.train_on_batch(x, y)
    assert f"{before + 11} steps of Adam" in " ".join(private.statement().split())


def test_a_graph_that_is_older_than_the_private_steps_of_another_model_is_traced_anew():
    layer, (x, y) = keras.layers.Dense(1), rows(range(40))
    model, private = model_of("adam", layer), model_of(layer=layer)
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=10, verbose=0)
    train(private, 2)
    model.fit(x, y, batch_size=10, verbose=0)
    assert "4 steps of Adam" in " ".join(accountant_of(private).statement().split())


def test_steps_before_private_training_are_said_once():
    model = model_of("adam")
    train(model, 3)
    for _ in range(2):
        model.compile(optimizer_of(), "mse", run_eagerly=True)
        train(model, 2)
    accountant = accountant_of(model)
    assert accountant.steps == 4 and math.isfinite(accountant.epsilon())
    assert accountant.statement().fields["Guarantee"].startswith("none, since 3 steps of Adam")


def test_steps_between_private_trainings_are_counted_once():
    model = model_of("adam")
    train(model, 3)
    for steps in (0, 4):
        model.compile("adam", "mse")
        model.fit(*rows(range(10 * steps)), batch_size=10, verbose=0) if steps else None
        model.compile(optimizer_of(), "mse", run_eagerly=True)
        train(model, 2)
    assert sum(model.saved_history().ordinary.values()) == 3 + 4


# A plan is a limit.


def plan_of(steps, **options):
    return tfdp_rec.PrivatePlan(sampling=SAMPLING, epsilon=2.0, delta=DELTA, steps=steps, accountant="rdp", **options)


@pytest.mark.slow
def test_a_graph_counts_the_steps_of_as_many_samplings_as_there_are_fits():
    """A counter's variables are made before the graph of its step, which may make none."""
    model = model_of(run_eagerly=False)
    for number in range(6):
        train(model, 2, sampling=PoissonSampling(500 + number, 25))
    assert [entry.steps for entry in model.privacy_history.snapshot()] == [2] * 6


def test_an_optimizer_that_took_a_plan_stops_with_it_in_fit():
    plan = plan_of(20)
    model = model_of(optimizer_of(plan=plan))
    model.fit(plan.batches(rows), steps_per_epoch=20, epochs=3, verbose=0)
    assert plan.accountant.epsilon() <= 2.0 and 20 <= plan.accountant.steps <= 21


@pytest.mark.parametrize("ledger", [False, True])
def test_the_optimizers_of_a_plan_share_its_steps_in_loops_by_hand(tmp_path, ledger):
    """Under a ledger the second one counted under the payment of the first, and half of the steps were told."""
    plan = plan_of(4, **({"ledger": tmp_path / "ledger.jsonl"} if ledger else {}))
    first, second = (model_of(optimizer_of(plan=plan)) for _ in range(2))
    drawn = iter(plan.batches(rows))
    for model in (first, second, first, second):
        model.train_on_batch(next(drawn))
    for model in (first, second):
        with pytest.raises(REFUSED, match="privacy budget is spent"):
            model.train_on_batch(next(drawn))
    assert plan.accountant.steps == 4 and plan.accountant.epsilon() <= 2.0
    assert sum(model.saved_history().steps for model in (first, second)) == 4
    plan.accountant.close()
    assert not ledger or read(tmp_path / "ledger.jsonl").steps == 4


def steps_until_refused(model, most):
    for made, batch in enumerate(SAMPLING.batches(rows).take(most)):
        try:
            model.train_on_batch(batch)
        except REFUSED:
            return made
    return most


@pytest.mark.fast_cases("model")
@pytest.mark.parametrize("copied", ["deep optimizer", "optimizer", "deep model", "model"])
def test_a_copy_makes_steps_of_the_same_plan(copied):
    """Of the copy it allowed as many as one liked, and did not count them."""
    plan = plan_of(6)
    model = model_of(optimizer_of(plan=plan))
    assert steps_until_refused(model, 3) == 3
    make = copy.deepcopy if copied.startswith("deep") else copy.copy
    other = make(model) if copied.endswith("model") else model_of(make(model.optimizer))
    assert steps_until_refused(model, 1) == 1
    assert steps_until_refused(other, 5) == 2
    assert plan.accountant.steps == 6 and plan.accountant.epsilon() == pytest.approx(plan.accountant.epsilon(steps=6))


def test_after_a_fit_a_plan_leaves_what_it_has_left():
    plan = plan_of(6)
    model = model_of(optimizer_of(plan=plan))
    for _ in range(2):
        model.fit(plan.batches(rows), steps_per_epoch=2, verbose=0)
    drawn = iter(plan.batches(rows))
    for _ in range(2):
        model.train_on_batch(next(drawn))
    with pytest.raises(REFUSED, match="privacy budget is spent"):
        model.train_on_batch(next(drawn))
    assert plan.accountant.steps == 6


def test_under_a_ledger_a_plan_makes_no_step_that_is_not_paid_for(tmp_path):
    plan, path = plan_of(6, ledger=tmp_path / "ledger.jsonl"), tmp_path / "ledger.jsonl"
    model, drawn = model_of(optimizer_of(plan=plan)), iter(plan.batches(rows))
    model.prepare(rows(range(25)))
    with pytest.raises(REFUSED, match="privacy budget is spent"):
        model.train_step(next(drawn))  # a loop of one's own, which pays for nothing
    assert not read(path).paid
    model.train_on_batch(next(drawn))
    plan.accountant.give_back_rest()
    with pytest.raises(REFUSED, match="privacy budget is spent"):
        model.train_step(next(drawn))
    model.fit(plan.batches(rows), steps_per_epoch=2, verbose=0)
    assert plan.accountant.steps == read(path).steps == 3


def test_an_interrupted_fit_leaves_a_plan_a_limit_for_its_other_optimizers():
    """Keras calls no `on_train_end` then: a loop by hand of the second model made any number of steps."""
    plan = plan_of(6)
    first, second = (model_of(optimizer_of(plan=plan)) for _ in range(2))
    stop = after_step(lambda batch: 1 / (1 - batch))
    with pytest.raises(ZeroDivisionError):
        first.fit(plan.batches(rows), steps_per_epoch=6, verbose=0, callbacks=[plan.budget(), stop])
    drawn = iter(plan.batches(rows))
    with pytest.raises(REFUSED, match="privacy budget is spent"):
        for _ in range(6):
            second.train_step(next(drawn))
    assert plan.accountant.steps == 6 and plan.accountant.epsilon() <= 2.0


# A statement of a ledger that is gone.


def test_no_statement_says_that_a_ledger_paid_which_is_gone(tmp_path):
    path = tmp_path / "ledger.jsonl"
    accountant, model = accountant_of(ledger=path), model_of()
    said = []

    def remove(batch):
        path.unlink(missing_ok=True)
        with pytest.raises(BrokenLedger, match="removed, replaced or written to"):
            accountant.statement()
        said.append(batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, 3, PrivacyBudget(accountant, TARGET), after_step(remove))
    assert said == [0]


# A budget looks again whenever something else than its own steps was done.


def by_hand(steps):
    return Entry(GaussianDpEvent(1.0), steps, SAMPLING.get_state())


def of_another_sampling(model, accountant):
    model.privacy_history.add(Source(PoissonSampling(500, 50)), 1)


def of_another_model(model, accountant):
    other = optimizer_of()
    accountant.follow(other)
    other.privacy_history.add(Source(SAMPLING), 1)


def of_shared_weights(model, accountant):
    other = optimizer_of()
    other.privacy_history.attach(model.trainable_variables)
    other.privacy_history.add(Source(SAMPLING), 1)


ELSE = {
    "another sampling": of_another_sampling,
    "elsewhere": lambda model, accountant: model.privacy_history.add_entry(by_hand(1)),
    "told": lambda model, accountant: count(accountant, GaussianDpEvent(1.0), 1),
    "spent": lambda model, accountant: accountant.spend(GaussianDpEvent(5.0), "counts"),
    "another model": of_another_model,
    "shared weights": of_shared_weights,
}


@pytest.mark.slow
def test_a_budget_looks_again_at_whatever_else_was_done(monkeypatch):
    """In one fit, one after the other: two steps of its own, at which it does not look, then something else."""
    asked, accountant, model, left, looked = [], accountant_of(), model_of(), dict(ELSE), []
    refuse = Spending.refuse
    monkeypatch.setattr(Spending, "refuse", lambda each: asked.append(1) or refuse(each))

    class Does(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 3 == 0:
                asked.clear()
            elif batch % 3 == 2:
                assert not asked, looked
                name = next(iter(left))
                left.pop(name)(model, accountant)
                looked.append(name)

        def on_train_batch_begin(self, batch, logs=None):
            if batch and batch % 3 == 0:
                assert asked, looked

    train(model, 3 * len(ELSE) + 1, PrivacyBudget(accountant, 100.0), Does())
    assert looked == list(ELSE) and accountant.steps >= 3 * len(ELSE) + 1


def test_a_budget_looks_at_every_step_of_another_model_that_its_accountant_follows():
    accountant, model, other = accountant_of(), model_of(), model_of()
    accountant.follow(other)
    drawn = iter(SAMPLING.batches(rows))

    def step(batch=0, logs=None):
        other.train_on_batch(next(drawn))

    step()
    besides = keras.callbacks.LambdaCallback(on_train_batch_end=step)
    train(model, 20, besides, PrivacyBudget(accountant, 1.0001 * epsilon_of_steps(11)))
    assert [int(each.optimizer.iterations) for each in (model, other)] == [5, 6] and accountant.steps == 11


def test_entries_are_merged_by_the_larger_count():
    one, two = Entries(), Entries()
    for entries, steps in ((one, 5), (two, 7), (one, 6)):
        entries.add(Entry(GaussianDpEvent(1.0), steps), "same")
    one.merge(two)
    one.merge(two)
    assert one.steps == 7 and Entries.loads(one.dumps()).steps == 7


# A history is the model's, whichever way its parts come together.


def test_an_optimizer_that_is_assigned_goes_on_with_the_history(tmp_path):
    """Ahead of the first step, an accountant told 0 steps and epsilon 0, and so did the file."""
    model = model_of(optimizer_of(1.0))
    model.optimizer = optimizer_of(0.3)
    train(model, 2)
    model.optimizer = optimizer_of(0.5)
    train(model, 1)
    model.save(tmp_path / "model.keras")
    for found in (model, keras.models.load_model(tmp_path / "model.keras", compile=False)):
        runs = [(event.noise_multiplier, steps) for event, steps in accountant_of(found).runs()]
        assert runs == [(0.3, 2), (0.5, 1)]


def test_a_state_tree_holds_the_history():
    """Where the optimizers' names differ, its `iterations` are not restored either: 0 steps were told."""
    model, again = model_of(), model_of(optimizer_of(name="of another process"))
    train(model, 3)
    train(again, 1)
    for _ in range(2):  # what was read twice is counted once
        again.set_state_tree(model.get_state_tree())
    assert accountant_of(again).steps == 4


def test_a_state_tree_of_which_only_some_weights_fit_leaves_its_history():
    """The history came last: 0 steps were told of the weights that were in by then."""
    model, again = (model_of(layer=keras.layers.Dense(1, name="score")) for _ in range(2))
    train(model, 3)
    tree = model.get_state_tree()
    tree["trainable_variables"]["score"]["bias"] = np.zeros([7])
    with pytest.raises(ValueError):
        again.set_state_tree(tree)
    np.testing.assert_array_equal(again.layers[-1].kernel, model.layers[-1].kernel)
    assert again.privacy_history.snapshot().steps == 3


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_made_of_trained_layers_has_their_history_before_its_own_first_step(tmp_path, compiled):
    """Also in a file, from which it goes on: 0 steps were told."""
    layer = keras.layers.Dense(1)
    train(model_of(layer=layer), 3)
    model = bare_model(layer)
    if compiled:
        model.compile(optimizer_of(), "mse")
        assert accountant_of(model).steps == 3
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    if not compiled:
        loaded.compile(optimizer_of(), "mse", run_eagerly=True)
    train(loaded, 2)
    assert accountant_of(loaded).steps == 3 + 2


@pytest.mark.slow
def test_a_frozen_table_of_a_privately_trained_model_is_read_by_another():
    """It was refused: the check that a table owes no noise was taken for an effect of the loss."""
    inputs, table = keras.Input([], dtype="int64"), keras.layers.Embedding(5, 2)
    fetch = lambda indices: (indices % 5, np.ones([len(indices), 1], np.float32))  # noqa: E731
    for trainable in (True, False):
        table.trainable = trainable
        model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(table(inputs)))
        model.compile(optimizer_of(kind=tfdp_rec.LazyDPSGD), "mse")
        model.fit(SAMPLING.batches(fetch), steps_per_epoch=2, verbose=0)
    assert accountant_of(model).steps == 2 + 2


# A payment is for the steps that it names.


@pytest.mark.parametrize("difference", ["none", "sampling", "settings"])
def test_a_payment_is_for_steps_of_its_sampling_alone(tmp_path, difference):
    """A cheaper sampling's payment, and one for steps of which something else was said, pay for no step."""
    accountant, meter = accountant_of(ledger=tmp_path / "ledger.jsonl"), Meter()
    step, drawn = GaussianDpEvent(1.0), PoissonSampling(500, 50 if difference == "sampling" else 25)
    said = {"asserted": "a nightly job"} if difference == "settings" else {}
    settings = {"step": events.to_json(step), "sampling": SAMPLING.get_state(), **said}
    sampled = SAMPLING.compose(step, 1).event
    accountant.spending.payments.ledger.pay(sampled, 4, "training", settings, steps=4, id="0123")
    meter.add_entry(Entry(step, 4, drawn.get_state()), "0123")
    accountant.follow(types.SimpleNamespace(privacy_history=meter))
    if difference == "none":
        assert accountant.epsilon() == pytest.approx(epsilon_of_steps(4)) and accountant.steps == 4
    else:
        with pytest.raises(Unaccounted, match="4 steps were made that"):
            accountant.epsilon()
    assert accountant.spending.payments.ledger.epsilon(DELTA, "rdp") == pytest.approx(epsilon_of_steps(4))
    accountant.close()
