"""Private row selection against slow, obviously right versions of itself."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdp_rec.noise import EntropyNoise, KeyedNoise
from tfdp_rec.sparse import draws

PAIRS = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64)]


def keyed_bits(seed, step=0):
    noise = KeyedNoise(seed)
    return lambda stream, numbers: noise.bits(stream, numbers, tf.cast(step, tf.int64))


def rigged_bits(*words):
    """The given words first, then words that end every draw (the largest exponential)."""

    def bits(stream, numbers):
        filler = np.full(tf.size(numbers).numpy(), 2**64 - 1, np.uint64)
        filler[: len(words)] = words[: len(filler)]
        return tf.constant(filler)

    return bits


# The contribution map


def slow_counts(bags, num_buckets, clip):
    total = np.zeros(num_buckets)
    for bag in bags:
        touched = np.zeros(num_buckets)
        touched[[bucket for bucket in bag if bucket >= 0]] = 1.0
        norm = np.linalg.norm(touched)
        total += touched * (min(1.0, clip / norm) if norm else 0.0)
    return total


@tf.function(input_signature=PAIRS + [tf.TensorSpec([], tf.float64)])
def traced_counts(examples, buckets, clip):
    return draws.contribution_counts(examples, buckets, 30, clip)


def fast_counts(bags, num_buckets, clip):
    pairs = [(i, bucket) for i, bag in enumerate(bags) for bucket in bag]
    examples, buckets = np.array(pairs, np.int64).reshape(-1, 2).T
    touched, counts, size = traced_counts(examples, buckets, clip)
    assert size == 30
    assert len(set(touched.numpy())) == len(touched)
    total = np.zeros(num_buckets)
    total[touched.numpy()] = counts.numpy()
    return total


bags_of_ids = st.lists(st.lists(st.integers(-1, 29), max_size=12), max_size=6)


@settings(max_examples=60, deadline=None)
@given(bags=bags_of_ids, clip=st.floats(0.1, 5.0))
def test_counts_are_the_sum_of_clipped_indicators(bags, clip):
    np.testing.assert_allclose(
        fast_counts(bags, 30, clip), slow_counts(bags, 30, clip), rtol=1e-12, atol=1e-12
    )


@settings(max_examples=60, deadline=None)
@given(bags=bags_of_ids, one=st.lists(st.integers(-1, 29), max_size=20), clip=st.floats(0.1, 5.0))
def test_one_example_moves_the_counts_by_at_most_the_clip(bags, one, clip):
    difference = fast_counts([*bags, one], 30, clip) - fast_counts(bags, 30, clip)
    assert np.linalg.norm(difference) <= clip * (1 + 1e-12)


def test_the_clip_is_reached_by_a_batch_of_one():
    counts = fast_counts([[3, 3, 7, 9, 21]], 30, 1.0)
    assert counts[3] == pytest.approx(0.5)
    assert np.linalg.norm(counts) == pytest.approx(1.0)


# Threshold selection


def patterns(draw, num_samples):
    """The drawn sets as one number each: the sum of 2^bucket. `draw` maps a step to int64 buckets."""

    @tf.function
    def sample():
        result = tf.TensorArray(tf.int64, num_samples)
        for step in tf.range(num_samples):
            result = result.write(
                step, tf.reduce_sum(tf.bitwise.left_shift(tf.constant(1, tf.int64), draw(step)))
            )
        return result.stack()

    return sample().numpy()


def pattern_probabilities(coins):
    """The probability of each of 2^V sets when bucket b is in it with probability coins[b], independently."""
    sets = itertools.product([0, 1], repeat=len(coins))
    return np.array([np.prod([p if bit else 1 - p for bit, p in zip(reversed(s), coins)]) for s in sets])


def brute_force_coins(counts, stddev, threshold, num_samples=400_000):
    """Each bucket's chance by adding Gaussian noise to every one of the counts, many times."""
    noisy = counts + stddev * np.random.default_rng(5).normal(size=(num_samples, len(counts)))
    return (noisy >= threshold).mean(axis=0)


