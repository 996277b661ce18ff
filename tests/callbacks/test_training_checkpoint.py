"""Interrupted and resumed is uninterrupted; ε counts each step once; the file is no model to release."""

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf

import tfdp_rec
from tfdp_rec.callbacks import TrainingCheckpoint
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import find_withheld, rows_of
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.privacy import PoissonSampling
from tfdp_rec.training import training_checkpoint

UNITS, ROWS = 60, 40
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, ROWS, [UNITS, 3]).astype("int32")
LABELS = RNG.normal(size=[UNITS, 1]).astype("float32")


def optimizer_of(kind=tfdp_rec.LazyDPSGD, noise_multiplier=2.0, **options):
    options = {"l2_norm_clip": 1.0, "expected_batch_size": 6, "momentum": 0.5, **options}
    if kind is tfdp_rec.LazyDPSGD:
        options.setdefault("aggregate_noise", False)
    rate = keras.optimizers.schedules.ExponentialDecay(0.4, 5, 0.7)
    return kind(rate, noise_multiplier=noise_multiplier, **options)


KEYED = KeyedNoise(4)
LISTED = ["in-use", "ledger.jsonl"]


def model_of(rows=ROWS, kind=tfdp_rec.LazyDPSGD, noise=KEYED, items=None, **options):
    seeding.seed(0)
    ids = keras.Input([3], dtype="int32")
    items = keras.layers.Embedding(rows, 4, name="items") if items is None else items
    hidden = keras.layers.Flatten()(items(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer_of(kind, noise=noise, **options), loss="mse", run_eagerly=True)
    return model


OPEN = {}  # accountants by ledger, which one process at a time has open


def accountant_in(directory, optimizer, sampling):
    path = os.path.join(os.path.abspath(directory), "ledger.jsonl")
    if path in OPEN:
        OPEN.pop(path).close()
    os.makedirs(directory, exist_ok=True)
    event = optimizer.dp_event()
    OPEN[path] = tfdp_rec.privacy.Accountant(event, sampling, delta=1e-3, accountant="rdp", ledger=path)
    return OPEN[path]


class Setup:
    """What a training script makes anew in every process."""

    def __init__(self, directory, every=3, **options):
        self.sampling = PoissonSampling(UNITS, 6)
        self.model = model_of(**options)
        self.accountant = accountant_in(directory, self.model.optimizer, self.sampling)
        self.checkpoint = TrainingCheckpoint(directory, every=every, accountant=self.accountant)

    def fit(self, callbacks=(), epochs=3):
        resumed = self.checkpoint.resume(self.model)
        position = 0 if resumed is None else resumed.step
        batches = self.sampling.batches(lambda i: (IDS[i], LABELS[i]), seed=9, position=position)
        self.model.fit(batches, epochs=epochs, steps_per_epoch=5, verbose=0, callbacks=[self.checkpoint, *callbacks])
        return self.model.get_weights()


class Stop(keras.callbacks.Callback):
    """Ends a process, as far as the test goes, before or after some step of the fit."""

    keeps_off_weights = True

    def __init__(self, at, error=KeyboardInterrupt, when="end"):
        super().__init__()
        self.left, self.error, self.when = at, error, when

    def on_train_batch_begin(self, batch, logs=None):
        self._count("begin")

    def on_train_batch_end(self, batch, logs=None):
        self._count("end")

    def _count(self, when):
        if when == self.when:
            self.left -= 1
            if self.left == 0:
                raise self.error


class NoLastWords(TrainingCheckpoint):
    """What a killed process leaves: no checkpoint on the way out."""

    def save_before_release(self, optimizer):
        pass


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    setup = Setup(tmp_path_factory.mktemp("whole"))
    weights = setup.fit()
    assert setup.accountant.spending.history.steps == 15
    return weights


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_killed_and_resumed(tmp_path, uninterrupted):
    for stop in (2, 5, 5):  # before the first checkpoint; at the end of an epoch, from 0; in the middle of one, from 3
        setup = Setup(tmp_path)
        setup.checkpoint.__class__ = NoLastWords
        with pytest.raises(KeyboardInterrupt):
            setup.fit([Stop(stop)])
    setup = Setup(tmp_path)
    assert_same(setup.fit(), uninterrupted)
    assert setup.accountant.spending.history.steps == int(setup.model.optimizer.iterations) == 15


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory):
    directory = tmp_path_factory.mktemp("epoch")
    setup = Setup(directory)
    return directory, setup.fit(epochs=1)


