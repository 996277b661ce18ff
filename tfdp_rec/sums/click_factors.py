"""What a pair of columns, such as user and item, says beyond its columns: a vector for each value, from private sums.

    logit = that of the columns + P(a) · Q(b)

for values a and b of the two columns. P and Q are found by turns. At first P is of pseudo-random numbers, which are
public. With p a row's probability by what was released before, a unit gives to each value b of its rows

    Σ over its rows with b of  (4 (y − p) P(a), ¼),

on a grid of whole numbers, all of it made shorter together to 1 in ℓ₂ where it is longer (`fixed_point.unit_sums`): a
unit moves the sums of a turn by at most 1, whatever its rows. With 4 G and n / 4 the noisy sums of b, k the width of P,
and h = n / (5 k), which is what the likelihood's curvature is about,

    Q(b) = G h / (h² + (h + σ² / 16) / τ²):

the most likely vector, if it is of variance τ² in each direction. Then Q is turned to its own main directions, the
first few are kept, and made equally long; the next turn gives P of Q. So what one turn found is refined by the next, as
in a power iteration, which noise on a whole table of pairs would drown: it has millions of cells, a turn's sums have
few numbers for each value, to which all rows of the value add.

Guarantee: each turn is a Gaussian mechanism of sensitivity 1, given what was released before; their σ⁻² add up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.mechanism.noise.words import WordSource
from tfdp_rec.sums.fixed_point import release_sums, unit_sums

TURNS = 6  # even: the last one is the first column's
_START, _WIDTH = 16, 8
_STEPS = 2**6  # of the grid in 1
_RESIDUAL, _ROW = 4.0, 0.25  # what they weigh in a unit's sums
_CURVATURE, _VARIANCE = 0.2, 0.4  # of a row's likelihood in its logit; τ²
_LONGEST = 3.0  # of a vector, whose mean square is 1

Floats = NDArray[np.float64]


def release_factors(
    owners: NDArray[np.int64], ids: NDArray[np.int64], residuals: Floats, sizes: list[int], noise: float,
    words: WordSource,
) -> list[Floats]:  # fmt: skip
    """Vectors of both columns' values, `[size, width]` each, from `TURNS` releases of this noise multiplier.

    Args:
        owners: Unit of each row, from 0.
        ids: Values of both columns, `[2, rows]`.
        residuals: y − p of each row, within ±1, by what was released before.
        sizes: Number of values of each column.
        noise: Noise multiplier of each turn.
        words: Source of random bits.
    """
    known = (np.random.default_rng(1).random((sizes[0], _START)) - 0.5) * (12 / _START) ** 0.5  # public
    for turn in range(TURNS):
        to, width = (turn + 1) % 2, known.shape[1]
        given = known[ids[1 - to]] * (_RESIDUAL * np.clip(residuals, -1.0, 1.0))[:, None]
        entries = np.rint(_STEPS * np.append(given, np.full((len(given), 1), _ROW), axis=1)).astype(np.int64)
        noisy = release_sums(unit_sums(owners, ids[to], entries, sizes[to], least=_STEPS**2), noise, words)
        rows = np.maximum(noisy[:, -1:] / _ROW, 0.0)
        bent = rows * _CURVATURE / width
        believed = bent / (bent**2 + (bent + (noise / _RESIDUAL) ** 2) / _VARIANCE)
        found = noisy[:, :-1] / _RESIDUAL * believed
        if turn < TURNS - 1:
            _, lengths, axes = np.linalg.svd(found * np.sqrt(rows / max(rows.sum(), noise)), full_matrices=False)
            turned = found @ axes[:_WIDTH].T / np.maximum(lengths[:_WIDTH], 1e-9)
            known = turned / np.maximum(np.linalg.norm(turned, axis=1, keepdims=True) / _LONGEST, len(turned.T) ** 0.5)
    return [found, known]
