"""Metrics on held-out units, released once under differential privacy: one vector, one payment.

The vector is of whole numbers, in blocks; each has a public weight p, 12 but for coverage's 3 and Gini's 1, and P is
the sum of these. One unit that contributes nothing instead of what it has moves a block by at most
Q = ⌊√(4²⁰ p / P)⌋ in ℓ₂, and so the vector by at most 2²⁰ grid steps = 1:

* **Means** of K values v in [0, 1]: a unit gives q, and q (2v − 1) and q (2v² − 1)/4 for each v, rounded towards zero,
  where q² (1 + K + K/16) ≤ Q². So the number of units is noisy too; a mean is half of 1 + the ratio of two sums.
* **Means by group**: the same for each public group, in one block, since a unit is in one group and moves no other.
* **AUC**: rows fall into cells by label and public thresholds; each of a unit's r rows gives ⌊Q / r⌋.
* **Coverage**: ⌊Q c / k⌋, of c items that are in a list; a list of k items moves c by at most k.
* **Gini**: ⌊Q S / s⌋, S = Σ_{i<j} |c_i − c_j| of the m items' counts. A list of a items moves c_i − c_j by at
  most 1, and only where one of i, j is in it: S by at most a (m − a) ≤ s, the most of it for a ≤ k. The figure is
  S / (n k m), n the public number of lists that there may be: one unit moves it by at most s / (n k m) ≤ 1/n.

(⌊x⌋ and ⌊y⌋ are at most ⌈|x − y|⌉ apart, and Q is whole.) `fixed_point.release_sums` adds the noise: that is one
Gaussian mechanism of noise multiplier σ, and figures and intervals are computed from its output alone.
docs/privacy-metrics.md has the proofs, and how an interval contains both noise and the choice of the held-out units.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.unit_ids import unit_numbers
from tfdp_rec.sums.fixed_point import ONE, check_noise, event_with, release_sums

LABEL = "metrics of held-out units"
_CLEAR = 4.0  # standard deviations of noise that a number of units must exceed to be divided by
_SMALL = 4  # squares serve the intervals alone: they weigh a quarter, so that they hardly add to the noise


@dataclasses.dataclass(frozen=True)
class Figure:
    """A released metric and its two errors.

    Attributes:
        value: The metric; NaN where noise hides the units.
        noise: Standard error by the noise.
        sampling: Standard error, or a bound of it, by the choice of the held-out units.
        most: The largest value that the metric can have; the least is 0.

    Example:
        >>> print(Figure(0.25, noise=0.003, sampling=0.004))
        0.2500 [0.2402, 0.2598]
    """

    value: float
    noise: float
    sampling: float
    most: float = 1.0

    def interval(self, errors: float = 1.96) -> tuple[float, float]:
        """Interval of some standard errors, of noise and sampling together; by default a 95% confidence interval."""
        half = errors * _error(self)
        if not math.isfinite(self.value + half):
            return 0.0, self.most
        return max(0.0, self.value - half), min(self.most, self.value + half)

    def __str__(self) -> str:
        low, high = self.interval()
        return f"{self.value:.4f} [{low:.4f}, {high:.4f}]"


class PrivateMetrics(NamedTuple):
    """Released metrics and their event.

    Attributes:
        figures: Figures by name.
        event: Event to give to `Accountant.spend`, or to a plan: `PrivatePlan(spent=[(event, label)])`.
    """

    figures: Mapping[str, Figure]
    event: DpEvent


class ScoredRows(NamedTuple):
    """Rows with a score and a label, for AUC; a unit may have several, and counts once.

    Attributes:
        unit: Unit id of each row.
        scores: Score of each row.
        labels: 1 or 0.
        thresholds: Public, increasing bounds between cells of scores; scores of one cell count as equal.
    """

    unit: Any
    scores: ArrayLike
    labels: ArrayLike
    thresholds: ArrayLike


class RecommendedLists(NamedTuple):
    """One list of recommended items for each unit, for coverage and Gini.

    Attributes:
        recommended: Item numbers 1..m, 0 for none, `[units, k]`; repeats in a list count once.
        num_items: Public number of items, m.
        num_slots: Public number of lists that there may be, n: of all held-out units, whatever they have.
    """

    recommended: ArrayLike
    num_items: int
    num_slots: int


class PublicGroups(NamedTuple):
    """The group that each unit is in, for means by group and the largest gap between two groups.

    Attributes:
        of_units: Group of each unit, by the unit's own data or a public list.
        names: Public list of all groups that there may be, at least two.
    """

    of_units: Sequence[Any]
    names: Sequence[Any]


def noise_of_metrics(epsilon: float, delta: float, share: float = 0.05) -> float:
    """The noise multiplier with which metrics take a share of a budget: a Gaussian of (1 − share) ε and they cost ε.

    By themselves they cost more than the share: of ε = 8, 1.98. Add their event to those of training, in one ledger.

    Args:
        epsilon: ε of all that is done with the units.
        delta: δ of it.
        share: Share of ε, above 0 and below 1.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> round(noise_of_metrics(8.0, 1e-6), 2)
        2.26
    """
    if not 0 < share < 1:
        raise ValueError(f"share must be above 0 and below 1, got {share!r}.")
    left = noise_of_one_release(epsilon, delta) ** -2 - noise_of_one_release((1 - share) * epsilon, delta) ** -2
    if left <= 0.0:
        raise ValueError(f"share must be large enough to be told from 0 beside epsilon, got {share!r}.")
    return left**-0.5


def private_metrics(
    units: Any, *, noise_multiplier: float, means: Mapping[str, ArrayLike] | None = None,
    losses: Mapping[str, tuple[ArrayLike, float]] | None = None, rows: ScoredRows | None = None,
    lists: RecommendedLists | None = None, groups: PublicGroups | None = None, unit: str = "user",
    accountant: Any = None, words: WordSource = os_entropy,
) -> PrivateMetrics:  # fmt: skip
    """Metrics of a released model on held-out units, under differential privacy, each with an interval.

    Args:
        units: Id of each held-out unit that has values, each once. Units without data are left out.
        noise_multiplier: σ; the vector of all figures has sensitivity 1. `noise_of_metrics` gives it for a budget.
        means: Values in [0, 1] of each unit by the metric's name, such as recall@k, nDCG@k or a share of popular items.
        losses: Losses of each unit and their public bound by name; below 0 they count as 0, above the bound as it.
        rows: Scores and labels, for "AUC".
        lists: What was recommended, for "coverage" and "Gini".
        groups: Groups of the units, for each mean and loss by group, "recall@10, GROUP", and "recall@10, largest gap".
        unit: What is one unit. An accountant's must be the same.
        accountant: Accountant that is charged, and its ledger, before anything is summed.
        words: Source of random bits, for tests; the operating system's by default.

    Raises:
        ValueError: What is given does not fit together, is out of range, or is no number; nothing is paid then.

    Example:
        >>> recall = np.random.default_rng(0).random(8000) < 0.3
        >>> found = private_metrics(np.arange(8000), means={"recall@10": recall}, noise_multiplier=2.26)
        >>> low, high = found.figures["recall@10"].interval()
        >>> bool(0.28 < low < high < 0.33), found.event
        (True, GaussianDpEvent(noise_multiplier=2.26))
    """
    noise = check_noise(noise_multiplier)
    blocks = _blocks(units, means or {}, losses or {}, rows, lists, groups)
    event = event_with(words, GaussianDpEvent(noise))
    charge(accountant, event, LABEL, unit)
    parts = [3 if isinstance(block, _Coverage) else 1 if isinstance(block, _Gini) else 12 for block in blocks]
    shares = [math.isqrt(part * ONE**2 // sum(parts)) for part in parts]  # of the length: least where little is enough
    whole = [block.sums(share) for block, share in zip(blocks, shares)]
    noisy = np.split(release_sums(np.concatenate(whole), noise, words), np.cumsum([len(each) for each in whole])[:-1])
    figures = dict[str, Figure]()
    for block, share, found in zip(blocks, shares, noisy):
        figures |= block.figures(found * (ONE / share), noise * ONE / share)
    return PrivateMetrics(figures, event)


def charge(accountant: Any, event: DpEvent, label: str, unit: str) -> None:
    """Charges an accountant, if there is one, of the same units."""
    if accountant is None:
        return
    if accountant.sampling.unit != unit:
        raise ValueError(
            f"The accountant counts for one {accountant.sampling.unit}, and these metrics are of one {unit}, which "
            "has another cost: give the units of training, and unit= what they are."
        )
    accountant.spend(event, label)


def count_units(units: Any) -> int:
    """The number of held-out units, each of them there once."""
    count = len(units)
    if len(np.unique(unit_numbers(units, count))) < count:
        raise ValueError("A unit is there twice: give each unit once, with the mean of its values.")
    return count


class _Block(Protocol):
    """A part of the vector, which one unit moves by at most `share` in ℓ₂; its figures, in units of that share."""

    def sums(self, share: int) -> NDArray[np.int64]: ...

    def figures(self, noisy: NDArray[np.float64], noise: float) -> dict[str, Figure]: ...


def _blocks(
    units: Any, means: Mapping[str, ArrayLike], losses: Mapping[str, tuple[ArrayLike, float]], rows: ScoredRows | None,
    lists: RecommendedLists | None, groups: PublicGroups | None,
) -> list[_Block]:  # fmt: skip
    """The blocks that were asked for; all that is given is checked here."""
    count = count_units(units)
    names = [*means, *losses, *(["AUC"] if rows else []), *(["coverage", "Gini"] if lists else [])]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"Give at least one metric, and each name once, got {names}: there is one figure a name.")
    shares = {name: _of_units(name, given, count) for name, given in means.items()}
    for name, values in shares.items():
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"{name!r} must lie between 0 and 1 for every unit: give a bounded loss in losses=.")
    bounds = dict.fromkeys(means, 1.0) | {name: float(bound) for name, (_, bound) in losses.items()}
    for name, (given, _) in losses.items():
        if not 0 < bounds[name] < math.inf:
            raise ValueError(f"The public bound of {name!r} must be positive and finite, got {bounds[name]!r}.")
        shares[name] = np.clip(_of_units(name, given, count) / bounds[name], 0.0, 1.0)
    blocks: list[_Block] = [_Means(bounds, np.stack([*shares.values()], axis=1))] if shares else []
    if groups:
        blocks += [_Groups.of(whole, groups) for whole in blocks if isinstance(whole, _Means)]
        if len(blocks) < 2:
            raise ValueError("groups are of means and losses: give at least one of these, or leave groups out.")
    if rows:
        blocks.append(_Cells.of(units, rows))
    if lists:
        blocks += [_Coverage.of(lists, count), _Gini.of(lists, count)]
    return blocks


def _of_units(name: str, given: ArrayLike, count: int) -> NDArray[np.float64]:
    values = np.asarray(given, np.float64)
    if values.shape != (count,) or np.isnan(values).any():
        raise ValueError(
            f"{name!r} must be one number for each of the units, and not NaN: leave units without a value out of all."
        )
    return values


@dataclasses.dataclass(frozen=True)
class _Means:
    """The number of units, and sums of their values and of the squares; values are shares of their bounds."""

    bounds: Mapping[str, float]
    values: NDArray[np.float64]  # [units, metrics]

    def _weight(self, share: int) -> int:
        metrics, small = len(self.bounds), _SMALL**2
        return math.isqrt(small * share**2 // (small + (small + 1) * metrics))

    def sums(self, share: int) -> NDArray[np.int64]:
        weight = self._weight(share)
        ratios = np.trunc(weight * (2 * self.values - 1)).astype(np.int64)
        squares = np.trunc(weight / _SMALL * (2 * self.values**2 - 1)).astype(np.int64)
        return np.concatenate([[weight * len(self.values)], ratios.sum(0), squares.sum(0)])

    def figures(self, noisy: NDArray[np.float64], noise: float) -> dict[str, Figure]:
        unit = self._weight(ONE) / ONE
        units, first, second = noisy[0], *np.split(noisy[1:], 2)
        if units <= _CLEAR * noise:
            return {name: _hidden(bound) for name, bound in self.bounds.items()}
        mean = np.clip((1 + first / units) / 2, 0.0, 1.0)
        by_noise = noise / units * np.hypot(0.5, mean - 0.5)
        # By one standard error more than it seems: where noise hides the variance, an interval is not to forget it.
        # No variance of values in [0, 1] is above mean (1 − mean), at a mean that is as much nearer to a half.
        variance = (1 + _SMALL * second / units) / 2 - mean**2 + _SMALL * noise / units / 2
        away = np.maximum(np.abs(mean - 0.5) - by_noise, 0.0)
        by_sampling = np.sqrt(np.clip(variance, 0.0, 0.25 - away**2) * unit / units)
        return {
            name: Figure(bound * value, bound * noisy_by, bound * sampled_by, bound)
            for (name, bound), value, noisy_by, sampled_by in zip(
                self.bounds.items(), mean.tolist(), by_noise.tolist(), by_sampling.tolist()
            )
        }


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Means of each group: a unit is in one of them."""

    parts: Mapping[str, _Means]

    @classmethod
    def of(cls, whole: _Means, groups: PublicGroups) -> _Groups:
        names, of_units = [*groups.names], [*groups.of_units]
        if len(of_units) != len(whole.values) or len(names) < 2 or len({*map(str, names)}) < len(names):
            raise ValueError("groups must be one of each unit, and the names of all groups, at least two, each once.")
        if not {*of_units} <= {*names}:
            raise ValueError("A unit is in a group that is not among the names: give the public list of all groups.")
        places = np.array([names.index(group) for group in of_units], np.int64)
        return cls({str(name): _Means(whole.bounds, whole.values[places == n]) for n, name in enumerate(names)})

    def sums(self, share: int) -> NDArray[np.int64]:
        return np.concatenate([part.sums(share) for part in self.parts.values()])

    def figures(self, noisy: NDArray[np.float64], noise: float) -> dict[str, Figure]:
        each = zip(self.parts.items(), np.split(noisy, len(self.parts)))
        found = {group: part.figures(own, noise) for (group, part), own in each}
        metrics = next(iter(found.values()))
        gaps = {f"{name}, largest gap": _gap([of_group[name] for of_group in found.values()]) for name in metrics}
        return {f"{name}, {group}": found[group][name] for name in metrics for group in found} | gaps