@pytest.fixture
def finished(one_epoch, tmp_path):
    """A directory with the checkpoint of one epoch."""
    return shutil.copytree(one_epoch[0], tmp_path / "finished")


@pytest.mark.slow
def test_interrupted_fit_leaves_a_checkpoint_of_where_it_was(tmp_path, uninterrupted):
    setup = Setup(tmp_path, every=1000)
    with pytest.raises(KeyboardInterrupt):
        setup.fit([Stop(8)])
    assert setup.model.optimizer.releasable
    setup = Setup(tmp_path)
    assert_same(setup.fit(), uninterrupted)
    assert setup.accountant.spending.history.steps == 15


@pytest.mark.slow
def cut_short(optimizer, step):
    """Lets a step end in an error, just before its end."""
    apply = optimizer.apply

    def fails(*args, **kwargs):
        apply(*args, **kwargs)
        if int(optimizer.iterations) == step:
            optimizer.iterations.assign(step - 1)
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    optimizer.apply = fails


def test_a_step_cut_short_counts_and_one_only_planned_does_not(tmp_path):
    cut, planned = Setup(tmp_path / "cut"), Setup(tmp_path / "planned")
    cut_short(cut.model.optimizer, step=5)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        cut.fit()
    with pytest.raises(KeyboardInterrupt):
        planned.fit([Stop(5, when="begin")])
    for setup, counted in ((cut, 5), (planned, 4)):
        again = Setup(setup.checkpoint.directory)
        again.checkpoint.resume(again.model)
        assert int(again.model.optimizer.iterations) == 4 and again.accountant.spending.history.steps == counted


def test_steps_planned_when_the_data_ran_out_are_not_counted(tmp_path):
    """Six batches, four steps an execution: eight are planned, and six are made."""
    setup = Setup(tmp_path)
    setup.model.compile(setup.model.optimizer, loss="mse", run_eagerly=True, steps_per_execution=4)
    data = tf.data.Dataset.from_tensor_slices((IDS[:36], LABELS[:36])).batch(6)
    setup.model.fit(data, verbose=0, callbacks=[setup.checkpoint])
    assert int(setup.model.optimizer.iterations) == 6
    again = Setup(tmp_path)
    again.checkpoint.resume(again.model)
    assert again.accountant.spending.history.steps == 6


@pytest.mark.slow
def test_what_was_released_is_not_forgotten(tmp_path):
    """A release in mid-epoch, then a kill: the resumed run has the released noise, not other noise instead of it."""

    class ReleaseThenDie(keras.callbacks.Callback):
        keeps_off_weights = True

        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                self.model.save(tmp_path / "released.keras")
                raise KeyboardInterrupt

    setup = Setup(tmp_path / "steps", every=4, noise=None)  # entropy: noise drawn twice would differ
    setup.checkpoint.__class__ = type("Kept", (TrainingCheckpoint,), {})
    with pytest.raises(KeyboardInterrupt):
        setup.fit([ReleaseThenDie()])
    released = keras.models.load_model(tmp_path / "released.keras")
    again = Setup(tmp_path / "steps", noise=None)
    assert again.checkpoint.resume(again.model).step == 5 == int(released.optimizer.iterations)
    assert again.accountant.spending.history.steps == 5
    for one, other in zip(again.model.get_weights(), released.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "both"),
    [
        ({"noise_multiplier": 1.5}, ("2.0", "1.5")),
        ({"l2_norm_clip": 3.0}, ("1.0", "3.0")),
        ({"l2_norm_clip": "auto"}, ("1.0", "auto")),
        ({"expected_batch_size": 16}, ("6.0", "16.0")),
        ({"momentum": 0.25}, ("0.5", "0.25")),
        ({"aggregate_noise": True}, ("False", "True")),
        ({"rows": 50}, ("40", "50")),
        ({"kind": tfdp_rec.DPSGD}, ("LazyDPSGD", "DPSGD")),
    ],
)
def test_another_training_is_refused(finished, options, both):
    other = Setup(finished, **options)
    before = other.model.get_weights()
    with pytest.raises(ValueError, match="another training") as refusal:
        other.checkpoint.resume(other.model)
    assert all(value in str(refusal.value) for value in both)
    for one, unchanged in zip(other.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, unchanged)


