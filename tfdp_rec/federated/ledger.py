"""What one user has spent on serving, on that user's own disk.

The file holds the clicks, the releases so far (settings and how many of each) and the last draw. It is replaced as
a whole: written beside, synced, renamed, and the folder synced. A crash leaves the old file or the new one. A lock
keeps a second process out, so that two of them cannot spend the same budget.

A file that cannot be read is refused, not started anew: starting anew would forget what was spent.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
from pathlib import Path
from typing import Any

from tfdp_rec.federated import accounting
from tfdp_rec.federated.mechanism import AttentionMechanism
from tfdp_rec.files import writing

FORMAT = 1


class BudgetSpent(RuntimeError):
    """The next answer would cost more than the user allows."""


@dataclasses.dataclass
class State:
    """The content of a ledger.

    Args:
        clicks: News ids, oldest first.
        releases: (mechanism settings, count) of everything released.
        draw_key: What the stored draw belongs to.
        draw: The released attention vector.
    """

    clicks: list[str] = dataclasses.field(default_factory=list)
    releases: list[tuple[dict[str, Any], int]] = dataclasses.field(default_factory=list)
    draw_key: str = ""
    draw: list[float] = dataclasses.field(default_factory=list)

    def add(self, settings: dict[str, Any]) -> None:
        """Count one release with these settings."""
        for index, (known, count) in enumerate(self.releases):
            if known == settings:
                self.releases[index] = (known, count + 1)
                return
        self.releases.append((settings, 1))

    def epsilon(self, delta: float) -> float:
        """Everything released so far, composed."""
        accountant = accounting.ClientAccountant()
        for settings, count in self.releases:
            mechanism = AttentionMechanism.from_settings(settings)
            accountant.spend_history(mechanism.event, count)
        return accountant.epsilon(delta)


class Ledger:
    """A ledger file, locked for this process.

    Args:
        path: The file; it is made when missing, in a folder that must exist.

    Raises:
        ValueError: If the file cannot be read as a ledger.
        BlockingIOError: If another process has it open.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "ledger.json") as ledger:
        ...     ledger.save(State(clicks=["N1"]))
        ...     ledger.load().clicks
        ['N1']
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = open(self.path.with_suffix(".lock"), "w")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.load()
        except BaseException:
            self._lock.close()
            raise

    def load(self) -> State:
        """The stored state; an empty one if nothing was ever stored.

        Raises:
            ValueError: If the file cannot be read as a ledger.
        """
        if not self.path.exists():
            return State()
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError(f"format is not {FORMAT}.")
            state = State(**content)
            state.releases = [(dict(settings), int(count)) for settings, count in state.releases]
            return state
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{self.path} is not a readable ledger ({error}); restore it from a backup: without it "
                "nobody knows what this user has spent."
            ) from error

    def save(self, state: State) -> None:
        """Replace the file, durably.

        Args:
            state: What to store.
        """
        with writing(self.path, private=True) as file:
            json.dump({"format": FORMAT} | dataclasses.asdict(state), file)

    def close(self) -> None:
        """Let another process in."""
        self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
