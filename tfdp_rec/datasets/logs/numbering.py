"""A grouped log's rows under the numbers of chosen items: the rest left out, the last so many of each user kept.

Made once for each list of items and bound, a stretch of rows at a time, in a folder of its own beside the log's arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tfdp_rec.datasets.log import whole_users
from tfdp_rec.datasets.logs.grouping import full_disk
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.files import alone, replacing

_ROWS = 2**22  # at a time


def numbered(folder: Path, items: Items, rows_per_unit: int | None, others: Mapping[str, Any]) -> Path:
    """The folder of a grouped log's rows with users and items numbered; found, if it was made before."""
    made = folder / f"items-{_name(items, rows_per_unit)}"
    with alone(made):
        if not made.exists():
            with replacing(made) as temporary, full_disk(folder):
                Path(temporary).mkdir(mode=0o700)
                _write(folder, Path(temporary), items, rows_per_unit, others)
    return made


def _name(items: Items, rows_per_unit: int | None) -> str:
    digest = hashlib.blake2b(json.dumps([items.ids.to_pylist(), rows_per_unit]).encode(), digest_size=10)
    return digest.hexdigest()


def _write(folder: Path, target: Path, items: Items, bound: int | None, others: Mapping[str, Any]) -> None:
    offsets = np.fromfile(folder / "offsets.bin", np.int64)
    with pa.memory_map(str(folder / "found.arrow")) as file:
        number_of = np.concatenate([[0], items.numbers(pa.ipc.open_file(file).read_all()["id"].combine_chunks())])
    ends = np.zeros(len(offsets), np.int64)
    with contextlib.ExitStack() as stack:
        out = {name: stack.enter_context(open(target / name, "wb")) for name in ("rows.bin", *others)}
        parts = {name: stack.enter_context(open(folder / name, "rb")) for name in out}
        for first, last in whole_users(offsets, _ROWS):
            count, lengths = int(offsets[last] - offsets[first]), np.diff(offsets[first : last + 1])
            numbers = number_of[np.fromfile(parts["rows.bin"], np.int32, count)].astype(np.int32)
            kept, left = _kept(numbers > 0, lengths, bound)
            out["rows.bin"].write(numbers[kept].tobytes())
            for name, kind in others.items():
                out[name].write(np.fromfile(parts[name], kind, count)[kept].tobytes())
            ends[first + 1 : last + 1] = ends[first] + np.cumsum(left)
    (target / "offsets.bin").write_bytes(ends.tobytes())
    (target / "bound.json").write_text(json.dumps(bound))


def _kept(known: NDArray[np.bool_], lengths: NDArray[np.int64], bound: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Which rows stay, and how many of each user."""
    ends = np.cumsum(lengths)
    so_far = np.concatenate([[0], np.cumsum(known)])
    if bound is not None:
        after = np.repeat(so_far[ends], lengths) - so_far[1:]  # known rows of the user after this one
        known = known & (after < bound)
    counts = np.diff(np.concatenate([[0], np.cumsum(known)])[np.concatenate([[0], ends])])
    return known, counts
