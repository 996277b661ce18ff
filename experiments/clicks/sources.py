"""The logs of the study by name: readers of published files, each with its split, and generated rows.

    frappe         app use in contexts; the three libfm files of the NFM authors, split as published (rows are units)
    frappe-events  the same events as CSV lines `contexts,item`, two other apps drawn for each; split 7:2:1 at random
    movielens      ratings of 100K (u.data or .inter) or 1M (ratings.dat) with attributes; a click is 4 or 5 stars;
                   split 8:1:1 at random
    movielens-events    who rated which film of 1M, as CSV lines, two other films drawn for each; split 7:2:1
    criteo         the Kaggle display logs, whose last two sevenths are validation and test
    avazu          the Kaggle logs, whose last two hours-sorted tenths are validation and test
    private-ad     CriteoPrivateAd: Parquet by day; the last two days are validation and test
    generated      rows of Criteo's schema, from a generator
    generated-ads  rows of CriteoPrivateAd's schema, from a generator (units: users)

The vocabularies are taken from the files and treated as public, as the published protocols do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, dataset

from experiments.adafest import criteo_files
from experiments.clicks.log import PARTS, ClickLog, Rows, numbered, split
from experiments.generated.clicks import KAGGLE_BUCKETS, CriteoExamples, SyntheticCriteo
from experiments.generated.private_ads import SyntheticPrivateAds

FRAPPE_COLUMNS = (
    "user", "item", "daytime", "weekday", "weekend", "homework", "cost", "weather", "country", "city",
)  # fmt: skip
_OF_THE_PAGE = ("campaign_id", "publisher_id", "features_kv_not", "features_ctx_not")
_EVENT_COLUMNS = (
    "user", "daytime", "weekday", "weekend", "homework", "weather", "country", "city", "item", "cost",
)  # fmt: skip
_RATING_COLUMNS = ("user", "gender", "age", "occupation", "item", "genre")
_SHOWN = 2  # other apps for each event
_GENRES = 3  # of a film that are read
BUCKETS = 1 << 16  # of a hashed column


def frappe(paths: Sequence[Path]) -> ClickLog:
    """The published rows and split; paths of train, validation and test."""
    _expect(paths, 3, "frappe.train.libfm frappe.validation.libfm frappe.test.libfm")
    read = [_libfm(path) for path in paths]
    ids, sizes = numbered(np.concatenate([ids for ids, _ in read]).T)
    ends = np.cumsum([len(labels) for _, labels in read])
    starts = [0, *ends[:-1]]
    parts = {
        part: Rows(ids[start:end], _no_numbers(end - start), labels, np.arange(end - start))
        for part, start, end, (_, labels) in zip(PARTS, starts, ends, read)
    }
    return ClickLog("Frappe", FRAPPE_COLUMNS, sizes, parts, source="the published rows and split")


def _libfm(path: Path) -> tuple[np.ndarray, np.ndarray]:
    ids, labels = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        label, *pairs = line.split()
        if len(pairs) != len(FRAPPE_COLUMNS) or label not in ("1", "-1"):
            raise ValueError(f"{path}, line {number}: expected 1 or -1 and {len(FRAPPE_COLUMNS)} pairs id:1.")
        ids.append([int(pair.partition(":")[0]) for pair in pairs])
        labels.append(label == "1")
    return np.array(ids), np.array(labels, np.float32)


def frappe_events(paths: Sequence[Path], seed: int = 0) -> ClickLog:
    """App use in contexts."""
    return _events("Frappe", "apps", _EVENT_COLUMNS, paths, seed)


def movielens_events(paths: Sequence[Path], seed: int = 0) -> ClickLog:
    """Who rated which film."""
    return _events("MovieLens-1M", "films", _RATING_COLUMNS, paths, seed)


def _events(name: str, items: str, columns: Sequence[str], paths: Sequence[Path], seed: int) -> ClickLog:
    """Events of one or more files, each with other items beside it; the last column is the item's own attribute."""
    # Of held-back events these are items that the user never used, as published. Of training events they are any but
    # the event's own: what a user did not use is known from other events, and a unit's rows must be its own.
    item = columns.index("item")
    _expect(paths, None, f"files of lines {'-'.join(columns[:item])},{'-'.join(columns[item:])}")
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    events, sizes = numbered(np.array([line.replace(",", "-").split("-") for line in lines]).astype(int).T)
    rng, count = np.random.default_rng([seed, 1]), len(events)
    attribute = np.zeros(sizes[item], np.int32)
    attribute[events[:, item]] = events[:, -1]
    used = np.zeros((sizes[0], sizes[item]), bool)
    used[events[:, 0], events[:, item]] = True
    if used.all(axis=1).any():
        raise ValueError(f"A user of {name} has all {sizes[item]} {items}: none is left to be shown beside.")
    alone = Rows(events, _no_numbers(count), np.ones(count, np.float32), np.arange(count))

    def with_others(part: str, rows: Rows) -> Rows:
        ids, own = np.repeat(rows.ids, 1 + _SHOWN, axis=0), np.repeat(rows.ids[:, item], 1 + _SHOWN)
        other = np.arange(len(ids)) % (1 + _SHOWN) > 0
        drawn = rng.integers(sizes[item], size=len(ids))

        def unfit() -> np.ndarray:
            return other & (drawn == own if part == "train" else used[ids[:, 0], drawn])

        while (again := unfit()).any():
            drawn[again] = rng.integers(sizes[item], size=int(again.sum()))
        ids[other, item], ids[other, -1] = drawn[other], attribute[drawn[other]]
        return Rows(ids, _no_numbers(len(ids)), 1.0 - other.astype(np.float32), np.repeat(rows.units, 1 + _SHOWN))

    parts = {part: with_others(part, rows) for part, rows in split(alone, (7, 2, 1), seed).items()}
    source = f"{count:,} real events; {_SHOWN} other {items} drawn for each, split 7:2:1 at random"
    return ClickLog(name, tuple(columns), sizes, parts, "event", 1 + _SHOWN, source)


