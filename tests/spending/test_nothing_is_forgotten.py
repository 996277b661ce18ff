"""Paths on which the record said less than was spent: each test told a smaller ε before its mending."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.pricing.composition import epsilon_of
from tfdp_rec.privacy import (
    Accountant,
    FixedOrder,
    Ledger,
    PoissonSampling,
    ShuffledEpochs,
    Snapshot,
    Unaccounted,
    optimised_correlation,
)
from tfdp_rec.refused import NotPrivate
from tfdp_rec.spending.ledger import read
from tfdp_rec.spending.statement import rounded_up

DELTA = 1e-3


def accountant_of(**options):
    return Accountant(GaussianDpEvent(1.0), PoissonSampling(500, 25), DELTA, "rdp", **options)


# Ids.


def test_two_uses_with_one_id_are_refused():
    """The second was left out: ε = .3 was told for 4.3."""
    counted = accountant_of()
    counted.spend(GaussianDpEvent(20.0), "counts", id="of Monday")
    with pytest.raises(ValueError, match="Two expenses have the id 'of Monday'"):
        counted.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    other = accountant_of()
    other.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    with pytest.raises(ValueError, match="Two expenses have the id 'of Monday'"):
        counted.set_state(other.get_state())


def test_a_payment_pays_for_the_event_that_it_names(tmp_path):
    """A use of multiplier 1 was taken for paid by a payment for multiplier 20 with the same id."""
    with accountant_of(ledger=tmp_path / "ledger.jsonl").payments.ledger as ledger:
        ledger.pay(GaussianDpEvent(20.0), label="counts", id="of Monday")
    other = accountant_of()
    other.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    counted = accountant_of(ledger=tmp_path / "ledger.jsonl")
    state = other.get_state()
    counted.set_state(state)
    with pytest.raises(Unaccounted, match="1 steps or uses .'terms'. were made"):
        counted.epsilon()
    counted.pay_for_history()
    assert counted.epsilon() > other.epsilon()


def test_a_state_that_was_counted_in_a_ledger_is_not_read_without_it(tmp_path):
    """What the ledger holds besides the state was left out: ε = 0 for a paid count."""
    counted = accountant_of(ledger=tmp_path / "ledger.jsonl")
    counted.payments.ledger.pay(GaussianDpEvent(2.0), label="counts")
    with pytest.raises(ValueError, match="counted in a ledger"):
        accountant_of().set_state(counted.get_state())


# Plans.

UNITS, BATCH, STEPS, SIGMA = 20, 4, 15, 3.0
PLAN = optimised_correlation(steps=STEPS, separation=5, participations=3)


def rows(indices):
    return np.ones([len(indices), 1], np.float32), np.ones([len(indices), 1], np.float32)


def planned_model():
    inputs = keras.Input([1])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": SIGMA, "expected_batch_size": BATCH, "correlation": PLAN}
    model.compile(tfdp_rec.DPFTRL(0.1, **settings), "mse", run_eagerly=True)
    return model


def planned(tmp_path):
    """A ledger, a model, an order, and a function that makes accountants on them."""
    order, model = FixedOrder(UNITS, BATCH), planned_model()
    ledger = Ledger(tmp_path / "ledger.jsonl", order.unit, Snapshot(UNITS, order.unit), order.adjacency)
    return ledger, model, order, lambda: Accountant(model.optimizer.dp_event(), order, 1e-2, "rdp", ledger=ledger)


def test_the_price_of_a_plan_does_not_come_back_while_others_go_on_from_it(tmp_path):
    """Two accountants of one ledger: the first gave back what the second stood on, and ε = 0 was told for 5 steps."""
    ledger, model, order, accountant = planned(tmp_path)
    first, second = accountant(), accountant()
    first.follow(model)
    first.pay_ahead(1, 5, model.optimizer, order.name)
    model.fit(order.batches(rows), steps_per_epoch=5, verbose=0, callbacks=[PrivacyBudget(second, 100.0)])
    first.give_back_unused()
    once = epsilon_of(PLAN.dp_event(SIGMA), 1e-2, "rdp")
    assert ledger.epsilon(1e-2, "rdp") == pytest.approx(once) == pytest.approx(second.epsilon())
    second.close()


def test_a_plan_whose_steps_all_came_back_keeps_its_price(tmp_path):
    """The ledger's total was right; the accountant's was 0."""
    ledger, model, order, accountant = planned(tmp_path)
    counted = accountant()
    counted.payments.pay_steps(model.optimizer.dp_event(), STEPS)
    ledger.give_back(ledger.paid[-1].number, 0, STEPS)
    assert counted.epsilon() == pytest.approx(read(ledger.path).epsilon(1e-2, "rdp")) and counted.epsilon() > 1.0
    counted.close()


# Shuffled epochs.


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_each_restart_that_is_recorded_by_hand_counts(restarts):
    """One of them was taken for the first iteration: 2 participations were told for 3."""
    counted = Accountant(GaussianDpEvent(4.0), ShuffledEpochs(1000, 10), 1e-4, "rdp")
    counted.record(counted.event, 150, restarts=restarts)
    assert counted.ledger().events[-1].count == 2 + restarts


class BeginsAnew(keras.callbacks.Callback):
    """Makes one step on a new iteration of the batches, at one step of the fit."""

    def __init__(self, batches, at):
        super().__init__()
        self.batches, self.at = batches, at

    def on_train_batch_end(self, batch, logs=None):
        if batch in self.at:
            self.model.train_on_batch(next(iter(self.batches)))


def test_iterations_that_were_not_foreseen_count_against_a_budget():
    """They were counted, and the budget was not priced anew: ε passed the target."""
    sampling = ShuffledEpochs(40, 10)
    counted = Accountant(GaussianDpEvent(4.0), sampling, 1e-2, "rdp")
    target = counted.epsilon(12) * 1.0001  # three epochs
    inputs = keras.Input([1])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 10}
    model.compile(tfdp_rec.DPSGD(0.1, **settings), "mse", run_eagerly=True)
    batches = sampling.batches(rows)
    with pytest.raises((NotPrivate, tf.errors.InvalidArgumentError), match="another iteration of the batches"):
        model.fit(
            batches, steps_per_epoch=30, verbose=0,
            callbacks=[BeginsAnew(batches, {2, 4}), PrivacyBudget(counted, target)],
        )  # fmt: skip
    assert counted.epsilon() <= target and counted.steps == 3
    model.fit(batches, steps_per_epoch=30, verbose=0, callbacks=[PrivacyBudget(counted, target)])
    assert counted.epsilon() <= target and counted.steps == 3 + 5, "three participations of a unit"


def test_each_fit_on_asserted_batches_begins_an_epoch():
    """Two fits of two steps each were told as one epoch of four."""
    counted = Accountant(GaussianDpEvent(4.0), ShuffledEpochs(40, 10), 1e-2, "rdp", asserted="a loader that shuffles")
    inputs = keras.Input([1])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 10}
    model.compile(tfdp_rec.DPSGD(0.1, **settings), "mse", run_eagerly=True)
    counted.follow(model)
    for fits in (1, 2):
        model.fit(*rows(range(20)), batch_size=10, verbose=0)
        assert counted.ledger().events[-1].count == fits


def test_draws_that_another_model_takes_count_against_a_budget():
    """A model that shares the sampling makes every draw begin a stretch, and the budget was not priced anew."""
    sampling = ShuffledEpochs(40, 10)
    counted = Accountant(GaussianDpEvent(4.0), sampling, 1e-2, "rdp")
    target = counted.epsilon(5 * 4) * 1.0001
    models = []
    for _ in range(2):
        inputs = keras.Input([1])
        models.append(tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs)))
        settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 10}
        models[-1].compile(tfdp_rec.DPSGD(0.1, **settings), "mse", run_eagerly=True)
        counted.follow(models[-1])
    shared = iter(sampling.batches(rows))
    other = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: models[1].train_on_batch(next(shared))
    )
    models[0].fit(
        sampling.batches(rows), steps_per_epoch=30, verbose=0, callbacks=[other, PrivacyBudget(counted, target)]
    )
    assert counted.epsilon() <= target and counted.steps > 4


def test_epsilon_is_never_rounded_down():
    assert rounded_up(2.7120000004) == 2.713 and rounded_up(0.1 + 0.2) == 0.3 and rounded_up(8.0) == 8.0
