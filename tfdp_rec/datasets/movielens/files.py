"""MovieLens files as timelines: ml-1m (`ratings.dat`, `movies.dat`), ml-20m, ml-25m, ml-32m (`.csv`).

A user's ratings, whatever their stars, by time; equal times keep the order of the file. The catalogue is the movies
file, which is public, and never what happens to be rated: that a movie was rated is private.

A rating that does not parse, or names a movie that the catalogue does not have, is an error with file and line.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.datasets.timelines import Timelines

_COLUMNS = ("userId", "movieId", "rating", "timestamp")


def read(folder: str | Path) -> Timelines:
    r"""The timelines in a MovieLens folder.

    Args:
        folder: Folder with ratings.dat and movies.dat, or ratings.csv and movies.csv.

    Raises:
        FileNotFoundError: the folder or one of its files is not there.
        ValueError: a line is malformed or names an unknown movie; names file and line.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "movies.dat").write_text("5::Alien (1979)::Horror\n9::Brazil (1985)::Comedy\n")
        >>> _ = (folder / "ratings.dat").write_text("1::9::4::200\n1::5::3::100\n2::5::5::300\n")
        >>> read(folder)[0].tolist()
        [1, 2]
    """
    ratings_path, movies_path = _files(Path(folder))
    movie_ids, titles = _catalogue(movies_path)
    users, movies, times = _ratings(ratings_path)
    place = Catalogue(movie_ids).places(movies)
    unknown = np.flatnonzero(place < 0)
    if len(unknown):
        line = int(unknown[0]) + 1 + (ratings_path.suffix == ".csv")
        raise ValueError(f"{ratings_path}, line {line}: movie {movies[unknown[0]]} is not in {movies_path.name}.")
    by_time = np.lexsort((times, users))  # stable, so ties keep the file's order
    user_ids, begins = np.unique(users[by_time], return_index=True)
    return Timelines(place[by_time] + 1, np.append(begins, len(users)), user_ids, movie_ids, titles)


def _files(folder: Path) -> tuple[Path, Path]:
    if not folder.is_dir():
        hint = ": unpack the archive and give the folder" if folder.suffix == ".zip" else ""
        raise FileNotFoundError(f"There is no folder {folder}{hint}.")
    for suffix in (".csv", ".dat"):
        if (folder / f"ratings{suffix}").is_file():
            movies = folder / f"movies{suffix}"
            if not movies.is_file():
                raise FileNotFoundError(f"{folder} has ratings{suffix} but no movies{suffix}, the public catalogue.")
            return folder / f"ratings{suffix}", movies
    raise FileNotFoundError(
        f"{folder} holds neither ratings.csv nor ratings.dat, and so is no MovieLens folder; of a log of your own, say "
        "which columns hold users and items (docs/logs.md)."
    )


def _catalogue(path: Path) -> tuple[NDArray[np.int64], list[str]]:
    """Raw ids and titles in the file's order."""
    titles: dict[int, str] = {}
    for line, fields in _movie_rows(path):
        if len(fields) < 2 or not fields[0].strip().isdigit():
            raise ValueError(f"{path}, line {line}: expected a movie id, a title and genres, got {fields!r}.")
        if int(fields[0]) in titles:
            raise ValueError(f"{path}, line {line}: movie {int(fields[0])} is there twice.")
        titles[int(fields[0])] = fields[1]
    if not titles:
        raise ValueError(f"{path} lists no movie.")
    return np.fromiter(titles, np.int64), list(titles.values())


def _movie_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    if path.suffix == ".dat":
        lines = path.read_text(encoding="latin-1").split("\n")  # as ml-1m is written
        yield from ((number, line.split("::")) for number, line in enumerate(lines, 1) if line)
        return
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            next(reader, None)
            yield from ((reader.line_num, row) for row in reader if row)
    except (UnicodeDecodeError, csv.Error) as problem:
        raise ValueError(f"{path}, after line {reader.line_num}: {problem}.") from problem


def _ratings(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(user, movie, time) of every rating in the file's order."""
    # The quick parser reports what went wrong but seldom where: then the file is read again line by line.
    pa, arrow = optional("pyarrow", "job"), optional("pyarrow.csv", "job")

    kinds = {"userId": pa.int64(), "movieId": pa.int64(), "rating": pa.float64(), "timestamp": pa.int64()}
    dat = path.suffix == ".dat"  # Arrow takes a separator of one character, and two in a row for an empty field
    named, separator = (list(_COLUMNS), "\x1f") if dat else (None, ",")
    try:
        table = arrow.read_csv(
            io.BytesIO(path.read_bytes().replace(b"::", b"\x1f")) if dat else path,
            read_options=arrow.ReadOptions(column_names=named),
            parse_options=arrow.ParseOptions(delimiter=separator, ignore_empty_lines=False),
            convert_options=arrow.ConvertOptions(column_types=kinds, include_columns=list(_COLUMNS)),
        )
    except (pa.ArrowInvalid, pa.ArrowKeyError) as problem:
        _complain(path, str(problem))
    if not len(table):
        raise ValueError(f"{path} holds no rating.")
    columns = [table[name].to_numpy() for name in _COLUMNS]  # NaN where a field is empty
    users, movies, _, times = columns
    if not all(np.isfinite(column).all() for column in columns) or min(users.min(), movies.min(), times.min()) < 0:
        _complain(path, "a number is missing, negative or not finite")
    return users, movies, times


def _complain(path: Path, problem: str) -> None:
    """Raises a ValueError that names the first bad line."""
    separator = "," if path.suffix == ".csv" else "::"
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        if separator == ",":
            header = file.readline().strip()
            if header != ",".join(_COLUMNS):
                raise ValueError(f"{path}, line 1: expected the header {','.join(_COLUMNS)}, got {header[:80]!r}.")
        for number, line in enumerate(file, 2 if separator == "," else 1):
            if not _is_rating(line.rstrip("\r\n").split(separator)):
                form = separator.join(_COLUMNS)
                raise ValueError(f"{path}, line {number}: expected {form} as numbers, got {line.strip()[:80]!r}.")
    raise ValueError(f"{path}: {problem}.")


def _is_rating(fields: list[str]) -> bool:
    try:
        user, movie, time = int(fields[0]), int(fields[1]), int(fields[3])
        return len(fields) == 4 and min(user, movie, time) >= 0 and math.isfinite(float(fields[2]))
    except (ValueError, IndexError):
        return False
