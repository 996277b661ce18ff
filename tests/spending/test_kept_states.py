"""Under a ledger a training goes on, and is released, from its newest state alone: no copy, no older checkpoint."""

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
SUPERSEDED = "Another run has gone on from the checkpoint"


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
        self.accountant.close() if self.accountant.payments is None else self.accountant.payments.ledger.close()

    @property
    def paid(self):
        return read(self.path).steps


@pytest.mark.parametrize("kind", KINDS)
def test_of_copies_of_a_checkpoint_one_is_resumed(tmp_path, kind):
    """Four were, and released four times what their rows owed, for the payment of one."""
    Process(tmp_path, kind).fit(9, killed_at=5)
    for copy in ("one", "other"):
        shutil.copytree(tmp_path / "training", tmp_path / copy)
    first = Process(tmp_path, kind, "one")
    assert first.resumed.step == 4
    first.model.get_weights()
    first.die()
    before = read(tmp_path / "ledger.jsonl").lines
    for training in ("training", "other"):
        with pytest.raises(RuntimeError, match=SUPERSEDED):
            Process(tmp_path, kind, training)
    assert read(tmp_path / "ledger.jsonl").lines == before
    again = Process(tmp_path, kind, "one")
    again.fit(9)
    assert int(again.model.optimizer.iterations) == 9
    again.die()


def test_a_copy_is_refused_as_soon_as_another_is_resumed(tmp_path):
    """Whatever the first was seen to do: it may have been released where no ledger hears of it."""
    Process(tmp_path).fit(9, killed_at=5)
    shutil.copytree(tmp_path / "training", tmp_path / "copy")
    Process(tmp_path).die()
    with pytest.raises(RuntimeError, match=SUPERSEDED):
        Process(tmp_path, training="copy")


@pytest.mark.parametrize("act", ["train", "release", "save"])
def test_a_process_that_another_has_gone_on_from_neither_trains_nor_releases(tmp_path, act):
    first = Process(tmp_path)
    first.fit(9, killed_at=5)
    del first.checkpoint.save
    shutil.copytree(tmp_path / "training", tmp_path / "copy")
    second = Process(tmp_path, training="copy")
    second.fit(9)
    second.die()
    first.accountant = Accountant(GaussianDpEvent(1.0), first.sampling, DELTA, "rdp", ledger=first.path)
    first.checkpoint.accountant = first.accountant
    paid = first.paid
    acts = {"train": lambda: first.fit(3), "release": first.model.get_weights, "save": first.checkpoint.save}
    with pytest.raises(RuntimeError, match=SUPERSEDED):
        acts[act]()
    assert first.paid == paid
    first.die()


@pytest.mark.parametrize("resuming", [False, True])
@pytest.mark.parametrize("killed_at", ["first note", "file", "second note", "older files"])
def test_a_kill_at_any_write_leaves_the_directory_resumable_and_one_copy_at_most(
    tmp_path, killed_at, resuming, monkeypatch
):
    Process(tmp_path).fit(9, killed_at=5)
    shutil.copytree(tmp_path / "training", tmp_path / "copy")
    dying = None if resuming else Process(tmp_path)
    writes = {"first note": (Accountant, "note_checkpoint", 1), "second note": (Accountant, "note_checkpoint", 2)}
    writes |= {"file": (os, "replace", 1), "older files": (os, "remove", 1)}
    owner, name, number = writes[killed_at]
    done, called = getattr(owner, name), []

    def write(*arguments, **options):
        called.append(name)
        if len(called) == number:
            raise SystemExit
        return done(*arguments, **options)

    monkeypatch.setattr(owner, name, write)
    with pytest.raises(SystemExit):
        Process(tmp_path) if resuming else dying.checkpoint.save()
    monkeypatch.undo()
    if dying:
        dying.die()
    again = Process(tmp_path)
    assert again.resumed.step == 4
    again.model.get_weights()
    again.die()
    with pytest.raises(RuntimeError, match=SUPERSEDED):
        Process(tmp_path, training="copy")


