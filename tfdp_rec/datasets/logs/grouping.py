"""A log made once into flat arrays on disk, grouped by user, in memory that does not hang on how many rows there are.

    rows as they come -> one of P parts, by a hash of the user    (a stretch of rows in memory)
    each part -> by user, by time, in the order found             (a part in memory, about a million rows)
              -> user u's rows are rows[offsets[u] : offsets[u + 1]]

What takes memory besides is the list of the different items, some 200 bytes each, and the largest user, whose rows
stand in one part. The folder appears whole under its name or not at all; a whole one, of the same sources and
settings, uses it as it is. It holds users' data, and is readable by its owner alone.

    rows.bin      int32   items, numbered from 1 in the order in which they were found
    offsets.bin   int64   n + 1 of them
    times.bin     int64 or float64, where there are times; feature-0.bin, ...  float32
    users.arrow   the users' ids, in order; found.arrow  the items' ids, in order
    about.json    what it was made from, and what was left out; written last
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tfdp_rec.core.ground.files import explain_full_disk, lock_path, replace_atomically
from tfdp_rec.datasets.log import whole_users
from tfdp_rec.datasets.logs import sources
from tfdp_rec.datasets.logs.columns import IdColumn, NumberColumn, TimeColumn
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.datasets.logs.sources import Stretch

FORMAT = 1
ABOUT = "about.json"
_ROWS_IN_A_PART = 10**6
_MOST_PARTS = 256  # open files
_ROWS_AT_ONCE = 2**22
_NEED = "Grouping a log takes some 60 bytes a row while it lasts"


@dataclasses.dataclass(frozen=True)
class LogColumns:
    """The names of a log's columns: user, item, time (or empty), other numbers; and what becomes of duplicates."""

    user: str
    item: str
    time: str = ""
    features: tuple[str, ...] = ()
    duplicates: str = "drop"

    def __post_init__(self) -> None:
        if self.duplicates not in ("drop", "keep"):
            raise ValueError(f'duplicates must be "drop" or "keep", got {self.duplicates!r}.')
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"A column has one part in a log; {', '.join(self.names)} names one twice.")

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [name for name in (self.user, self.item, self.time, *self.features) if name]


def group(source: Any, columns: LogColumns, folder: Path, in_lists: bool = False) -> None:
    """Makes the folder of a grouped log, unless it was made from the same files; `in_lists`: of a row for each user."""
    print_of_source = _print_of(source, columns)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_path(folder):
        found = _read_about(folder)
        if found and found["source"] is not None and found["source"] == print_of_source:
            return
        if not found and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} holds something else than a log made here: give folder= another name.")
        with replace_atomically(folder) as temporary, explain_full_disk(folder.parent, _NEED):
            Path(temporary).mkdir(mode=0o700)
            Grouping(columns, Path(temporary)).run(source, print_of_source, in_lists)


