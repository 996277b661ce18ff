"""Private labels: each label is released once, by randomised response; features are public.

With k classes and a label y, what is released is

    l = y  with probability  p = e^ε / (e^ε + k − 1),   each other class with probability  q = 1 / (e^ε + k − 1)

rounded so that ε bounds what is drawn: q up to a multiple of 2⁻⁵², of which a draw has one value each. Every later use
of l costs nothing, with any optimizer.

    ŷ_j = (1[l = j] − q) / (p − q)          has the mean 1[y = j]

so that a loss that is linear in the labels, as cross-entropy is, has the mean that it has on the true ones. ŷ lies
outside 0 ... 1.

**What is protected is one label**, not that a row exists, nor its features, nor another row of the same user: the
labels of ten rows of a user cost 10 ε. ε holds where a label is replaced by another, and where its row contributes
nothing, for which l is uniform.

Reference:
    S. Warner, Randomized response, 1965; P. Kairouz, S. Oh, P. Viswanath, Extremal mechanisms for local differential
    privacy, 2014.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim.events import REPLACE, DpEvent, PureDpEvent
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy, uniform
from tfdp_rec.sums.fixed_point import event_with

LABEL = "labels by randomised response"
UNIT = "label"
_STEP = 2.0**-52  # probability of one value of `words.uniform`


class Response(NamedTuple):
    """Probability of one's own class and of each other class; whole numbers of steps of 2⁻⁵²."""

    own: float
    other: float


def response(epsilon: float, num_classes: int) -> Response:
    """The probabilities of randomised response, so that own ≤ e^ε · other; with ε = ∞ the label is kept."""
    rare = math.exp(-epsilon)
    other = rare / (1.0 + (num_classes - 1) * rare) / _STEP * (1.0 + 2.0**-50)  # more than its rounding errors
    # Whole numbers of steps: these floats, and sums of them, are exact.
    found = max(math.ceil(other), math.isfinite(epsilon)) * _STEP
    own = 1.0 - (num_classes - 1) * found
    if own < found:  # the others' rounding has left too little: a label would make its own class rarer
        raise ValueError(f"epsilon {epsilon} is too small for {num_classes} choices: give a larger one.")
    return Response(own, found)


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateLabels:
    """Released labels; everything computed from them is as private.

    Attributes:
        labels: Released class of each row, int64.
        num_classes: Number of classes.
        chances: Probability that a class is released as itself, and as each other one.
        event: Event of one label.
    """

    labels: NDArray[np.int64]
    num_classes: int
    chances: Response
    event: DpEvent

    def debiased(self) -> NDArray[np.float32]:
        """Labels whose mean is the true label: `[rows]` of two classes, else `[rows, classes]`; some are below 0."""
        own, other = self.chances
        shown = np.eye(self.num_classes)[self.labels]
        found = ((shown - other) / (own - other)).astype(np.float32)
        return found[:, 1] if self.num_classes == 2 else found


def private_labels(
    labels: ArrayLike,
    *,
    epsilon: float,
    num_classes: int = 2,
    ledger: Any = None,
    words: WordSource = os_entropy,
) -> PrivateLabels:
    """Labels under label differential privacy, for models whose features are public.

    Args:
        labels: Class of each row, from 0 to num_classes − 1.
        epsilon: ε of one label.
        num_classes: Number of classes.
        ledger: Ledger of unit "label" and adjacency "replace-one", in which the release is paid before labels are read.
        words: Source of random bits, for tests; the operating system's by default.

    Returns:
        The released labels.

    Raises:
        ValueError: ε is not positive or too small, a label is no class, or the ledger counts for another unit.

    Example:
        >>> clicks = np.array([0, 0, 1, 1] * 1000)
        >>> released = private_labels(clicks, epsilon=2.0)
        >>> bool(abs(released.debiased().mean() - 0.5) < 0.2), bool((released.labels != clicks).any())
        (True, True)
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon!r}.")
    if int(num_classes) != num_classes or num_classes < 2:
        raise ValueError(f"num_classes must be a whole number, at least 2, got {num_classes!r}.")
    num_classes = int(num_classes)
    chances, event = response(epsilon, num_classes), event_with(words, PureDpEvent(epsilon))
    given = labels if isinstance(labels, np.ma.MaskedArray) else np.asarray(labels)
    if given.ndim != 1:
        raise ValueError(f"labels must be one class a row, got shape {given.shape}.")
    if ledger is not None:
        if (ledger.unit, ledger.adjacency) != (UNIT, REPLACE):
            raise ValueError(
                f"{ledger.path} counts for one {ledger.unit} ({ledger.adjacency}), and randomised response protects "
                f'one label against another, and no feature: open a ledger of unit "{UNIT}" and adjacency "{REPLACE}".'
            )
        ledger.pay(event, label=LABEL, settings={"sampling": None})
    # One sentence for all rows, and for a label that is missing: it names none.
    known = given.dtype.kind in "biufO" and not np.ma.is_masked(given)
    try:
        known = known and bool(np.isin(given, np.arange(num_classes)).all())
    except TypeError:  # a missing value of pandas' own
        known = False
    if not known:
        raise ValueError(f"labels must be whole numbers from 0 to {num_classes - 1}, and none may be missing.")
    own = np.asarray(given).astype(np.int64)
    draw = uniform(words, own.shape)
    # Below `own` the label stays; above, each other class has an interval of the same length. The division cannot round
    # to another whole number: a draw is half a step away from all multiples of a step.
    moved = np.floor((draw - chances.own) / chances.other).astype(np.int64)
    other = np.clip(moved, 0, num_classes - 2)
    other += other >= own
    return PrivateLabels(np.where(draw < chances.own, own, other), num_classes, chances, event)
