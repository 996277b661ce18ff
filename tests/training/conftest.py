"""Eager DP-SGD, the oracle of the tests of release."""

import numpy as np
import pytest
from settling import batches, model_of

import tfdp_rec


@pytest.fixture(scope="session")
def eager_tables():
    """The table after each step of eager DP-SGD."""
    model, tables = model_of(tfdp_rec.DPSGD), []
    for x, y in batches():
        model.train_on_batch(x, y)
        tables.append(np.array(model.layers[1].embeddings))
    return tables
