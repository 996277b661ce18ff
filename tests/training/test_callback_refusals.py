"""What acts on the exact loss of the training data is refused under a budget, and said otherwise."""

import keras
import pytest
from settling import batches, model_of

import tfdp_rec
from tfdp_rec.refused import NotPrivate
from tfdp_rec.training.callback_refusals import refuse_data_dependent

ACTING = {
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping(monitor="loss"),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(monitor="loss"),
    "TerminateOnNaN": keras.callbacks.TerminateOnNaN,
    "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint("m.keras", monitor="loss", save_best_only=True),
}


def budget():
    event = model_of(tfdp_rec.DPSGD).optimizer.dp_event()
    sampling = tfdp_rec.data.PoissonSampling(num_units=100, expected_batch_size=4)
    accountant = tfdp_rec.privacy.Accountant(event, sampling, delta=1e-6)
    return tfdp_rec.callbacks.PrivacyBudget(accountant, target_epsilon=8.0)


@pytest.mark.parametrize("name", ACTING)
def test_what_acts_on_the_training_loss_is_refused_under_a_budget(name):
    with pytest.raises(NotPrivate, match=f"{name}.*val_loss"):
        model_of(tfdp_rec.DPSGD).fit(batches(), verbose=0, callbacks=[ACTING[name](), budget()])


def test_without_a_budget_it_is_said():
    with pytest.warns(UserWarning, match="no ε covers"):
        model_of(tfdp_rec.DPSGD).fit(batches(), verbose=0, callbacks=[ACTING["EarlyStopping"]()])


def test_validation_schedules_and_checkpoints_of_every_epoch_may_act():
    several = [
        keras.callbacks.EarlyStopping(monitor="val_loss"),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.ModelCheckpoint("m.keras", monitor="loss"),
    ]
    refuse_data_dependent([*several, budget()])
