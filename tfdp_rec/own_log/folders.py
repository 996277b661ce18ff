"""Which folders hold runs on logs, and what killed processes left of them. Nothing here needs TensorFlow."""

from __future__ import annotations

import contextlib
import fcntl
import json
import pathlib
import shutil

from tfdp_rec.files import Path

JOB, RUN = "log", "run.json"


def is_kept(directory: Path) -> bool:
    """Whether a folder holds a run of this kind, finished or to be gone on with."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((pathlib.Path(directory) / RUN).read_text(encoding="utf-8"))
        return isinstance(found, dict) and found.get("job") == JOB
    return False


def sweep(runs: pathlib.Path) -> None:
    """Removes what killed processes left of runs that nobody asked to be kept.

    Args:
        runs: the folder that run folders are in.
    """
    for lock in runs.glob(".*.private/in-use"):
        if is_kept(lock.parent):
            with contextlib.suppress(OSError), open(lock, "a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused as long as its owner lives
                shutil.rmtree(lock.parent)
