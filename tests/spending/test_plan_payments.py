"""A plan in the ledger: paid for whole before its first step, and once: nothing goes on from a copy."""

import contextlib
import os
import shutil

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from checker import checked

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget, TrainingCheckpoint
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import PlannedDpEvent
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.spending import Payments
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import rows_of
from tfdp_rec.data import FixedOrder
from tfdp_rec.privacy import Accountant, BrokenLedger, Unaccounted, optimised_correlation
from tfdp_rec.training import training_checkpoint

UNITS, BATCH, STEPS, DELTA, SIGMA = 20, 4, 15, 1e-2, 3.0
PLAN = optimised_correlation(steps=STEPS, separation=5, participations=3)
ONCE, ORDER = PLAN.dp_event(SIGMA), FixedOrder(UNITS, BATCH)


def epsilon(plans):
    return epsilon_of(dp_accounting.SelfComposedDpEvent(ONCE, plans), DELTA, "rdp")


def rows(indices):
    return np.ones([len(indices), 1], np.float32), np.ones([len(indices), 1], np.float32)


class Process:
    """What a script makes anew in every process."""

    def __init__(self, folder, target=100.0, planned_for=None, training="training", lazily=False):
        self.order, self.target = FixedOrder(UNITS, BATCH), target
        inputs = keras.Input([1])
        scored = inputs
        if lazily:
            scored = keras.layers.Flatten()(keras.layers.Embedding(30, 2, name="items")(inputs))
        self.model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1, name="score")(scored))
        settings = {"l2_norm_clip": 1.0, "noise_multiplier": SIGMA, "expected_batch_size": BATCH, "correlation": PLAN}
        self.path = folder / "ledger.jsonl"
        if planned_for:
            options = {"sampling": self.order, "delta": DELTA, "steps": STEPS, "accountant": "rdp"}
            plan = tfdp_rec.PrivatePlan(epsilon=planned_for, correlation=PLAN, ledger=self.path, **options)
            settings = {"plan": plan}
        kind = tfdp_rec.LazyDPFTRL if lazily else tfdp_rec.DPFTRL
        self.model.compile(kind(0.1, **settings), "mse", run_eagerly=True)
        self.accountant = (
            plan.accountant if planned_for else Accountant(self.event, self.order, DELTA, "rdp", ledger=self.path)
        )
        self.checkpoint = TrainingCheckpoint(folder / training, every=2, accountant=self.accountant)
        self.model.prepare(rows(range(BATCH)))
        try:
            self.resumed = self.checkpoint.resume(self.model)
        except RuntimeError:
            self.accountant.spending.payments.ledger.close()
            raise

    @property
    def event(self):
        return self.model.optimizer.dp_event()

    def fit(self, steps, killed_at=None):
        """`steps` more; or as many until a kill, which settles nothing."""
        position = self.model.optimizer.position
        kill = lambda batch, logs: self._kill(killed_at)  # noqa: E731
        last = keras.callbacks.LambdaCallback(on_train_batch_end=kill, keeps_off_weights=True)
        within = PrivacyBudget(self.accountant, self.target)
        batches = self.order.batches(rows, position=position)
        callbacks = [within, self.checkpoint, last]
        try:
            self.model.fit(batches, steps_per_epoch=5, epochs=9, verbose=0, callbacks=[*callbacks, Stop(steps)])
        except KeyboardInterrupt:
            self.accountant.spending.payments.ledger.close()

    def _kill(self, at):
        if self.model.optimizer.position == at:
            self.checkpoint.save = lambda: None  # the dead write nothing
            raise KeyboardInterrupt


class Stop(keras.callbacks.Callback):
    keeps_off_weights = True

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.model.stop_training = True


def paid(process):
    """ε of the file, from its entries alone."""
    return read(process.path).epsilon(DELTA, "rdp")


@pytest.mark.slow
def test_a_plan_is_paid_for_whole_before_its_first_step_and_once(tmp_path):
    process, seen = Process(tmp_path), []
    process._kill = lambda at: seen.append((read(process.path).steps, paid(process)))
    process.fit(4)
    assert seen == [(STEPS, pytest.approx(epsilon(1)))] * 4
    assert process.accountant.steps == 4 and read(process.path).steps == STEPS, "of a plan no step comes back"
    process.fit(5)
    assert process.accountant.steps == 9
    assert paid(process) == pytest.approx(process.accountant.epsilon()) == pytest.approx(epsilon(1))
    process.accountant.close()


