"""However a fit ends, and whatever callbacks do in it, nothing unsettled leaves."""

import contextlib
import gc
import os
import resource as usage

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import build_by_hand
from settling import IDS, LABELS, ROWS, assert_settled, batches, in_training, model_of, raw

import tfdp_rec
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.shared_graphs import SharedGraph

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


@pytest.mark.fast_cases("error2")
@pytest.mark.parametrize("error", [RuntimeError("a callback's"), KeyboardInterrupt(), StopIteration(), SystemExit()])
def test_whatever_ends_fit_it_settles(error, eager_tables):
    model = model_of()
    quietly = contextlib.nullcontext()  # Keras takes StopIteration for the end of the epoch
    with quietly if isinstance(error, StopIteration) else pytest.raises(type(error)):
        model.fit(batches(), verbose=0, callbacks=[At(2, raising(error))])
    assert model.optimizer.releasable
    assert_settled(raw(model), eager_tables[2])


@pytest.mark.slow
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


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("eager", [True, False])
def test_a_batch_that_fails_in_the_middle(eager, eager_tables):
    """An id outside the table stops a step half-way: it may add noise, and must not lose any."""
    bad = IDS.copy()
    bad[13] = ROWS + 5
    model = model_of(eager=eager)
    data = tf.data.Dataset.from_tensor_slices((bad, LABELS)).batch(4)
    with pytest.raises(Exception, match="ids outside its table"):
        model.fit(data, verbose=0)
    assert model.optimizer.releasable and int(model.optimizer.iterations) == 3
    if int(model.optimizer.debts.marks.clock) == 3:
        assert_settled(raw(model), eager_tables[2])


