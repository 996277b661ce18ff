"""Counting attempts: each is on disk before it is made.

A step that a worker was making when it died may have landed nowhere, on some servers or on all; the coordinator makes
it again, with another batch. The data was looked at both times, so both count. And a coordinator that dies must not
take its count with it: attempts are reserved in a file, synced, before the first of them is dispatched, in blocks. What
was reserved counts when the file is read again, dispatched or not.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import dp_accounting

from tfdp_rec.files import writing
from tfdp_rec.privacy import events

_FORMAT = "tfdp_rec attempts"


class Attempts:
    """A count of attempts by event, in a file if there is one.

    Args:
        path: of the file; None to keep the count in memory alone.

    Raises:
        ValueError: if the file is not one of these.

    Example:
        >>> attempts = Attempts(None)
        >>> block = attempts.reserve(dp_accounting.GaussianDpEvent(1.0), 2)
        >>> attempts.take(block), attempts.take(block), attempts.take(block)
        (True, True, False)
        >>> attempts.count
        2
    """

    def __init__(self, path: str | None):
        self._path, self._lock = path, threading.Lock()
        self.runs: list[tuple[dp_accounting.DpEvent, int]] = _read(path) if path and os.path.exists(path) else []
        self._left, self._block = 0, 0

    @property
    def count(self) -> int:
        """Attempts that were made, or may have been."""
        return sum(steps for _, steps in self.runs) - self._left

    def reserve(self, event: dp_accounting.DpEvent, number: int) -> int:
        """Counts attempts that are about to be made, and returns the number of their block.

        Those of the block before that were not made are taken back, and can no longer be made.
        """
        with self._lock:
            self._take_back()
            if self.runs and self.runs[-1][0] == event:
                self.runs[-1] = (event, self.runs[-1][1] + number)
            else:
                self.runs.append((event, number))
            self._write()
            self._left = number
            self._block += 1
            return self._block

    def take(self, block: int) -> bool:
        """Whether one more of a block may be made; it is counted as made from now on."""
        with self._lock:
            may = self._left > 0 and block == self._block
            self._left -= may
            return may

    def close(self) -> None:
        """No attempt is under way: those reserved and not made do not count."""
        with self._lock:
            self._take_back()
            self._write()

    def _take_back(self) -> None:
        if self._left:
            event, steps = self.runs.pop()
            if steps > self._left:
                self.runs.append((event, steps - self._left))
        self._left = 0

    def _write(self) -> None:
        if self._path is None:
            return
        runs = [[events.to_json(event), steps] for event, steps in self.runs]
        with writing(self._path) as file:
            json.dump({"format": _FORMAT, "runs": runs}, file)


def _read(path: str) -> list[tuple[dp_accounting.DpEvent, int]]:
    with open(path, encoding="utf-8") as file:
        found: Any = json.load(file)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f"{path} does not hold the attempts of a training.")
    return [(events.from_json(event), int(steps)) for event, steps in found["runs"]]
