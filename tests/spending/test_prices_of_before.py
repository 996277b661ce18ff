"""No step at a price from before: what a hostile reader of the bookkeeping found.

Steps that a file had taken back were made; a copied sampling drew at the price of the original; a gate that had been
opened stayed open after something else was spent. Each told less, or made more, than was paid for.
"""

import contextlib
import copy
import os
import pickle

import keras
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent
from trainings import DELTA, REFUSED, SAMPLING, accountant_of, model_of, optimizer_of, rows, train

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.claim.ledger import Mark, read
from tfdp_rec.privacy import BrokenLedger, FixedOrder, Ledger, PoissonSampling, Snapshot


def plan_of(**options):
    sampling = PoissonSampling(500, 25)
    return tfdp_rec.PrivatePlan(
        sampling=sampling, delta=DELTA, accountant="rdp", **{"steps": 10, "epsilon": 2.0, **options}
    )


def steps_by_hand(model, batches, most=100):
    """The number of steps that a loop by hand may make."""
    for made in range(most):
        try:
            model.train_on_batch(next(batches))
        except REFUSED:
            return made
    return most


def compiled_loop(plan):
    """A model under a plan, its batches, and a compiled step, which asks no plan; one step is made."""
    model, batches = model_of(optimizer_of(plan=plan), run_eagerly=False), iter(plan.batches(rows))
    first = next(batches)
    model.prepare(first)
    step = tf.function(model.train_step, reduce_retracing=True)
    step(first)
    return model, batches, step


class Does(keras.callbacks.Callback):
    def __init__(self, act, at=1):
        super().__init__()
        self.act, self.at = act, at

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.at:
            self.act()


# Steps that were given back.


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_steps_that_the_file_has_taken_back_are_not_made(tmp_path, monkeypatch, failure):
    """An interruption left them in memory: 43 were made, and the file said 3."""
    plan = plan_of(steps=50, ledger=tmp_path / "ledger.jsonl")
    model, batches, sync = model_of(optimizer_of(plan=plan)), iter(plan.batches(rows)), os.fsync
    assert steps_by_hand(model, batches, 3) == 3

    def interrupted(file):
        sync(file)
        raise failure

    with monkeypatch.context() as patched, contextlib.suppress(failure):
        patched.setattr(os, "fsync", interrupted)
        plan.accountant.give_back_rest()
    with contextlib.suppress(BrokenLedger):
        steps_by_hand(model, batches)
    assert int(model.optimizer.iterations) == read(tmp_path / "ledger.jsonl").steps == 3


def test_a_ledger_whose_line_was_cut_short_writes_no_other(tmp_path, monkeypatch):
    """The next payment had the number of the one that was interrupted, and the file could not be read again."""
    ledger = Ledger(tmp_path / "ledger.jsonl", "example", Snapshot(500, "example"))

    def interrupted(line):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(ledger, "add", interrupted)
        ledger.pay(GaussianDpEvent(1.0), 1, "interrupted")
    with pytest.raises(BrokenLedger):
        ledger.pay(GaussianDpEvent(1.0), 1, "next")
    ledger.close()
    assert [paid.label for paid in read(ledger.path).paid] == ["interrupted"]


# Copies.


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copied_sampling_is_another(copied):
    """It kept its name, so that draws of one in ten of the users were told as one in twenty: 1.04 for 5.9."""
    day = copied(SAMPLING)
    assert day.name != SAMPLING.name and day.get_state() == SAMPLING.get_state()
    day.num_units = 50
    model = model_of()
    accountant = accountant_of(model, sampling=day)
    train(model, 4, sampling=day)
    expected = accountant_of(sampling=PoissonSampling(50, 25)).epsilon(4)
    assert accountant.steps == 4 and accountant.epsilon() == pytest.approx(expected)


def test_a_copied_order_is_another():
    order = FixedOrder(200, 25)
    assert copy.deepcopy(order).name != order.name


def test_a_copied_plan_is_the_plan():
    """The copy allowed its steps once more: 8 for a plan of 4."""
    plan = plan_of()
    assert copy.copy(plan) is plan and copy.copy(plan.accountant) is plan.accountant


