"""The budget on real fits of a Keras model, with an optimizer that only claims to be private."""

import dp_accounting
import keras
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.privacy import PoissonSampling, ShuffledEpochs
from tfdp_rec.privacy import Accountant


class Claims(keras.optimizers.SGD):
    """Has an event, as a mechanism has; its updates are plain SGD."""

    event = GaussianDpEvent(1.0)

    def dp_event(self):
        return self.event


class Interrupt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            raise KeyboardInterrupt


class Setup:
    def __init__(self, event=None, steps_per_execution=1):
        self.sampling = PoissonSampling(num_units=500, expected_batch_size=25)
        self.batches = self.sampling.batches(lambda i: (np.ones([len(i), 2], np.float32), np.ones([len(i), 1])))
        self.accountant = Accountant(GaussianDpEvent(1.0), self.sampling, delta=1e-3, accountant="rdp")
        self.model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        optimizer = Claims(0.01)
        optimizer.event = event or optimizer.event
        self.model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)

    @property
    def steps(self):
        return int(self.model.optimizer.iterations)

    def fit(self, target, callbacks=(), **options):
        budget = PrivacyBudget(self.accountant, target)
        options = {"steps_per_epoch": 8, "epochs": 20, "verbose": 0, **options}
        return self.model.fit(self.batches, callbacks=[*callbacks, budget], **options)


@pytest.fixture(scope="module")
def target():
    """A budget for 13 steps exactly, and a bit, at the noise of `Claims`."""
    accountant = Setup().accountant
    return (accountant.epsilon(13) + accountant.epsilon(14)) / 2


@pytest.mark.parametrize("steps_per_execution, taken", [(1, 13), (4, 12), (5, 10)])
def test_it_stops_at_the_last_step_that_fits(target, steps_per_execution, taken):
    setup = Setup(steps_per_execution=steps_per_execution)
    history = setup.fit(target)
    assert setup.steps == setup.accountant.steps == taken
    assert setup.accountant.epsilon() <= target
    assert setup.accountant.epsilon(taken + steps_per_execution) > target
    assert history.history["epsilon"][-1] == setup.accountant.epsilon()


def test_a_fit_within_the_budget_is_left_alone(target):
    setup = Setup()
    setup.fit(target, epochs=1)
    assert setup.steps == setup.accountant.steps == 8
    setup.fit(target, epochs=1)
    assert setup.steps == setup.accountant.steps == 13


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
    setup = Setup(event=dp_accounting.NonPrivateDpEvent())
    with pytest.raises(ValueError, match="such as EANA, fits no target"):
        setup.fit(1000.0)
    assert setup.steps == 0


@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_interrupted_steps_stay_counted(target, steps_per_execution):
    setup = Setup(steps_per_execution=steps_per_execution)
    with pytest.raises(KeyboardInterrupt):
        setup.fit(target, callbacks=[Interrupt(6)])
    assert setup.steps == 6 <= setup.accountant.steps <= 6 + steps_per_execution
    setup.fit(target)
    assert setup.accountant.epsilon() <= target and setup.steps <= 13


def test_data_that_runs_out_inside_an_execution_is_counted_as_it_was_used(target):
    setup = Setup(steps_per_execution=4)
    setup.batches = setup.batches.take(6)
    setup.fit(target, epochs=1, steps_per_epoch=None)
    assert setup.steps <= setup.accountant.steps <= 8
    assert setup.steps >= 6


