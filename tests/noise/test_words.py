"""Gaussians for plain arrays: their law, a wrong scale rejected, and never the same twice."""

import numpy as np
import pytest
from scipy import stats

from tfdp_rec.noise import gaussians
from tfdp_rec.noise.words import gaussian, seeded

DRAWS = 300_000
UNLIKELY = 6.0  # standard errors: two-sided chance 2e-9


@pytest.mark.parametrize("scale, accepted", [(1.0, True), (0.98, False), (1.02, False)])
def test_gaussians_of_the_system_are_unit_and_independent(scale, accepted):
    values = scale * gaussians((DRAWS,))
    assert (abs(np.mean(values**2) - 1) < UNLIKELY * np.sqrt(2 / DRAWS)) == accepted
    if accepted:
        assert abs(np.mean(values)) < UNLIKELY / np.sqrt(DRAWS)
        assert abs(np.mean(values[1:] * values[:-1])) < UNLIKELY / np.sqrt(DRAWS)
        assert stats.kstest(values, "norm").pvalue > 1e-9
        assert len(np.unique(values)) == DRAWS


def test_both_tails_are_there():
    values = gaussian(seeded(5), (DRAWS,))
    for side in (values, -values):
        expected = stats.norm.sf(3.0) * DRAWS
        assert abs(np.sum(side > 3.0) - expected) < UNLIKELY * np.sqrt(expected)
    assert stats.kstest(values, "norm").pvalue > 1e-7 and stats.kstest(1.05 * values, "norm").pvalue < 1e-7


def test_two_draws_differ():
    assert not np.array_equal(gaussians((4, 3)), gaussians((4, 3))) and gaussians((0,)).shape == (0,)
