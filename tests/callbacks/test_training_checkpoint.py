"""Interrupted and resumed is uninterrupted; ε counts each step once; the file is no model to release."""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf

import tfdp_rec
from tfdp_rec.callbacks import TrainingCheckpoint
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import held_rows
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.privacy import PoissonSampling
from tfdp_rec.training import release, training_checkpoint

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


def model_of(rows=ROWS, kind=tfdp_rec.LazyDPSGD, noise=KEYED, **options):
    seeding.seed(0)
    ids = keras.Input([3], dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(rows, 4, name="items")(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer_of(kind, noise=noise, **options), loss="mse", run_eagerly=True)
    return model


class Setup:
    """What a training script makes anew in every process."""

    def __init__(self, directory, every=3, **options):
        self.sampling = PoissonSampling(UNITS, 6)
        self.model = model_of(**options)
        event = self.model.optimizer.dp_event()
        self.accountant = tfdp_rec.privacy.Accountant(event, self.sampling, delta=1e-3, accountant="rdp")
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

    def before_release(self):
        pass


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    setup = Setup(tmp_path_factory.mktemp("whole"))
    weights = setup.fit()
    assert setup.accountant.steps == 15
    return weights, setup.accountant.ledger()


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_killed_and_resumed(tmp_path, uninterrupted):
    for stop in (2, 5, 5):  # before the first checkpoint; at the end of an epoch, from 0; in the middle of one, from 3
        setup = Setup(tmp_path)
        setup.checkpoint.__class__ = NoLastWords
        with pytest.raises(KeyboardInterrupt):
            setup.fit([Stop(stop)])
    setup = Setup(tmp_path)
    assert_same(setup.fit(), uninterrupted[0])
    assert setup.accountant.steps == int(setup.model.optimizer.iterations) == 15
    assert setup.accountant.ledger() == uninterrupted[1]


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory):
    directory = tmp_path_factory.mktemp("epoch")
    setup = Setup(directory)
    return directory, setup.fit(epochs=1)


@pytest.fixture
def finished(one_epoch, tmp_path):
    """A directory with the checkpoint of one epoch."""
    return shutil.copytree(one_epoch[0], tmp_path / "finished")


def test_interrupted_fit_leaves_a_checkpoint_of_where_it_was(tmp_path, uninterrupted):
    setup = Setup(tmp_path, every=1000)
    with pytest.raises(KeyboardInterrupt):
        setup.fit([Stop(8)])
    assert setup.model.optimizer.releasable
    setup = Setup(tmp_path)
    assert_same(setup.fit(), uninterrupted[0])
    assert setup.accountant.steps == 15


def test_a_step_cut_short_counts_and_one_only_planned_does_not(tmp_path):
    cut, planned = Setup(tmp_path / "cut"), Setup(tmp_path / "planned")
    apply = cut.model.optimizer.apply

    def fails_on_the_fifth(*args, **kwargs):
        apply(*args, **kwargs)
        if int(cut.model.optimizer.iterations) == 5:
            cut.model.optimizer.iterations.assign(4)  # as if the error had come just before the end of the step
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    cut.model.optimizer.apply = fails_on_the_fifth
    with pytest.raises(tf.errors.ResourceExhaustedError):
        cut.fit()
    with pytest.raises(KeyboardInterrupt):
        planned.fit([Stop(5, when="begin")])
    for setup, counted in ((cut, 5), (planned, 4)):
        again = Setup(setup.checkpoint.directory)
        again.checkpoint.resume(again.model)
        assert int(again.model.optimizer.iterations) == 4 and again.accountant.steps == counted


