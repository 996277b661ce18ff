"""Titles of items, from a public file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tfdp_rec.data import Items
from tfdp_rec.datasets.logs import sources
from tfdp_rec.datasets.logs.items import as_kind

_TITLES = ("title", "name")


def columns_of(path: str, item_column: str) -> tuple[str, str]:
    """Which columns hold ids and titles.

    Args:
        path: of a file of any format that logs have.
        item_column: what the log calls items; the file may have its ids under that name, under "item", or in the first
            of its columns. Titles stand under "title" or "name", or in the other of two columns.

    Raises:
        ValueError: it cannot be told.
    """
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


def read(path: str, items: Items, item_column: str) -> dict[Any, str]:
    """The titles of the items that have one; of several, the first.

    Args:
        path: of the file.
        items: whose titles.
        item_column: what the log calls items.

    Raises:
        ValueError: it cannot be told which column is what.
    """
    ids, title = columns_of(path, item_column)
    found: dict[Any, str] = {}
    for stretch in sources.stretches(path, [ids, title]):
        here = as_kind(items.ids.type, _plain(stretch.table[ids]))
        known = pc.is_in(here, value_set=items.ids)
        for item, words in zip(here.filter(known).to_pylist(), stretch.table[title].filter(known).to_pylist()):
            if words is not None:
                found.setdefault(item, str(words))
    return found


def _plain(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array
