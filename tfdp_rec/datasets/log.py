"""Which items each user has: one flat array of ids, and where each user's part of it begins.

What a user repeats counts once, ids that the catalogue does not have count as not there, and a user without items is a
user all the same. A log is read in parts, each user whole, so that memory does not grow with the number of users.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.ground.files import open_atomically

PADDING = 0  # the number that stands for no item
NO_ITEM = -(2**63)  # no item's id: it fills up lists of ids of different lengths
PART = 2**20  # events read at a time


class Catalogue:
    """The public items: raw id to place 0..M-1.

    Args:
        item_ids: Raw ids, whole numbers above −2⁶³ and below 2⁶³, all different.

    Attributes:
        ids: The raw ids.
        padding: The first of 0, −1, −2, ... that is no item's id.

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
        if int(ids.min()) <= NO_ITEM or int(ids.max()) >= 2**63:
            raise ValueError(f"item_ids must lie between {NO_ITEM + 1} and {2**63 - 1}.")
        self.ids: NDArray[np.int64] = ids.astype(np.int64)
        self._order = np.argsort(self.ids, kind="stable")
        self._sorted = self.ids[self._order]
        if (self._sorted[1:] == self._sorted[:-1]).any():
            raise ValueError("item_ids must be all different.")
        taken = set(self._sorted[self._sorted <= 0].tolist())
        self.padding = next(-number for number in range(len(taken) + 1) if -number not in taken)
        # Numbers of a log are 1, 2, ..., M: those need no search.
        first_to_last = self._sorted[0] == 1 and self._sorted[-1] == len(ids)
        self._in_order = bool(first_to_last and (np.diff(self._order) == 1).all())

    def __len__(self) -> int:
        return len(self.ids)

    def places(self, raw_ids: ArrayLike) -> NDArray[np.int64]:
        """Places of raw ids; -1 for those that are not in the catalogue."""
        wanted = np.asarray(raw_ids, np.int64)
        if self._in_order:
            return np.where((wanted > 0) & (wanted <= len(self.ids)), wanted - 1, -1)
        near = np.searchsorted(self._sorted, wanted).clip(max=len(self.ids) - 1)
        return np.where(self._sorted[near] == wanted, self._order[near], -1)

    def places_of(self, history: ArrayLike) -> NDArray[np.int64]:
        """Places of one history's items in their order; -1 for ids that are unknown, or no whole numbers."""
        return self.places(_integers(_items_of(history, in_order=True), self.padding))


