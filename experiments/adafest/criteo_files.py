"""Criteo's click logs: the Kaggle and the one-terabyte files, read fast, hashed to buckets, errors named.

A line holds, between tabs, a label (0 or 1), 13 whole numbers and 26 categories of up to 8 hexadecimal
digits; an empty field is missing. The numbers become log(1 + max(x, 0)), missing ones 0. A category becomes
a bucket:

  missing -> 0,      any other -> 1 + mix(category, feature) mod (V - 1)

with a fixed mixing function, so that no pass over the data (which would have to be paid for) is needed to
build a vocabulary, and the buckets of one machine are those of every other. Two categories may share one;
give features with few categories some buckets to spare.

Reference:
    Criteo, Display Advertising Challenge, 2014; Criteo 1TB Click Logs, 2013.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import itertools
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from experiments.generated.clicks import (
    NUM_CATEGORICAL,
    NUM_NUMERIC,
    CriteoExamples,
    SyntheticCriteo,
    check_buckets,
)
from experiments.generated.drawing import GOLDEN, mixed

NUM_COLUMNS = 1 + NUM_NUMERIC + NUM_CATEGORICAL

_LINES_AT_A_TIME = 1 << 16


def read(paths: str | pathlib.Path | Sequence[str | pathlib.Path], buckets: Sequence[int]) -> CriteoExamples:
    """All examples of one or several files, in memory. For files that do not fit, `read_chunks`.

    Args:
        paths: Files of the format above; a name that ends in .gz is decompressed on the way.
        buckets: 26 bucket counts, each at least 2.

    Raises:
        ValueError: A line is malformed (the message names file and line), or `buckets` is.
    """
    several = [paths] if isinstance(paths, (str, pathlib.Path)) else paths
    return concatenated(itertools.chain.from_iterable(read_chunks(path, buckets) for path in several))


def read_chunks(path: str | pathlib.Path, buckets: Sequence[int]) -> Iterator[CriteoExamples]:
    """The examples of the file `path`, some ten thousand at a time; `buckets` as in `read`."""
    check_buckets(buckets)
    path = pathlib.Path(path)
    with _open(path) as file:
        first_line = 1
        while lines := list(itertools.islice(file, _LINES_AT_A_TIME)):
            yield _parse(lines, buckets, path, first_line)
            first_line += len(lines)


def concatenated(parts: Iterable[CriteoExamples]) -> CriteoExamples:
    """All parts one after the other."""
    parts = list(parts)
    if not parts:
        return CriteoExamples(
            np.zeros(0, np.float32),
            np.zeros((0, NUM_NUMERIC), np.float32),
            np.zeros((0, NUM_CATEGORICAL), np.int32),
        )
    names = [field.name for field in dataclasses.fields(CriteoExamples)]
    return CriteoExamples(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def write(
    generator: SyntheticCriteo, path: str | pathlib.Path, num_examples: int, day: int = 0, part: str = "train"
) -> None:
    """Writes the examples of one day as a file that `read` takes (a .gz name is compressed).

    The file holds raw categories, one for each bucket; the reader hashes them to buckets of its own.
    """
    examples, raw = generator.draw(num_examples, day, part)
    path = pathlib.Path(path)
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as file:
        for label, numbers, categories in zip(examples.labels, raw, examples.categorical):
            fields = [str(int(label))] + ["" if math.isnan(x) else str(int(x)) for x in numbers]
            fields += [
                f"{(b * 2654435761 + f) % 2**32:08x}" if b else "" for f, b in enumerate(categories.tolist())
            ]
            file.write("\t".join(fields) + "\n")


def day_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
    """The files `day_0`, `day_1`, ... of `folder` in the order of the days, each compressed or not.

    Raises:
        FileNotFoundError: There is no such file in the folder.
        ValueError: A day has two files, or one between the first and the last has none.
    """
    days: dict[int, pathlib.Path] = {}
    for path in pathlib.Path(folder).iterdir():
        if match := re.fullmatch(r"day_(\d+)(\.(gz|tsv|txt|tsv\.gz|txt\.gz))?", path.name):
            day = int(match[1])
            if day in days:
                raise ValueError(f"day {day} has two files: {days[day]} and {path}; keep one.")
            days[day] = path
    if not days:
        raise FileNotFoundError(f"no files named day_0, day_1, ... in {folder}.")
    missing = sorted(set(range(min(days), max(days) + 1)) - set(days))
    if missing:
        raise ValueError(f"{folder} has no file for day {missing[0]}, between its first and last day.")
    return [days[day] for day in sorted(days)]


def hash_to_buckets(
    categories: np.ndarray, present: np.ndarray, feature: int, num_buckets: int
) -> np.ndarray:
    """Buckets of one feature: 0 for what is missing, 1 .. num_buckets - 1 for the rest.

    Args:
        categories: Values, uint64 [n].
        present: Presence of the field, bool [n].
        feature: The feature's number, so that one value in two features gives unrelated buckets.
        num_buckets: Number of buckets, at least 2.
    """
    hashes = mixed(categories + np.uint64((feature + 1) * GOLDEN % 2**64))
    return np.where(present, 1 + hashes % np.uint64(num_buckets - 1), 0).astype(np.int32)


def _open(path: pathlib.Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def _parse(lines: list[bytes], buckets: Sequence[int], path: pathlib.Path, first_line: int) -> CriteoExamples:
    """A block of lines at once; if anything is wrong with it, line by line to find where."""
    fields = _fields(lines)
    if fields is None:
        raise ValueError(_what_is_wrong(lines, path, first_line))
    label, numbers, categories = fields[0], fields[1 : 1 + NUM_NUMERIC], fields[1 + NUM_NUMERIC :]
    values = np.stack([_integers(column) for column in numbers], axis=1)
    hashed = [
        hash_to_buckets(_hexadecimals(column), pc.not_equal(column, "").to_numpy(zero_copy_only=False), feature, size)
        for feature, (column, size) in enumerate(zip(categories, buckets))
    ]
    logs = np.log1p(np.maximum(values, 0)).astype(np.float32)
    return CriteoExamples(_integers(label).astype(np.float32), logs, np.stack(hashed, axis=1))


def _fields(lines: list[bytes]) -> list[pa.Array] | None:
    """The columns of a block of lines as text; None if a field is not what it should be."""
    read = csv.ReadOptions(column_names=[str(number) for number in range(NUM_COLUMNS)])
    parse = csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False)
    as_text = csv.ConvertOptions(column_types=dict.fromkeys(read.column_names, pa.string()))
    try:
        table = csv.read_csv(io.BytesIO(b"".join(lines)), read, parse, as_text)
    except pa.ArrowInvalid:
        return None
    columns = [column.combine_chunks() for column in table.columns]
    fit = all(pc.all(pc.match_substring_regex(column, form)).as_py() for column, form in zip(columns, _FORMS))
    return columns if fit and len(table) == len(lines) else None


def _integers(column: pa.Array) -> np.ndarray:
    """Whole numbers, 0 where the field is empty."""
    there = pc.if_else(pc.equal(column, ""), "0", column)
    return there.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _hexadecimals(column: pa.Array) -> np.ndarray:
    digits = "".join(pc.utf8_lpad(column, 8, "0").to_pylist())
    return np.frombuffer(bytes.fromhex(digits), ">u4").astype(np.uint64)


def _what_is_wrong(lines: list[bytes], path: pathlib.Path, first_line: int) -> str:
    for number, line in enumerate(lines, first_line):
        if complaint := _complaint(line.rstrip(b"\r\n").split(b"\t")):
            return f"{path}, line {number}: {complaint}."
    last = first_line + len(lines) - 1
    return f"{path}, lines {first_line} to {last}: not readable as tab-separated fields."


def _complaint(fields: list[bytes]) -> str:
    """What is wrong with one line's fields, or nothing."""
    if len(fields) != NUM_COLUMNS:
        found = f"found {len(fields)}"
        return f"expected {NUM_COLUMNS} fields between tabs (label, 13 numbers, 26 categories), {found}"
    for i, (field, form) in enumerate(zip(fields, _FORMS)):
        if not re.search(form.encode(), field):
            what = f"number {i} must be a whole number of up to 18 digits or empty"
            if i > NUM_NUMERIC:
                what = f"category {i - NUM_NUMERIC} must be up to 8 hexadecimal digits or empty"
            what = what if i else "the label must be 0 or 1"
            return f"{what}, found {field.decode(errors='replace')!r}"
    return ""


_FORMS = ("^[01]$", *["^(-?[0-9]{1,18})?$"] * NUM_NUMERIC, *["^[0-9a-fA-F]{0,8}$"] * NUM_CATEGORICAL)
