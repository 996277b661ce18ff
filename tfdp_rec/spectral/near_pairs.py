"""How many users have two items of the head near each other in their histories, in grid steps, exactly.

A user's items of the head stand in the order in which they first occur; what is repeated counts once. Two items s
places apart, s = 1 ... 10, either one first, have the weight

    q_s = ⌊2²⁰ k_s / r⌋,   k_s = ⌊2¹⁰/√s⌋,   r = ⌈√(Σ_s (d - s) k_s²)⌉,

the sum over all pairs of a user of d items, d - s of them s places apart. So Σ q² ≤ 4²⁰: one user moves the entries
above the diagonal by at most 2²⁰ grid steps = 1 in ℓ₂ (`tfdp_rec.sums.fixed_point`). All of it is arithmetic of whole
numbers. Users with fewer than two items of the head give nothing, and count as users.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.datasets.log import Catalogue, InParts, Part
from tfdp_rec.spectral.pair_sums import Cells, Progress, pair_sums
from tfdp_rec.sums.fixed_point import ONE

WINDOW = 10
_WEIGHTS = [math.isqrt(2**20 // distance) for distance in range(1, WINDOW + 1)]  # k_s
# Weight of an item's own cell beside its count: counts of a user with d items weigh 1/√d, cells at distance 1
# 1/√(d Σ_s 1/s), of a long history.
OWN = 1 / math.sqrt(sum(1 / distance for distance in range(1, WINDOW + 1)))


def near_pairs(
    histories: InParts, catalogue: Catalogue, head: NDArray[np.int64], progress: Progress = lambda users: None
) -> NDArray[np.int64]:
    """The cells of the head above the diagonal; all others are 0. It has no noise and must not be released."""
    return pair_sums(histories, catalogue, head, _cells, progress, in_order=True)


def _cells(part: Part, size: int) -> Cells:
    """Cells above the diagonal, i · size + j, and what users give to them."""
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
