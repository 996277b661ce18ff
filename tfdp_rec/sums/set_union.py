"""Terms, or items, that many users have, found privately: a vocabulary that may be published.

**A vocabulary computed from private data is itself a release**: a term in it shows that some user has it. So it is
public to begin with, or it is found under differential privacy, in rounds. In each round

    each individual gives its distinct terms that no earlier round has found (at most m of them, chosen at random) the
    weight 1/√t, t their number: one individual moves the vector of all weights by at most 1 in ℓ₂. Add N(0, σᵢ²) to
    each weight above 0; found are those above  ρᵢ = max over t = 1..m of { 1/√t + σᵢ Φ⁻¹((1 − δᵢ)^(1/t)) }.

So the weight that the first round spends on frequent terms goes to rarer ones in the next. Each round takes nine times
as much of the budget as the one before: Σ σᵢ⁻² = σ⁻², Σ δᵢ = δ_ρ, both in the ratio 1 : 9 : 81 ...

Guarantee: the terms that one individual alone holds pass round i with probability at most δᵢ in all, and given that
none does, the round is the Gaussian mechanism of noise multiplier σᵢ, chosen by the releases of earlier rounds. All
rounds together cost `GaussianDpEvent(σ)` and `FailingDpEvent(δ_ρ)`.

Weights are whole numbers on a grid, rounded down, and the noise has no gaps (`fixed_point.py`); the threshold is a grid
step above ρ, for the rounding of the noise. The order of found terms depends on the release alone.

Reference:
    Gopi, Gulhane, Kulkarni, Shen, Shokouhi and Yekhanin, Differentially Private Set Union, ICML 2020 (weighted Gaussian
    with truncation). Swanberg, Desfontaines and Haney, DP-SIPS: A simpler, more scalable mechanism for differentially
    private partition selection, PoPETs 2023 (rounds).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tfdp_rec.core.claim.events import ComposedDpEvent, DpEvent, FailingDpEvent, GaussianDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.log import Catalogue, InParts, Log, Part
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import as_kind
from tfdp_rec.sums.counts import item_weights
from tfdp_rec.sums.fixed_point import ONE, check_noise, event_with, release_sums
from tfdp_rec.sums.total import Draw, Summand, total

if TYPE_CHECKING:
    from tfdp_rec.sums.spark import SparkLog

pa: Any = optional("pyarrow", "job")
pc: Any = optional("pyarrow.compute", "job")

_RATIO = 9.0  # of a round's share of the budget to that of the round before
LABEL = "private vocabulary"


class Found(NamedTuple):
    """Terms and the event of finding them.

    Attributes:
        terms: Terms of each round by their noisy weight, the greatest first; of a log, ids of items.
        event: Event to give to `Accountant.spend`.
    """

    terms: tuple[Any, ...]
    event: DpEvent


def private_items(
    log: Interactions | SparkLog,
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
    """The items of a log that many users have, found under differential privacy; the user is the unit.

    Args:
        log: Log of which no public list of items exists, here or on Spark. All users count, held-out ones too.
        epsilon: ε of this release alone.
        delta: δ of this release, half of it for the threshold.
        accountant: Accountant that is charged, and its ledger, before the log is read.
        size: Largest number of items returned; None for all that pass.
        max_items: m, the largest number of items that a user gives.
        rounds: Number of rounds; one is the weighted Gaussian.
        known: Ids that are public, or that an earlier release has found: they get no weight and are not returned.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> log = Interactions.read({"u": range(900), "i": ["tea", "jam", "tea"] * 299 + ["tea", "jam", "odd"]},
        ...                         user="u", item="i")
        >>> found = private_items(log, epsilon=2.0, delta=1e-6)
        >>> found.terms, log.with_items(found.terms).num_items
        (('tea', 'jam'), 2)
    """
    plan = _Rounds(noise_of_one_release(epsilon, delta / 2), delta / 2, max_items, rounds)
    event = event_with(words, plan.event)
    _check_size(size)
    if accountant is not None:
        accountant.spend(event, LABEL)
    histories, chunks = log.found()
    ids = chunks.combine_chunks()
    before = pc.is_in(ids, value_set=as_kind(ids.type, pa.array(list(known), ids.type if not known else None)))
    return Found(_find(histories, ids, plan, size, words, before.to_numpy(zero_copy_only=False)), event)


def least_users(epsilon: float, delta: float, max_items: int = 100, rounds: int = 3) -> float:
    """The number of users with one item alone that `private_items` finds as often as not; of more items, more users."""
    sigma, failing = _Rounds(noise_of_one_release(epsilon, delta / 2), delta / 2, max_items, rounds).each[-1]
    return threshold(sigma, failing, max_items)


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
    """The terms that many individuals hold, found under differential privacy; the individual is the unit.

    Args:
        held: Terms of each individual, read once; an individual's repeats count once.
        size: Largest number of terms returned; None for all that pass.
        noise_multiplier: σ of all rounds together; the vector of weights has sensitivity 1.
        threshold_delta: δ_ρ, the probability that a term of a single individual passes.
        max_terms: m, the largest number of distinct terms that an individual gives.
        rounds: Number of rounds.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> people = [["towel", "tea"]] * 500 + [["secret"]]
        >>> sorted(private_terms(people, 10, noise_multiplier=1.0, threshold_delta=1e-6).terms)
        ['tea', 'towel']
    """
    plan = _Rounds(noise_multiplier, threshold_delta, max_terms, rounds)
    _check_size(size)
    numbers: dict[str, int] = {}
    codes = [[numbers.setdefault(term, len(numbers) + 1) for term in _terms(each)] for each in held]
    offsets = np.cumsum([0, *map(len, codes)])
    histories = Log(np.array([code for each in codes for code in each], np.int64), offsets)
    return Found(_find(histories, pa.array(numbers, pa.string()), plan, size, words), event_with(words, plan.event))


def _terms(held: Iterable[str]) -> Iterator[str]:
    if isinstance(held, (str, bytes)):
        raise TypeError("held gives one text for an individual, where it should give a list of terms.")
    # Text that cannot be written down, of half a character, has a "?" there: an error would tell who has it.
    return (term if term.isascii() else term.encode("utf-8", "replace").decode() for term in held)


class _Rounds:
    """Noise and δ of each round, the cap on terms, and the event of all rounds."""

    def __init__(self, noise_multiplier: float, threshold_delta: float, max_terms: int, rounds: int):
        if max_terms < 1 or rounds < 1:
            raise ValueError(f"rounds, and the terms that one gives, must be at least 1, got {rounds} and {max_terms}.")
        threshold(noise_multiplier, threshold_delta, max_terms)  # refuses a δ out of range
        shares = [_RATIO**-later for later in reversed(range(rounds))]
        shares = [share / math.fsum(shares) for share in shares]
        self.max_terms = max_terms
        # The first round has the most noise, which the grid must still hold: that bounds the number of rounds.
        self.each = [(check_noise(noise_multiplier / math.sqrt(s)), threshold_delta * s) for s in shares]
        self.event = ComposedDpEvent([GaussianDpEvent(float(noise_multiplier)), FailingDpEvent(threshold_delta)])


def _check_size(size: int | None) -> None:
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}.")


def _find(
    histories: InParts,
    ids: Any,
    plan: _Rounds,
    size: int | None,
    words: WordSource,
    before: NDArray[np.bool_] | None = None,
) -> tuple[Any, ...]:
    """The terms of all rounds, round by round, in each the greatest noisy weight first."""
    known, answer = np.zeros(len(ids), bool) if before is None else before.copy(), list[Any]()
    for sigma, delta in plan.each if len(ids) else ():
        given = weights(histories, known, plan.max_terms, words)
        seen = np.flatnonzero(given)  # a term without weight gets no noise: no δ is charged for its passing
        noisy = release_sums(given[seen], sigma, words)
        above = noisy > threshold(sigma, delta, plan.max_terms) + 1 / ONE
        known[seen[above]] = True
        answer += [term for _, term in sorted(zip(-noisy[above], ids.take(pa.array(seen[above])).to_pylist()))]
    return tuple(answer[:size])


def threshold(noise_multiplier: float, threshold_delta: float, max_terms: int) -> float:
    """ρ: the noisy weight above which terms are released."""
    if not 0 < threshold_delta < 1:
        raise ValueError(f"threshold_delta must lie strictly between 0 and 1, got {threshold_delta}.")
    t = np.arange(1, max_terms + 1)
    upper_tail = -np.expm1(np.log1p(-threshold_delta) / t)  # 1 − (1 − δ)^(1/t), without cancellation
    return float(np.max(1 / np.sqrt(t) - noise_multiplier * special.ndtri(upper_tail)))


def weights(histories: InParts, known: NDArray[np.bool_], max_terms: int, words: WordSource) -> NDArray[np.int64]:
    """Sum of the individuals' weights, in grid steps. It has no noise and must not be released."""
    position = np.where(known, -1, np.arange(len(known)))
    capped = Summand(item_weights, len(known), functools.partial(_cap, position=position, most=max_terms))
    return total(histories, Catalogue(np.arange(1, len(known) + 1)), capped, words)


def _cap(part: Part, draw: Draw, position: NDArray[np.int64], most: int) -> Iterator[Part]:
    """At most `most` unknown terms of each individual, every set of that size with the same probability."""
    part = part.restrict_to(position)
    if not len(part.users) or part.lengths.max() <= most:
        yield part
        return
    # Each term gets random bits; the terms with the least bits of each individual stay.
    order = np.lexsort((draw(part.lengths), part.users))
    first = np.cumsum(part.lengths) - part.lengths
    kept = order[np.arange(len(order)) - first[part.users] < most]  # `order` keeps the users sorted
    yield Part(part.num_users, part.users[kept], part.places[kept])
