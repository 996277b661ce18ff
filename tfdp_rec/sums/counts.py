"""Number of users that have each item, released once under differential privacy: the user is the unit.

A user with d different items gives each of them the weight

    1/√d,   or, if a typical user is said to have t items,   min(1/√d, √t/d),

so that one user moves the vector of counts by at most 1 in ℓ₂. The first weight uses all of that bound; the second is
in proportion to the chance that a random item of a user is this one, except for users with fewer than t items.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.log import Catalogue, InParts, Part, log_of
from tfdp_rec.sums.fixed_point import check_noise, event_with, grid_weights, release_sums
from tfdp_rec.sums.total import Cells, Summand, total

LABEL = "popularity counts"


class Counted(NamedTuple):
    """Noisy counts and their event.

    Attributes:
        values: Noisy count of each item of the catalogue; some are negative.
        event: Event to give to `Accountant.spend`.
    """

    values: NDArray[np.float64]
    event: DpEvent


def private_counts(
    histories: Any,
    catalogue: Catalogue,
    *,
    noise_multiplier: float,
    typical: int | None = None,
    accountant: Any = None,
    words: WordSource = os_entropy,
) -> Counted:
    """The number of users that have each item, under differential privacy.

    Args:
        histories: Raw ids of each user's items: `Histories`, `Timelines`, `Interactions` or `SparkLog` (by number), or
            an iterable. Repeats and unknown ids do not count.
        catalogue: Public items; of a log, `log.catalogue`.
        noise_multiplier: σ; the vector of counts has sensitivity 1.
        typical: t, the number of items of a typical user; None for the weight 1/√d.
        accountant: Accountant that is charged, and its ledger, before the histories are read.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> watched = [[10, 20]] * 300 + [[]]
        >>> counted = private_counts(watched, Catalogue([10, 20, 30]), noise_multiplier=1.0)
        >>> bool(counted.values[0] > 150), counted.event
        (True, GaussianDpEvent(noise_multiplier=1.0))
    """
    noise = check_noise(noise_multiplier)
    if typical is not None and not typical >= 1:
        raise ValueError(f"typical must be at least 1 item, got {typical!r}.")
    event = event_with(words, GaussianDpEvent(noise))
    source = log_of(histories)
    source.parts(catalogue)  # refused before it is paid for; nothing is read
    if accountant is not None:
        accountant.spend(event, LABEL)
    summand = Summand(functools.partial(item_weights, typical=typical), len(catalogue))
    return Counted(release_sums(total(source, catalogue, summand), noise, words), event)


def exact_counts(users: InParts, catalogue: Catalogue) -> NDArray[np.int64]:
    """How many users have each item: without noise, and so for the log's owner alone."""
    return total(users, catalogue, Summand(_ones, len(catalogue)))


def _ones(part: Part) -> Cells:
    return part.places, np.ones(len(part.places), np.int64)


def item_weights(part: Part, typical: int | None = None) -> Cells:
    """The weight of each item of each user, in grid steps. It has no noise and must not be released."""
    lengths = part.lengths
    weights = grid_weights(lengths)
    if typical is not None:
        weights = np.minimum(weights, grid_weights(lengths**2, over=int(typical)))  # √(t/d²)
    return part.places, weights[part.users]
