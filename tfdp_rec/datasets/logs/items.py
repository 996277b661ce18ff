"""The items that a model knows, by their own ids, and the numbers 1, 2, ... that stand for them in tables; 0 is none.

**Which items occur in a log is private**: an id that one user alone has gives that user away. So the items of a model
come from a public list, or from a private release (`tfdp_rec.privacy.private_items`); never from the log itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tfdp_rec.core.ground.files import lines_of, open_atomically
from tfdp_rec.datasets.logs import sources
from tfdp_rec.datasets.logs.columns import IdColumn

_COLUMN = "item"


class Items:
    """Ids of items, text or whole numbers; number i is ids[i - 1].

    Args:
        ids: Ids, all different, none missing, at least one.

    Raises:
        ValueError: they are not such.

    Example:
        >>> items = Items(["tea", "towel"])
        >>> items.numbers(["towel", "whale"]).tolist(), items.of([1, 0])
        ([2, 0], ['tea', None])
    """

    def __init__(self, ids: Any):
        try:
            array = ids if isinstance(ids, pa.Array) else pa.array(ids)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as problem:
            raise ValueError(f"The ids of items must be all text or all whole numbers: {problem}.") from problem
        found = IdColumn("items").read(sources.Stretch("the list", 1, pa.table({"items": array})))
        if not len(found):
            raise ValueError("The list of items is empty: nothing could be recommended. A private one needs more ε.")
        if found.null_count:
            raise ValueError(f"The list of items has {len(found)} ids, and {found.null_count} of them are missing.")
        if pc.count_distinct(found).as_py() < len(found):
            twice = pc.value_counts(found).sort(order="descending", by="counts")[0]["values"]
            raise ValueError(f"The list of items has {str(twice)[:60]!r} twice: list each item once.")
        self.ids: pa.Array = found

    @classmethod
    def read(cls, path: str | os.PathLike[str], column: str | None = None, usual: Sequence[str] = ()) -> Items:
        """The ids in a file of any format that logs have, or in a text file (.txt) with an id a line and no header.

        Args:
            path: Path of the public file.
            column: Column of the ids; left out, the only one, or the one that is called "item".
            usual: Other names that the column may have.

        Raises:
            ValueError: there is no such column, or an id is missing or there twice.
        """
        if Path(path).suffix.lower() == ".txt":
            return cls(lines_of(path))
        found = column or sources.id_column(Path(path), [_COLUMN, *usual])
        reader = IdColumn(found)
        arrays = [reader.read(stretch) for stretch in sources.stretches(str(path), [found])]
        return cls(pa.concat_arrays([array for array in arrays if len(array)] or [pa.nulls(0, pa.string())]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a Parquet file that `read` reads, to keep beside a model."""
        with open_atomically(path, "wb") as file:
            self.write(file)

    def write(self, file: IO[bytes]) -> None:
        """Writes what `save` does into an open file."""
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({_COLUMN: self.ids}), file)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Items({len(self)}, {self.ids[0].as_py()!r} first)"

    def numbers(self, ids: Any) -> NDArray[np.int32]:
        """Numbers of ids; 0 for those that are not in the list.

        Args:
            ids: Ids, text or whole numbers; where the list has text, the number 7 is the text "7".
        """
        wanted = ids if isinstance(ids, pa.Array) else pa.array(list(ids))
        places = pc.index_in(as_kind(self.ids.type, wanted), value_set=self.ids)
        return (places.fill_null(-1).to_numpy(zero_copy_only=False) + 1).astype(np.int32)

    def of(self, numbers: Sequence[int] | NDArray[Any]) -> list[Any]:
        """Ids of numbers; None for 0.

        Raises:
            IndexError: there is no such number.
        """
        found = np.asarray(numbers, np.int64)
        if found.size and not 0 <= found.min() <= found.max() <= len(self):
            raise IndexError(f"numbers go from 1 to {len(self)}, 0 for none; got {found.min()} to {found.max()}.")
        return list(self.ids.take(pa.array(found - 1, mask=found == 0)).to_pylist())


def as_kind(kind: pa.DataType, ids: pa.Array) -> pa.Array:
    """Ids as text or as whole numbers; null where text is no number."""
    if pa.types.is_null(ids.type):
        return pa.nulls(len(ids), kind)
    if pa.types.is_integer(kind) and not pa.types.is_integer(ids.type):
        ids = ids.cast(pa.string())
        whole = pc.match_substring_regex(ids, r"^(0|-?[1-9][0-9]{0,17})$")
        ids = pc.if_else(whole, ids, pa.scalar(None, pa.string()))
    return ids.cast(kind)
