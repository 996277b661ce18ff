"""Delayed scales: noise that is paid late has its row's scale, levels follow their law, and what they must not see."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Seeded

import tfdp_rec
from tfdp_rec.clipping import ClippedSum
from tfdp_rec.optimizers import DelayedRMSprop, LazyDPSGD
from tfdp_rec.refused import NotPrivate

ROWS, WIDTH, STEPS = 12, 40_000, 6
UNLIKELY = 5.5  # standard errors: a false alarm once in 10^7
BASICS = {"l2_norm_clip": 2.0, "noise_multiplier": 0.8, "expected_batch_size": 4.0}
ETA, STDDEV = 0.5, 0.8 * 2.0 / 4.0
LEVELS = np.resize([1.0, 4.0, 16.0], ROWS)


def trained(rule, steps=STEPS, mechanism=LazyDPSGD, noise=0.8, levels=LEVELS, **options):
    """Noise alone, over steps that read some rows and announce some; the optimizer and its table's weights."""
    table = keras.Variable(np.zeros([ROWS, WIDTH], "float32"), name="table")
    settings = {**BASICS, "noise_multiplier": noise}
    optimizer = mechanism(ETA, **settings, noise=Seeded(2), table_rule=rule, **options)
    optimizer.build([table], {table.path: None})
    held(optimizer, "levels").assign(levels)
    for step in range(steps):
        read = tf.constant([step % 3, 5, 5], tf.int64)
        optimizer.before_read(table, read)
        slices = tf.IndexedSlices(tf.zeros([3, WIDTH]), read)
        clipped = ClippedSum({table.path: slices}, tf.zeros([3]), tf.constant(2.0), tf.zeros([3]))
        optimizer.apply(clipped, upcoming={table.path: tf.constant([7, 7, 99], tf.int64)})
    optimizer.settle()
    return optimizer, np.asarray(table._value, np.float64)


def held(optimizer, name):
    (found,) = [v for v in optimizer.variables if v.name.startswith(name)]
    return found


def assert_rows_have_their_scale(rule, weights):
    scale = rule.scale(tf.constant(LEVELS)).numpy()
    for row, a in zip(weights, scale):
        expected = a**2 * STEPS * (ETA * STDDEV) ** 2
        assert abs(np.mean(row**2) / expected - 1) < UNLIKELY * np.sqrt(2 / WIDTH)
    correlations = np.corrcoef(weights) - np.eye(ROWS)
    assert np.max(np.abs(correlations)) < UNLIKELY / np.sqrt(WIDTH)


RULE = DelayedRMSprop(100)


@pytest.mark.parametrize("options", [{}, {"aggregate_noise": False}])
def test_every_row_has_noise_of_its_own_scale(options):
    assert_rows_have_their_scale(RULE, trained(RULE, **options)[1])


class PaysUnscaled(LazyDPSGD):
    """Rows that waited get noise as if all scales were 1."""

    def pay(self, rows, now, payer=None):
        kept = {path: table.scales for path, table in self.tables.items()}
        for table in self.tables.values():
            table.scales = None
        super().pay(rows, now, payer)
        for path, scales in kept.items():
            self.tables[path].scales = scales


@pytest.mark.parametrize("broken", [{"mechanism": PaysUnscaled}, {"noise": 0.8 * 1.03}, {"noise": 0.8 * 0.97}])
def test_noise_of_a_wrong_scale_is_found_out(broken):
    with pytest.raises(AssertionError):
        assert_rows_have_their_scale(RULE, trained(RULE, **broken)[1])


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_noise_alone_takes_a_row_as_far_as_noise_alone(decay):
    """After a phase a level is β of itself and 1 − β of 1, at whatever scale the row had."""
    optimizer, _ = trained(DelayedRMSprop(STEPS, decay=decay), steps=STEPS + 1)
    found = (held(optimizer, "levels").numpy() - decay * LEVELS) / (1 - decay)
    assert np.max(np.abs(found - 1)) < UNLIKELY * np.sqrt(2 / WIDTH)


def test_levels_take_no_noise_of_another_scale():
    """The law above has teeth: noise that enters rows but not the phase's account is seen."""
    optimizer, _ = trained(DelayedRMSprop(STEPS, decay=0.0), steps=STEPS)
    table = next(iter(optimizer.tables.values()))
    table.variable.assign(table.variable._value * 1.03)
    slices = tf.IndexedSlices(tf.zeros([0, WIDTH]), tf.zeros([0], tf.int64))
    optimizer.apply(ClippedSum({table.path: slices}, tf.zeros([3]), tf.constant(2.0), tf.zeros([3])))
    assert np.min(held(optimizer, "levels").numpy()) - 1 > UNLIKELY * np.sqrt(2 / WIDTH)


def test_without_noise_levels_stay():
    optimizer, _ = trained(DelayedRMSprop(1), noise=0.0)
    np.testing.assert_array_equal(held(optimizer, "levels").numpy(), LEVELS)


def test_a_row_that_waits_has_nothing_to_say_of_when_it_was_read():
    """A phase begins with all rows settled: their marks say so, whoever was read."""
    optimizer, _ = trained(DelayedRMSprop(STEPS), steps=STEPS)
    table = next(iter(optimizer.tables.values()))
    for _ in range(STEPS + 1):  # the last of them begins a phase
        slices = tf.IndexedSlices(tf.zeros([0, WIDTH]), tf.zeros([0], tf.int64))
        optimizer.apply(ClippedSum({table.path: slices}, tf.zeros([3]), tf.constant(2.0), tf.zeros([3])))
    marks = optimizer.ledger.marks[table.path].numpy()
    assert set(marks.tolist()) == {int(optimizer.ledger.clock.numpy()) - 1}


def test_a_table_of_two_optimizers_is_refused():
    """Levels would look at rows that owe the other one's noise."""
    keras.utils.set_random_seed(0)
    shared = keras.layers.Embedding(20, 2)
    ids = np.arange(8).reshape(4, 2)

    def model_of(rule):
        inputs = keras.Input([2], dtype="int32")
        model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(shared(inputs))))
        model.compile(LazyDPSGD(0.1, **BASICS, table_rule=rule), loss="mse")
        return model

    batch = ids, np.ones([4, 1])
    model_of(None).prepare(batch)
    with pytest.raises(NotPrivate, match="delayed table_rule"):
        model_of(DelayedRMSprop()).prepare(batch)


@pytest.mark.parametrize("options", [{"table_rule": DelayedRMSprop(1)}, {"weight_decay": 0.1}])
def test_a_model_may_be_compiled_anew(options):
    """What the optimizer before owed was settled when it was exchanged."""
    inputs = keras.Input([2], dtype="int32")
    model = tfdp_rec.PrivateModel(
        inputs, keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(20, 2)(inputs)))
    )
    first = None
    for _ in range(2):
        optimizer = LazyDPSGD(0.1, **BASICS, **options)
        model.compile(optimizer, loss="mse", run_eagerly=True)
        assert first is None or first.releasable
        for _ in range(2):
            model.train_on_batch(np.arange(8).reshape(4, 2), np.ones([4, 1]))
        assert not optimizer.releasable
        first = optimizer


def test_parameter_servers_refuse_rules():
    from tfdp_rec.distribute.parameter_server import refuse_unserved

    with pytest.raises(NotPrivate, match="table_rule.*parameter servers"):
        refuse_unserved(LazyDPSGD(0.1, **BASICS, table_rule=DelayedRMSprop()))