def test_a_plan_none_of_whose_steps_was_made_costs_nothing(tmp_path):
    process = Process(tmp_path)
    process.accountant.follow(process.model)
    process.accountant.spending.pay_ahead(process.accountant.event, 1, STEPS, process.model.optimizer)
    assert paid(process) == pytest.approx(epsilon(1))
    process.accountant.close()
    assert read(process.path).paid == []


@pytest.mark.slow
@pytest.mark.parametrize(("killed_at", "kept"), [(6, 5), (7, 7)])
def test_a_killed_plan_goes_on_from_its_last_checkpoint_and_pays_nothing_more(tmp_path, killed_at, kept):
    first = Process(tmp_path)
    first.fit(STEPS, killed_at=killed_at)
    second = Process(tmp_path, target=epsilon(1) * (1 + 1e-6))
    assert second.resumed.step == kept
    second.fit(STEPS)
    assert second.model.optimizer.position == STEPS == second.accountant.steps
    assert paid(second) == pytest.approx(second.accountant.epsilon()) == pytest.approx(epsilon(1))
    second.accountant.close()
    assert checked(second.path, DELTA, tmp_path) == pytest.approx(read(second.path).epsilon(DELTA), rel=1e-3)


@pytest.mark.slow
def test_an_older_checkpoint_is_refused(tmp_path):
    first = Process(tmp_path)
    first.fit(STEPS, killed_at=4)
    shutil.copytree(tmp_path / "training", tmp_path / "older")
    second = Process(tmp_path)
    second.fit(STEPS, killed_at=9)
    shutil.rmtree(tmp_path / "training")
    shutil.copytree(tmp_path / "older", tmp_path / "training")
    assert refused(tmp_path) == pytest.approx(epsilon(1)), "nothing was looked at"


def test_twice_from_one_checkpoint_is_refused_whatever_the_first_was_seen_to_do(tmp_path):
    """Who began there may have been released by a program that notes nothing."""
    Process(tmp_path).fit(STEPS, killed_at=6)
    shutil.copytree(tmp_path / "training", tmp_path / "older")
    second = Process(tmp_path)
    second.accountant.close()
    shutil.rmtree(tmp_path / "training")
    shutil.copytree(tmp_path / "older", tmp_path / "training")
    assert refused(tmp_path) == pytest.approx(epsilon(1))


SUPERSEDED = "Another run has gone on from the checkpoint"


def refused(folder, training="training", lazily=False):
    """What the file holds, after another process was refused to resume a directory."""
    with pytest.raises(RuntimeError, match=SUPERSEDED):
        Process(folder, training=training, lazily=lazily)
    return read(folder / "ledger.jsonl").epsilon(DELTA, "rdp")


def superseded(folder):
    """A process that trains on, though a second one has gone on from a copy of its checkpoint."""
    first = Process(folder)
    first.fit(4)
    first.accountant.close()
    shutil.copytree(folder / "training", folder / "copy")
    second = Process(folder, training="copy")
    second.fit(3)
    second.accountant.close()
    first.accountant = Accountant(first.event, first.order, DELTA, "rdp", ledger=first.path)
    first.accountant.follow(first.model)
    first.checkpoint.accountant = first.accountant
    return first


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("kept", [False, True])
def test_a_part_that_another_has_gone_on_from_does_not_go_on_itself(tmp_path, kept):
    first = superseded(tmp_path)
    first.checkpoint = first.checkpoint if kept else keras.callbacks.Callback()
    with pytest.raises(RuntimeError, match=SUPERSEDED):
        first.fit(3)
    assert paid(first) == pytest.approx(epsilon(1)), "nothing was looked at"
    first.accountant.close()


def test_a_checkpoint_is_not_saved_again_after_another_part_has_gone_on_from_it(tmp_path):
    first = superseded(tmp_path)
    with pytest.raises(RuntimeError, match=SUPERSEDED):
        first.checkpoint.save()
    first.accountant.close()
    assert refused(tmp_path) == pytest.approx(epsilon(1))


