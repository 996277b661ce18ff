"""The accountant and its ledger on real fits: paid before it is made, never forgotten, never priced anew."""

import contextlib
import threading

import keras
import pytest
import tensorflow as tf
from counting import count
from dp_accounting import GaussianDpEvent
from trainings import DELTA, SAMPLING, accountant_of, after_step, model_of, optimizer_of, rows, train

from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.sampling_proof import Source
from tfdp_rec.core.claim.spending import BLOCK
from tfdp_rec.privacy import Accountant, BrokenLedger, FixedOrder, Ledger, PoissonSampling, Snapshot, Unaccounted

TARGET = 30.0


class Killed(keras.callbacks.Callback):
    """Looks at what the file says during a step's life, and ends as a kill would: nobody settles."""

    def __init__(self, path, at=10**9):
        super().__init__()
        self.path, self.at, self.seen = path, at, []

    def on_train_batch_end(self, batch, logs=None):
        made = int(self.model.optimizer.iterations)
        self.seen.append((made, read(self.path).steps))
        if made >= self.at:
            raise KeyboardInterrupt


class Run:
    """What a training script makes anew in every process."""

    def __init__(self, ledger, noise=1.0):
        self.accountant = accountant_of(noise=noise, ledger=ledger)
        self.model = model_of(optimizer_of(noise))

    def fit(self, steps, callbacks=(), target=TARGET):
        train(self.model, steps, *callbacks, PrivacyBudget(self.accountant, target))

    def close(self):
        self.accountant.spending.payments.ledger.close()


def test_every_step_is_paid_for_before_it_is_made_and_the_rest_given_back(tmp_path):
    path = tmp_path / "ledger.jsonl"
    run, watch = Run(path), Killed(path)
    run.fit(7, [watch])
    assert watch.seen == [(step, BLOCK) for step in range(1, 8)]
    assert run.accountant.steps == read(path).steps == 7
    run.fit(3)
    bare = accountant_of()
    assert run.accountant.epsilon() == pytest.approx(bare.epsilon(10))
    assert read(path).epsilon(DELTA, "rdp") == pytest.approx(bare.epsilon(10))
    assert "paid for in ledger" in " ".join(run.accountant.statement().split())


def test_a_killed_fit_has_spent_its_block_and_goes_on(tmp_path):
    path, weights = tmp_path / "ledger.jsonl", tmp_path / "w.weights.h5"
    run = Run(path)
    with pytest.raises(KeyboardInterrupt):
        run.fit(20, [Killed(path, at=4)])
    run.model.save_weights(weights)
    run.close()
    again = Run(path)
    again.model.load_weights(weights)
    again.fit(5)
    assert read(path).steps == again.accountant.steps == BLOCK + 5
    assert again.accountant.epsilon() == pytest.approx(accountant_of().epsilon(BLOCK + 5))


@pytest.mark.slow
def test_a_deleted_or_older_ledger_makes_the_accountant_silent(tmp_path):
    path, weights = tmp_path / "ledger.jsonl", tmp_path / "w.weights.h5"
    run = Run(path)
    run.fit(2)
    older = path.read_bytes()
    run.fit(4)
    run.model.save_weights(weights)
    run.close()
    for change in (lambda: path.write_bytes(older), path.unlink):
        change()
        again = Run(path)
        again.model.load_weights(weights)
        with pytest.raises(Unaccounted, match="has not paid for: the file was deleted"):
            again.fit(1)
        again.close()


def test_what_was_spent_without_a_ledger_is_owed_to_one(tmp_path):
    """A state of ε = 5.2, for a count, was told as 0 under a ledger."""
    before = accountant_of()
    for _ in range(2):
        before.spend(GaussianDpEvent(2.0), "popularity counts")
    after = accountant_of(ledger=tmp_path / "ledger.jsonl")
    after.spending.merge(before.spending.history)
    with pytest.raises(Unaccounted, match="has not paid for"):
        after.epsilon()


def test_one_accountant_pays_for_fits_of_one_thread_at_a_time(tmp_path):
    """Two made 21 steps of a budget of 20, and under a ledger lost count of what was paid for."""
    run, refused = Run(None), []

    def fit_another():
        other = Run(None)
        other.accountant = run.accountant
        try:
            other.fit(1)
        except ValueError as refusal:
            refused.append(str(refusal))

    def in_a_thread(act, *arguments):
        thread = threading.Thread(target=act, args=arguments)
        thread.start()
        thread.join()

    run.fit(2, [after_step(lambda batch: in_a_thread(fit_another))])
    assert run.accountant.steps == 2 and len(refused) == 2 and "another thread" in refused[0]
    in_a_thread(run.fit, 1)
    assert run.accountant.steps == 3


