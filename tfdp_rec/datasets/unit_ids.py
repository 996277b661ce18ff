"""Numbers of privacy units from the ids of their rows.

Two rows are one unit's if their ids are equal. Refused are ids that are not equal to themselves (NaN, NaT, NA; also
within tuples) or masked, since each row would be a unit, or all such rows one; and floats so large that different whole
numbers are the same float (from 2⁵³, of float32 from 2²⁴), since several units would be one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unit_numbers(unit: Any, rows: int) -> NDArray[np.int64]:
    """The number of each row's unit, from 0; raises `ValueError` for ids that are missing, mixed or too few."""
    ids = np.asarray(unit) if hasattr(unit, "dtype") else _objects(unit)
    if ids.shape != (rows,):
        raise ValueError(f"unit must give one id for each of the {rows} rows, got an array of shape {ids.shape}.")
    if ids.dtype.kind in "OV":
        return _number_by_hash(_objects(ids.tolist()))
    missing = np.ma.getmaskarray(unit) if isinstance(unit, np.ma.MaskedArray) else ids != ids
    if ids.dtype.kind in "SU":
        missing = missing | (np.char.str_len(ids) == 0)  # what a file has in place of nothing
    if missing.any():
        raise ValueError(_MISSING.format(int(np.flatnonzero(missing)[0])))
    if ids.dtype.kind in "fc" and (np.abs(ids) >= 2.0 ** (np.finfo(ids.dtype).nmant + 1)).any():
        raise ValueError(
            f"unit has {ids.dtype} numbers so large that several users may have the same: give whole numbers, or text."
        )
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


def _objects(unit: Any) -> NDArray[Any]:
    # Not by way of np.asarray, which makes floats of large whole numbers, and a second axis of tuples.
    # Of an Arrow array, None stands for what is missing, which its own scalars do not.
    return np.fromiter(unit.to_pylist() if hasattr(unit, "to_pylist") else unit, object)


def _number_by_hash(ids: NDArray[Any]) -> NDArray[np.int64]:
    # Not by sorting: where an order is not total, equal ids do not come to stand side by side.
    numbers: dict[Any, int] = {}
    found = np.empty(len(ids), np.int64)
    kinds = set()
    for row, each in enumerate(ids):
        if _is_missing(each) or isinstance(each, (str, bytes)) and not each:
            raise ValueError(_MISSING.format(row))
        kinds.add(next((kind for kind in (str, bytes) if isinstance(each, kind)), object))
        found[row] = numbers.setdefault(each, len(numbers))
    if len(kinds) > 1:
        raise ValueError("unit has ids of several kinds, text beside others: one user may have both. Give one kind.")
    return found


def _is_missing(each: Any) -> bool:
    if each is None or getattr(each, "is_valid", True) is False:  # of Arrow's scalars
        return True
    if isinstance(each, (tuple, frozenset)):
        return any(map(_is_missing, each))
    try:
        return bool(each != each)
    except (TypeError, ValueError):  # of pandas' NA it is not known
        return True


_MISSING = "unit has no user id in row {}: leave such rows out of the data."
