"""Exposure against its definition, and the skew-normal tail against quadrature in high precision."""

import mpmath
import numpy as np
import pytest
from scipy import stats

from tfdp_rec.audit.exposure import (
    exposure_extrapolation,
    exposure_interpolation,
    skew_normal_fit_error,
    skew_normal_log_cdf,
)


def exposure_by_definition(loss, references):
    return np.log2(len(references)) - np.log2(1 + sum(reference < loss for reference in references))


def test_interpolation_is_the_definition():
    rng = np.random.default_rng(1)
    canaries, references = rng.normal(size=60), rng.normal(size=300)
    expected = [exposure_by_definition(loss, references) for loss in canaries]
    np.testing.assert_allclose(exposure_interpolation(canaries, references), expected, rtol=1e-12)


def test_a_canary_better_than_all_references_has_the_greatest_exposure():
    references = np.random.default_rng(2).normal(size=16_384)
    assert exposure_interpolation([-100.0], references).tolist() == [14.0]
    assert exposure_interpolation([100.0], references)[0] == pytest.approx(-np.log2(16_385 / 16_384))


def test_groups_keep_keys_and_order():
    references = np.arange(8.0)
    grouped = exposure_interpolation({1: [6.5, -1.0], 100: [0.5]}, references)
    assert list(grouped) == [1, 100]
    assert grouped[1].tolist() == [3 - 3.0, 3.0] and grouped[100].tolist() == [2.0]


def test_ties_count_one_half_each():
    """A model that cannot tell sequences apart exposes nothing, whichever way a sort would break ties."""
    assert exposure_interpolation([5.0], np.full(1024, 5.0))[0] == pytest.approx(1.0, abs=0.01)
    assert exposure_interpolation([2.0], [1.0, 2.0, 2.0, 3.0])[0] == pytest.approx(2 - np.log2(3))


def test_unplanted_secrets_have_exposure_one_in_the_median_and_halve_from_there():
    rng = np.random.default_rng(3)
    exposures = exposure_interpolation(rng.normal(size=20_000), rng.normal(size=4096))
    for threshold in (1, 2, 4):
        assert np.mean(exposures > threshold) == pytest.approx(2.0**-threshold, abs=0.02)
    planted = exposure_interpolation(rng.normal(-1.0, size=20_000), rng.normal(size=4096))
    assert np.median(planted) > 2  # the same statistic does see a shift of one standard deviation


@pytest.mark.parametrize("shape", [-30.0, -0.5, 0.0, 1e-3, 3.0, 30.0])
@pytest.mark.parametrize("z", [-20.0, -3.1, -2.9, 0.0])
def test_log_cdf_against_high_precision(shape, z):
    with mpmath.workdps(30):

        def density(t):
            return 2 * mpmath.npdf(t) * mpmath.ncdf(shape * t)

        # the step of width 1 / |shape| at zero needs panels of its own
        near = {z - 2.0**-k for k in range(-5, 12)} | {x for x in (-1, -0.3, -0.1, -0.03, 0, 0.1) if x < z}
        expected = float(mpmath.log(mpmath.quad(density, [*sorted(near), z])))
    assert skew_normal_log_cdf(z, shape) == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_extrapolation_finds_the_distribution_it_was_drawn_from():
    references = stats.skewnorm(3.0, loc=8.0, scale=1.5).rvs(size=16_384, random_state=4)
    assert skew_normal_fit_error(references) < 0.01
    losses = np.array([7.0, 8.0, 9.0])
    expected = -stats.skewnorm(3.0, loc=8.0, scale=1.5).logcdf(losses) / np.log(2)
    np.testing.assert_allclose(exposure_extrapolation(losses, references), expected, rtol=0.08)


def test_extrapolation_orders_canaries_beyond_all_references():
    references = np.random.default_rng(5).normal(10, 1, size=4096)
    exposures = exposure_extrapolation([0.0, 2.0, 4.0, -40.0], references)
    assert exposures[3] > exposures[0] > exposures[1] > exposures[2] > 12
    assert np.all(np.isfinite(exposures))


def test_both_agree_where_both_apply():
    rng = np.random.default_rng(6)
    references, canaries = rng.normal(size=16_384), rng.normal(-1, 1, size=200)
    inside = canaries > np.quantile(references, 0.005)
    difference = exposure_extrapolation(canaries, references) - exposure_interpolation(canaries, references)
    assert np.max(np.abs(difference[inside])) < 0.35


@pytest.mark.parametrize("function", [exposure_interpolation, exposure_extrapolation])
def test_bad_losses_are_refused(function):
    good = np.arange(20.0)
    for canaries, references, words in [
        ([np.nan], good, "canary_losses must be finite"),
        ([1.0], [*good, np.inf], "reference_losses must be finite"),
        ([1.0], [], "reference_losses"),
        ({3: []}, good, "canary_losses"),
        ([[1.0]], good, "shape"),
    ]:
        with pytest.raises(ValueError, match=words):
            function(canaries, references)


def test_a_fit_needs_spread_and_enough_references():
    with pytest.raises(ValueError, match="all equal"):
        exposure_extrapolation([1.0], np.ones(100))
    with pytest.raises(ValueError, match="at least 8"):
        exposure_extrapolation([1.0], [1.0, 2.0])
