"""Every noise source: shapes, the Gaussian law, independence; and that the tests notice when one is wrong."""

import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfdp_rec.core.mechanism.noise import gaussian
from tfdp_rec.core.mechanism.noise.box_muller import gaussian_pairs
from tfdp_rec.core.mechanism.noise.threefry import threefry
from tfdp_rec.noise import EntropyNoise, KeyedNoise, Request, SecureNoise

SOURCES = {
    "entropy": EntropyNoise,
    "entropy, not compiled": lambda: EntropyNoise(jit_compile=False),
    "keyed": lambda: KeyedNoise(11),
    "secure": SecureNoise,
}
COMPILED = ["entropy", "keyed", "secure"]
STEP = tf.constant(5, tf.int64)
BOUND = 6.0  # standard errors: two-sided chance 2e-9 a comparison


def draw(source, rows, width, variable=0, step=5):
    rows = tf.range(rows, dtype=tf.int64) if isinstance(rows, int) else tf.constant(rows, tf.int64)
    return source.normal(variable, rows, tf.constant(step, tf.int64), width).numpy()


# Detectors: each returns what is wrong with a sample, in words.


def law_defects(sample):
    """Moments, Kolmogorov-Smirnov and tail counts of a large sample against N(0, 1)."""
    x = np.asarray(sample, np.float64).ravel()
    expected = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}  # of x^k: mean and variance
    found = []
    for power, (mean, variance) in expected.items():
        score = (np.mean(x**power) - mean) / math.sqrt(variance / x.size)
        if abs(score) > BOUND:
            found.append(f"moment {power} is off by {score:.1f} standard errors")
    p_value = stats.kstest(x[:500_000], "norm").pvalue
    if p_value < 1e-8:
        found.append(f"Kolmogorov-Smirnov p = {p_value:.1e}")
    for end in (2.0, 3.0, 4.0, 4.5):
        for side, count in (("above", np.sum(x > end)), ("below", np.sum(x < -end))):
            mean = x.size * stats.norm.sf(end)
            if min(stats.poisson.cdf(count, mean), stats.poisson.sf(count - 1, mean)) < 1e-9:
                found.append(f"{count} values {side} {end}, expected {mean:.0f}")
    return found


def dependence_defects(rows):
    """Correlation of any two rows, of neighbouring columns at small lags, and of their squares."""
    x = np.asarray(rows, np.float64)
    found = []
    for name, y, variance in (("values", x, 1.0), ("squares", x**2 - 1, 2.0)):
        scores = y @ y.T / (variance * math.sqrt(x.shape[1]))
        np.fill_diagonal(scores, 0.0)
        # Products of squares have heavy tails: the bound is that of a maximum over 10^4 pairs, and generous.
        if np.abs(scores).max() > 9.0:
            found.append(f"{name} of two rows correlate by {np.abs(scores).max():.1f} standard errors")
        for lag in (1, 2, 3, 64):
            a, b = y[:, :-lag].ravel(), y[:, lag:].ravel()
            score = float(a @ b) / (variance * math.sqrt(a.size))
            if abs(score) > BOUND:
                found.append(f"{name} at lag {lag} correlate by {score:.1f} standard errors")
    return found


def pair_defects(x, y):
    """Neighbours (x, y): angle uniform, x^2 + y^2 exponential, and the two independent."""
    turn = np.arctan2(y, x) / (2 * math.pi) % 1.0
    level = np.exp(-(x.astype(np.float64) ** 2 + y.astype(np.float64) ** 2) / 2)
    found = [
        f"{name} is not uniform, p = {p:.1e}"
        for name, p in (
            ("angle", stats.kstest(turn, "uniform").pvalue),
            ("radius", stats.kstest(level, "uniform").pvalue),
        )
        if p < 1e-8
    ]
    table = np.histogram2d(turn, level, bins=32, range=[[0, 1], [0, 1]])[0]
    p = stats.chi2.sf(np.sum((table - table.mean()) ** 2) / table.mean(), table.size - 1)
    return found + ([f"angle and radius depend, p = {p:.1e}"] if p < 1e-8 else [])


@pytest.fixture(scope="module", params=COMPILED)
def sample(request):
    """2 million values of one source, [100, 20_000]."""
    return draw(SOURCES[request.param](), 100, 20_000)


def test_law_of_a_large_sample(sample):
    assert not law_defects(sample)


def test_rows_and_columns_are_independent(sample):
    assert not dependence_defects(sample)


def test_pairs_of_the_transform_are_independent(sample):
    x, y = sample[:50, 0::2].ravel(), sample[:50, 1::2].ravel()
    assert not pair_defects(x, y)


