"""A log in files of one's own: Parquet, CSV, JSON lines, Arrow, in columns that the settings name."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.files import matching
from tfdp_rec.job.page import Code, Piece, Words
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.sources import titles
from tfdp_rec.job.sources.source import LogSource

_SHOWN_FILES = 3


class OwnFiles(LogSource):
    """Files of (user, item, time)."""

    @classmethod
    def asked(cls, settings: JobSettings) -> bool:
        return any((settings.user, settings.item, settings.time, settings.items, settings.titles))

    def checked(self) -> JobSettings:
        asked = self.settings
        for name in ("user", "item"):
            if not getattr(asked, name):
                raise ValueError(f"--{name} is missing: say which column of the log holds the {name}s' ids.")
        if not asked.data:
            raise ValueError("--data is missing: say which files hold the log, such as --data logs/*.parquet.")
        if asked.items and asked.items_epsilon is not None:
            raise ValueError("--items-epsilon is spent on finding items, and --items gives them: leave one out.")
        if asked.items_epsilon is not None and asked.items_epsilon >= asked.epsilon:
            raise ValueError(
                f"--items-epsilon must be less than --epsilon {asked.epsilon:g}, got {asked.items_epsilon:g}."
            )
        paths = {name: getattr(asked, name) for name in ("items", "titles") if getattr(asked, name)}
        for name, path in paths.items():
            if not os.path.isfile(path):
                raise FileNotFoundError(f"--{name}: there is no file {path}.")
        for path in asked.data:
            if not matching(path):
                raise FileNotFoundError(f"--data: there is nothing at {path}.")
        absolute: dict[str, Any] = {name: os.path.abspath(path) for name, path in paths.items()}
        return dataclasses.replace(asked, data=tuple(map(os.path.abspath, asked.data)), **absolute)

    def read(self, folder: pathlib.Path) -> Interactions:
        asked = self.settings
        if asked.titles:
            titles.columns_of(asked.titles, asked.item)  # before the log is read, which may take long
        return Interactions.read(list(asked.data), user=asked.user, item=asked.item, time=asked.time, folder=folder)

    def public_items(self) -> Items | None:
        return Items.read(self.settings.items, usual=[self.settings.item]) if self.settings.items else None

    def title_bytes(self, kind: pa.DataType) -> int:
        return titles.check(self.settings.titles, kind, self.settings.item) if self.settings.titles else 0

    def titles(self, items: Items) -> Mapping[Any, str]:
        return titles.read(self.settings.titles, items, self.settings.item) if self.settings.titles else {}

    def words(self, private: bool) -> Words:
        asked = self.settings
        if not private:
            return "a log of users' items"
        names: list[Piece] = [Code(os.path.basename(os.path.normpath(path))) for path in asked.data]
        shown = [piece for name in names[:_SHOWN_FILES] for piece in (", ", name)][1:]
        shown += [f" and {len(names) - _SHOWN_FILES:,} more"] if len(names) > _SHOWN_FILES else []
        for name in ("user", "item", "time"):
            shown += [f", {name}s in ", Code(getattr(asked, name))] if getattr(asked, name) else []
        return (*shown, ", public items in ", Code(os.path.basename(asked.items))) if asked.items else tuple(shown)
