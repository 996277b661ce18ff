"""Access patterns against the distributions they claim, with false-alarm rates below 1e-6."""

import numpy as np
import pytest
import tensorflow as tf

from experiments.bench.access_patterns import PATTERNS, AccessPattern, click_batches, scattering_factor, table_ids

DRAWS = 200_000


def ranks(pattern, rows):
    uniform = tf.constant(np.random.default_rng(0).random(DRAWS))
    return pattern.ranks(uniform, tf.constant(rows, tf.int64)).numpy()


@pytest.mark.parametrize("name, share", [("skew-low", 0.36), ("skew-medium", 0.1), ("skew-high", 0.006)])
def test_nine_tenths_of_the_reads_on_the_hot_rows(name, share):
    rows = 10_000
    found = ranks(PATTERNS[name], rows)
    hot = int(rows * share)
    assert abs(np.mean(found < hot) - 0.9) < 5 * np.sqrt(0.9 * 0.1 / DRAWS)
    # Uniform within either part.
    assert abs(np.mean(found[found < hot] < hot / 2) - 0.5) < 0.01
    cold = found[found >= hot]
    assert abs(np.mean(cold < hot + (rows - hot) / 2) - 0.5) < 0.02
    assert found.max() < rows


def test_uniform_is_uniform():
    counts = np.bincount(ranks(AccessPattern(), 100), minlength=100)
    chi_squared = np.sum((counts - DRAWS / 100) ** 2) / (DRAWS / 100)
    assert chi_squared < 99 + 6 * np.sqrt(2 * 99)


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_zipf_has_its_density(exponent):
    rows = 1000
    counts = np.bincount(ranks(AccessPattern(exponent=exponent), rows), minlength=rows)
    edges = np.arange(1, rows + 2, dtype=float)
    mass = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = DRAWS * np.diff(mass) / (mass[-1] - mass[0])
    assert np.sum((counts - expected) ** 2 / expected) < (rows - 1) + 6 * np.sqrt(2 * (rows - 1))
    assert counts[0] > 1.3 * counts[1]


@pytest.mark.parametrize("rows", [1, 2, 3, 10, 360, 7919, 100_000])
def test_ranks_become_rows_one_to_one(rows):
    found = (np.arange(rows) * scattering_factor(rows) + 1) % rows
    assert len(np.unique(found)) == rows


def test_ids_are_a_function_of_the_seed_and_within_their_tables():
    sizes = [3, 50, 1000]
    first, again, other = (
        table_ids(AccessPattern(), sizes, 500, 2, tf.constant([seed, 1], tf.int64)).numpy() for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    for table, size in enumerate(sizes):
        assert first[:, table].min() >= 0 and first[:, table].max() < size
        assert len(np.unique(first[:, table])) > min(size, 500) / 2


def test_batches_differ_and_repeat_with_the_seed():
    def ids(seed):
        data = click_batches(AccessPattern(hot_rows=0.1), [100], batch_size=20, pooling=3, seed=seed)
        return np.stack([inputs["ids"].numpy() for inputs, _ in data.take(3)])

    assert ids(0).shape == (3, 20, 1, 3)
    np.testing.assert_array_equal(ids(0), ids(0))
    assert np.any(ids(0)[0] != ids(0)[1]) and np.any(ids(0) != ids(1))


@pytest.mark.parametrize("name", ["zipf", "zipf-x", "zipf--1", "hot"])
def test_unknown_patterns_are_named(name):
    with pytest.raises(ValueError, match=name):
        AccessPattern.named(name)


@pytest.mark.parametrize(
    "arguments", [{"hot_rows": 0}, {"hot_rows": 1.5}, {"exponent": -1}, {"hot_rows": 0.5, "exponent": 1}]
)
def test_impossible_patterns_are_refused(arguments):
    with pytest.raises(ValueError):
        AccessPattern(**arguments)


@pytest.mark.parametrize("sizes", [[], [0], [2**31]])
def test_table_sizes_are_checked(sizes):
    with pytest.raises(ValueError, match="table_sizes"):
        table_ids(AccessPattern(), sizes, 2, 1, tf.constant([0, 0], tf.int64))
