"""Training checkpoints of a cluster: folders to go on from, as opposed to models to release.

    NNNNNN-step-S.cluster-checkpoint/
        training.json       what training it is of, where its ledger stood, and a hash of every file; the coordinator's
        server-I/...        what server I holds; written by that server, after its rows have got what they owe

A checkpoint holds weights that could be released: no row owes noise. A training that continues from a copy pays for its
own steps, and releasing two copies tells no more than releasing one. The folder is readable by its owner alone; keep it
as private as the data. It appears under its name when it is whole and synced, and the one before it goes when it has.
No noise key is in it. Nothing of it is taken over unless all of it is as it was written.

A server writes its own files, one for each piece of each variable, so that neither file nor memory grows with a table.
Writing is one critical section: a step that lands late is in all of a server's files or in none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.core.claim.entries import Entries
from tfdp_rec.core.claim.ledger import Mark, finite, line_text, parse_line
from tfdp_rec.core.ground.files import digest, replace_atomically, rows_at_a_time
from tfdp_rec.core.mechanism.tables import scatter
from tfdp_rec.distribute.sections import Lock

_SUFFIX = ".cluster-checkpoint"
_NAME = re.compile(rf"(\d+)-step-(\d+){re.escape(_SUFFIX)}$")
_HEADER = "training.json"
_OF_ONE = ("step", "ledger", "history", "files", "hash")  # what checkpoints of one training differ in
_PIECE_VALUES = 1 << 24


class Checkpoints:
    """The checkpoints of one training, in a directory that coordinator and servers share."""

    def __init__(self, directory: str, states: Sequence[ServerState], identity: Mapping[str, Any]):
        self.directory, self._states = os.path.abspath(directory), list(states)
        self._identity = json.loads(json.dumps(identity, default=str))
        os.makedirs(self.directory, mode=0o700, exist_ok=True)

    def save(self, step: int, mark: Mark | None = None, history: Entries | None = None) -> str:
        """Writes a checkpoint, removes those before it, and returns its path; `history` is spent beside the ledger."""
        older = self._paths()
        number = 1 + (int(_NAME.search(older[-1]).group(1)) if older else 0)  # type: ignore[union-attr]
        path = os.path.join(self.directory, f"{number:06d}-step-{step}{_SUFFIX}")
        with replace_atomically(path) as temporary:
            os.mkdir(temporary, mode=0o700)
            hashes: dict[str, str] = {}
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
                hashes |= {f"server-{index}/{name}": _hash(os.path.join(folder, name)) for name in state.files()}
            stand: dict[str, Any] = {"step": step, "ledger": None if mark is None else dataclasses.asdict(mark)}
            stand["history"] = None if history is None else history.dumps()
            with open(os.path.join(temporary, _HEADER), "wb") as file:
                file.write(line_text(finite({**self._identity, **stand, "files": hashes})))
        for before in older:
            shutil.rmtree(before)
        return path

    def stand(self) -> tuple[int, Mark | None] | None:
        """The attempts of the last checkpoint, and the ledger's mark then; None without a checkpoint."""
        paths = self._paths()
        return _stand(_header(paths[-1])) if paths else None

    def history(self) -> Entries:
        """What was spent on the model beside this training, as the last checkpoint says."""
        paths = self._paths()
        saved = _header(paths[-1]).get("history") if paths else None
        return Entries.loads(saved) if saved else Entries()

    def restore(self) -> int | None:
        """Puts the servers where the last checkpoint left them; returns its step, or None if there is none."""
        self._clean_up()
        if not self._paths():
            return None
        path = self._paths()[-1]
        header = _header(path)
        self._refuse_another(path, header)
        for name, expected in header["files"].items():
            if _hash(os.path.join(path, name)) != expected:
                raise ValueError(f"{os.path.join(path, name)} was changed after it was written{_WAY_OUT}.")
        for index, state in enumerate(self._states):
            state.restore(os.path.join(path, f"server-{index}"))
        return _stand(header)[0]

    def _refuse_another(self, path: str, header: Mapping[str, Any]) -> None:
        theirs = {key: value for key, value in header.items() if key not in _OF_ONE}
        mine = finite(self._identity)
        for key in {**theirs, **mine}:
            if theirs.get(key) != mine.get(key):
                raise ValueError(
                    f"{path} is of another training: its {key} is {theirs.get(key)}, here it is {mine.get(key)}."
                )

    def _paths(self) -> list[str]:
        found = sorted((int(m.group(1)), name) for name in os.listdir(self.directory) if (m := _NAME.match(name)))
        return [os.path.join(self.directory, name) for _, name in found]

    def _clean_up(self) -> None:
        """Removes what a killed process had begun to write."""
        for name in os.listdir(self.directory):
            if name.startswith(".") and _SUFFIX in name:
                shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)