def movielens(paths: Sequence[Path], seed: int = 0) -> ClickLog:
    """Ratings with attributes of users and films, from a folder."""
    _expect(paths, 1, "a folder with .inter, .user and .item files, or ratings.dat, users.dat and movies.dat")
    (folder,) = paths
    read = _recbole if list(folder.glob("*.inter")) else _dat
    ratings, users, films = read(folder)
    names = ("user", "film", "age", "gender", "occupation", "year", *(f"genre {k + 1}" for k in range(_GENRES)))
    columns = [
        [user for user, _, _ in ratings],
        [film for _, film, _ in ratings],
        *([users[user][k] for user, _, _ in ratings] for k in range(3)),
        *([films[film][k] for _, film, _ in ratings] for k in range(1 + _GENRES)),
    ]
    ids, sizes = numbered(columns)
    labels = np.array([stars >= 4 for _, _, stars in ratings], np.float32)
    rows = Rows(ids, _no_numbers(len(ids)), labels, np.arange(len(ids)))
    source = f"{len(ids):,} real ratings, 4 and 5 stars are clicks; split 8:1:1 at random"
    return ClickLog("MovieLens", names, sizes, split(rows, (8, 1, 1), seed), source=source)


Attributes = dict[str, tuple[str, ...]]
Ratings = list[tuple[str, str, float]]


