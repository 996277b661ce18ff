"""The main job's own release before training: popularity under noise of the size that its event claims."""

import numpy as np
import pytest

from tfdp_rec.datasets.timelines import Timelines
from tfdp_rec.movies.job import noisy_popularity

MOVIES = 200_000
UNLIKELY = 6.0  # standard errors: two-sided chance 2e-9


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.95, False), (1.05, False)])
def test_movies_that_nobody_watched_show_the_noise(error, accepted):
    """What is left of N(0, σ²) above zero has mean square σ²/2, and that has variance 5/4 σ⁴."""
    nobody = Timelines([], [0, 0], [1], np.arange(1, MOVIES + 1), [""] * MOVIES)
    sigma = 3.0
    released, event = noisy_popularity(nobody, np.array([0]), sigma)
    above = (released - 0.25 * sigma - 0.1) / (error * sigma)
    assert above.min() >= -1e-9
    assert (abs(np.mean(above**2) - 0.5) < UNLIKELY * np.sqrt(1.25 / MOVIES)) == accepted
    assert event.noise_multiplier == sigma
    assert not np.array_equal(released, noisy_popularity(nobody, np.array([0]), sigma).values)


def test_what_many_watched_stays_visible():
    watched = Timelines([2] * 500, range(501), range(500), [7, 8], ["A", "B"])
    released = noisy_popularity(watched, np.arange(500), 1.0).values
    assert abs(released[1] - 500.35) < 8 and 0 < released[0] < 8