def _gap(figures: Sequence[Figure]) -> Figure:
    """The largest difference of two that noise does not hide; its interval holds, whichever pair is the largest."""
    seen = sorted((figure for figure in figures if math.isfinite(figure.value)), key=_error)
    if len(seen) < 2:
        return _hidden(figures[0].most)
    # No gap is further off than the pair that is furthest off: Bonferroni over pairs, at the largest error of a pair.
    normal, pairs = statistics.NormalDist(), math.comb(len(seen), 2)
    wider = normal.inv_cdf(1 - 0.025 / pairs) / normal.inv_cdf(0.975)
    one, other = seen[-2:]
    values = [figure.value for figure in seen]
    noise, sampling = math.hypot(one.noise, other.noise), math.hypot(one.sampling, other.sampling)
    return Figure(max(values) - min(values), wider * noise, wider * sampling, figures[0].most)


def _error(figure: Figure) -> float:
    return math.hypot(figure.noise, figure.sampling)


@dataclasses.dataclass(frozen=True)
class _Cells:
    """Weight of the rows by label and cell of scores."""

    cells: NDArray[np.int64]  # of each row
    lengths: NDArray[np.int64]  # number of rows of each row's unit
    size: int

    @classmethod
    def of(cls, units: Any, rows: ScoredRows) -> _Cells:
        scores, labels = np.asarray(rows.scores, np.float64), np.asarray(rows.labels)
        bounds = np.asarray(rows.thresholds, np.float64)
        if scores.ndim != 1 or labels.shape != scores.shape or np.isnan(scores).any():
            raise ValueError("scores and labels must be one number a row, and not NaN: leave such rows out.")
        if not np.isin(labels, (0, 1)).all():
            raise ValueError("labels must be 0 or 1: AUC is of two classes.")
        if bounds.ndim != 1 or not bounds.size or not np.isfinite(bounds).all() or not (np.diff(bounds) > 0).all():
            raise ValueError("thresholds must be public, finite and increasing, such as np.linspace(0, 1, 33).")
        unit_numbers(rows.unit, len(scores))  # refuses ids that are missing or too few
        numbers = unit_numbers([*units, *rows.unit], len(units) + len(scores))[len(units) :]  # units' own come first
        if numbers.max(initial=-1) >= len(units):
            raise ValueError("A row is of a unit that is not in units: give all held-out ones there, by the same ids.")
        cells = np.searchsorted(bounds, scores, side="right") + (labels == 1) * (len(bounds) + 1)
        return cls(cells, np.bincount(numbers)[numbers], 2 * (len(bounds) + 1))

    def sums(self, share: int) -> NDArray[np.int64]:
        total = np.zeros(self.size, np.int64)
        np.add.at(total, self.cells, share // self.lengths)
        return total

    def figures(self, noisy: NDArray[np.float64], noise: float) -> dict[str, Figure]:
        negative, positive = np.split(noisy, 2)
        below, above = negative.sum(), positive.sum()
        if min(below, above) <= _CLEAR * noise * len(negative) ** 0.5:
            return {"AUC": _hidden(1.0)}
        beaten = (np.cumsum(negative) - negative / 2) / below  # share of the negatives that a positive stands above
        beating = 1 - (np.cumsum(positive) - positive / 2) / above
        value = positive @ beaten / above
        slopes = np.concatenate([(beating - value) / below, (beaten - value) / above])
        squares = slopes**2
        sampling = max(float(noisy @ squares + noise * np.linalg.norm(squares)), 0.0) ** 0.5  # as of means
        return {"AUC": Figure(float(np.clip(value, 0, 1)), float(noise * np.linalg.norm(slopes)), sampling)}


@dataclasses.dataclass(frozen=True)
class _Lists:
    """Lists of items, each item once in a list."""

    items_of: NDArray[np.int64]  # [units, k], 0 for none
    num_items: int
    num_slots: int

    @classmethod
    def of(cls, lists: RecommendedLists, count: int) -> Self:
        given, items, slots = np.asarray(lists.recommended), int(lists.num_items), int(lists.num_slots)
        if given.ndim != 2 or len(given) != count or not given.shape[1] or given.dtype.kind not in "iu":
            raise ValueError("recommended must be whole numbers, for each of the units a row of k items, k at least 1.")
        if items < 2 or slots < max(count, 1) or given.min(initial=0) < 0 or given.max(initial=0) > items:
            raise ValueError("recommended must be of 0..num_items, num_items at least 2, in at most num_slots lists.")
        once = np.sort(given.astype(np.int64), axis=1)
        once[:, 1:][once[:, 1:] == once[:, :-1]] = 0
        return cls(once, items, slots)

    @property
    def most(self) -> int:
        """Most items of a list."""
        return min(self.items_of.shape[1], self.num_items)

    def counts(self) -> NDArray[np.int64]:
        return np.bincount(self.items_of.ravel(), minlength=self.num_items + 1)[1:]


class _Coverage(_Lists):
    """The share of the items that are in a list."""

    def sums(self, share: int) -> NDArray[np.int64]:
        return np.array([share * int((self.counts() > 0).sum()) // self.most], np.int64)

    def figures(self, noisy: NDArray[np.float64], noise: float) -> dict[str, Figure]:
        step = self.most / self.num_items
        value = min(max(float(noisy[0]) * step, 0.0), 1.0)
        return {"coverage": Figure(value, noise * step, (step * min(value + noise * step, 1.0)) ** 0.5)}


class _Gini(_Lists):
    """Gini's coefficient of the items' counts, over the number of places in all lists that there may be."""

    @property
    def _step(self) -> int:
        placed = min(self.most, self.num_items // 2)
        return placed * (self.num_items - placed)

    def sums(self, share: int) -> NDArray[np.int64]:
        ordered = np.sort(self.counts())
        gaps = int((2 * np.arange(self.num_items) - self.num_items + 1) @ ordered)  # Σ_{i<j} |c_i − c_j|
        return np.array([share * gaps // self._step], np.int64)

    def figures(self, noisy: NDArray[np.float64], noise: float) -> dict[str, Figure]:
        step = self._step / (self.num_items * self.num_slots * self.most)
        value = min(max(float(noisy[0]) * step, 0.0), 1.0)
        least = max(value - noise * step, 0.0)
        return {"Gini": Figure(value, noise * step, ((1 - least**2) / self.num_slots) ** 0.5)}


def _hidden(most: float) -> Figure:
    return Figure(math.nan, math.inf, math.inf, most)
