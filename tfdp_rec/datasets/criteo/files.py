"""Criteo's click logs: the Kaggle and the one-terabyte files, read fast, hashed to buckets, errors named.

A line holds, between tabs, a label (0 or 1), 13 whole numbers and 26 categories of up to 8 hexadecimal
digits; an empty field is missing. The numbers become log(1 + max(x, 0)), missing ones 0. A category becomes
a bucket:

  missing -> 0,      any other -> 1 + mix(category, feature) mod (V - 1)

with a fixed mixing function, so that no pass over the data (which would have to be paid for) is needed to
build a vocabulary, and the buckets of one machine are those of every other. Two categories may share one;
give features with few categories some buckets to spare.

The one-terabyte logs come as one file a day, `day_0` .. `day_23`, compressed or not: `day_files`.

Reference:
    Criteo, Display Advertising Challenge, 2014; Criteo 1TB Click Logs, 2013.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, cast

import numpy as np

NUM_NUMERIC, NUM_CATEGORICAL = 13, 26
NUM_COLUMNS = 1 + NUM_NUMERIC + NUM_CATEGORICAL

# How many buckets each category of the Kaggle data is given in the study of sparsity-preserving training.
KAGGLE_BUCKETS = (
    1472, 577, 82741, 18940, 305, 23, 1172, 633, 3, 9090, 5918, 64300, 3207,
    27, 1550, 44262, 10, 5485, 2161, 3, 56473, 17, 15, 27360, 104, 12934,
)  # fmt: skip

_LINES_AT_A_TIME = 1 << 16


@dataclasses.dataclass(frozen=True)
class CriteoExamples:
    """Examples in memory.

    Attributes:
        labels: Clicks, float32 [n]: 1 for a click.
        numeric: Logarithms of the numeric features, float32 [n, 13].
        categorical: Buckets of the categorical features, int32 [n, 26].

    Example:
        >>> examples = CriteoExamples(np.zeros(3), np.zeros([3, 13]), np.zeros([3, 26], np.int32))
        >>> features, labels = examples.fetch(np.array([0, 2]))
        >>> features["categorical"].shape, labels.shape
        ((2, 26), (2,))
    """

    labels: np.ndarray
    numeric: np.ndarray
    categorical: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray | slice) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The (features, labels) of some examples, as a model takes them."""
        features = {"numeric": self.numeric[indices], "categorical": self.categorical[indices]}
        return features, self.labels[indices]

    @classmethod
    def concatenate(cls, parts: Iterable[CriteoExamples]) -> CriteoExamples:
        """All parts one after the other."""
        parts = list(parts)
        if not parts:
            return cls(
                np.zeros(0, np.float32),
                np.zeros((0, NUM_NUMERIC), np.float32),
                np.zeros((0, NUM_CATEGORICAL), np.int32),
            )
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def read(paths: str | pathlib.Path | Sequence[str | pathlib.Path], buckets: Sequence[int]) -> CriteoExamples:
    """All examples of one or several files, in memory. For files that do not fit, `read_chunks`.

    Args:
        paths: Files of the format above; a name that ends in .gz is decompressed on the way.
        buckets: 26 bucket counts, each at least 2.

    Raises:
        ValueError: A line is malformed (the message names file and line), or `buckets` is.
    """
    several = [paths] if isinstance(paths, (str, pathlib.Path)) else paths
    return CriteoExamples.concatenate(
        itertools.chain.from_iterable(read_chunks(path, buckets) for path in several)
    )


def read_chunks(path: str | pathlib.Path, buckets: Sequence[int]) -> Iterator[CriteoExamples]:
    """The examples of the file `path`, some ten thousand at a time; `buckets` as in `read`."""
    check_buckets(buckets)
    path = pathlib.Path(path)
    with _open(path) as file:
        first_line = 1
        while lines := list(itertools.islice(file, _LINES_AT_A_TIME)):
            yield _parse(lines, buckets, path, first_line)
            first_line += len(lines)


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


def bucket_frequencies(examples: CriteoExamples, buckets: Sequence[int]) -> list[np.ndarray]:
    """How often each of the `buckets` of each feature occurs in `examples`: 26 int64 arrays. Private: add noise."""
    check_buckets(buckets)
    columns = examples.categorical.T
    return [np.bincount(column, minlength=size) for column, size in zip(columns, buckets)]


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
    mixed = categories + np.uint64((feature + 1) * 0x9E3779B97F4A7C15 % 2**64)
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
    mixed ^= mixed >> np.uint64(31)
    return np.where(present, 1 + mixed % np.uint64(num_buckets - 1), 0).astype(np.int32)


def check_buckets(buckets: Sequence[int]) -> None:
    """Raises ValueError unless `buckets` are 26 counts between 2 and 2^31."""
    if len(buckets) != NUM_CATEGORICAL:
        raise ValueError(f"buckets must have {NUM_CATEGORICAL} counts, got {len(buckets)}.")
    for feature, size in enumerate(buckets):
        if not 2 <= size < 2**31:
            raise ValueError(f"buckets[{feature}] must lie between 2 and 2^31 - 1, got {size!r}.")


