"""A click log: rows of categories and numbers with a label, and the units whose rows they are.

A *unit* is what the guarantee protects: a display, an event with the candidates that were drawn for it, or a user. A
training step takes at most `per_unit` rows of each drawn unit, chosen anew each time; their losses are averaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a log.

    Attributes:
        ids: Ids of the categories, `[rows, columns]`, each from 0.
        numbers: Numbers of the rows, `[rows, numbers]`, float32.
        labels: 1 for a click and 0 for none, `[rows]`.
        units: Number of each row's unit, `[rows]`.
    """

    ids: np.ndarray
    numbers: np.ndarray
    labels: np.ndarray
    units: np.ndarray

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if len(lengths) != 1:
            raise ValueError(f"ids, numbers, labels and units must have as many rows as each other, got {lengths}.")

    def __len__(self) -> int:
        return len(self.labels)

    def taken(self, rows: np.ndarray) -> Rows:
        """Some of the rows, in the order of their numbers."""
        return Rows(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class ClickLog:
    """A log with its parts.

    Attributes:
        name: Name of the log in reports.
        columns: Names of the categories.
        sizes: Number of values of each category.
        parts: Rows to train on, to choose settings by, and to judge by.
        unit: Kind of the units: "display", "event" or "user".
        per_unit: Largest number of rows of a unit in a step.
        source: Origin of the rows, for the report.
        public: Names of the columns that an attacker may know of every row: what a page shows, not what tells of a
            user.
    """

    name: str
    columns: tuple[str, ...]
    sizes: tuple[int, ...]
    parts: dict[Part, Rows]
    unit: str = "display"
    per_unit: int = 1
    source: str = ""
    public: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, rows in self.parts.items():
            if rows.ids.shape[1:] != (len(self.columns),) or len(self.sizes) != len(self.columns):
                raise ValueError(f"{self.name}, {part}: {rows.ids.shape[1:]} categories, {len(self.columns)} columns.")
            if len(rows) and (rows.ids.min() < 0 or (rows.ids.max(0) >= np.array(self.sizes)).any()):
                raise ValueError(f"{self.name}, {part}: a category has an id outside its {self.sizes} values.")

    def by_user(self, per_user: int) -> ClickLog:
        """The log with users as units; rows stay in their parts, and the column of users goes.

        Args:
            per_user: Largest number of rows of a user in a step.

        Raises:
            ValueError: The log has no column "user".
        """
        # A user's own row of a table would be made of this user's noise alone.
        if "user" not in self.columns:
            raise ValueError(f"{self.name} has no column \"user\"; it has {', '.join(self.columns)}.")
        place = self.columns.index("user")
        parts = {
            part: dataclasses.replace(rows, units=rows.ids[:, place], ids=np.delete(rows.ids, place, axis=1))
            for part, rows in self.parts.items()
        }
        columns = self.columns[:place] + self.columns[place + 1 :]
        sizes = self.sizes[:place] + self.sizes[place + 1 :]
        public = tuple(name for name in self.public if name != "user")
        return ClickLog(self.name, columns, sizes, parts, "user", per_user, self.source, public)

    def by_row(self) -> ClickLog:
        """The log with each row a unit, such as one display of a user."""
        parts = {part: dataclasses.replace(rows, units=np.arange(len(rows))) for part, rows in self.parts.items()}
        return dataclasses.replace(self, parts=parts, unit="display", per_unit=1)

    @property
    def first(self) -> np.ndarray:
        """The row of each column's id 0 where the columns' tables are laid end to end."""
        return np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int32)


class Units:
    """The units of some rows.

    Args:
        rows: Rows of a part of a log.
        per_unit: Largest number of rows of a unit in a batch.
    """

    def __init__(self, rows: Rows, per_unit: int):
        self.rows, self.per_unit = rows, per_unit
        _, number, counts = np.unique(rows.units, return_inverse=True, return_counts=True)
        self._order = np.argsort(number, kind="stable")
        self._start, self._counts = np.concatenate([[0], np.cumsum(counts)[:-1]]), counts

    def __len__(self) -> int:
        return len(self._counts)

    def numbers_of(self, units: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers `[units, per_unit]`, a random choice where a unit has more, and whether each is a row."""
        counts, most = self._counts[units][:, None], self.per_unit
        places = np.broadcast_to(np.arange(most), (len(units), most)).copy()
        if (many := np.flatnonzero(counts[:, 0] > most)).size:
            places[many] = _distinct(rng, counts[many, 0], most)
        there = places < counts
        return self._order[self._start[units][:, None] + np.where(there, places, 0)], there


def _distinct(rng: np.random.Generator, counts: np.ndarray, most: int) -> np.ndarray:
    """`most` distinct places below each of `counts`, every set of them as likely as another (Floyd's algorithm)."""
    chosen = np.empty((len(counts), most), np.int64)
    for k in range(most):
        last = counts - most + k
        place = (rng.random(len(counts)) * (last + 1)).astype(np.int64)
        taken = (chosen[:, :k] == place[:, None]).any(axis=1)
        chosen[:, k] = np.where(taken, last, place)
    return chosen


def numbered(columns: Iterable[Any]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Ids of the values of each column, in their order, and the number of values.

    Example:
        >>> numbered([["b", "a", "b"], [7, 7, 9]])[0].tolist()
        [[1, 0], [0, 0], [1, 1]]
    """
    found = [np.unique(np.asarray(column), return_inverse=True) for column in columns]
    return np.stack([ids for _, ids in found], axis=1).astype(np.int32), tuple(len(values) for values, _ in found)


def split(rows: Rows, shares: Sequence[float], seed: int = 0) -> dict[Part, Rows]:
    """Parts of these shares, at random, a unit's rows together.

    Args:
        rows: All rows of a log.
        shares: Shares of the units in train, validation and test.
        seed: Seed of the units' order.
    """
    units, number = np.unique(rows.units, return_inverse=True)
    place = np.random.default_rng(seed).permutation(len(units))[number] / len(units)
    ends = np.cumsum(shares) / np.sum(shares)
    which = np.searchsorted(ends[:-1], place, side="right")
    return {part: rows.taken(np.flatnonzero(which == number)) for number, part in enumerate(PARTS)}
