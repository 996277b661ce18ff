"""Who did what, when: a log of any size, mapped from disk, one user a unit.

    log = Interactions.read("logs/*.parquet", user="user_id", item="sku", time="ts", items="catalogue.csv",
                            folder="prepared")
    user u's items, by number, oldest first:   log.numbers[log.offsets[u] : log.offsets[u + 1]]

Every user of the log is a unit, also one without a row that counts: whether a user has rows left is private, and how
many users there are is what everything here treats as public. Rows of items that the model does not know are left out.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.ground.files import Temporary, open_atomically, row_chunks
from tfdp_rec.datasets.log import PART, Catalogue, Log, Part, values_at, whole_users
from tfdp_rec.datasets.logs import grouping
from tfdp_rec.datasets.logs.items import Items, as_kind

_AT_ONCE = 2**18  # users' ids hashed in one go


class Interactions(Log):
    """A log, grouped by user. `read` makes one.

    Attributes:
        ordered: Whether each user's rows are in the order of their times.
        items: The items that rows are numbered by; None before `with_items`.
        rows_per_unit: The most rows that a user has here; None for no bound.

    Example:
        >>> log = {"who": ["ann", "bob", "ann", "cy"], "what": ["tea", "tea", "jam", "odd"], "when": [2, 1, 1, 5]}
        >>> log = Interactions.read(log, user="who", item="what", time="when", items=["jam", "tea"])
        >>> ann = log.units(["ann"])[0]
        >>> len(log), log.items.of(log[ann]), log[log.units(["cy"])[0]].tolist()
        (3, ['jam', 'tea'], [])
    """

    def __init__(self, folder: Path, holder: Any = None, items: Items | None = None, rows: Path | None = None):
        self.folder, self.items, self._holder = folder, items, holder
        self._rows = rows or folder
        self.about: dict[str, Any] = json.loads((folder / grouping.ABOUT).read_text(encoding="utf-8"))
        self.ordered = bool(self.about["times"])
        self.rows_per_unit: int | None = json.loads((self._rows / "bound.json").read_text()) if rows else None
        self.offsets: NDArray[np.int64] = _map_file(self._rows / "offsets.bin", np.int64)

    @classmethod
    def read(
        cls,
        source: Any,
        *,
        user: str,
        item: str,
        time: str = "",
        features: Sequence[str] = (),
        items: Any = None,
        rows_per_unit: int | None = None,
        duplicates: str = "drop",
        folder: str | Path | None = None,
    ) -> Interactions:
        """Reads a log, once: what is made of it stays in a folder, and is used again while the files are the same.

        Args:
            source: A file, a folder, a pattern or a list of these (Parquet, CSV, JSON lines, Arrow or Feather); or an
                Arrow table, a pandas or polars frame, a dict of arrays.
            user: Column of the users' ids, text or whole numbers.
            item: Column of the items' ids.
            time: Column of times: numbers, dates or moments, or text in ISO 8601. Left out, a user's rows have no
                order.
            features: Columns of numbers to keep beside each row.
            items: Items that a model is to know: a public list of ids, a file of such a list, or `Items`. Left out,
                only `tfdp_rec.privacy.private_items` can be asked of the log; see `with_items`.
            rows_per_unit: Number of a user's last rows, of known items, that are kept; see `row_sensitivity`.
            duplicates: "drop" counts rows of equal user, item and time once, "keep" counts each.
            folder: Folder for what is made, some 20 bytes a row; it holds users' data. Left out, a folder that lasts as
                long as this object.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the log, or the folder, is not what it should be; names file and row.
            OSError: the disk is full.
        """
        if rows_per_unit is not None and items is None:
            raise ValueError("rows_per_unit counts rows of known items: give it with items=, or to with_items.")
        found = cls._group(source, grouping.LogColumns(user, item, time, tuple(features), duplicates), folder)
        return found if items is None else found.with_items(items, rows_per_unit)

    @classmethod
    def from_grouped(
        cls, source: Any, *, user: str, items: str, times: str = "", duplicates: str = "drop",
        folder: str | Path | None = None,
    ) -> Interactions:  # fmt: skip
        """Reads a log with a row for each user and lists in columns, as `SparkLog.write_grouped` writes it.

        Args:
            source: As of `read`.
            user: Column of the users' ids, each there once.
            items: Column of lists of items' ids.
            times: Column of lists of times.
            duplicates: As of `read`.
            folder: As of `read`.

        Raises:
            ValueError: the log, or the folder, is not what it should be; lists of a user have different lengths.
        """
        columns = grouping.LogColumns(user, items, times, duplicates=duplicates)
        return cls._group(source, columns, folder, in_lists=True)

    @classmethod
    def _group(
        cls, source: Any, columns: grouping.LogColumns, folder: str | Path | None, in_lists: bool = False
    ) -> Interactions:
        holder = Temporary("tfdp-rec-interactions-") if folder is None else None
        path = Path(holder.name) / "log" if holder else Path(folder or "")
        grouping.group(source, columns, path.absolute(), in_lists)
        return cls(path.absolute(), holder)

    def write_grouped(self, path: str | Path) -> None:
        """Writes all rows that were read, of whatever items, as Parquet that `from_grouped` reads.

        Args:
            path: File. Columns have the names of the log's; dates and moments are microseconds since 1970.
        """
        import pyarrow.parquet

        columns, (rows, ids), width = self.about["columns"], self.found(), _widths(self.about).get("times.bin")
        times = _map_file(self.folder / "times.bin", width) if self.ordered else None
        names = [columns["user"], columns["item"], *([columns["time"]] if self.ordered else [])]
        items, writer = ids.combine_chunks(), None
        with open_atomically(Path(path), "wb", private=True) as file:
            for start, end in whole_users(rows.offsets, PART):
                held = slice(rows.offsets[start], rows.offsets[end])
                table = grouped_table(
                    self.unit_ids[start:end], rows.offsets[start : end + 1] - rows.offsets[start],
                    items.take(pa.array(rows.numbers[held] - 1)), None if times is None else times[held], names,
                )  # fmt: skip
                writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
                writer.write_table(table)
            if writer:
                writer.close()

    def with_items(self, items: Any, rows_per_unit: int | None = None) -> Interactions:
        """The same users, with the rows of these items alone, by number.

        Args:
            items: A list of ids, public or from a private release; a file of a public list; or `Items`.
            rows_per_unit: Number of a user's last rows that are kept.

        Raises:
            ValueError: an id is missing or there twice, or rows_per_unit is not positive.
        """
        if rows_per_unit is not None and not (int(rows_per_unit) == rows_per_unit and rows_per_unit >= 1):
            raise ValueError(f"rows_per_unit must be a whole number, at least 1, got {rows_per_unit!r}.")
        if isinstance(items, str | Path):
            items = Items.read(items, usual=[self.about["columns"]["item"]])
        known = items if isinstance(items, Items) else Items(list(items))
        rows = grouping.number_rows(self.folder, known, rows_per_unit, _widths(self.about))
        return Interactions(self.folder, self._holder, known, rows)

    # What is there.

    @property
    def num_items(self) -> int:
        """How many items a model knows, M; tables need M + 1 rows, with that of the padding."""
        return len(self._require_items())

    @property
    def num_rows(self) -> int:
        """How many rows count. Private: for the log's owner, not for a report."""
        return int(self.offsets[-1])

    @functools.cached_property
    def numbers(self) -> NDArray[np.int32]:  # type: ignore[override]
        """The items of all rows, by number, user by user."""
        self._require_items()
        return _map_file(self._rows / "rows.bin", np.int32)

    @functools.cached_property
    def times(self) -> NDArray[Any] | None:
        """The times of all rows; None if there are none. Dates and moments are microseconds since 1970."""
        return _map_file(self._rows / "times.bin", _widths(self.about)["times.bin"]) if self.ordered else None

    @functools.cached_property
    def features(self) -> dict[str, NDArray[np.float32]]:
        """The other columns that were kept, of all rows; NaN is missing."""
        names = enumerate(self.about["columns"]["features"])
        return {name: _map_file(self._rows / f"feature-{number}.bin", np.float32) for number, name in names}

    @functools.cached_property
    def unit_ids(self) -> pa.ChunkedArray:
        """The users' own ids, in order."""
        return grouping.read_ids(self.folder / "users.arrow")

    @property
    def row_sensitivity(self) -> float:
        """By how much, in ℓ₂, one user can move the counts of rows of each item: k = `rows_per_unit` if a user may have
        an item again, √k if not (rows without times, duplicates dropped), infinite without a bound.

        What the package itself counts and trains does not hang on it: `private_counts` and `private_items` weigh each
        user to 1, a training step clips each user to C, however many rows they have.
        """
        if self.rows_per_unit is None:
            return float("inf")
        once = not self.ordered and self.about["columns"]["duplicates"] == "drop"
        return float(self.rows_per_unit) ** (0.5 if once else 1.0)

    def __repr__(self) -> str:
        known = "items not chosen" if self.items is None else f"{len(self.items)} items"
        return f"Interactions({len(self)} users, {known}, {'ordered' if self.ordered else 'unordered'})"

    def summary(self) -> str:
        """What was read and what was left out, a line each, for the log's owner: these are counts of private data."""
        read, left = self.about["rows read"], self.about["left out"]
        counts = {_WHY[why]: count for why, count in left.items()}
        if self.items is not None:
            bound = f", or before a user's last {self.rows_per_unit}" if self.rows_per_unit else ""
            why = f"of items that are not among the {len(self.items)} known{bound}"
            counts[why] = read - sum(left.values()) - self.num_rows
        lines = [f"{read} rows read, of {len(self)} users"]
        lines += [f"{count} rows left out: {why}" for why, count in counts.items() if count]
        without = int((self.lengths == 0).sum())
        lines += [f"{without} users without a row left, who are units all the same"] if without else []
        lines += ["rows of a user are by time" if self.ordered else "rows have no time, and so no order"]
        return "".join(f"{line}.\n" for line in lines)

    # Which users.

    def units(self, ids: Any) -> NDArray[np.int64]:
        """Numbers of units, from 0, of users by their own ids: a split that is given.

        Raises:
            ValueError: one is not in the log.
        """
        wanted = pa.array(list(ids)) if not isinstance(ids, pa.Array) else ids
        found = pc.index_in(as_kind(self.unit_ids.type, wanted), value_set=self.unit_ids)
        if found.null_count:
            missing = wanted[pc.index(found.is_null(), True).as_py()].as_py()
            raise ValueError(f"{found.null_count} of these users are not in the log, {missing!r} for one.")
        return found.to_numpy().astype(np.int64)

    def split(self, train: float = 0.8, key: str = "") -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Units to train on and units to test on, by a keyed hash of each user's own id.

        side(u) depends on u's id and the key alone: a user stays on their side whichever users join or leave the log,
        and whatever the file's order.

        Args:
            train: Approximate share of users to train on.
            key: Key of the hash; another key gives another split. Keep it secret if users choose their ids.

        Raises:
            ValueError: the share is not between 0 and 1.
        """
        if not 0 < train < 1:
            raise ValueError(f"train must be between 0 and 1, got {train!r}.")
        side = self.uniforms(key) < train
        return np.flatnonzero(side), np.flatnonzero(~side)

    def uniforms(self, key: str = "") -> NDArray[np.float64]:
        """A number from 0 to 1, below 1, for each user: a keyed hash of the user's own id."""
        ids, found = self.unit_ids, np.zeros(len(self))
        for start, end in row_chunks([len(self)], _AT_ONCE):
            found[start:end] = uniforms(ids[start:end].to_pylist(), key)
        return found

    # What mechanisms and models take.

    @property
    def catalogue(self) -> Catalogue:
        """The numbers 1..M, as the public items that `private_counts` and the spectral recommender ask for."""
        return Catalogue(np.arange(1, self.num_items + 1))

    def parts(self, catalogue: Catalogue, events: int = PART, in_order: bool = False) -> Iterator[Part]:
        """As `Log.parts`, by the numbers of the log's items.

        Raises:
            ValueError: The catalogue is another than `self.catalogue`, whose numbers are 1, 2, ..., M.
        """
        refuse_other_catalogue(catalogue, self.num_items)
        return super().parts(catalogue, events, in_order)

    def found(self) -> tuple[Log, pa.ChunkedArray]:
        """All items of the log and the users that have them, for a private release of a list: itself private."""
        rows = Log(_map_file(self.folder / "rows.bin", np.int32), _map_file(self.folder / "offsets.bin", np.int64))
        return rows, grouping.read_ids(self.folder / "found.arrow")

    def recent(self, units: ArrayLike, rows: int) -> dict[str, NDArray[Any]]:
        """The last rows of users, one line for each: a `fetch` for models of one's own, and histories to recommend by.

        Args:
            units: Positions of the users.
            rows: Number of rows, the oldest first, filled up with zeros.

        Returns:
            `item` (numbers), `time` if there are times, and each feature, `[units, rows]`.
        """
        units = np.asarray(units, np.int64)
        ends, starts = self.offsets[units + 1], self.offsets[units]
        counts = np.minimum(ends - starts, rows)[:, None]
        columns = np.arange(rows)
        places = ends[:, None] - counts + columns
        arrays = {"item": self.numbers, **({} if self.times is None else {"time": self.times}), **self.features}
        there = columns < counts
        return {name: np.where(there, values_at(array, places), array.dtype.type(0)) for name, array in arrays.items()}

    def _require_items(self) -> Items:
        return require_items(self.items)