def _recbole(folder: Path) -> tuple[Ratings, Attributes, Attributes]:
    def table(suffix: str) -> list[list[str]]:
        (path,) = folder.glob(f"*.{suffix}")
        return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]

    ratings = [(user, film, float(stars)) for user, film, stars, _ in table("inter")]
    users: Attributes = {user: (str(int(age) // 5), gender, job) for user, age, gender, job, _ in table("user")}
    films = {film: _film(year, genres.split(" ")) for film, _, year, genres in table("item")}
    return ratings, users, films


def _dat(folder: Path) -> tuple[Ratings, Attributes, Attributes]:
    def table(name: str) -> list[list[str]]:
        return [line.split("::") for line in (folder / name).read_text(encoding="latin-1").splitlines()]

    ratings = [(user, film, float(stars)) for user, film, stars, _ in table("ratings.dat")]
    users: Attributes = {user: (age, gender, job) for user, gender, age, job, _ in table("users.dat")}
    films = {film: _film(title[-5:-1], genres.split("|")) for film, title, genres in table("movies.dat")}
    return ratings, users, films


def _film(year: str, genres: Sequence[str]) -> tuple[str, ...]:
    three_years = str(int(year) // 3) if year.isdigit() else ""
    return (three_years, *(list(genres) + [""] * _GENRES)[:_GENRES])


def criteo(paths: Sequence[Path]) -> ClickLog:
    """The display logs of one file, in its order of time."""
    _expect(paths, 1, "train.txt")
    return _of_examples(criteo_files.read(paths[0], KAGGLE_BUCKETS), "Criteo", "real displays in order of time")


def generated(paths: Sequence[Path], examples: int = 1_000_000, seed: int = 3) -> ClickLog:
    """Displays of Criteo's schema."""
    _expect(paths, 0, "no files")
    found = SyntheticCriteo(seed=seed).examples(examples)
    return _of_examples(found, "Criteo's schema", "generated displays; values by the popularity of real logs")


def _of_examples(examples: CriteoExamples, name: str, source: str) -> ClickLog:
    count = len(examples)
    rows = Rows(examples.categorical, examples.numeric, examples.labels, np.arange(count))
    names = tuple(f"C{k + 1}" for k in range(len(KAGGLE_BUCKETS)))
    return ClickLog(name, names, KAGGLE_BUCKETS, _in_order(rows, (5, 1, 1)), source=f"{count:,} {source}")


def avazu(paths: Sequence[Path]) -> ClickLog:
    """The logs of one CSV file, in its order of time; categories are hashed."""
    _expect(paths, 1, "train (a CSV file with a heading)")
    table = csv.read_csv(paths[0], convert_options=csv.ConvertOptions(column_types={"id": pa.string()}))
    names = [name for name in table.column_names if name not in ("id", "click", "hour")]
    columns = [_hashed(table[name]) for name in names]
    hour = table["hour"].to_numpy() % 100
    ids = np.stack([hour.astype(np.int32), *columns], axis=1)
    labels = table["click"].to_numpy().astype(np.float32)
    rows = Rows(ids, _no_numbers(len(ids)), labels, np.arange(len(ids)))
    sizes = (24, *[BUCKETS] * len(names))
    source = f"{len(ids):,} real displays in order of time"
    return ClickLog("Avazu", ("hour", *names), sizes, _in_order(rows, (8, 1, 1)), source=source)


def private_ad(paths: Sequence[Path]) -> ClickLog:
    """Displays of a folder of Parquet files by day; units are users, a user's day being one of them."""
    _expect(paths, 1, "a folder with day_int=1, day_int=2, ...")
    table = dataset.dataset(paths[0], partitioning="hive").to_table()
    return _of_displays(table, "CriteoPrivateAd", "real displays", str(paths[0]))


def generated_ads(paths: Sequence[Path], days: int = 8, seed: int = 0) -> ClickLog:
    """Displays of CriteoPrivateAd's schema."""
    _expect(paths, 0, "no files")
    generator = SyntheticPrivateAds(seed=seed)
    table = pa.concat_tables([generator.day(day) for day in range(1, 1 + days)])
    return _of_displays(table, "CriteoPrivateAd's schema", "generated displays", "the generator")


def _of_displays(table: pa.Table, name: str, kind: str, origin: str) -> ClickLog:
    lists = [name for name in table.column_names if name.endswith("_array")]
    names = [n for n in table.column_names if n.startswith(("features_", "campaign_id", "publisher_id"))]
    if "click_delay_after_display_array" not in lists or "user_id" not in table.column_names or not names:
        raise ValueError(f"{origin}: expected user_id, click_delay_after_display_array and features_... columns.")
    labels = pc.fill_null(pc.greater(pc.list_value_length(table["click_delay_after_display_array"]), 0), False)
    ids = np.stack([_hashed(table[name]) for name in names], axis=1)
    users = np.unique(table["user_id"].to_numpy(zero_copy_only=False), return_inverse=True)[1]
    rows = Rows(ids, _no_numbers(len(ids)), labels.to_numpy(zero_copy_only=False).astype(np.float32), users)
    day = table["day_int"].to_numpy()
    last = np.unique(day)[-2:]
    if len(np.unique(day)) < 3:
        raise ValueError(f"{origin}: expected at least three days.")
    where = {"train": day < last[0], "validation": day == last[0], "test": day == last[1]}
    parts = {part: rows.taken(np.flatnonzero(where[part])) for part in PARTS}
    source = f"{len(ids):,} {kind} of {len(np.unique(users)):,} users; the last two days held back"
    public = tuple(name for name in names if name.startswith(_OF_THE_PAGE))
    return ClickLog(name, tuple(names), (BUCKETS,) * len(names), parts, "user", 4, source, public)


def _in_order(rows: Rows, shares: Sequence[float]) -> dict:
    ends = (np.cumsum(shares) / np.sum(shares) * len(rows)).round().astype(int)
    return {part: rows.taken(np.arange(start, end)) for part, start, end in zip(PARTS, [0, *ends[:-1]], ends)}


def _hashed(column: pa.ChunkedArray) -> np.ndarray:
    """Buckets from 1 of a column's values, by a fixed function of their text; 0 where there is none."""
    texts = pc.cast(column, pa.string()).combine_chunks()
    coded = texts.dictionary_encode()
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in coded.dictionary.to_pylist()]
    buckets = np.array([1 + int.from_bytes(digest, "big") % (BUCKETS - 1) for digest in digests], np.int32)
    there = texts.is_valid().to_numpy(zero_copy_only=False)
    codes = coded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return np.where(there, buckets[codes] if len(buckets) else 0, 0).astype(np.int32)


def _no_numbers(rows: int) -> np.ndarray:
    return np.zeros((rows, 0), np.float32)


def _expect(paths: Sequence[Path], count: int | None, what: str) -> None:
    if (not paths) if count is None else len(paths) != count:
        raise ValueError(f"This log is read from {what}; got {', '.join(map(str, paths)) or 'nothing'}.")
    for path in paths:
        if not path.exists():
            raise ValueError(f"There is no {path}.")


SOURCES: dict[str, Callable[[Sequence[Path]], ClickLog]] = {
    "frappe": frappe,
    "frappe-events": frappe_events,
    "movielens": movielens,
    "movielens-events": movielens_events,
    "criteo": criteo,
    "avazu": avazu,
    "private-ad": private_ad,
    "generated": generated,
    "generated-ads": generated_ads,
}
