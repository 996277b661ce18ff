"""No way for weights to leave training leaves a row unsettled.

Noise is a pure function of (table, row, step) here, so the settled weights are those of eager DP-SGD, number for
number: a path is right if what it lets out are those, and wrong if a single row lacks a single step's noise.
"""

import contextlib
import gc
import os
import resource as usage

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.clipping import NotPrivate
from tfdp_rec.noise import KeyedNoise

ROWS = 30
RNG = np.random.default_rng(2)
IDS = RNG.integers(0, 6, [20, 2]).astype("int32")  # most rows are never read
LABELS = RNG.normal(size=[20, 1]).astype("float32")
EVERY_ID = np.arange(ROWS, dtype="int32").reshape(15, 2)


def model_of(kind=tfdp_rec.LazyDPSGD, eager=True, **options):
    keras.utils.set_random_seed(0)
    options = {"aggregate_noise": False, **options} if kind is tfdp_rec.LazyDPSGD else options
    ids = keras.Input([2], dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 3, name="items")(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
    optimizer = kind(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4, noise=KeyedNoise(1), **options)
    model.compile(optimizer, loss="mse", run_eagerly=eager)
    return model


def batches():
    return tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(4)


@pytest.fixture(scope="module")
def eager_tables():
    """The table after each step of eager DP-SGD."""
    model, tables = model_of(tfdp_rec.DPSGD), []
    for x, y in batches():
        model.train_on_batch(x, y)
        tables.append(np.array(model.layers[1].embeddings))
    return tables


def assert_settled(table, expected):
    np.testing.assert_allclose(np.asarray(table), expected, rtol=1e-5, atol=1e-6)


def in_training(steps=3):
    """A model in the middle of a hand-written loop, with rows that owe noise."""
    model = model_of()
    for x, y in batches().take(steps):
        model.train_on_batch(x, y)
    assert not model.optimizer.releasable
    return model


def raw(model):
    """The table as it stands, by a read that nothing guards."""
    return tf.identity(model.layers[1].embeddings._value).numpy()


def loaded_table(path):
    return keras.models.load_model(path).layers[1].embeddings


# Every path, each given (model, folder), returns a table that left training, or None if only numbers did.


def _save(model, folder):
    model.save(folder / "m.keras")
    return loaded_table(folder / "m.keras")


def _save_model(model, folder):
    keras.saving.save_model(model, folder / "m.keras")
    return loaded_table(folder / "m.keras")


def _save_weights(model, folder):
    model.save_weights(folder / "m.weights.h5")
    other = model_of()
    other.load_weights(folder / "m.weights.h5")
    return other.layers[1].embeddings


def _checkpoint(model, folder):
    path = tf.train.Checkpoint(model=model).save(str(folder / "ckpt"))
    names = [name for name, shape in tf.train.list_variables(path) if shape == [ROWS, 3]]
    return tf.train.load_variable(path, names[0])


def _saved_model(model, folder):
    tf.saved_model.save(model, str(folder / "sm"))
    path = str(folder / "sm/variables/variables")
    names = [name for name, shape in tf.train.list_variables(path) if shape == [ROWS, 3]]
    return tf.train.load_variable(path, names[0])


def _export(model, folder):
    model.export(str(folder / "servable"), verbose=False)
    path = str(folder / "servable/variables/variables")
    names = [name for name, shape in tf.train.list_variables(path) if shape == [ROWS, 3]]
    return tf.train.load_variable(path, names[0])


def _own_variables(model, folder):
    model.optimizer.save_own_variables({})


def _layer_file(model, folder):
    store = {}
    model.layers[1].save_own_variables(store)
    return np.array(store["0"])  # as a file does


def _part_saved(model, folder):
    part = keras.Sequential([model.layers[1]])
    part.build([None, 2])
    part.save_weights(folder / "part.weights.h5")
    other = keras.Sequential([keras.layers.Embedding(ROWS, 3)])
    other.build([None, 2])
    other.load_weights(folder / "part.weights.h5")
    return other.layers[0].embeddings


PATHS = {
    "evaluate": lambda m, f: m.evaluate(IDS, LABELS, verbose=0) and None,
    "predict": lambda m, f: m.predict(EVERY_ID, verbose=0)[:0].sum() or None,
    "predict_on_batch": lambda m, f: m.predict_on_batch(EVERY_ID)[:0].sum() or None,
    "test_on_batch": lambda m, f: m.test_on_batch(IDS, LABELS) and None,
    "call": lambda m, f: m(EVERY_ID) is None,
    "get_weights": lambda m, f: m.get_weights()[0],
    "save": _save,
    "keras.saving.save_model": _save_model,
    "save_weights": _save_weights,
    "export": _export,
    "Checkpoint": _checkpoint,
    "saved_model.save": _saved_model,
    "optimizer.save_own_variables": _own_variables,
    "state tree": lambda m, f: m.get_state_tree() and None,
    "compile": lambda m, f: m.compile("sgd", loss="mse"),
    "layer.get_weights": lambda m, f: m.layers[1].get_weights()[0],
    "layer.save_own_variables": _layer_file,
    "a part saved": _part_saved,
    "a layer called": lambda m, f: m.layers[1](np.arange(ROWS)),
    "variable.numpy": lambda m, f: m.layers[1].embeddings.numpy(),
    "np.array(variable)": lambda m, f: np.array(m.layers[1].embeddings),
    "variable to tensor": lambda m, f: tf.convert_to_tensor(m.layers[1].embeddings),
}


@pytest.mark.parametrize("path", PATHS)
def test_path_settles(path, tmp_path, eager_tables):
    model = in_training()
    optimizer, let_out = model.optimizer, PATHS[path](model, tmp_path)
    assert optimizer.releasable
    assert_settled(raw(model), eager_tables[2])
    if isinstance(let_out, (np.ndarray, tf.Tensor, keras.Variable)) or hasattr(let_out, "__array__"):
        assert_settled(let_out, eager_tables[2])


def test_second_checkpoint_settles_again(tmp_path, eager_tables):
    model = in_training(2)
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.save(str(tmp_path / "ckpt"))
    model.train_on_batch(IDS[8:12], LABELS[8:12])
    path = checkpoint.save(str(tmp_path / "ckpt"))
    names = [name for name, shape in tf.train.list_variables(path) if shape == [ROWS, 3]]
    assert_settled(tf.train.load_variable(path, names[0]), eager_tables[2])


def test_tensorflow_checkpoint_restores_a_settled_model(tmp_path):
    model = in_training()
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    released = model.get_weights()
    model.train_on_batch(IDS[:4], LABELS[:4])
    tf.train.Checkpoint(model=model).restore(path)
    assert int(model.optimizer.iterations) == 3
    model.optimizer.ledger.restart(3)
    for one, other in zip(model.get_weights(), released, strict=True):
        np.testing.assert_array_equal(one, other)


# What ends a fit.


class At(keras.callbacks.Callback):
    """Does something after a step of fit, and looks at the table as it really is."""

    def __init__(self, step, act):
        super().__init__()
        self.step, self.act = step, act

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step:
            self.act(self.model)


def raising(error):
    def act(model):
        assert not model.optimizer.releasable  # there is something to settle
        raise error

    return act


@pytest.mark.parametrize("error", [RuntimeError("a callback's"), KeyboardInterrupt(), StopIteration(), SystemExit()])
def test_whatever_ends_fit_it_settles(error, eager_tables):
    model = model_of()
    quietly = contextlib.nullcontext()  # Keras takes StopIteration for the end of the epoch
    with quietly if isinstance(error, StopIteration) else pytest.raises(type(error)):
        model.fit(batches(), verbose=0, callbacks=[At(2, raising(error))])
    assert model.optimizer.releasable
    assert_settled(raw(model), eager_tables[2])


def test_data_that_fails_in_the_middle(eager_tables):
    def data():
        for start in (0, 4, 8):
            yield IDS[start : start + 4], LABELS[start : start + 4]
        raise OSError("disk gone")

    signature = (tf.TensorSpec([None, 2], tf.int32), tf.TensorSpec([None, 1], tf.float32))
    model = model_of(eager=False)
    with pytest.raises(tf.errors.OpError):
        model.fit(tf.data.Dataset.from_generator(data, output_signature=signature), verbose=0)
    done = int(model.optimizer.iterations)
    assert model.optimizer.releasable and done >= 1
    assert_settled(raw(model), eager_tables[done - 1])


@pytest.mark.parametrize("eager", [True, False])
def test_a_batch_that_fails_in_the_middle(eager, eager_tables):
    """An id outside the table stops a step half-way: it may add noise, and must not lose any."""
    bad = IDS.copy()
    bad[13] = ROWS + 5
    model = model_of(eager=eager)
    data = tf.data.Dataset.from_tensor_slices((bad, LABELS)).batch(4)
    with pytest.raises(Exception, match="(?i)indices|not in"):
        model.fit(data, verbose=0)
    assert model.optimizer.releasable and int(model.optimizer.iterations) == 3
    if int(model.optimizer.ledger.clock) == 3:
        assert_settled(raw(model), eager_tables[2])


def test_a_step_cut_short_between_any_two_writes_loses_no_noise(monkeypatch):
    """Stop at every write in turn: rows have the noise of each step whose gradient may have come in."""
    from tfdp_rec.optimizers import tables
    from tfdp_rec.optimizers.lazy import marks, pending

    true_scatter, cut, interrupted = tables.scatter, 0, True
    while interrupted:
        cut += 1
        model, left = in_training(1), [cut]
        before = np.array(model.layers[1].embeddings)

        def stops(*args, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return true_scatter(*args)

        for module in (tables, marks, pending):
            monkeypatch.setattr(module, "scatter", stops)
        try:
            for ids in ([[7, 8]], [[20, 21]]):  # 20 and 21 owe a step's noise when they are read
                model.train_on_batch(np.array(ids), np.ones([1, 1]))
            interrupted = False
        except KeyboardInterrupt:
            pass
        monkeypatch.undo()
        model.settle()
        moved = np.any(raw(model) != before, axis=1)
        clock = int(model.optimizer.ledger.clock)
        assert clock >= int(model.optimizer.iterations)
        assert moved.all() if clock > 1 else not moved.any()
    assert cut > 5


def test_steps_count_when_keras_saves_in_fit(tmp_path, eager_tables):
    """Keras' own ModelCheckpoint and BackupAndRestore, every step."""
    model = model_of()
    files = str(tmp_path / "step-{batch}.keras")
    saver = keras.callbacks.ModelCheckpoint(files, save_freq=1)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=1, delete_checkpoint=False)
    model.fit(batches(), verbose=0, callbacks=[saver, backup])
    found = sorted(os.listdir(tmp_path))
    assert len(found) == 6
    for step in range(5):
        name = next(f for f in found if f in (f"step-{step}.keras", f"step-{step + 1}.keras"))
        number = int(keras.models.load_model(tmp_path / name).optimizer.iterations)
        assert_settled(loaded_table(tmp_path / name), eager_tables[number - 1])
    other = model_of()
    other.load_weights(tmp_path / "backup/latest.weights.h5")
    assert_settled(other.layers[1].embeddings, eager_tables[4])


def test_backup_and_restore_goes_on(tmp_path, eager_tables):
    def fit(model, *more):
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        model.fit(IDS[:8], LABELS[:8], batch_size=4, shuffle=False, epochs=2, verbose=0, callbacks=[backup, *more])

    class DieInSecondEpoch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model_of(), DieInSecondEpoch())
    model = model_of()
    fit(model)
    assert int(model.optimizer.iterations) == 4 and model.optimizer.releasable


