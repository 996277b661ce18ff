"""What a run folder keeps for the days that follow, and what is asked of the folder before one may.

    RUN/release/released.npz    the sums of all days so far, as they were released; their items; where the ledger stood

The file is written last of all, and whole: where it says day t, all else of day t is there. It holds what was released
under the run's ε, and nothing else.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import zipfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from tfdp_rec.data import Items
from tfdp_rec.files import Path, writing
from tfdp_rec.own_log.folders import JOB
from tfdp_rec.own_log.lifetime import Lifetime
from tfdp_rec.own_log.settings import Asked
from tfdp_rec.run_folder import CONFIG, LEDGER, PRIVATE, find
from tfdp_rec.spectral import Release
from tfdp_rec.spending.ledger import read
from tfdp_rec.spending.ledger_lines import Mark

RELEASED = "released.npz"


@dataclasses.dataclass(frozen=True, eq=False)
class Earlier:
    """What the days so far have released.

    Attributes:
        items: all that are known.
        release: the sums.
        mark: where the ledger stood.
    """

    items: Items
    release: Release
    mark: Mark

    def save(self, folder: Path) -> None:
        """Writes it into a run folder.

        Args:
            folder: the run folder.
        """
        ids = io.BytesIO()
        pa.parquet.write_table(pa.table({"item": self.items.ids}), ids)
        mark, listed = json.dumps(dataclasses.asdict(self.mark)), np.frombuffer(ids.getvalue(), np.uint8)
        with writing(find(folder, RELEASED), "wb") as file:
            np.savez(file, mark=mark, items=listed, **self.release.arrays())

    @classmethod
    def load(cls, folder: Path) -> Earlier:
        """What `save` wrote.

        Raises:
            ValueError: it is not there, or was changed.
        """
        path = find(folder, RELEASED)
        try:
            with np.load(path, allow_pickle=False) as file:
                ids = pa.parquet.read_table(io.BytesIO(file["items"].tobytes()))["item"]
                release, mark = Release.from_arrays(file), Mark(**json.loads(str(file["mark"])))
        except FileNotFoundError:
            raise ValueError(
                f"{folder} has no {RELEASED}, the sums that it released, so that there is nothing to add a day to: it "
                "was made before runs kept them, or was cut off. Begin another run with --days."
            ) from None
        except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as problem:
            raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None
        return cls(Items(ids.combine_chunks()), release, mark)


def mark_of(path: Path) -> Mark:
    """Where the ledger stood when a file of released sums was written.

    Raises:
        ValueError: the file was changed.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return Mark(**json.loads(str(file["mark"])))
    except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as problem:
        raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None


def asked_of(folder: Path) -> Asked:
    """What a run that is to be continued was asked for; its budget as its ledger has it.

    Args:
        folder: of the run.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is of another kind, or no day can be added to it.
    """
    path, ledger = find(folder, CONFIG), find(folder, LEDGER)
    if not path.is_file() and find(folder, RELEASED).exists():
        raise FileNotFoundError(
            f"--continue: {folder} has no {PRIVATE}/{CONFIG}, which says how its logs are read: continue it where it "
            "was made."
        )
    if not path.is_file():
        raise FileNotFoundError(f"--continue: there is no run in {folder}.")
    config = _config(path)
    if config.get("job") != JOB:
        raise ValueError(
            f"--continue: {folder} is a run on movies; only one on a log of your own has sums that a further day can "
            "be added to."
        )
    if not find(folder, RELEASED).exists():
        Earlier.load(folder)  # for what it says
    if not ledger.exists():
        raise ValueError(
            f"--continue: {folder} has no {LEDGER}, so that nobody knows what was spent: put the newest one back."
        )
    decided = Lifetime.of(read(ledger))
    try:
        asked = Asked.from_config({**config, **dataclasses.asdict(decided)})
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None
    if bool(asked.columns.items) != decided.public:
        raise ValueError(f"{path} was changed: its ledger was begun with other items. Put it back.")
    return asked


def _config(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} was changed: put it back from a backup ({problem}).") from None
    return found if isinstance(found, dict) else {}