def test_steps_planned_when_the_data_ran_out_are_not_counted(tmp_path):
    """Six batches, four steps an execution: eight are planned, and six are made."""
    setup = Setup(tmp_path)
    setup.model.compile(setup.model.optimizer, loss="mse", run_eagerly=True, steps_per_execution=4)
    data = tf.data.Dataset.from_tensor_slices((IDS[:36], LABELS[:36])).batch(6)
    setup.model.fit(data, verbose=0, callbacks=[setup.checkpoint])
    assert int(setup.model.optimizer.iterations) == 6
    again = Setup(tmp_path)
    again.checkpoint.resume(again.model)
    assert again.accountant.carried.steps == 6


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
    assert again.accountant.steps == 5
    for one, other in zip(again.model.get_weights(), released.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_release_by_another_model_on_the_table_is_in_a_checkpoint_first(tmp_path):
    """It settled the table, and told its own listeners alone."""
    first, checkpoint = model_of(noise=None), TrainingCheckpoint(tmp_path)
    items = first.layers[1]
    ids = keras.Input([3], dtype="int32")
    other = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(items(ids))))
    other.compile(optimizer_of(), loss="mse")
    other.train_on_batch(IDS[:6], LABELS[:6])
    found = []

    class Look(keras.callbacks.Callback):
        keeps_off_weights = True

        def on_train_batch_end(self, batch, logs=None):
            other.predict(IDS, verbose=0)
            found.append(checkpoint.latest())

    batches = tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(6).take(2)
    first.fit(batches, verbose=0, callbacks=[checkpoint, Look()])
    assert [path and path.rpartition("-step-")[2][0] for path in found] == ["1", "2"]


def test_saving_settles_nothing(tmp_path):
    setup = Setup(tmp_path, every=2)
    seen = []

    class Look(keras.callbacks.Callback):
        keeps_off_weights = True

        def on_train_batch_end(self, batch, logs=None):
            seen.append((len(setup.checkpoint._paths()), self.model.optimizer.releasable))

    setup.fit([Look()], epochs=1)
    assert [paths for paths, _ in seen] == [0, 1, 1, 1, 1]
    assert not any(releasable for _, releasable in seen)


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
        model_of().fit(IDS, LABELS, verbose=0, callbacks=[TrainingCheckpoint(finished)])


def test_an_accountant_follows_without_a_budget(tmp_path):
    setup = Setup(tmp_path)
    setup.model.fit(IDS, LABELS, batch_size=6, verbose=0, callbacks=[setup.checkpoint])
    assert setup.accountant.steps == 10
    with pytest.raises(tfdp_rec.privacy.Unaccounted, match="no sampling drew"):
        setup.accountant.epsilon()


def test_accountant_and_checkpoint_go_together(finished):
    with pytest.raises(ValueError, match="accountant"):
        TrainingCheckpoint(finished).resume(model_of())


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
        assert "not a model to release" in json.loads(archive.read("training_checkpoint.json"))["format"]
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
    assert setup.checkpoint.latest() == before and sorted(os.listdir(finished))[1:] == ["in-use"]
    (finished / f".dead.000009-step-9{os.path.splitext(before)[1]}").write_bytes(b"half")  # a killed process's
    monkeypatch.undo()
    again = Setup(finished)
    assert again.checkpoint.resume(again.model).step == 5
    assert sorted(os.listdir(finished))[1:] == ["in-use"]


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


# What leaves by ways that no hook sees.


