"""Where a log comes from: files or frames, a stretch of rows at a time, only the columns asked for.

    .parquet .pq    .csv .tsv    .jsonl .ndjson .json (one object a line)    .arrow .feather .ipc

Text formats may be compressed (.gz). What stands in a CSV file is text, so that the id 007 stays what it is; JSON's
values have the kind that the file's first value has. Rows are counted from 1, without a header.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfdp_rec.core.ground.files import find_paths

_ROWS = 2**18  # of a stretch
_BYTES = 2**24  # of text, for a stretch
_FORMATS = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "json", ".ndjson": "json",
    ".json": "json", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip
_A_ROW = {"parquet": 8, "csv": 30, "json": 60, "arrow": 30}  # bytes, for a guess at how many rows a file has
FRAME = "the frame"


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Some rows of a file that stand together: its name, the number of the first row, their table."""

    where: str
    first: int
    table: pa.Table

    def row(self, place: int) -> str:
        """How to call one of its rows."""
        return f"{self.where}, row {self.first + place}"


def files_of(source: Any) -> list[Path] | None:
    """The files of a path, pattern, folder, or list of these, sorted by name; None for data in memory."""
    if isinstance(source, list | tuple) and source and all(isinstance(each, str | Path) for each in source):
        return [path for each in source for path in files_of(each) or []]
    if not isinstance(source, str | Path):
        return None
    folder = Path(source).is_dir()
    found = _list_folder(Path(source)) if folder else [Path(name) for name in find_paths(str(source))]
    if not found:
        raise FileNotFoundError(f"There is no log at {source}: give files, a folder, or a pattern such as logs/*.csv.")
    for path in found:
        _format_of(path)
    return found


def _list_folder(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file() and _suffix(path) in _FORMATS]
    hidden = {path for path in files if any(name[0] in "._" for name in path.relative_to(folder).parts)}
    return sorted(set(files) - hidden)


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _format_of(path: Path) -> str:
    if _suffix(path) not in _FORMATS:
        raise ValueError(f"{path} is of no format that is read here: {', '.join(_FORMATS)}, text also with .gz.")
    return _FORMATS[_suffix(path)]


def rows_about(source: Any) -> int:
    """A guess at how many rows there are, from sizes; for Parquet, what the files say."""
    files = files_of(source)
    return int(_table(source).num_rows) if files is None else sum(map(_rows_of, files))


def _rows_of(path: Path) -> int:
    import pyarrow.parquet

    kind = _format_of(path)
    if kind == "parquet":
        with _name_broken_file(path):
            return _values_in(pyarrow.parquet.read_metadata(path))
    return path.stat().st_size * (8 if path.suffix == ".gz" else 1) // _A_ROW[kind]


def parquet_rows(path: Path) -> int:
    """The number of rows of a Parquet file, as it says itself."""
    import pyarrow.parquet

    with _name_broken_file(path):
        return int(pyarrow.parquet.read_metadata(path).num_rows)


def _values_in(parquet: Any) -> int:
    """Rows, or values of the longest lists."""
    groups = (parquet.row_group(number) for number in range(parquet.num_row_groups))
    return sum(max(group.column(number).num_values for number in range(group.num_columns)) for group in groups)


def stretches(source: Any, columns: Sequence[str]) -> Iterator[Stretch]:
    """All rows of files or of an Arrow table, a frame or a dict of arrays, in the order of the files' names."""
    files = files_of(source)
    if files is None:
        yield from _number_stretches(FRAME, columns, _slices(_table(source)))
        return
    for path in files:
        with _name_broken_file(path):
            yield from _number_stretches(str(path), columns, _READERS[_format_of(path)](path, columns))


def unfold(stretch: Stretch, user: str) -> Stretch:
    """A row for each value of the lists in all columns but the user's; one of missing values where they are empty."""
    columns = {name: column.combine_chunks() for name, column in zip(stretch.table.column_names, stretch.table.columns)}
    for name, column in columns.items():
        if is_list(column.type) == (name == user):
            wanted = "an id" if name == user else "a list"
            raise ValueError(f"{stretch.where}: {name} is of type {column.type}, and each user has {wanted} there.")
    lengths = [pc.list_value_length(column).fill_null(0).to_numpy() for name, column in columns.items() if name != user]
    if any((each != lengths[0]).any() for each in lengths):
        raise ValueError(f"{stretch.where}: lists of one user have different lengths: give a time for each item.")
    rows = np.repeat(np.arange(len(lengths[0])), np.maximum(lengths[0], 1))
    empty = np.repeat(lengths[0] == 0, np.maximum(lengths[0], 1))
    values = pa.array(np.cumsum(~empty) - 1, mask=empty)
    found = {
        name: column.take(pa.array(rows)) if name == user else pc.list_flatten(column).take(values)
        for name, column in columns.items()
    }
    return Stretch(stretch.where, stretch.first, pa.table(found))


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _number_stretches(where: str, columns: Sequence[str], tables: Iterator[pa.Table]) -> Iterator[Stretch]:
    first = 1
    for table in tables:
        check_columns(where, columns, table.column_names)
        yield Stretch(where, first, table.select(list(columns)))
        first += table.num_rows


def check_columns(where: str, wanted: Sequence[str], found: Sequence[str]) -> None:
    """Each is there, and there once."""
    missing = [name for name in wanted if name not in found]
    if missing:
        shown = ", ".join(map(repr, found[:12]))
        raise ValueError(f"{where} has no column {missing[0]!r}; it has {shown[:200]}.")
    twice = [name for name in wanted if found.count(name) > 1]
    if twice:
        raise ValueError(f"{where} has {found.count(twice[0])} columns called {twice[0]!r}: give each its own name.")


