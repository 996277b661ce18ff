"""Sums on the grid: one user's share is at most 1 in whole numbers, and the noise has the size claimed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tfdp_rec.core.mechanism.noise.words import gaussian, os_entropy, seeded
from tfdp_rec.sums.fixed_point import ONE, check_noise, grid_weights, release_pairs, release_sums

UNLIKELY = 6.0  # standard errors: two-sided chance 2e-9


@given(st.integers(1, 10**5 * (10**5 - 1) // 2))
def test_a_weight_is_as_large_as_it_may_be_and_no_larger(pieces):
    (weight,) = grid_weights(np.array([pieces])).tolist()
    assert pieces * weight**2 <= ONE**2 < pieces * (weight + 1) ** 2


def test_who_gives_to_nothing_gives_nothing():
    assert grid_weights(np.array([0, 0, 1])).tolist() == [0, 0, ONE]


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.99, False), (1.01, False)])
def test_noise_has_its_size_and_is_normal(error, accepted):
    sigma, size = 2.5, 2**19
    total = np.full(size, 7 * ONE, np.int64)
    drawn = (release_sums(total, sigma, seeded(3)) - 7) / (error * sigma)
    assert abs(drawn.mean()) < UNLIKELY / size**0.5
    assert (abs(np.mean(drawn**2) - 1) < UNLIKELY * (2 / size) ** 0.5) == accepted


def test_noise_is_normal():
    drawn = release_sums(np.zeros(2**17, np.int64), 0.7, seeded(5)) / 0.7
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    assert stats.kstest(drawn / 1.05, "norm").pvalue < 1e-6  # and would be seen, were it not


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.99, False), (1.01, False)])
def test_each_pair_has_one_noise_of_its_own(error, accepted):
    size, sigma = 700, 1.5
    noisy = release_pairs(np.zeros((size, size), np.int64), sigma, seeded(4))
    assert (noisy == noisy.T).all() and not np.diag(noisy).any()
    drawn = noisy[np.triu_indices(size, 1)].astype(np.float64) / (error * sigma)
    assert len(np.unique(drawn)) > 0.95 * len(drawn)  # float32 and the grid make a few alike
    assert (abs(np.mean(drawn**2) - 1) < UNLIKELY * (2 / len(drawn)) ** 0.5) == accepted
    along = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(along) < UNLIKELY / len(drawn) ** 0.5


def test_each_value_is_half_the_sum_of_four():
    """One Gaussian alone has gaps in its tails that are wider than the grid."""
    drawn = seeded(6)
    four = [gaussian(drawn, (5,)) for _ in range(4)]
    expected = np.floor(sum(four) / 2 * ONE + 0.5) / ONE
    assert release_sums(np.zeros(5, np.int64), 1.0, seeded(6)).tolist() == expected.tolist()


def test_what_is_released_is_on_the_grid_whatever_is_released():
    """Lowest bits tell nothing: the answer is a whole number of grid steps, and the sum only shifts it."""
    total = np.array([0, 1, 12_345_678, -5, 2**40], np.int64)
    steps = release_sums(total, 0.7, seeded(1)) * ONE
    assert (steps == np.rint(steps)).all()
    assert (steps - total == release_sums(np.zeros(5, np.int64), 0.7, seeded(1)) * ONE).all()


def test_the_operating_system_decides_unless_told_otherwise():
    nothing = np.zeros((40, 40), np.int64)
    assert not np.array_equal(release_pairs(nothing, 1.0), release_pairs(nothing, 1.0))
    assert os_entropy in release_pairs.__defaults__ and os_entropy in release_sums.__defaults__


def test_pairs_keep_what_was_counted_above_the_diagonal_alone(monkeypatch):
    from tfdp_rec.sums import fixed_point

    monkeypatch.setattr(fixed_point, "_AT_ONCE", 7)  # several blocks
    total = np.arange(25).reshape(5, 5) * ONE
    got = release_pairs(total, 1e-9, seeded(0))
    expected = np.triu(np.arange(25).reshape(5, 5), 1)
    np.testing.assert_allclose(got, expected + expected.T, atol=1e-5)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), 2.0**20])
def test_no_noise_is_no_noise(wrong):
    with pytest.raises(ValueError, match="noise_multiplier must be positive"):
        check_noise(wrong)