def test_going_on_without_resuming_is_refused(finished):
    with pytest.raises(ValueError, match="call resume"):
        trained(setup := Setup(finished), callbacks=[setup.checkpoint])


@pytest.mark.fast_cases("Accountant")
@pytest.mark.parametrize("accountant", [None, tfdp_rec.privacy.Accountant])
def test_a_training_of_which_no_ledger_knows_is_not_kept(tmp_path, accountant):
    """A run that was killed may have let out more than its last checkpoint tells of."""
    model = model_of()
    if accountant:
        accountant = accountant(model.optimizer.dp_event(), PoissonSampling(UNITS, 6), delta=1e-3)
    checkpoint = TrainingCheckpoint(tmp_path, accountant=accountant)
    for use in (checkpoint.resume, lambda model: model.fit(IDS, LABELS, verbose=0, callbacks=[checkpoint])):
        with pytest.raises(ValueError, match="needs a ledger"):
            use(model)
    assert int(model.optimizer.iterations) == 0
    without_noise = TrainingCheckpoint(tmp_path)  # and so without a claim
    model_of(noise_multiplier=0.0).fit(IDS, LABELS, batch_size=6, verbose=0, callbacks=[without_noise])
    assert without_noise.latest()


def test_a_checkpoint_is_settled_and_lets_no_row_out(tmp_path):
    setup, seen = Setup(tmp_path, every=2, noise=None), []

    class Look(keras.callbacks.Callback):
        keeps_off_weights = True

        def on_train_batch_end(self, batch, logs=None):
            seen.append((len(setup.checkpoint._paths()), self.model.optimizer.releasable))
            with pytest.raises(NotPrivate, match="owes noise"):
                self.model.layers[1].embeddings.numpy()

    setup.fit([Look()], epochs=1)
    assert seen == [(0, False), (1, True), (1, False), (1, True), (1, False)]