@pytest.mark.slow
def test_a_step_cut_short_between_any_two_writes_loses_no_noise(monkeypatch):
    """Stop at every write in turn: rows have the noise of each step whose gradient may have come in."""
    from tfdp_rec.core.mechanism import pending, tables

    model, true_scatter, cut, interrupted = in_training(1), tables.scatter, 0, True
    while interrupted:
        cut += 1
        model.settle()
        left, before = [cut], np.array(raw(model))
        start = int(model.optimizer.debts.marks.clock)

        def stops(*args, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return true_scatter(*args)

        for module in (tables, pending):
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
        clock = int(model.optimizer.debts.marks.clock)
        assert clock >= int(model.optimizer.iterations)
        assert moved.all() if clock > start else not moved.any()
    assert cut > 5


def test_a_payment_cut_short_between_any_two_writes_leaves_rows_owing(monkeypatch):
    """A row whose mark says that it has paid has its noise: the noise is written first."""
    from tfdp_rec.core.mechanism import pending, tables

    model, true_scatter, cut, interrupted = in_training(1), tables.scatter, 0, True
    while interrupted:
        cut += 1
        left = [cut]
        model.train_on_batch(IDS[:4], LABELS[:4])
        optimizer, ids = model.optimizer, tf.range(20, 24, dtype=tf.int64)
        (path,) = optimizer.tables
        before = np.array(raw(model))

        def stops(*args, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return true_scatter(*args)

        for module in (tables, pending):
            monkeypatch.setattr(module, "scatter", stops)
        try:
            optimizer.debts.settle_rows({path: ids}, optimizer.debts.marks.now())
            interrupted = False
        except KeyboardInterrupt:
            pass
        monkeypatch.undo()
        marks = optimizer.debts.marks
        paid = (marks.read_marks(marks.find_places({path: ids})) == marks.now()).numpy()
        moved = np.any(raw(model) != before, axis=1)[20:24]
        assert np.all(moved[paid]) and (interrupted or paid.all())
    assert cut > 2


@pytest.mark.slow
def test_steps_count_when_keras_saves_in_fit(tmp_path, eager_tables):
    """Keras' own ModelCheckpoint, every step."""
    model = model_of()
    files = str(tmp_path / "step-{batch}.keras")
    saver = keras.callbacks.ModelCheckpoint(files, save_freq=1)
    model.fit(batches(), verbose=0, callbacks=[saver])
    found = sorted(os.listdir(tmp_path))
    assert len(found) == 5
    for step in range(5):
        name = next(f for f in found if f in (f"step-{step}.keras", f"step-{step + 1}.keras"))
        number = int(keras.models.load_model(tmp_path / name).optimizer.iterations)
        assert_settled(keras.models.load_model(tmp_path / name).layers[1].embeddings, eager_tables[number - 1])


@pytest.mark.slow
def test_callbacks_see_settled_weights_at_the_end_of_an_epoch(eager_tables):
    """Also by ways that no hook sees, such as a compiled function of a part of the model."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(raw(self.model))

    model_of().fit(batches(), verbose=0, callbacks=[Look()])
    assert_settled(seen[0], eager_tables[4])


@pytest.mark.slow
def test_callbacks_that_read_a_layer_in_mid_epoch_are_refused(eager_tables):
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.layers[1].get_weights()

    model = model_of()
    with pytest.raises(NotPrivate, match="owes noise"):
        model.fit(batches().take(3), verbose=0, callbacks=[Look()])
    assert_settled(raw(model), eager_tables[0])  # by the end of fit


@pytest.mark.slow
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


# Devices.


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}])
def test_conditionals_that_tensorflow_takes_apart_make_the_same_steps(options, monkeypatch):
    """As it does where there is a GPU, or another device."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: [None, None])
    SharedGraph.trace_all_anew()
    try:
        ids = keras.Input([2], dtype="int32")
        table = keras.layers.Embedding(4000, 5, embeddings_initializer="zeros")
        model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
        optimizer = tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
        model.compile(optimizer, loss="mse", **options)
        for _ in range(4):
            model.train_on_batch(IDS[:4], LABELS[:4])
        model.settle()
        unread = table.get_weights()[0][ROWS:]
    finally:
        monkeypatch.undo()
        SharedGraph.trace_all_anew()
    assert unread.std() == pytest.approx(4**0.5 * 0.5 / 4, rel=6 / (2 * unread.size) ** 0.5)


# Memory.


@pytest.mark.slow
def test_settling_needs_no_memory_that_grows_with_the_table(monkeypatch):
    """Sixteen times the rows, the same peak beyond the table itself."""
    monkeypatch.setattr("tfdp_rec.core.mechanism.tables.CHUNK_VALUES", 1 << 18)
    peaks = []
    for rows in (1 << 17, 1 << 19):  # 32 and 128 MB of table
        table = keras.Variable(np.zeros([rows, 64], "float32"), name="table")
        optimizer = tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4.0)
        build_by_hand(optimizer, [table], [table])
        nothing = tfdp_rec.clipping.ClippedSum({}, tf.ones([1]), tf.constant(1.0), tf.ones([1]))
        optimizer.apply(nothing)
        optimizer.settle()  # traces, and makes what stays
        optimizer.apply(nothing)
        gc.collect()
        before = usage.getrusage(usage.RUSAGE_SELF).ru_maxrss
        optimizer.settle()
        peaks.append(usage.getrusage(usage.RUSAGE_SELF).ru_maxrss - before)
        assert np.all(table.value[:5].numpy() != 0) and np.all(table.value[-5:].numpy() != 0)
        del table, optimizer
    assert peaks[1] < 16_000  # kilobytes; the table has 131,072


# Refusals.


def test_several_replicas_are_refused(monkeypatch):
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(type(strategy), "num_replicas_in_sync", property(lambda self: 2))
    with pytest.raises(NotPrivate, match="each replica"):
        model_of()


@pytest.mark.slow
def test_several_replicas_are_refused_after_compile_too(monkeypatch):
    """A fit within a strategy's scope had every replica clip, add noise and count by itself."""
    model, strategy = model_of(), tf.distribute.get_strategy()
    monkeypatch.setattr(type(strategy), "num_replicas_in_sync", property(lambda self: 2))
    with pytest.raises(NotPrivate, match="each replica"):
        model.train_on_batch(IDS[:4], LABELS[:4])
    assert int(model.optimizer.iterations) == 0


def test_several_replicas_are_refused_in_a_loop_by_hand(monkeypatch):
    """Past the model's methods, which refuse a scope by themselves."""
    model, strategy = model_of(), tf.distribute.get_strategy()
    model.prepare((IDS[:4], LABELS[:4]))
    clipped = tfdp_rec.clipping.clipped_sum(model, (IDS[:4], LABELS[:4]), 1.0)
    monkeypatch.setattr(type(strategy), "num_replicas_in_sync", property(lambda self: 2))
    with pytest.raises(NotPrivate, match="each replica"):
        model.optimizer.apply(clipped)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.slow
def test_settling_inside_a_graph_is_refused():
    model = in_training()

    @tf.function
    def settles():
        model.optimizer.settle()
        return 0

    with pytest.raises(RuntimeError, match="eager"):
        settles()


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [None, ["mae", keras.metrics.RootMeanSquaredError()]])
@pytest.mark.parametrize("mechanism", [tfdp_rec.DPSGD, tfdp_rec.LazyDPSGD])
def test_a_step_is_traced_once(mechanism, metrics):
    """A variable that is born while a step is traced has TensorFlow trace it twice, and large models take a minute."""
    traced = []

    class Counted(tfdp_rec.PrivateModel):
        def compute_metrics(self, *given, **named):
            traced.append(given)
            return super().compute_metrics(*given, **named)

    ids = keras.Input([2], dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 3)(ids))
    model = Counted(ids, keras.layers.Dense(1)(keras.layers.Dropout(0.1)(hidden)))
    optimizer = mechanism(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)
    model.compile(optimizer, "mse", metrics=metrics)
    for _ in range(2):
        model.fit(IDS, LABELS, batch_size=4, verbose=0)
    assert len(traced) == 1


@pytest.mark.slow
def test_settling_many_models_is_no_retracing_of_one(caplog):
    for _ in range(6):
        model = in_training(1)
        assert not model.optimizer.releasable
        model.settle()
    assert not [record for record in caplog.records if "settle" in record.getMessage()]


@pytest.mark.slow
def test_a_model_is_fitted_on_as_many_samplings_as_one_likes():
    model = tfdp_rec.PrivateModel(inputs := keras.Input([1]), keras.layers.Dense(1)(inputs))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=8), "mse")
    rows = np.ones([40, 1], "float32")
    for _ in range(6):
        sampling = tfdp_rec.data.PoissonSampling(40, 8)
        model.fit(sampling.batches(lambda indices: (rows[indices], rows[indices])), steps_per_epoch=1, verbose=0)
    assert int(model.optimizer.iterations) == model.saved_history().steps == 6