def test_law_without_the_compiler():
    x = draw(SOURCES["entropy, not compiled"](), 100, 2_000)
    assert not law_defects(x) + dependence_defects(x) + pair_defects(x[:, 0::2].ravel(), x[:, 1::2].ravel())


@pytest.mark.slow_cases("entropy-1.03", "keyed-0.97")
@pytest.mark.parametrize("scale", [0.97, 1.03])
def test_a_wrong_scale_is_noticed(sample, scale):
    assert len(law_defects(scale * sample)) >= 4


def test_a_cut_tail_is_noticed(sample):
    assert law_defects(np.clip(sample, -4.0, 4.0))


def test_shared_noise_is_noticed(sample):
    shared = sample[:, :4000].copy()
    shared[17] = shared[3]
    assert dependence_defects(shared)
    mixed = sample[:, :4000].copy()
    mixed[17] = 0.3 * mixed[3] + math.sqrt(1 - 0.3**2) * mixed[17]
    assert dependence_defects(mixed)


def test_a_dependent_pair_is_noticed(sample):
    x, y = sample[:, 0::2].ravel()[:200_000], sample[:, 1::2].ravel()[:200_000]
    assert pair_defects(x, np.abs(y))
    assert pair_defects(x, 0.1 * x + math.sqrt(1 - 0.1**2) * y)


