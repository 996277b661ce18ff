"""Where a job's log comes from: files of one's own, MovieLens files, a generator. A new source is a class in `SOURCES`.

Titles and features of items are read to their end before anything is paid, for what that refuses.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tfdp_rec.core.ground.files import find_paths
from tfdp_rec.datasets.logs import sources as log_files
from tfdp_rec.datasets.logs.items import Items, as_kind
from tfdp_rec.datasets.movielens import files, generated
from tfdp_rec.datasets.timelines import Timelines
from tfdp_rec.job.page import code, escape
from tfdp_rec.job.recommenders.names import USUAL, auto, spectral
from tfdp_rec.job.settings import JobSettings

_SHOWN_FILES = 3
_PUBLIC = ("items", "titles", "features")  # files
_TITLE = ("title", "name")  # columns
_IN_A_CELL = "|"


class LogSource:
    """Where a job's log comes from.

    Args:
        settings: Settings of the job.

    Attributes:
        usual: Names of the recommenders that are made unless others are asked for.
        generated: Whether the log is of no real users.
    """

    usual: ClassVar[tuple[str, ...]] = ("spectral",)
    generated: ClassVar[bool] = False

    def __init__(self, settings: JobSettings):
        self.settings = settings

    @classmethod
    def accepts(cls, settings: JobSettings) -> bool:
        """Whether the settings ask for this source."""
        raise NotImplementedError

    def check_settings(self) -> JobSettings:
        """The settings, refused if something is missing; paths as they are from anywhere."""
        return self.settings

    def rows(self) -> tuple[Any, dict[str, Any]]:
        """The rows as `Interactions.read` takes them, and the names of their columns by its arguments."""
        raise NotImplementedError

    def public_items(self) -> Items | None:
        """The public list of items; None if they are to be found privately. Asked for after `rows`."""
        return None

    def titles(self, kind: pa.DataType) -> pa.Table:
        """Public titles in columns `item`, of the type of the log's ids, and `title`."""
        return pa.schema([("item", kind), ("title", pa.string())]).empty_table()

    def features(self, kind: pa.DataType) -> pa.Table:
        """Public features in columns `item`, of the type of the log's ids, and `feature`, one a row."""
        return pa.schema([("item", kind), ("feature", pa.string())]).empty_table()

    def words(self, private: bool) -> str:
        """The source in Markdown; names of files in a private report alone."""
        raise NotImplementedError


