"""Raw timelines on a disk that a cluster's workers read: for their owner alone, and no longer than a training lasts.

    RUN/private/timelines/      0700; files 0600; locked by the process that trains, for as long as it lives

A process that is killed leaves them. The next run removes what lies in run folders beside its own and is locked by
none.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

from tfdp_rec.data import NextItemExamples
from tfdp_rec.datasets.shared_timelines import SharedTimelines
from tfdp_rec.files import hold, let_go, remove, unheld
from tfdp_rec.run_folder import CONFIG, PRIVATE, RunFolder, find

_NAME = "timelines"


@contextlib.contextmanager
def laid_out(examples: NextItemExamples, folder: RunFolder) -> Iterator[SharedTimelines]:
    """The timelines of some examples, in files as long as the block lasts.

    Args:
        examples: the examples.
        folder: the run folder, where every worker can read it.
    """
    path = folder.private / _NAME
    remove(path)
    hold(path)
    try:
        yield SharedTimelines(examples, path)
    finally:
        let_go(path)
        remove(path)


def sweep(runs: pathlib.Path) -> None:
    """Removes the timelines that killed processes left in run folders.

    Args:
        runs: the folder that run folders are in.
    """
    for lock in [*runs.glob(f"*/{PRIVATE}/{_NAME}/in-use"), *runs.glob(f"*/{_NAME}/in-use")]:
        run = lock.parent.parent.parent if lock.parent.parent.name == PRIVATE else lock.parent.parent
        with unheld(lock.parent) as free:
            if free and find(run, CONFIG).exists():
                remove(lock.parent)
