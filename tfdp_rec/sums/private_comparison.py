"""Which of two released models serves held-out units better: decided once, under differential privacy.

A unit that neither model was made from gives the difference of its metric, d = end − start, in [−1, 1], of which

    S = Σ trunc(2²⁰ d)   grid steps,   and the end is taken if   S + ⌊2²⁰ σ z + ½⌋ > 2²⁰ t,   z ~ N(0, 1).

**Sensitivity.** A unit's number hangs on its own values and the two models, which are released, and is at most 2²⁰ = 1
in absolute value, whatever the values are: they are cut to [0, 1] before, and one that is no number counts as 0. So a
unit that contributes nothing instead of what it has moves S by at most 1, and `fixed_point.release_sums` makes of it
one Gaussian mechanism of noise multiplier σ. The decision is computed from its output, and so is all that is told.

**What a wrong choice costs.** With t = 2σ, of two models that do equally well on the units, the end is taken once in
44. An end that is worse by a in the mean of the n units is taken only where the noise is above n a + 2σ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.sums.fixed_point import ONE, check_noise, event_with, release_sums
from tfdp_rec.sums.private_metrics import charge, count_units

LABEL = "comparison on held-out units"
_CLEAR = 2.0  # standard deviations of the noise that an end must gain by default


class Comparison(NamedTuple):
    """The choice between two models; all of it is released.

    Attributes:
        end_is_better: Whether the end is taken.
        gain: What the end adds to the metric's sum over the units, with noise.
        threshold: What it had to be above.
        event: Event of the choice.
    """

    end_is_better: bool
    gain: float
    threshold: float
    event: DpEvent


def private_comparison(
    units: Any, start: Callable[[], ArrayLike], end: Callable[[], ArrayLike], *, noise_multiplier: float,
    threshold: float | None = None, unit: str = "user", accountant: Any = None, words: WordSource = os_entropy,
) -> Comparison:  # fmt: skip
    """Whether a model, the end, is better on held-out units than another, the start, which is kept unless it is.

    Guarantee: one Gaussian of the noise multiplier on the units. Both models must be released, or paid for as if they
    were, and made without these units. Whatever else was seen of the two values, such as their mean, is not covered.

    Args:
        units: Id of each held-out unit, each once.
        start: Function that gives the start's value in [0, 1] of each unit, such as recall@k, from the unit's rows
            alone; called once the choice is paid for.
        end: The same of the end.
        noise_multiplier: σ, in units of the metric's sum.
        threshold: Sum of differences that the noisy one must be above; by default 2σ.
        unit: What is one unit. An accountant's must be the same.
        accountant: Accountant that is charged, and its ledger, before any unit is scored.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: An argument is out of range, and nothing is paid; or a function gives another number of values.

    Example:
        >>> hits = np.arange(4000) % 10 == 0
        >>> found = private_comparison(np.arange(4000), lambda: hits, lambda: hits | True, noise_multiplier=20.0)
        >>> found.end_is_better, found.threshold
        (True, 40.0)
    """
    noise, count = check_noise(noise_multiplier), count_units(units)
    least = _CLEAR * noise if threshold is None else float(threshold)
    if not math.isfinite(least):
        raise ValueError(f"threshold must be finite, got {threshold!r}: give the sum that the end must gain.")
    event = event_with(words, GaussianDpEvent(noise))
    charge(accountant, event, LABEL, unit)
    differences = _values("end", end, count) - _values("start", start, count)
    total = np.trunc(ONE * differences).astype(np.int64).sum(keepdims=True)
    gain = float(release_sums(total, noise, words)[0])
    return Comparison(gain > least, gain, least, event)


def _values(name: str, score: Callable[[], ArrayLike], count: int) -> NDArray[np.float64]:
    # No value is refused: whether there is an error would tell of one unit.
    values = np.asarray(score(), np.float64)
    if values.shape != (count,):
        raise ValueError(f"{name} must give one value for each of the {count} units, got the shape {values.shape}.")
    return np.clip(np.nan_to_num(values, nan=0.0), 0.0, 1.0)
