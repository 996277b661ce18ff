"""A copied optimizer makes steps of the same plan, and has the history of the one that it was copied from."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.privacy import PoissonSampling

SAMPLING = PoissonSampling(num_units=500, expected_batch_size=25)


def rows(indices):
    return np.ones([len(indices), 2], np.float32), np.ones([len(indices), 1], np.float32)


def model_of(optimizer):
    inputs = keras.Input([2])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def steps_until_refused(model, most):
    for made, batch in enumerate(SAMPLING.batches(rows).take(most)):
        try:
            model.train_on_batch(batch)
        except (NotPrivate, tf.errors.InvalidArgumentError):
            return made
    return most


@pytest.mark.fast_cases("model")
@pytest.mark.parametrize("copied", ["deep optimizer", "optimizer", "deep model", "model"])
def test_a_copy_makes_steps_of_the_same_plan(copied):
    """Of the copy it allowed as many as one liked, and did not count them."""
    plan = tfdp_rec.PrivatePlan(sampling=SAMPLING, noise_multiplier=1.0, delta=1e-3, steps=6, accountant="rdp")
    model = model_of(tfdp_rec.DPSGD(0.01, plan=plan))
    assert steps_until_refused(model, 3) == 3
    make = copy.deepcopy if copied.startswith("deep") else copy.copy
    other = make(model) if copied.endswith("model") else model_of(make(model.optimizer))
    assert steps_until_refused(model, 1) == 1
    assert steps_until_refused(other, 5) == 2
    assert plan.accountant.steps == 6 and plan.accountant.epsilon() == pytest.approx(plan.accountant.epsilon(steps=6))
