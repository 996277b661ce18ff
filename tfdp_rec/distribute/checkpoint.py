"""Training checkpoints of a cluster: folders to go on from, as opposed to models to release.

    NNNNNN-step-S.cluster-checkpoint/
        training.json       what training it is of; written by the coordinator
        server-I/...        what server I holds, rows that owe noise and all; written by that server

The folder is readable by its owner alone; keep it as private as the data. It appears under its name when it is whole
and synced, and the one before it goes when it has. No noise key is in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp_rec.distribute.server_state import ServerState
from tfdp_rec.files import replacing

_SUFFIX = ".cluster-checkpoint"
_NAME = re.compile(rf"(\d+)-step-(\d+){re.escape(_SUFFIX)}$")
_HEADER = "training.json"


class Checkpoints:
    """The checkpoints of one training, in a directory that coordinator and servers share.

    Args:
        directory: made if missing.
        states: of the servers.
        identity: what must be the same when the training goes on, JSON-able.
    """

    def __init__(self, directory: str, states: Sequence[ServerState], identity: Mapping[str, Any]):
        self.directory, self._states = os.path.abspath(directory), list(states)
        self._identity = json.loads(json.dumps(identity, default=str))
        os.makedirs(self.directory, mode=0o700, exist_ok=True)

    def latest(self) -> str | None:
        """The path of the last checkpoint, or None."""
        return self._paths()[-1] if self._paths() else None

    def save(self, step: int) -> str:
        """Writes a checkpoint and removes those before it; returns its path.

        Raises:
            OSError: if what a server wrote is not to be seen here.
        """
        older = self._paths()
        number = 1 + (int(_NAME.search(older[-1]).group(1)) if older else 0)  # type: ignore[union-attr]
        path = os.path.join(self.directory, f"{number:06d}-step-{step}{_SUFFIX}")
        with replacing(path) as temporary:
            os.mkdir(temporary, mode=0o700)
            for index, state in enumerate(self._states):
                folder = os.path.join(temporary, f"server-{index}")
                os.mkdir(folder, mode=0o700)
                state.save(folder)
                missing = set(state.files()) - set(os.listdir(folder))
                if missing:
                    raise OSError(
                        f"Server {index} wrote to {folder}, but {len(missing)} of its files are not there: "
                        "checkpoint_directory must be on a file system that the coordinator and all servers share."
                    )
            with open(os.path.join(temporary, _HEADER), "w", encoding="utf-8") as file:
                json.dump({**self._identity, "step": step}, file, indent=1)
        for before in older:
            shutil.rmtree(before)
        return path

    def restore(self) -> int | None:
        """Puts the servers where the last checkpoint left them; returns its step, or None if there is none.

        Raises:
            ValueError: if it is of another training.
        """
        path = self.latest()
        self._clean_up()
        if path is None:
            return None
        with open(os.path.join(path, _HEADER), encoding="utf-8") as file:
            header = json.load(file)
        step = int(header.pop("step"))
        for key in {**header, **self._identity}:
            theirs, mine = header.get(key), self._identity.get(key)
            if theirs != mine:
                raise ValueError(f"{path} is of another training: its {key} is {theirs}, here it is {mine}.")
        for index, state in enumerate(self._states):
            state.restore(os.path.join(path, f"server-{index}"))
        return step

    def _paths(self) -> list[str]:
        found = sorted((int(m.group(1)), name) for name in os.listdir(self.directory) if (m := _NAME.match(name)))
        return [os.path.join(self.directory, name) for _, name in found]

    def _clean_up(self) -> None:
        """Removes what a killed process had begun to write."""
        for name in os.listdir(self.directory):
            if name.startswith(".") and _SUFFIX in name:
                shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)