@pytest.mark.slow
@pytest.mark.parametrize("cut_off", [False, True])
def test_what_was_trained_without_a_checkpoint_after_the_last_one_is_no_crash(tmp_path, cut_off):
    """It was released: a backup of the checkpoint before it makes other noise for the same steps."""
    first = Process(tmp_path)
    if cut_off:
        with pytest.raises(ZeroDivisionError):
            first.model.fit(
                first.order.batches(rows), steps_per_epoch=5, epochs=9, verbose=0,
                callbacks=[PrivacyBudget(first.accountant, 100.0), first.checkpoint, Fails(4)],
            )  # fmt: skip
    else:
        first.fit(4)
    shutil.copytree(tmp_path / "training", tmp_path / "backup")
    first.checkpoint = keras.callbacks.Callback()
    first.fit(STEPS)
    assert first.model.optimizer.position == STEPS
    first.model.get_weights()
    first.accountant.close()
    assert refused(tmp_path, "backup") == pytest.approx(epsilon(1))


class Fails(keras.callbacks.Callback):
    keeps_off_weights = True

    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.at:
            raise ZeroDivisionError


@pytest.mark.slow
def test_a_checkpoint_keeps_the_part_that_is_under_way_whatever_the_accountant_was_told_last(tmp_path):
    Process(tmp_path).fit(STEPS, killed_at=6)
    second = Process(tmp_path)
    batches = second.order.batches(rows, position=5)
    second.model.fit(batches, steps_per_epoch=5, epochs=2, verbose=0, callbacks=[second.checkpoint])  # without a budget
    kept = read(second.path).notes("state kept")[-1]
    assert kept == {"training": second.model.optimizer.training_id, "state": second.model.optimizer.state_id}
    second.accountant.spending.payments.ledger.close()


@pytest.mark.slow
def test_a_private_plan_that_is_made_again_goes_on(tmp_path):
    first = Process(tmp_path, 2.0, planned_for=2.0)
    first.fit(STEPS, killed_at=7)
    second = Process(tmp_path, 2.0, planned_for=2.0)
    assert second.model.optimizer.noise_multiplier == first.model.optimizer.noise_multiplier
    second.fit(STEPS)
    assert second.model.optimizer.position == STEPS and 1.9 < paid(second) <= 2.0
    second.accountant.close()
    shutil.rmtree(tmp_path / "training")
    third = Process(tmp_path, 2.0, planned_for=2.0)  # with nothing to go on from
    with pytest.raises(ValueError, match="would exceed the budget"):
        third.fit(1)
    third.accountant.close()


@pytest.mark.slow
def test_a_fit_that_is_killed_before_its_first_checkpoint_goes_on_from_that_of_the_fit_before(tmp_path):
    first = Process(tmp_path)
    first.fit(4)
    first.fit(STEPS, killed_at=5)
    second = Process(tmp_path, target=epsilon(1) * (1 + 1e-6))
    assert second.resumed.step == 4
    second.fit(STEPS)
    assert second.model.optimizer.position == STEPS
    assert paid(second) == pytest.approx(second.accountant.epsilon()) == pytest.approx(epsilon(1))
    second.accountant.close()


@pytest.mark.fast_cases("True-True")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("ledger", [False, True])
def test_a_resumed_part_that_makes_no_step_is_no_fork(tmp_path, trained, ledger):
    """It is released, which writes its checkpoint; or it is killed after a step that none holds."""
    Process(tmp_path).fit(STEPS, killed_at=6)
    for _ in range(2):
        second = Process(tmp_path)
        second.checkpoint.save()
        second.accountant.spending.payments.ledger.close()
    if trained:
        second = Process(tmp_path)
        second.fit(STEPS, killed_at=6)
    third = Process(tmp_path, target=epsilon(1) * (1 + 1e-6))
    assert third.resumed.step == 5
    if ledger:
        third.fit(STEPS)
        assert paid(third) == pytest.approx(third.accountant.epsilon()) == pytest.approx(epsilon(1))
    else:
        third.model.fit(third.order.batches(rows, position=5), steps_per_epoch=2, verbose=0)
        alone = Accountant(third.event, third.order, DELTA, "rdp")
        alone.follow(third.model)
        assert alone.epsilon() == pytest.approx(epsilon(1))
    third.accountant.spending.payments.ledger.close()


