"""Number of users that have two items of the head together: the item-item Gram matrix, in grid steps, exactly.

A user with d ≥ 2 items of the head gives each of the d(d-1)/2 pairs of them the same weight,

    w = 1/√(d(d-1)/2)   (rounded down to the grid: see `tfdp_rec.sums.fixed_point`),

so that one user moves the entries above the diagonal by at most 1 in ℓ₂. Users with fewer items of the head give
nothing, and count as users. Sums of whole numbers are the same in any order, so parts are counted on all cores.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from tfdp_rec.datasets.log import Catalogue, InParts, Part
from tfdp_rec.sums.fixed_point import grid_weights

_PAIRS_AT_ONCE = 2**24  # pairs in a piece of work: about half a gigabyte at most
_EVENTS_AT_ONCE = 2**18


def grid_gram(
    histories: InParts,
    catalogue: Catalogue,
    head: NDArray[np.int64],
    progress: Callable[[int], None] = lambda users: None,
) -> NDArray[np.int64]:
    """The Gram matrix of the head, both halves, its diagonal 0. It has no noise and must not be released."""
    position = np.full(len(catalogue), -1)
    position[head] = np.arange(len(head))
    total = np.zeros((len(head), len(head)), np.int64)
    waiting: collections.deque[Future[Any]] = collections.deque()
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        for part in histories.parts(catalogue, _EVENTS_AT_ONCE):
            for piece in _pieces(part.among(position)):
                waiting.append(pool.submit(_pair_sums, piece, len(head)))
                if len(waiting) > cores:  # holds no more pieces in memory than are being counted
                    _add(total, waiting.popleft().result())
            progress(part.num_users)
        while waiting:
            _add(total, waiting.popleft().result())
    np.fill_diagonal(total, 0)
    return total


def _pieces(part: Part) -> Iterator[Part]:
    """The users of a part, in pieces with a bounded number of pairs."""
    lengths = part.lengths
    pairs = np.cumsum(lengths * lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    begin = 0
    while begin < part.num_users:
        before = pairs[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(pairs, before + _PAIRS_AT_ONCE, side="right")))
        events = slice(starts[begin], starts[end])
        yield Part(end - begin, part.users[events] - begin, part.places[events])
        begin = end


def _pair_sums(part: Part, size: int) -> Any:
    """Sum of some users' weighted pairs, a sparse matrix of whole numbers."""
    lengths = part.lengths
    weights = grid_weights(lengths * (lengths - 1) // 2)
    shape = (part.num_users, size)
    has = sparse.csr_matrix((np.ones(len(part.users), np.int64), (part.users, part.places)), shape)
    gives = sparse.csr_matrix((weights[part.users], (part.users, part.places)), shape)
    return gives.T.tocsr() @ has


def _add(total: NDArray[np.int64], sums: Any) -> None:
    rows = np.repeat(np.arange(len(total)), np.diff(sums.indptr))
    total.reshape(-1)[rows * len(total) + sums.indices] += sums.data  # each place occurs once
