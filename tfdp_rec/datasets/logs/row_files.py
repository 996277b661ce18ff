"""Rows of Parquet files, read from front to back as often as asked: the files' own order, a stretch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdp_rec.datasets.logs import sources
from tfdp_rec.datasets.logs.columns import ArrayColumn


class RowFiles:
    """Rows of Parquet files, as arrays in a nest of dicts and tuples; `len` is how many there are.

    Lists that have one length in all rows become further axes of an array.

    Args:
        paths: A file, a folder, a pattern or a list of these.
        columns: The nest, with a column's name in the place of each array, such as `({"item": "sku"}, "clicked")`; a
            list of names stands for a dict with these keys.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is not Parquet, or is broken; a column is missing or lacks values; lists have different
            lengths.

    Example:
        >>> import pyarrow as pa, pyarrow.parquet, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> pa.parquet.write_table(pa.table({"sku": [7, 8], "clicked": [True, False]}), folder + "/part.parquet")
        >>> rows = RowFiles(folder, (["sku"], "clicked"))
        >>> len(rows), next(iter(rows))
        (2, ({'sku': array([7, 8])}, array([ True, False])))
    """

    def __init__(self, paths: Any, columns: Any):
        self.paths, self.columns = sources.files_of(paths), _name_columns(columns)
        if not self.paths or any(path.suffix.lower() not in (".parquet", ".pq") for path in self.paths):
            raise ValueError(
                "Rows are read from Parquet files alone, whose columns have types: of others make a tf.data.Dataset of "
                "batches."
            )

        told = dict[tuple[int, int], Path]()
        for path in self.paths:
            file = path.stat().st_dev, path.stat().st_ino
            if file in told:
                raise ValueError(
                    f"{told[file]} is given twice, the second time as {path}: each of its rows would be in two batches "
                    "of an epoch, at the price of one."
                )
            told[file] = path

    def __len__(self) -> int:
        return sum(map(sources.parquet_rows, self.paths or ()))

    def __iter__(self) -> Iterator[Any]:
        names = list(dict.fromkeys(tf.nest.flatten(self.columns)))
        for stretch in sources.stretches(self.paths, names):
            yield tf.nest.map_structure(lambda name: ArrayColumn(name).read(stretch), self.columns)  # noqa: B023


def _name_columns(columns: Any) -> Any:
    if isinstance(columns, list):
        return {name: name for name in columns}
    return tuple(map(_name_columns, columns)) if isinstance(columns, tuple) else columns
