"""What every source of a log can do. A new one is its file here and a name in `SOURCES`."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import pyarrow as pa

from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.job.page import Words
from tfdp_rec.job.settings import JobSettings


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
    def asked(cls, settings: JobSettings) -> bool:
        """Whether the settings ask for this source."""
        raise NotImplementedError

    def checked(self) -> JobSettings:
        """The settings, refused if something is missing; paths as they are from anywhere."""
        return self.settings

    def read(self, folder: pathlib.Path) -> Interactions:
        """The log, grouped by user in a folder."""
        raise NotImplementedError

    def public_items(self) -> Items | None:
        """The public list of items; None if they are to be found privately. Asked for after `read`."""
        return None

    def title_bytes(self, kind: pa.DataType) -> int:
        """Size of all titles, which are read whole for what that refuses; `kind` is the type of the log's ids."""
        return 0

    def titles(self, items: Items) -> Mapping[Any, str]:
        """Titles by id."""
        return {}

    def words(self, private: bool) -> Words:
        """The source in words; names of files in a private report alone."""
        raise NotImplementedError
