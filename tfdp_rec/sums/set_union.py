"""Which terms, or items, many people have, found privately: a vocabulary that may be published.

**A vocabulary read off private data is itself a release**: a term in it tells that somebody used it. So it is public
to begin with, or it is found under differential privacy, in rounds. In each

    each individual gives its distinct terms that no earlier round has found (at most m of them, chosen at random) the
    weight 1/√t, t how many: one individual moves the vector of all weights by at most 1 in ℓ₂. Add N(0, σᵢ²) to each
    weight seen; found are those above  ρᵢ = max over t = 1..m of { 1/√t + σᵢ Φ⁻¹((1 − δᵢ)^(1/t)) }.

So weight that the first round would waste on terms everybody has goes to rarer ones in the next. An early round takes a
ninth of what the next takes of the budget: Σ σᵢ⁻² = σ⁻², Σ δᵢ = δ_ρ, both in the ratio 1 : 9 : 81 ...

Guarantee: a term that one individual alone holds passes round i with probability at most δᵢ over all its terms, and
given that none does, what a round releases is the Gaussian mechanism of noise multiplier σᵢ, chosen by what earlier
rounds released. All rounds together cost `GaussianDpEvent(σ)` and `FailingDpEvent(δ_ρ)`.

Weights are whole numbers on a grid, rounded down, and the noise has no gaps (`fixed_point.py`); the threshold is a grid
step above ρ, for the rounding of the noise. Found terms come in an order that hangs on what was released alone.

Reference:
    Gopi, Gulhane, Kulkarni, Shen, Shokouhi and Yekhanin, Differentially Private Set Union, ICML 2020 (weighted Gaussian
    with truncation). Swanberg, Desfontaines and Haney, DP-SIPS: A simpler, more scalable mechanism for differentially
    private partition selection, PoPETs 2023 (rounds).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent
from numpy.typing import NDArray
from scipy import special

from tfdp_rec.datasets.histories import Catalogue, Histories, Part
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import as_kind
from tfdp_rec.noise.words import WordSource, os_entropy
from tfdp_rec.pricing.events import FailingDpEvent
from tfdp_rec.pricing.gaussian_release import noise_of_one_release
from tfdp_rec.sums.fixed_point import ONE, checked_noise, grid_weights, released

_RATIO = 9.0  # of a round's share to that of the round before
LABEL = "private vocabulary"


class Found(NamedTuple):
    """Terms, and what finding them cost.

    Attributes:
        terms: the most used first; of a log, ids of items.
        event: for `Accountant.spend`.
    """

    terms: tuple[Any, ...]
    event: DpEvent


def private_items(
    log: Interactions,
    *,
    epsilon: float,
    delta: float,
    accountant: Any = None,
    size: int | None = None,
    max_items: int = 100,
    rounds: int = 3,
    known: Sequence[Any] = (),
    words: WordSource = os_entropy,
) -> Found:
    """The items of a log that many users have, found under differential privacy, one user a unit.

    Args:
        log: whose items nobody has listed; all users count, those kept for testing too.
        epsilon: ε of this release by itself.
        delta: δ of it, half for the threshold.
        accountant: is told, and its ledger pays, before anything is looked at.
        size: at most so many items.
        max_items: m, items a user gives.
        rounds: how many; 1 is the weighted Gaussian.
        known: ids that are public, or that an earlier release has found: they take no weight, and are not found again.
        words: for tests; the operating system's if left out.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> log = Interactions.read({"u": range(900), "i": ["tea", "jam", "tea"] * 299 + ["tea", "jam", "odd"]},
        ...                         user="u", item="i")
        >>> found = private_items(log, epsilon=2.0, delta=1e-6)
        >>> found.terms, log.with_items(found.terms).num_items
        (('tea', 'jam'), 2)
    """
    plan = _Rounds(noise_of_one_release(epsilon, delta / 2), delta / 2, max_items, rounds)
    _check_size(size)
    if accountant is not None:
        accountant.spend(plan.event, LABEL)
    histories, chunks = log.found()
    ids = chunks.combine_chunks()
    before = pc.is_in(ids, value_set=as_kind(ids.type, pa.array(list(known), ids.type if not known else None)))
    return Found(_found(histories, ids, plan, size, words, before.to_numpy(zero_copy_only=False)), plan.event)


def private_terms(
    held: Iterable[Iterable[str]],
    size: int | None = None,
    *,
    noise_multiplier: float,
    threshold_delta: float,
    max_terms: int = 100,
    rounds: int = 1,
    words: WordSource = os_entropy,
) -> Found:
    """The terms that many individuals hold, found under differential privacy, one individual a unit.

    Args:
        held: the terms of each individual; an individual's repeats count once. Read once.
        size: at most so many terms; fewer when fewer pass the threshold.
        noise_multiplier: σ of all rounds together; the vector of weights has sensitivity 1.
        threshold_delta: δ_ρ, probability that a term of a single individual passes.
        max_terms: m, distinct terms an individual gives.
        rounds: how many.
        words: for tests; the operating system's if left out.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> people = [["towel", "tea"]] * 500 + [["secret"]]
        >>> sorted(private_terms(people, 10, noise_multiplier=1.0, threshold_delta=1e-6).terms)
        ['tea', 'towel']
    """
    plan = _Rounds(noise_multiplier, threshold_delta, max_terms, rounds)
    _check_size(size)
    numbers: dict[str, int] = {}
    codes = [[numbers.setdefault(term, len(numbers) + 1) for term in terms] for terms in held]
    offsets = np.cumsum([0, *map(len, codes)])
    histories = Histories(np.array([code for each in codes for code in each], np.int64), offsets)
    return Found(_found(histories, pa.array(numbers, pa.string()), plan, size, words), plan.event)


class _Rounds:
    """Noise, δ and the most terms of each round."""

    def __init__(self, noise_multiplier: float, threshold_delta: float, max_terms: int, rounds: int):
        if max_terms < 1 or rounds < 1:
            raise ValueError(f"rounds, and the most that one gives, must be at least 1, got {rounds} and {max_terms}.")
        sigma = checked_noise(noise_multiplier)
        threshold(sigma, threshold_delta, max_terms)
        shares = _RATIO ** np.arange(rounds)
        shares /= shares.sum()
        self.max_terms = max_terms
        self.each = [(sigma / math.sqrt(share), threshold_delta * share) for share in shares]
        self.event = ComposedDpEvent([GaussianDpEvent(sigma), FailingDpEvent(threshold_delta)])


def _check_size(size: int | None) -> None:
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}.")


def _found(
    histories: Histories, ids: pa.Array, plan: _Rounds, size: int | None, words: WordSource,
    before: NDArray[np.bool_] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The terms of all rounds, round by round, in each the greatest noisy weight first."""
    known, answer = np.zeros(len(ids), bool) if before is None else before.copy(), list[Any]()
    for sigma, delta in plan.each if len(ids) else ():
        total = weights(histories, known, plan.max_terms, words)
        seen = np.flatnonzero(total)  # what nobody gave gets no noise: it could pass, and no δ has been paid for that
        noisy = released(total[seen], sigma, words)
        above = noisy > threshold(sigma, delta, plan.max_terms) + 1 / ONE
        known[seen[above]] = True
        answer += [term for _, term in sorted(zip(-noisy[above], ids.take(pa.array(seen[above])).to_pylist()))]
    return tuple(answer[:size])