def chi_square(observed_patterns, probabilities):
    """p-value of the sample under the probabilities, rare sets pooled."""
    observed = np.bincount(observed_patterns, minlength=len(probabilities)).astype(float)
    expected = np.append(probabilities, np.zeros(len(observed) - len(probabilities))) * observed.sum()
    rare = expected < 8
    if (observed[rare].sum() > 0) and expected[rare].sum() == 0:
        return 0.0
    pooled_observed = np.append(observed[~rare], observed[rare].sum())
    pooled_expected = np.append(expected[~rare], expected[rare].sum())
    keep = pooled_expected > 0
    return stats.chisquare(pooled_observed[keep], pooled_expected[keep], sum_check=False).pvalue


COUNTS = np.array([0.0, 2.0, 0.0, 0.5, 0.0, 0.0])
STDDEV, THRESHOLD = 1.0, 1.2


@pytest.fixture(scope="module")
def survivor_patterns():
    touched, counts = tf.constant([3, 1], tf.int64), tf.constant([0.5, 2.0], tf.float64)
    noise = KeyedNoise(11)

    def draw(step):
        bits = lambda stream, numbers: noise.bits(stream, numbers, tf.cast(step, tf.int64))  # noqa: E731
        return draws.threshold_survivors(draws.Votes(touched, counts, 6), STDDEV, THRESHOLD, bits)

    return patterns(draw, num_samples=12_000)


def test_survivors_are_distributed_as_in_a_dense_simulation(survivor_patterns):
    coins = brute_force_coins(COUNTS, STDDEV, THRESHOLD)
    assert chi_square(survivor_patterns, pattern_probabilities(coins)) > 1e-3


@pytest.mark.parametrize(
    "counts, stddev, threshold",
    [
        (COUNTS, 1.08, THRESHOLD),
        (COUNTS, STDDEV, 1.3),
        (COUNTS[:5], STDDEV, THRESHOLD),
        (np.append(COUNTS, 0.0), STDDEV, THRESHOLD),
        (COUNTS * 1.1, STDDEV, THRESHOLD),
    ],
    ids=["wrong stddev", "wrong threshold", "vocabulary too small", "vocabulary too large", "wrong counts"],
)
def test_the_distribution_test_notices_a_wrong_mechanism(survivor_patterns, counts, stddev, threshold):
    coins = brute_force_coins(counts, stddev, threshold)
    assert chi_square(survivor_patterns, pattern_probabilities(coins)) < 1e-5


PARTS, OWN = np.array([0, 0, 0, 1, 1, 1]), np.array([1.6, 0.7])  # thresholds of two tables


@pytest.fixture(scope="module")
def patterns_of_parts():
    touched, counts = tf.constant([3, 1], tf.int64), tf.constant([0.5, 2.0], tf.float64)
    noise = KeyedNoise(12)

    def draw(step):
        bits = lambda stream, numbers: noise.bits(stream, numbers, tf.cast(step, tf.int64))  # noqa: E731
        return draws.threshold_survivors(draws.Votes(touched, counts, 6), STDDEV, tf.constant(OWN), bits, [3, 3])

    return patterns(draw, num_samples=12_000)


def test_parts_with_thresholds_of_their_own_are_distributed_as_in_a_dense_simulation(patterns_of_parts):
    coins = brute_force_coins(COUNTS, STDDEV, OWN[PARTS])
    assert chi_square(patterns_of_parts, pattern_probabilities(coins)) > 1e-3


@pytest.mark.parametrize("own", [OWN[::-1], [1.6, 0.8], [1.7, 0.7], [0.7, 0.7]])
def test_the_distribution_test_notices_wrong_thresholds_of_parts(patterns_of_parts, own):
    coins = brute_force_coins(COUNTS, STDDEV, np.array(own)[PARTS])
    assert chi_square(patterns_of_parts, pattern_probabilities(coins)) < 1e-5


def test_a_part_whose_threshold_no_noise_reaches_keeps_nothing():
    nothing = tf.zeros([0], tf.int64), tf.zeros([0], tf.float64)
    votes, own = draws.Votes(*nothing, 1000), tf.constant([60.0, 0.1], tf.float64)
    kept = draws.threshold_survivors(votes, 1.0, own, keyed_bits(4), [500, 500]).numpy()
    assert kept.min() >= 500 and stats.binomtest(len(kept), 500, stats.norm.sf(0.1)).pvalue > 1e-4