def test_of_two_trainings_in_one_ledger_each_goes_on_from_its_own_newest_state(tmp_path):
    for training in ("one", "other"):
        Process(tmp_path, training=training).fit(3, killed_at=3)
    for training in ("one", "other"):
        again = Process(tmp_path, training=training)
        assert again.resumed.step == 2
        again.model.get_weights()
        again.die()


def test_an_older_checkpoint_is_refused_after_its_training_was_released_without_one(tmp_path):
    first = Process(tmp_path)
    first.fit(4)
    shutil.copytree(tmp_path / "training", tmp_path / "copy")
    first.fit(8, killed_at=7)
    shutil.rmtree(tmp_path / "training")
    first.accountant = Accountant(GaussianDpEvent(1.0), first.sampling, DELTA, "rdp", ledger=first.path)
    first.checkpoint.accountant = first.accountant
    first.model.get_weights()
    first.die()
    with pytest.raises(RuntimeError, match=SUPERSEDED):
        Process(tmp_path, training="copy")


@pytest.mark.parametrize("ledger", [False, True])
def test_two_that_were_begun_without_a_ledger_are_not_both_resumed_under_one(tmp_path, ledger):
    """Without one nothing can be known of copies."""
    first = Process(tmp_path, ledger=False)
    first.fit(4)
    for copy in ("one", "other"):
        shutil.copytree(tmp_path / "training", tmp_path / copy)
    one = Process(tmp_path, training="one", ledger=ledger)
    if ledger:
        one.die()
        with pytest.raises(RuntimeError, match=SUPERSEDED):
            Process(tmp_path, training="other")
    else:
        assert Process(tmp_path, training="other", ledger=False).resumed.step == one.resumed.step == 4


def test_a_training_that_was_counted_in_a_ledger_is_not_resumed_without_it(tmp_path):
    """What the ledger holds besides was left out: ε = 0 for a paid count."""
    process = Process(tmp_path)
    process.fit(2)
    process.die()
    with pytest.raises(ValueError, match="counted in a ledger"):
        Process(tmp_path, ledger=False)


def test_a_checkpoint_that_the_ledger_does_not_hear_of_is_refused_before_a_step_is_paid_for(tmp_path):
    process = Process(tmp_path)
    process.checkpoint = TrainingCheckpoint(tmp_path / "unheard", every=2)
    with pytest.raises(ValueError, match="accountant=accountant"):
        process.fit(4)
    assert not read(process.path).paid
    process.die()


@pytest.mark.parametrize("unheard_first", [False, True])
def test_one_checkpoint_of_two_that_the_ledger_does_not_hear_of_is_refused(tmp_path, unheard_first):
    """A copy of what it holds could be resumed under the ledger beside the other one."""
    process = Process(tmp_path)
    unheard = TrainingCheckpoint(tmp_path / "unheard", every=2)
    both = [unheard, process.checkpoint] if unheard_first else [process.checkpoint, unheard]
    callbacks = [PrivacyBudget(process.accountant, 30.0), *both]
    with pytest.raises(ValueError, match="accountant=accountant"):
        process.model.fit(process.sampling.batches(rows), callbacks=callbacks, steps_per_epoch=4, verbose=0)
    assert not read(process.path).paid and int(process.model.optimizer.iterations) == 0
    process.die()


# Payments.


@pytest.mark.parametrize(("every", "steps_per_epoch", "killed_at", "left"), [(20, 300, 130, 280), (None, 25, 130, 275)])
def test_payments_go_no_further_ahead_than_checkpoints_lie_apart(
    tmp_path, every, steps_per_epoch, killed_at, left, capsys
):
    """Of 300 steps 220 were left, and the console said 300."""
    target = Accountant(GaussianDpEvent(1.0), PoissonSampling(UNITS, BATCH), DELTA, "rdp").epsilon(300)
    Process(tmp_path, tfdp_rec.DPSGD, every=every).fit(steps_per_epoch, killed_at, 99, target)
    process = Process(tmp_path, tfdp_rec.DPSGD, every=every)
    process.fit(steps_per_epoch, None, 99, target, verbose=2)
    assert int(process.model.optimizer.iterations) == left and process.paid == process.accountant.steps == 300
    assert f"the model has {left} of these, {300 - left} were lost" in capsys.readouterr().out
    process.die()
