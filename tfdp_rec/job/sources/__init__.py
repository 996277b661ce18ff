"""Where a job's log comes from: files of one's own, MovieLens files, a generator."""

from __future__ import annotations

from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.sources.movielens import GeneratedTimelines, MovieLens
from tfdp_rec.job.sources.own_files import OwnFiles
from tfdp_rec.job.sources.source import LogSource

SOURCES: tuple[type[LogSource], ...] = (OwnFiles, MovieLens, GeneratedTimelines)


def source_of(settings: JobSettings) -> LogSource:
    """The first source that the settings ask for."""
    return next(kind for kind in SOURCES if kind.asked(settings))(settings)
