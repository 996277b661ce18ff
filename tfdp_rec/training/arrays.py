"""The arrays that `make_private` is given: as NumPy arrays, or refused with the way to give them."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec.datasets.unit_ids import unit_numbers

_OF_A_USER = re.compile(
    r"(user|customer|member|visitor|client|account|shopper|patient)s?(_?(ids?|no|number|key|index))?", re.IGNORECASE
)


def arrays_of(data: Any, names: list[str] | None, one_input: bool = False) -> Any:
    """The data as NumPy arrays in tuples and dicts, a table that is x by its columns.

    Args:
        data: Nest of what has arrays' form; x may be a table of pandas or Polars.
        names: Names of the model's inputs, if it is made of layers.
        one_input: Whether the model takes one array for x.

    Raises:
        TypeError: The data are no arrays of numbers or text.
        ValueError: A table lacks columns of the inputs' names.
    """
    _refuse_no_arrays(data)
    if isinstance(data, (tuple, list)) and len(data) and hasattr(data[0], "columns") and not one_input:
        return _columns(data[0], names), *map(_arrays, data[1:])
    return _arrays(data)


def _refuse_no_arrays(data: Any) -> None:
    if hasattr(data, "columns"):
        raise TypeError(
            f"data is one {type(data).__name__}: give its columns as arrays, such as "
            "(frame['item'].to_numpy(), frame['rating'].to_numpy()), or a table of the inputs as x, (frame, y)."
        )
    if isinstance(data, tf.data.Dataset) or isinstance(data, Iterator) or hasattr(data, "__getitem__") and not (
        isinstance(data, (list, tuple, dict)) or hasattr(data, "__array__")
    ):
        raise TypeError(
            f"data must be arrays, such as (x, y), from which make_private draws its own batches; got a "
            f"{type(data).__name__}. For data on disk, tfdp_rec.PrivatePlan(...).batches(fetch) takes a function from "
            "row numbers to a batch."
        )
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) or hasattr(leaf, "tocsr"):
            raise TypeError(
                f"The data hold a {type(leaf).__name__}, whose rows have no length in common: "
                "tfdp_rec.data.padded(ids, length) makes arrays of it, ids and weights, at a length that you choose "
                "without the data. Of few columns that are no ids, take .toarray()."
            )


def _arrays(data: Any) -> Any:
    # Lists as tuples: tf.data takes a list for one array.
    if isinstance(data, (list, tuple)) and not all(isinstance(each, (int, float, str)) for each in data):
        return tuple(map(_arrays, data))
    if isinstance(data, dict):
        return {key: _arrays(value) for key, value in data.items()}
    array = np.asarray(data)
    array = np.asarray(array.tolist()) if array.dtype == object else array  # numbers or text, by what it holds
    if array.dtype.kind not in "biufcSU":
        raise TypeError(
            f"The data hold an array of {array.dtype} (values that are missing, times or records): give numbers or "
            "text, without gaps, such as column.fillna(0).to_numpy() or times as numbers of days."
        )
    return array


def _columns(table: Any, names: list[str] | None) -> Any:
    # A model of layers takes the columns of its inputs' names, any other all.
    columns = {str(name): name for name in table.columns}
    taken = list(columns) if names is None else [name for name in names if name in columns]
    if names is not None and len(taken) < len(names):
        lacking = ", ".join(name for name in names if name not in columns)
        raise ValueError(
            f"The model has inputs of the names {lacking}, and the {type(table).__name__} has the columns "
            f"{', '.join(columns)}: name inputs like columns, keras.Input([], name={list(columns)[0]!r}), or give "
            "arrays."
        )
    return {name: _arrays(table[columns[name]]) for name in taken}


def number_of_rows(data: Any) -> int:
    """The number of rows that all arrays have."""
    lengths = {len(array) if array.ndim else -1 for array in tf.nest.flatten(data)}
    if len(lengths) != 1 or not lengths - {-1, 0}:
        single = "; a single value is no array: of records give columns, as arrays" if -1 in lengths else ""
        numbers = sorted(lengths - {-1})
        raise ValueError(f"data must be arrays with the same number of rows, at least one; got {numbers} rows{single}.")
    return lengths.pop()


def has_text(data: Any) -> bool:
    """Whether an array holds text."""
    return any(array.dtype.kind in "OSU" for array in tf.nest.flatten(data))


def rows_of_units(unit: Any, rows: int) -> tuple[int, Callable[[np.ndarray], np.ndarray]]:
    """The number of units, and a function that picks one row of each drawn unit, uniformly at random."""
    if unit is None or isinstance(unit, str) and unit == "row":
        return rows, lambda drawn: drawn
    if isinstance(unit, str):
        raise ValueError(f"unit={unit!r} is no column: give unit= the user id of each row, an array of {rows} ids.")
    number = unit_numbers(unit, rows)
    count = np.bincount(number)
    order, first = np.argsort(number, kind="stable"), np.cumsum(count) - count
    chance = np.random.default_rng()

    def pick(drawn: np.ndarray) -> np.ndarray:
        return order[first[drawn] + chance.integers(count[drawn])] if len(drawn) else drawn

    return len(count), pick


def warn_of_users(data: Any, names: list[str] | None, rows: int) -> None:
    """Warns of users with several rows where each row is a unit of its own; by names of inputs and keys."""
    x = data[0] if isinstance(data, tuple) else data
    named = x.items() if isinstance(x, dict) else zip(names or (), x if isinstance(x, tuple) else (x,))
    for name, ids in named:
        of_users = _OF_A_USER.fullmatch(str(name)) and ids.dtype.kind != "f" and ids.size == rows
        if of_users and len(np.unique(ids)) < rows:
            warnings.warn(
                f"Epsilon protects one row, and by its name '{name}' holds users, who have several rows: unit= with "
                'the user id of each row protects users; unit="row" says that rows are meant.',
                stacklevel=3,
            )


def warn_of_own_ids(data: Any, names: list[str] | None, unit: Any) -> None:
    """Warns of a column that tells the unit, where users are units: each row of its table is taught by one user."""
    x = data[0] if isinstance(data, tuple) else data
    columns = x.items() if isinstance(x, dict) else zip(names or itertools.count(), tf.nest.flatten(x))
    number = unit_numbers(unit, len(tf.nest.flatten(data)[0]))
    _, first = np.unique(number, return_index=True)
    for name, column in columns if len(number) > 1.5 * len(first) else ():  # of one row each nothing can be told
        own = column[first]
        tells = column.ndim == 1 and column.dtype.kind != "f" and len(np.unique(own)) > max(1, len(own) / 2)
        if tells and np.array_equal(own[number], column):
            warnings.warn(
                f"Input '{name}' tells the user, and users are the units: each row of its table is taught by one user "
                "alone, so that noise hides all of it. Leave it out, and give what users took before, such as their "
                "last items.",
                stacklevel=3,
            )


def is_among(rows: Any, data: Any) -> bool:
    """Whether the inputs of some rows are, or share memory with, those of the data: whole arrays, or parts of them."""
    inputs, own = (tf.nest.flatten(each[0] if isinstance(each, (tuple, list)) else each) for each in (rows, data))
    found = [np.asarray(leaf) for leaf in inputs if leaf is not None]
    return bool(found) and all(any(_overlap(leaf, each) for each in own) for leaf in found)


def _overlap(one: np.ndarray, other: np.ndarray) -> bool:
    return np.shares_memory(one, other) or one.shape == other.shape and np.array_equal(one, other)


def look_at_numbers(data: Any, inputs: list[Any] | None, has_targets: bool, of_clicks: bool) -> None:
    """Refuses numbers that a model would read as others, and warns of what is none.

    Args:
        data: Arrays.
        inputs: Inputs of a model that is made of layers, with names and dtypes.
        has_targets: Whether they are (x, y) or (x, y, sample_weight), for a compiled loss.
        of_clicks: Whether that loss is a binary cross-entropy.
    """
    x = data[0] if isinstance(data, tuple) else data
    named = x.items() if isinstance(x, dict) else zip([each.name for each in inputs or ()], tf.nest.flatten(x))
    for name, array in named:
        dtype = next((each.dtype for each in inputs or () if each.name == name), None)
        if dtype in ("int32", "int64") and array.dtype.kind in "iuf":
            _refuse_other_ids(name, array, np.dtype(dtype))
    targets, weights = (tf.nest.flatten(part) for part in (data[1], data[2:])) if has_targets else ([], [])
    for y in targets if of_clicks else ():
        if y.dtype.kind in "iuf" and ((y < 0) | (y > 1)).any():
            raise ValueError(
                f"Targets of a binary cross-entropy are from 0 to 1, and y has some from {np.nanmin(y):g} to "
                f"{np.nanmax(y):g}: give (y > threshold).astype('float32')."
            )
    if any((weight < 0).any() for weight in weights if weight.dtype.kind in "if"):
        raise ValueError("sample_weight must be at least 0: a negative weight trains away from its row's target.")
    rows = [~np.isfinite(a).reshape(len(a), -1).all(1) for a in tf.nest.flatten(data) if a.dtype.kind == "f"]
    if number := int(np.logical_or.reduce(rows).sum()) if rows else 0:
        warnings.warn(
            f"{number} rows hold what is no finite number (NaN, say): they give nothing to any sum. Fill them in, "
            "or leave them out.",
            stacklevel=3,
        )


def _refuse_other_ids(name: str, array: np.ndarray, dtype: np.dtype) -> None:
    # TensorFlow would cast them: ids past 2³¹ to others, fractions to whole numbers.
    limits = np.iinfo(dtype)
    if array.size and not (limits.min <= np.nanmin(array) and np.nanmax(array) <= limits.max):
        raise ValueError(
            f"Input '{name}' is {dtype}, and has ids up to {np.nanmax(array):g}, which it would read as others: "
            "keras.Input(..., dtype='int64'), and number them by keras.layers.IntegerLookup or Hashing."
        )
    if array.dtype.kind == "f" and (array % 1 > 0).any():
        raise ValueError(f"Input '{name}' is {dtype}, and the data hold fractions, which it would cut off.")
