"""A log on Spark: grouped by user there, added up there; noise is drawn once, where this is called.

    rows of a DataFrame -> one of P parts, by a hash of the user    (Spark's shuffle)
    each part -> by user, by time, in the order found               (`datasets/logs/grouping.py`, in a task)
              -> whole numbers for each cell of a sum               (`Summand`, in a task)
              -> their sum                                          (Spark's reduceByKey) -> noise, here

**Each user is in one part, and a part in one task**, so that what bounds a user's numbers on one machine bounds them
here. The numbers are whole: Spark may add them up in any order. A task that is run again, or twice, gives the same
numbers: what it draws hangs on a key of that one sum and on users' ids (`total.keyed_draw`), and Spark counts each
part once. Where rows of a user have the same time, their order is that in which Spark reads them.

A task holds one part, and one array of the sum. The parts are as private as the log, and so are Spark's local folders.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tfdp_rec.core.ground.interruption import keep_interrupts
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.core.mechanism.noise.words import WordSource, os_entropy
from tfdp_rec.datasets.log import PART, Catalogue, Log, Part
from tfdp_rec.datasets.logs.grouping import Grouping, LogColumns
from tfdp_rec.datasets.logs.interactions import (
    Interactions,
    grouped_table,
    refuse_other_catalogue,
    require_items,
    uniforms,
)
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.datasets.logs.sources import Stretch
from tfdp_rec.sums.counts import exact_counts
from tfdp_rec.sums.total import Draw, Summand, add_up, keyed_draw

_TEXTS = ("csv", "tsv", "json", "jsonl", "ndjson", "txt")
_NAMES, _PLACE, _REFUSED = ("user", "item", "time"), "place", "refused"  # in tasks
_ROWS_AT_ONCE = 2**16  # made an Arrow table of
_SLAB = 2**18  # cells that Spark adds up as one array
_MOMENT = pa.timestamp("us", "UTC")
_ARROW = {  # what Spark's rows are made of again
    "string": pa.string(), "tinyint": pa.int64(), "smallint": pa.int64(), "int": pa.int64(), "bigint": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "date": pa.date32(), "timestamp_ntz": pa.timestamp("us"),
    "timestamp": _MOMENT,
}  # fmt: skip


class _Group(NamedTuple):
    """A part of the log: user u's rows are rows[offsets[u] : offsets[u + 1]], by numbers of the part's own items."""

    users: pa.Array
    offsets: NDArray[np.int64]
    rows: NDArray[np.int32]
    items: pa.Array
    times: NDArray[Any] | None
    kind: str  # of the times

    def restrict_to(self, key: str, low: float, high: float) -> _Group:
        """The users whose hash is from `low` to below `high`."""
        hashes, lengths = uniforms(self.users.to_pylist(), key), np.diff(self.offsets)
        inside = (hashes >= low) & (hashes < high)
        kept = np.repeat(inside, lengths)
        times = None if self.times is None else self.times[kept]
        offsets = np.concatenate([[0], np.cumsum(lengths[inside])])
        return self._replace(
            users=self.users.filter(pa.array(inside)), offsets=offsets, rows=self.rows[kept], times=times
        )

    def table(self) -> pa.Table:
        """A row for each user, with lists of items' ids and times."""
        names = _NAMES if self.times is not None else _NAMES[:2]
        return grouped_table(self.users, self.offsets, self.items.take(pa.array(self.rows - 1)), self.times, names)