@contextlib.contextmanager
def _name_broken_file(path: Path) -> Iterator[None]:
    """Says which file it was that could not be read."""
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty, not even a header: put the whole file there, or leave it out.")
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowKeyError, EOFError, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno:  # the system's; what a broken file gives has no number
            raise
        raise ValueError(f"{path} cannot be read: {_shorten(problem)}.") from problem


def _shorten(problem: Exception) -> str:
    return " ".join(str(problem).split())[:200].rstrip(".")


# One reader a format.


def _table(source: Any) -> pa.Table:
    """What is in memory, as Arrow sees it."""
    try:
        return source if isinstance(source, pa.Table) else pa.table(source)
    except (TypeError, pa.ArrowInvalid) as problem:
        raise ValueError(
            "A log is files, an Arrow table, a pandas or polars frame, or a dict of columns of one length: "
            f"{_shorten(problem)}."
        ) from problem


def _slices(table: pa.Table) -> Iterator[pa.Table]:
    yield from (table.slice(start, _ROWS) for start in range(0, max(table.num_rows, 1), _ROWS))


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:  # else all of it is in memory at once
        check_columns(str(path), columns, file.schema_arrow.names)
        rows = _ROWS * max(1, file.metadata.num_rows) // max(1, _values_in(file.metadata))
        for batch in file.iter_batches(max(1, min(rows, _ROWS)), columns=list(columns)):
            yield pa.Table.from_batches([batch])


def _arrow(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    with pa.memory_map(str(path)) as file:
        try:  # the file format and the stream format have the same suffixes
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(0)
            reader = batches = pa.ipc.open_stream(file)
        check_columns(str(path), columns, reader.schema.names)
        for batch in batches:
            yield from _slices(pa.Table.from_batches([batch]))


def _csv(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    from pyarrow import csv

    # Opened twice: the names are checked before Arrow is asked for columns, which would name none of those there are.
    parse, read = _options_of(path), csv.ReadOptions(block_size=_BYTES)
    with csv.open_csv(path, read, parse) as header:
        check_columns(str(path), columns, header.schema.names)
    as_text = csv.ConvertOptions(
        include_columns=list(columns), column_types={name: pa.string() for name in columns}, null_values=[""],
        strings_can_be_null=True,
    )  # fmt: skip
    with csv.open_csv(path, read, parse, as_text) as batches:
        for batch in batches:
            yield pa.Table.from_batches([batch])


def _options_of(path: Path) -> Any:
    from pyarrow import csv

    return csv.ParseOptions(delimiter="\t" if _suffix(path) == ".tsv" else ",")


def _json(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    import pyarrow.json

    options = None
    for block in _blocks(path):
        options = options or pyarrow.json.ParseOptions(
            explicit_schema=_kinds(path, block, columns), unexpected_field_behavior="ignore"
        )
        yield pyarrow.json.read_json(io.BytesIO(block), pyarrow.json.ReadOptions(block_size=len(block) + 1), options)


def _blocks(path: Path) -> Iterator[bytes]:
    """Whole lines, about so many bytes at a time."""
    rest = b""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while block := file.read(_BYTES):
            whole, end, rest = (rest + block).rpartition(b"\n")
            if end:
                yield whole
    if rest.strip():
        yield rest


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line) if line.strip() else {}
    except ValueError as problem:
        raise ValueError(f"{path}, row {number}: not one JSON object a line ({problem}).") from problem
    if not isinstance(found, dict):
        raise ValueError(f"{path}, row {number}: not one JSON object a line.")
    return found


def _kinds(path: Path, block: bytes, columns: Sequence[str]) -> pa.Schema:
    """What the first value of each column is: Arrow would take an id that looks like a date for one."""
    kinds: dict[str, pa.DataType] = {}
    named: set[str] = set()
    for number, line in enumerate(block.splitlines(), 1):
        found = _object(path, number, line)
        named.update(found)
        for name in columns:
            if name not in kinds and found.get(name) is not None:
                kinds[name] = _KINDS.get(type(found[name]), pa.string())
        if len(kinds) == len(set(columns)):
            break
    check_columns(str(path), columns, sorted(named))
    return pa.schema([(name, kinds.get(name, pa.string())) for name in columns])


_KINDS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_READERS = {"parquet": _parquet, "arrow": _arrow, "csv": _csv, "json": _json}


def id_column(path: Path, usual: Sequence[str]) -> str:
    """The name of a list's only column, or the first of the usual names that it has."""
    names = column_names(path)
    fitting = names if len(names) == 1 else [name for name in usual if name in names]
    if not fitting:
        raise ValueError(
            f"{path} has the columns {', '.join(names)[:200]}: say which one holds the ids by column='...', or call it "
            f"{usual[-1]!r}."
        )
    return fitting[0]


def column_names(path: Path) -> list[str]:
    """The names of a file's columns; of JSON, those of its first line."""
    with _name_broken_file(path):
        return _names(path)


def _names(path: Path) -> list[str]:
    import pyarrow.parquet
    from pyarrow import csv

    kind = _format_of(path)
    if kind == "parquet":
        return list(pyarrow.parquet.read_schema(path).names)
    if kind == "arrow":
        return list(next(_arrow(path, ())).column_names)
    if kind == "json":
        return list(_object(path, 1, next(_blocks(path), b"").split(b"\n")[0]))
    with csv.open_csv(path, parse_options=_options_of(path)) as file:
        return list(file.schema.names)
