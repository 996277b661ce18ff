"""Poisson sampling by TensorFlow operations: sizes and members, against what Poisson sampling is.

False alarms of the statistical tests are rarer than one in a million runs.
"""

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfdp_rec.core.claim.graph_sampling import poisson_indices
from tfdp_rec.core.ground.system_words import system_words
from tfdp_rec.privacy import PoissonSampling

UNITS, MEAN, BATCHES = 60, 6.0, 2500
RARE = 1e-7


def draw(probability, batches=BATCHES, units=UNITS):
    """Which units are in which batch, [batches, units]."""
    one = lambda _: tf.math.bincount(  # noqa: E731
        tf.cast(poisson_indices(units, probability), tf.int32), minlength=units, maxlength=units
    )
    dataset = tf.data.Dataset.range(batches).map(one).batch(batches)
    return next(iter(dataset)).numpy()


def p_values(drawn, probability):
    """Of the sizes against Binomial(n, q), of each unit's count, and of each pair of neighbours."""
    batches, units = drawn.shape
    sizes = np.bincount(drawn.sum(axis=1), minlength=units + 1)
    expected = batches * stats.binom.pmf(np.arange(units + 1), units, probability)
    bins = np.searchsorted(np.cumsum(expected), np.linspace(0, batches, 12)[1:-1])
    folded = [np.array([part.sum() for part in np.split(values, np.unique(bins))]) for values in (sizes, expected)]
    yield stats.chisquare(folded[0], folded[1] * folded[0].sum() / folded[1].sum()).pvalue
    yield 2 * stats.norm.sf(abs(drawn.mean() - probability) / np.sqrt(probability * (1 - probability) / drawn.size))
    counts = drawn.sum(axis=0)
    spread = np.sum((counts - batches * probability) ** 2) / (batches * probability * (1 - probability))
    yield 2 * min(stats.chi2.sf(spread, units), stats.chi2.cdf(spread, units))
    together = np.sum(drawn[:, :-1] * drawn[:, 1:])
    yield 2 * stats.norm.sf(abs(together - (mean := batches * (units - 1) * probability**2)) / np.sqrt(1.5 * mean))


def test_batches_are_poisson_samples():
    drawn = draw(MEAN / UNITS)
    assert drawn.max() == 1
    assert min(p_values(drawn, MEAN / UNITS)) > RARE


@pytest.mark.fast_cases("0.93")
@pytest.mark.parametrize("off", [0.93, 1.07])
def test_the_check_rejects_another_probability(off):
    assert min(p_values(draw(off * MEAN / UNITS), MEAN / UNITS)) < RARE


def test_the_check_rejects_batches_of_one_size():
    generator = np.random.default_rng(0)
    drawn = np.zeros([BATCHES, UNITS], int)
    for row in drawn:
        row[generator.choice(UNITS, int(MEAN), replace=False)] = 1
    assert min(p_values(drawn, MEAN / UNITS)) < RARE


def test_the_check_rejects_units_that_come_in_pairs():
    generator = np.random.default_rng(0)
    drawn = np.repeat(generator.random([BATCHES, UNITS // 2]) < MEAN / UNITS, 2, axis=1).astype(int)
    assert min(p_values(drawn, MEAN / UNITS)) < RARE


def test_probability_one_takes_every_unit_and_a_small_one_often_none():
    assert poisson_indices(7, 1.0).numpy().tolist() == list(range(7))
    sizes = draw(0.01 / UNITS, batches=200).sum(axis=1)
    assert sizes.min() == 0 and sizes.max() <= 3


def test_a_billion_units_cost_no_more_than_the_batch():
    indices = poisson_indices(10**9, 1e-6).numpy()
    assert 700 < len(indices) < 1300 and indices.dtype == np.int64
    assert np.all(np.diff(indices) > 0) and indices[-1] < 10**9 and indices[-1] > 9e8


def test_graph_batches_fetch_in_the_graph_and_never_repeat():
    sampling = PoissonSampling(1000, 30)
    batches = iter(sampling.graph_batches(lambda units: {"unit": units, "twice": 2 * units}))
    one, two = next(batches), next(batches)
    first, draw, second, next_draw = one.batch, one.draw, two.batch, two.draw
    assert int(draw.size) == len(first["unit"]) and draw.sampling == sampling.name
    assert (int(draw.number), int(next_draw.number)) == (0, 1) and draw.iteration == next_draw.iteration
    assert sampling.graph_streams == 1
    assert np.array_equal(first["twice"], 2 * first["unit"]) and not np.array_equal(first["unit"], second["unit"])
    again = next(iter(sampling.graph_batches(lambda units: {"unit": units})))
    assert draw.iteration != again.draw.iteration
    assert not np.array_equal(first["unit"], again.batch["unit"])


def test_a_sampling_is_fixed_once_it_has_batches_in_a_graph():
    sampling = PoissonSampling(num_units=40, expected_batch_size=4)
    sampling.graph_batches(lambda indices: {"id": indices})
    for name in ("num_units", "expected_batch_size"):
        with pytest.raises(AttributeError, match=f"{name} of a PoissonSampling is fixed"):
            setattr(sampling, name, 20)


def test_system_words_are_uniform_and_differ_at_every_execution():
    words = tf.function(lambda: system_words(512), autograph=False)
    drawn = np.concatenate([words().numpy() for _ in range(8)])
    bits = np.unpackbits(drawn.view(np.uint8).reshape(-1, 4), axis=1).sum(axis=0)
    spread = np.sum((bits - len(drawn) / 2) ** 2) / (len(drawn) / 4)
    assert stats.chi2.sf(spread, 32) > RARE and stats.chi2.cdf(spread, 32) > RARE
    assert len(set(drawn.tolist())) > 4090