@pytest.mark.slow
def test_the_model_is_looked_at_between_resumption_and_training_for_nothing(tmp_path):
    Process(tmp_path).fit(STEPS, killed_at=6)
    second = Process(tmp_path, target=epsilon(1) * (1 + 1e-6))
    second.checkpoint.save()
    second.fit(4)
    assert paid(second) == pytest.approx(second.accountant.epsilon()) == pytest.approx(epsilon(1))
    second.accountant.close()


@pytest.mark.slow
def test_a_checkpoint_before_the_first_step_is_no_branch(tmp_path):
    first = Process(tmp_path)
    first.checkpoint.set_model(first.model)
    first.checkpoint.save()
    first.fit(STEPS, killed_at=1)
    second = Process(tmp_path, target=epsilon(1) * (1 + 1e-6))
    assert second.resumed.step == 0
    second.fit(4)
    assert paid(second) == pytest.approx(second.accountant.epsilon()) == pytest.approx(epsilon(1))
    second.accountant.close()


def test_steps_after_a_resumption_are_of_the_plan_that_was_resumed(tmp_path):
    """Also those of a model that has made steps of another plan in this process."""
    first = Process(tmp_path)
    first.fit(2)
    first.accountant.close()
    process = Process(tmp_path, training="another")
    process.fit(1)
    process.checkpoint = TrainingCheckpoint(tmp_path / "training", every=2, accountant=process.accountant)
    process.checkpoint.resume(process.model)
    process.fit(1)
    assert [entry.steps for _, entry in process.model.privacy_history.snapshot().items()] == [3, 1]
    assert process.accountant.steps == 4 and process.accountant.epsilon() == pytest.approx(epsilon(2))
    process.accountant.close()


def test_a_copy_that_is_older_than_its_training_is_refused(tmp_path):
    first = Process(tmp_path)
    first.fit(4)
    shutil.copytree(tmp_path / "training", tmp_path / "copy")
    first.fit(4)
    first.accountant.close()
    assert refused(tmp_path, "copy") == pytest.approx(epsilon(1))


def test_rows_that_owe_noise_get_it_once_of_all_copies_of_a_checkpoint(tmp_path):
    first = Process(tmp_path, lazily=True)
    first.fit(STEPS, killed_at=3)
    shutil.copytree(tmp_path / "training", tmp_path / "copy")
    second = Process(tmp_path, lazily=True)
    assert second.resumed.step == 2 and second.model.optimizer.releasable, "a checkpoint is settled"
    second.model.get_weights()
    second.accountant.close()
    refused(tmp_path, "copy", lazily=True)


def test_a_checkpoint_that_a_kill_left_without_its_note_is_gone_on_from_for_nothing(tmp_path, monkeypatch):
    first = Process(tmp_path)
    note = Payments.note_checkpoint

    def noted(payments, training, stands, state, done=True):
        if done and first.model.optimizer.position == 5:
            first.accountant.spending.payments.ledger.close()
            raise SystemExit  # the file is there
        note(payments, training, stands, state, done)

    monkeypatch.setattr(Payments, "note_checkpoint", noted)
    with pytest.raises((SystemExit, ValueError, RuntimeError)):
        first.fit(STEPS)
    monkeypatch.undo()
    second = Process(tmp_path, target=epsilon(1) * (1 + 1e-6))
    assert second.resumed.step == 5
    second.fit(3)
    assert paid(second) == pytest.approx(second.accountant.epsilon()) == pytest.approx(epsilon(1))
    second.accountant.close()


def test_a_copy_of_a_checkpoint_whose_directory_was_removed_before_a_release_is_refused(tmp_path):
    first = Process(tmp_path)
    first.fit(4)
    shutil.copytree(tmp_path / "training", tmp_path / "copy")
    with pytest.raises(ZeroDivisionError):
        first.model.fit(
            first.order.batches(rows, position=4), steps_per_epoch=5, epochs=9, verbose=0,
            callbacks=[PrivacyBudget(first.accountant, 100.0), Removes(tmp_path / "training"), Fails(2)],
        )  # fmt: skip
    first.model.get_weights()
    first.accountant.spending.payments.ledger.close()  # killed
    assert refused(tmp_path, "copy") == pytest.approx(epsilon(1))


