"""MovieLens files, and generated timelines of their kind: movies of a public catalogue, with titles."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.datasets.movielens import files, generated
from tfdp_rec.datasets.timelines import Timelines
from tfdp_rec.job.page import Given, Words
from tfdp_rec.job.recommenders.names import USUAL
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.sources.source import LogSource


class MovieLens(LogSource):
    """A folder with MovieLens files."""

    usual: ClassVar[tuple[str, ...]] = USUAL

    @classmethod
    def asked(cls, settings: JobSettings) -> bool:
        return bool(settings.data)

    def checked(self) -> JobSettings:
        if self.settings.items_epsilon is not None:
            raise ValueError("--items-epsilon is spent on finding items, and movies are a public list: leave it out.")
        for folder in self.settings.data:
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

    def read(self, folder: pathlib.Path) -> Interactions:
        made = self.timelines()
        self._titles = dict(zip(made.movie_ids.tolist(), made.titles))
        rows = {
            "user": np.repeat(made.user_ids, made.lengths), "movie": made.ids(made.numbers),
            "place": np.arange(made.num_events),  # equal times keep the order of the file
        }  # fmt: skip
        return Interactions.read(rows, user="user", item="movie", time="place", folder=folder)

    def public_items(self) -> Items | None:
        return Items(list(self._titles))

    def title_bytes(self, kind: pa.DataType) -> int:
        return sum(len(title.encode()) for title in self._titles.values())

    def titles(self, items: Items) -> Mapping[Any, str]:
        return self._titles

    def words(self, private: bool) -> Words:
        folder = os.path.basename(os.path.normpath(self.settings.data[0]))
        return ("MovieLens files in ", Given(folder)) if private else "MovieLens files"


class GeneratedTimelines(MovieLens):
    """Timelines like MovieLens', of as many users and movies as the settings say."""

    generated: ClassVar[bool] = True

    @classmethod
    def asked(cls, settings: JobSettings) -> bool:
        return True

    def timelines(self) -> Timelines:
        asked = self.settings
        # A small catalogue allows fewer events a user than the real data has.
        events = asked.events or round(asked.users * min(generated.MEAN_LENGTH, asked.movies / 6))
        return generated.timelines(asked.users, asked.movies, events, seed=asked.seed)

    def words(self, private: bool) -> Words:
        return "generated timelines, of no real users"
