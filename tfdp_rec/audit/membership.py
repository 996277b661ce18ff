"""Membership attacks on a released recommender: which units was it trained on, by its losses on them?

An attack gives each unit a score, the larger the more likely a member, and names the units above a threshold. With
l(x) the released model's loss on a unit,

    loss       −l(x)
    shadows    (m(x) − l(x)) / s(x),

m(x) and s(x) being mean and deviation of the losses on x of shadow models, which are trained in the same way without
x. Of few shadows a deviation is known badly, so s² is drawn towards its mean over all units. Shadows are trained on
random halves of all units, in pairs: each unit is left out by one of a pair.

An interval is over the choice of units, for this one model. `limit` is what a claim allows at most, for each unit and
over the randomness of training. So a value above the limit is a reason to look for a fault; a proof is
`one_run_audit(attack.scores, ...)`, where fair coins chose the members.

**The results are computed from users' data without noise, and are not private.**

Reference:
    Yeom et al., Privacy Risk in Machine Learning, CSF 2018, for the first; Carlini et al., Membership Inference Attacks
    From First Principles, S&P 2022, for the second, offline.
    van Dantzig, On the consistency and the power of Wilcoxon's two sample test, 1951: the variance of the AUC is at
    most A (1 − A) / min(members, others).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Units = NDArray[np.int64]
Losses = Callable[[Units], ArrayLike]
"""One loss for each unit, by its number."""
Limit = Callable[[ArrayLike], ArrayLike]
"""The largest true-positive rate of any attack at each false-positive rate."""

RATES = (0.01, 0.05, 0.1)
_PRIOR = 4  # losses that the mean deviation counts for, beside a unit's own


@dataclass(frozen=True)
class AttackRate:
    """A rate that an attack reached, its interval, and the most that the claim allows."""

    value: float
    low: float
    high: float
    most: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}), at most {self.most:.3f}"


@dataclass(frozen=True)
class MembershipAttack:
    """What one attack found.

    Attributes:
        scores: Score of each unit, members first.
        auc: Probability that a member's score is above another unit's.
        true_positives: Share of the members that are named, by the share of other units that are.
    """

    scores: NDArray[np.float64]
    auc: AttackRate
    true_positives: Mapping[float, AttackRate]


def attack_membership(
    released: Losses,
    members: ArrayLike,
    others: ArrayLike,
    *,
    train: Callable[[Units], Losses] | None = None,
    num_shadows: int = 8,
    limit: Limit = np.ones_like,
    rates: Sequence[float] = RATES,
    confidence: float = 0.95,
    seed: int | None = None,
) -> dict[str, MembershipAttack]:
    """Attacks a released model by its losses, and with `train` by shadow models, too.

    Args:
        released: Losses of units by the released model.
        members: Numbers of units that it was trained on.
        others: Numbers of units that it was not trained on, otherwise like these.
        train: The same training on any units, which returns the losses of what it made.
        num_shadows: Number of shadow models, even and at least 4.
        limit: What the claim allows, such as `tfdp_rec.privacy.attack_limit(event)`; by default all.
        rates: False-positive rates that are asked about.
        confidence: Probability of each interval.
        seed: Seed of the shadows' halves; without it the operating system's entropy decides.

    Returns:
        Attacks by name: `loss`, and `shadows`. They are not private.

    Raises:
        ValueError: A unit is in both lists or twice in one, a list is empty, a loss is not finite, or a number is out
            of range.

    Example:
        >>> told = lambda units: np.where(units < 50, 0.0, 1.0) + 0.001 * (units % 50)
        >>> found = attack_membership(told, np.arange(50), np.arange(50, 100))
        >>> print(found["loss"].auc)
        1.000 (0.929 to 1.000), at most 1.000
    """
    inside, outside = np.asarray(members), np.asarray(others)
    units = np.concatenate([inside, outside])
    if units.dtype.kind not in "iu" or not inside.size or not outside.size or np.unique(units).size < units.size:
        raise ValueError("members and others must be lists of different units, whole numbers, neither empty.")
    if not all(0 < rate < 1 for rate in (*rates, confidence)):
        raise ValueError(f"rates and confidence must lie strictly between 0 and 1, got {list(rates)}, {confidence}.")
    if num_shadows < 4 or num_shadows % 2:
        raise ValueError(f"num_shadows must be even and at least 4, got {num_shadows}.")
    losses = _check(released, units)
    scores = {"loss": -losses}
    if train is not None:
        scores["shadows"] = _standout(losses, _losses_without(train, units, num_shadows, np.random.default_rng(seed)))
    return {name: _judge(each, inside.size, limit, rates, 1 - confidence) for name, each in scores.items()}


def _losses_without(
    train: Callable[[Units], Losses], units: Units, num_shadows: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Losses of each unit by the shadows that were trained without it, [shadows / 2, units]."""
    found = np.empty((num_shadows // 2, units.size))
    for row in found:
        order = rng.permutation(units.size)
        for half in np.array_split(order, 2):
            left = np.setdiff1d(order, half)
            row[left] = _check(train(np.sort(units[half])), units[left])
    return found


def _standout(losses: NDArray[np.float64], without: NDArray[np.float64]) -> NDArray[np.float64]:
    squares, degrees = np.sum((without - without.mean(axis=0)) ** 2, axis=0), len(without) - 1
    variance = (squares + _PRIOR * np.mean(squares) / degrees) / (degrees + _PRIOR)
    return (without.mean(axis=0) - losses) / np.sqrt(np.maximum(variance, np.finfo(float).tiny))


def _judge(
    scores: NDArray[np.float64], members: int, limit: Limit, rates: Sequence[float], missed: float
) -> MembershipAttack:
    inside, outside = scores[:members], np.sort(scores[members:])[::-1]
    ranks = stats.rankdata(scores)[:members]  # ties count half
    area = float((ranks.mean() - (members + 1) / 2) / outside.size)
    few, z = min(members, outside.size), stats.norm.isf(missed / 2)
    centre, width = area + z**2 / (2 * few), z * np.sqrt(area * (1 - area) / few + (z / (2 * few)) ** 2)
    low, high = ((centre + side * width) / (1 + z**2 / few) for side in (-1, 1))
    most = np.asarray(limit(np.linspace(0, 1, 1001)[1:])).mean()  # it grows, so that this is above its integral
    reached = {
        rate: _true_positives(inside, outside, rate, float(np.asarray(limit([rate]))[0]), missed) for rate in rates
    }
    return MembershipAttack(scores, AttackRate(area, max(0.0, low), min(1.0, high), float(most)), reached)


def _true_positives(
    inside: NDArray[np.float64], outside: NDArray[np.float64], rate: float, most: float, missed: float
) -> AttackRate:
    """Named members where `rate` of the other units are; the interval holds whatever the scores' distribution is."""
    count, members, each = outside.size, inside.size, missed / 4
    # The threshold that names k of n others names more than `rate` of all with probability P[Binomial(n, rate) ≤ k].
    fewest = int(stats.binom.ppf(each, count, rate)) - 1  # the most whose probability is at most `each`
    largest = int(stats.binom.isf(each, count, rate))
    below = np.append(outside, -np.inf)
    named = int(np.sum(inside > below[int(rate * count)]))
    least = int(np.sum(inside > below[fewest])) if fewest >= 0 else 0
    upmost = int(np.sum(inside >= below[largest]))
    low = stats.beta.ppf(each, least, members - least + 1) if least else 0.0
    high = stats.beta.isf(each, upmost + 1, members - upmost) if upmost < members else 1.0
    return AttackRate(named / members, float(low), float(high), most)


def _check(losses: Losses, units: Units) -> NDArray[np.float64]:
    found = np.asarray(losses(units), np.float64)
    if found.shape != units.shape or not np.all(np.isfinite(found)):
        raise ValueError("losses must give one finite number for each unit.")
    return found