class Removes(keras.callbacks.Callback):
    keeps_off_weights = True

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.parametrize("killed_at", ["first note", "file", "second note", "older files"])
def test_a_kill_at_any_write_leaves_the_directory_resumable_and_one_copy_at_most(tmp_path, killed_at, monkeypatch):
    Process(tmp_path).fit(9, killed_at=5)
    shutil.copytree(tmp_path / "training", tmp_path / "copy")
    dying = Process(tmp_path)
    writes = {"first note": (Payments, "note_checkpoint", 1), "second note": (Payments, "note_checkpoint", 2)}
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
        dying.checkpoint.save()
    monkeypatch.undo()
    dying.accountant.spending.payments.ledger.close()
    again = Process(tmp_path)
    assert again.resumed.step == 4
    again.model.get_weights()
    again.accountant.spending.payments.ledger.close()
    refused(tmp_path, "copy")


def test_of_two_plans_in_one_ledger_each_goes_on_from_its_own_newest_state(tmp_path):
    for training in ("one", "other"):
        Process(tmp_path, training=training).fit(3, killed_at=3)
    for training in ("one", "other"):
        again = Process(tmp_path, training=training)
        assert again.resumed.step == 2
        again.model.get_weights()
        again.accountant.spending.payments.ledger.close()


# Weights leave with a checkpoint of their state, or not at all.


def cannot_write(variable):
    raise OSError("No space left on device")


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("lazily", [False, True])
def test_a_plan_whose_state_cannot_be_written_is_erased(tmp_path, lazily, monkeypatch):
    """Two that went on from the checkpoint before would share noise with what was looked at."""
    first = Process(tmp_path, lazily=lazily)
    first.fit(4)
    monkeypatch.setattr(training_checkpoint, "_chunks", cannot_write)
    with pytest.raises(OSError, match="No space"):
        first.fit(3)
    monkeypatch.undo()
    assert all(np.all(np.isnan(rows_of(weight).numpy())) for weight in first.model.trainable_variables)
    with pytest.raises(RuntimeError, match="cut short.*resume"):
        first.model.get_weights()
    with pytest.raises((RuntimeError, tf.errors.OpError), match="cut short"):
        first.fit(1)
    first.accountant.spending.payments.ledger.close()
    again = Process(tmp_path, lazily=lazily)
    assert again.resumed.step == 4
    again.fit(2)
    assert paid(again) == pytest.approx(epsilon(1))
    again.accountant.close()


def test_a_plan_whose_settling_is_interrupted_is_erased(tmp_path):
    """A second Ctrl-C, in the long part of a release, left dense weights of a state that no checkpoint had."""
    first = Process(tmp_path, lazily=True)
    first.fit(4)

    def interrupted():
        raise KeyboardInterrupt

    first.model.optimizer.settle = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.model.fit(
            first.order.batches(rows, position=4), steps_per_epoch=1, verbose=0,
            callbacks=[PrivacyBudget(first.accountant, 100.0)],
        )  # fmt: skip
    assert np.all(np.isnan(first.model.layers[-1].kernel.numpy()))
    first.accountant.spending.payments.ledger.close()


@pytest.mark.slow
def test_a_failed_write_of_another_model_on_the_table_erases_a_plan(tmp_path, monkeypatch):
    first = Process(tmp_path, lazily=True)
    first.fit(2)
    items = first.model.layers[1]
    inputs = keras.Input([1])
    beside = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(items(inputs))))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 0.0, "expected_batch_size": BATCH}
    beside.compile(tfdp_rec.LazyDPSGD(0.1, **settings), "mse", run_eagerly=True)
    beside.fit(*rows(range(4)), verbose=0, callbacks=[TrainingCheckpoint(tmp_path / "beside")])
    monkeypatch.setattr(training_checkpoint, "_chunks", cannot_write)
    with pytest.raises(OSError, match="No space"):
        first.model.fit(first.order.batches(rows, position=2), steps_per_epoch=1, verbose=0)
    assert np.all(np.isnan(first.model.layers[-1].kernel.numpy()))
    first.accountant.spending.payments.ledger.close()


