"""Private sums of a click log: clicks and other rows by value of each column, and what they predict.

With a(v) and b(v) the noisy counts of a value's rows with and without a click, m the rate of clicks, k a pseudo-count,

    logit = logit(m) + Σ over columns of  logit((a + k m) / (a + b + k)) − logit(m)

(naive Bayes). Each of a unit's r rows has the weight 1 / (r √columns) in each of its counts, so that the unit moves all
of them together by at most 1 in ℓ₂. Scale and offset are then corrected by `private_reliability`, which makes up for
columns that say the same.
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


def row_weights(units: np.ndarray, columns: int) -> np.ndarray:
    """The weight of each row in each of its counts."""
    _, number, rows = np.unique(units, return_inverse=True, return_counts=True)
    return 1 / (rows[number] * columns**0.5)


def weights(log: ClickLog, columns: Sequence[int], noise_multiplier: float, pseudo: float, seed: int) -> np.ndarray:
    """What each value adds to the logit, the columns' values laid end to end; 0 for columns that are not counted.

    Args:
        log: Log whose training rows are counted.
        columns: Numbers of the columns that are counted.
        noise_multiplier: Noise multiplier of all counts together.
        pseudo: Pseudo-count k in rows, to which three deviations of the noise are added.
        seed: Seed of the noise, which is good for a study alone.
    """
    rows, rng = log.parts["train"], np.random.default_rng([seed, 7])
    mean, each = rate_of(rows.labels), row_weights(rows.units, len(columns))
    one = 1 / (log.per_unit * len(columns) ** 0.5)  # weight of a usual row
    found = [np.zeros(size) for size in log.sizes]
    for column in columns:
        ids, size = rows.ids[:, column], log.sizes[column]
        counts = (np.bincount(ids, weights=each * which, minlength=size) for which in (rows.labels, 1 - rows.labels))
        clicks, others = (count + noise_multiplier * rng.normal(size=size) for count in counts)
        shown, k = np.maximum(clicks + others, 0.0), pseudo * one + 3 * noise_multiplier
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
