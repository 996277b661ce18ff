"""The budget on real fits: never overspent, whoever makes the steps, and nothing that a model did is forgotten."""

import copy
import os
import sys

import keras
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from trainings import REFUSED, SAMPLING, accountant_of, after_step, model_of, optimizer_of, rows, train

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.claim.allowance import Allowance
from tfdp_rec.core.claim.entries import Entries
from tfdp_rec.core.claim.sampling_proof import Source
from tfdp_rec.core.claim.spending import Spending
from tfdp_rec.privacy import Accountant, PoissonSampling, Unaccounted


class Setup:
    """What a training script makes anew in every process."""

    def __init__(self, noise=1.0, steps_per_execution=1, kind=tfdp_rec.DPSGD):
        self.batches, self.accountant = SAMPLING.batches(rows), accountant_of()
        eagerly = {"steps_per_execution": steps_per_execution, "run_eagerly": steps_per_execution == 1}
        self.model = model_of(optimizer_of(noise, kind=kind), **eagerly)

    @property
    def steps(self):
        return int(self.model.optimizer.iterations)

    def fit(self, target, callbacks=(), **options):
        budget = PrivacyBudget(self.accountant, target)
        options = {"steps_per_epoch": 8, "epochs": 20, "verbose": 0, **options}
        return self.model.fit(self.batches, callbacks=[*callbacks, budget], **options)

    def interrupt(self, step):
        """A callback that ends a fit after so many steps of the model."""

        def act(batch):
            if self.steps == step:
                raise KeyboardInterrupt

        return after_step(act)


@pytest.fixture(scope="module")
def target():
    """A budget for 13 steps exactly, and a bit, at noise 1."""
    accountant = accountant_of()
    return (accountant.epsilon(13) + accountant.epsilon(14)) / 2


@pytest.mark.parametrize("steps_per_execution, taken", [(1, 13), (4, 12), (5, 10)])
def test_it_stops_at_the_last_step_that_fits(target, steps_per_execution, taken):
    setup = Setup(steps_per_execution=steps_per_execution)
    history = setup.fit(target)
    assert setup.steps == setup.accountant.steps == taken
    assert setup.accountant.epsilon() <= target
    assert setup.accountant.epsilon(taken + steps_per_execution) > target
    assert history.history["epsilon"][-1] == setup.accountant.epsilon()


@pytest.mark.parametrize("by", ["pld", "rdp"])
def test_epsilon_of_an_epoch_is_a_close_bound_and_that_of_the_last_is_the_statements(by):
    setup = Setup(noise=2.0)
    setup.accountant = Accountant(GaussianDpEvent(2.0), SAMPLING, delta=1e-4, accountant=by)
    first, last = setup.fit(100.0, epochs=2, steps_per_epoch=3).history["epsilon"]
    assert last == setup.accountant.epsilon() and first <= (exact := setup.accountant.epsilon(3)) * (1 + 1e-3)
    assert first > exact if by == "pld" else first == exact


def test_a_fit_within_the_budget_is_left_alone_and_the_end_of_one_is_said(target, capsys):
    setup = Setup()
    setup.fit(target, epochs=1, verbose=2)
    assert setup.steps == setup.accountant.steps == 8
    assert "budget" not in capsys.readouterr().out
    setup.fit(target, epochs=1, verbose=2)
    assert setup.steps == setup.accountant.steps == 13
    said = f"budget is spent: epsilon is {setup.accountant.epsilon():.4g} of {target:g} after 13 steps"
    assert capsys.readouterr().out.count(said) == 1


def test_a_spent_budget_or_one_too_small_is_refused_before_the_first_step(target):
    setup = Setup()
    setup.fit(target)
    with pytest.raises(ValueError, match="would exceed the budget"):
        setup.fit(target)
    fresh = Setup()
    with pytest.raises(ValueError, match="would exceed the budget"):
        fresh.fit(fresh.accountant.epsilon(1) * 0.99)
    assert (setup.steps, fresh.steps) == (13, 0)


def test_a_mechanism_without_a_guarantee_fits_no_budget():
    setup = Setup(kind=tfdp_rec.EANA)
    with pytest.raises(ValueError, match="such as EANA, fits no target"):
        setup.fit(1000.0)
    assert setup.steps == 0