@pytest.mark.parametrize("way", ["fit", "resume"])
def test_a_callback_keeps_the_model_that_it_was_given_first(tmp_path, way):
    """It was silently off after it had met another, and the plan went on twice from one state."""
    first = Process(tmp_path)
    first.fit(4)
    other = Process(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path)
    with pytest.raises(ValueError, match="of its own|call resume"):
        if way == "fit":
            other.model.fit(other.order.batches(rows), steps_per_epoch=1, verbose=0, callbacks=[first.checkpoint])
        else:
            first.checkpoint.resume(other.model)
    first.checkpoint, kept = keras.callbacks.Callback(), first.checkpoint
    first.fit(3)
    assert kept.latest().endswith("step-7.training-checkpoint")
    first.accountant.close()
    other.accountant.close()


def test_an_optimizer_that_comes_back_after_a_fit_makes_no_step_by_hand(tmp_path):
    process = Process(tmp_path)
    plan = process.model.optimizer

    def exchange(batch, logs):
        process.model.optimizer = keras.optimizers.SGD(0.1)

    swapping = keras.callbacks.LambdaCallback(on_train_batch_end=exchange, keeps_off_weights=True)
    with contextlib.suppress(Exception):
        process.model.fit(
            process.order.batches(rows), steps_per_epoch=1, verbose=0,
            callbacks=[PrivacyBudget(process.accountant, 100.0), process.checkpoint, swapping],
        )  # fmt: skip
    process.model.optimizer = plan
    made = plan.position
    with pytest.raises((NotPrivate, tf.errors.InvalidArgumentError)):
        process.model.train_step(next(iter(process.order.batches(rows, position=made))))
    assert plan.position == made
    process.accountant.spending.payments.ledger.close()


def reads_within_epochs():
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)