def test_callbacks_see_settled_weights_at_the_end_of_an_epoch(eager_tables):
    """Also by ways that no hook sees, such as a compiled function of a part of the model."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(raw(self.model))

    model_of().fit(batches(), verbose=0, callbacks=[Look()])
    assert_settled(seen[0], eager_tables[4])


def test_callbacks_that_read_a_layer_in_mid_epoch_settle(eager_tables):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(self.model.layers[1].get_weights()[0])

    model_of().fit(batches().take(3), verbose=0, callbacks=[Look()])
    for found, expected in zip(seen, eager_tables[:3], strict=True):
        assert_settled(found, expected)


def test_validation_in_fit_is_on_settled_weights(eager_tables):
    model, seen = model_of(), []
    test_step = model.test_step
    model.test_step = lambda data: (seen.append(raw(model)), test_step(data))[1]
    model.fit(batches(), validation_data=(IDS[:4], LABELS[:4]), verbose=0)
    assert len(seen) == 1
    assert_settled(seen[0], eager_tables[4])


def test_a_list_of_callbacks_is_asked_for():
    model = model_of()
    with pytest.raises(TypeError, match="list"):
        model.fit(batches(), callbacks=keras.callbacks.CallbackList([], model=model))


# Files are whole or not there.


def test_an_interrupted_save_leaves_the_older_file(tmp_path, monkeypatch):
    model, path = in_training(1), tmp_path / "m.keras"
    model.save(path)
    before = path.read_bytes()

    def half(self, filepath, *args, **kwargs):
        with open(filepath, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(keras.Model, "save", half)
    with pytest.raises(KeyboardInterrupt):
        model.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.keras"]


def test_existing_files_and_folders_are_replaced(tmp_path):
    model = in_training(1)
    for _ in range(2):
        model.save(tmp_path / "m.keras")
        model.save_weights(tmp_path / "m.weights.h5")
        model.export(str(tmp_path / "servable"), verbose=False)
    assert sorted(os.listdir(tmp_path)) == ["m.keras", "m.weights.h5", "servable"]
    assert tf.saved_model.load(str(tmp_path / "servable")).serve(EVERY_ID).shape == [15, 1]


# Memory.


def test_settling_needs_no_memory_that_grows_with_the_table(monkeypatch):
    """Sixteen times the rows, the same peak beyond the table itself."""
    monkeypatch.setattr("tfdp_rec.optimizers.tables.CHUNK_VALUES", 1 << 18)
    peaks = []
    for rows in (1 << 17, 1 << 19):  # 32 and 128 MB of table
        table = keras.Variable(np.zeros([rows, 64], "float32"), name="table")
        optimizer = tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4.0)
        optimizer.build([table], {table.path: None})
        nothing = tfdp_rec.clipping.ClippedSum({}, tf.ones([1]), tf.constant(1.0), tf.ones([1]))
        optimizer.apply(nothing)
        optimizer.settle()  # traces, and makes what stays
        optimizer.apply(nothing)
        gc.collect()
        before = usage.getrusage(usage.RUSAGE_SELF).ru_maxrss
        optimizer.settle()
        peaks.append(usage.getrusage(usage.RUSAGE_SELF).ru_maxrss - before)
        assert np.all(table._value[:5].numpy() != 0) and np.all(table._value[-5:].numpy() != 0)
        del table, optimizer
    assert peaks[1] < 16_000  # kilobytes; the table has 131,072


# Refusals.


def test_several_replicas_are_refused(monkeypatch):
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(type(strategy), "num_replicas_in_sync", property(lambda self: 2))
    with pytest.raises(NotPrivate, match="replicas"):
        model_of()


def test_settling_inside_a_graph_is_refused():
    model = in_training()

    @tf.function
    def settles():
        model.optimizer.settle()
        return 0

    with pytest.raises(RuntimeError, match="eager"):
        settles()
