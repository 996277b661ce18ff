"""What a column of a log holds, made one kind: ids, times, numbers. What does not fit is refused by file and row.

- **Ids** are text or whole numbers, one of them throughout a column. The empty text is a missing id.
- **Times** are whole or decimal numbers, dates and moments, or text that says one of these (ISO 8601), all alike, with
  a zone or without. Whole numbers of about today in seconds here and milliseconds there are two formats as well: their
  order would be wrong.
- **Numbers** are what Arrow can make a float of; a missing one is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tfdp_rec.datasets.log import NO_ITEM
from tfdp_rec.datasets.logs.sources import Stretch, is_list

_UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
_FROM, _TO = 3e8, 5e9  # seconds, 1979 to 2128: whole numbers between them are moments
_LATEST = 2.0**63  # a larger number is no time in any unit
# From here on whole numbers are not told apart, by bits of a float.
_EXACT = {pa.float16(): 2.0**11, pa.float32(): 2.0**24, pa.float64(): 2.0**53}
_ISO = {"ISO 8601": pa.timestamp("us"), "ISO 8601 with a zone": pa.timestamp("us", "UTC")}
_TEXTS = {"whole numbers": pa.int64(), "numbers": pa.float64(), **_ISO}


class Column:
    """A named column, and the kind of its first value."""

    def __init__(self, name: str):
        self.name, self.kind, self.first = name, "", ""

    def _array(self, stretch: Stretch) -> pa.Array:
        column = stretch.table[self.name]
        plain = [_decode(chunk) for chunk in column.chunks]
        array = pa.concat_arrays(plain) if plain else pa.array([], column.type)
        if _is_text(array.type):
            try:
                array.validate(full=True)  # the reader of Parquet does not look
            except pa.ArrowInvalid as problem:
                raise ValueError(f"{stretch.where}: {self.name} holds text that is not UTF-8 ({problem}).") from None
        return array

    def _note_kind(self, kind: str, stretch: Stretch, place: int, value: Any) -> None:
        """Records the column's kind; another kind than the first is refused."""
        if not self.kind:
            self.kind, self.first = kind, f"{_short(value)} at {stretch.row(place)}"
        if self.kind != kind:
            self._refuse(stretch, place, value)

    def _refuse(self, stretch: Stretch, place: int, value: Any) -> None:
        raise ValueError(
            f"{stretch.row(place)}: {self.name} is {_short(value)}, and was {self.first}: the column began with "
            f"{self.kind}. {self._way_out}."
        )

    _way_out = "Write all of it alike"


def _decode(array: pa.Array) -> pa.Array:
    """Categories as what they stand for."""
    if not pa.types.is_dictionary(array.type):
        return array
    values = array.dictionary
    return (values.cast(pa.string()) if _is_text(values.type) else values).take(array.indices)


def _short(value: Any) -> str:
    if isinstance(value, pa.Scalar) and not pa.types.is_nested(value.type):
        value = value.cast(pa.string())
    return repr(str(value)[:40])


def _first_place(array: pa.Array) -> int:
    """Of the first value that is there; -1 if none is."""
    return int(pc.index(array.is_valid(), True).as_py())


def _first_bad(array: pa.Array, kind: pa.DataType) -> int:
    """Place of the first value that cannot be cast."""
    # Arrow says that a value does not fit and not where, so the array is halved until one is left.
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _casts(array[low:middle], kind) else (low, middle)
    return low


def _casts(array: pa.Array, kind: pa.DataType) -> bool:
    try:
        array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


class IdColumn(Column):
    """Ids of users or items."""

    _way_out = "Make all ids text, or all whole numbers"

    def read(self, stretch: Stretch) -> pa.Array:
        """The ids as string or int64; missing ones are null."""
        array = self._array(stretch)
        place = _first_place(array)
        if place < 0:
            return pa.nulls(len(array), pa.int64() if self.kind == "whole numbers" else pa.string())
        if _is_text(array.type):
            self._note_kind("text", stretch, place, array[place])
            array = array.cast(pa.string())
            return pc.if_else(pc.equal(array, ""), pa.scalar(None, pa.string()), array)
        self._note_kind("whole numbers", stretch, place, array[place])
        return self._whole(array, stretch)

    def _whole(self, array: pa.Array, stretch: Stretch) -> pa.Array:
        if pa.types.is_floating(array.type):  # frames make floats of whole numbers where one is missing
            array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            raise ValueError(f"{stretch.where}: {self.name} is of type {array.type}. {self._way_out}.")
        if not _casts(array, pa.int64()):
            self._refuse(stretch, place := _first_bad(array, pa.int64()), array[place])
        if exact := _EXACT.get(array.type):
            sizes = pc.abs(array.cast(pa.float64()))
            if (pc.max(sizes).as_py() or 0) >= exact:
                place = pc.index(pc.greater_equal(sizes, exact), True).as_py()
                self._refuse(stretch, place, array[place])
        whole = array.cast(pa.int64())
        if (place := pc.index(whole, NO_ITEM).as_py()) >= 0:
            raise ValueError(
                f"{stretch.row(place)}: {self.name} is {NO_ITEM}, which stands for no id: NumPy makes it of what is "
                "missing (NaT). Leave such ids empty, or write others."
            )
        return whole


