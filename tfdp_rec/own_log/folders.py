"""Which folders hold what a run on a log needs to be gone on with. Nothing here needs TensorFlow."""

from __future__ import annotations

import contextlib
import json
import pathlib

from tfdp_rec.files import Path

JOB, RUN = "log", "run.json"


def is_kept(directory: Path) -> bool:
    """Whether a folder holds a run of this kind, finished or to be gone on with."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((pathlib.Path(directory) / RUN).read_text(encoding="utf-8"))
        return isinstance(found, dict) and found.get("job") == JOB
    return False
