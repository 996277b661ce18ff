"""An epoch of rows that can only be read from front to back: each row in the batch whose number was drawn for it.

    rows as they come, held up to L bytes -> a run on disk, in G pieces by batch number: piece g holds the rows
                                             of the neighbouring batches s_g, ..., s_(g+1) - 1
    piece g of all runs                   -> the batches s_g, ..., s_(g+1) - 1, the rows of each as they came

L is half of `memory`, and G so large that piece g of all runs takes about L/2 bytes; one file is open, whatever G is.
No bucket is sorted in several passes, since even many pieces, 2 (S/L)² for an epoch of S bytes, are each read at once:
10⁹ rows of 50 bytes are 280,000 pieces of 180 kB. Rows that take less than L bytes stay in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.ground.files import Temporary, explain_full_disk, remove_left

Rows = Any
"""Arrays in any nest of dicts and tuples, each with one row along its first axis for each row of the data."""

_KIND = "tfdp-rec-rows-"
_SECONDS = 5.0  # between two notes


def spread(
    blocks: Iterable[Rows],
    draw: Callable[[int], NDArray[np.int64]],
    num_rows: int,
    num_batches: int,
    folder: str | os.PathLike[str] | None = None,
    memory: int = 2**28,
    note: Callable[[str], None] | None = print,
) -> Iterator[Rows]:
    """Yields the batches 0, 1, ..., each with the rows whose number it is, in their order; perhaps none.

    What is on disk meanwhile, the rows and their numbers, is readable by its owner alone. It is removed when the
    iterator ends, fails or is closed; what a killed process left, by the next call.

    Args:
        blocks: Stretches of rows of any sizes, read once; a `tf.data.Dataset` of batches is one. Text comes out as
            objects, `str` or `bytes`.
        draw: Function from a number of rows to the number of the batch of each, from 0.
        num_rows: Number of rows that there must be.
        num_batches: Number of batches.
        folder: Folder in which to make one for the rows; by default the system's, for temporary files.
        memory: Number of bytes that rows take here at most, about; the block at hand and the batch handed out add to
            it.
        note: Function that is given a sentence on how far it is, every few seconds; None for silence.

    Raises:
        ValueError: There are more or fewer rows, or they differ in kind; before the first batch.
        OSError: The disk is full.
    """
    if isinstance(blocks, tf.data.Dataset) and blocks.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The dataset has no end, and an epoch reads each of its rows once: take .repeat() out of it.")
    held: list[list[NDArray[Any]]] = []
    form, runs, size, seen, noted = None, None, 0, 0, time.monotonic()
    remove_left(_KIND, folder)
    with contextlib.ExitStack() as stack:
        for block in blocks:
            arrays = _arrays(block)
            if not (rows := len(arrays[0])):
                continue  # an empty one has often lost its dtypes
            if (seen := seen + rows) > num_rows:
                raise ValueError(_OTHER_NUMBER.format("more", num_rows))
            form = form or _form(block, arrays)
            if _form(block, arrays) != form:
                raise ValueError(
                    f"All blocks of rows must be alike in names, dtypes and inner shapes; there are {form} and "
                    f"{_form(block, arrays)}."
                )
            held.append([_numbers(draw(rows), rows, num_batches), *arrays])
            size += sum(map(_size, held[-1]))
            if size > memory // 2:
                if runs is None:
                    pieces = min(num_batches, num_rows, math.ceil(4 * size / max(1, memory) * num_rows / seen))
                    runs = _Runs(np.arange(pieces + 1) * num_batches // pieces, folder)
                    stack.callback(runs.temporary.cleanup)
                runs.write(_join(held))
                size = 0
            if note and time.monotonic() - noted > _SECONDS:
                noted = time.monotonic()
                note(f"{seen:,} of {num_rows:,} rows are in the batches of the epoch.")
        if seen < num_rows:
            raise ValueError(_OTHER_NUMBER.format("fewer", num_rows))
        del arrays, block
        if runs is None:
            yield from _batches(_join(held), range(num_batches + 1), form)
            return
        if held:
            runs.write(_join(held))
        for piece, (first, end) in enumerate(itertools.pairwise(runs.starts.tolist())):
            yield from _batches(runs.read(piece), range(first, end + 1), form)


_OTHER_NUMBER = (
    "There are {} rows than num_rows={}, as which each pass over the data must have exactly: count them anew, and give "
    "what can be read again from its beginning, such as files or a dataset, without .repeat(), not an iterator."
)


def _arrays(block: Rows) -> list[NDArray[Any]]:
    """The arrays of a block, as copies: what a block is a view of is not kept, or filled anew. Text as objects."""
    arrays = []
    for leaf in tf.nest.flatten(block):
        if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            raise ValueError(
                f"The rows hold a {type(leaf).__name__}, whose rows have no length in common: tfdp_rec.data.padded "
                "makes arrays of it, ids and weights, at a length that you choose without the data."
            )
        array = np.asarray(leaf).copy()
        array = array.astype(object) if array.dtype.kind in "SU" else array
        arrays.append(array)
        text = array.dtype == object and all(isinstance(each, str | bytes) for each in array.flat)
        if not (text or array.dtype.kind in "biufc" or array.dtype == tf.bfloat16.as_numpy_dtype):
            raise ValueError(
                f"The rows hold an array of {array.dtype} that is neither numbers nor text (or lacks some): fill in "
                "what is missing, and give times as numbers."
            )
    if not arrays or {array.shape[:1] for array in arrays} != {arrays[0].shape[:1]} or not arrays[0].ndim:
        raise ValueError(
            f"A block of rows is arrays with one row each, got shapes {[list(array.shape) for array in arrays]}: of a "
            "dataset of single rows give dataset.batch(1024)."
        )
    return arrays


def _form(block: Rows, arrays: Sequence[NDArray[Any]]) -> Any:
    """What all blocks have in common, in words: a dtype and an inner shape in the place of each array."""
    return tf.nest.pack_sequence_as(block, [f"{array.dtype}{list(array.shape[1:])}" for array in arrays])


def _numbers(drawn: Any, rows: int, num_batches: int) -> NDArray[Any]:
    """The numbers that were drawn, in the narrowest integers, which sort fastest."""
    numbers = np.asarray(drawn)
    if numbers.shape != (rows,) or numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= num_batches:
        raise ValueError(f"draw must give one whole number from 0 to {num_batches - 1} for each row.")
    return numbers.astype(np.min_scalar_type(num_batches))


def _size(array: NDArray[Any]) -> int:
    """Bytes that an array takes."""
    return sys.getsizeof(array) + (sum(map(sys.getsizeof, array.flat)) if array.dtype == object else 0)


def _join(parts: list[list[NDArray[Any]]]) -> list[NDArray[Any]]:
    """The arrays of all parts, whose list is empty then: they are not held twice for longer than that takes."""
    arrays = [np.concatenate(each) for each in zip(*parts)]
    parts.clear()
    return arrays


def _split(arrays: Sequence[NDArray[Any]], starts: ArrayLike) -> Iterator[list[NDArray[Any]]]:
    """The rows whose number, which the first array tells, lies between two successive starts; in their order."""
    order = np.argsort(arrays[0], kind="stable")
    for first, end in itertools.pairwise(np.searchsorted(arrays[0][order], starts)):
        yield [array[order[first:end]] for array in arrays]


def _batches(arrays: Sequence[NDArray[Any]], starts: ArrayLike, form: Any) -> Iterator[Rows]:
    return (tf.nest.pack_sequence_as(form, rows[1:]) for rows in _split(arrays, starts))


class _Runs:
    """Rows in one file, a run after the other, each in pieces by batch number."""

    def __init__(self, starts: NDArray[np.int64], folder: str | os.PathLike[str] | None):
        self.starts, self.temporary = starts, Temporary(_KIND, folder)
        self.file = Path(self.temporary.name) / "rows"
        self.places: list[NDArray[np.int64]] = []  # of each run: where in the file its pieces begin

    def write(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Adds a run."""
        need = "An epoch's rows lie there once, each with the number of its batch"
        with explain_full_disk(self.file.parent.parent, need), open(self.file, "ab") as file:
            places = []
            for piece in _split(arrays, self.starts):
                places.append(file.tell())
                # Text has no width of its own, as NumPy's formats need; the folder is this process's alone.
                pickle.dump(piece, file, pickle.HIGHEST_PROTOCOL)
        self.places.append(np.array(places))

    def read(self, piece: int) -> list[NDArray[Any]]:
        """A piece of all runs."""
        with open(self.file, "rb") as file:
            parts = []
            for places in self.places:
                file.seek(places[piece])
                parts.append(pickle.load(file))
        return _join(parts)
