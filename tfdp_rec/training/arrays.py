"""The arrays that `make_private` is given: as NumPy arrays, or refused with the way to give them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec.datasets.unit_ids import unit_numbers

_OF_A_USER = re.compile(r"user|customer|member|visitor|client|account|shopper|patient", re.IGNORECASE)


def arrays_of(data: Any, names: list[str] | None) -> Any:
    """The data as NumPy arrays in tuples and dicts, a table by its columns.

    Args:
        data: Nest of what has arrays' form, a table of pandas or Polars for x among them.
        names: Names of the model's inputs, if it is made of layers.

    Raises:
        TypeError: The data are no arrays.
        ValueError: A table lacks columns of the inputs' names.
    """
    _refuse_no_arrays(data)
    return _arrays(data, names)


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
                "without the data."
            )


def _arrays(data: Any, names: list[str] | None) -> Any:
    # Lists as tuples: tf.data takes a list for one array.
    if isinstance(data, (list, tuple)):
        return tuple(_arrays(each, names) for each in data)
    if isinstance(data, dict):
        return {key: _arrays(value, names) for key, value in data.items()}
    if hasattr(data, "columns"):
        return _columns(data, names)
    array = np.asarray(data)
    return np.asarray(array.tolist()) if array.dtype == object else array  # numbers or text, by what it holds


def _columns(table: Any, names: list[str] | None) -> Any:
    # A model of layers takes the columns of its inputs' names, any other all; one column of targets is an array.
    columns = [str(name) for name in table.columns]
    taken = columns if names is None else [name for name in names if name in columns]
    if len(columns) == 1 and not taken:
        return _arrays(np.asarray(table), names)
    if names is not None and len(taken) < len(names):
        lacking = ", ".join(name for name in names if name not in columns)
        raise ValueError(
            f"The model has inputs of the names {lacking}, and the {type(table).__name__} has the columns "
            f"{', '.join(columns)}: name inputs like columns, keras.Input([], name={columns[0]!r}), or give arrays."
        )
    return {name: _arrays(table[name], names) for name in taken}


def number_of_rows(data: Any) -> int:
    """The number of rows that all arrays have."""
    lengths = {len(array) if array.ndim else -1 for array in tf.nest.flatten(data)}
    if len(lengths) != 1 or not lengths - {-1, 0}:
        raise ValueError(f"data must be arrays with the same number of rows, at least one; got {sorted(lengths)} rows.")
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
        if _OF_A_USER.search(str(name)) and ids.size == rows and len(np.unique(ids)) < rows:
            warnings.warn(
                f"Epsilon protects one row, and by its name '{name}' holds users, who have several rows: unit= with "
                'the user id of each row protects users; unit="row" says that rows are meant.',
                stacklevel=4,
            )


def is_among(rows: Any, data: Any) -> bool:
    """Whether rows are, or share memory with, those of the data: the same arrays, or parts of them that overlap."""
    of_data = tf.nest.flatten(data)
    found = [np.asarray(leaf) for leaf in tf.nest.flatten(rows) if leaf is not None]
    return bool(found) and all(any(_overlap(leaf, own) for own in of_data) for leaf in found)


def _overlap(one: np.ndarray, other: np.ndarray) -> bool:
    return np.shares_memory(one, other) or one.shape == other.shape and np.array_equal(one, other)
