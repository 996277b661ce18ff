"""How likely each candidate is a negative: half by chance alone, half by counts that are public or were released.

    Q_i = 1/(2M) + c_i/(2 Σ c)            of M candidates with counts c, negative ones taken as zero
    π_i = min(1, λ Q_i),  Σ π_i = S       S different negatives, candidate i among them with probability π_i

Popular candidates take most of a softmax. Drawn by chance alone, each of them is a negative in few steps and counts for
many candidates there, so that its row is pushed far down once and up in between, by lengths that the clip cuts unlike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BY_CHANCE = 0.5  # share of draws by chance alone: every candidate is drawn, no correction is large


def check_counts(counts: Sequence[float], catalogue: int) -> list[float]:
    """The counts as numbers; refuses others than one a candidate."""
    values = np.asarray(counts, np.float64)
    if values.shape != (catalogue,) or not np.isfinite(values).all():
        raise ValueError(
            f"released_counts must be {catalogue} numbers, one a candidate (of privacy.private_counts, its values); "
            f"got shape {values.shape}."
        )
    return values.tolist()


def shares(counts: Sequence[float]) -> NDArray[np.float64]:
    """Q."""
    seen = np.maximum(np.asarray(counts, np.float64), 0.0)
    by_chance = np.full(len(seen), 1.0 / len(seen))
    return _BY_CHANCE * by_chance + (1 - _BY_CHANCE) * (seen / seen.sum() if seen.sum() else by_chance)


def inclusion(counts: Sequence[float], number: int) -> NDArray[np.float64]:
    """π of so many negatives."""
    likely = shares(counts)
    order = np.argsort(-likely)
    sure, rest = np.arange(number), np.cumsum(likely[order][::-1])[::-1]
    # The k most likely are certain, the least k for which λ leaves the others at most 1.
    scales = (number - sure) / rest[:number]
    k = int(np.argmax(scales * likely[order][:number] <= 1.0 + 1e-12))
    found = np.minimum(1.0, scales[k] * likely)
    found[order[:k]] = 1.0
    return found


def different(chances: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """So many candidates as the chances add up to, each with its own chance: systematic sampling of a random order."""
    order = rng.permutation(len(chances))
    ends = np.cumsum(chances[order])
    places = np.arange(round(ends[-1])) + rng.uniform()
    return order[np.minimum(np.searchsorted(ends, places, side="right"), len(order) - 1)]
