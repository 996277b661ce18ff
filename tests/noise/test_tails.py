"""The bound on what a missing tail costs, against the exact divergence of truncated Gaussians."""

import math

import numpy as np
import pytest
from scipy import stats

from tfdp_rec.core.mechanism.noise.box_muller import RADIUS_BITS
from tfdp_rec.noise import truncation_delta


def gaussian_delta(epsilon, shift):
    """The hockey-stick divergence of N(0, I) from N(s, I), |s| = shift, in closed form."""
    half = shift / 2
    return stats.norm.cdf(half - epsilon / shift) - math.exp(epsilon) * stats.norm.cdf(-half - epsilon / shift)


def truncated_delta(epsilon, shift, bits, points=3001):
    """The same for the pair conditioned on the disc of that many bits, by summation over a fine grid."""
    end = math.sqrt(2 * bits * math.log(2))
    axis = np.linspace(-end - shift, end + shift, points)
    x, y = axis[:, None], axis[None, :]
    density = lambda u: np.where(u**2 + y**2 <= end**2, np.exp(-(u**2 + y**2) / 2), 0.0)  # noqa: E731
    excess = np.maximum(density(x) - math.exp(epsilon) * density(x - shift), 0.0)
    return float(excess.sum() / density(x).sum())


@pytest.mark.fast_cases(
    "0.5-0.1-3", "0.5-0.5-6", "0.5-1.0-10", "2.0-0.1-10", "2.0-0.5-6", "2.0-1.0-3", "5.0-0.1-10", "5.0-0.5-3",
    "5.0-1.0-6",
)  # fmt: skip
@pytest.mark.parametrize("bits", [3, 6, 10])
@pytest.mark.parametrize("shift", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 5.0])
def test_bound_holds_for_one_pair(bits, shift, epsilon):
    without = gaussian_delta(epsilon, shift)
    increase = truncated_delta(epsilon, shift, bits) - without
    bound = truncation_delta(bits, 1 / shift, participations=1, coordinates=2, delta=without)
    assert increase <= bound
    if epsilon == 5.0:  # here truncation is nearly all of delta, and the bound is not vacuous
        assert without / 10 < increase and bound < 40 * increase


def test_bound_holds_for_many_pairs_shifted_alike():
    """Each of m pairs is shifted by mu / sqrt(m); their chance to leave the disc, exactly, against the bound."""
    bits, mu = 12, 1.0
    end = math.sqrt(2 * bits * math.log(2))
    for pairs in (1, 10, 1000, 100_000):
        shift = mu / math.sqrt(pairs)
        axis = np.linspace(-end, end, 4001)
        x, y = axis[:, None], axis[None, :]
        crescent = (x**2 + y**2 <= end**2) & ((x - shift) ** 2 + y**2 > end**2)
        mass = float(np.sum(np.where(crescent, np.exp(-(x**2 + y**2) / 2), 0))) * (axis[1] - axis[0]) ** 2
        assert pairs * mass / (2 * math.pi) <= truncation_delta(bits, 1 / mu, 1, 2 * pairs)


def test_sixty_four_bits_are_enough_and_a_float_is_not():
    """A million weights moved, ten thousand steps, at the noise levels people train with."""
    assert truncation_delta(RADIUS_BITS, 1.0, 10_000, 1_000_000) < 1e-10
    assert truncation_delta(RADIUS_BITS, 0.6, 10_000, 1_000_000) < 1e-8
    assert truncation_delta(32, 1.0, 10_000, 1_000_000) > 1e-3
    assert truncation_delta(-math.log2(1e-7), 1.0, 10_000, 1_000_000) == 1.0
    assert truncation_delta(23, 1.0, 10**6, 10**9, delta=1e-6) == 1.0 - 1e-6


def test_bound_grows_with_everything_that_makes_it_worse():
    base = truncation_delta(40, 1.0, 1000, 10_000)
    assert 0 < base < truncation_delta(39, 1.0, 1000, 10_000)
    assert base < truncation_delta(40, 0.9, 1000, 10_000)
    assert base < truncation_delta(40, 1.0, 1001, 10_000)
    assert base < truncation_delta(40, 1.0, 1000, 20_000)
    assert base < truncation_delta(40, 1.0, 1000, 10_000, delta=1e-5)
    assert truncation_delta(10, 0.1, 1, 2, delta=0.25) == 0.75


@pytest.mark.parametrize(
    "arguments, name",
    [
        ((0, 1.0, 1, 1), "bits"),
        ((64, 0.0, 1, 1), "noise_multiplier"),
        ((64, 1.0, -1, 1), "participations"),
        ((64, 1.0, 1, 0), "coordinates"),
        ((64, 1.0, 1, 1, 1.0), "delta"),
    ],
)
def test_bad_arguments_are_named(arguments, name):
    with pytest.raises(ValueError, match=name):
        truncation_delta(*arguments)
