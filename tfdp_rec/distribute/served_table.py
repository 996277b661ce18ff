"""A table whose rows live on parameter servers, in contiguous ranges.

It stands where the variable of one machine stands. What a batch reads of all tables is fetched together, each distinct
row once and with one call of each server (`fetch`); `tf.gather` from a table finds its rows there. Nothing ever reads
a table whole; what tries is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.files import row_chunks
from tfdp_rec.core.ground.graph_checks import require
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.independence import rows_of
from tfdp_rec.distribute.parameter_server import ParameterServer


@dataclasses.dataclass(frozen=True)
class Shard:
    """Rows `first` and on of a table, on a server."""

    server: ParameterServer
    first: int
    variable: tf.Variable

    @property
    def rows(self) -> int:
        """How many."""
        return self.variable.shape[0]


class ServedTable:
    """Stands for the variable of a table whose shards lie on servers."""

    def __init__(self, shards: list[Shard]):
        self.shards, self.path = shards, "?"
        self.open = False
        self.dtype = shards[0].variable.dtype
        self.shape = tf.TensorShape([sum(shard.rows for shard in shards), *shards[0].variable.shape[1:]])
        self._ends = [shard.first + shard.rows for shard in shards]
        self.fetched: tuple[tf.Tensor, tf.Tensor] | None = None

    def hold(self, variable: keras.Variable, number: int) -> None:
        """Gives each server its shard, as the model's `variable` of that number."""
        self.path = variable.path
        for shard in self.shards:
            own = keras.Variable(shard.variable, dtype=shard.variable.dtype.name, name="shard")
            own._path = variable.path  # what the server, its optimizer and the clipped sum know it by
            own.regularizer, own.constraint = variable.regularizer, variable.constraint  # honoured there, or refused
            shard.server.hold(own, True, number, shard.first)

    # Reading.

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """What `tf.gather` calls."""
        if not self.open:  # traced, not run: only the shape matters
            return tf.zeros([*indices.shape.as_list(), *self.shape[1:]] if indices.shape.is_fully_defined() else
                            tf.concat([tf.shape(indices), self.shape[1:]], axis=0), self.dtype)  # fmt: skip
        assert self.fetched is not None, "a served table is read within `fetch`"
        ids, rows = self.fetched
        flat = tf.reshape(tf.cast(indices, tf.int64), [-1])
        place = tf.minimum(tf.searchsorted(ids, flat), tf.size(ids) - 1)
        announced = tf.gather(ids, place) == flat
        with tf.control_dependencies(require(announced, _UNTOLD.format(self.path))):
            # Zeros for an id that was not announced, or one example would read the row of another id.
            found = tf.where(announced[:, None], tf.gather(rows, place), tf.zeros([], rows.dtype))
        read = rows_of(tf.reshape(found, tf.concat([tf.shape(indices), self.shape[1:]], axis=0)), indices)
        # The reading knows a row's width from a check alone; one that may be 1 could be broadcast against the batch.
        return tf.ensure_shape(read, [*[None] * indices.shape.rank, *self.shape[1:]])

    def split(self, ids: tf.Tensor, values: tf.Tensor | None = None) -> list[tuple[tf.Tensor, tf.Tensor, Any]]:
        """For each shard: positions in `ids`, ids within the shard, and its part of `values`."""
        # An id outside the table goes to the first or last shard, which refuses it.
        if len(self.shards) == 1:
            return [(tf.range(tf.size(ids)), ids, values)]
        count = len(self.shards)
        owner = tf.minimum(tf.searchsorted(tf.constant(self._ends, tf.int64), ids, side="right"), count - 1)
        parts = lambda tensor: tf.dynamic_partition(tensor, owner, count)  # noqa: E731
        values_of = [None] * count if values is None else parts(values)
        return [
            (position, own - shard.first, value)
            for shard, position, own, value in zip(self.shards, parts(tf.range(tf.size(ids))), parts(ids), values_of)
        ]

    def chunks(self, values: int) -> Iterator[tuple[Shard, tf.Tensor]]:
        """The table in pieces of at most so many values: (shard, rows within it)."""
        for shard in self.shards:
            for start, end in row_chunks([shard.rows, int(self.shape[1])], values):
                yield shard, tf.range(start, end, dtype=tf.int64)

    # What a variable has that must not be used.

    def _whole(self) -> tf.Tensor:
        if not self.open:
            return tf.zeros(self.shape, self.dtype)
        raise NotPrivate(
            f"Table '{self.path}' lives on parameter servers and is read by row only. For the model as a whole, with "
            "all its noise, call trainer.model()."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._whole()

    def numpy(self) -> Any:
        """Refused."""
        return self._whole()


_UNTOLD = (
    "The model reads rows of '{}' that its batch does not tell: something random in the model decides ids. Draw it in "
    "dataset_fn, as part of the batch"
)


@contextlib.contextmanager
def fetch(tables: Mapping[str, ServedTable], ids: Mapping[str, tf.Tensor]) -> Iterator[None]:
    """Within it, the tables can be read at these ids."""
    distinct = {path: tf.sort(tf.unique(ids[path])[0]) for path in tables}
    for path, rows in _read_together(tables, distinct).items():
        tables[path].fetched = distinct[path], rows
    try:
        yield
    finally:
        for table in tables.values():
            table.fetched = None


def _read_together(tables: Mapping[str, ServedTable], ids: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Rows of distinct ids, one call of each server."""
    splits = {path: list(zip(table.shards, table.split(ids[path]))) for path, table in tables.items()}
    wanted: dict[ParameterServer, dict[str, tf.Tensor]] = {}
    for path, split in splits.items():
        for shard, (_, own, _) in split:
            wanted.setdefault(shard.server, {})[path] = own
    found = {server: server.read(rows) for server, rows in wanted.items()}
    whole = {}
    for path, split in splits.items():
        parts = [found[shard.server][path] for shard, _ in split]
        places = [position for _, (position, _, _) in split]
        whole[path] = parts[0] if len(parts) == 1 else tf.dynamic_stitch(places, parts)
    return whole


def _to_tensor(value: ServedTable, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
    tensor = value._whole()
    return tensor if dtype is None else tf.cast(tensor, dtype)


tf.register_tensor_conversion_function(ServedTable, _to_tensor)