class SparkLog:
    """A log that stays on Spark, as `private_counts`, `private_items` and `SpectralRecommender.fit` take it.

    It is grouped by user once, when it is made, and kept on the disks of Spark's machines until `close`. Ids, times,
    duplicates and what is missing are treated as by `Interactions.read`.

    Args:
        rows: Spark DataFrame with a row for each event. It gives the same rows whenever Spark reads it.
        user: Column of the users' ids, text or whole numbers.
        item: Column of the items' ids.
        time: Column of times; left out, a user's rows have no order.
        duplicates: "drop" or "keep", as of `Interactions.read`.
        parts: Number of parts; a task holds a whole one, and about a million rows are good. Left out, as many as
            `spark.sql.shuffle.partitions` says.

    Attributes:
        items: Items that rows are numbered by; None before `with_items`.
        ordered: Whether each user's rows are in the order of their times.

    Raises:
        ValueError: The log has no user, or a value that is no id or no time.
    """

    def __init__(
        self, rows: Any, *, user: str, item: str, time: str = "", duplicates: str = "drop", parts: int | None = None
    ):
        functions = optional("pyspark.sql.functions", "spark")
        self.columns, self.session = LogColumns(user, item, time, (), duplicates), rows.sparkSession
        self.items: Items | None = None
        self._ids: pa.Array | None = None  # of all items, once they were asked for
        own = dict(zip(_NAMES, self.columns.names))
        kinds = {name: _kind_of(rows, column) for name, column in own.items()}
        taken = [
            (functions.unix_micros(rows[column]) if kinds[name] == _MOMENT else rows[column]).alias(name)
            for name, column in own.items()
        ]
        count = parts or int(self.session.conf.get("spark.sql.shuffle.partitions"))
        place = functions.monotonically_increasing_id().alias(_PLACE)
        shuffled = rows.select(*taken, place).dropna(subset=["user"]).repartition(count, "user").rdd
        grouped = shuffled.mapPartitions(functools.partial(_group, kinds=kinds, duplicates=duplicates))
        self._rows, self._kinds = rows, kinds
        self._kept = self._groups = grouped.persist(optional("pyspark", "spark").StorageLevel.DISK_ONLY)
        self._count()
        if not self._num_users:
            self.close()
            raise ValueError("The log has no user: there is no one to train on.")

    def _count(self) -> None:
        """Groups the log, if it is not yet, and asks how many users there are."""
        sizes = self._groups.map(_size_of).collect()
        times = {kind for *_, kind in sizes} - {""}
        if _REFUSED in times or len(times) > 1:
            self.close()
            raise ValueError(
                f"A value in {', '.join(self.columns.names)} is no id or no time, or not of the kind that its column "
                "began with: Interactions.read, of the same rows, names it."
            )
        self._num_users, self.num_rows = (sum(size[which] for size in sizes) for which in (0, 1))
        self.ordered = bool(times)
        self._real = "numbers" in times

    def close(self) -> None:
        """Removes the grouped log from Spark's machines."""
        self._kept.unpersist()

    def _copy_with(self, **values: Any) -> SparkLog:
        changed = copy.copy(self)
        vars(changed).update(values)
        return changed

    # What is there.

    def __len__(self) -> int:
        return self._num_users

    @property
    def num_items(self) -> int:
        """How many items a model knows, M."""
        return len(require_items(self.items))

    @property
    def catalogue(self) -> Catalogue:
        """The numbers 1..M, as the public items that `private_counts` and the spectral recommender ask for."""
        return Catalogue(np.arange(1, self.num_items + 1))

    def with_items(self, items: Any) -> SparkLog:
        """The same users, with the rows of these items alone, by number.

        Args:
            items: A list of ids, public or from a private release; or `Items`.
        """
        return self._copy_with(items=items if isinstance(items, Items) else Items(list(items)))

    def split(self, train: float = 0.8, key: str = "") -> tuple[SparkLog, SparkLog]:
        """Users to train on and users to test on, the same as of `Interactions.split`.

        Args:
            train: Approximate share of users to train on.
            key: Key of the hash; another key gives another split.
        """
        return self.restrict_to(key, 0.0, train), self.restrict_to(key, train, 1.0)

    def restrict_to(self, key: str, low: float, high: float) -> SparkLog:
        """The users whose keyed hash, a number from 0 to 1, is from `low` to below `high`."""
        chosen = functools.partial(_Group.restrict_to, key=key, low=low, high=high)
        part = self._copy_with(_groups=self._groups.map(chosen), _ids=None)
        part._count()
        return part

    def summary(self) -> str:
        """What was read, for the log's owner: these are counts of private data."""
        return f"{self.num_rows} rows that count, of {len(self)} users.\n"

    def digest(self) -> str:
        """A hash of the rows, in any order: whether it is the same log; for its owner."""
        functions = optional("pyspark.sql.functions", "spark")
        hashes = functions.xxhash64(*(self._rows[name] for name in self.columns.names)).cast("decimal(38,0)")
        return str(self._rows.agg(functions.sum(hashes)).first()[0])

    def found(self) -> tuple[SparkLog, pa.ChunkedArray]:
        """All items of the log and the users that have them, for a private release of a list: itself private."""
        if self._ids is None:
            found = self._groups.flatMap(_items_of).distinct().collect()
            self._ids = pa.array(sorted(found), _id_kind(self._kinds["item"]))
        ids = self._ids
        return self.with_items(ids) if len(ids) else self, pa.chunked_array([ids])

    # What mechanisms take.

    def exact_counts(self, catalogue: Catalogue) -> NDArray[np.int64]:
        """How many users have each item: without noise, and so for the log's owner alone."""
        return exact_counts(self, catalogue)

    def parts(self, catalogue: Catalogue, events: int = PART, in_order: bool = False) -> Iterator[Part]:
        """A refusal of another catalogue, and nothing else: the parts stay on Spark, where `total` adds up."""
        refuse_other_catalogue(catalogue, self.num_items)
        return _refuse_parts()

    def total(self, catalogue: Catalogue, summand: Summand, words: WordSource = os_entropy) -> NDArray[np.int64]:
        """The sum over all users, as `tfdp_rec.sums.total.total` makes it; it must not be released without noise."""
        refuse_other_catalogue(catalogue, self.num_items)
        add = functools.partial(
            _add, items=require_items(self.items), catalogue=catalogue, summand=summand, key=words(4).tobytes()
        )
        found = np.zeros(summand.size, np.int64)
        tasks = min(self._groups.getNumPartitions(), -(-summand.size // _SLAB))
        for slab, values in self._groups.flatMap(add).reduceByKey(operator.add, tasks).collect():
            found[slab * _SLAB : slab * _SLAB + len(values)] = values
        return found

    # Where it goes.

    def write_grouped(self, path: str) -> None:
        """Writes Parquet with a row for each user, by Spark, for `Interactions.from_grouped`.

        Args:
            path: Folder, wherever Spark writes. Columns have the log's names; dates and moments are microseconds.
        """
        rows = self._groups.flatMap(lambda group: zip(*(column.to_pylist() for column in group.table().columns)))
        user, item = ("string" if self._kinds[name] == pa.string() else "bigint" for name in ("user", "item"))
        kinds = (user, f"array<{item}>", f"array<{'double' if self._real else 'bigint'}>")
        schema = ", ".join(f"`{name}` {kind}" for name, kind in zip(self.columns.names, kinds))
        self.session.createDataFrame(rows, schema).write.parquet(path)

    def collect(self, folder: str | Path | None = None) -> Interactions:
        """The log on this machine: of few users, such as those who are held out.

        Args:
            folder: As of `Interactions.read`.
        """
        tables = self._groups.map(_Group.table).collect()
        table = pa.concat_tables(tables, promote_options="permissive")  # a part without times does not know their kind
        time, duplicates = self.columns.time and "time", self.columns.duplicates
        return Interactions.from_grouped(
            table, user="user", items="item", times=time, duplicates=duplicates, folder=folder
        )


def rows_of(paths: Sequence[str]) -> Any:
    """A Spark DataFrame of Parquet.

    Raises:
        ValueError: A file is text.
    """
    # Spark takes the columns of all text files by the header of one, and a line break within quotes for a row's end:
    # a user's own text could be rows of many users.
    text = [path for path in paths if path.removesuffix(".gz").rpartition(".")[2].lower() in _TEXTS]
    if text:
        raise ValueError(
            f"--engine spark reads Parquet, whose columns have names and kinds, and {text[0]} is text, which Spark "
            "reads by the places of its columns and by lines: write Parquet first, or leave --engine out."
        )
    with keep_interrupts():
        session = optional("pyspark.sql", "spark").SparkSession.builder.getOrCreate()
    return session.read.parquet(*paths)


def _kind_of(rows: Any, column: str) -> pa.DataType:
    """What a column is to Arrow."""
    ((_, found),) = rows.select(rows[column]).dtypes
    if found not in _ARROW:
        raise ValueError(f"{column} is of Spark's type {found}: cast it to string or bigint, or a time to timestamp.")
    return _ARROW[found]


def _id_kind(column: pa.DataType) -> pa.DataType:
    return pa.string() if column == pa.string() else pa.int64()


# In tasks.


def _group(rows: Iterable[Any], kinds: Mapping[str, pa.DataType], duplicates: str) -> Iterator[_Group]:
    """The rows of a part, grouped; nothing where no row has a user."""
    columns = LogColumns("user", "item", "time" if "time" in kinds else "", (), duplicates)
    grouping, tables, rows = Grouping(columns), list[pa.Table](), iter(rows)
    schema = pa.schema([*kinds.items(), (_PLACE, pa.int64())])
    try:
        while chunk := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            tables.append(pa.table([pa.array(*each) for each in zip(zip(*chunk), schema.types)], schema=schema))
        # Spark's shuffle keeps no order: rows of one time stand as Spark reads them.
        found = grouping.rows(Stretch("a part", 1, pa.concat_tables([schema.empty_table(), *tables]).sort_by(_PLACE)))
    except (ValueError, OverflowError):  # not raised: the message has a value of the log, and would be in Spark's
        yield _Group(pa.nulls(0), np.zeros(1, np.int64), np.zeros(0, np.int32), pa.nulls(0), None, _REFUSED)
        return
    if found.num_rows:
        ids, lengths, arrays = grouping.sort(found)
        items = pa.array(list(grouping.items), _id_kind(kinds["item"]))
        offsets, kind = np.concatenate([[0], np.cumsum(lengths)]), grouping.time.kind if grouping.time else ""
        yield _Group(ids.cast(_id_kind(kinds["user"])), offsets, arrays["item"], items, arrays.get("time"), kind)


def _size_of(group: _Group) -> tuple[int, int, str]:
    return len(group.users), len(group.rows), group.kind


def _items_of(group: _Group) -> list[Any]:
    return list(group.items.take(pa.array(np.unique(group.rows) - 1)).to_pylist())


def _add(
    group: _Group, items: Items, catalogue: Catalogue, summand: Summand, key: bytes
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """What a part adds, without the slabs that are zero."""

    def draw(start: int, part: Part) -> Draw:
        return keyed_draw(key, group.users[start : start + part.num_users])

    numbers = np.concatenate([[0], items.numbers(group.items)])[group.rows]
    found = add_up(Log(numbers, group.offsets), catalogue, summand, draw, cores=1)
    slabs = ((start // _SLAB, found[start : start + _SLAB]) for start in range(0, len(found), _SLAB))
    return ((slab, values) for slab, values in slabs if values.any())


def _refuse_parts() -> Iterator[Part]:
    raise TypeError("A log on Spark is added up there: take a release that does, or log.collect() for few users.")
    yield
