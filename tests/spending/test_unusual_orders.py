"""Trainings in unusual orders: what a model's history tells is what was made on its weights, by a counter in each step.

A way trains, and gives pairs of a model and the number of private steps that its weights have seen; `made` counts all
steps, as an observer in the steps' own graphs, which knows nothing of histories.
"""

import contextlib
import copy
import pickle
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from trainings import SAMPLING, accountant_of, after_step, bare_model, model_of, optimizer_of, rows, train

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.privacy import PoissonSampling

OTHER = PoissonSampling(num_units=400, expected_batch_size=25)
WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


def batches():
    return iter(SAMPLING.batches(rows))


class Stop(Exception):
    pass


def stop_after(steps):
    def act(batch):
        if batch + 1 == steps:
            raise Stop

    return after_step(act)


@way
def two_fits(folder):
    model = model_of()
    train(model, 2)
    train(model, 3)
    return [(model, 5)]


@way
def batches_by_hand_before_and_after_a_fit(folder):
    model, drawn = model_of(), batches()
    model.train_on_batch(next(drawn))
    train(model, 2)
    model.train_on_batch(next(drawn))
    return [(model, 4)]


@way
def steps_in_a_function_of_ones_own(folder):
    model, drawn = model_of(run_eagerly=False), batches()
    train(model, 1)
    step = tf.function(model.train_step)
    for _ in range(3):
        step(next(drawn))
    return [(model, 4)]


@way
def sums_applied_by_hand(folder):
    model = model_of()
    train(model, 1)
    for _ in range(2):
        model.optimizer.apply(clipped_sum(model, rows(range(25)), 1.0))
    return [(model, 3)]


@way
def three_steps_an_execution(folder):
    model = model_of(run_eagerly=False, steps_per_execution=3)
    train(model, 6)
    return [(model, 6)]


@way
def the_same_optimizer_compiled_again(folder):
    model = model_of()
    train(model, 2)
    model.compile(model.optimizer, "mse", run_eagerly=True)
    train(model, 2)
    return [(model, 4)]


@way
def another_optimizer_compiled(folder):
    model = model_of()
    train(model, 2)
    model.compile(optimizer_of(), "mse", run_eagerly=True)
    train(model, 3)
    return [(model, 5)]


@way
def another_noise_compiled(folder):
    model = model_of()
    train(model, 2)
    model.compile(optimizer_of(noise=3.0), "mse", run_eagerly=True)
    train(model, 3)
    return [(model, 5)]


@way
def another_mechanism_assigned(folder):
    model = model_of()
    train(model, 2)
    model.optimizer = optimizer_of(kind=tfdp_rec.LazyDPSGD)
    train(model, 3)
    return [(model, 5)]


@way
def a_mechanism_that_is_left_and_comes_back(folder):
    model = model_of()
    first = model.optimizer
    for optimizer in (first, optimizer_of(), first):
        model.compile(optimizer, "mse", run_eagerly=True)
        train(model, 2)
    return [(model, 6)]


@way
def an_ordinary_optimizer_in_between(folder):
    model = model_of()
    train(model, 2)
    for optimizer in ("adam", optimizer_of()):
        model.compile(optimizer, "mse", run_eagerly=True)
        train(model, 2)
    return [(model, 4)]


@way
def a_fit_that_an_error_ends(folder):
    model = model_of()
    with contextlib.suppress(Stop):
        train(model, 5, stop_after(2))
    train(model, 2)
    return [(model, 4)]


@way
def a_fit_that_a_callback_stops(folder):
    model = model_of()
    train(model, 5, after_step(lambda batch: setattr(model, "stop_training", batch == 1)))
    return [(model, 2)]


@way
def a_fit_that_its_budget_ends(folder):
    model = model_of()
    accountant = accountant_of()
    train(model, 9, PrivacyBudget(accountant, 1.0001 * accountant.epsilon(4)))
    return [(model, 4)]


@way
def a_counter_of_steps_that_is_set_back(folder):
    model = model_of()
    train(model, 3)
    model.optimizer.iterations.assign(0)
    train(model, 2)
    return [(model, 5)]


@way
def two_samplings(folder):
    model = model_of()
    train(model, 2)
    train(model, 3, sampling=OTHER)
    return [(model, 5)]


@way
def two_models_on_one_layer_in_turns(folder):
    layer = keras.layers.Dense(1)
    one, other = model_of(layer=layer), model_of(layer=layer)
    for model in (one, other, one):
        train(model, 2)
    return [(one, 6), (other, 6)]


@way
def a_model_within_another(folder):
    inner = model_of()
    inputs = keras.Input([2])
    outer = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inner(inputs)))
    outer.compile(optimizer_of(), "mse", run_eagerly=True)
    train(outer, 2)
    train(inner, 3)
    return [(inner, 5), (outer, 5)]


