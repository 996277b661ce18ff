"""Noise for plain arrays: its law, a wrong scale rejected, never the same twice, and what floats would tell."""

import numpy as np
import pytest
from scipy import stats

import tfdp_rec
from tfdp_rec.core.mechanism.noise.words import draw_without_gaps, gaussian, os_entropy, seeded
from tfdp_rec.noise import release

DRAWS = 300_000
UNLIKELY = 6.0  # standard errors: two-sided chance 2e-9


@pytest.mark.parametrize("scale, accepted", [(1.0, True), (0.98, False), (1.02, False)])
@pytest.mark.parametrize("sensitivity, sigma", [(1.0, 1.0), (0.37, 2.9), (5.0, 40.0)])
def test_the_noise_of_a_release_is_gaussian_and_of_its_scale(scale, accepted, sensitivity, sigma):
    noisy = release(np.full(DRAWS, 17.3), sensitivity=sensitivity, noise_multiplier=sigma)
    values = scale * (noisy - 17.3) / (sensitivity * sigma)
    assert (abs(np.mean(values**2) - 1) < UNLIKELY * np.sqrt(2 / DRAWS)) == accepted
    if accepted:
        assert abs(np.mean(values)) < UNLIKELY / np.sqrt(DRAWS)
        assert abs(np.mean(values[1:] * values[:-1])) < UNLIKELY / np.sqrt(DRAWS)
        assert stats.kstest(values, "norm").pvalue > 1e-9


def test_both_tails_are_there():
    values = gaussian(seeded(5), (DRAWS,))
    for side in (values, -values):
        expected = stats.norm.sf(3.0) * DRAWS
        assert abs(np.sum(side > 3.0) - expected) < UNLIKELY * np.sqrt(expected)
    assert stats.kstest(values, "norm").pvalue > 1e-7 and stats.kstest(1.05 * values, "norm").pvalue < 1e-7


def test_two_draws_differ():
    asked = {"sensitivity": 1.0, "noise_multiplier": 1.0}
    assert not np.array_equal(release(np.zeros((4, 3)), **asked), release(np.zeros((4, 3)), **asked))
    assert release([], **asked).shape == (0,) and release(3, **asked).shape == ()


# What is released is on a grid that the exact numbers do not decide.


def on_their_grid(values, scale):
    steps = values / 2.0 ** (np.floor(np.log2(scale)) - 20)
    return bool((steps == np.round(steps)).all())


@pytest.mark.parametrize("exact", [0.0, 1.0, 1 / 3, 1e-9, 12345.678, -4e5, 3.0e9])
@pytest.mark.parametrize("sensitivity, sigma", [(1.0, 4.0), (0.3, 1.7), (1e-6, 1.0), (7.0, 3e4)])
def test_neighbours_are_released_on_one_grid(exact, sensitivity, sigma):
    asked = {"sensitivity": sensitivity, "noise_multiplier": sigma}
    for value in (exact, exact + sensitivity, exact + np.float64(sensitivity) / 3):
        noisy = release(np.full(200, value), **asked)
        assert on_their_grid(noisy, sensitivity * sigma)
    unhidden = exact / 2**40 + sensitivity * sigma * gaussian(os_entropy, (200,))
    assert not on_their_grid(unhidden, sensitivity * sigma)


def test_the_last_bits_of_a_released_count_tell_nothing():
    """Membership: of 2,000 counts, one of which a user makes 1 where it was 0, a float of noise told in each of 300."""
    rng = np.random.default_rng(3)

    def certain(noisy):
        # A float of s z added to a count c is on the coarser of the two numbers' spacings. A value near 0 on a finer
        # spacing than that of any noise near -c comes from c = 0.
        fine = np.spacing(1.0) / 2  # of noise between 1/2 and 1
        off = noisy / fine
        return (np.abs(noisy) < 0.5) & (off != np.round(off))

    counts = rng.integers(0, 2, 2000).astype(float)
    plain = [certain(counts + gaussian(os_entropy, (2000,)) * 4.0) for _ in range(100)]
    assert all(found.any() for found in plain) and not any((found & (counts == 1)).any() for found in plain)
    for _ in range(100):
        assert not certain(release(counts, sensitivity=1.0, noise_multiplier=4.0)).any()


def test_every_step_of_the_grid_is_reached_from_either_neighbour():
    """The last places are even, for exact numbers that lie anywhere between two steps."""
    for exact in (0.0, 0.3, 2.0**-21, 1.0):
        noisy = release(np.full(DRAWS, exact), sensitivity=1.0, noise_multiplier=1.0)
        steps = (noisy * 2.0**20).astype(np.int64)
        assert stats.chisquare(np.bincount(steps % 16, minlength=16)).pvalue > 1e-7
        odd = release(np.full(2000, exact), sensitivity=1.0, noise_multiplier=1.0, source=seeded(1))
        np.testing.assert_array_equal(
            odd, np.round((exact + draw_without_gaps(seeded(1), (2000,))) * 2.0**20) / 2.0**20
        )


@pytest.mark.parametrize("name", ["sensitivity", "noise_multiplier"])
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, 0.0, -1.0, 5e-324])
def test_what_hides_nothing_is_refused(name, wrong):
    with pytest.raises(ValueError, match="sensitivity and noise_multiplier"):
        release([1.0], **{"sensitivity": 1.0, "noise_multiplier": 1.0, name: wrong})
    with pytest.raises(ValueError, match="finite"):
        release([1.0, np.nan], sensitivity=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize("number", [2**62 + 512, 1_764_313_200_000_000_128, -(2**53) - 1, 2**64 - 1, 2**70 + 1])
def test_a_whole_number_that_a_float_would_round_is_refused(number):
    """Of sums of nanoseconds, one that a user moves by 1 would be released 256 away, under noise of 4."""
    for values in ([number], [0, number]) if number < 2**63 else ([number],):
        with pytest.raises(ValueError, match="finite"):
            release(values, sensitivity=1.0, noise_multiplier=4.0)
    assert release([2**53 - 1, 1 - 2**53], sensitivity=1.0, noise_multiplier=4.0).shape == (2,)


def test_gaussians_to_add_by_hand_are_not_offered():
    assert not hasattr(tfdp_rec.noise, "gaussians")
