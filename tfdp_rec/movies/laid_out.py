"""Raw timelines on a disk that a cluster's workers read: for their owner alone, and no longer than a training lasts.

    RUN/timelines/      0700; files 0600; locked by whoever trains, for as long as that process lives

A process that is killed leaves them. The next that lays timelines out removes what lies in run folders beside its own
and is locked by nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from tfdp_rec.data import NextItemExamples
from tfdp_rec.datasets.shared_timelines import SharedTimelines
from tfdp_rec.files import remove
from tfdp_rec.movies.run_folder import RunFolder

_NAME, _LOCK = "timelines", "in-use"


@contextlib.contextmanager
def laid_out(examples: NextItemExamples, folder: RunFolder) -> Iterator[SharedTimelines]:
    """The timelines of some examples, in files as long as the block lasts.

    Args:
        examples: whose timelines.
        folder: of the run, where every worker can read it.
    """
    sweep(folder.path.parent)
    path = folder / _NAME
    remove(path)
    path.mkdir(mode=0o700)
    with open(path / _LOCK, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            timelines = SharedTimelines(examples, path)
            for file in path.iterdir():
                file.chmod(0o600)
            yield timelines
        finally:
            remove(path)


def sweep(runs: pathlib.Path) -> None:
    """Removes the timelines that killed processes left in run folders.

    Args:
        runs: the folder that run folders are in.
    """
    for lock in runs.glob(f"*/{_NAME}/{_LOCK}"):
        if not (lock.parent.parent / "config.json").exists():
            continue
        with contextlib.suppress(OSError), open(lock, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused as long as its owner lives
            remove(lock.parent)