@way
def a_frozen_layer_that_another_model_trains(folder):
    layer = keras.layers.Dense(2)
    inputs = keras.Input([2])
    first = model_of(layer=layer)
    train(first, 3)
    layer.trainable = False
    second = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(layer(inputs)))
    second.compile(optimizer_of(), "mse", run_eagerly=True)
    train(second, 2)
    return [(second, 5)]


@way
def a_fit_of_another_model_within_an_epoch(folder):
    layer = keras.layers.Dense(1)
    one, other = model_of(layer=layer), model_of(layer=layer)
    train(one, 3, after_step(lambda batch: train(other, 1) if batch == 1 else None))
    return [(one, 4), (other, 4)]


@way
def a_file_that_is_gone_on_from(folder):
    model = model_of()
    train(model, 2)
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    train(loaded, 3)
    return [(model, 2), (loaded, 5)]


@way
def two_that_go_on_from_one_file(folder):
    model = model_of()
    train(model, 2)
    model.save(folder / "model.keras")
    one, other = (keras.models.load_model(folder / "model.keras") for _ in range(2))
    train(one, 1)
    train(other, 3)
    return [(one, 3), (other, 5)]


@way
def a_file_loaded_without_its_optimizer(folder):
    model = model_of()
    train(model, 2)
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras", compile=False)
    loaded.compile(optimizer_of(), "mse", run_eagerly=True)
    train(loaded, 3)
    return [(loaded, 5)]


@way
def weights_loaded_over_others(folder):
    first, second = model_of(), model_of()
    train(first, 2)
    first.save_weights(folder / "some.weights.h5")
    train(second, 3)
    second.load_weights(folder / "some.weights.h5")
    train(second, 1)
    return [(first, 2), (second, 6)]  # what the weights of before had spent is told too


@way
def a_state_tree_of_another(folder):
    first, second = model_of(), model_of()
    train(first, 2)
    train(second, 1)
    second.set_state_tree(first.get_state_tree())
    train(second, 3)
    return [(second, 6)]


@way
def a_checkpoint_of_tensorflow(folder):
    first, second = model_of(), model_of()
    train(first, 2)
    path = tf.train.Checkpoint(model=first).save(str(folder / "checkpoint"))
    train(second, 1)
    tf.train.Checkpoint(model=second).restore(path)
    train(second, 3)
    return [(second, 6)]


@way
def a_pickle(folder):
    model = model_of()
    train(model, 2)
    again = pickle.loads(pickle.dumps(model))
    train(again, 3)
    return [(model, 2), (again, 5)]


@way
def a_deep_copy(folder):
    model = model_of()
    train(model, 2)
    again = copy.deepcopy(model)
    train(again, 3)
    return [(model, 2), (again, 5)]


@way
def a_copied_optimizer(folder):
    model = model_of()
    train(model, 2)
    model.compile(copy.deepcopy(model.optimizer), "mse", run_eagerly=True)
    train(model, 3)
    return [(model, 5)]


@way
def a_model_that_grows(folder):
    model = model_of()
    train(model, 2)
    larger = model.grow_into(bare_model())
    if not hasattr(larger.optimizer, "privacy_history"):
        larger.compile(optimizer_of(), "mse", run_eagerly=True)
    train(larger, 3)
    return [(larger, 5)]


@way
def a_fit_in_a_thread(folder):
    model = model_of()
    one = threading.Thread(target=train, args=(model, 2))
    one.start()
    one.join()
    train(model, 1)
    return [(model, 3)]


@way
def epochs_with_validation_and_prediction_between(folder):
    model = model_of()
    looks = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.predict(np.ones([3, 2]), verbose=0))
    train(model, 2, looks, epochs=2, validation_data=rows(range(9)))
    return [(model, 4)]


@way
def data_of_no_sampling(folder):
    model = model_of()
    train(model, 2)
    model.fit(*rows(range(50)), batch_size=25, verbose=0)
    return [(model, 4)]


@pytest.fixture
def made(monkeypatch):
    """Counts the steps of all optimizers, in their graphs."""
    counted = tf.Variable(0, dtype=tf.int64)
    count = staticmethod(lambda clipped: counted.assign_add(1))
    monkeypatch.setattr(tfdp_rec.core.mechanism.base.PrivateOptimizer, "observers", (count,))
    return counted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.fast_cases(
    "batches_by_hand_before_and_after_a_fit", "another_noise_compiled", "a_fit_that_an_error_ends", "a_pickle",
    "two_models_on_one_layer_in_turns", "weights_loaded_over_others", "a_counter_of_steps_that_is_set_back",
)  # fmt: skip
@pytest.mark.parametrize("name", WAYS)
def test_what_is_told_is_what_was_made(name, tmp_path, made):
    pairs = WAYS[name](tmp_path)
    for model, steps in pairs:
        assert accountant_of(model).spending.history.steps == steps
    forked = name == "two_that_go_on_from_one_file"  # which share two of their steps
    assert int(made) == (6 if forked else max(steps for _, steps in pairs))


def test_there_are_thirty():
    assert len(WAYS) >= 30