@pytest.mark.parametrize("name", SOURCES)
def test_shapes_eager_and_traced(name):
    source, width = SOURCES[name](), 3
    traced = tf.function(
        lambda rows: source.normal(1, rows, STEP, width),
        input_signature=[tf.TensorSpec([None], tf.int64)],
        autograph=False,
    )
    for count in (0, 1, 2, 700):
        rows = tf.range(count, dtype=tf.int64)
        for values in (source.normal(1, rows, STEP, width), traced(rows)):
            assert values.dtype == tf.float64
            assert values.shape == (count, width)
            assert np.isfinite(values).all()
            # Nothing drawn twice; but of 2,100 float32 numbers two are equal once in 27 times.
            assert len(np.unique(values)) >= count * width - max(1, count * width // 100)
    assert draw(source, 5, 1).shape == (5, 1)


@pytest.mark.parametrize("name", COMPILED)
def test_lengths_around_the_internal_block_sizes(name):
    source = SOURCES[name]()
    for count in (4095, 4097, 32_768, 32_769, 65_537, 294_913):
        values = draw(source, count, 1)
        assert values.shape == (count, 1)
        assert abs(values.mean()) * math.sqrt(count) < BOUND
        assert len(np.unique(values)) > 0.9 * count  # float32 has few values near a given one
        assert not np.array_equal(values[: count // 2], values[-(count // 2) :])


@pytest.mark.parametrize("name", COMPILED)
def test_a_loop_in_a_graph_draws_anew(name):
    source = SOURCES[name]()

    @tf.function
    def loop(times):
        out = tf.TensorArray(tf.float64, size=times)
        for i in tf.range(times):
            out = out.write(i, source.normal(0, tf.range(5, dtype=tf.int64), tf.cast(i, tf.int64), 6))
        return out.stack()

    values = loop(tf.constant(40)).numpy()
    assert len(np.unique(values, axis=0)) == 40
    assert len(np.unique(values)) > 0.99 * values.size  # of 1,200 float32 numbers two are equal once in 80 times


@pytest.mark.parametrize("name", SOURCES)
def test_a_function_that_draws_is_traced_once(name):
    source, traces = SOURCES[name](), []

    @tf.function(autograph=False)
    def step():
        traces.append(1)
        return source.normal(0, tf.range(3, dtype=tf.int64), STEP, 4)

    assert not np.array_equal(step(), step()) or name == "keyed"
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["entropy", "secure"])
def test_calls_are_independent(name):
    source = SOURCES[name]()
    calls = np.stack([draw(source, 50, 200, variable=0, step=1).ravel() for _ in range(60)])
    assert not dependence_defects(calls)


def scaled(source, scales, widths):
    """Noise of several variables whose rows have these scales `[n, draws]`, traced, as a mechanism asks for it."""

    @tf.function(autograph=False)
    def ask():
        requests = [
            Request(number, tf.range(len(scale), dtype=tf.int64), width, tf.constant(scale, tf.float32))
            for number, (scale, width) in enumerate(zip(scales, widths))
        ]
        return source.draw(requests, STEP)

    return [np.asarray(found) for found in ask()]


@pytest.mark.fast_cases("entropy", "secure")
@pytest.mark.parametrize("name", SOURCES)
def test_scaled_noise_has_each_row_and_draw_at_its_own_scale(name):
    """Variables of different and of odd widths, one without rows, in one call."""
    widths, shapes = (30_000, 30_001, 30_000, 7), ((3, 1), (2, 2), (4, 1), (0, 1))
    scales = [np.reshape(np.arange(1, 1 + math.prod(shape)) / 4, shape) for shape in shapes]
    found = scaled(SOURCES[name](), scales, widths)
    assert [f.shape for f in found] == [(*shape, width) for shape, width in zip(shapes, widths)]
    unit = np.concatenate([(f / s[:, :, None]).reshape(-1, f.shape[2])[:, :30_000] for f, s in zip(found[:3], scales)])
    assert not law_defects(unit) and not dependence_defects(unit)
    assert all(not law_defects(row) and law_defects(1.1 * row) for row in unit)


@pytest.mark.parametrize("name", COMPILED)
def test_a_scale_of_zero_gives_zero(name):
    (found,) = scaled(SOURCES[name](), [np.array([[0.0], [1.0]])], [5])
    assert np.all(found[0] == 0) and np.all(found[1] != 0)


def test_scaled_keyed_noise_is_the_normal_one_multiplied():
    noise, scale = KeyedNoise(3), np.array([[0.5, 2.0], [1.0, 0.25]], np.float32)
    (found,) = scaled(noise, [scale], [4])
    expected = draw(noise, 2, 8).reshape(2, 2, 4) * scale[:, :, None]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", COMPILED)
def test_requests_of_all_kinds_are_answered_in_their_order(name):
    source, rows = SOURCES[name](), [tf.range(n, dtype=tf.int64) for n in (3, 2, 0, 4)]
    scales = [None, tf.constant([[0.0, 8.0]] * 2), None, tf.fill([4, 1], 0.0)]
    asked = [Request(i, r, width, s) for i, (r, width, s) in enumerate(zip(rows, (5, 3, 7, 5), scales))]
    found = [np.asarray(answer) for answer in source.draw(asked, STEP)]
    assert [f.shape for f in found] == [(3, 1, 5), (2, 2, 3), (0, 1, 7), (4, 1, 5)]
    assert np.all(found[0] != 0) and np.all(found[1][:, 0] == 0) and np.all(found[1][:, 1] != 0) and not found[3].any()
    np.testing.assert_equal(source.draw([], STEP), [])
    if name == "keyed":
        np.testing.assert_array_equal(found[0][:, 0], source.normal(0, rows[0], STEP, 5))


@pytest.mark.parametrize("name", COMPILED)
def test_bits_are_fair_and_independent(name):
    source, rows = SOURCES[name](), tf.range(100_000, dtype=tf.int64)
    words = tf.function(lambda: source.bits(-1, rows, STEP), autograph=False)().numpy()
    assert words.dtype == np.uint64 and len(np.unique(words)) == words.size
    signs = 1.0 - 2.0 * np.unpackbits(words.view(np.uint8)).reshape(-1, 64)
    correlations = signs.T @ signs / math.sqrt(len(signs))
    np.fill_diagonal(correlations, 0.0)
    assert np.abs(signs.sum(axis=0)).max() / math.sqrt(len(signs)) < BOUND
    assert np.abs(correlations).max() < BOUND + 1  # over 2,016 pairs
    assert source.bits(-1, tf.zeros([0], tf.int64), STEP).shape == (0,)


# The parts.


def test_threefry_known_answers():
    """The generator's published test vectors: all zeros, all ones, digits of pi."""
    full = 2**64 - 1
    cases = [
        ([0, 0], [0, 0], [0xC2B6E3A8C2C69865, 0x6F81ED42F350084D]),
        ([full, full], [full, full], [0xE02CB7C4D95D277A, 0xD06633D0893B8B68]),
        (
            [0x243F6A8885A308D3, 0x13198A2E03707344],
            [0xA4093822299F31D0, 0x082EFA98EC4E6C89],
            [0x263C7D30BB0F0AF1, 0x56BE8361D3311526],
        ),
    ]
    for counter, key, answer in cases:
        words = threefry(*(tuple(tf.constant(w, tf.uint64) for w in group) for group in (counter, key)))
        assert [int(w) for w in words] == answer


@pytest.mark.parametrize("word", range(3))
def test_every_word_that_a_draw_is_given_counts(word):
    """128 bits of key and 64 of counter."""
    key = np.array([5, 6, 7], np.uint64)
    other = key.copy()
    other[word] ^= np.uint64(2**63)
    one, two = (gaussian._sample(tf.constant(16), tf.constant(each)).numpy() for each in (key, other))
    assert not np.any(one == two)


def exact_pairs(words):
    """The transform in extended precision, by the library's functions and the plain definition."""
    upper = words[0] >= 2**63
    distance = (np.where(upper, ~words[0], words[0]).astype(np.longdouble) + 0.5) * np.longdouble(2.0) ** -64
    radius = np.sqrt(-2 * np.where(upper, np.log1p(-distance), np.log(distance)))
    eighth = (words[1] % 2**62).astype(np.longdouble) - 2.0**61 + 0.5
    x = eighth * np.arctan(np.longdouble(1)) * np.longdouble(2.0) ** -61
    turned = radius * np.where(words[1] // 2**62 % 2 == 1, -1, 1)
    swap = words[1] >= 2**63
    return turned * np.where(swap, np.sin(x), np.cos(x)), turned * np.where(swap, np.cos(x), np.sin(x))


@pytest.mark.parametrize("compiled", [True, False])
def test_the_transform_is_exact_to_a_few_units_in_the_last_place(compiled):
    generator = np.random.default_rng(3)
    words = generator.integers(0, 2**64, (2, 300_000), dtype=np.uint64)
    words[0, :1000] = generator.integers(0, 1000, 1000)  # the far tail
    words[0, 1000:2000] = 2**64 - 1 - generator.integers(0, 1000, 1000, dtype=np.uint64)  # the smallest radii
    words[0, 2000:2400] = np.repeat(np.array([0, 2**64 - 1, 2**63, 2**63 - 1], np.uint64), 100)
    words[1, 2400:2800] = np.repeat(np.array([0, 2**62 - 1, 2**61, 2**61 - 1], np.uint64), 100)
    kernel = tf.function(lambda *w: gaussian_pairs(w), jit_compile=compiled, autograph=False)
    for found, exact in zip(kernel(*map(tf.constant, words)), exact_pairs(words), strict=True):
        assert np.max(np.abs(found.numpy() - exact) / np.abs(exact)) < 10 * 2.0**-53
        assert not np.any(found.numpy() == 0)


def test_beyond_32_bits_the_tail_has_its_shape():
    """Given that the 32 leading bits of U are 0, 2^32 U is uniform: the Gaussian's own tail beyond 6.7."""
    generator = np.random.default_rng(4)
    words = generator.integers(0, 2**64, (2, 200_000), dtype=np.uint64)
    words[0] >>= 32
    x, y = (v.numpy() for v in gaussian_pairs(tuple(map(tf.constant, words))))
    uniform = np.exp(-(x**2 + y**2) / 2) * 2.0**32
    assert stats.kstest(uniform, "uniform").pvalue > 1e-8
    assert np.sqrt(x**2 + y**2).min() > 6.66
    last = [tf.zeros([1], tf.uint64)] * 2
    assert math.hypot(*(float(v[0]) for v in gaussian_pairs(tuple(last)))) == pytest.approx(9.493, abs=1e-3)


# KeyedNoise: a function of its key.


def test_keyed_noise_does_not_depend_on_company_or_order():
    noise = KeyedNoise(3)
    generator = np.random.default_rng(0)
    whole = draw(noise, 500, 7)
    for _ in range(20):
        rows = generator.integers(0, 500, generator.integers(0, 60))
        np.testing.assert_allclose(draw(noise, rows, 7), whole[rows], rtol=1e-6)
    np.testing.assert_allclose(draw(noise, 500, 3), whole[:, :3], rtol=1e-6)
    np.testing.assert_array_equal(draw(KeyedNoise(3), 500, 7), whole)


def test_keyed_noise_is_independent_across_keys():
    """Keys that differ in one bit of the seed, variable, step or row."""
    rows = [0, 1, 2, 4, 2**31, 2**40]
    draws = [draw(KeyedNoise(3), rows, 3000)]
    draws += [draw(KeyedNoise(3 ^ 1 << bit), rows, 3000) for bit in (0, 1, 31, 63)]
    draws += [draw(KeyedNoise(3), rows, 3000, variable=v) for v in (1, 2, -1, 2**31)]
    draws += [draw(KeyedNoise(3), rows, 3000, step=s) for s in (4, 7, 2**33)]
    table = np.concatenate(draws)
    assert not dependence_defects(table)
    assert not law_defects(table)


@pytest.mark.parametrize("seed", [1.5, "7", None, True])
def test_keyed_noise_refuses_what_is_no_seed(seed):
    with pytest.raises(TypeError, match="seed must be an integer"):
        KeyedNoise(seed)
