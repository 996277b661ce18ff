"""A small catalogue, a small model and a few clients."""

import numpy as np
import pytest
import seeding
from catalogues import catalogue_of, named


class World:
    """Seven words a topic, two topics, twelve news; clients with five clicks of history."""

    length, samples, num_basis, dim = 5, 2, 3, 6

    def __init__(self):
        from tfdp_rec.federated.cohort import Client

        rng = np.random.default_rng(4)
        topics = np.array([0, *([1] * 6), *([2] * 6)], dtype="int32")
        words = rng.integers(2, 9, size=(13, 4)) + 7 * (topics[:, None] - 1)
        words[0] = 0
        self.features = {"title": words.astype("int32"), "category": topics}
        self.catalogue = catalogue_of(self.features | {"subcategory": topics, "body": self.features["title"]})
        self.clients = [
            Client(
                named(*rng.integers(1, 13, size=5).tolist()),
                tuple((named(*rng.permutation(np.arange(1, 13))[:8].tolist()), int(rng.integers(8))) for _ in range(2)),
            )
            for _ in range(6)
        ]

    def model(self, seed=0, temperature=0.2, user="nrms"):
        from tfdp_rec.models import news

        seeding.seed(seed)
        model = news.NewsRecommender(
            news.NRMSEncoder(24, 8, self.dim, num_heads=2, attention_units=4),
            news.user_encoder(user, self.dim, 2, 4),
            self.num_basis,
            temperature=temperature,
        )
        model({"news": self.features, "history": np.ones((1, 5), "int32"), "candidates": np.ones((1, 3), "int32")})
        return model


@pytest.fixture(scope="session")
def world():
    return World()


@pytest.fixture
def eagerly():
    """Operations one by one: nothing to trace, for tests of values alone."""
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)