def require_items(items: Items | None) -> Items:
    """The items of a log; refused if they are not chosen."""
    if items is None:
        raise ValueError(
            "Which items occur in a log is private, so it cannot say by itself what a model should know. Give a "
            "public list, read(..., items='catalogue.csv'), or find them privately: "
            "log.with_items(tfdp_rec.privacy.private_items(log, epsilon=..., delta=...).terms)."
        )
    return items


_WHY = {
    "without user": "no user id",
    "without item": "no item id",
    "without time": "no time",
    "duplicate": "they repeat user, item and time of another",
}


def _widths(about: dict[str, Any]) -> dict[str, Any]:
    """The arrays beside the items, and what they are of."""
    widths: dict[str, Any] = {"times.bin": np.float64 if about["times"] == "numbers" else np.int64}
    features = {f"feature-{number}.bin": np.float32 for number in range(len(about["columns"]["features"]))}
    return {**(widths if about["times"] else {}), **features}


def _map_file(path: Path, kind: Any) -> NDArray[Any]:
    """A file as an array that is read where it is looked at."""
    if not path.stat().st_size:
        return np.zeros(0, kind)
    return np.memmap(path, kind, "r")


def grouped_table(
    users: Any, offsets: NDArray[np.int64], items: pa.Array, times: NDArray[Any] | None, names: Sequence[str]
) -> pa.Table:
    """A row for each user, with lists of items' ids and times."""
    values = [items, *([] if times is None else [pa.array(times)])]
    lists = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), each) for each in values]
    return pa.table([users, *lists], list(names))


def refuse_other_catalogue(catalogue: Catalogue, num_items: int) -> None:
    """Refuses a catalogue of other numbers than a log's, 1, 2, ..., M."""
    if not np.array_equal(catalogue.ids, np.arange(1, num_items + 1)):
        raise ValueError(
            f"The items of this log are the numbers 1 to {num_items}, and the catalogue has other ids: give "
            "log.catalogue, or log.catalogue.ids; log.items translates them."
        )


def uniforms(ids: Iterable[Any], key: str) -> NDArray[np.float64]:
    """A number from 0 to 1, below 1, for each id: a keyed hash of it."""
    secret = hashlib.blake2b(key.encode()).digest()
    hashes = b"".join(hashlib.blake2b(str(i).encode(), digest_size=8, key=secret).digest() for i in ids)
    return np.frombuffer(hashes, "<u8") / 2.0**64
