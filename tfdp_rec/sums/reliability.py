"""How often a click followed where a model predicted one, released once, and the correction that follows from it.

Clipping makes classifiers overconfident: of a gradient it takes away most where the model is most wrong, so training
stretches the logits beyond what the labels bear out. The order of predictions is not hurt by it, their size is. Two
numbers mend most of it (Platt's scaling):

    corrected logit = scale · logit + offset

They are computed from a histogram. Logits fall into cells with public edges, and a cell has a count of clicks and one
of the rows without. A unit with n_c rows in cell c, clicks and others apart, gives each of its rows the weight

    1/√(Σ_c n_c²),   so that it moves all counts together by at most 1 in ℓ₂: a unit of one row gives that row 1.

Guarantee: the counts are one Gaussian mechanism of noise multiplier σ, and all else is computed from them. The logits
are those of a model that is released already, and each row's must depend on that row alone.

Scale and offset are the most likely ones given the noisy counts and a prior about (1, 0) that is as strong as the noise
is large. Where the clicks, or the rows without, do not stand out of the noise, nothing is corrected: at σ = 30 some
hundreds of each are needed, and below a thousand the correction gains little.

Reference:
    J. Platt, Probabilistic outputs for support vector machines, 1999.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.unit_ids import unit_numbers
from tfdp_rec.sums.fixed_point import ONE, check_noise, event_with, release_sums, unit_sums

LABEL = "reliability of predictions"
_FAR = np.array([9.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0])  # where a model is much too sure
_EDGES = np.concatenate([-_FAR[::-1], np.linspace(-8.0, 8.0, 65), _FAR])
_CENTRES = np.concatenate([[_EDGES[0]], (_EDGES[:-1] + _EDGES[1:]) / 2, [_EDGES[-1]]])
_CENTRES.flags.writeable = False
_ROWS = ("row", "example")  # units of which each has one row
_CLEAR = 4.0  # standard deviations of noise that rows must exceed to count
_ROUNDS = 200  # of Newton's method; some ten are needed


@dataclasses.dataclass(frozen=True, eq=False)
class Reliability:
    """Noisy counts by predicted logit.

    Attributes:
        logits: Centre of each cell.
        clicks: Noisy weight of the rows with a click in each cell; some are negative.
        others: Noisy weight of the rows without one.
        noise_multiplier: Noise multiplier σ of the counts.
        event: Event to give to `Accountant.spend`.
    """

    logits: NDArray[np.float64]
    clicks: NDArray[np.float64]
    others: NDArray[np.float64]
    noise_multiplier: float
    event: DpEvent

    @property
    def clear(self) -> NDArray[np.bool_]:
        """Whether a cell's rows stand out of the noise."""
        return self.clicks + self.others > _CLEAR * 2**0.5 * self.noise_multiplier

    @property
    def tells(self) -> bool:
        """Whether clicks, and rows without, stand out of the noise in all clear cells together."""
        clear = self.clear
        least = _CLEAR * self.noise_multiplier * max(float(clear.sum()), 1.0) ** 0.5
        return bool(min(self.clicks[clear].sum(), self.others[clear].sum()) > least)

    @functools.cached_property
    def _fit(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        # (scale, offset) and their standard errors by noise. The likelihood's equations are linear in the counts.
        known = np.array([1.0, 0.0])
        if not self.tells:
            return known, np.full(2, np.nan)
        x, clicks, others = (v[self.clear] for v in (self.logits, self.clicks, self.others))
        both, noise = np.stack([x, np.ones_like(x)], axis=1), self.noise_multiplier
        towards = np.diag(noise * np.sqrt(np.square(both).sum(axis=0)))
        found = _least(both, clicks, clicks + others, towards, known)
        if found[0] < 0:  # predictions turned round: noise has the say
            found = np.array([0.0, _least(both[:, 1:], clicks, clicks + others, towards[1:, 1:], known[1:])[0]])
        rate = special.expit(both @ found)
        curve = (both * ((clicks + others) * rate * (1 - rate))[:, None]).T @ both + towards
        spread = noise * both * np.sqrt(rate**2 + (1 - rate) ** 2)[:, None]
        inverse = np.linalg.inv(curve)
        return found, np.sqrt(np.diag(inverse @ (spread.T @ spread) @ inverse))

    @property
    def scale(self) -> float:
        """Factor of the corrected logits; below 1 for a model that is too sure."""
        return float(self._fit[0][0])

    @property
    def offset(self) -> float:
        """What is added to the scaled logits."""
        return float(self._fit[0][1])

    @property
    def errors(self) -> tuple[float, float]:
        """Standard errors of scale and offset by the noise alone; NaN where nothing is corrected."""
        return float(self._fit[1][0]), float(self._fit[1][1])

    def corrected(self, logits: ArrayLike) -> NDArray[np.float64]:
        """`scale · logits + offset`, for logits within ±64; in Keras the layer `Rescaling(scale, offset)`."""
        return self.scale * np.clip(np.asarray(logits, np.float64), _EDGES[0], _EDGES[-1]) + self.offset


def _least(
    x: NDArray[Any], clicks: NDArray[Any], rows: NDArray[Any], towards: NDArray[Any], known: NDArray[Any]
) -> NDArray[np.float64]:
    """The least of Σ rows · log(1 + e^z) − clicks · z, z = x · found, plus the distance to `known`: Newton's method."""

    def loss(at: NDArray[Any]) -> float:
        z, away = x @ at, at - known
        return float(rows @ np.logaddexp(0.0, z) - clicks @ z + 0.5 * away @ towards @ away)

    found = known.copy()
    for _ in range(_ROUNDS):
        rate = special.expit(x @ found)
        slope = x.T @ (rows * rate - clicks) + towards @ (found - known)
        curve = (x * (rows * rate * (1 - rate))[:, None]).T @ x + towards
        step, length = np.linalg.solve(curve, slope), 1.0
        while loss(found - length * step) > loss(found) - 1e-4 * length * (slope @ step) and length > 1e-12:
            length /= 2
        found = found - length * step
        if length * np.abs(step).max() < 1e-9:
            break
    return found


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
        clicks: Label of each row: 1 for a click; all others count as none.
        noise_multiplier: σ; the vector of counts has sensitivity 1. At 30 it costs little beside a training, and counts
            of thousands hardly feel it.
        unit: Array with the user id of each row, if users are the privacy units; by default each row is a unit.
        accountant: Accountant that is charged, and its ledger, before the rows are counted.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: The arrays differ in length, σ is out of range, or there are more units than the accountant's.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> truth = rng.normal(size=100_000)
        >>> clicks = rng.random(100_000) < special.expit(truth)
        >>> found = private_reliability(3 * truth, clicks, noise_multiplier=30.0)  # three times too sure
        >>> 0.3 < found.scale < 0.37, abs(found.offset) < 0.1
        (True, True)
    """
    noise = check_noise(noise_multiplier)
    given, labels = np.asarray(logits, np.float64), np.asarray(clicks)
    if given.ndim != 1 or labels.shape != given.shape or labels.dtype.kind not in "biuf":
        raise ValueError(
            f"logits and clicks must be one number a row, got shapes {given.shape} and {labels.shape}, clicks of type "
            f"{labels.dtype}."
        )
    units = None if unit is None else unit_numbers(unit, len(given))
    event = event_with(words, GaussianDpEvent(noise))
    if accountant is not None:
        refuse_other_units(accountant.sampling, units, len(given))
        accountant.spend(event, LABEL)
    counts = release_sums(grid_counts(given, labels == 1, units), noise, words).reshape(2, -1)
    counts.flags.writeable = False
    return Reliability(_CENTRES, counts[1], counts[0], noise, event)


def refuse_other_units(sampling: Any, units: NDArray[np.int64] | None, rows: int) -> None:
    """Refuses units that are not the accountant's: one of users that is charged for rows would name too small an ε."""
    count = rows if units is None else len(np.unique(units))
    if units is None and sampling.unit not in _ROWS or count > sampling.num_units:
        raise ValueError(
            f"The accountant's units are {sampling.num_units:,} of '{sampling.unit}', and here are {count:,}: give "
            "unit=, the id of each row's unit."
        )


def grid_counts(
    logits: NDArray[np.float64], clicked: NDArray[np.bool_], units: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Weights of the rows by label and cell, in grid steps. They have no noise and must not be released."""
    size, known = 2 * len(_CENTRES), ~np.isnan(logits)
    cells = clicked[known].astype(np.int64) * len(_CENTRES) + np.searchsorted(_EDGES, logits[known], side="right")
    if units is None:
        return np.bincount(cells, minlength=size) * ONE
    return unit_sums(units[known], cells, np.ones((len(cells), 1), np.int64), size)[:, 0]
