"""What a run folder holds for the days that follow: the state that the next day starts from.

    RUN/release/released.npz    the recommender's items and titles, where the ledger stood; of private sums, the sums

The file is written last of all, and whole: where it says day t, all else of day t is there. It holds what was released
under the run's ε, and public titles.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.files import Path, writing
from tfdp_rec.job.budget import Lifetime
from tfdp_rec.job.run_folder import CONFIG, LEDGER, PRIVATE, find
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.spectral import Release, SpectralRecommender
from tfdp_rec.spending.ledger import read
from tfdp_rec.spending.ledger_lines import Mark

RELEASED = "released.npz"
_BROKEN = (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True, eq=False)
class WarmStart:
    """What the days so far have released.

    Attributes:
        items: All items that are known.
        mark: Position of the ledger.
        release: The sums; None for a two-tower.
        titles: Titles by id.
    """

    items: Items
    mark: Mark
    release: Release | None
    titles: Mapping[Any, str] = dataclasses.field(default_factory=dict)

    def save(self, folder: Path, recommender: Any = None) -> None:
        """Writes it into a run folder; with private sums, as a file that `SpectralRecommender.load` reads, too."""
        ids, table = io.BytesIO(), {"item": self.items.ids, "title": self._titled()}
        pa.parquet.write_table(pa.table(table), ids)
        mark, listed = json.dumps(dataclasses.asdict(self.mark)), np.frombuffer(ids.getvalue(), np.uint8)
        with writing(find(folder, RELEASED), "wb") as file:
            if isinstance(recommender, SpectralRecommender):
                recommender.write(file, mark=mark, items=listed)
            else:
                np.savez(file, mark=mark, items=listed)

    def _titled(self) -> pa.Array:
        return pa.array([self.titles.get(item) for item in self.items.ids.to_pylist()], pa.string())

    @classmethod
    def load(cls, folder: Path) -> WarmStart:
        """What `save` wrote into a run folder."""
        path = find(folder, RELEASED)
        try:
            return cls.read(path)
        except FileNotFoundError:
            raise ValueError(
                f"{folder} has no {RELEASED}, what it released, so that there is nothing to add a day to: it was made "
                "before runs kept it, or was cut off. Begin another run with --days."
            ) from None

    @classmethod
    def read(cls, path: Path) -> WarmStart:
        """What `save` wrote, from the file itself."""
        try:
            with np.load(path, allow_pickle=False) as file:
                table = pa.parquet.read_table(io.BytesIO(file["items"].tobytes()))
                release = Release.from_arrays(file) if "released_counts" in file else None
                mark = Mark(**json.loads(str(file["mark"])))
        except FileNotFoundError:
            raise
        except _BROKEN as problem:
            raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None
        items, named = Items(table["item"].combine_chunks()), dict[Any, str]()
        if "title" in table.column_names:  # older versions wrote none
            pairs = zip(table["item"].to_pylist(), table["title"].to_pylist())
            named = {item: title for item, title in pairs if title is not None}
        return cls(items, mark, release, named)


def mark_of(path: Path) -> Mark:
    """Position of the ledger when a file of released sums was written."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return Mark(**json.loads(str(file["mark"])))
    except _BROKEN as problem:
        raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None


def continued_settings(folder: Path) -> JobSettings:
    """Settings of a run that a day is to be added to; its budget as its ledger has it."""
    path, ledger = find(folder, CONFIG), find(folder, LEDGER)
    if not path.is_file() and find(folder, RELEASED).exists():
        raise FileNotFoundError(
            f"--continue: {folder} has no {PRIVATE}/{CONFIG}, which says how its logs are read: continue it where it "
            "was made."
        )
    if not path.is_file():
        raise FileNotFoundError(f"--continue: there is no run in {folder}.")
    config = _config(path)
    if not find(folder, RELEASED).exists():
        WarmStart.load(folder)  # for what it says
    if not ledger.exists():
        raise ValueError(
            f"--continue: {folder} has no {LEDGER}, so that what was spent is not known: put the newest one back."
        )
    decided = Lifetime.of(read(ledger))
    fixed = {name: value for name, value in dataclasses.asdict(decided).items() if name != "public"}
    try:
        # The others were made to compare on the first day's data, and were not released.
        alone: dict[str, Any] = {"mechanism": [config.get("released", "spectral")], "export": None}
        settings = JobSettings.from_config({**config, **fixed, **alone})
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None
    if settings.user and bool(settings.items) != decided.public:
        raise ValueError(f"{path} was changed: its ledger was begun with other items. Put it back.")
    return settings


def _config(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None
    return found if isinstance(found, dict) else {}
