"""Titles of items, from a public file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tfdp_rec.datasets.logs import sources
from tfdp_rec.datasets.logs.columns import words
from tfdp_rec.datasets.logs.items import Items, as_kind

_TITLES = ("title", "name")


def columns_of(path: str, item_column: str) -> tuple[str, str]:
    """The columns of ids (as in the log, "item", or the first) and of titles ("title", "name", or the other of two)."""
    names = sources.column_names(Path(path))
    ids = next((name for name in (item_column, "item") if name in names), names[0])
    others = [name for name in names if name != ids]
    title = next((name for name in _TITLES if name in others), others[0] if len(others) == 1 else "")
    if not title:
        raise ValueError(
            f"{path} has the columns {', '.join(names)[:200]}: it needs one with ids, called {item_column!r}, and one "
            'with titles, called "title".'
        )
    return ids, title


def check(path: str, kind: pa.DataType, item_column: str) -> int:
    """Size of all titles in bytes; the file is read to its end for what that refuses."""
    return sum(pc.sum(pc.binary_length(titles)).as_py() or 0 for _, titles in _pairs(path, kind, item_column))


def read(path: str, items: Items, item_column: str) -> dict[Any, str]:
    """Titles of the items that have one; of several, the first."""
    found: dict[Any, str] = {}
    for ids, titles in _pairs(path, items.ids.type, item_column):
        known = pc.is_in(ids, value_set=items.ids)
        for item, title in zip(ids.filter(known).to_pylist(), titles.filter(known).to_pylist()):
            if title is not None:
                found.setdefault(item, title)
    return found


def _pairs(path: str, kind: pa.DataType, item_column: str) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Ids, of the log's kind, and titles, a stretch of rows at a time."""
    ids, title = columns_of(path, item_column)
    for stretch in sources.stretches(path, [ids, title]):
        try:
            yield as_kind(kind, _plain(stretch.table[ids])), words(_plain(stretch.table[title]))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
            raise ValueError(
                f"{stretch.row(0)}: {ids} and {title} must hold ids and titles: {str(problem)[:200].rstrip('.')}."
            ) from problem


def _plain(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array
