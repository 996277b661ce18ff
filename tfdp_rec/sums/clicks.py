"""How likely a click is, from private sums: rows with and without a click by value, each released once.

**What is counted.** Columns, and crossed columns such as user × item, whose values are all pairs. With n₋ a unit's rows
of a value without a click, and n₊ those with one times `click_weight`, the unit gives that value, in each of the
counted columns,

    w · (3 (n₊ − n₋), 2 (n₊ + n₋)),   w = √(share / Σ over values of the squares of these numbers).

So it moves the sums of a column by √share in ℓ₂, however many rows it has, and all sums by 1: the shares, 1 for a
column and k for one crossed of k, are divided by their sum. All of it is whole numbers (`fixed_point.unit_sums`). That
clicks stand out of other rows has more of the bound than how many rows there are, which needs to be known less well.

**What they predict.** With a(v) the noisy weight of a value's rows with a click, s(v) that of all, m the rate of clicks
and K a few deviations of the noise,

    logit = logit(m) + Σ over columns of  logit(c + t (a − c s)) − logit(p),   t = s₊ / (s₊² + K²),   s₊ = max(s, 0)

(naive Bayes; each value is drawn towards c, the more the rarer it is). Of a column p = m, and c is the rate of all its
values together that do not stand out of the noise, drawn towards m: rare values need not be as usual ones are. Of a
crossed column both are what its columns predict. Scale and offset are corrected by `private_reliability`, for a
fiftieth of σ⁻². All rates are of weighted rows; at last the logarithm of a click's weight leaves the logit.

`factors` of a pair of columns are added to the logits, by turns (`click_factors`), for seven tenths of the others' σ⁻².

Guarantee: Gaussian mechanisms on the same units, whose σ⁻² add up to that of the whole; all else is computed from them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.claim.statement import Statement, round_up
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.unit_ids import unit_numbers
from tfdp_rec.sums.click_factors import TURNS, release_factors
from tfdp_rec.sums.fixed_point import check_noise, event_with, release_sums, unit_sums
from tfdp_rec.sums.reliability import private_reliability, refuse_other_units

LABEL = "sums of clicks"
RELIABILITY, _FACTORS = 0.02, 0.7  # shares of σ⁻², the second of what the first leaves
_SIGNED, _SHOWN = 3, 2
_RAREST = 1e-3  # rate that is told apart from none
_MOST_WEIGHT = 16  # of a click
_CLEAR = 3.0  # deviations of its noise by which a value is known to be there
MOST_CELLS, _MOST_ROWS = 2**23, 2**29  # of a column; of a log, whose squares are whole numbers of 64 bits

Crossing = tuple[str, ...]


class ClickModel:
    """A private model of clicks: noisy sums by value of columns and of crossed columns, and what they predict.

    The privacy unit is a row, or a user with all rows. What predicts, states or exports raises `RuntimeError` before
    `fit`.

    Args:
        columns: Number of values of each column by its name: numbers from 0, whose meaning is public.
        counted: Columns that are counted, by name, and crossed columns, by tuples of names; by default each column.
            It is public: a choice by the data that are counted is not covered.
        epsilon: ε of the whole; or give `noise_multiplier`.
        delta: δ of the whole.
        noise_multiplier: σ of the one Gaussian that the whole costs; or give `epsilon`.
        shrinkage: K in units of σ, towards the prediction without a column.
        threshold: Least noisy sum of a value's rows, in deviations of its noise; values with less count as zero.
        words: Source of random bits, for tests; the operating system's by default.
        factors: Two columns, such as user and item, for whose values vectors are found; public, as `counted`. The last
            of the turns is of the first column.
        click_weight: Rows without a click of its unit that one with a click weighs, for users of many rows; where the
            others were drawn at will, 2 leaves more of the bound to what tells more.

    Raises:
        TypeError: Both or neither of `epsilon` and `noise_multiplier` are given.
        ValueError: An argument is out of range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> rows = {"item": rng.integers(0, 2, 5000), "hour": rng.integers(0, 24, 5000)}
        >>> clicks = rng.random(5000) < np.where(rows["item"] == 1, 0.7, 0.2)
        >>> model = ClickModel({"item": 2, "hour": 24}, ["item"], epsilon=1.0)
        >>> likely = model.fit(rows, clicks).predict({"item": [1, 0]})
        >>> bool(0.6 < likely[0] < 0.8), bool(0.1 < likely[1] < 0.3)
        (True, True)
    """

    def __init__(
        self, columns: Mapping[str, int], counted: Sequence[str | Crossing] | None = None,
        epsilon: float | None = None, delta: float = 1e-6, noise_multiplier: float | None = None,
        shrinkage: float = 0.8, threshold: float = 0.0, words: WordSource = os_entropy,
        factors: Sequence[str] = (), click_weight: int = 1,
    ):  # fmt: skip
        if (epsilon is None) == (noise_multiplier is None):
            raise TypeError("Give ClickModel either epsilon= or noise_multiplier=: each decides the other.")
        if not 0 < delta < 1 or not 0 < shrinkage < math.inf or not 0 <= threshold < math.inf:
            raise ValueError(
                "delta must be between 0 and 1, shrinkage positive, threshold at least 0 and both finite, got "
                f"{delta!r}, {shrinkage!r} and {threshold!r}."
            )
        self.columns = dict(columns)
        given = [(each,) if isinstance(each, str) else tuple(each) for each in counted or self.columns]
        self.counted = sorted(given, key=len)  # what a crossed column is compared with comes before it
        for crossing in self.counted:
            known = set(crossing) <= set(columns) and all(name.isidentifier() for name in crossing)
            if not known or not 0 < len(set(crossing)) == len(crossing) or given.count(crossing) > 1:
                raise ValueError(
                    f"counted has {crossing!r}: name columns of {', '.join(columns)}, by letters, digits and _, each "
                    "crossing once and each column once in it."
                )
            if not 0 < self._size(crossing) <= MOST_CELLS:
                raise ValueError(f"{' × '.join(crossing)} must have 1 to {MOST_CELLS:,} values: count other columns.")
        if not self.counted:
            raise ValueError("columns is empty: give the number of values of at least one column.")
        if isinstance(click_weight, bool) or click_weight not in range(1, _MOST_WEIGHT + 1):
            raise ValueError(f"click_weight must be a whole number from 1 to {_MOST_WEIGHT}, got {click_weight!r}.")
        self.click_weight, self.factors = int(click_weight), tuple(factors)
        sizes = [columns.get(name, 0) for name in self.factors]
        two = len(set(self.factors)) == len(sizes) == 2
        if sizes and not (two and 0 < min(sizes) <= max(sizes) <= MOST_CELLS):
            raise ValueError(
                f"factors must name two of {', '.join(columns)}, of 1 to {MOST_CELLS:,} values; got {self.factors!r}."
            )
        noise = noise_multiplier if epsilon is None else noise_of_one_release(epsilon, delta)
        check_noise((noise or 0.0) / RELIABILITY**0.5)  # the largest of its noises
        self.delta, self.noise_multiplier = float(delta), float(noise or 0.0)
        self.shrinkage, self.threshold, self._words, self._begun = float(shrinkage), float(threshold), words, False

    @property
    def event(self) -> DpEvent:
        """Event of `fit`, for `Accountant.spend`; without a guarantee if a test supplied the noise."""
        return event_with(self._words, GaussianDpEvent(self.noise_multiplier))

    @property
    def epsilon(self) -> float:
        """ε at δ of `fit` alone, by dp_accounting; infinite where a test supplied the noise."""
        return epsilon_of(self.event, self.delta)

    def fit(
        self, rows: Mapping[str, ArrayLike], clicks: ArrayLike, unit: Any = None, accountant: Any = None
    ) -> ClickModel:
        """Counts the rows and releases the sums; once only. Returns the model.

        Args:
            rows: Value of each row by column, of the columns that are counted; numbers outside do not count.
            clicks: Label of each row: 1 for a click; all others count as none.
            unit: Array with the user id of each row, if users are the privacy units; by default each row is a unit.
            accountant: Accountant that is charged, and its ledger, before anything is counted.

        Raises:
            RuntimeError: The model was fitted before.
            ValueError: Columns are missing, or differ in length, or there are more units than the accountant's.
        """
        if self._begun:
            raise RuntimeError("This model was fitted already, and a fit spends its budget: make another one instead.")
        labels, ids = np.asarray(clicks), self._ids(rows)
        lengths = {len(labels) if labels.ndim == 1 else -1, *map(len, ids.values())}
        if labels.dtype.kind not in "biuf" or len(lengths) > 1 or len(labels) >= _MOST_ROWS:
            raise ValueError("clicks and each column of rows must be one number or value a row, and as many of each.")
        units = None if unit is None else unit_numbers(unit, len(labels))
        if accountant is not None:
            refuse_other_units(accountant.sampling, units, len(labels))
            accountant.spend(self.event, LABEL)
        self._begun, self._of_users = True, units is not None
        noise = self.noise_multiplier / (1 - RELIABILITY) ** 0.5
        of_columns = noise / (1 - _FACTORS) ** 0.5 if self.factors else noise
        entries = np.where((labels == 1)[:, None], self.click_weight * np.array([_SIGNED, _SHOWN]), [-_SIGNED, _SHOWN])
        owners, whole = np.arange(len(labels)) if units is None else units, sum(map(len, self.counted))
        released = {}
        for crossing in self.counted:
            cells = self._cells(crossing, ids)
            known, size = cells >= 0, self._size(crossing)
            sums = unit_sums(owners[known], cells[known], entries[known], size, len(crossing), whole)
            released[crossing] = release_sums(sums, of_columns, self._words)
        self._estimate(released, of_columns)
        self.vectors: list[NDArray[np.float64]] = []
        if self.factors:
            pair = np.stack([self._cells((name,), ids) for name in self.factors])
            both, off = (pair >= 0).all(axis=0), (labels == 1) - special.expit(self._logits(ids))
            self.vectors = release_factors(
                owners[both], pair[:, both], off[both], self._sizes(self.factors), noise * (TURNS / _FACTORS) ** 0.5,
                self._words,
            )  # fmt: skip
        self.reliability = private_reliability(
            self._logits(ids), labels, noise_multiplier=self.noise_multiplier / RELIABILITY**0.5, unit=unit,
            words=self._words,
        )  # fmt: skip
        return self

    def _estimate(self, released: Mapping[Crossing, NDArray[np.float64]], noise: float) -> None:
        signed, shown = released[min(self.counted, key=self._size)].sum(axis=0) / (_SIGNED, _SHOWN)  # the least noise
        self.rate = float(np.clip((1 + signed / max(shown, noise)) / 2, _RAREST, 1 - _RAREST))
        self.weights: dict[Crossing, NDArray[np.float64]] = {}
        for crossing, sums in released.items():
            signed, shown = sums.T / np.array([[_SIGNED], [_SHOWN]])
            own = self._compared_with(crossing)
            there = np.where(shown > max(self.threshold * noise / _SHOWN, 0.0), shown, 0.0)
            believed = there / (there**2 + (self.shrinkage * noise) ** 2)
            centre = own
            if len(crossing) == 1:
                rare = shown <= _CLEAR * noise / _SHOWN
                a, s = (signed + shown)[rare].sum() / 2, shown[rare].sum()
                trust = max(s, 0.0) / (s**2 + max(rare.sum(), 1) * (self.shrinkage * noise) ** 2)
                centre = np.clip(own + (a - own * s) * trust, 0.0, 1.0)
            found = centre + ((signed + shown) / 2 - centre * shown) * believed
            self.weights[crossing] = _logit(found) - _logit(own)
        if self._of_users:  # a unit of one row has the same length whatever the row weighs
            self.rate = float(special.expit(special.logit(self.rate) - math.log(self.click_weight)))

    def _compared_with(self, crossing: Crossing) -> NDArray[np.float64]:
        """p of each value: what is predicted without this column."""
        logits, several = np.full(self._size(crossing), special.logit(self.rate)), crossing if len(crossing) > 1 else ()
        for name, ids in zip(several, np.unravel_index(np.arange(len(logits)), self._sizes(crossing))):
            logits += self.weights[name,][ids] if (name,) in self.weights else 0.0
        return special.expit(logits)

    # Predictions.

    def predict(self, rows: Mapping[str, ArrayLike]) -> NDArray[np.float64]:
        """The probability of a click of each row, `rows` as in `fit`."""
        self._check_fitted()
        return special.expit(self.reliability.corrected(self.logits(rows)))

    def logits(self, rows: Mapping[str, ArrayLike]) -> NDArray[np.float64]:
        """Logits as the sums tell them; `predict` corrects their scale and offset, and their order is the same."""
        self._check_fitted()
        return self._logits(self._ids(rows))

    def _logits(self, ids: Mapping[str, NDArray[np.int64]]) -> NDArray[np.float64]:
        cells = ((added, self._cells(crossing, ids)) for crossing, added in self.weights.items())
        total = special.logit(self.rate) + sum(np.append(added, 0.0)[each] for added, each in cells)  # −1: unknown
        if not self.vectors:
            return total
        first, second = (
            np.pad(each, [(0, 1), (0, 0)])[self._cells((name,), ids)] for name, each in zip(self.factors, self.vectors)
        )
        return total + (first * second).sum(axis=1)

    def export(self, filepath: str | os.PathLike[str]) -> None:
        """Writes a SavedModel: an int64 of each counted column `[batch]` in, `probability` `[batch]` out."""
        self._check_fitted()
        from tfdp_rec.sums.click_answers import export

        export(filepath, self)

    def statement(self) -> Statement:
        """The guarantee in words."""
        self._check_fitted()
        if math.isinf(self.epsilon):
            return Statement({"Guarantee": "none: the noise was supplied by a test, and can be subtracted"})
        unit = "user" if self._of_users else "row"
        vectors = f", and vectors of {' × '.join(self.factors)}" if self.factors else ""
        return Statement({
            "Guarantee": f"(epsilon = {round_up(self.epsilon):g}, delta = {self.delta:g})-differential privacy",
            "Protected unit": "one user, with all of their rows" if self._of_users else "one row",
            "Adjacency": f"zero-out: data sets that differ by one {unit}, which contributes nothing in one of them",
            "Mechanism": f"sums of clicks by {', '.join(' × '.join(each) for each in self.counted)}, and counts by "
            f"predicted logit{vectors}, together one Gaussian of multiplier {self.noise_multiplier:.4g}",
            "Public": "the columns that are counted and the meaning of their values",
            "Covers": "everything that this model holds, predicts or exports",
            "Does not cover": f"another fit on the same {unit}s, which costs as much again; a choice of columns by the "
            "same rows; an observer of the memory of the counting",
        })  # fmt: skip

    def _check_fitted(self) -> None:
        if not hasattr(self, "reliability"):
            raise RuntimeError("Nothing was released yet: call fit(rows, clicks) first.")

    # Values.

    def _sizes(self, crossing: Crossing) -> list[int]:
        return [int(self.columns[name]) for name in crossing]

    def _size(self, crossing: Crossing) -> int:
        return math.prod(self._sizes(crossing))

    def _ids(self, rows: Mapping[str, ArrayLike]) -> dict[str, NDArray[np.int64]]:
        given = {name: np.asarray(rows.get(name)) for crossing in (*self.counted, self.factors) for name in crossing}
        for name, ids in given.items():
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise ValueError(f"rows must have a whole number a row in the column {name!r}, which is counted.")
        return {name: ids.astype(np.int64) for name, ids in given.items()}

    def _cells(self, crossing: Crossing, ids: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        each, sizes = [ids[name] for name in crossing], self._sizes(crossing)
        known = np.all([(0 <= own) & (own < size) for own, size in zip(each, sizes)], axis=0)
        return np.where(known, np.ravel_multi_index([np.where(known, own, 0) for own in each], sizes), -1)


def _logit(rate: NDArray[np.float64]) -> NDArray[np.float64]:
    return special.logit(np.clip(rate, _RAREST, 1 - _RAREST))
