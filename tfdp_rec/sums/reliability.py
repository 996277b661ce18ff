"""How often a click followed where a model predicted one, released once, and the correction that follows from it.

Clipping makes classifiers overconfident: of a gradient it takes away most where the model is most wrong, so training
stretches the logits beyond what the labels bear out. The order of predictions is not hurt by it, their size is. Two
numbers mend most of it (Platt's scaling):

    corrected logit = scale · logit + offset

They are computed from a histogram. Logits fall into cells with public edges, and a cell has a count of clicks and one
of the rows without. A unit with n_c rows in cell c, clicks and others apart, gives each of its rows the weight

    1/√(Σ_c n_c²),   so that it moves all counts together by at most 1 in ℓ₂: a unit of one row gives that row 1.

Guarantee: the counts are one Gaussian mechanism of noise multiplier σ, and scale and offset are computed from them. The
logits are those of a model that is released already; each row's depends on that row alone.

Reference:
    J. Platt, Probabilistic outputs for support vector machines, 1999.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent
from numpy.typing import ArrayLike, NDArray
from scipy import special

from tfdp_rec.noise.words import WordSource, os_entropy
from tfdp_rec.sums.fixed_point import checked_noise, grid_weights, released

LABEL = "reliability of predictions"
_FAR = np.array([9.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0])  # where a model is much too sure
_EDGES = np.concatenate([-_FAR[::-1], np.linspace(-8.0, 8.0, 65), _FAR])
_CENTRES = np.concatenate([[_EDGES[0]], (_EDGES[:-1] + _EDGES[1:]) / 2, [_EDGES[-1]]])
_CLEAR = 4.0  # standard deviations of noise that a cell's rows must exceed to count
_ROUNDS = 100  # of Newton's method
_TOWARDS = 1.0  # rows that speak for scale 1 and offset 0


@dataclasses.dataclass(frozen=True, eq=False)
class Reliability:
    """Noisy counts by predicted logit.

    Attributes:
        logits: Centre of each cell.
        clicks: Noisy weight of the rows with a click in each cell; some are negative.
        others: Noisy weight of the rows without one.
        event: Event to give to `Accountant.spend`.
    """

    logits: NDArray[np.float64]
    clicks: NDArray[np.float64]
    others: NDArray[np.float64]
    event: GaussianDpEvent

    @property
    def clear(self) -> NDArray[np.bool_]:
        """Whether a cell's rows stand out of the noise."""
        deviation = self.event.noise_multiplier * np.sqrt(2)
        return self.clicks + self.others > _CLEAR * deviation

    @functools.cached_property
    def _fitted(self) -> tuple[float, float]:
        # The likelihood's two equations are linear in the counts, so noise makes them wrong by nothing on average.
        x, clicks, rows = (v[self.clear] for v in (self.logits, self.clicks, self.clicks + self.others))
        both, known = np.stack([x, np.ones_like(x)], axis=1), np.array([1.0, 0.0])
        found = known.copy()
        for _ in range(_ROUNDS):
            rate = special.expit(both @ found)
            slope = both.T @ (rows * rate - clicks) + _TOWARDS * (found - known)
            curve = (both * (rows * rate * (1 - rate))[:, None]).T @ both + _TOWARDS * np.eye(2)
            found = found - np.clip(np.linalg.solve(curve, slope), -1.0, 1.0)
        return float(found[0]), float(found[1])

    @property
    def scale(self) -> float:
        """Factor of the corrected logits; below 1 for a model that is too sure. 1 where noise hides all rows."""
        return self._fitted[0]

    @property
    def offset(self) -> float:
        """What is added to the scaled logits."""
        return self._fitted[1]

    def corrected(self, logits: ArrayLike) -> NDArray[np.float64]:
        """`scale · logits + offset`, for logits within ±64; in Keras the layer `Rescaling(scale, offset)`."""
        return self.scale * np.clip(np.asarray(logits, np.float64), _EDGES[0], _EDGES[-1]) + self.offset


def private_reliability(
    logits: ArrayLike,
    clicks: ArrayLike,
    *,
    noise_multiplier: float,
    unit: Any = None,
    accountant: Any = None,
    words: WordSource = os_entropy,
) -> Reliability:
    """Counts of rows with and without a click by predicted logit, under differential privacy.

    Args:
        logits: Predicted logit of each row, by a model that is released; a row whose logit is no number is left out.
        clicks: Label of each row, 0 or 1.
        noise_multiplier: σ; the vector of counts has sensitivity 1. At 30 it costs little beside a training, and counts
            of thousands hardly feel it.
        unit: Array with the user id of each row, if users are the privacy units; by default each row is a unit.
        accountant: Accountant that is charged, and its ledger, before the rows are counted.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: The arrays differ in length, a label is neither 0 nor 1, or σ is out of range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> truth = rng.normal(size=100_000)
        >>> clicks = rng.random(100_000) < special.expit(truth)
        >>> found = private_reliability(3 * truth, clicks, noise_multiplier=30.0)  # three times too sure
        >>> 0.3 < found.scale < 0.37, abs(found.offset) < 0.1
        (True, True)
    """
    noise = checked_noise(noise_multiplier)
    given, labels = np.asarray(logits, np.float64), np.asarray(clicks)
    if given.ndim != 1 or labels.shape != given.shape:
        raise ValueError(f"logits and clicks must be one number a row, got shapes {given.shape} and {labels.shape}.")
    if not np.isin(labels, (0, 1)).all():
        raise ValueError("clicks must be 0 or 1.")
    if accountant is not None:
        accountant.spend(GaussianDpEvent(noise), LABEL)
    total = grid_counts(given, labels, unit)
    counts = released(total, noise, words).reshape(2, -1)
    return Reliability(_CENTRES, counts[1], counts[0], GaussianDpEvent(noise))


def grid_counts(logits: NDArray[np.float64], labels: NDArray[Any], unit: Any = None) -> NDArray[np.int64]:
    """Weights of the rows by label and cell, in grid steps. They have no noise and must not be released."""
    size, known = 2 * len(_CENTRES), ~np.isnan(logits)
    cells = labels[known].astype(np.int64) * len(_CENTRES) + np.searchsorted(_EDGES, logits[known], side="right")
    if unit is None:
        return np.bincount(cells, minlength=size) * grid_weights(np.ones(1, np.int64))[0]
    ids = np.asarray(unit)
    if ids.shape != logits.shape:
        raise ValueError(f"unit must give one id for each of {len(logits)} rows, got an array of shape {ids.shape}.")
    number = np.unique(ids[known], return_inverse=True)[1]
    pairs, rows = np.unique(number * size + cells, return_counts=True)
    squares = np.zeros(number.max(initial=-1) + 1, np.int64)
    np.add.at(squares, pairs // size, rows**2)
    total = np.zeros(size, np.int64)
    np.add.at(total, pairs % size, rows * grid_weights(squares)[pairs // size])
    return total
