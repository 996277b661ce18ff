"""A log that comes day by day, and does not stay what it was: items appear and fade, tastes drift.

    item i of taste g(i), born on day b_i, uniform from before the first day to the last:
        P(i | taste, day t) ∝ zipf_i e^{-(t - b_i)/life}   for t ≥ b_i, else 0
    user u comes on a day with probability a_u, a tenth to a half, for 2 + Poisson(6) rows: each of the first taste
        with probability 0.7, of the second with 0.2, of any with 0.1; a day with probability `drift` between two days
        the second taste becomes the first, and a new one the second

The same seed makes the same days.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_BEFORE = 40  # days before the first that items were born on


@dataclasses.dataclass(frozen=True)
class Stream:
    """What the days are drawn from.

    Attributes:
        users: of whom some three in ten come on a day.
        tastes: how many there are.
        items: of each taste, on all days.
        drift: how likely a user's tastes move between two days.
        life: of an item: after so many days it is e times rarer.
        seed: of all of it.
    """

    users: int = 30_000
    tastes: int = 20
    items: int = 70
    drift: float = 0.03
    life: float = 12.0
    seed: int = 0

    def days(self, count: int) -> Iterator[pa.Table]:
        """Rows of `user`, `item`, `time` of each day.

        Args:
            count: how many days.

        Example:
            >>> first, second = Stream(users=50).days(2)
            >>> first.column_names, second["time"][0].as_py()
            (['user', 'item', 'time'], 86400)
        """
        rng = np.random.default_rng(self.seed)
        born = rng.uniform(-_BEFORE, count, [self.tastes, self.items])
        zipf = 1 / (1 + rng.permuted(np.tile(np.arange(self.items), (self.tastes, 1)), axis=1)) ** 0.8
        active = rng.uniform(0.1, 0.5, self.users)
        first, second = rng.integers(0, self.tastes, [2, self.users])
        for day in range(count):
            age = day - born
            weights = np.where(age >= 0, zipf * np.exp(-np.maximum(age, 0) / self.life), 0.0)
            yield self._rows(rng, day, weights, np.flatnonzero(rng.random(self.users) < active), first, second)
            moved = rng.random(self.users) < self.drift
            first = np.where(moved, second, first)
            second = np.where(moved, rng.integers(0, self.tastes, self.users), second)

    def _rows(
        self, rng: np.random.Generator, day: int, weights: NDArray[np.float64], here: NDArray[np.int64],
        first: NDArray[np.int64], second: NDArray[np.int64],
    ) -> pa.Table:  # fmt: skip
        user = np.repeat(here, 2 + rng.poisson(6, len(here)))
        which = rng.random(len(user))
        taste = np.where(which < 0.7, first[user], second[user])
        taste = np.where(which >= 0.9, rng.integers(0, self.tastes, len(user)), taste)
        item = np.empty(len(user), np.int64)
        for each in range(self.tastes):
            rows = np.flatnonzero(taste == each)
            shares = weights[each] / weights[each].sum()
            item[rows] = each * self.items + rng.choice(self.items, len(rows), p=shares)
        return pa.table({"user": user, "item": item + 1, "time": 86_400 * day + np.arange(len(user)) % 86_400})
