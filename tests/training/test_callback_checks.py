"""Callbacks that act on exact training figures are refused under a budget; what no ε covers is said once."""

import warnings

import keras
import numpy as np
import pytest
from settling import IDS, LABELS, batches, model_of

import tfdp_rec
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.privacy import Accountant
from tfdp_rec.training.callback_checks import refuse_data_dependent

ACTING = {
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping(monitor="loss"),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(monitor="loss"),
    "TerminateOnNaN": keras.callbacks.TerminateOnNaN,
    "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint("m.keras", monitor="loss", save_best_only=True),
}


def said(fit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    return [str(w.message) for w in caught if "epsilon" in str(w.message)]


def accountant_of(model):
    sampling = tfdp_rec.data.PoissonSampling(num_units=20, expected_batch_size=4)
    return Accountant(model.optimizer.dp_event(), sampling, delta=0.01, accountant="rdp")


def under_a_budget():
    """A model whose noise is secret, and a budget that lets it train."""
    model = model_of()
    secret = tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    model.compile(secret, loss="mse")
    return model, tfdp_rec.callbacks.PrivacyBudget(accountant_of(model), target_epsilon=100.0)


def drawn(budget):
    """Five batches an epoch, which the budget's sampling draws."""
    fetch = lambda units: (IDS[units], LABELS[units])  # noqa: E731
    return {"x": budget.accountant.sampling.batches(fetch), "steps_per_epoch": 5, "verbose": 0}


@pytest.fixture(scope="module")
def budgeted():
    return under_a_budget()


# Refusals.


@pytest.mark.parametrize("name", ACTING)
def test_what_acts_on_the_training_loss_is_refused_under_a_budget(name, budgeted):
    model, budget = budgeted
    with pytest.raises(NotPrivate, match=f"{name}.*val_loss"):
        model.fit(**drawn(budget), callbacks=[ACTING[name](), budget])


def test_backup_and_restore_would_forget_steps(tmp_path):
    """A release after its last backup, then a kill: the restored training made 24 steps and told 20."""
    model = model_of()
    with pytest.raises(NotPrivate, match="TrainingCheckpoint"):
        model.fit(batches(), verbose=0, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])
    assert int(model.optimizer.iterations) == 0


def test_without_a_budget_it_is_said():
    with pytest.warns(UserWarning, match="no ε covers"):
        refuse_data_dependent([ACTING["EarlyStopping"]()])


def test_validation_schedules_and_checkpoints_of_every_epoch_may_act(budgeted):
    several = [
        keras.callbacks.EarlyStopping(monitor="val_loss"),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.ModelCheckpoint("m.keras", monitor="loss"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse_data_dependent([*several, budgeted[1]])
        refuse_data_dependent(several)
    with pytest.raises(NotPrivate, match="^EarlyStopping"):
        refuse_data_dependent([*several, ACTING["EarlyStopping"](), budgeted[1]])


# Warnings.


@pytest.mark.slow
def test_an_uncounted_fit_says_so_once_and_an_accountant_may_follow_later():
    """As the warning says; and of batches that no sampling drew, it names no epsilon."""
    model = model_of()
    (word,) = said(lambda: model.fit(batches(), verbose=0))
    assert "Accountant(model.optimizer.dp_event(), sampling" in word and "PrivacyBudget(accountant" in word
    assert len(word) < 500 and word.endswith(".")
    assert not said(lambda: model.fit(batches(), verbose=0))
    accountant = accountant_of(model)
    accountant.follow(model)
    assert accountant.spending.history.steps == int(model.optimizer.iterations.numpy()) > 0
    assert accountant.epsilon() == np.inf


@pytest.mark.slow
def test_one_that_is_followed_says_nothing():
    model = model_of()
    accountant_of(model).follow(model)
    assert not said(lambda: model.fit(batches().take(1), verbose=0))


class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = logs["loss"] > 0


@pytest.mark.slow
def test_under_a_budget_a_stop_by_a_callback_of_ones_own_is_said(budgeted):
    model, budget = budgeted
    looks = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    assert not said(lambda: model.fit(**drawn(budget), callbacks=[looks, budget]))
    (word,) = said(lambda: model.fit(**drawn(budget), callbacks=[Stops(), budget]))
    assert word.startswith("Stops ended this fit") and len(word) < 500 and word.endswith(".")
    budget.steps = budget.accountant.steps + 2
    assert not said(lambda: model.fit(**drawn(budget), epochs=3, callbacks=[looks, budget]))
    assert budget.ended_fit


@pytest.mark.fast_cases("sgd")
@pytest.mark.parametrize("optimizer", ["EANA", "sgd"])
def test_what_claims_no_epsilon_says_nothing(optimizer):
    model = model_of(tfdp_rec.EANA) if optimizer == "EANA" else model_of()
    if optimizer == "sgd":
        model.compile("sgd", loss="mse")
    assert not said(lambda: model.fit(batches().take(1), verbose=0))