def _print_of(source: Any, columns: LogColumns) -> Any:
    """The identity of the sources a folder was made from; None for data in memory, which have none."""
    files = sources.files_of(source)
    if files is None:
        return None
    about = [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return json.loads(json.dumps({"files": about, **dataclasses.asdict(columns)}))


def _read_about(folder: Path) -> dict[str, Any]:
    """What a finished folder says of itself; empty for any other."""
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("format") == FORMAT else {}


class Grouping:
    """One conversion; `rows` and `sort` are all of it where a part is in memory, in the tasks of an engine."""

    def __init__(self, columns: LogColumns, folder: Path = Path()):
        self.columns, self.folder = columns, folder
        self.user, self.item = IdColumn(columns.user), IdColumn(columns.item)
        self.time = TimeColumn(columns.time) if columns.time else None
        self.features = [NumberColumn(name) for name in columns.features]
        self.items: dict[Any, int] = {}
        self.left_out = dict.fromkeys(("without user", "without item", "without time", "duplicate"), 0)
        self.rows_read = 0

    def run(self, source: Any, print_of_source: Any, in_lists: bool) -> None:
        parts = max(1, min(_MOST_PARTS, math.ceil(sources.rows_about(source) / _ROWS_IN_A_PART)))
        with contextlib.ExitStack() as stack:
            split = _Parts(self.folder, parts, stack)
            for stretch in sources.stretches(source, self.columns.names):
                split.write(self.rows(sources.unfold(stretch, self.columns.user) if in_lists else stretch))
        if self.rows_read == self.left_out["without user"]:
            raise ValueError(f"The log has {self.rows_read} rows and no user: there is no one to train on.")
        self._join(split.files.values())
        _write_ids(self.folder / "found.arrow", self.item.kind, list(self.items))
        about = {
            "format": FORMAT, "source": print_of_source, "columns": dataclasses.asdict(self.columns),
            "rows read": self.rows_read, "left out": self.left_out, "times": self.time.kind if self.time else "",
        }  # fmt: skip
        (self.folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")

    # First pass: rows to parts.

    def rows(self, stretch: Stretch) -> pa.Table:
        """The rows of a stretch that have a user; item 0 where a row counts for nothing but its user."""
        users, items = self.user.read(stretch), self._number(self.item.read(stretch))
        held: dict[str, Any] = {"user": users}
        there = users.is_valid().to_numpy(zero_copy_only=False)
        self.left_out["without item"] += int((there & (items == 0)).sum())
        if self.time is not None:
            times = self.time.read(stretch)
            timeless = times.is_null().to_numpy(zero_copy_only=False)
            self.left_out["without time"] += int((there & timeless & (items > 0)).sum())
            items[timeless] = 0
            held["time"] = times.fill_null(0)
        held["item"] = items
        for number, feature in enumerate(self.features):
            held[f"feature-{number}"] = feature.read(stretch)
        self.rows_read += len(users)
        self.left_out["without user"] += users.null_count
        return pa.table(held).filter(pa.array(there))

    def _number(self, items: pa.Array) -> NDArray[np.int32]:
        """Numbers from 1, new ones for items not seen before; 0 where there is none."""
        coded = items.dictionary_encode()
        numbers = [self.items.setdefault(item, len(self.items) + 1) for item in coded.dictionary.to_pylist()]
        places = coded.indices.fill_null(len(numbers)).to_numpy(zero_copy_only=False)
        return np.array([*numbers, 0], np.int32)[places]

    # Second pass: parts to flat arrays.

    def _join(self, parts: Iterable[Sequence[Path]]) -> None:
        names = ["item", *(["time"] if self.time else []), *(f"feature-{n}" for n in range(len(self.features)))]
        kind = pa.int64() if self.user.kind == "whole numbers" else pa.string()
        end = np.zeros(1, np.int64)
        with contextlib.ExitStack() as stack:
            files: dict[str, IO[bytes]] = {
                name: stack.enter_context(open(self.folder / array_file(name), "wb")) for name in (*names, "offsets")
            }
            users = stack.enter_context(pa.OSFile(str(self.folder / "users.arrow"), "wb"))
            ids = stack.enter_context(pa.ipc.new_file(users, pa.schema([("id", kind)])))
            files["offsets"].write(end.tobytes())
            for places in parts:
                ids_of_part, lengths, arrays = self.sort(_read(places))
                ids.write_table(pa.table({"id": ids_of_part.cast(kind)}))
                files["offsets"].write((end + np.cumsum(lengths)).tobytes())
                end = end + lengths.sum()
                for name in names:
                    files[name].write(arrays[name].tobytes())
                for place in places:
                    place.unlink()

    def sort(self, part: pa.Table) -> tuple[pa.Array, NDArray[np.int64], dict[str, NDArray[Any]]]:
        """A part's users, how many rows each has, and the rows, by user and time, else as they came."""
        ids, user = _different(part["user"])
        arrays = {name: part[name].to_numpy() for name in part.column_names if name != "user"}
        # Rows that count for nothing have made their user a unit, and end here.
        order = np.flatnonzero(arrays["item"] > 0)
        keys = [key for key in (arrays.get("time"), user) if key is not None]
        order = _sort_rows(order, keys)
        if self.columns.duplicates == "drop":
            order = self._once(order, arrays["item"], keys)
        return ids, np.bincount(user[order], minlength=len(ids)), {name: a[order] for name, a in arrays.items()}

    def _once(self, rows: NDArray[Any], item: NDArray[Any], keys: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The first of all rows that say the same; what says the same of user and time stands together."""
        alike = _as_before(rows, keys)
        several = np.flatnonzero(alike | np.append(alike[1:], False))  # two rows and more of one user and time
        run = np.cumsum(~alike)[several]
        within = _sort_rows(np.arange(len(several)), [item[rows[several]], run])
        again = within[_as_before(within, [item[rows[several]], run])]
        self.left_out["duplicate"] += len(again)
        return np.delete(rows, several[again])


def _sort_rows(rows: NDArray[Any], keys: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The order that sorts rows by the last key, then the one before it; a third of `numpy.lexsort`'s time."""
    for key in keys:
        rows = rows[np.argsort(key[rows], kind="stable")]
    return rows


def _as_before(rows: NDArray[Any], keys: Sequence[NDArray[Any]]) -> NDArray[np.bool_]:
    """Whether a row has the keys of the row before it."""
    same = np.logical_and.reduce([key[rows][1:] == key[rows][:-1] for key in keys])
    return np.concatenate([np.zeros(min(1, len(rows)), bool), same])


class _Parts:
    """Writes each row to the part of its user."""

    # A part has two files where the first times were missing and their kind was not yet known.

    def __init__(self, folder: Path, count: int, stack: contextlib.ExitStack):
        self.folder, self.count, self.stack = folder, count, stack
        self.writers: dict[tuple[int, str], Any] = {}
        self.files: dict[int, list[Path]] = {}

    def write(self, table: pa.Table) -> None:
        """Takes the rows of a stretch."""
        if not table.num_rows:
            return
        part = _hash(table["user"].combine_chunks()) % self.count
        order = np.argsort(part, kind="stable")
        bounds = np.searchsorted(part[order], np.arange(self.count + 1))
        table = table.take(order).combine_chunks()
        for number, (start, end) in enumerate(zip(bounds[:-1], bounds[1:])):
            if end > start:
                self._writer(number, table.schema).write_table(table.slice(start, end - start))

    def _writer(self, number: int, schema: pa.Schema) -> Any:
        key = number, str(schema)
        if key not in self.writers:
            place = self.folder / f"part-{len(self.writers)}.arrow"
            self.files.setdefault(number, []).append(place)
            file = self.stack.enter_context(pa.OSFile(str(place), "wb"))
            self.writers[key] = self.stack.enter_context(pa.ipc.new_stream(file, schema))
        return self.writers[key]


def _hash(ids: pa.Array) -> NDArray[np.uint32]:
    """A number for each id, the same wherever it stands: to spread rows, not to hide anything."""
    if pa.types.is_integer(ids.type):
        mixed = ids.to_numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(32)).astype(np.uint32)
    coded = ids.dictionary_encode()
    values = [zlib.crc32(each.encode()) for each in coded.dictionary.to_pylist()]
    return np.array(values, np.uint32)[coded.indices.to_numpy()]


def _read(places: Sequence[Path]) -> pa.Table:
    tables = []
    for place in places:
        with pa.memory_map(str(place)) as file:
            tables.append(pa.ipc.open_stream(file).read_all())
    return pa.concat_tables(tables, promote_options="permissive")


def _different(ids: pa.ChunkedArray) -> tuple[pa.Array, NDArray[Any]]:
    """The different values of a column, and each row's among them in the narrowest integers, which sort fastest."""
    wide = pa.large_string() if pa.types.is_string(ids.type) else ids.type
    coded = ids.cast(wide).combine_chunks().dictionary_encode()  # in one piece: each piece would bring its own list
    return coded.dictionary, coded.indices.to_numpy().astype(np.min_scalar_type(len(coded.dictionary)))


def _write_ids(path: Path, kind: str, ids: list[Any]) -> None:
    array = pa.array(ids, pa.int64() if kind == "whole numbers" else pa.string())
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, pa.schema([("id", array.type)])) as writer:
        writer.write_table(pa.table({"id": array}))


def read_ids(path: Path) -> pa.ChunkedArray:
    """The ids of a grouped log's users or items."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()["id"]


def array_file(name: str) -> str:
    """The file of an array."""
    return {"item": "rows.bin", "time": "times.bin"}.get(name, f"{name}.bin")


# A grouped log's rows under the numbers of chosen items, made once for each list of items and bound.


def number_rows(folder: Path, items: Items, rows_per_unit: int | None, others: Mapping[str, Any]) -> Path:
    """The folder of a grouped log's rows with users and items numbered; found, if it was made before."""
    made = folder / f"items-{_digest(items, rows_per_unit)}"
    with lock_path(made):
        if not made.exists():
            with replace_atomically(made) as temporary, explain_full_disk(folder.parent, _NEED):
                Path(temporary).mkdir(mode=0o700)
                _write_numbered(folder, Path(temporary), items, rows_per_unit, others)
    return made


def _digest(items: Items, rows_per_unit: int | None) -> str:
    digest = hashlib.blake2b(json.dumps([items.ids.to_pylist(), rows_per_unit]).encode(), digest_size=10)
    return digest.hexdigest()


def _write_numbered(folder: Path, target: Path, items: Items, bound: int | None, others: Mapping[str, Any]) -> None:
    offsets = np.fromfile(folder / "offsets.bin", np.int64)
    number_of = np.concatenate([[0], items.numbers(read_ids(folder / "found.arrow").combine_chunks())])
    ends = np.zeros(len(offsets), np.int64)
    with contextlib.ExitStack() as stack:
        out = {name: stack.enter_context(open(target / name, "wb")) for name in ("rows.bin", *others)}
        parts = {name: stack.enter_context(open(folder / name, "rb")) for name in out}
        for first, last in whole_users(offsets, _ROWS_AT_ONCE):
            count, lengths = int(offsets[last] - offsets[first]), np.diff(offsets[first : last + 1])
            numbers = number_of[np.fromfile(parts["rows.bin"], np.int32, count)].astype(np.int32)
            kept, left = _choose_rows(numbers > 0, lengths, bound)
            out["rows.bin"].write(numbers[kept].tobytes())
            for name, kind in others.items():
                out[name].write(np.fromfile(parts[name], kind, count)[kept].tobytes())
            ends[first + 1 : last + 1] = ends[first] + np.cumsum(left)
    (target / "offsets.bin").write_bytes(ends.tobytes())
    (target / "bound.json").write_text(json.dumps(bound))


def _choose_rows(
    known: NDArray[np.bool_], lengths: NDArray[np.int64], bound: int | None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Which rows stay, and how many of each user."""
    ends = np.cumsum(lengths)
    so_far = np.concatenate([[0], np.cumsum(known)])
    if bound is not None:
        after = np.repeat(so_far[ends], lengths) - so_far[1:]  # known rows of the user after this one
        known = known & (after < bound)
    counts = np.diff(np.concatenate([[0], np.cumsum(known)])[np.concatenate([[0], ends])])
    return known, counts
