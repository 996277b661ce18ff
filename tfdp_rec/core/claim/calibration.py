"""The least noise for a budget.

RDP, which is quick and never gives too little noise, finds a first answer; PLD on a coarse grid tightens it; PLD on its
own grid gives the final one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent
from scipy import optimize

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.composition import check_epsilon, epsilon_of, searches, valid_count
from tfdp_rec.core.claim.filters import PrivacyFilter
from tfdp_rec.core.claim.ledger import Ledger, compose
from tfdp_rec.core.claim.schemes import Sampling

Search = tuple[str, float]  # accountant, and factor on its grid
_NEAR = 5e-4  # relative distance to the budget at which the search ends: less noise would gain no more than that


def calibrate_noise(
    target_epsilon: float, delta: float, sampling: Sampling, steps: int, accountant: str = "pld",
    make_event: Callable[[float], DpEvent] = GaussianDpEvent, spent: Iterable[tuple[DpEvent, str]] = (),
    allow_large_delta: bool = False, ledger: Ledger | None = None, share: float = 1.0,
) -> float:
    """The least noise multiplier, to one part in a thousand, with which `steps` steps cost at most target_epsilon.

    Args:
        target_epsilon: Budget that the answer never exceeds.
        delta: Probability δ.
        sampling: Sampling scheme.
        steps: Number of steps that the budget pays for.
        accountant: "pld" or "rdp".
        make_event: Function from a noise multiplier to the event of one step, for steps of more than one Gaussian.
        spent: (event, label) pairs of other uses of the data that the budget pays for.
        allow_large_delta: Whether to accept δ above 1 / num_units.
        ledger: Ledger in which the steps will be paid: what it holds counts against the budget. Under a filter,
            target_epsilon must be at least its ε, and the noise is the least that fits in the rest.
        share: Fraction to use of a filter's rest, such as 1/30 for the first of thirty days, then 1/29.

    Raises:
        ValueError: An argument is out of range, or no noise can meet the budget.

    Example:
        >>> from tfdp_rec.privacy import PoissonSampling
        >>> sampling = PoissonSampling(num_units=110_794, expected_batch_size=1024)
        >>> noise = calibrate_noise(3.0, delta=1e-6, sampling=sampling, steps=2000, accountant="rdp")
        >>> round(noise, 2)
        1.00
    """
    if valid_count("steps", steps) == 0:
        raise ValueError("steps must be at least 1, got 0.")
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share!r}.")
    others = list(spent) + ([(compose(ledger.paid), "what the ledger holds")] if ledger else [])
    limit = ledger.limit if ledger else None
    if limit is None and share != 1:
        raise ValueError("share= is a fraction of a filter's rest: give ledger=, a ledger that was begun with limit=.")
    if limit is None:
        check = Accountant(make_event(1.0), sampling, delta, accountant, allow_large_delta)
        for event, label in others:
            check.spend(event, label)
    besides = [event for event, _ in others]
    return least_noise(target_epsilon, delta, sampling, steps, accountant, make_event, besides, limit, share)


def least_noise(
    target_epsilon: float, delta: float, sampling: Sampling, steps: int, accountant: str,
    make_event: Callable[[float], DpEvent], besides: Sequence[DpEvent], limit: PrivacyFilter | None, share: float = 1.0,
    contain: Callable[[DpEvent], DpEvent] | None = None,
) -> float:  # fmt: skip
    """As `calibrate_noise`, of events that an accountant has checked, beside all else that the budget pays for.

    The event of all steps is part of what `contain` makes of it, if it is given.
    """
    check_epsilon(target_epsilon)
    if limit is not None:
        if limit.claim(delta) > target_epsilon:
            raise ValueError(
                f"The ledger is {limit}, and claims its whole budget, however little is used: give its epsilon and "
                "delta. To use less of it give share=, or fewer steps."
            )
        limit.refuse_unpriced(sampling.compose_history([(make_event(1.0), 1)]))
        accountant = "rdp"  # names the only search; the filter sets the price
    held = limit.used(ComposedDpEvent(besides)) if limit else 0.0
    rest = share * (1 - held) if limit else target_epsilon

    def total_event(noise: float, count: int) -> DpEvent:
        trained = sampling.compose_history([(make_event(noise), count)])
        return ComposedDpEvent([*besides, contain(trained) if contain else trained])

    @functools.cache
    def excess(noise: float, by: str, coarser: float) -> float:
        if limit is not None:
            return min(limit.used(total_event(noise, steps)) - held - rest, 1e9)
        return min(epsilon_of(total_event(noise, steps), delta, by, coarser) - rest, 1e9)

    near = _NEAR * rest
    # A quick search first, unless its price of all else passes the budget; closer ones begin at its answer.
    first, *closer = searches(total_event(1.0, 1), accountant)
    while (between := _bracket(excess, first)) is None:
        if not closer or not (besides or contain):
            raise ValueError(
                f"No noise multiplier up to 10^6 keeps {steps} steps within epsilon = {target_epsilon}: "
                "raise target_epsilon, or spend less elsewhere."
            )
        first, *closer = closer
    low, high = between
    if high < 1e-3:
        return high
    noise = _least(excess, first, low, high, near)
    for by in closer:
        if not -near <= excess(noise, *by) <= 0:
            noise = _closer(excess, by, noise, near) or noise
    if excess(noise, accountant, 1.0) > 0:  # pld rounds up to its grid at every step: a tiny ε is below its resolution
        raise ValueError(
            f"The {accountant} accountant cannot show an epsilon as small as {target_epsilon:g} over so many steps: "
            'use accountant="rdp" (--rdp).'
        )
    return noise


def _bracket(excess: Callable[..., float], by: Search) -> tuple[float, float] | None:
    """Half of a multiplier and that multiplier, which is enough: half is not, or it is below 10^-3. Or None."""
    high = 1.0
    while excess(high, *by) > 0:
        high *= 2
        if high > 1e6:
            return None
    low = high / 2
    while excess(low, *by) <= 0 and high >= 1e-3:
        high, low = low, low / 2
    return low, high


def _least(excess: Callable[..., float], by: Search, low: float, high: float, near: float) -> float:
    """A multiplier between one that is too small and one that is enough, with which at most `near` is left over."""

    def distance(noise: float) -> float:
        found = excess(noise, *by)
        return 0.0 if -near <= found <= 0 else found + near / 2  # the search ends at the first 0

    noise = float(optimize.brentq(distance, low, high, rtol=1e-5))
    while excess(noise, *by) > 0:
        noise *= 1.00005
    return noise


def _closer(excess: Callable[..., float], by: Search, noise: float, near: float) -> float | None:
    """The answer of a slower search near that of a quicker one; None if it finds none there."""
    low = high = noise
    while excess(high, *by) > 0:
        high *= 1.1
        if high > 2 * noise:
            return None
    while excess(low, *by) <= 0:
        high, low = low, 0.9 * low
    return _least(excess, by, low, high, near)