class ReadsAKernel(keras.callbacks.Callback):
    """Reads dense weights by themselves, which settles nothing."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(np.array(self.model.layers[-1].kernel))


class ReadsAnEpochsKernel(ReadsAKernel):
    on_train_batch_end = keras.callbacks.Callback.on_train_batch_end

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(np.array(self.model.layers[-1].kernel))


def acts_by_function():
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)


@pytest.mark.parametrize("kind", [tfdp_rec.LazyDPSGD, tfdp_rec.DPSGD])
@pytest.mark.parametrize("reader", [ReadsAKernel, acts_by_function])
def test_a_callback_that_acts_within_epochs_is_refused_or_says_that_it_keeps_off_weights(tmp_path, reader, kind):
    setup = Setup(tmp_path, kind=kind)
    with pytest.raises(NotPrivate, match="keeps_off_weights"):
        setup.fit([reader()])
    assert int(setup.model.optimizer.iterations) == 0
    kept = reader()
    kept.keeps_off_weights = True
    setup.fit([kept], epochs=1)


@pytest.mark.parametrize("kind", [tfdp_rec.LazyDPSGD, tfdp_rec.DPSGD])
def test_what_a_callback_reads_between_epochs_is_in_a_checkpoint_first(tmp_path, kind):
    reader, setup = ReadsAnEpochsKernel(), Setup(tmp_path, every=1000, kind=kind)
    setup.checkpoint.on_epoch_end = lambda epoch, logs=None: None  # it would write one after the reader, too late
    setup.fit([reader], epochs=1)
    again = Setup(tmp_path, kind=kind)
    assert again.checkpoint.resume(again.model).step == 5
    np.testing.assert_array_equal(again.model.layers[-1].kernel, reader.found[0])


def test_a_fit_without_the_callback_is_in_a_checkpoint_when_it_ends(finished):
    setup = Setup(finished)
    setup.fit(epochs=1)  # made already
    more = {"epochs": 1, "steps_per_epoch": 3, "verbose": 0}
    setup.model.fit(setup.sampling.batches(lambda i: (IDS[i], LABELS[i])), **more)
    again = Setup(finished)
    assert again.checkpoint.resume(again.model).step == 8 == again.accountant.steps
    with pytest.raises(NotPrivate, match="keeps_off_weights"):
        setup.model.fit(IDS, LABELS, batch_size=6, verbose=0, callbacks=[ReadsAKernel()])


def test_steps_by_hand_are_refused_while_a_checkpoint_may_be_resumed(finished):
    setup = Setup(finished)
    setup.checkpoint.resume(setup.model)
    with pytest.raises(NotPrivate, match="fit"):
        setup.model.train_on_batch(IDS[:6], LABELS[:6])
    with pytest.raises(NotPrivate, match="fit"):
        setup.model.train_step((IDS[:6], LABELS[:6]))
    os.remove(setup.checkpoint.latest())  # the training is done
    setup.model.train_on_batch(IDS[:6], LABELS[:6])
    setup.model.get_weights()
    assert not setup.checkpoint.latest()


def test_a_later_checkpoint_of_a_directory_replaces_the_one_before(finished):
    setup = Setup(finished)
    setup.fit(epochs=1)
    later = TrainingCheckpoint(finished, accountant=setup.accountant)
    later.resume(setup.model)
    assert setup.model.release.listeners == [later]


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
    return again.accountant.carried.steps


KINDS = [tfdp_rec.LazyDPSGD, tfdp_rec.DPSGD]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_another_optimizer_are_in_a_checkpoint_though_their_number_is_the_same(tmp_path, kind):
    """Ten steps left, and five were told."""
    setup = started(tmp_path, kind=kind)
    optimizer = optimizer_of(kind)
    setup.model.compile(optimizer, loss="mse", run_eagerly=True)
    setup.model.get_weights()  # no step was made since
    trained(setup)
    assert int(optimizer.iterations) == 5 and told(tmp_path, kind) == 10


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
    again = model_of()
    TrainingCheckpoint(tmp_path, accountant=setup.accountant).resume(again)
    assert again.privacy_history.snapshot().steps == 10


def test_what_another_model_owes_to_the_table_is_paid_before_a_checkpoint(tmp_path):
    """It was in no file: rows that its batch had not read came back without its noise."""
    model, checkpoint = model_of(noise=None, noise_multiplier=0.01), TrainingCheckpoint(tmp_path, every=1)
    model.fit(IDS[6:12], LABELS[6:12], batch_size=6, verbose=0, callbacks=[checkpoint])
    other = another_on(model.layers[1], noise_multiplier=50.0)
    other.prepare((IDS[:6], LABELS[:6]))
    with other.release.fitting():  # without the settling at its end
        for _ in range(3):
            other.optimizer.apply(clipped_sum(other, (IDS[:6], LABELS[:6]), 1.0))
    table = model.layers[1].embeddings
    before = held_rows(table).numpy().copy()
    checkpoint.save()
    again = model_of(noise_multiplier=0.01)
    TrainingCheckpoint(tmp_path).resume(again)
    unread = np.setdiff1d(np.arange(ROWS), IDS[:12])
    assert len(unread) and np.all(np.any(again.layers[1].embeddings.numpy()[unread] != before[unread], axis=1))


def test_a_refused_resumption_leaves_nothing_of_the_checkpoint_in_the_model(killed_while_owing):
    """Its weights stood there, without a listener: each look drew the pending noise anew."""
    again = Setup(killed_while_owing, noise=None)
    before = again.model.get_weights()
    checkpoint = TrainingCheckpoint(killed_while_owing, accountant=accountant_of(again.model, UNITS + 1))
    with pytest.raises(ValueError, match="another sampling"):
        checkpoint.resume(again.model)
    for one, other in zip(again.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def accountant_of(model, units):
    return tfdp_rec.privacy.Accountant(model.optimizer.dp_event(), PoissonSampling(units, 6), 1e-3, accountant="rdp")


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


def not_written(setup, monkeypatch, steps=4):
    """Steps of a fit whose last checkpoint cannot be written, so that the file is of five steps."""
    monkeypatch.setattr(training_checkpoint, "_chunks", lambda variable: iter([1 / 0]))
    with pytest.raises(ZeroDivisionError):
        trained(setup, steps_per_epoch=steps)


def weights_by_their_names(setup):
    return [weight.numpy() for weight in setup.model.layers[-1].weights]


def weights_by_a_part(setup):
    return setup.model.layers[-1](np.eye(12, dtype="float32")).numpy()


@pytest.mark.parametrize("read", [weights_by_their_names, weights_by_a_part])
@pytest.mark.parametrize("kind", KINDS)
def test_dense_weights_that_are_read_after_a_failed_write_are_written_first(tmp_path, kind, read, monkeypatch):
    """Nine steps were read, and five told."""
    setup = started(tmp_path, kind=kind)
    not_written(setup, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        read(setup)
    monkeypatch.undo()
    found = read(setup)
    assert told(tmp_path, kind) == 9
    again = Setup(tmp_path, kind=kind)
    again.checkpoint.resume(again.model)
    for one, other in zip(read(again), found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_function_finds_no_weights_after_a_failed_write(tmp_path, kind, monkeypatch):
    """One that was traced before there was a checkpoint calls no listener."""
    setup = Setup(tmp_path, kind=kind, noise=None)
    setup.model.prepare((IDS[:6], LABELS[:6]))
    part, one = tf.function(setup.model.layers[-1]), tf.eye(12)
    optimizer = setup.model.optimizer
    velocities = [dense.velocity for dense in optimizer.dense.values()]
    if kind is tfdp_rec.DPSGD:  # a lazy table says itself that its rows owe noise
        velocities += [table.state for table in optimizer.tables.values()]
    velocity = tf.function(lambda: [each + 0.0 for each in velocities])
    before = part(one).numpy()
    setup.fit(epochs=1)
    assert np.all(part(one) != before) and all(np.all(each != 0) for each in velocity())
    not_written(setup, monkeypatch)
    with pytest.raises(tf.errors.InvalidArgumentError):
        part(one)
    assert not any(np.size(each) for each in velocity())
    trained_before = int(setup.model.optimizer.iterations)
    with pytest.raises(ZeroDivisionError):  # steps find their weights
        trained(setup)
    assert int(setup.model.optimizer.iterations) == trained_before + 5
    monkeypatch.undo()
    setup.model.save(tmp_path / "left.keras")
    assert np.all(np.isfinite(part(one))) and [tuple(v.shape) for v in velocity()] == [v.shape for v in velocities]
    assert told(tmp_path, kind) == 14 == setup.accountant.steps


@pytest.mark.parametrize("when", ["resumed", "not written"])
def test_an_interruption_with_no_step_leaves_weights_out_of_reach_until_they_are_written(tmp_path, when, monkeypatch):
    setup = started(tmp_path, kind=tfdp_rec.DPSGD)
    if when == "resumed":
        setup = Setup(tmp_path, kind=tfdp_rec.DPSGD, noise=None)
    part = tf.function(lambda: setup.model.layers[-1].kernel + 0.0)
    assert np.size(part()) == 12
    monkeypatch.setattr(training_checkpoint, "_chunks", lambda variable: iter([1 / 0]))
    monkeypatch.setattr(training_checkpoint, "_fill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        setup.checkpoint.resume(setup.model) if when == "resumed" else trained(setup)
    assert np.size(part()) == 0
    monkeypatch.undo()
    if when == "resumed":
        setup.checkpoint.resume(setup.model)
    else:
        setup.checkpoint.save()
    assert np.size(part()) == 12
    assert told(tmp_path, tfdp_rec.DPSGD) == (5 if when == "resumed" else 10)


def own_train_step(setup):
    step = tf.function(setup.model.train_step)
    return lambda: step((tf.constant(IDS[:6]), tf.constant(LABELS[:6])))


def own_apply(setup):
    model = setup.model

    @tf.function
    def step():
        data = (tf.constant(IDS[:6]), tf.constant(LABELS[:6]))
        model.optimizer.apply(clipped_sum(model, data, 1.0))

    return step


@pytest.mark.parametrize("own", [own_train_step, own_apply])
def test_a_step_that_was_compiled_before_the_checkpoint_is_refused_outside_of_fit(tmp_path, own):
    """Ten steps were read, and six told."""
    setup = Setup(tmp_path, kind=tfdp_rec.DPSGD)
    setup.model.prepare((IDS[:6], LABELS[:6]))
    step = own(setup)
    step()
    setup.fit(epochs=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ensured in fit alone"):
        step()
    assert int(setup.model.optimizer.iterations) == 6 == told(tmp_path, tfdp_rec.DPSGD)
    setup.model.fit(IDS, LABELS, batch_size=6, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ensured in fit alone"):
        step()
    shutil.rmtree(tmp_path)  # the training is done
    setup.model.settle()
    step()


def on_the_dense_layer_of(setup, kind):
    """Another model, that has no table in common."""
    inputs = keras.Input([12])
    model = tfdp_rec.PrivateModel(inputs, setup.model.layers[-1](inputs))
    model.compile(optimizer=optimizer_of(kind), loss="mse")
    return model, np.ones([12, 12], "float32"), np.ones([12, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_another_model_on_the_dense_layers_are_in_a_checkpoint_when_its_fit_ends(tmp_path, kind, monkeypatch):
    """Its predictions left with twelve steps, and five were told."""
    setup = started(tmp_path, kind=kind)
    other, x, y = on_the_dense_layer_of(setup, kind)
    with pytest.raises(NotPrivate, match="train with fit"):
        other.train_on_batch(x[:6], y[:6])
    with pytest.raises(NotPrivate, match="keeps_off_weights"):
        other.fit(x, y, batch_size=6, verbose=0, callbacks=[acts_by_function()])
    other.fit(x, y, batch_size=6, verbose=0)
    assert told(tmp_path, kind) == 7
    monkeypatch.setattr(training_checkpoint, "_chunks", lambda variable: iter([1 / 0]))
    for _ in range(2):  # the reason is told, and not what a function of no weights says
        with pytest.raises(ZeroDivisionError):
            other.fit(x, y, batch_size=6, verbose=0)
        with pytest.raises(ZeroDivisionError):
            other.predict(x, verbose=0)
    monkeypatch.undo()
    assert np.all(np.isfinite(other.predict(x, verbose=0)))
    assert told(tmp_path, kind) == 11


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_predict_find_the_weights(tmp_path, kind):
    """Each release moved them out of reach and back, and two of them lost the weights."""
    setup = Setup(tmp_path, kind=kind)
    setup.model.compile(setup.model.optimizer, loss="mse")
    setup.fit(epochs=1)
    expected, failed = setup.model.predict_on_batch(IDS[:6]), []

    def predict():
        for _ in range(30):
            try:
                np.testing.assert_allclose(setup.model.predict_on_batch(IDS[:6]), expected, rtol=1e-5)
            except Exception as problem:
                failed.append(problem)

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class PredictsElsewhere(keras.callbacks.Callback):
    """In another thread than the one that trains."""

    def on_epoch_end(self, epoch, logs=None):
        def predict():
            with pytest.raises(RuntimeError, match="Another thread trains the model"):
                self.model.predict_on_batch(np.ones([2, 4], "float32"))
            self.refused = True

        thread = threading.Thread(target=predict)
        thread.start()
        thread.join()


def test_another_thread_does_not_write_a_checkpoint_in_the_midst_of_a_fit(tmp_path):
    inputs = keras.Input([4])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))  # without a table, which would refuse it
    model.compile(optimizer_of(tfdp_rec.DPSGD), loss="mse")
    model.predict_on_batch(np.ones([2, 4], "float32"))  # compiled now: later ones read no weight by its name
    elsewhere = PredictsElsewhere()
    callbacks = [TrainingCheckpoint(tmp_path), elsewhere]
    model.fit(np.ones([12, 4], "float32"), np.ones([12, 1]), batch_size=6, verbose=0, callbacks=callbacks)
    assert elsewhere.refused


def test_a_read_of_weights_that_are_written_moves_nothing(tmp_path, monkeypatch):
    """Each eager read moved all of them: seconds for get_weights."""
    setup = started(tmp_path, kind=tfdp_rec.DPSGD)
    monkeypatch.setattr(release.WithheldRows, "withhold", lambda self: 1 / 0)
    monkeypatch.setattr(release.WithheldRows, "publish", lambda self: 1 / 0)
    assert len(setup.model.get_weights()) == 3 and len(setup.model(IDS[:6])) == 6


def test_the_step_of_a_fit_is_refused_outside_of_it(tmp_path):
    """The check's own variable was set in the graph that was traced within the fit."""
    setup = Setup(tmp_path, kind=tfdp_rec.DPSGD)
    setup.model.compile(setup.model.optimizer, loss="mse")  # compiled steps
    given = []
    ahead = setup.model._ahead
    setup.model._ahead = lambda *args, **kwargs: given.append(ahead(*args, **kwargs)) or given[-1]
    setup.fit(epochs=1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ensured in fit alone"):
        setup.model.train_function(iter(given[0]))
    assert int(setup.model.optimizer.iterations) == 5 == told(tmp_path, tfdp_rec.DPSGD)


class EndsAtOnce(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise RuntimeError("ends at once")


def test_steps_by_hand_within_a_fit_are_refused(tmp_path):
    class Tunes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.train_on_batch(IDS[:6], LABELS[:6])

    with pytest.raises(NotPrivate, match="train with fit"):
        Setup(tmp_path).fit([Tunes()])


def test_a_hook_that_is_set_late_is_refused(tmp_path):
    class Late(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            self.on_train_batch_end = lambda batch, logs=None: None

    with pytest.raises(NotPrivate, match="keeps_off_weights"):
        Setup(tmp_path).fit([Late()])


class Reads(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return IDS[6 * number : 6 * number + 6], LABELS[6 * number : 6 * number + 6]

    def on_epoch_end(self):
        pass


def test_data_that_act_ahead_of_all_callbacks_are_refused(tmp_path):
    with pytest.raises(NotPrivate, match="Reads.on_epoch_end"):
        model_of().fit(Reads(), verbose=0, callbacks=[TrainingCheckpoint(tmp_path)])
    Reads.keeps_off_weights = True
    model_of().fit(Reads(), verbose=0, callbacks=[TrainingCheckpoint(tmp_path)])


def test_a_keras_callback_with_an_own_end_of_epoch_is_no_reader(tmp_path):
    class Saves(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)

    Setup(tmp_path / "training").fit([Saves(str(tmp_path / "m.keras"), save_freq=2)], epochs=1)
    assert (tmp_path / "m.keras").exists()


def test_another_working_directory_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup = started("here")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    trained(setup)
    assert told(tmp_path / "here") == 10


def test_a_directory_that_is_moved_is_no_training_that_is_done(tmp_path):
    setup = started(tmp_path / "one")
    os.rename(tmp_path / "one", tmp_path / "two")
    with pytest.raises(RuntimeError, match="was moved"):
        trained(setup)
    os.rename(tmp_path / "two", tmp_path / "one")
    setup.model.get_weights()
    assert told(tmp_path / "one") == 5


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


@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_epoch_does_not_swallow_the_end_that_another_callback_asks_for(killed_while_owing, first):
    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    setup = Setup(killed_while_owing, noise=None)
    assert setup.checkpoint.resume(setup.model).steps_in_epoch == 3
    both = [Ends(), setup.checkpoint] if first else [setup.checkpoint, Ends()]
    trained(setup, callbacks=both, epochs=3)
    assert setup.accountant.steps == 5


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


def test_a_model_compiled_for_something_else_is_released_as_it_was(tmp_path):
    """It ended in an AttributeError."""
    setup = started(tmp_path)
    before = setup.model.get_weights()
    for optimizer in ("sgd", optimizer_of(tfdp_rec.DPSGD)):
        setup.model.compile(optimizer, loss="mse")
        for one, other in zip(setup.model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)
    setup.model.compile("sgd", loss="mse")
    setup.model.fit(IDS, LABELS, verbose=0)
    with pytest.raises(RuntimeError, match="if its training is done"):
        setup.model.get_weights()


def test_a_model_whose_layers_have_other_names_is_resumed(tmp_path):
    """The marks were kept by the path of the table, which Keras numbers in each process."""

    def unnamed():
        ids = keras.Input([3], dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 4)(ids))
        model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
        model.compile(optimizer_of(), loss="mse")
        return model

    unnamed().fit(IDS, LABELS, batch_size=6, verbose=0, callbacks=[TrainingCheckpoint(tmp_path)])
    again = unnamed()
    again.prepare((IDS[:1], LABELS[:1]))
    assert TrainingCheckpoint(tmp_path).resume(again).step == 10


# A resumed model that is released.


def released_after_resuming(directory):
    again = Setup(directory, noise=None)  # entropy: noise drawn twice would differ
    assert again.checkpoint.resume(again.model).step == 3 and not again.model.optimizer.releasable
    return again.model.get_weights()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("killed")
    setup = Setup(directory, every=3, noise=None)
    setup.checkpoint.__class__ = NoLastWords
    with pytest.raises(KeyboardInterrupt):
        setup.fit([Stop(4)])
    return directory


@pytest.fixture
def killed_while_owing(killed, tmp_path):
    """A directory whose last checkpoint has rows that owe noise."""
    return shutil.copytree(killed, tmp_path / "killed")


def test_resumed_and_released_twice_is_one_release(killed_while_owing):
    """Each resumption drew the pending noise anew, so that k looks at a checkpoint averaged it away."""
    first = released_after_resuming(killed_while_owing)
    again = Setup(killed_while_owing, noise=None)
    assert again.checkpoint.resume(again.model).step == 3 and again.model.optimizer.releasable
    for one, other in zip(again.model.get_weights(), first, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("filled", [0, 1, 2, 3, 4, 5, 7])
def test_an_interrupted_resumption_tells_its_steps_and_lets_no_row_out_without_its_noise(
    killed_while_owing, filled, monkeypatch
):
    """The weights were the checkpoint's, of 0 steps, and the noise that they owed was forgotten."""
    whole, again = (Setup(killed_while_owing, noise=None) for _ in range(2))
    whole.checkpoint.resume(whole.model)
    fill, seen = training_checkpoint._fill, []

    def interrupted(*arguments):
        seen.append(fill(*arguments))
        if len(seen) > filled:
            raise KeyboardInterrupt

    monkeypatch.setattr(training_checkpoint, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        again.checkpoint.resume(again.model)
    assert again.model.privacy_history.snapshot().steps == 3
    table = again.model.layers[1].embeddings
    assert vars(table)["_value"].read_value().shape[0] == 0
    owing, before = whole.model.optimizer.row_marks.marks[table.path].numpy() < 3, held_rows(table).numpy()
    assert np.array_equal(before, held_rows(whole.model.layers[1].embeddings).numpy()) == (filled > 3)
    if filled > 3:  # clock, largest scale, totals and marks came first
        np.testing.assert_array_equal(np.any(looked_at(table) != before, axis=1), owing)


def looked_at(table):
    """The rows after a look at them, which is refused: each look at a checkpoint would draw its noise anew."""
    with pytest.raises(RuntimeError, match="resumption .* was interrupted"):
        table.numpy()
    assert vars(table)["_value"].read_value().shape[0] == 0
    return held_rows(table).numpy()


@pytest.mark.parametrize("filled", [0, 1, 2, 3])  # clock, largest scale, totals, marks
def test_a_resumption_over_a_model_that_owes_noise_forgets_none_of_it(killed_while_owing, filled, monkeypatch):
    """The checkpoint's marks stood beside the later weights, whose rows kept what they owed."""
    again = Setup(killed_while_owing, noise=None)
    again.checkpoint.resume(again.model)
    with again.model.release.fitting():  # without the settling at its end
        for _ in range(2):
            again.model.optimizer.apply(clipped_sum(again.model, (IDS[:6], LABELS[:6]), 1.0))
    table, marks = again.model.layers[1].embeddings, again.model.optimizer.row_marks
    owing, before = marks.marks[table.path].numpy() < 5, held_rows(table).numpy().copy()
    assert marks.clock.numpy() == 5 and 0 < np.sum(owing) < ROWS
    fill, seen = training_checkpoint._fill, []

    def interrupted(*arguments):
        seen.append(fill(*arguments))
        if len(seen) > filled:
            raise KeyboardInterrupt

    monkeypatch.setattr(training_checkpoint, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        again.checkpoint.resume(again.model)
    changed = np.any(looked_at(table) != before, axis=1)
    assert np.all(changed[owing])


@pytest.mark.parametrize("way", ["evaluate", "read", "settle"])
def test_every_way_out_of_a_resumed_model_is_in_a_checkpoint_first(killed_while_owing, way):
    again = Setup(killed_while_owing, noise=None)
    again.checkpoint.resume(again.model)
    if way == "evaluate":
        again.model.evaluate(IDS, LABELS, verbose=0)
    elif way == "read":
        again.model.layers[1].embeddings.numpy()
    else:
        again.model.settle()
    third = Setup(killed_while_owing, noise=None)
    third.checkpoint.resume(third.model)
    for one, other in zip(third.model.get_weights(), again.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert third.accountant.steps == again.accountant.steps == 3


def test_nothing_leaves_a_resumed_model_whose_checkpoint_cannot_be_written(killed_while_owing, monkeypatch):
    again = Setup(killed_while_owing, noise=None)
    again.checkpoint.resume(again.model)
    monkeypatch.setattr("tfdp_rec.training.training_checkpoint._chunks", lambda variable: iter([b"12", 1 / 0]))
    with pytest.raises(ZeroDivisionError):
        again.model.get_weights()
    monkeypatch.undo()
    third = Setup(killed_while_owing, noise=None)
    third.checkpoint.resume(third.model)
    assert not third.model.optimizer.releasable


def test_a_release_before_going_on_changes_nothing(killed_while_owing, tmp_path):
    """Position, counts and the settled state are kept; what follows is as it would have been."""
    released_after_resuming(killed_while_owing)
    setup = Setup(killed_while_owing, noise=None)
    setup.fit()
    assert setup.accountant.steps == int(setup.model.optimizer.iterations) == 15


def test_a_directory_is_one_process_own(tmp_path):
    setup = Setup(tmp_path)
    setup.checkpoint.resume(setup.model)
    script = "import sys, tfdp_rec.core.ground.files as f; f.hold(sys.argv[1])"
    other = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "Another process trains with" in other.stderr