@pytest.mark.fast_cases("1")
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_interrupted_steps_stay_counted(target, steps_per_execution):
    setup = Setup(steps_per_execution=steps_per_execution)
    with pytest.raises(KeyboardInterrupt):
        setup.fit(target, callbacks=[setup.interrupt(6)])
    assert setup.steps == 6 <= setup.accountant.steps <= 6 + steps_per_execution
    assert not setup.model.privacy_history.gate.is_kept  # or other models of these weights would wait for its end
    setup.fit(target)
    assert setup.accountant.epsilon() <= target and setup.steps <= 13


def test_data_that_runs_out_inside_an_execution_is_counted_as_it_was_used(target):
    setup = Setup(steps_per_execution=4)
    setup.batches = setup.batches.take(6)
    setup.fit(target, epochs=1, steps_per_epoch=None)
    assert setup.steps <= setup.accountant.steps <= 8
    assert setup.steps >= 6


def test_steps_made_before_the_budget_are_counted(target):
    setup = Setup()
    train(setup.model, 3)
    setup.fit(target)
    assert setup.steps == setup.accountant.steps == 13


def test_steps_that_no_history_describes_are_refused(target):
    setup = Setup()
    setup.model.optimizer.iterations.assign(3)
    with pytest.raises(Unaccounted, match="has made 3 steps that its privacy history does not describe"):
        setup.fit(target)


# What the model carries.


class TrainsAsWell(keras.callbacks.Callback):
    """Three steps of its own after every epoch."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_epoch_end(self, epoch, logs=None):
        iterator = iter(self.batches)
        for _ in range(3):
            self.model.train_on_batch(next(iterator))


@pytest.mark.slow
def test_a_callback_that_trains_between_epochs_is_counted(target):
    setup = Setup()
    setup.fit(100.0, callbacks=[TrainsAsWell(setup.batches)], steps_per_epoch=5, epochs=3)
    assert setup.steps == setup.accountant.steps == 24


def test_no_step_is_one_too_many_whoever_makes_it(target):
    setup = Setup()
    with pytest.raises(ValueError, match="privacy budget is spent"):
        setup.fit(target, callbacks=[TrainsAsWell(setup.batches)], steps_per_epoch=6, epochs=3)
    assert setup.steps == setup.accountant.steps == 13
    assert setup.accountant.epsilon() <= target


@pytest.mark.slow
def test_the_accountant_is_asked_when_something_happened_and_not_at_every_step(monkeypatch):
    setup, asked = Setup(), []
    refuse = Spending.refuse
    monkeypatch.setattr(Spending, "refuse", lambda spending: asked.append(1) or refuse(spending))
    setup.fit(100.0, steps_per_epoch=3, epochs=2)
    few = len(asked)
    setup.fit(100.0, steps_per_epoch=15, epochs=2)
    assert setup.accountant.steps == 36 and len(asked) <= 2 * few


@pytest.mark.slow
def test_compiling_again_carries_the_history(target):
    setup = Setup()
    setup.fit(target, epochs=1, steps_per_epoch=5)
    setup.model.compile(optimizer_of(), "mse", run_eagerly=True)
    second = accountant_of()
    train(setup.model, 5, PrivacyBudget(second, target))
    assert second.steps == setup.accountant.steps == 10
    assert second.epsilon() == setup.accountant.epsilon() == second.epsilon(10)
    assert "10 steps" in second.statement() and "10 steps" in setup.accountant.statement()


def test_compiling_again_with_other_noise_or_none_forgets_nothing(target):
    setup = Setup()
    setup.fit(100.0, epochs=1, steps_per_epoch=5)
    setup.model.compile("sgd", "mse")
    setup.model.compile(optimizer_of(noise=2.0), "mse", run_eagerly=True)
    setup.fit(100.0, epochs=1, steps_per_epoch=4)
    assert setup.accountant.runs() == [(GaussianDpEvent(1.0), 5), (GaussianDpEvent(2.0), 4)]


@pytest.mark.fast_cases("some.weights.h5")
@pytest.mark.parametrize("how", ["model.keras", "some.weights.h5"])
def test_a_saved_model_carries_its_history(target, how, tmp_path):
    setup = Setup()
    setup.fit(target, epochs=1, steps_per_epoch=5)
    again = Setup()
    if how == "model.keras":
        setup.model.save(tmp_path / how)
        again.model = keras.models.load_model(tmp_path / how)
    else:
        again.model.optimizer.build(again.model.trainable_variables, {})
        setup.model.save_weights(tmp_path / how)
        for _ in range(2):  # what was read twice is counted once
            again.model.load_weights(tmp_path / how)
    again.fit(target)
    assert again.steps == again.accountant.steps == 13
    assert b"Keyed" not in next(tmp_path.iterdir()).read_bytes()


def test_restored_without_its_history_a_model_makes_accountants_silent(target):
    setup, again = Setup(), Setup()
    setup.fit(target, epochs=1, steps_per_epoch=5)
    again.model.optimizer.build(again.model.trainable_variables, {})
    tree = setup.model.get_state_tree()
    del tree["privacy_history"]
    again.model.set_state_tree(tree)
    with pytest.raises(Unaccounted, match="has made 5 steps"):
        again.fit(target)


class Restore(keras.callbacks.Callback):
    """Saves weights after the first epoch, and loads them in a later fit."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_begin(self, logs=None):
        if self.path.exists():
            self.model.load_weights(self.path)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.save_weights(self.path)