def test_parts_have_draws_of_their_own():
    nothing, own = (tf.zeros([0], tf.int64), tf.zeros([0], tf.float64)), tf.constant([0.5, 0.5], tf.float64)
    kept = draws.threshold_survivors(draws.Votes(*nothing, 2000), 1.0, own, keyed_bits(6), [1000, 1000]).numpy()
    first, second = (set(kept[kept < 1000]), set(kept[kept >= 1000] - 1000))
    both = stats.norm.sf(0.5) ** 2
    assert stats.binomtest(len(first & second), 1000, both).pvalue > 1e-4  # 309 if they were the same


def test_a_large_part_with_a_high_threshold_costs_nothing():
    """Each part's strays are drawn by its own rate: the least threshold of all is no one else's."""
    drawn, bits = [], keyed_bits(5)

    def counted(stream, numbers):
        drawn.append(len(numbers))
        return bits(stream, numbers)

    nothing = tf.zeros([0], tf.int64), tf.zeros([0], tf.float64)
    votes, own = draws.Votes(*nothing, 10**9 + 100), tf.constant([60.0, 0.1], tf.float64)
    kept = draws.threshold_survivors(votes, 1.0, own, counted, [10**9, 100]).numpy()
    assert kept.min() >= 10**9 and 20 < len(kept) < 75 and sum(drawn) < 300


@pytest.mark.slow
def test_stray_survivors_of_a_large_space_have_the_binomial_rate():
    touched = tf.range(0, 4000, 2, dtype=tf.int64)
    counts = tf.fill([2000], tf.constant(-1e9, tf.float64))  # none of these survives
    num_buckets, rounds, z = 10_000, 200, 2.0
    votes = draws.Votes(touched, counts, num_buckets)
    num = 0
    for step in range(rounds):
        survivors = draws.threshold_survivors(votes, 1.5, 3.0, keyed_bits(3, step)).numpy()
        assert len(set(survivors)) == len(survivors)
        assert not np.isin(survivors, touched).any() and survivors.max() < num_buckets
        num += len(survivors)
    for error, accepted in ((1.0, True), (0.97, False), (1.03, False)):
        p_value = stats.binomtest(num, rounds * 8000, stats.norm.sf(z / error)).pvalue
        assert (p_value > 1e-4) == accepted


def test_operating_system_noise_selects_at_the_same_rate():
    noise = EntropyNoise()
    bits = lambda stream, numbers: noise.bits(stream, numbers, tf.constant(0, tf.int64))  # noqa: E731
    nothing = tf.zeros([0], tf.int64), tf.zeros([0], tf.float64)
    num = len(draws.threshold_survivors(draws.Votes(*nothing, 10_000_000), 1.0, 3.0, bits))
    assert stats.binomtest(num, 10_000_000, stats.norm.sf(3.0)).pvalue > 1e-8


# Places of the untouched survivors


def test_places_are_uniform_over_a_billion_buckets():
    places = draws.bernoulli_places(10**9, tf.constant(2e-5, tf.float64), keyed_bits(1)).numpy()
    assert (np.diff(places) > 0).all() and places[0] >= 0 and places[-1] < 10**9
    assert stats.chisquare(np.histogram(places, bins=50, range=(0, 10**9))[0]).pvalue > 1e-3
    assert stats.binomtest(len(places), 10**9, -math.expm1(-2e-5)).pvalue > 1e-3


def test_a_hopeless_threshold_needs_no_work_and_keeps_nobody():
    nothing = tf.zeros([0], tf.int64), tf.zeros([0], tf.float64)
    assert len(draws.threshold_survivors(draws.Votes(*nothing, 10**9), 1.0, 50.0, keyed_bits(1))) == 0
    assert len(draws.bernoulli_places(0, tf.constant(0.5, tf.float64), keyed_bits(1))) == 0


def test_certain_coins_keep_everybody():
    places = draws.bernoulli_places(1000, tf.constant(60.0, tf.float64), keyed_bits(2)).numpy()
    np.testing.assert_array_equal(places, np.arange(1000))


