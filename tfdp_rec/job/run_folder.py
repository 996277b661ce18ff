"""A folder for everything one run leaves behind, in two parts, so that copying one of them gives nothing else away.

    RUN/release/    what the statement's ε covers, and public files: the servable, the statement, the ledger, a card
    RUN/private/    what tells where users' data are, or was made of them without noise: the report and settings, which
                    name files; the ledgers of recommenders that were only compared, the days that users' rows counted
                    on, what a run needs to be resumed; 0700, files 0600
        confidential/   with --confidential alone: exact figures, losses and curves, which no ε covers

This file imports no library of the extra `job`: a machine that only serves needs none of them.
"""

from __future__ import annotations

import json
import os
import pathlib
import uuid
from typing import Any

from tfdp_rec.core.ground.files import Path, open_atomically

RELEASE, PRIVATE = "release", "private"
LEDGER, SERVABLE, STATEMENT, RELEASED, MODEL, CARD = (
    "ledger.jsonl", "servable", "statement.txt", "released.npz", "model.keras", "card.md"
)  # fmt: skip
CONFIDENTIAL = "confidential"
CONFIG, SEATS = "config.json", ("seats.parquet", "seats.parquet.next")
FINAL = (CONFIG, SERVABLE, STATEMENT, RELEASED)  # a folder with any of them holds a run
_IN_RELEASE = (LEDGER, SERVABLE, STATEMENT, RELEASED, MODEL, CARD)


class RunFolder:
    """One run's folder, made if it is not there.

    Example:
        >>> import tempfile
        >>> folder = RunFolder(tempfile.mkdtemp() + "/first")
        >>> folder.append({"step": 1}); folder.append({"step": 2})
        >>> (folder.confidential / "metrics.jsonl").read_text().splitlines()
        ['{"step": 1}', '{"step": 2}']
    """

    def __init__(self, path: Path):
        self.path = pathlib.Path(path)
        self.release, self.private = self.path / RELEASE, self.path / PRIVATE
        self.confidential = self.private / CONFIDENTIAL
        try:
            for part in (self.release, self.private):
                part.mkdir(parents=True, exist_ok=True)
                probe = part / f".{uuid.uuid4().hex}"
                probe.touch()
                probe.unlink()
            self.private.chmod(0o700)
        except OSError as problem:
            raise OSError(
                problem.errno, f"--out: nothing can be written to {self.path} ({problem.strerror}). Give another --out."
            ) from problem

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file whole, into its part of the folder; private ones are for their owner alone."""
        mode, path = "w" if isinstance(content, str) else "wb", find(self.path, name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open_atomically(path, mode, name not in _IN_RELEASE) as file:
            file.write(content)

    def remove_if_empty(self) -> None:
        """Removes what of it holds nothing."""
        for path in (self.release, self.private, self.path):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def append(self, record: dict[str, Any], name: str = "metrics.jsonl") -> None:
        """Adds a line to a confidential file: what was computed from users' data without noise."""
        self.confidential.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(self.confidential / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        with open(handle, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def find(run: Path, name: str) -> pathlib.Path:
    """Path of a file of a run, in its part of the folder."""
    return pathlib.Path(run) / (RELEASE if name in _IN_RELEASE else PRIVATE) / name


def find_servable(folder: Path) -> pathlib.Path:
    """The SavedModel of a run folder, or of its released part; the folder itself, if it is one."""
    path = pathlib.Path(folder)
    places = path, path / SERVABLE, path / RELEASE / SERVABLE
    return next((place for place in places if (place / "saved_model.pb").is_file()), places[-1])


def read_statement(servable: Path) -> str:
    """The statement that a run wrote beside its SavedModel; empty if there is none."""
    path = pathlib.Path(servable).resolve()  # what is beside a link to a model is not about it
    beside = path.with_name(STATEMENT)
    # A folder of another name may be anything that was put beside a statement.
    return beside.read_text(encoding="utf-8") if path.name == SERVABLE and beside.is_file() else ""