@pytest.mark.fast_cases("1", "4")
@pytest.mark.parametrize("filled", [0, 1, 2, 3, 4, 5, 6])
def test_an_interrupted_resumption_tells_its_steps_and_forgets_no_noise(finished, filled, monkeypatch):
    """Whatever of the two states a row is of, it owes nothing then."""
    again = Setup(finished, noise=None)
    for _ in range(2):
        again.model.train_on_batch(IDS[:6], LABELS[:6])
    assert not again.model.optimizer.releasable
    before = rows_of(again.model.layers[1].embeddings).numpy().copy()
    read, seen = training_checkpoint._read, []

    def interrupted(*arguments):
        seen.append(read(*arguments))
        if len(seen) > filled:
            raise KeyboardInterrupt

    monkeypatch.setattr(training_checkpoint, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        again.checkpoint.resume(again.model)
    assert again.model.privacy_history.snapshot().steps == 2 + 5
    assert again.model.optimizer.releasable
    unread = ~np.isin(np.arange(ROWS), IDS[:6])
    assert np.all(np.any(rows_of(again.model.layers[1].embeddings).numpy() != before, axis=1)[unread])


def test_the_file_is_no_model(finished, tmp_path):
    setup = Setup(finished)
    path = setup.checkpoint.latest()
    with pytest.raises(ValueError, match="(?i)not supported"):
        keras.models.load_model(path)
    with pytest.raises(ValueError, match="(?i)not supported"):
        setup.model.load_weights(path)
    disguised = tmp_path / "model.keras"
    os.link(path, disguised)
    with pytest.raises((KeyError, ValueError)):
        keras.models.load_model(disguised)
    with zipfile.ZipFile(path) as archive:
        assert "training checkpoint" in json.loads(archive.read("training_checkpoint.json"))["format"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_file_holds_no_noise_key(tmp_path):
    entropy = Setup(tmp_path / "entropy", noise=None)
    entropy.fit(epochs=1)
    content = open(entropy.checkpoint.latest(), "rb").read()
    state = np.asarray(entropy.model.optimizer.noise._generator.state)
    assert all(int(word).to_bytes(8, "little", signed=True) not in content for word in state if abs(word) > 2**40)


def test_an_interrupted_write_leaves_the_older_file(finished, monkeypatch):
    setup = Setup(finished)
    setup.checkpoint.resume(setup.model)
    before = setup.checkpoint.latest()
    monkeypatch.setattr("tfdp_rec.training.training_checkpoint._chunks", lambda variable: iter([b"12", 1 / 0]))
    with pytest.raises(ZeroDivisionError):
        setup.checkpoint.save()
    assert setup.checkpoint.latest() == before and sorted(os.listdir(finished))[1:] == LISTED
    (finished / f".dead.000009-step-9{os.path.splitext(before)[1]}").write_bytes(b"half")  # a killed process's
    monkeypatch.undo()
    again = Setup(finished)
    assert again.checkpoint.resume(again.model).step == 5
    assert sorted(os.listdir(finished))[1:] == LISTED


def test_damage_is_noticed(finished):
    path = Setup(finished).checkpoint.latest()
    content = bytearray(open(path, "rb").read())
    content[len(content) // 2] ^= 1
    open(path, "wb").write(content)
    again = Setup(finished)
    with pytest.raises((zipfile.BadZipFile, ValueError)):
        again.checkpoint.resume(again.model)


@pytest.mark.parametrize("every", [0, -3, 1.5])
def test_every_is_checked(tmp_path, every):
    with pytest.raises(ValueError, match="every"):
        TrainingCheckpoint(tmp_path, every=every)


def test_ordinary_optimizers_are_refused(tmp_path):
    inputs = keras.Input([2])
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", loss="mse")
    with pytest.raises(TypeError, match="private optimizer"):
        TrainingCheckpoint(tmp_path).resume(model)


def test_large_tables_are_read_and_written_in_chunks(finished, one_epoch, monkeypatch):
    monkeypatch.setattr("tfdp_rec.training.training_checkpoint._CHUNK_VALUES", 16)
    again = Setup(finished)
    again.checkpoint.resume(again.model)
    again.checkpoint.save()
    third = Setup(finished)
    third.checkpoint.resume(third.model)
    for one, other in zip(third.model.get_weights(), one_epoch[1], strict=True):
        np.testing.assert_array_equal(one, other)


def started(directory, steps=5, kind=tfdp_rec.LazyDPSGD, **options):
    """A model after a fit with a checkpoint; its accountant, callback and data."""
    setup = Setup(directory, kind=kind, noise=None, **options)
    setup.fit(epochs=1)
    return setup


def trained(setup, **options):
    batches = setup.sampling.batches(lambda i: (IDS[i], LABELS[i]))
    setup.model.fit(batches, **{"steps_per_epoch": 5, "verbose": 0, **options})


def told(directory, kind=tfdp_rec.LazyDPSGD):
    """Number of steps that a new process is told of."""
    again = Setup(directory, kind=kind)
    again.checkpoint.resume(again.model)
    return again.accountant.spending.history.steps


KINDS = [tfdp_rec.LazyDPSGD, tfdp_rec.DPSGD]


@pytest.mark.fast_cases("DPSGD")
@pytest.mark.parametrize("kind", KINDS)
def test_steps_after_older_weights_are_in_a_checkpoint(tmp_path, kind):
    setup = Setup(tmp_path, kind=kind, noise=None)
    saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.weights.h5"), save_weights_only=True)
    setup.fit([saved], epochs=2)
    setup.model.load_weights(tmp_path / "1.weights.h5")
    trained(setup)
    assert int(setup.model.optimizer.iterations) == 10 and told(tmp_path, kind) == 15


def another_on(items, noise_multiplier=2.0):
    ids = keras.Input([3], dtype="int32")
    other = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(items(ids))))
    other.compile(optimizer_of(noise_multiplier=noise_multiplier), loss="mse")
    return other


def test_steps_of_another_model_on_the_table_are_told(tmp_path):
    setup = started(tmp_path)
    other = another_on(setup.model.layers[1])
    other.fit(IDS, LABELS, batch_size=12, verbose=0)
    setup.model.get_weights()
    assert told(tmp_path) == 10


def test_what_another_model_owes_to_the_table_is_paid_before_a_checkpoint(tmp_path):
    """It was in no file: rows that its batch had not read came back without its noise."""
    setup = started(tmp_path, noise_multiplier=0.01)
    other = another_on(setup.model.layers[1], noise_multiplier=50.0)
    for _ in range(3):
        other.train_on_batch(IDS[:6], LABELS[:6])
    table = setup.model.layers[1].embeddings
    before = rows_of(table).numpy().copy()
    setup.checkpoint.save()
    assert setup.model.optimizer.releasable and other.optimizer.releasable
    again = Setup(tmp_path, noise_multiplier=0.01)
    again.checkpoint.resume(again.model)
    unread = np.setdiff1d(np.arange(ROWS), IDS[:6])
    assert np.all(np.any(again.model.layers[1].embeddings.numpy()[unread] != before[unread], axis=1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_is_frozen_here_and_trained_by_another_model_is_settled_in_a_checkpoint(tmp_path, kind):
    """The other model was not asked: rows came back, and were read, without its noise."""
    items = keras.layers.Embedding(ROWS, 4, name="items", trainable=False)
    setup = started(tmp_path, kind=kind, items=items)
    items.trainable = True
    other = another_on(items)
    other.train_on_batch(IDS[:6], LABELS[:6])
    items.trainable = False
    assert not other.optimizer.releasable
    before = rows_of(items.embeddings).numpy().copy()
    setup.checkpoint.save()
    assert other.optimizer.releasable
    setup.checkpoint.resume(setup.model)
    unread = np.setdiff1d(np.arange(ROWS), IDS[:6])
    assert np.all(np.any(items.embeddings.numpy()[unread] != before[unread], axis=1))


@pytest.mark.fast_cases("LazyDPSGD")
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_could_not_be_written_is_written_at_the_next_release(tmp_path, kind, monkeypatch):
    """The fit after it took its state for a written one: nine steps were in the file, and five told."""
    setup = started(tmp_path, kind=kind)
    monkeypatch.setattr(training_checkpoint, "_chunks", lambda variable: iter([1 / 0]))
    with pytest.raises(ZeroDivisionError):
        trained(setup, steps_per_epoch=4)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="ends at once"):
        trained(setup, callbacks=[setup.checkpoint, EndsAtOnce()])
    setup.model.save(tmp_path / "left.keras")
    assert told(tmp_path, kind) == 9


@pytest.mark.slow
def test_weights_leave_though_the_disk_of_their_checkpoints_is_full(tmp_path, monkeypatch):
    """Each step is paid for."""
    setup = started(tmp_path)

    def full(variable):
        raise OSError("No space left on device")

    monkeypatch.setattr(training_checkpoint, "_chunks", full)
    with pytest.warns(UserWarning, match="No training checkpoint could be written"):
        trained(setup)
    assert np.all(np.isfinite(setup.model.layers[1].embeddings.numpy()))
    monkeypatch.undo()
    setup.model.save(tmp_path / "left.keras")
    assert told(tmp_path) == 10


@pytest.mark.slow
def test_a_write_that_is_interrupted_after_its_rename_is_gone_on_from(tmp_path, monkeypatch):
    setup = started(tmp_path)
    replaced = os.replace

    def interrupted(*arguments, **options):
        replaced(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.checkpoint.save()
    monkeypatch.undo()
    trained(setup)
    setup.model.get_weights()
    assert told(tmp_path) == 10


def test_a_callback_without_a_model_saves_nothing(tmp_path):
    with pytest.raises(ValueError, match="call resume"):
        TrainingCheckpoint(tmp_path).save()


class EndsAtOnce(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise RuntimeError("ends at once")


@pytest.mark.slow
def test_a_keras_callback_with_an_own_end_of_epoch_is_no_reader(tmp_path):
    class Saves(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)

    Setup(tmp_path / "training").fit([Saves(str(tmp_path / "m.keras"), save_freq=2)], epochs=1)
    assert (tmp_path / "m.keras").exists()


@pytest.mark.slow
def test_another_working_directory_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup = started("here")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    trained(setup)
    assert told(tmp_path / "here") == 10


@pytest.mark.slow
def test_a_checkpoint_of_another_callback_or_model_is_not_replaced(finished):
    one, other = Setup(finished), Setup(finished)
    for each in (one, other):
        each.checkpoint.resume(each.model)
    trained(one)
    with pytest.raises(ValueError, match="call resume"):
        trained(other)
    with pytest.raises(ValueError, match="of its own"):
        one.checkpoint.set_model(other.model)
        one.checkpoint.save()
    one.model.get_weights()  # still written where it was
    assert told(finished) == 10


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_epoch_does_not_swallow_the_end_that_another_callback_asks_for(tmp_path, first):
    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    setup = Setup(tmp_path, noise=None)
    setup.checkpoint.__class__ = NoLastWords
    with pytest.raises(KeyboardInterrupt):
        setup.fit([Stop(4)])
    setup = Setup(tmp_path, noise=None)
    assert setup.checkpoint.resume(setup.model).steps_in_epoch == 3
    both = [Ends(), setup.checkpoint] if first else [setup.checkpoint, Ends()]
    trained(setup, callbacks=both, epochs=3)
    assert setup.accountant.spending.history.steps == 5


@pytest.mark.slow
def test_a_release_ahead_of_the_callback_counts_its_step_in_the_epoch(tmp_path):
    class Saves(keras.callbacks.Callback):
        keeps_off_weights = True

        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                self.model.get_weights()
                raise KeyboardInterrupt

    setup = Setup(tmp_path, noise=None)
    with pytest.raises(KeyboardInterrupt):
        trained(setup, callbacks=[Saves(), setup.checkpoint])
    again = Setup(tmp_path, noise=None)
    assert again.checkpoint.resume(again.model).steps_in_epoch == 3


def test_rows_of_a_checkpoint_are_measured_before_the_next_step(tmp_path):
    """They were read into rows that were withheld, and the bound of weights was that of the rows before."""
    first = Setup(tmp_path)
    first.fit(epochs=1)
    again = Setup(tmp_path)
    again.model.train_on_batch(IDS[:6], LABELS[:6])
    again.checkpoint.resume(again.model)
    places = [find_withheld(table.variable) for table in again.model.optimizer.tables.values()]
    assert places and not any(each.is_withheld for each in places)


@pytest.mark.slow
def test_a_resumption_after_a_step_cut_short_lets_out_no_row_of_another_model(tmp_path):
    """Their noise is still owed, as it could not be drawn before the resumption."""
    Setup(tmp_path).fit(epochs=1)
    again = Setup(tmp_path)
    own = keras.layers.Embedding(ROWS, 4, name="own")
    ids, shared = keras.Input([3], dtype="int32"), again.model.layers[1]
    both = keras.layers.Flatten()(keras.layers.Concatenate()([shared(ids), own(ids)]))
    other = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(both))
    other.compile(optimizer_of(), loss="mse", run_eagerly=True)
    other.train_on_batch(IDS[:6], LABELS[:6])
    cut_short(again.model.optimizer, step=1)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        again.model.train_on_batch(IDS[:6], LABELS[:6])
    again.checkpoint.resume(again.model)
    assert find_withheld(own.embeddings).is_withheld and not find_withheld(shared.embeddings).is_withheld


@pytest.mark.slow
def test_a_model_whose_layers_have_other_names_is_resumed(tmp_path):
    """Keras numbers the layers of each process."""

    def unnamed(setup):
        ids = keras.Input([3], dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 4)(ids))
        setup.model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
        setup.model.compile(optimizer_of(), loss="mse")
        return setup

    unnamed(Setup(tmp_path)).fit(epochs=1)
    again = unnamed(Setup(tmp_path))
    again.model.prepare((IDS[:1], LABELS[:1]))
    assert again.checkpoint.resume(again.model).step == 5


def test_a_directory_is_one_process_own(tmp_path):
    setup = Setup(tmp_path)
    setup.checkpoint.resume(setup.model)
    script = "import sys, tfdp_rec.core.ground.files as f; f.hold(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "Another process trains with" in other.stderr
