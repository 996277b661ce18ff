"""Number of users that have two items of the head together: the item-item Gram matrix, in grid steps, exactly.

A user with d ≥ 2 items of the head gives each of the d(d-1)/2 pairs of them the same weight,

    w = 1/√(d(d-1)/2)   (rounded down to the grid: see `tfdp_rec.sums.fixed_point`),

so that one user moves the entries above the diagonal by at most 1 in ℓ₂. Users with fewer items of the head give
nothing, and count as users.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from tfdp_rec.datasets.log import Catalogue, InParts, Part
from tfdp_rec.spectral.pair_sums import Cells, Progress, pair_sums
from tfdp_rec.sums.fixed_point import grid_weights


def grid_gram(
    histories: InParts, catalogue: Catalogue, head: NDArray[np.int64], progress: Progress = lambda users: None
) -> NDArray[np.int64]:
    """The Gram matrix of the head, both halves, its diagonal 0. It has no noise and must not be released."""
    total = pair_sums(histories, catalogue, head, _cells, progress, in_order=False)
    np.fill_diagonal(total, 0)
    return total


def _cells(part: Part, size: int) -> Cells:
    lengths = part.lengths
    weights = grid_weights(lengths * (lengths - 1) // 2)
    shape = (part.num_users, size)
    has = sparse.csr_matrix((np.ones(len(part.users), np.int64), (part.users, part.places)), shape)
    gives = sparse.csr_matrix((weights[part.users], (part.users, part.places)), shape)
    sums = gives.T.tocsr() @ has
    rows = np.repeat(np.arange(size), np.diff(sums.indptr))
    return rows * size + sums.indices, sums.data
