"""Numbers of privacy units from the ids of their rows.

Two rows are one unit's if their ids are equal. An id that is not equal to itself (NaN, NaT, NA) would make a unit of
each of its rows, or one of all that lack an id; a float beyond 2⁵³ may be the id of several units. Both are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXACT = 2.0**53  # floats up to here are different for different whole numbers


def unit_numbers(unit: Any, rows: int) -> NDArray[np.int64]:
    """The number of each row's unit, from 0; raises `ValueError` for ids that are missing, mixed or too few."""
    ids = np.asarray(unit) if hasattr(unit, "dtype") else _objects(unit)
    if ids.shape != (rows,):
        raise ValueError(f"unit must give one id for each of the {rows} rows, got an array of shape {ids.shape}.")
    if ids.dtype == object:
        return _by_hash(ids)
    if ids.dtype.kind in "fcmM" and (missing := ids != ids).any():
        raise ValueError(_MISSING.format(int(np.flatnonzero(missing)[0])))
    if ids.dtype.kind in "fc" and (np.abs(ids) > _EXACT).any():
        raise ValueError("unit has floats beyond 2^53, which may stand for several users: give whole numbers or text.")
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


def _objects(unit: Any) -> NDArray[Any]:
    listed = list(unit)
    ids = np.empty(len(listed), object)  # not by way of np.asarray, which makes floats of large whole numbers
    ids[:] = listed
    return ids


def _by_hash(ids: NDArray[Any]) -> NDArray[np.int64]:
    # Not by sorting: where an order is not total, equal ids do not come to stand side by side.
    numbers: dict[Any, int] = {}
    found = np.empty(len(ids), np.int64)
    kinds = set()
    for row, each in enumerate(ids):
        if _missing(each):
            raise ValueError(_MISSING.format(row))
        kinds.add(next((kind for kind in (str, bytes) if isinstance(each, kind)), object))
        found[row] = numbers.setdefault(each, len(numbers))
    if len(kinds) > 1:
        raise ValueError("unit has ids of several kinds, text beside others: one user may have both. Give one kind.")
    return found


def _missing(each: Any) -> bool:
    if each is None:
        return True
    try:
        return bool(each != each)
    except (TypeError, ValueError):  # of pandas' NA it is not known
        return True


_MISSING = "unit has no user id in row {}: leave such rows out of the data."