def test_two_threads_do_not_both_make_the_last_step_of_a_budget():
    meter, both, refused = optimizer_of().privacy_history, threading.Barrier(2), []
    meter.open(1, SAMPLING.name)

    def step():
        both.wait()
        try:
            meter.count(Source(SAMPLING))
        except tf.errors.InvalidArgumentError:
            refused.append(1)

    meter.add(Source(SAMPLING), 0)  # a counter that both find
    threads = [threading.Thread(target=step) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert meter.counters.made + len(refused) == 2 and meter.counters.made <= 1 and meter.gate.left == 0


@pytest.mark.slow
def test_the_past_keeps_its_price_when_the_data_grow(tmp_path):
    """Item 4 of the review, on one machine: 200 steps at q = 0.1, the data grown a hundredfold, resumed."""
    path = tmp_path / "ledger.jsonl"
    small = PoissonSampling(1000, 100, unit="user")
    first = Accountant(GaussianDpEvent(1.0), small, 1e-6, ledger=path)
    count(first, GaussianDpEvent(1.0), 200)
    before = first.epsilon()
    first.spending.payments.ledger.close()
    large = PoissonSampling(100_000, 100, unit="user")
    with pytest.raises(BrokenLedger, match="data_changed=True"):
        Accountant(GaussianDpEvent(1.0), large, 1e-6, ledger=path)
    grown = Ledger(path, "user", Snapshot(100_000, "user"), data_changed=True)
    second = Accountant(GaussianDpEvent(1.0), large, 1e-6, ledger=grown)
    assert second.epsilon() == pytest.approx(before) and before > 10
    count(second, GaussianDpEvent(1.0), 50)
    assert second.epsilon() > before and second.max_steps(5.0) == second.steps == 50


def test_other_noise_and_other_uses_of_the_data_are_in_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    run = Run(path)
    run.accountant.spend(GaussianDpEvent(20.0), "popularity counts")
    run.fit(3)
    run.close()
    louder = Run(path, noise=0.8)
    louder.fit(2)
    oracle = accountant_of()
    count(oracle, GaussianDpEvent(1.0), 3)
    count(oracle, GaussianDpEvent(0.8), 2)
    oracle.spend(GaussianDpEvent(20.0), "popularity counts")
    assert louder.accountant.epsilon() == pytest.approx(oracle.epsilon(), rel=1e-9)
    assert louder.accountant.epsilon(9) > louder.accountant.epsilon()


@pytest.mark.slow
def test_a_budget_of_exactly_so_many_steps_is_kept(tmp_path):
    path = tmp_path / "ledger.jsonl"
    run = Run(path)
    target = (run.accountant.epsilon(13) + run.accountant.epsilon(14)) / 2
    run.fit(40, target=target)
    assert read(path).steps == 13
    run.close()
    again = Run(path)
    with pytest.raises(ValueError, match="would exceed the budget"):
        again.fit(1, target=target)
    assert read(path).steps == 13


def test_steps_without_a_budget_callback_are_noticed(tmp_path):
    run = Run(tmp_path / "ledger.jsonl")
    run.accountant.follow(run.model)
    train(run.model, 2)
    with pytest.raises(Unaccounted, match="2 steps were made"):
        run.accountant.epsilon()


def test_what_a_ledger_cannot_pay_for_is_refused(tmp_path):
    with pytest.raises(ValueError, match="planned noise"):
        Accountant(GaussianDpEvent(1.0), FixedOrder(100, 10), 1e-3, ledger=tmp_path / "a.jsonl")
    with Ledger(tmp_path / "b.jsonl", "click", Snapshot(500)) as ledger, pytest.raises(BrokenLedger):
        accountant_of(ledger=ledger)


@pytest.mark.parametrize("extra, made", [(1, 6), (9, 4)])
def test_a_step_that_no_ledger_has_paid_for_refuses_itself(tmp_path, monkeypatch, extra, made):
    """Blocks of 4: a callback's steps are paid for as long as the block lasts, and not one more is made."""
    monkeypatch.setattr("tfdp_rec.core.claim.spending.BLOCK", 4)
    path = tmp_path / "ledger.jsonl"
    run = Run(path)

    def train_as_well(batch):
        for drawn in SAMPLING.batches(rows).take(extra):
            run.model.train_on_batch(drawn)

    with contextlib.nullcontext() if extra == 1 else pytest.raises(Exception, match="Refused batch"):
        run.fit(3, [after_step(train_as_well)])
    assert int(run.model.optimizer.iterations) == made <= read(path).steps
