"""Private sums of a click log: clicks and other rows by value of each column, and what they predict.

With a(v) and b(v) the noisy counts of a value's rows with and without a click, m the rate of clicks, k a pseudo-count,

    logit = logit(m) + Σ over columns of  logit((a + k m) / (a + b + k)) − logit(m)

(naive Bayes). A unit's rows have the weight 1 / (rows · √columns) in each of their counts, so that it moves all of them
together by at most 1 in ℓ₂. Scale and offset are then corrected by `private_reliability`, which makes up for columns
that say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy import special

from experiments.clicks.log import ClickLog

_COUNTED = (1, 2, 3, 4, 6, 9, 13, 19)


def rate_of(clicks: np.ndarray) -> float:
    """The share of clicks. The study treats it as public."""
    return float(clicks.mean())


def weights(log: ClickLog, columns: Sequence[int], noise_multiplier: float, pseudo: float, seed: int) -> np.ndarray:
    """What each value adds to the logit, the columns' values laid end to end; 0 for columns that are not counted.

    Args:
        log: whose training rows are counted.
        columns: numbers of those that are counted.
        noise_multiplier: of all counts together.
        pseudo: k, in rows, beside three deviations of the noise.
        seed: of the noise, which is for a study alone.
    """
    rows, rng = log.parts["train"], np.random.default_rng([seed, 7])
    mean = rate_of(rows.labels)
    deviation = noise_multiplier * log.per_unit * len(columns) ** 0.5  # in rows
    found = [np.zeros(size) for size in log.sizes]
    for column in columns:
        ids, size = rows.ids[:, column], log.sizes[column]
        counts = (np.bincount(ids, weights=which, minlength=size) for which in (rows.labels, 1 - rows.labels))
        clicks, others = (each + deviation * rng.normal(size=size) for each in counts)
        shown, k = np.maximum(clicks + others, 0.0), pseudo + 3 * deviation
        rate = (np.clip(clicks, 0.0, shown) + k * mean) / (shown + k)
        found[column] = special.logit(np.clip(rate, 1e-4, 1 - 1e-4)) - special.logit(mean)
    return np.concatenate(found)


def choices(scores: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Sets of columns to count, from each column's score alone: the best, the two best, and so on, at last all.

    Example:
        >>> list(choices([0.5, 0.9, 0.7]))
        [(1,), (1, 2), (0, 1, 2)]
    """
    order = [int(column) for column in np.argsort(scores)[::-1]]
    for count in sorted({*(n for n in _COUNTED if n < len(order)), len(order)}):
        yield tuple(sorted(order[:count]))