class TimeColumn(Column):
    """Times, for order."""

    _way_out = "Write all times alike: numbers of one unit, or ISO 8601, all with a zone or all without"

    def __init__(self, name: str):
        super().__init__(name)
        self._unit = Column(name)
        self._unit._way_out = self._way_out

    def read(self, stretch: Stretch) -> pa.Array:
        """The times as int64 (dates and moments: microseconds) or float64; missing ones are null."""
        array = self._array(stretch)
        place = _first_place(array)
        if place < 0:
            return pa.nulls(len(array), pa.float64() if self.kind == "numbers" else pa.int64())
        times = self._text(array, stretch, place) if _is_text(array.type) else self._check_type(array, stretch, place)
        if pa.types.is_floating(times.type):
            times = pc.if_else(pc.is_finite(times), times, pa.scalar(None, times.type))
            self._refuse_at(pc.index(pc.greater(pc.abs(times), _LATEST), True).as_py(), stretch, times)
        if self.kind in ("whole numbers", "numbers"):
            self._check_unit(times, stretch)
        return times

    def _check_type(self, array: pa.Array, stretch: Stretch, place: int) -> pa.Array:
        kind = array.type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            self._note_kind("whole numbers" if pa.types.is_integer(kind) else "numbers", stretch, place, array[place])
            return array.cast(_TEXTS[self.kind])
        if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
            raise ValueError(f"{stretch.where}: {self.name} is of type {kind}, which is no time. {self._way_out}.")
        zone = getattr(kind, "tz", None)
        self._note_kind("moments with a zone" if zone else "moments without a zone", stretch, place, array[place])
        return array.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())

    def _text(self, array: pa.Array, stretch: Stretch, place: int) -> pa.Array:
        array = array.cast(pa.string())
        array = pc.if_else(pc.equal(array, ""), pa.scalar(None, pa.string()), array)
        place = _first_place(array)
        if place < 0:
            return pa.nulls(len(array), pa.int64())
        fitting = [kind for kind, form in _TEXTS.items() if _casts(array[place : place + 1], form)]
        if self.kind not in fitting:
            self._note_kind(next(iter(fitting), "no time"), stretch, place, array[place])
        if self.kind == "no time":
            self._refuse_at(place, stretch, array)
        form = _TEXTS[self.kind]
        if not _casts(array, form):
            self._refuse(stretch, bad := _first_bad(array, form), array[bad])
        times = array.cast(form)
        return times.cast(pa.int64()) if self.kind in _ISO else times

    def _refuse_at(self, place: int, stretch: Stretch, array: pa.Array) -> None:
        if place >= 0:
            raise ValueError(
                f"{stretch.row(place)}: {self.name} is {_short(array[place])}, which is no time. {self._way_out}."
            )

    def _check_unit(self, times: pa.Array, stretch: Stretch) -> None:
        values = times.drop_null().to_numpy(zero_copy_only=False)
        for unit, scale in _UNITS.items():
            if len(values) and values.max() >= _FROM * scale and values.min() < _TO * scale:
                exact = float if pa.types.is_floating(times.type) else int
                first, end = (pa.scalar(exact(bound * scale), times.type) for bound in (_FROM, _TO))
                here = pc.and_(pc.greater_equal(times, first), pc.less(times, end))
                place = pc.index(here, True).as_py()
                if place >= 0:
                    self._unit._note_kind(f"{unit} since 1970", stretch, place, times[place])


class NumberColumn(Column):
    """A feature."""

    _way_out = "A feature is a number; number categories by a public list first"

    def read(self, stretch: Stretch) -> NDArray[np.float32]:
        """The numbers; missing ones are NaN."""
        array = self._array(stretch)
        if not _casts(array, pa.float64()):
            bad = _first_bad(array, pa.float64()) if _is_text(array.type) else 0
            raise ValueError(f"{stretch.row(bad)}: {self.name} is {_short(array[bad])}. {self._way_out}.")
        return array.cast(pa.float64()).to_numpy(zero_copy_only=False).astype(np.float32)


class ArrayColumn(Column):
    """Values as they are: numbers, booleans, text, or lists of these that have one length."""

    def read(self, stretch: Stretch) -> NDArray[Any]:
        """The values, lists along further axes; missing ones are refused."""
        return self._values(self._array(stretch), stretch.where)

    def _values(self, array: pa.Array, where: str) -> NDArray[Any]:
        if array.null_count:
            raise ValueError(f"{where}: {self.name} lacks values: fill them in, or leave such rows out.")
        kind = array.type
        if is_list(kind):
            lengths = pc.list_value_length(array).unique().to_pylist()
            if len(lengths) > 1:
                raise ValueError(
                    f"{where}: {self.name} has lists of different lengths: fill or cut them to one that you choose "
                    "without the data."
                )
            values = self._values(array.flatten(), where)
            return values.reshape(len(array), *lengths, *values.shape[1:])
        fits = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, _is_text, _is_bytes)
        if not any(is_it(kind) for is_it in fits):
            raise ValueError(f"{where}: {self.name} is of type {kind}. Give numbers, text or lists; times as numbers.")
        return array.to_numpy(zero_copy_only=False)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))
