"""Tensors in the file format that models are published in, read with NumPy alone.

    8 bytes     N, little-endian: the length of the header
    N bytes     the header, JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    the rest    the tensors, little-endian, the last axis the fastest; the offsets count from here

A file is somebody else's: nothing in it is run, and no number in it is believed before it was checked.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LONGEST_HEADER = 100_000_000
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class Tensors:
    """The tensors of a file, each read when it is asked for.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is not in this format, or its header is cut short.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        size = os.path.getsize(self.path)
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise ValueError(
                    f"{self.path} has {size} bytes and no header within them: it is cut short, or of another format."
                )
            self._header = self._parsed(file.read(length))
        self._first, self._bytes = 8 + length, size - 8 - length

    def _parsed(self, header: bytes) -> dict[str, Any]:
        try:
            found = json.loads(header.decode("utf-8"))
        except (ValueError, RecursionError) as problem:
            raise ValueError(
                f"{self.path} has a header that is no JSON: it is damaged, or of another format."
            ) from problem
        if not isinstance(found, dict):
            raise ValueError(f"{self.path} has a header that names no tensors: it is of another format.")
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """One tensor, as float32.

        Args:
            name: Its name in the file.
            shape: The shape that it must have.

        Raises:
            ValueError: If the file lacks it, or has it with another shape, in a type that is no floating-point
                number, cut short, or with numbers that are not finite.
        """
        kind, first = self._place(name, shape)
        raw = np.fromfile(self.path, kind, math.prod(shape), offset=first)
        values = (raw.astype("<u4") << 16).view("<f4") if kind == _TYPES["BF16"] else raw.astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"{name} in {self.path} has numbers that are not finite: the file is damaged.")
        return values.reshape(shape)

    def _place(self, name: str, shape: tuple[int, ...]) -> tuple[str, int]:
        """A tensor's type and where in the file it begins, once everything said of it is found to be true."""
        if name not in self._header:
            raise ValueError(f"{self.path} lacks the tensor {name}: it is a checkpoint of another model.")
        about = self._header[name] if isinstance(self._header[name], dict) else {}
        dtype, stored = (str(about.get(field))[:40] for field in ("dtype", "shape"))
        if dtype not in _TYPES:
            raise ValueError(f"{name} in {self.path} is of type {dtype}: publish it as one of {', '.join(_TYPES)}.")
        if about.get("shape") != list(shape):
            raise ValueError(f"{name} in {self.path} has shape {stored} where {list(shape)} belongs.")
        begin, end = self._offsets(name, about)
        if end - begin != math.prod(shape) * np.dtype(_TYPES[dtype]).itemsize:
            raise ValueError(
                f"{name} in {self.path} has {end - begin} bytes, which are not those of its shape: it is damaged."
            )
        return _TYPES[dtype], self._first + begin

    def _offsets(self, name: str, about: dict[str, Any]) -> tuple[int, int]:
        match about.get("data_offsets"):
            case [int(begin), int(end)] if 0 <= begin <= end <= self._bytes:
                return begin, end
        raise ValueError(f"{name} does not lie within {self.path}: the file is cut short, or damaged.")
