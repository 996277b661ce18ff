"""What tests of the claim train: one dense layer of two inputs by DPSGD, on 500 units in batches of about 25."""

import keras
import numpy as np
import tensorflow as tf
from dp_accounting import GaussianDpEvent

import tfdp_rec
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.privacy import Accountant, PoissonSampling

DELTA = 1e-3
SAMPLING = PoissonSampling(num_units=500, expected_batch_size=25)
REFUSED = (NotPrivate, tf.errors.InvalidArgumentError)


def rows(indices):
    return np.ones([len(indices), 2], np.float32), np.ones([len(indices), 1], np.float32)


def optimizer_of(noise=1.0, batch=25, kind=tfdp_rec.DPSGD, plan=None, **options):
    """Of one name, as in another process; a plan says the rest."""
    own = {"l2_norm_clip": 1.0, "noise_multiplier": noise, "expected_batch_size": batch}
    return kind(0.01, **{"name": "private", **({"plan": plan} if plan else own), **options})


def bare_model(layer=None):
    inputs = keras.Input([2])
    return tfdp_rec.PrivateModel(inputs, (layer or keras.layers.Dense(1))(inputs))


def model_of(optimizer=None, layer=None, **options):
    model = bare_model(layer)
    model.compile(optimizer or optimizer_of(), "mse", **{"run_eagerly": True, **options})
    return model


def train(model, steps, *callbacks, sampling=SAMPLING, **options):
    model.fit(sampling.batches(rows), steps_per_epoch=steps, verbose=0, callbacks=list(callbacks), **options)


def accountant_of(*models, noise=1.0, sampling=SAMPLING, **options):
    accountant = Accountant(GaussianDpEvent(noise), sampling, DELTA, "rdp", **options)
    for model in models:
        accountant.follow(model)
    return accountant


def after_step(act):
    """A callback that calls act(number of the batch) after each step."""
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: act(batch))