def test_probabilities_far_below_float32_are_still_exact():
    """A coin of 1e-18 falls heads for just the words below 1e-18 * 2^64 = 18.4."""
    rate = tf.constant(1e-18, tf.float64)
    assert list(draws.bernoulli_places(10, rate, rigged_bits(17)).numpy()) == [0]
    assert list(draws.bernoulli_places(10, rate, rigged_bits(18 * 5)).numpy()) == [4]
    assert list(draws.bernoulli_places(10, rate, rigged_bits(18 * 12)).numpy()) == []


def test_exponentials_keep_their_tails():
    words = np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    expected = [2.0**-65, math.log(2.0), math.log(2.0), 65 * math.log(2.0)]
    np.testing.assert_allclose(draws.unit_exponentials(tf.constant(words)).numpy(), expected, rtol=1e-14)


def test_exponentials_are_exponential():
    sample = draws.unit_exponentials(keyed_bits(4)(-1, tf.range(200_000, dtype=tf.int64))).numpy()
    assert stats.kstest(sample, "expon").pvalue > 1e-3
    assert stats.kstest(sample * 1.01, "expon").pvalue < 1e-3


def test_log_normal_cdf_matches_scipy_in_both_tails():
    z = np.linspace(-35, 12, 95)
    np.testing.assert_allclose(
        draws.log_normal_cdf(tf.constant(z)).numpy(), stats.norm.logcdf(z), rtol=1e-12
    )


# Top-m selection


@pytest.mark.slow
def test_top_survivors_are_distributed_as_dense_gumbel_top_m():
    counts = np.array([0.0, 2.0, 0.0, 1.0, 0.0, 0.0])
    noise = KeyedNoise(23)

    def draw(step):
        bits = lambda stream, numbers: noise.bits(stream, numbers, tf.cast(step, tf.int64))  # noqa: E731
        votes = draws.Votes(tf.constant([3, 1], tf.int64), tf.constant([1.0, 2.0], tf.float64), 6)
        return draws.top_survivors(votes, 2, 0.7, bits)

    drawn = patterns(draw, num_samples=8_000)

    def dense(epsilon, num_buckets=6):
        padded = np.zeros(num_buckets)
        padded[:6] = counts
        gumbel = np.random.default_rng(8).gumbel(size=(400_000, num_buckets))
        top = np.argsort(-(epsilon * padded + gumbel))[:, :2]
        return np.bincount((2**top).sum(axis=1), minlength=2**num_buckets) / len(top)

    assert chi_square(drawn, dense(0.7)) > 1e-3
    assert chi_square(drawn, dense(0.9)) < 1e-5
    assert chi_square(drawn, dense(0.7, num_buckets=7)) < 1e-5


def test_top_survivors_are_distinct_also_when_nearly_all_are_kept():
    touched, counts = tf.constant([0, 5, 7], tf.int64), tf.constant([1.0, 1.0, 1.0], tf.float64)
    for wanted in (1, 4, 9, 10):
        survivors = draws.top_survivors(draws.Votes(touched, counts, 10), wanted, 1.0, keyed_bits(wanted)).numpy()
        assert len(set(survivors)) == wanted and survivors.min() >= 0 and survivors.max() < 10


@pytest.mark.slow
def test_distinct_places_are_uniform_over_what_is_not_excluded():
    hits = np.zeros(12)
    for seed in range(300):
        places = draws.distinct_places(
            12, tf.constant(3, tf.int64), tf.constant([2, 9], tf.int64), keyed_bits(seed)
        ).numpy()
        assert len(set(places)) == 3
        hits[places] += 1
    assert hits[2] == hits[9] == 0
    assert stats.chisquare(np.delete(hits, [2, 9])).pvalue > 1e-3


# Budgets


def epsilon_of(accountant, event, rate=0.01, steps=500, delta=1e-6):
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event), steps)
    return accountant.get_epsilon(delta)


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
def test_the_two_parts_cost_what_the_whole_would(fraction):
    s1, s2 = draws.split_noise_multiplier(0.8, fraction)
    parts = dp_accounting.ComposedDpEvent(
        [dp_accounting.GaussianDpEvent(s1), dp_accounting.GaussianDpEvent(s2)]
    )
    whole = dp_accounting.GaussianDpEvent(0.8)
    assert epsilon_of(RdpAccountant(), parts) == pytest.approx(epsilon_of(RdpAccountant(), whole), rel=1e-7)
    joint = dp_accounting.GaussianDpEvent((s1**-2 + s2**-2) ** -0.5)
    assert epsilon_of(PLDAccountant(), joint) == pytest.approx(epsilon_of(PLDAccountant(), whole), rel=1e-7)