# What is spent between the price and the step.


@pytest.mark.slow
def test_a_use_in_a_loop_by_hand_leaves_fewer_steps():
    """A compiled step asks no plan: it made all that were left before the use, 2.49 for a plan of 2."""
    plan = plan_of(steps=8)
    _, batches, step = compiled_loop(plan)
    plan.accountant.spend(GaussianDpEvent(20.0), "counts")
    made = 1
    with contextlib.suppress(*REFUSED):
        for batch in batches:
            step(batch)
            made += 1
    assert 1 < made < 8 and plan.accountant.epsilon() <= 2.0
    plan.accountant.spend(GaussianDpEvent(1.0), "more than is left")
    with pytest.raises(REFUSED):
        step(next(batches))


def test_a_file_in_a_loop_by_hand_leaves_fewer_steps(tmp_path):
    other = model_of(optimizer_of(noise=0.3))
    train(other, 12)
    other.save_weights(tmp_path / "other.weights.h5")
    plan = plan_of(steps=4)
    model, batches, step = compiled_loop(plan)
    model.load_weights(tmp_path / "other.weights.h5")
    with pytest.raises(REFUSED):
        step(next(batches))


def test_a_use_that_a_model_was_made_of_leaves_fewer_steps():
    plan = plan_of(steps=4)
    model, batches, step = compiled_loop(plan)
    model.add_uses([(GaussianDpEvent(0.5), "counts")])
    with pytest.raises(REFUSED):
        step(next(batches))


def use(accountant):
    accountant.spend(GaussianDpEvent(2.0), "counts")


def another_fit(accountant):
    other = model_of()
    accountant.follow(other)
    train(other, 1, PrivacyBudget(accountant, 100.0))


@pytest.mark.parametrize("spend", [use, another_fit])
def test_what_a_callback_spends_after_the_budget_has_looked_stops_the_step(spend):
    """One more execution was made at the old price, after the budget was spent."""
    accountant, model = accountant_of(), model_of()
    accountant.follow(model)
    target = accountant.epsilon(4) * (1 + 1e-9)
    with pytest.raises((ValueError, *REFUSED)):
        train(model, 4, PrivacyBudget(accountant, target), Does(lambda: spend(accountant)))
    assert int(model.optimizer.iterations) == 1


def test_a_fit_and_a_loop_by_hand_of_another_model_do_not_each_make_the_steps_of_their_plan():
    """Two optimizers of one plan without a weight in common: 12 steps of 6."""
    plan = plan_of(steps=6)
    models = [model_of(optimizer_of(plan=plan, name=name)) for name in ("one", "other")]
    batches = iter(plan.batches(rows))
    by_hand = Does(lambda: steps_by_hand(models[1], batches, 6))
    with contextlib.suppress(ValueError, *REFUSED):
        models[0].fit(plan.batches(rows), steps_per_epoch=6, verbose=0, callbacks=[plan.budget(), by_hand])
    assert 0 < sum(int(model.optimizer.iterations) for model in models)
    assert plan.accountant.epsilon() <= 2.0


def test_a_payment_by_hand_into_the_ledger_of_a_fit_is_seen(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, "example", Snapshot(500, "example"))
    accountant, model = accountant_of(ledger=ledger), model_of()
    accountant.follow(model)
    target = accountant.epsilon(6) * (1 + 1e-9)
    pay = lambda: ledger.pay(GaussianDpEvent(2.0), 1, "counts")  # noqa: E731
    with pytest.raises((ValueError, *REFUSED)):
        train(model, 6, Does(pay), PrivacyBudget(accountant, target))
    assert int(model.optimizer.iterations) == 1
    accountant.close()
    assert isinstance(ledger.mark, Mark)


def test_another_delta_is_another_price():
    accountant, model = accountant_of(), model_of()
    accountant.follow(model)
    target = accountant.epsilon(6) * (1 + 1e-9)

    def smaller():
        accountant.delta = 1e-8

    with pytest.raises((ValueError, *REFUSED)):
        train(model, 6, Does(smaller), PrivacyBudget(accountant, target))
    assert int(model.optimizer.iterations) == 1
