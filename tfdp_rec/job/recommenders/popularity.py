"""Popularity: counted exactly, to compare with; and counted under differential privacy, the prior of two-towers."""

from __future__ import annotations

import numpy as np

from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.job.user_subset import UserSubset
from tfdp_rec.sums.counts import Counted, private_counts

_TYPICAL = 20  # items of a user: what the prior's counts expect


class Prior:
    """Popularity of each item, as it is kept."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def write(self, file: object) -> None:
        """Writes it into an open file."""
        np.save(file, self.values)  # type: ignore[arg-type]


def noisy_popularity(log: Interactions, users: np.ndarray, noise_multiplier: float) -> Counted:
    """Popularity of each item among some users, up to scale, under DP, all of it positive; and what that cost."""
    counts, event = private_counts(
        UserSubset(log, users), log.catalogue, noise_multiplier=noise_multiplier, typical=_TYPICAL
    )
    # Items that the noise hides share what is left of the noise above zero, about 0.4 of its standard deviation.
    return Counted(np.maximum(counts, 0.0) + 0.25 * noise_multiplier + 0.1, event)