@dataclass(frozen=True)
class Part:
    """Some users' items: user `users[e]`, counted from 0 in this part, has the item at `places[e]`, once."""

    num_users: int
    users: NDArray[np.int64]
    places: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Different items of each user."""
        return np.bincount(self.users, minlength=self.num_users)

    def restrict_to(self, position: NDArray[np.int64]) -> Part:
        """The part restricted to some items; `position` is each place among them, or -1."""
        found = position[self.places]
        kept = found >= 0
        return Part(self.num_users, self.users[kept], found[kept])


class InParts(Protocol):
    """Users whose items are read in parts, more than once."""

    def parts(self, catalogue: Catalogue, events: int = PART, in_order: bool = False) -> Iterator[Part]:
        """The users in order, in parts of about so many events; `in_order`: their items as they first occur."""


class Log:
    """The items of all users, flat: user u's ids are numbers[offsets[u] : offsets[u + 1]].

    Args:
        numbers: Ids of items, user by user. A mapped file (`numpy.load(path, mmap_mode="r")`) is read in parts.
        offsets: Start of each user's items, and the end of the last user's.

    Raises:
        ValueError: They do not fit together.

    Example:
        >>> seen = Log([10, 30, 10, 20], [0, 3, 3, 4])
        >>> len(seen), seen[0].tolist(), [part.lengths.tolist() for part in seen.parts(Catalogue([10, 20, 30]))]
        (3, [10, 30, 10], [[2, 0, 1]])
    """

    def __init__(self, numbers: ArrayLike, offsets: ArrayLike):
        self.numbers = numbers if isinstance(numbers, np.ndarray) else np.asarray(numbers)
        self.offsets: NDArray[np.int64] = np.asarray(offsets, np.int64)
        total = len(self.numbers)
        fits = self.numbers.ndim == self.offsets.ndim == 1 and len(self.offsets) > 0
        if not fits or self.offsets[0] != 0 or self.offsets[-1] != total or (np.diff(self.offsets) < 0).any():
            raise ValueError(f"offsets must rise from 0 to the {total} items, got {self.offsets}.")
        if np.ma.isMaskedArray(self.numbers):
            raise ValueError("Items are masked: a log has one row an event; leave out those that are masked.")
        if total and not np.issubdtype(self.numbers.dtype, np.integer):
            raise ValueError(f"Items must be whole numbers, raw ids, got {self.numbers.dtype}.")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, user: int) -> NDArray[Any]:
        """Items of the user at this position, the oldest first where they have an order."""
        if not 0 <= user < len(self):
            raise IndexError(f"user {user} of {len(self)}.")
        return self.numbers[self.offsets[user] : self.offsets[user + 1]]

    @property
    def num_users(self) -> int:
        """Number of users, and so of units to sample from."""
        return len(self)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of rows of each user."""
        return np.diff(self.offsets)

    def ids(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """The ids by which a catalogue of this log knows these items."""
        return numbers

    def parts(self, catalogue: Catalogue, events: int = PART, in_order: bool = False) -> Iterator[Part]:
        """The users in order, in parts of about so many events; `in_order`: their items as they first occur."""
        for start, end in whole_users(self.offsets, events):
            held = self.ids(self.numbers[self.offsets[start] : self.offsets[end]])
            yield _part(held, np.diff(self.offsets[start : end + 1]), catalogue, in_order)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a folder that `load` maps."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for name, values in (("items", self.numbers), ("offsets", self.offsets)):
            with open_atomically(path / f"{name}.npy", "wb") as file:
                np.save(file, values)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Log:
        """What `save` wrote, mapped: only what is being counted is in memory.

        Raises:
            FileNotFoundError: There is no such folder.
        """
        path = Path(folder)
        return Log(np.load(path / "items.npy", mmap_mode="r"), np.load(path / "offsets.npy"))


class UserLists:
    """Users' raw ids in an iterable that can be iterated more than once."""

    def __init__(self, lists: Iterable[ArrayLike]):
        if isinstance(lists, Mapping):
            raise TypeError("histories is a dict, whose keys would be taken for users: give its values().")
        if iter(lists) is lists:
            raise TypeError(
                "histories must be readable twice, once for the counts and once for the pairs, and a generator is not: "
                "give a list, tfdp_rec.spectral.Histories, or an object whose __iter__ starts anew."
            )
        self.lists = lists

    def parts(self, catalogue: Catalogue, events: int = PART, in_order: bool = False) -> Iterator[Part]:
        """The users in order, in parts of about so many events; `in_order`: their items as they first occur."""
        held: list[NDArray[Any]] = []
        waiting = 0
        for history in self.lists:
            held.append(_items_of(history, in_order))
            waiting += len(held[-1]) + 1
            if waiting >= events:
                yield _join(held, catalogue, in_order)
                held, waiting = [], 0
        if held:
            yield _join(held, catalogue, in_order)


def log_of(given: Any) -> InParts:
    """What can be read in parts as it is; an iterable of users' raw ids as `UserLists`."""
    return given if hasattr(given, "parts") else UserLists(given)


def values_at(array: NDArray[Any], places: NDArray[np.int64]) -> NDArray[Any]:
    """Values at places, which may lie beyond the end where they count for nothing; zeros of an empty array."""
    return np.asarray(array[np.minimum(places, len(array) - 1)]) if len(array) else np.zeros(places.shape, array.dtype)


def whole_users(offsets: NDArray[np.int64], rows: int) -> Iterator[tuple[int, int]]:
    """Users from `start` to `end` at a time, of about so many rows together, and at least one."""
    start = 0
    while start < len(offsets) - 1:
        full = int(np.searchsorted(offsets, offsets[start] + rows, side="right")) - 1
        end = max(full, start + 1)
        yield start, end
        start = end


def _join(held: list[NDArray[Any]], catalogue: Catalogue, in_order: bool) -> Part:
    lengths = np.array([len(history) for history in held], np.int64)
    ids = np.concatenate([_integers(history, catalogue.padding) for history in held])
    return _part(ids, lengths, catalogue, in_order)


def _items_of(history: Any, in_order: bool) -> NDArray[Any]:
    """A user's raw ids in one axis."""
    if isinstance(history, Set):
        if in_order:
            raise TypeError(f"A history is a {type(history).__name__}, which has no order: give lists or arrays.")
        history = list(history)
    found = history.compressed() if isinstance(history, np.ma.MaskedArray) else np.asarray(history)
    if found.ndim == 0:  # what numpy cannot go through would count as a user without items
        raise TypeError(f"A history is a {type(history).__name__}: give each user's items as a list or an array.")
    return found.reshape(-1)


def _integers(ids: NDArray[Any], unknown: int) -> NDArray[np.int64]:
    # Ids that are missing, fractions or no numbers count as unknown: an error would tell of the user who has one.
    if ids.dtype.kind in "SU":  # beside one text, NumPy makes texts of a user's numbers
        return np.array([_number_in(each, unknown) for each in ids.tolist()], np.int64)
    if ids.dtype == object:
        return np.array([int(each) if _is_whole(each) else unknown for each in ids], np.int64)
    if ids.dtype.kind == "f":
        ids = ids.astype(np.float64)  # a float16 cannot be compared with 2^63
        whole = (np.abs(ids) < 2.0**63) & (np.trunc(ids) == ids)
        return np.where(whole, ids, unknown).astype(np.int64)
    return ids.astype(np.int64)


def _number_in(text: str | bytes, unknown: int) -> int:
    """The whole number that a text is, or the unknown id."""
    try:
        number = int(text)
    except ValueError:
        return unknown
    return number if abs(number) < 2**63 else unknown


def _is_whole(number: Any) -> bool:
    real: Any = number if isinstance(number, numbers.Real) else 0.5
    return bool(abs(real) < 2**63 and real == int(real))


def _part(items: NDArray[Any], lengths: NDArray[np.int64], catalogue: Catalogue, in_order: bool) -> Part:
    users = np.repeat(np.arange(len(lengths)), lengths)
    places = catalogue.places(items)
    # One number a (user, item): what a user repeats counts once, and users stay in order.
    pairs, first = np.unique((users * len(catalogue) + places)[places >= 0], return_index=True)
    if in_order:
        pairs = pairs[np.argsort(first)]
    return Part(len(lengths), pairs // len(catalogue), pairs % len(catalogue))
