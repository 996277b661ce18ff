"""The contestant that is not trained: `SpectralRecommender` on the histories of the training users.

It is a release of its own, of the run's (ε, δ), and takes nothing from the prior that two-towers start from: either of
them is private by itself, and who lets out both pays for both. It is made once, before anything is trained. A run that
is kept pays for it in a ledger of its own before the histories are read, and keeps what came out; it is never made
again.
"""

from __future__ import annotations

import numpy as np

from tfdp_rec.data import Timelines
from tfdp_rec.datasets.histories import Histories
from tfdp_rec.movies import contestants
from tfdp_rec.movies.tested import Scores, Tests
from tfdp_rec.movies.trained import Trained
from tfdp_rec.spectral import SpectralRecommender

LABEL = "spectral release"
_EXACT_HEAD = 3000  # movies that the peer without noise has rows for; dense algebra on more takes minutes
_HARDLY = 1e-3  # its noise


def unfitted(timelines: Timelines, epsilon: float, delta: float, recency: float) -> SpectralRecommender:
    """The private one, before it has looked at anything.

    Args:
        timelines: whose catalogue.
        epsilon: its budget.
        delta: δ.
        recency: see `SpectralRecommender`.
    """
    return SpectralRecommender(timelines.movie_ids, epsilon, delta, recency=recency)


def without_noise(timelines: Timelines, users: np.ndarray, delta: float, recency: float) -> SpectralRecommender:
    """The same arithmetic on the same users, as good as exact: no privacy.

    Args:
        timelines: of all users.
        users: who are counted.
        delta: δ, which does not matter.
        recency: see `SpectralRecommender`.
    """
    head = min(_EXACT_HEAD, timelines.num_movies)
    peer = SpectralRecommender(timelines.movie_ids, None, delta, noise_multiplier=_HARDLY, head=head, recency=recency)
    return peer.fit(Histories.of_timelines(timelines, users), verbose=0)


def scores(recommender: SpectralRecommender) -> Scores:
    """What it is tested by.

    Args:
        recommender: fitted.
    """
    raw = np.concatenate([[0], recommender.catalogue.ids])
    return lambda context: recommender.scores([raw[movies[movies > 0]] for movies in context])


def tested(recommender: SpectralRecommender, name: str, tests: Tests) -> Trained:
    """What it is worth, and what it cost if it is the private one."""
    means = tests.measured(scores(recommender))
    if not contestants.named(name).claims_epsilon:
        return Trained(recommender, means)
    return Trained(recommender, means, recommender.epsilon, recommender.statement(), recommender.noise_multiplier)
