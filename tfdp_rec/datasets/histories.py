"""Which items each user has, in any form that can be read twice: in memory, in files that are mapped, or told by a
loop.

A history is the raw ids of one user's items. What a user repeats counts once, ids that the catalogue does not have
count as not there, and a user without items is a user all the same. Histories are read in parts, each user whole, so
that the memory they take does not hang on how many there are.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.datasets.timelines import Timelines
from tfdp_rec.files import writing

PART = 2**20  # events read at a time


class Catalogue:
    """The public items: raw id to place 0..M-1.

    Args:
        item_ids: Raw ids, positive (0 is padding) and different.

    Raises:
        ValueError: there are none, or they are not such.

    Example:
        >>> Catalogue([30, 10, 20]).places([10, 99, 30]).tolist()
        [1, -1, 0]
    """

    def __init__(self, item_ids: ArrayLike):
        ids = np.asarray(item_ids)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError("item_ids must be a list of whole numbers, the public catalogue, with at least one.")
        self.ids: NDArray[np.int64] = ids.astype(np.int64)
        self._order = np.argsort(self.ids, kind="stable")
        self._sorted = self.ids[self._order]
        if self._sorted[0] <= 0 or (np.diff(self._sorted) == 0).any():
            raise ValueError("item_ids must be positive and all different (0 is padding).")
        self._in_order = self._sorted[-1] == len(ids) and bool((np.diff(self._order) == 1).all())  # 1, 2, ..., M

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, raw_ids: ArrayLike) -> NDArray[np.int64]:
        """Places of raw ids; -1 for those that are not in the catalogue."""
        wanted = np.asarray(raw_ids, np.int64)
        if self._in_order:
            return np.where((wanted > 0) & (wanted <= len(self.ids)), wanted - 1, -1)
        near = np.searchsorted(self._sorted, wanted).clip(max=len(self.ids) - 1)
        return np.where(self._sorted[near] == wanted, self._order[near], -1)


@dataclasses.dataclass(frozen=True)
class Part:
    """Some users' items: user `users[e]`, counted from 0 in this part, has the item at `places[e]`, once."""

    num_users: int
    users: NDArray[np.int64]
    places: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Different items of each user."""
        return np.bincount(self.users, minlength=self.num_users)

    def among(self, position: NDArray[np.int64]) -> Part:
        """The part restricted to some items; `position` is each place among them, or -1."""
        found = position[self.places]
        kept = found >= 0
        return Part(self.num_users, self.users[kept], found[kept])


class Histories:
    """The items of all users, flat: user u's raw ids are items[offsets[u] : offsets[u + 1]].

    Args:
        items: Raw ids, user by user. A mapped file (`numpy.load(path, mmap_mode="r")`) is read in parts.
        offsets: Start of each user's items, and the end of the last user's.

    Raises:
        ValueError: they do not fit together.

    Example:
        >>> seen = Histories([10, 30, 10, 20], [0, 3, 3, 4])
        >>> len(seen), [part.lengths.tolist() for part in seen.parts(Catalogue([10, 20, 30]))]
        (3, [[2, 0, 1]])
    """

    def __init__(self, items: ArrayLike, offsets: ArrayLike):
        self.items = items if isinstance(items, np.ndarray) else np.asarray(items, np.int64)
        self.offsets: NDArray[np.int64] = np.asarray(offsets, np.int64)
        fits = self.items.ndim == self.offsets.ndim == 1 and len(self.offsets) > 0
        if not fits or self.offsets[0] != 0 or self.offsets[-1] != len(self.items) or (np.diff(self.offsets) < 0).any():
            raise ValueError(f"offsets must rise from 0 to the {len(self.items)} items, got {self.offsets}.")
        if len(self.items) and not np.issubdtype(self.items.dtype, np.integer):
            raise ValueError(f"items must be whole numbers, raw ids, got {self.items.dtype}.")

    @classmethod
    def of_timelines(cls, timelines: Timelines, users: ArrayLike | None = None) -> Histories:
        """What users of timelines watched, by raw id.

        Args:
            timelines: Timelines of all users.
            users: Positions of the users to take; all if left out.
        """
        chosen = np.arange(timelines.num_users) if users is None else np.asarray(users, np.int64)
        lengths = timelines.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        events = np.repeat(timelines.offsets[chosen] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return cls(timelines.movie_ids[timelines.movies[events] - 1], offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a folder that `load` maps."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for name, values in (("items", self.items), ("offsets", self.offsets)):
            with writing(path / f"{name}.npy", "wb") as file:
                np.save(file, values)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Histories:
        """What `save` wrote, mapped: only what is being counted is in memory.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        path = Path(folder)
        return cls(np.load(path / "items.npy", mmap_mode="r"), np.load(path / "offsets.npy"))

    def parts(self, catalogue: Catalogue, events: int = PART) -> Iterator[Part]:
        """The users in order, in parts of about so many events."""
        start = 0
        while start < len(self):
            full = int(np.searchsorted(self.offsets, self.offsets[start] + events, side="right")) - 1
            end = min(max(full, start + 1), len(self))
            lengths = np.diff(self.offsets[start : end + 1])
            yield _part(self.items[self.offsets[start] : self.offsets[end]], lengths, catalogue)
            start = end


class ToldHistories:
    """Histories from an iterable of users' raw ids that can be iterated more than once."""

    def __init__(self, told: Iterable[ArrayLike]):
        if iter(told) is told:
            raise TypeError(
                "histories must be readable twice, once for the counts and once for the pairs, and a generator is not: "
                "give a list, tfdp_rec.spectral.Histories, or an object whose __iter__ starts anew."
            )
        self.told = told

    def parts(self, catalogue: Catalogue, events: int = PART) -> Iterator[Part]:
        """The users in order, in parts of about so many events."""
        held: list[NDArray[Any]] = []
        waiting = 0
        for history in self.told:
            held.append(np.asarray(history).reshape(-1))
            waiting += len(held[-1]) + 1
            if waiting >= events:
                yield _joined(held, catalogue)
                held, waiting = [], 0
        if held:
            yield _joined(held, catalogue)


AnyHistories: TypeAlias = Histories | ToldHistories


def histories_of(given: Any) -> AnyHistories:
    """Histories from `Histories`, `Timelines`, `Interactions`, or an iterable of users' raw ids."""
    if isinstance(given, Histories | ToldHistories):
        return given
    if isinstance(given, Timelines):
        return Histories.of_timelines(given)
    if hasattr(given, "histories"):
        return given.histories()  # of a log, by number
    return ToldHistories(given)


def _joined(held: list[NDArray[Any]], catalogue: Catalogue) -> Part:
    lengths = np.array([len(history) for history in held], np.int64)
    return _part(np.concatenate([history.astype(np.int64) for history in held]), lengths, catalogue)


def _part(items: NDArray[Any], lengths: NDArray[np.int64], catalogue: Catalogue) -> Part:
    users = np.repeat(np.arange(len(lengths)), lengths)
    places = catalogue.places(items)
    pairs = np.unique((users * len(catalogue) + places)[places >= 0])
    return Part(len(lengths), pairs // len(catalogue), pairs % len(catalogue))
