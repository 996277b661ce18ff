"""A recommender of small numbers, exported in ids of text and of whole numbers."""

import numpy as np
import pytest

from tfdp_rec.data import Items
from tfdp_rec.serving import export
from tfdp_rec.spectral import SpectralRecommender

MANY = 60


def words(seed):
    rng = np.random.default_rng(seed)
    return lambda count: rng.integers(0, 2**64, count, np.uint64)


@pytest.fixture(scope="package")
def recommender():
    rng = np.random.default_rng(0)
    tastes = [1 + (u % 6) * 10 + rng.permutation(10)[:5] for u in range(900)]
    return SpectralRecommender(np.arange(1, MANY + 1), 6.0, 1e-4, head=25, recency=0.25, words=words(3)).fit(tastes, 0)


@pytest.fixture(scope="package")
def items():
    return Items([f"item {i}" for i in range(1, MANY + 1)])


@pytest.fixture(scope="package")
def exported(recommender, items, tmp_path_factory):
    """A run folder."""
    folder = tmp_path_factory.mktemp("run")
    export(str(folder / "servable"), recommender, items, {"item 3": "Third\n of all", "item 4": "Øl"}, k=4)
    return folder