def test_callbacks_that_may_read_weights_within_an_epoch_are_refused(tmp_path):
    class Late(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            self.on_train_batch_end = lambda batch, logs=None: None

    process, kept = Process(tmp_path), reads_within_epochs()
    for callback in (reads_within_epochs(), Late()):
        with pytest.raises(NotPrivate, match="keeps_off_weights"):
            process.model.fit(
                process.order.batches(rows), steps_per_epoch=2, verbose=0, callbacks=[process.checkpoint, callback]
            )
    assert process.model.optimizer.position == 0
    kept.keeps_off_weights = True
    process.fit(2)
    with pytest.raises(NotPrivate, match="keeps_off_weights"):  # of a fit without the callback, too
        process.model.fit(
            process.order.batches(rows, position=2), steps_per_epoch=2, verbose=0, callbacks=[reads_within_epochs()]
        )
    process.accountant.close()


def test_data_that_act_ahead_of_all_callbacks_are_refused(tmp_path):
    class Reads(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return rows(range(BATCH))

        def on_epoch_end(self):
            pass

    process = Process(tmp_path)
    with pytest.raises(NotPrivate, match="Reads.on_epoch_end"):
        process.model.fit(Reads(), verbose=0, callbacks=[process.checkpoint])
    process.accountant.close()


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_of_a_kept_plan_are_made_in_fit_alone(tmp_path, compiled):
    process = Process(tmp_path)
    own = tf.function(process.model.train_step) if compiled else process.model.train_step
    process.fit(2)
    with pytest.raises((NotPrivate, tf.errors.InvalidArgumentError), match="ensured in fit alone"):
        own(next(iter(process.order.batches(rows, position=2))))
    assert process.model.optimizer.position == 2
    process.accountant.spending.payments.ledger.close()
    again = Process(tmp_path)
    with pytest.raises((NotPrivate, tf.errors.InvalidArgumentError), match="ensured in fit alone"):
        again.model.train_step(next(iter(again.order.batches(rows, position=2))))
    again.accountant.close()


@pytest.mark.slow
def test_a_new_plan_pays_anew(tmp_path):
    first = Process(tmp_path)
    first.fit(3)
    first.accountant.close()
    shutil.rmtree(tmp_path / "training")
    second = Process(tmp_path)
    second.fit(3)
    assert paid(second) == pytest.approx(second.accountant.epsilon()) == pytest.approx(epsilon(2))
    second.accountant.close()


def test_a_plan_begun_without_a_ledger_is_noticed(tmp_path):
    process = Process(tmp_path)
    process.model.fit(process.order.batches(rows), steps_per_epoch=3, verbose=0)
    process.accountant.follow(process.model)
    with pytest.raises(Unaccounted, match="3 steps were made that"):
        process.accountant.epsilon()
    with pytest.raises(Unaccounted, match="3 steps were made that"):
        process.fit(2)
    assert not read(process.path).paid
    process.accountant.close()


def test_a_plan_has_one_noise_multiplier(tmp_path):
    process = Process(tmp_path)
    for sigma, refused in ((3.0, False), (3.0, False), (2.0, True)):
        event = PlannedDpEvent(PLAN.dp_event(sigma), STEPS, 5, 3, "one")
        with pytest.raises(ValueError, match="one noise multiplier") if refused else contextlib.nullcontext():
            process.accountant.spending.payments.pay_steps(event, 5)
    assert paid(process) == pytest.approx(epsilon(1))
    process.accountant.close()


def test_a_use_that_a_model_is_made_of_and_the_ledger_has_not_paid_for_is_named(tmp_path):
    process = Process(tmp_path)
    use = (dp_accounting.GaussianDpEvent(9.0), "counts of Monday")
    process.model.add_uses([use])
    process.accountant.follow(process.model)
    with pytest.raises(Unaccounted, match="1 steps or uses .'counts of Monday'. were made that .* has not paid for"):
        process.accountant.epsilon()
    assert not read(process.path).paid
    process.accountant.close()


@pytest.mark.slow
def test_a_ledger_that_is_older_than_the_checkpoint_is_refused(tmp_path):
    first = Process(tmp_path)
    first.fit(2)
    first.accountant.close()
    older = first.path.read_bytes()
    second = Process(tmp_path)
    second.fit(4)
    second.accountant.close()
    first.path.write_bytes(older)
    with pytest.raises(BrokenLedger, match="lacks entries"):
        Process(tmp_path)


def test_independent_noise_in_one_order_is_refused(tmp_path):
    with pytest.raises(ValueError, match="planned noise"):
        Accountant(dp_accounting.GaussianDpEvent(1.0), FixedOrder(20, 4), 1e-2, ledger=tmp_path / "ledger.jsonl")
    assert not (tmp_path / "ledger.jsonl").exists()


WITHOUT_LEDGER = Accountant(PlannedDpEvent(ONCE, STEPS, 5, 3, "one"), ORDER, DELTA, "rdp")


@pytest.mark.parametrize("accountant", [None, WITHOUT_LEDGER])
def test_a_checkpoint_of_planned_noise_needs_a_ledger(tmp_path, accountant):
    """Two that went on from copies of one shared the noise of its steps, for the price of one."""
    process = Process(tmp_path)
    process.accountant.close()
    checkpoint = TrainingCheckpoint(tmp_path / "other", accountant=accountant)
    with pytest.raises(ValueError, match="ledger"):
        checkpoint.resume(process.model)
    with pytest.raises(ValueError, match="ledger"):
        process.model.fit(process.order.batches(rows), steps_per_epoch=1, verbose=0, callbacks=[checkpoint])
    assert process.model.optimizer.position == 0


def test_a_plan_that_goes_on_under_an_equal_order_has_all_its_steps(tmp_path):
    """Both orders' steps were written under the plan's id, and the larger number alone was carried."""
    first = Process(tmp_path)
    first.fit(3)
    other, ledger = FixedOrder(UNITS, BATCH), first.accountant.spending.payments.ledger
    accountant = Accountant(first.event, other, DELTA, "rdp", ledger=ledger)
    first.order, first.accountant, first.checkpoint = other, accountant, keras.callbacks.Callback()
    shutil.rmtree(tmp_path / "training")
    first.fit(2)
    assert first.model.optimizer.position == 5 == accountant.steps == first.model.saved_history().steps
    assert paid(first) == pytest.approx(accountant.epsilon()) == pytest.approx(epsilon(1))
    accountant.close()
