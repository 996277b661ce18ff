"""A search among private trainings: what is drawn and still to do, and the best model so far.

It is in memory, or in a folder for its owner alone, from which it goes on after a crash. A ledger has one note where a
search begins and one where it ends, whatever lies between: of copies of a folder one search alone gives a model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Self

import keras

from tfdp_rec.core.claim.entries import new_id
from tfdp_rec.core.ground.files import Path, end_hold, hold, open_atomically, remove, restrict_to_owner

_STATE = "search.json"
_open = set[str]()  # folders of the searches of this process


class Search:
    """A search, held by this process as long as it goes on.

    Args:
        folder: Its folder, or None.
        about: What it is about, as JSON.
        payments: Payments of the accountant that pays for it.
        begin: Function that draws a new one: its "noise", the "runs" to make by the number of their settings, and the
            "names" that Keras has given.
    """

    # `state` has these, the search's "id", the id of the note in the ledger where it "stands", the "best" settings and
    # their "score", the "file" of the best model, and whether it has "ended". Runs leave no trace: their number is
    # secret.

    def __init__(self, folder: Path | None, about: Any, payments: Any, begin: Callable[[], dict[str, Any]]):
        self.model: Any = None
        self._folder = None if folder is None else os.path.realpath(folder)
        self._about, self._payments, self._begin = json.loads(json.dumps(about)), payments, begin

    def __enter__(self) -> Self:
        if self._folder is not None:
            if self._folder in _open:
                raise ValueError(f"{self._folder} is in use by another search of this process: give another folder.")
            hold(self._folder)
            _open.add(self._folder)
            restrict_to_owner(self._folder)
        try:
            self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        if self._folder is not None:
            _open.discard(self._folder)
            end_hold(self._folder)

    def _read(self) -> None:
        path = None if self._folder is None else os.path.join(self._folder, _STATE)
        if path is None or not os.path.exists(path):
            new = {"id": new_id(), "stands": new_id(), "best": None, "score": 0.0, "file": None, "ended": False}
            self.state = self._begin() | new
            self._write()
            self._payments.note_checkpoint(self.state["id"], "", self.state["stands"])
            return
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if found["about"] != self._about:
            raise ValueError(
                f"{self._folder} holds a search with other arguments: go on with those, or give another folder."
            )
        self.state = found["state"]
        self._payments.refuse_superseded(self.state["id"], self.state["stands"])
        if self.state["file"] is not None:
            self.model = keras.models.load_model(os.path.join(str(self._folder), self.state["file"]))

    def end_run(self, score: float, best: Any) -> None:
        """Notes that the first of the runs is done, and its score and model, if it is the best so far."""
        before, settings = self.state["file"], self.state["runs"][0]
        if best is not None:
            self.model = best
            self.state |= {"best": settings, "score": score}
            if self._folder is not None:
                self.state["file"] = f"{new_id()}.keras"
                best.save(os.path.join(self._folder, self.state["file"]))
        # In one write: a run that is made again after a crash must not be two.
        self.state["runs"] = self.state["runs"][1:]
        self._write()
        if self._folder is not None and before is not None and before != self.state["file"]:
            remove(os.path.join(self._folder, before))

    def end(self) -> None:
        """Ends the search, once; refused if a copy of it has ended."""
        if not self.state["ended"]:
            stands, ends = self.state["stands"], new_id()
            self._payments.note_checkpoint(self.state["id"], stands, ends, done=False)
            self.state |= {"stands": ends, "ended": True}
            self._write()
            self._payments.note_checkpoint(self.state["id"], ends, ends)

    def _write(self) -> None:
        if self._folder is not None:
            with open_atomically(os.path.join(self._folder, _STATE), private=True) as file:
                json.dump({"about": self._about, "state": self.state}, file)
