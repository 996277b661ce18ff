"""A folder for everything one run leaves behind: config, metrics as JSON lines, plots, report, servable."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from typing import Any

from tfdp_rec.files import writing
from tfdp_rec.page import Page


class RunFolder:
    """One run's folder.

    Args:
        path: the folder; `runs/<date>-<time>` if None. It must not hold another run.

    Raises:
        FileExistsError: if it does.

    Example:
        >>> import tempfile
        >>> folder = RunFolder(tempfile.mkdtemp() + "/first")
        >>> folder.append({"step": 1}); folder.append({"step": 2})
        >>> [line["step"] for line in folder.metrics()]
        [1, 2]
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.path = pathlib.Path(path or pathlib.Path("runs") / stamp)
        if (self.path / "config.json").exists():
            raise FileExistsError(f"{self.path} holds another run; give another --out.")
        self.path.mkdir(parents=True, exist_ok=True)

    @classmethod
    def reopened(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Of a run that goes on.

        Args:
            path: the folder; made anew if it is gone.
        """
        folder = cls.__new__(cls)
        folder.path = pathlib.Path(path)
        folder.path.mkdir(parents=True, exist_ok=True)
        return folder

    def __truediv__(self, name: str) -> pathlib.Path:
        return self.path / name

    def write_json(self, name: str, value: Any) -> None:
        """Writes a JSON file whole."""
        with writing(self / name) as file:
            json.dump(value, file, indent=1)

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file whole."""
        with writing(self / name) as file:
            file.write(text)

    def write_page(self, page: Page) -> None:
        """Writes the report: `report.html`, and `report.md` with its pictures beside it; each whole."""
        for picture in page.pictures:
            with writing(self / picture.file, "wb") as file:
                file.write(picture.light)
        self.write_text("report.md", page.markdown())
        self.write_text("report.html", page.html())

    def append(self, record: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl."""
        with open(self / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; of those about the same step the last, since a run that goes on repeats some."""
        path = self / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        return list({(line.get("mechanism"), line["step"]): line for line in lines}.values())