def _open(path: pathlib.Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def _parse(lines: list[bytes], buckets: Sequence[int], path: pathlib.Path, first_line: int) -> CriteoExamples:
    """A block of lines at once; if anything is wrong with it, line by line to find where."""
    fields = _Fields.of(lines)
    labels, labels_fine = fields.numbers(slice(0, 1), base=10, longest=1) if fields else (None, False)
    if fields is None or labels is None or not labels_fine or fields.empty[:, 0].any() or (labels > 1).any():
        raise ValueError(_what_is_wrong(lines, path, first_line))
    numbers, numbers_fine = fields.numbers(slice(1, 1 + NUM_NUMERIC), base=10, longest=18)
    categories, categories_fine = fields.numbers(slice(1 + NUM_NUMERIC, NUM_COLUMNS), base=16, longest=8)
    if not (numbers_fine and categories_fine):
        raise ValueError(_what_is_wrong(lines, path, first_line))
    present = ~fields.empty[:, 1 + NUM_NUMERIC :]
    hashed = [
        hash_to_buckets(categories[:, f].astype(np.uint64), present[:, f], f, size)
        for f, size in enumerate(buckets)
    ]
    logs = np.log1p(np.maximum(numbers, 0)).astype(np.float32)
    return CriteoExamples(labels[:, 0].astype(np.float32), logs, np.stack(hashed, axis=1))


_DIGITS = np.full(256, 255, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_DIGITS[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Where the fields of a block of lines begin and end in its bytes: int64 [lines, 40] each."""

    text: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, lines: list[bytes]) -> _Fields | None:
        """The fields, or None unless every line has just as many as it should."""
        joined = b"".join(lines).replace(b"\r\n", b"\n")
        text = np.frombuffer(joined if joined.endswith(b"\n") else joined + b"\n", np.uint8)
        ends = np.flatnonzero((text == ord("\t")) | (text == ord("\n")))
        if len(ends) != NUM_COLUMNS * len(lines):
            return None
        starts = np.concatenate([[0], ends[:-1] + 1]).reshape(-1, NUM_COLUMNS)
        table = ends.reshape(-1, NUM_COLUMNS)
        return cls(text, starts, table) if (text[table[:, -1]] == ord("\n")).all() else None

    @property
    def empty(self) -> np.ndarray:
        return self.starts == self.ends

    def numbers(self, columns: slice, base: int, longest: int) -> tuple[np.ndarray, bool]:
        """Whole numbers of some columns, 0 where empty, and whether all are such, and none too long."""
        starts, ends = self.starts[:, columns], self.ends[:, columns]
        negative = (
            (self.text[starts] == ord("-")) & (ends - starts > 1)
            if base == 10
            else np.zeros_like(starts, bool)
        )
        starts = starts + negative
        lengths = ends - starts
        values, fine = np.zeros(starts.shape, np.int64), bool(lengths.max(initial=0) <= longest)
        for position in range(int(lengths.max(initial=0)) if fine else 0):
            used = lengths > position
            digit = _DIGITS[self.text[np.where(used, starts + position, 0)]].astype(np.int64)
            fine = fine and not (used & (digit >= base)).any()
            values = np.where(used, values * base + digit, values)
        return np.where(negative, -values, values), fine


def _what_is_wrong(lines: list[bytes], path: pathlib.Path, first_line: int) -> str:
    for number, line in enumerate(lines, first_line):
        if complaint := _complaint(line.rstrip(b"\r\n").split(b"\t")):
            return f"{path}, line {number}: {complaint}"
    return (
        f"{path}, lines {first_line} to {first_line + len(lines) - 1}: not readable as tab-separated fields"
    )


def _complaint(fields: list[bytes]) -> str:
    """What is wrong with one line's fields, or nothing."""
    if len(fields) != NUM_COLUMNS:
        found = f"found {len(fields)}"
        return f"expected {NUM_COLUMNS} fields between tabs (label, 13 numbers, 26 categories), {found}"
    if fields[0] not in (b"0", b"1"):
        return f"the label must be 0 or 1, found {fields[0].decode(errors='replace')!r}"
    for i, field in enumerate(fields[1:]):
        numeric = i < NUM_NUMERIC
        pattern = rb"-?\d{1,18}" if numeric else rb"[0-9a-fA-F]{1,8}"
        if field and not re.fullmatch(pattern, field):
            name = f"number {i + 1}" if numeric else f"category {i + 1 - NUM_NUMERIC}"
            kind = "a whole number of up to 18 digits" if numeric else "up to 8 hexadecimal digits"
            return f"{name} must be {kind} or empty, found {field.decode(errors='replace')!r}"
    return ""