def test_weights_restored_as_a_fit_begins_forget_no_step(tmp_path):
    """Killed in its second epoch, restored to the end of the first by a callback that comes after the budget."""

    def run(epochs, killed_at=None):
        setup = Setup()
        setup.model.optimizer.build(setup.model.trainable_variables, {})
        budget, restore = PrivacyBudget(setup.accountant, 100.0), Restore(tmp_path / "of.weights.h5")
        train(setup.model, 7, budget, restore, setup.interrupt(killed_at), epochs=2, initial_epoch=2 - epochs)
        return setup

    with pytest.raises(KeyboardInterrupt):
        run(2, killed_at=9)
    setup = run(1)
    assert setup.accountant.steps == setup.steps == 14


def test_a_copied_optimizer_counts_steps_of_its_own():
    setup = Setup()
    setup.fit(100.0, epochs=1, steps_per_epoch=3)
    original = setup.model.optimizer
    merged, copied = Entries(), copy.deepcopy(original)
    for optimizer in (original, copied):
        optimizer.privacy_history.add(Source(SAMPLING), 4)
        merged.merge(optimizer.privacy_history.snapshot())
    assert merged.steps == 3 + 4 + 4


# One budget for several fits: what it found for one does not hold for the next.


@pytest.mark.slow
def test_a_budget_used_again_counts_what_was_spent_between_its_fits():
    """Twice under another sampling, so that what was spent besides is one thing, of other length."""
    setup, other = Setup(), PoissonSampling(num_units=100, expected_batch_size=25)
    budget = PrivacyBudget(setup.accountant, setup.accountant.epsilon(200))
    train(setup.model, 1, sampling=other)
    train(setup.model, 1, budget)
    train(setup.model, 12, sampling=other)
    with pytest.raises(ValueError, match="would exceed the budget"):
        train(setup.model, 200, budget)
    assert setup.accountant.steps == 1


def test_steps_of_another_price_are_refused_while_a_budget_is_kept():
    """On other batches, and by another model on the same layers."""
    other = iter(PoissonSampling(num_units=100, expected_batch_size=25).batches(rows))

    def sharing(model):
        on(model.layers[-1])[0].train_on_batch(next(setup.drawn))

    for make in (
        lambda model: model.train_on_batch(next(other)),
        lambda model: model.train_on_batch(next(iter(SAMPLING.batches(rows, seed=3)))),
        sharing,
    ):
        setup = Setup()
        setup.drawn = iter(setup.batches)
        besides = after_step(lambda batch: batch == 2 and make(setup.model))  # noqa: B023
        with pytest.raises(REFUSED, match="Refused batch"):
            setup.fit(100.0, callbacks=[besides], steps_per_epoch=10, epochs=1)
        assert setup.steps == 3 and setup.accountant.epsilon() < 100