def test_a_tenth_of_the_budget_goes_to_selection():
    s1, s2 = draws.split_noise_multiplier(0.8, 0.1)
    assert s1**-2 == pytest.approx(0.1 * 0.8**-2) and s1 > s2


@pytest.mark.parametrize("arguments", [(0.0, 0.1), (math.inf, 0.1), (math.nan, 0.1), (1.0, 0.0), (1.0, 1.0)])
def test_impossible_splits_are_refused(arguments):
    with pytest.raises(ValueError, match="must"):
        draws.split_noise_multiplier(*arguments)


def test_expected_strays_is_the_binomial_mean():
    assert draws.expected_strays(10**9, 2.0, 13.0) == pytest.approx(10**9 * stats.norm.sf(6.5), rel=1e-12)


def hockey_stick(p, q, epsilon):
    return np.maximum(p - math.exp(epsilon) * q, 0.0).sum()


def gaussian_delta(sigma, epsilon):
    return stats.norm.sf(epsilon * sigma - 0.5 / sigma) - math.exp(epsilon) * stats.norm.sf(
        epsilon * sigma + 0.5 / sigma
    )


@pytest.mark.parametrize("e0", [0.05, 0.5, 2.0, 6.0])
def test_the_gaussian_stand_in_is_never_more_private_than_the_exponential_mechanism(e0):
    sigma = draws.gumbel_noise_multiplier(e0, num_survivors=1)
    for lost in np.linspace(0.02, 0.98, 49) * e0:  # the worst pairs: loss is `lost` or `lost - e0`
        q = -math.expm1(lost - e0) / (math.exp(lost) - math.exp(lost - e0))
        second = np.array([q, 1 - q])
        first = second * np.exp([lost, lost - e0])
        assert first.sum() == pytest.approx(1.0)
        for epsilon in np.linspace(0.0, e0, 20):
            for p, r in ((first, second), (second, first)):
                assert hockey_stick(p, r, epsilon) <= gaussian_delta(sigma, epsilon) + 1e-12


@pytest.mark.parametrize("e0", [0.01, 0.5, 3.0, 12.0])
def test_of_all_coins_with_that_log_odds_ratio_the_symmetric_ones_are_furthest_apart(e0):
    """Step 4 of the proof in docs/privacy-adafest.md: with a shift left or right, the probits come closer."""
    x = np.linspace(-12.0, 12.0, 2001) - e0 / 2
    probits = stats.norm.ppf(1 / (1 + np.exp(-x - e0))) - stats.norm.ppf(1 / (1 + np.exp(-x)))
    mu = 1.0 / draws.gumbel_noise_multiplier(e0, num_survivors=1)
    assert probits.max() <= mu * (1 + 1e-9) and probits[1000] == pytest.approx(mu)


def test_the_inequality_that_the_proof_rests_on():
    """Step 5: the slope of probit(logistic) falls away from the middle, as g is nowhere negative."""
    z = np.linspace(0.0, 30.0, 3001)[1:]
    density, low, high = stats.norm.pdf(z), stats.norm.sf(z), stats.norm.cdf(z)
    assert (density * (high - low) - z * high * low >= 0).all()


def test_the_gaussian_stand_in_is_not_needlessly_weak():
    tight, loose = (draws.gumbel_noise_multiplier(e0, 1) for e0 in (1.0, 0.9))
    half = np.array([1.0, math.exp(0.5)]) / (1.0 + math.exp(0.5))
    assert hockey_stick(half, half[::-1], 0.0) == pytest.approx(gaussian_delta(tight, 0.0))
    assert hockey_stick(half, half[::-1], 0.0) > gaussian_delta(loose, 0.0)


def test_each_of_many_draws_is_paid():
    assert draws.gumbel_noise_multiplier(0.3, 25) == pytest.approx(
        draws.gumbel_noise_multiplier(0.3, 1) / 5
    )
