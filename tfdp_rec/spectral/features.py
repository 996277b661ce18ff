"""Public features of items: what the features of a history tell of other items. It costs no ε.

Item j has the vector x_j: √log(M / M_f) for each of its features f, M_f the number of items that have it, of M, scaled
to length 1; so rare features count most. Those of all items, or of one alone, tell nothing and are left out. p is the
mean of x over the items of a history, by their weights, and p̄ the mean of x over what users have, by μ. Two items that
users have are alike by ‖p̄‖² on average. Scores get, beside the rest,

    μ_j (p - p̄)·x_j / ‖p̄‖²

times a weight (`rules.py`). So an item that is twice as like the history as items usually are rises by its popularity,
and what sums and features tell adds up. Items and histories without features are left as they are. Items that no user
has are ranked by their features alone: their μ is that of the noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse


def item_vectors(features: Sequence[Iterable[Any]], num_items: int) -> sparse.csr_matrix:
    """x of all items, `[items, features]`, from the features of each, of any hashable kind."""
    if len(features) != num_items:
        raise ValueError(
            f"features must be given for each of the {num_items} items, in their order; got {len(features)}."
        )
    text = next((each for each in features if isinstance(each, str | bytes)), None)
    if text is not None:
        raise ValueError(f"features of an item must be a list, such as [{text[:30]!r}], not a text.")
    numbers: dict[Any, int] = {}
    places = [{numbers.setdefault(feature, len(numbers)) for feature in each} for each in features]
    has = sparse.csr_matrix(
        (
            np.ones(sum(map(len, places)), np.float32),
            np.array([place for each in places for place in sorted(each)], np.int64),
            np.cumsum([0, *map(len, places)]),
        ),
        (num_items, len(numbers)),
    )
    number = has.getnnz(axis=0)
    kept = (number > 1) & (number < num_items)
    vectors = has[:, kept]
    squares = np.log(num_items / number[kept])[vectors.indices]
    rows = np.repeat(np.arange(num_items), np.diff(vectors.indptr))
    vectors.data = np.sqrt(squares / np.bincount(rows, squares, minlength=num_items)[rows]).astype(np.float32)
    return vectors


def mean_vector(vectors: sparse.csr_matrix, shares: NDArray[np.floating]) -> NDArray[np.float32]:
    """p̄, the mean of x by μ."""
    return np.asarray(vectors.T @ (shares / shares.sum()), np.float32)


def likeness(
    vectors: sparse.csr_matrix, shares: NDArray[np.float32], weights: sparse.csr_matrix
) -> NDArray[np.float32]:
    """What features add to the scores of all items, `[histories, items]`."""
    # weights: of all items in each history, `[histories, items]`; shares: μ, times the weight of features
    mean = mean_vector(vectors, shares)
    usual = float(mean @ mean)
    has = (vectors.getnnz(axis=1) > 0).astype(np.float32)
    total = weights @ has
    apart = (weights @ vectors).toarray() - total[:, None] * mean
    scale = np.divide(1 / usual if usual else 0.0, total, out=np.zeros(len(total), np.float32), where=total > 0)
    return (vectors @ (scale[:, None] * apart).T).T * shares


def arrays_of(vectors: sparse.csr_matrix | None) -> dict[str, Any]:
    """The arrays of a file, for `vectors_of`."""
    if vectors is None:
        return {}
    return {"features": vectors.data, "features_places": vectors.indices, "features_ends": vectors.indptr}


def vectors_of(file: Mapping[str, Any]) -> sparse.csr_matrix | None:
    """The inverse of `arrays_of`; None where a file has no features."""
    if "features" not in file:
        return None
    data, places, ends = file["features"], file["features_places"], file["features_ends"]
    return sparse.csr_matrix((data, places, ends), (len(ends) - 1, int(places.max(initial=-1)) + 1))