@pytest.mark.slow
def test_an_optimizer_that_a_model_comes_back_to_goes_on_under_a_budget():
    setup, first = Setup(), optimizer_of()
    for optimizer in (first, optimizer_of(), first):
        setup.model.compile(optimizer, "mse", run_eagerly=True)
        setup.fit(100.0, steps_per_epoch=2, epochs=1)
    assert setup.accountant.steps == 6


@pytest.mark.slow
def test_a_step_kept_by_hand_ends_when_the_model_is_compiled_with_another_optimizer():
    """It would look at rows that owe the newer one's noise, which it cannot pay."""
    setup, first = Setup(), optimizer_of()
    setup.model.compile(first, "mse")
    setup.model.make_train_function()
    step, drawn = setup.model.train_function, iter(setup.batches)
    step(drawn)
    setup.model.compile(optimizer_of(), "mse")
    setup.fit(100.0, steps_per_epoch=2, epochs=1)
    with pytest.raises(REFUSED, match="compiled with another optimizer after"):
        step(drawn)
    assert setup.accountant.steps == 3
    setup.model.compile(first, "mse")
    step(drawn)
    assert setup.accountant.steps == 4


@pytest.mark.parametrize("within", [True, False])
def test_a_budget_that_is_lowered_is_the_lower_one(target, within):
    """Within a fit, or between two."""
    setup = Setup()
    budget = PrivacyBudget(setup.accountant, 100.0)

    def lower(batch):
        if batch == 4:
            budget.target_epsilon = target

    for steps in [20] if within else [5, 20]:
        train(setup.model, steps, after_step(lower), budget)
    assert setup.steps == 13


# Models that share layers.


def on(layer):
    """A model of its own on a layer of another, with a head of its own, under an optimizer of its own."""
    return model_of(layer=keras.Sequential([layer, keras.layers.Dense(1)])), accountant_of()


def train_within(model, accountant, steps):
    train(model, steps, PrivacyBudget(accountant, 100.0))


@pytest.mark.fast_cases("one after the other")
@pytest.mark.parametrize("order", ["one after the other", "both built first"])
def test_models_that_share_a_trained_layer_count_all_steps_on_it(order):
    layer = keras.layers.Dense(3)
    (first, of_first), (second, of_second) = on(layer), on(layer)
    if order == "both built first":
        for model in (first, second):
            model.prepare(SAMPLING.batches(rows).element_spec)
    train_within(first, of_first, 5)
    train_within(second, of_second, 3)
    assert of_first.steps == of_second.steps == 8
    train_within(first, of_first, 2)
    assert of_first.steps == of_second.steps == 10 and of_first.epsilon() == of_second.epsilon()
    assert second.privacy_history.snapshot().steps == 10  # which is what a file of it holds


@pytest.mark.slow
def test_a_model_on_a_frozen_layer_counts_who_trained_it_and_not_the_other_way():
    layer = keras.layers.Dense(3)
    first, of_first = on(layer)
    train_within(first, of_first, 5)
    layer.trainable = False
    second, of_second = on(layer)
    train_within(second, of_second, 3)
    assert (of_first.steps, of_second.steps) == (5, 8)


@pytest.mark.slow
def test_models_count_through_one_between_them_once_each():
    left, right = keras.layers.Dense(2), keras.layers.Dense(2)
    (first, of_first), (second, of_second) = on(left), on(right)
    between, of_between = on(keras.Sequential([left, right]))
    for model, accountant, steps in ((first, of_first, 5), (between, of_between, 3), (second, of_second, 2)):
        train_within(model, accountant, steps)
    assert of_first.steps == of_second.steps == of_between.steps == 10
    assert accountant_of(first, second, between).steps == 10


