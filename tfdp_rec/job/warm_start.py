"""What a run folder holds for the days that follow: the state that the next day starts from.

    RUN/release/released.npz    the recommender's items and titles, where the ledger stood; of private sums, the sums

The file is written last of all, and whole: where it says day t, all else of day t is there. It holds what was released
under the run's ε, and public titles.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tfdp_rec.core.claim.ledger import Mark, read
from tfdp_rec.core.ground.files import Path, digest, writing
from tfdp_rec.datasets.logs.items import Items
from tfdp_rec.job.budget import Budget
from tfdp_rec.job.run_folder import CONFIG, LEDGER, MODEL, PRIVATE, RELEASED, find
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.spectral import Release, SpectralRecommender

_BROKEN = (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True, eq=False)
class WarmStart:
    """What the days so far have released."""

    items: Items  # all that are known
    mark: Mark  # where the ledger stood
    release: Release | None  # the sums; None for a two-tower
    titles: Mapping[Any, str] = dataclasses.field(default_factory=dict)

    def save(self, folder: Path, recommender: Any = None) -> None:
        """Writes it into a run folder; with private sums, as a file that `SpectralRecommender.load` reads, too."""
        titles = pa.array([self.titles.get(item) for item in self.items.ids.to_pylist()], pa.string())
        ids = io.BytesIO()
        pa.parquet.write_table(pa.table({"item": self.items.ids, "title": titles}), ids)
        arrays: dict[str, Any] = {
            "mark": json.dumps(dataclasses.asdict(self.mark)), "items": np.frombuffer(ids.getvalue(), np.uint8)
        }  # fmt: skip
        if os.path.isfile(model := find(folder, MODEL)):
            arrays["model"] = digest(model)
        with writing(find(folder, RELEASED), "wb") as file:
            if isinstance(recommender, SpectralRecommender):
                recommender.write(file, **arrays)
            else:
                np.savez(file, **arrays)

    @classmethod
    def load(cls, folder: Path) -> WarmStart:
        """What `save` wrote into a run folder."""
        path = find(folder, RELEASED)
        if not path.exists():
            raise ValueError(
                f"{folder} has no {RELEASED}, what it released, so that there is nothing to add a day to: it was "
                "cut off. Begin another run with --days."
            )
        return cls.read(path)

    @staticmethod
    def is_of_run(path: Path) -> bool:
        """Whether a file is there that a run has written, with its ids."""
        if not os.path.isfile(path):
            return False
        try:
            with np.load(path, allow_pickle=False) as file:
                return "items" in file
        except _BROKEN:
            return True  # which `read` says

    @staticmethod
    def refuse_another_model(path: Path, model: Path) -> None:
        """Refuses a model beside the file that is not the one of its run, whose items are others."""
        with np.load(path, allow_pickle=False) as file:
            named = str(file["model"])
        if named != digest(model):
            raise ValueError(
                f"{model} is not the model that {path} was written with, and its items may be others. If it is of "
                "another run, export it from that run's folder; if a day of this run was cut off, resume it first; if "
                "you saved it anew, export it in Python, with its items, by tfdp_rec.serving.export."
            )

    @classmethod
    def read(cls, path: Path) -> WarmStart:
        """What `save` wrote, from the file itself."""
        try:
            with np.load(path, allow_pickle=False) as file:
                table = pa.parquet.read_table(io.BytesIO(file["items"].tobytes()))
                release = Release.from_arrays(file) if "released_counts" in file else None
                release = release and dataclasses.replace(release, of_run=True)
                mark = Mark(**json.loads(str(file["mark"])))
        except _BROKEN as problem:
            raise _changed(path, problem) from None
        pairs = zip(table["item"].to_pylist(), table["title"].to_pylist())
        return cls(Items(table["item"].combine_chunks()), mark, release, {i: t for i, t in pairs if t is not None})


def continued(folder: Path) -> tuple[JobSettings, Mark]:
    """Settings of a run that a day is to be added to, its budget as its ledger has it; and where its ledger stood."""
    path, ledger, released = (find(folder, name) for name in (CONFIG, LEDGER, RELEASED))
    if not path.is_file() and released.exists():
        raise FileNotFoundError(
            f"--continue: {folder} has no {PRIVATE}/{CONFIG}, which says how its logs are read: continue it where it "
            "was made."
        )
    if not path.is_file():
        raise FileNotFoundError(f"--continue: there is no run in {folder}.")
    if released.exists() and not ledger.exists():
        raise ValueError(
            f"--continue: {folder} has no {LEDGER}, so that what was spent is not known: put the newest one back."
        )
    mark, decided = WarmStart.load(folder).mark, Budget.of(read(ledger))
    fixed = {name: value for name, value in dataclasses.asdict(decided).items() if name != "public"}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        # The others were made to compare on the first day's data, and were not released.
        alone = {"mechanism": [config.get("released", "spectral")], "export": None}
        settings = JobSettings.from_config({**config, **fixed, **alone})
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise _changed(path, problem) from None
    if settings.user and bool(settings.items) != decided.public:
        raise ValueError(f"{path} was changed: its ledger was begun with other items. Put it back.")
    return settings, mark


def _changed(path: Path, problem: Exception) -> ValueError:
    return ValueError(f"{path} was changed: put it back from a backup ({problem}).")
