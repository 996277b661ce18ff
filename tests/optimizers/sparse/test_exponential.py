"""Exponential selection as an optimizer."""

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp_rec.clipping import ClippedSum, Reads
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.optimizers import ExponentialSelectionSGD
from tfdp_rec.sparse import draws


def optimizer_of(**changes):
    arguments = dict(
        learning_rate=1.0,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        expected_batch_size=10.0,
        num_survivors=12,
        selection_epsilon=0.5,
        noise=KeyedNoise(1),
    )
    return ExponentialSelectionSGD(**{**arguments, **changes})


def step(optimizer, rows=500, readers=200):
    """One step on one table, whose rows 0 to 3 are read by many."""
    table = keras.Variable(np.zeros([rows, 2], "float32"), name="a")
    examples = tf.constant(np.repeat(np.arange(readers), 2))
    ids = tf.constant(np.stack([np.arange(readers) % 4, np.arange(readers) % 4], axis=1).reshape(-1))
    slices = tf.IndexedSlices(tf.ones([2 * readers, 2]), ids)
    empty = tf.zeros([0])
    reads = {"a": Reads(examples, ids, tf.zeros([0], tf.int64))}
    optimizer.build([table], {"a": None})
    optimizer.apply(ClippedSum({"a": slices}, empty, tf.constant(1.0), empty, reads))
    return np.array(table)


def test_just_so_many_rows_move_and_the_popular_ones_among_them():
    optimizer = optimizer_of(selection_epsilon=2.0)
    moved = (step(optimizer) != 0).all(axis=1)
    assert moved.sum() == 12 and moved[:4].all()
    assert optimizer.updated_values == 24


def test_the_gradient_of_a_chosen_row_is_its_clipped_sum():
    after = step(optimizer_of(selection_epsilon=2.0, noise_multiplier=1e-9))
    np.testing.assert_allclose(after[:4], -1.0 * 100 / 10, rtol=1e-5)
    assert abs(after[4:]).max() < 1e-6


@pytest.mark.slow
def test_without_readers_all_rows_are_alike():
    hits = np.zeros(40)
    for seed in range(60):
        hits += (step(optimizer_of(noise=KeyedNoise(seed)), rows=40, readers=0) != 0).all(axis=1)
    assert hits.sum() == 12 * 60 and hits.min() > 4


def test_repeated_reads_are_one_vote():
    """100 readings by 50 examples a row: with as many votes e0 * 50, not e0 * 100, decide the odds."""
    touched, counts, _ = draws.contribution_counts(
        tf.constant([0, 0, 1], tf.int64), tf.constant([7, 7, 7], tf.int64), 10, float("inf")
    )
    assert touched.numpy().tolist() == [7] and counts.numpy().tolist() == [2.0]


def test_both_looks_are_paid():
    event = optimizer_of().dp_event()
    selecting = draws.gumbel_noise_multiplier(0.5, 12)
    assert [e.noise_multiplier for e in event.events] == pytest.approx([selecting, 1.0])
    assert optimizer_of(noise_multiplier=0.0).dp_event() == dp_accounting.NonPrivateDpEvent()


@pytest.mark.parametrize(
    "wrong", [{"num_survivors": 0}, {"num_survivors": 2.5}, {"selection_epsilon": 0.0}, {"momentum": 0.5}]
)
def test_what_it_cannot_do_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        optimizer_of(**wrong)


def test_more_survivors_than_rows_are_refused():
    with pytest.raises(ValueError, match="more than the tables' 10 rows"):
        step(optimizer_of(), rows=10)


def test_the_number_of_draws_that_is_paid_for_stays():
    optimizer = optimizer_of()
    with pytest.raises(AttributeError):
        optimizer.num_survivors = 3


def test_it_serializes():
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer_of(noise=None)))
    assert isinstance(again, ExponentialSelectionSGD) and again.num_survivors == 12
    assert again.selection_epsilon == 0.5