@pytest.mark.slow
def test_a_model_compiled_anew_and_its_file_go_on_counting_for_those_who_share_it(tmp_path):
    layer = keras.layers.Dense(3)
    (first, of_first), (second, of_second) = on(layer), on(layer)
    train_within(first, of_first, 5)
    first.compile(optimizer_of(), "mse", run_eagerly=True)
    train_within(first, of_first, 4)
    train_within(second, of_second, 3)
    assert of_first.steps == of_second.steps == 12
    second.save(tmp_path / "second.keras")
    loaded = keras.models.load_model(tmp_path / "second.keras")
    of_loaded = accountant_of(loaded)
    assert of_loaded.steps == 12 and of_loaded.epsilon() == of_first.epsilon()  # which looks at `iterations` as loaded
    loaded.optimizer.iterations.assign(4)
    with pytest.raises(Unaccounted, match="has made 1 steps"):
        of_loaded.epsilon()


def test_a_step_undescribed_on_shared_weights_silences_all_who_rest_on_them():
    layer = keras.layers.Dense(3)
    (first, of_first), (second, of_second) = on(layer), on(layer)
    train_within(first, of_first, 2)
    train_within(second, of_second, 2)
    first.optimizer.iterations.assign(3)
    with pytest.raises(Unaccounted, match="has made 1 steps"):
        of_second.epsilon()


def test_steps_that_no_history_describes_are_not_forgotten_with_their_optimizer(tmp_path):
    """Compiling anew dropped the optimizer, and with it the only trace of these steps."""
    layer = keras.layers.Dense(3)
    model, of_model = on(layer)
    train_within(model, of_model, 2)
    model.optimizer.iterations.assign(5)
    model.compile(optimizer_of(), "mse", run_eagerly=True)
    assert of_model.epsilon() == np.inf
    assert "3 steps of DPSGD that its history does not describe" in " ".join(str(of_model.statement()).split())
    model.save(tmp_path / "model.keras")
    assert accountant_of(keras.models.load_model(tmp_path / "model.keras")).epsilon() == np.inf
    with pytest.raises(ValueError):
        train_within(model, of_model, 2)


def test_training_under_two_samplings_is_one_account(target):
    setup = Setup()
    setup.fit(100.0, epochs=1, steps_per_epoch=5)
    other = PoissonSampling(num_units=500, expected_batch_size=50)
    setup.model.compile(optimizer_of(batch=50), "mse", run_eagerly=True)
    accountant = accountant_of(sampling=other)
    train(setup.model, 4, PrivacyBudget(accountant, 100.0), sampling=other)
    both = [SAMPLING.compose(GaussianDpEvent(1.0), 5), other.compose(GaussianDpEvent(1.0), 4)]
    assert accountant.dp_event().events == both
    assert "5 steps under another sampling" in " ".join(accountant.statement().split())
    assert accountant.epsilon() > accountant_of(sampling=other).epsilon(4)


def test_a_plain_optimizer_and_wrong_arguments_are_refused(target):
    setup = Setup()
    setup.model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="needs a private optimizer"):
        setup.fit(target)
    with pytest.raises(ValueError, match="target_epsilon must be positive"):
        PrivacyBudget(setup.accountant, 0)
    with pytest.raises(TypeError, match="accountant must be"):
        PrivacyBudget(8.0, setup.accountant)