_WAY_OUT = ": put the checkpoint back from a backup, or begin anew in another directory, and count what was spent"


def _header(path: str) -> dict[str, Any]:
    name = os.path.join(path, _HEADER)
    with open(name, "rb") as file:
        header = parse_line(file.read().removesuffix(b"\n"))
    if header is None:
        raise ValueError(f"{name} was changed after it was written{_WAY_OUT}.")
    return header


def _stand(header: Mapping[str, Any]) -> tuple[int, Mark | None]:
    return int(header["step"]), Mark(**header["ledger"]) if header["ledger"] else None


def _hash(path: str) -> str:
    try:
        return digest(path)
    except FileNotFoundError:
        return "missing"


# What one server writes and reads.


class ServerState:
    """Saves and restores the variables of one server, by name."""

    def __init__(
        self,
        lock: Lock,
        variables: Mapping[str, tf.Variable],
        before_save: Callable[[], None] | None = None,
        after_restore: Callable[[], None] | None = None,
    ):
        self._variables, self._before_save, self._after_restore = dict(variables), before_save, after_restore
        self._save = lock.section(self._write)
        self._restore = lock.section(self._read)

    def save(self, folder: str) -> None:
        """Writes the variables' values into a folder, as the server sees it."""
        self._save(tf.constant(folder))

    def restore(self, folder: str) -> None:
        """Sets the variables to what `save` wrote."""
        self._restore(tf.constant(folder))

    def files(self) -> list[str]:
        """The names of the files that `save` writes."""
        return [
            f"{number}-{piece}"
            for number, variable in enumerate(self._variables.values())
            for piece in range(_pieces(variable))
        ]

    def _write(self, folder: tf.Tensor) -> None:
        if self._before_save is not None:
            self._before_save()
        for number, variable in enumerate(self._variables.values()):

            def piece(index: tf.Tensor, number: int = number, variable: tf.Variable = variable) -> None:
                whole = _pieces(variable) == 1
                values = variable.read_value() if whole else tf.gather(variable, _rows(variable, index))
                tf.io.write_file(_file(folder, number, index), tf.io.serialize_tensor(values))

            _each_piece(variable, piece)

    def _read(self, folder: tf.Tensor) -> None:
        for number, variable in enumerate(self._variables.values()):

            def piece(index: tf.Tensor, number: int = number, variable: tf.Variable = variable) -> None:
                values = tf.io.parse_tensor(tf.io.read_file(_file(folder, number, index)), variable.dtype)
                if _pieces(variable) == 1:
                    variable.assign(tf.ensure_shape(values, variable.shape))
                else:
                    scatter("Update", variable, _rows(variable, index), values)

            _each_piece(variable, piece)
        if self._after_restore is not None:
            self._after_restore()


def _file(folder: tf.Tensor, number: int, piece: tf.Tensor) -> tf.Tensor:
    return tf.strings.join([folder, "/", str(number), "-", tf.strings.as_string(piece)])


def _rows_a_piece(variable: tf.Variable) -> int:
    return rows_at_a_time(variable.shape, _PIECE_VALUES)


def _pieces(variable: tf.Variable) -> int:
    """In how many pieces it is written; one, if its shape may change."""
    if not variable.shape.rank:
        return 1
    return max(1, -(-variable.shape[0] // _rows_a_piece(variable)))


def _rows(variable: tf.Variable, piece: tf.Tensor) -> tf.Tensor:
    start = tf.cast(piece, tf.int64) * _rows_a_piece(variable)
    return tf.range(start, tf.minimum(start + _rows_a_piece(variable), variable.shape[0]))


def _each_piece(variable: tf.Variable, act: Callable[[tf.Tensor], None]) -> None:
    def body(index: tf.Tensor) -> tuple[tf.Tensor]:
        act(index)
        return (index + 1,)

    if _pieces(variable) == 1:
        act(tf.constant(0))
    else:
        tf.while_loop(lambda i: i < _pieces(variable), body, (tf.constant(0),), parallel_iterations=1)
