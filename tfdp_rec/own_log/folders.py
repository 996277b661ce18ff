"""Which folders hold runs on logs, and what killed processes left of them. Nothing here needs TensorFlow."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import pathlib
import shutil

from tfdp_rec.files import Path, replacing

JOB, RUN, LEDGER = "log", "run.json", "ledger.jsonl"


def is_kept(directory: Path) -> bool:
    """Whether a folder holds a run of this kind, finished or to be gone on with."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((pathlib.Path(directory) / RUN).read_text(encoding="utf-8"))
        return isinstance(found, dict) and found.get("job") == JOB
    return False


def leave_ledger(kept: pathlib.Path) -> None:
    """Puts what a first day has paid, in a folder that is about to be removed, into its run folder: it stays paid.

    Args:
        kept: the folder.
    """
    from tfdp_rec.spending.ledger import BrokenLedger, read

    ledger = kept / LEDGER
    if not ledger.exists():
        return
    out = pathlib.Path(json.loads((kept / RUN).read_text(encoding="utf-8"))["out"])
    names = itertools.chain([LEDGER], (f"ledger-{number}.jsonl" for number in itertools.count(2)))
    name = next(each for each in names if not (out / each).exists() or _holds(out / each, ledger))
    if (out / name).exists():
        return  # handed over; days that were added since are behind it
    with contextlib.suppress(BrokenLedger):  # a line cut short: as it stands, for somebody to look at
        if not read(ledger).paid:
            return
    copy_ledger(kept, out, name)


def _holds(whole: pathlib.Path, part: pathlib.Path) -> bool:
    return whole.read_bytes().startswith(part.read_bytes())


def copy_ledger(kept: pathlib.Path, out: pathlib.Path, name: str = LEDGER) -> None:
    """Puts the ledger of one folder into another, whole or not at all.

    Args:
        kept: with a ledger.
        out: made if missing.
        name: of the file there: another where two runs wrote to one folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / name) as temporary:
        shutil.copyfile(kept / LEDGER, temporary)


def sweep(runs: pathlib.Path) -> None:
    """Removes what killed processes left of runs that nobody asked to be kept, but for what they have paid.

    Args:
        runs: the folder that run folders are in.
    """
    for lock in runs.glob(".*.private/in-use"):
        if is_kept(lock.parent):
            with contextlib.suppress(OSError), open(lock, "a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused as long as its owner lives
                leave_ledger(lock.parent)
                shutil.rmtree(lock.parent)