class OwnFiles(LogSource):
    """Files of (user, item, time) in columns that the settings name: Parquet, CSV, JSON lines, Arrow."""

    @classmethod
    def accepts(cls, settings: JobSettings) -> bool:
        return any(
            (settings.user, settings.item, settings.time, settings.items, settings.titles, settings.features)
        )

    def check_settings(self) -> JobSettings:
        settings = self.settings
        for name in ("user", "item"):
            if not getattr(settings, name):
                raise ValueError(f"--{name} is missing: say which column of the log holds the {name}s' ids.")
        if not settings.data:
            raise ValueError("--data is missing: say which files hold the log, such as --data logs/*.parquet.")
        if settings.items and settings.items_epsilon is not None:
            raise ValueError("--items-epsilon is spent on finding items, and --items gives them: leave one out.")
        if settings.items_epsilon is not None and settings.items_epsilon >= settings.epsilon:
            raise ValueError(
                f"--items-epsilon must be less than --epsilon {settings.epsilon:g}, got {settings.items_epsilon:g}."
            )
        if settings.features and settings.mechanism and not {spectral.name, auto.name} & {*settings.mechanism}:
            raise ValueError("--features are of spectral, which --mechanism leaves out: leave them out, too.")
        paths = {name: getattr(settings, name) for name in _PUBLIC if getattr(settings, name)}
        for name, path in paths.items():
            if not os.path.isfile(path):
                raise FileNotFoundError(f"--{name}: there is no file {path}.")
        remote = [path for path in settings.data if settings.engine and "://" in path]  # as Spark names its files
        for path in settings.data:
            if path not in remote and not find_paths(path):
                raise FileNotFoundError(f"--data: there is nothing at {path}.")
        absolute: dict[str, Any] = {name: os.path.abspath(path) for name, path in paths.items()}
        data = tuple(path if path in remote else os.path.abspath(path) for path in settings.data)
        return dataclasses.replace(settings, data=data, **absolute)

    def rows(self) -> tuple[Any, dict[str, Any]]:
        # Public files are read here, before the log, which may take long.
        self._listed = self._read_items()
        if self.settings.titles:
            self._title_columns()
        if self.settings.features:
            self._feature_columns()
        return list(self.settings.data), {name: getattr(self.settings, name) for name in ("user", "item", "time")}

    def public_items(self) -> Items | None:
        return self._listed

    def _read_items(self) -> Items | None:
        """The public list as its file has it now."""
        path = self.settings.items
        if not path:
            return None
        if path.lower().endswith(".txt"):
            return Items.read(path)
        names = log_files.column_names(pathlib.Path(path))
        column = self._id_column(names)
        if column not in (self.settings.item, "item") and len(names) > 1:
            print(f"--items: the ids are taken from column {column!r} of {path}, the first.", file=sys.stderr)
        return Items.read(path, column)

    def _id_column(self, names: list[str]) -> str:
        """Of a public file's columns, that of the ids: as in the log, "item", or the first."""
        return next((name for name in (self.settings.item, "item") if name in names), names[0])

    def titles(self, kind: pa.DataType) -> pa.Table:
        empty = super().titles(kind)
        if not self.settings.titles:
            return empty
        ids, title = self._title_columns()

        def convert(items: pa.Array, name: str, cells: pa.Array) -> pa.Table:
            return pa.table([items, cells.cast(pa.string())], schema=empty.schema)

        kinds = f"{ids} and {title} must hold ids and titles"
        return _read_public(self.settings.titles, ids, [title], empty, convert, kinds)

    def _title_columns(self) -> tuple[str, str]:
        """The columns of ids, and of titles ("title", "name", or the other)."""
        path, item = self.settings.titles, self.settings.item
        names = log_files.column_names(pathlib.Path(path))
        ids = self._id_column(names)
        others = [name for name in names if name != ids]
        title = next((name for name in _TITLE if name in others), others[0] if len(others) == 1 else "")
        if not title:
            raise ValueError(
                f"{path} has the columns {', '.join(names)[:200]}: it needs one with ids, called {item!r}, and one "
                'with titles, called "title".'
            )
        return ids, title

    def features(self, kind: pa.DataType) -> pa.Table:
        empty = super().features(kind)
        if not self.settings.features:
            return empty
        ids, names = self._feature_columns()
        kinds = f"{ids} must hold ids, and other columns text, numbers or lists of these"
        table = _read_public(self.settings.features, ids, names, empty, _split_cells, kinds)
        if table.num_rows and table["item"].null_count == table.num_rows:
            raise ValueError(
                f"--features: no id in column {ids!r} is a whole number, as the ids of the log are: name the column of "
                f"ids {self.settings.item!r}, or put it first."
            )
        return table

    def _feature_columns(self) -> tuple[str, list[str]]:
        """The column of ids, and those of features: all others but titles."""
        names = log_files.column_names(pathlib.Path(self.settings.features))
        ids = self._id_column(names)
        others = [name for name in names if name != ids and name not in _TITLE]
        if not others:
            raise ValueError(
                f"{self.settings.features} has the columns {', '.join(names)[:200]}: beside ids, and titles, which are "
                "none, it needs columns with features, such as genres or brands."
            )
        return ids, others

    def words(self, private: bool) -> str:
        settings = self.settings
        if not private:
            return "a log of users' items"
        names = [code(os.path.basename(os.path.normpath(path))) for path in settings.data]
        said = ", ".join(names[:_SHOWN_FILES])
        said += f" and {len(names) - _SHOWN_FILES:,} more" if len(names) > _SHOWN_FILES else ""
        for name in ("user", "item", "time"):
            said += f", {name}s in {code(getattr(settings, name))}" if getattr(settings, name) else ""
        for name in ("items", "features"):
            if path := getattr(settings, name):
                said += f", public {name.replace('features', 'features of items')} in {code(os.path.basename(path))}"
        return said