@pytest.mark.slow
@pytest.mark.fast_cases("DPSGD")
@pytest.mark.parametrize("mechanism", ["DPSGD", "LazyDPSGD"])
def test_with_a_real_mechanism_and_empty_batches(target, mechanism):
    sampling = PoissonSampling(num_units=500, expected_batch_size=2)
    batches = sampling.batches(lambda i: (np.stack([i, i], axis=1).astype(np.int32), np.ones([len(i), 1], np.float32)))
    ids = keras.Input([2], dtype="int32")
    scores = keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(500, 3)(ids)))
    model = tfdp_rec.PrivateModel(ids, scores)
    optimizer = optimizer_of(noise=0.8, batch=2, kind=getattr(tfdp_rec, mechanism))
    model.compile(optimizer, loss="mse")
    accountant = Accountant(optimizer.dp_event(), sampling, delta=1e-3, accountant="rdp")
    budget = (accountant.epsilon(20) + accountant.epsilon(21)) / 2
    history = model.fit(batches, steps_per_epoch=8, epochs=9, verbose=0, callbacks=[PrivacyBudget(accountant, budget)])
    assert int(optimizer.iterations) == accountant.steps == 20
    assert history.history["epsilon"][-1] == accountant.epsilon() <= budget
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("ledger", [False, True])
def test_a_step_makes_at_most_15_python_calls_of_this_package(tmp_path, ledger):
    """It made 17, and 43 on 986fe75; calls of Keras, of TensorFlow and of the data's threads are not counted."""
    package, calls, made = os.path.dirname(tfdp_rec.__file__), [0], []

    def count(frame, event, argument):
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(package)

    class Calls(keras.callbacks.Callback):
        keeps_off_weights = True

        def on_train_batch_begin(self, batch, logs=None):
            made.append(calls[0])

    setup = Setup(steps_per_execution=1)
    setup.model.compile(setup.model.optimizer, "mse")  # not eagerly
    options = {"ledger": tmp_path / "ledger.jsonl"} if ledger else {}
    setup.accountant = accountant_of(**options)
    sys.setprofile(count)
    try:
        setup.fit(100.0, [Calls()], epochs=1, steps_per_epoch=12)
    finally:
        sys.setprofile(None)
    assert max(np.diff(made)[2:]) <= 15


def test_a_fit_within_a_fit_leaves_the_outer_one_its_gate():
    """It was lifted for both, so that steps by hand in the rest of the callback had no price."""
    layer, left = keras.layers.Dense(3), []
    (outer, of_outer), (inner, of_inner) = on(layer), on(layer)

    def train_inner(batch):
        if batch == 0:
            train_within(inner, of_inner, 2)
            left.append(outer.optimizer.privacy_history.gate.left)

    train(outer, 3, PrivacyBudget(of_outer, 100.0), after_step(train_inner))
    assert left == [0] and of_outer.steps == 3 + 2


def test_a_fit_of_the_same_model_within_its_fit_leaves_the_outer_one_its_budget():
    (model, accountant), limited = on(keras.layers.Dense(3)), []
    gate = model.optimizer.privacy_history.gate

    def train_again(batch):
        if batch == 0 and not limited:
            limited.append(gate.is_limited)
            train(model, 1)
            limited.append(gate.is_limited)

    train(model, 3, PrivacyBudget(accountant, 100.0), after_step(train_again))
    assert limited == [True, True] and not gate.is_limited and accountant.steps == 4


def test_a_fit_on_a_frozen_layer_leaves_no_other_model_a_gate():
    """A fit keeps its budget for all weights of its model, frozen ones too that another model trains."""
    layer, left = keras.layers.Dense(3), []
    (outer, of_outer), (inner, _) = on(layer), on(layer)
    layer.trainable = False
    outer.compile(optimizer_of(), "mse")
    layer.trainable = True
    inner.compile(optimizer_of(), "mse")

    def build_inner(batch):
        if batch == 0:
            inner.prepare(next(iter(SAMPLING.batches(rows))))
            left.append(inner.optimizer.privacy_history.gate.left)

    layer.trainable = False
    train(outer, 2, PrivacyBudget(of_outer, 100.0), after_step(build_inner))
    assert left == [0] and inner.optimizer.built


def test_where_there_is_no_price_there_is_no_gate():
    model, accountant = model_of(), accountant_of()
    accountant.follow(model)
    model.prepare(next(iter(SAMPLING.batches(rows))))
    allowance = Allowance(accountant, 100.0, in_fit=True)
    allowance.pay(model.optimizer, 5)
    assert model.privacy_history.gate.left > 0
    model.optimizer.iterations.assign(3)  # steps that nothing describes
    model.privacy_history.note_change()
    with pytest.raises(Unaccounted):
        allowance.left(model.optimizer)
    assert model.privacy_history.gate.left == 0


def test_a_fit_cut_off_by_an_error_is_followed_by_another():
    setup = Setup()
    fails = after_step(lambda batch: 1 / (1 - batch))
    with pytest.raises(ZeroDivisionError):
        setup.fit(100.0, [fails], epochs=1, steps_per_epoch=4)
    setup.fit(100.0, epochs=1, steps_per_epoch=3)
    assert setup.accountant.steps == 2 + 3
