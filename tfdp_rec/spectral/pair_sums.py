"""How many users have two items of the head together, in grid steps, exactly: of any two items, or of near ones.

**Any two items.** A user with d ≥ 2 items of the head gives each of the d(d-1)/2 pairs of them the same weight,

    w = 1/√(d(d-1)/2)   (rounded down to the grid: see `tfdp_rec.sums.fixed_point`).

**Near each other**, in histories that have an order. A user's items of the head stand in the order in which they first
occur; what is repeated counts once. Two items s places apart, s = 1 ... 10, either one first, have the weight

    q_s = ⌊2²⁰ k_s / r⌋,   k_s = ⌊2¹⁰/√s⌋,   r = ⌈√(Σ_s (d - s) k_s²)⌉,

the sum over all pairs of a user of d items, d - s of them s places apart.

So Σ w² ≤ 1, and Σ q² ≤ 4²⁰: one user moves the entries above the diagonal by at most 2²⁰ grid steps = 1 in ℓ₂. All of
it is arithmetic of whole numbers. Users with fewer than two items of the head give nothing, and count as users. Sums of
whole numbers are the same in any order, so users are counted in pieces, side by side on all cores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from tfdp_rec.datasets.log import Catalogue, InParts, Part
from tfdp_rec.sums.fixed_point import ONE, grid_weights
from tfdp_rec.sums.total import Cells, Draw, Summand, total

WINDOW = 10
_WEIGHTS = [math.isqrt(2**20 // distance) for distance in range(1, WINDOW + 1)]  # k_s
# Weight of an item's own cell beside its count: counts of a user with d items weigh 1/√d, cells at distance 1
# 1/√(d Σ_s 1/s), of a long history.
OWN = 1 / math.sqrt(sum(1 / distance for distance in range(1, WINDOW + 1)))
_PAIRS_AT_ONCE = 2**24  # pairs in a piece of work: about half a gigabyte at most
_EVENTS_AT_ONCE = 2**18


def pair_sums(histories: InParts, catalogue: Catalogue, head: NDArray[np.int64], ordered: bool) -> NDArray[np.int64]:
    """The matrix of the head, right above its diagonal; near pairs if `ordered`. It must not be released: no noise."""
    position = np.full(len(catalogue), -1)
    position[head] = np.arange(len(head))
    cells = functools.partial(_near_cells if ordered else _all_cells, size=len(head))  # i · size + j
    pieces = functools.partial(_pieces, position=position)
    pairs = Summand(cells, len(head) ** 2, pieces, ordered, _EVENTS_AT_ONCE)
    return total(histories, catalogue, pairs).reshape(len(head), len(head))


def _pieces(part: Part, draw: Draw, position: NDArray[np.int64]) -> Iterator[Part]:
    """The users of a part, their items of the head, in pieces with a bounded number of pairs."""
    part = part.restrict_to(position)
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


def _all_cells(part: Part, size: int) -> Cells:
    """Cells of both halves, and of the diagonal, which nobody reads."""
    lengths = part.lengths
    weights = grid_weights(lengths * (lengths - 1) // 2)
    shape = (part.num_users, size)
    has = sparse.csr_matrix((np.ones(len(part.users), np.int64), (part.users, part.places)), shape)
    gives = sparse.csr_matrix((weights[part.users], (part.users, part.places)), shape)
    sums = gives.T.tocsr() @ has
    rows = np.repeat(np.arange(size), np.diff(sums.indptr))
    return rows * size + sums.indices, sums.data


def _near_cells(part: Part, size: int) -> Cells:
    """Cells above the diagonal."""
    users, places, lengths = part.users, part.places, part.lengths
    different, which = np.unique(lengths, return_inverse=True)
    root = np.array([_root(int(length)) for length in different], np.int64)[which]
    cells, given = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for distance, weight in enumerate(_WEIGHTS, 1):
        near = users[:-distance] == users[distance:]
        one, other = places[:-distance][near], places[distance:][near]
        cells.append(np.minimum(one, other) * size + np.maximum(one, other))
        given.append(weight * ONE // root[users[distance:][near]])
    return np.concatenate(cells), np.concatenate(given)


def _root(length: int) -> int:
    """r of a user with so many items; 1 where there is no pair."""
    squares = sum((length - distance) * weight**2 for distance, weight in enumerate(_WEIGHTS, 1) if distance < length)
    return math.isqrt(squares - 1) + 1 if squares else 1