def test_it_follows_a_change_of_noise(target):
    class Louder(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.event = GaussianDpEvent(1.0 if epoch == 0 else 2.0)

    setup = Setup()
    setup.fit(target, callbacks=[Louder()])
    runs = setup.accountant.runs()
    assert [event.noise_multiplier for event, _ in runs] == [1.0, 2.0]
    assert setup.steps == setup.accountant.steps > 13
    assert setup.accountant.epsilon() <= target < setup.accountant.epsilon(setup.steps + 1)


def test_a_change_to_noise_that_fits_no_step_stops_before_the_step(target):
    class Silent(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.event = GaussianDpEvent(1.0 if epoch == 0 else 0.1)

    setup = Setup()
    with pytest.raises(ValueError, match="would exceed the budget"):
        setup.fit(target, callbacks=[Silent()])
    assert setup.steps == setup.accountant.steps == 8


def test_steps_behind_the_accountants_back_are_refused(target):
    setup = Setup()
    setup.model.fit(setup.batches, steps_per_epoch=3, verbose=0)
    with pytest.raises(ValueError, match="has taken 3 steps and the accountant knows of 0"):
        setup.fit(target)
    setup.accountant.record(setup.accountant.event, 3)
    setup.fit(target)
    assert setup.steps == 13


def test_batches_of_another_source_are_refused(target):
    setup = Setup()
    other = Setup().batches
    with pytest.raises(ValueError, match="the accountant's sampling drew 0 batches"):
        setup.model.fit(other, steps_per_epoch=2, verbose=0, callbacks=[PrivacyBudget(setup.accountant, target)])
    vouched = PrivacyBudget(setup.accountant, target, check_sampling=False)
    setup.model.fit(other, steps_per_epoch=2, verbose=0, callbacks=[vouched])
    assert setup.accountant.steps == 3


def test_a_cached_sample_is_not_a_fresh_one(target):
    setup = Setup()
    setup.batches = setup.batches.take(4).cache()
    with pytest.raises(ValueError, match="each used once"):
        setup.fit(target, steps_per_epoch=None)


def test_a_plain_optimizer_and_wrong_arguments_are_refused(target):
    setup = Setup()
    setup.model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="needs a private optimizer"):
        setup.fit(target)
    with pytest.raises(ValueError, match="target_epsilon must be positive"):
        PrivacyBudget(setup.accountant, 0)
    with pytest.raises(TypeError, match="accountant must be"):
        PrivacyBudget(8.0, setup.accountant)


def test_a_second_fit_on_shuffled_data_counts_its_new_epoch_before_it_starts():
    setup = Setup()
    setup.sampling = ShuffledEpochs(num_units=500, expected_batch_size=50)
    setup.batches = setup.sampling.batches(lambda i: (np.ones([len(i), 2], np.float32), np.ones([len(i), 1])))
    setup.accountant = Accountant(GaussianDpEvent(2.0), setup.sampling, delta=1e-3, accountant="rdp")
    one_epoch = setup.accountant.epsilon(10) * 1.01
    setup.model.optimizer.event = GaussianDpEvent(2.0)
    setup.fit(one_epoch, steps_per_epoch=5, epochs=1)
    with pytest.raises(ValueError, match="would exceed the budget"):
        setup.fit(one_epoch)
    assert setup.steps == setup.accountant.steps == 5
    setup.fit(setup.accountant.epsilon(15) * 1.01)
    assert setup.steps == 20, "one epoch begun before, and two now"


@pytest.mark.parametrize("mechanism", ["DPSGD", "LazyDPSGD"])
def test_with_a_real_mechanism_and_empty_batches(target, mechanism):
    import tfdp_rec

    sampling = PoissonSampling(num_units=500, expected_batch_size=2)
    batches = sampling.batches(lambda i: (np.stack([i, i], axis=1).astype(np.int32), np.ones([len(i), 1], np.float32)))
    ids = keras.Input([2], dtype="int32")
    scores = keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(500, 3)(ids)))
    model = tfdp_rec.PrivateModel(ids, scores)
    optimizer = getattr(tfdp_rec, mechanism)(0.1, l2_norm_clip=1.0, noise_multiplier=0.8, expected_batch_size=2)
    model.compile(optimizer, loss="mse")
    accountant = Accountant(optimizer.dp_event(), sampling, delta=1e-3, accountant="rdp")
    budget = (accountant.epsilon(20) + accountant.epsilon(21)) / 2
    history = model.fit(batches, steps_per_epoch=8, epochs=9, verbose=0, callbacks=[PrivacyBudget(accountant, budget)])
    assert int(optimizer.iterations) == accountant.steps == 20
    assert history.history["epsilon"][-1] == accountant.epsilon() <= budget
    assert np.isfinite(model.get_weights()[0]).all()
