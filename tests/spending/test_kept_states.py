"""A kill at any write leaves a directory to go on from, and every branch of a training is paid for in the ledger."""

import os
import shutil

import keras
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget, TrainingCheckpoint
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.data import PoissonSampling
from tfdp_rec.privacy import Accountant

DELTA, UNITS, BATCH = 1e-3, 500, 25
KINDS = [tfdp_rec.LazyDPSGD, tfdp_rec.DPSGD]


def rows(indices):
    return np.array(indices)[:, None] % 30, np.ones([len(indices), 1], np.float32)


class Process:
    """What a script makes anew in every process."""

    def __init__(self, folder, kind=tfdp_rec.LazyDPSGD, training="training", every=2, ledger=True):
        self.sampling = PoissonSampling(num_units=UNITS, expected_batch_size=BATCH)
        self.path = folder / "ledger.jsonl"
        kept = {"ledger": self.path} if ledger else {}
        self.accountant = Accountant(GaussianDpEvent(1.0), self.sampling, DELTA, "rdp", **kept)
        inputs = keras.Input([1])
        scored = keras.layers.Flatten()(keras.layers.Embedding(30, 2, name="items")(inputs))
        self.model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1, name="score")(scored))
        settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": BATCH}
        self.model.compile(kind(0.1, **settings), "mse", run_eagerly=True)
        self.model.prepare(rows(range(BATCH)))
        self.checkpoint = TrainingCheckpoint(folder / training, every=every, accountant=self.accountant)
        try:
            self.resumed = self.checkpoint.resume(self.model)
        except BaseException:
            self.die()
            raise

    def fit(self, steps, killed_at=None, epochs=1, target=30.0, verbose=0):
        """An epoch of `steps`, or as many until a kill, which settles and writes nothing."""
        last = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: self._kill(killed_at))
        last.keeps_off_weights = True
        callbacks = [PrivacyBudget(self.accountant, target), self.checkpoint, last]
        options = {"steps_per_epoch": steps, "epochs": epochs, "verbose": verbose}
        try:
            self.model.fit(self.sampling.batches(rows), callbacks=callbacks, **options)
        except KeyboardInterrupt:
            self.die()

    def _kill(self, at):
        if int(self.model.optimizer.iterations) == at:
            self.checkpoint.save = lambda: None  # the dead write nothing
            raise KeyboardInterrupt

    def die(self):
        ledger = self.accountant.spending.payments.ledger
        self.accountant.close() if ledger is None else ledger.close()

    @property
    def paid(self):
        return read(self.path).steps


@pytest.mark.fast_cases("LazyDPSGD")
@pytest.mark.parametrize("kind", KINDS)
def test_of_copies_of_a_checkpoint_each_is_paid_for(tmp_path, kind):
    """A checkpoint is settled: what goes on from a copy is another training from a state that was released."""
    Process(tmp_path, kind).fit(9, killed_at=5)
    assert read(tmp_path / "ledger.jsonl").steps == 6, "two at a time, as far as checkpoints lie apart"
    for copy in ("one", "other"):
        shutil.copytree(tmp_path / "training", tmp_path / copy)
    for number, training in enumerate(("training", "one", "other"), 1):
        again = Process(tmp_path, kind, training)
        assert again.resumed.step == 4
        again.model.get_weights()
        again.fit(9)
        assert int(again.model.optimizer.iterations) == 9 == again.accountant.spending.history.steps
        assert again.paid == 6 + 5 * number == again.accountant.steps
        again.die()


def test_steps_that_a_kill_took_stay_spent(tmp_path):
    """Their weights may have been looked at, by whatever way."""
    Process(tmp_path, every=4).fit(9, killed_at=7)
    again = Process(tmp_path, every=4)
    assert again.resumed.step == 4 and again.paid == 8
    again.fit(9)
    counted = again.accountant
    assert counted.spending.history.steps == 9 and counted.steps == 13 and counted.missing_steps == 4
    again.die()