def threshold(noise_multiplier: float, threshold_delta: float, max_terms: int) -> float:
    """ρ: the noisy weight above which terms are released.

    Args:
        noise_multiplier: σ.
        threshold_delta: δ_ρ in (0, 1).
        max_terms: m.

    Raises:
        ValueError: δ_ρ is out of range.

    Example:
        >>> round(threshold(1.0, 1e-6, 1), 3)
        5.753
    """
    if not 0 < threshold_delta < 1:
        raise ValueError(f"threshold_delta must lie strictly between 0 and 1, got {threshold_delta}.")
    t = np.arange(1, max_terms + 1)
    upper_tail = -np.expm1(np.log1p(-threshold_delta) / t)  # 1 − (1 − δ)^(1/t), without cancellation
    return float(np.max(1 / np.sqrt(t) - noise_multiplier * special.ndtri(upper_tail)))


def weights(histories: Histories, known: NDArray[np.bool_], max_terms: int, words: WordSource) -> NDArray[np.int64]:
    """The sum of the individuals' weights, in grid steps, which one of them moves by at most 1 in ℓ₂. No noise: not to
    be released.

    Args:
        histories: each individual's terms, numbered from 1.
        known: of each term, whether it was found before and gets no weight.
        max_terms: m.
        words: decide which terms count of those who have more.
    """
    position = np.where(known, -1, np.arange(len(known)))
    total = np.zeros(len(known), np.int64)
    for part in histories.parts(Catalogue(np.arange(1, len(known) + 1))):
        part = _capped(part.among(position), max_terms, words)
        np.add.at(total, part.places, grid_weights(part.lengths)[part.users])
    return total


def _capped(part: Part, most: int, words: WordSource) -> Part:
    """At most so many terms of each, each set of that size as likely as any: those whose random words are least."""
    if not len(part.users) or part.lengths.max() <= most:
        return part
    order = np.lexsort((words(len(part.users)), part.users))
    first = np.cumsum(part.lengths) - part.lengths
    kept = order[np.arange(len(order)) - first[part.users] < most]  # sorted by user as they were, ranks match places
    return Part(part.num_users, part.users[kept], part.places[kept])