class MovieLens(LogSource):
    """A folder with MovieLens files: movies of a public catalogue, with titles."""

    usual: ClassVar[tuple[str, ...]] = USUAL

    @classmethod
    def accepts(cls, settings: JobSettings) -> bool:
        return bool(settings.data)

    def check_settings(self) -> JobSettings:
        if self.settings.items_epsilon is not None:
            raise ValueError("--items-epsilon is spent on finding items, and movies are a public list: leave it out.")
        for folder in self.settings.data:
            if os.path.isfile(folder):
                names = ", ".join(map(repr, log_files.column_names(pathlib.Path(folder))))
                raise ValueError(
                    f"--data: {folder} is a file: say which of its columns hold users and items, with --user and "
                    f"--item. It has {names[:200]}."
                )
            if not os.path.isdir(folder):
                raise FileNotFoundError(
                    f"--data: there is no folder {folder}; for files of your own say --user and --item, too."
                )
        if len(self.settings.data) > 1:
            raise ValueError("--data takes one MovieLens folder; for files of your own say --user and --item, too.")
        return dataclasses.replace(self.settings, data=tuple(map(os.path.abspath, self.settings.data)))

    def timelines(self) -> Timelines:
        """The users' movies."""
        return files.read(self.settings.data[0])

    def rows(self) -> tuple[Any, dict[str, Any]]:
        made = self.timelines()
        self._titles = pa.table({"item": pa.array(made.movie_ids, pa.int64()), "title": made.titles})
        rows = {
            "user": np.repeat(made.user_ids, made.lengths), "movie": made.ids(made.numbers),
            "place": np.arange(made.num_events),  # equal times keep the order of the file
        }  # fmt: skip
        return rows, {"user": "user", "item": "movie", "time": "place"}

    def public_items(self) -> Items | None:
        return Items(self._titles["item"].unique())

    def titles(self, kind: pa.DataType) -> pa.Table:
        return self._titles

    def words(self, private: bool) -> str:
        folder = os.path.basename(os.path.normpath(self.settings.data[0])) if private else ""
        return f"MovieLens files{f' in {escape(folder)}' if private else ''}"


class GeneratedTimelines(MovieLens):
    """Timelines like MovieLens', of as many users and movies as the settings say."""

    generated: ClassVar[bool] = True

    @classmethod
    def accepts(cls, settings: JobSettings) -> bool:
        return True

    def timelines(self) -> Timelines:
        settings = self.settings
        # As many a user as MovieLens-20M has; a small catalogue allows fewer.
        events = round(settings.users * min(generated.MEAN_LENGTH, settings.movies / 6))
        try:
            return generated.timelines(settings.users, settings.movies, events, seed=settings.seed)
        except MemoryError:
            raise ValueError(f"--users {settings.users} are more than memory holds: give fewer.") from None

    def words(self, private: bool) -> str:
        return "generated timelines, of no real users"


SOURCES: tuple[type[LogSource], ...] = (OwnFiles, MovieLens, GeneratedTimelines)


def choose_source(settings: JobSettings) -> LogSource:
    """The first source that the settings ask for."""
    return next(kind for kind in SOURCES if kind.accepts(settings))(settings)


def titles_of(items: Items, titles: pa.Table) -> Mapping[Any, str]:
    """Titles of the items that have one, by id; of several, the first."""
    ids = as_kind(items.ids.type, titles["item"].combine_chunks())
    there = pc.and_(pc.is_in(ids, value_set=items.ids), pc.is_valid(titles["title"]))
    # The first of several: the last that a dict is given is the one that it has.
    pairs = zip(reversed(ids.filter(there).to_pylist()), reversed(titles["title"].filter(there).to_pylist()))
    return dict(pairs)


def features_of(items: Items, features: pa.Table) -> list[list[str]] | None:
    """Features of each item, in the order of the list; None where there are none at all."""
    numbers = items.numbers(features["item"].combine_chunks())
    found: list[list[str]] = [[] for _ in range(len(items))]
    for number, feature in zip(numbers.tolist(), features["feature"].to_pylist(), strict=True):
        if number:
            found[number - 1].append(feature)
    return found if any(found) else None


def _read_public(
    path: str, ids: str, names: list[str], empty: pa.Table, convert: Callable[[pa.Array, str, pa.Array], pa.Table],
    kinds: str,
) -> pa.Table:  # fmt: skip
    """What `convert` makes of each named column of a public file, in the types of `empty`; or what it must hold."""
    found = [empty]
    for stretch in log_files.stretches(path, [ids, *names]):
        try:
            items = as_kind(empty.schema.field("item").type, _plain(stretch.table[ids]))
            found += [convert(items, name, _plain(stretch.table[name])) for name in names]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
            raise ValueError(f"{stretch.row(0)}: {kinds}: {str(problem)[:200].rstrip('.')}.") from problem
    return pa.concat_tables(found)


def _split_cells(items: pa.Array, name: str, cells: pa.Array) -> pa.Table:
    """A row for each feature in a column's cells: lists, texts with "|" between, or single values."""
    if not (pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type)):
        cells = pc.split_pattern(cells.cast(pa.string()), _IN_A_CELL)
    values = pc.utf8_trim_whitespace(pc.list_flatten(cells).cast(pa.string()))
    table = pa.table({"item": items.take(pc.list_parent_indices(cells)), "feature": values})
    table = table.filter(pc.fill_null(pc.not_equal(values, ""), False))
    return table.set_column(1, "feature", pc.binary_join_element_wise(name, table["feature"], "="))


def _plain(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array