@pytest.mark.fast_cases("file")
@pytest.mark.parametrize("killed_at", ["file", "older files"])
def test_a_kill_at_any_write_leaves_the_directory_resumable(tmp_path, killed_at, monkeypatch):
    Process(tmp_path).fit(9, killed_at=5)
    dying = Process(tmp_path)
    name, called = {"file": "replace", "older files": "remove"}[killed_at], []
    done = getattr(os, name)

    def write(*arguments, **options):
        called.append(name)
        if len(called) == 1:
            raise SystemExit
        return done(*arguments, **options)

    monkeypatch.setattr(os, name, write)
    with pytest.raises(SystemExit):
        dying.checkpoint.save()
    monkeypatch.undo()
    dying.die()
    again = Process(tmp_path)
    assert again.resumed.step == 4
    again.fit(9)
    assert again.accountant.spending.history.steps == 9
    again.die()


def test_two_trainings_in_one_ledger_each_go_on(tmp_path):
    for training in ("one", "other"):
        Process(tmp_path, training=training).fit(3, killed_at=3)
    for training in ("one", "other"):
        again = Process(tmp_path, training=training)
        assert again.resumed.step == 2
        again.model.get_weights()
        again.die()


def test_a_training_that_was_counted_in_a_ledger_is_not_resumed_without_it(tmp_path):
    process = Process(tmp_path)
    process.fit(2)
    process.die()
    with pytest.raises(ValueError, match="needs a ledger"):
        Process(tmp_path, ledger=False)


def test_a_checkpoint_of_which_no_ledger_hears_is_refused_before_a_step_is_paid_for(tmp_path):
    """A copy of what it holds could be resumed under the ledger beside the other one."""
    process = Process(tmp_path)
    callbacks = [PrivacyBudget(process.accountant, 30.0), process.checkpoint, TrainingCheckpoint(tmp_path / "unheard")]
    for several in (callbacks, callbacks[::-1]):
        with pytest.raises(ValueError, match="accountant=accountant"):
            process.model.fit(process.sampling.batches(rows), callbacks=several, steps_per_epoch=4, verbose=0)
    assert not read(process.path).paid and int(process.model.optimizer.iterations) == 0
    process.die()


def test_a_budget_pays_in_the_ledger_of_its_checkpoints(tmp_path):
    """16 steps were made, and a budget without a ledger told 10."""
    process = Process(tmp_path)
    alone = Accountant(GaussianDpEvent(1.0), process.sampling, DELTA, "rdp")
    with pytest.raises(ValueError, match="the budget's accountant"):
        process.model.fit(
            process.sampling.batches(rows), steps_per_epoch=4, verbose=0,
            callbacks=[PrivacyBudget(alone, 30.0), process.checkpoint],
        )  # fmt: skip
    assert int(process.model.optimizer.iterations) == 0
    process.die()


# Payments.


@pytest.mark.slow
@pytest.mark.fast_cases("None-5-55")
@pytest.mark.parametrize(("every", "steps_per_epoch", "left"), [(4, 60, 56), (None, 5, 55)])
def test_payments_go_no_further_ahead_than_checkpoints_lie_apart(tmp_path, every, steps_per_epoch, left, capsys):
    """Payments for 100 steps at a time left 24 of 60, and the console said 60."""
    target = Accountant(GaussianDpEvent(1.0), PoissonSampling(UNITS, BATCH), DELTA, "rdp").epsilon(60)
    Process(tmp_path, tfdp_rec.DPSGD, every=every).fit(steps_per_epoch, 26, 99, target)
    process = Process(tmp_path, tfdp_rec.DPSGD, every=every)
    process.fit(steps_per_epoch, None, 99, target, verbose=2)
    assert int(process.model.optimizer.iterations) == left and process.paid == process.accountant.steps == 60
    assert f"the model has {left} of these, {60 - left} were lost" in capsys.readouterr().out
    process.die()
