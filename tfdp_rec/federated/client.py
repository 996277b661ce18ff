"""The phone's side of serving.

    clicks (on disk) -> window, padded -> user encoder and attention (exported graph) -> noise -> 4 B + 2 bytes

A query is answered from the stored draw until a click is recorded or another model arrives, so that asking again
tells nothing new. The draw's key is the *number* of clicks, the model and the settings: all public. (Under a key
made of the clicks themselves the server would see whether two histories are equal.) The payment is on disk before the
answer is computed.

**What was clicked is the phone's own record**: the news' id, and the category that it was shown in. A bundle is only
looked up for today's vectors. News that it lacks (any more), or whose vector is no number, count as the anonymous news,
and are noised and paid for as all are; its graph is read before it runs (`graphs.py`).

**Each click has its own budget**, and pays for the answers that its window was open for, no more. Once the next
answer would cost it more than the budget, it is left out: from then on it counts as the anonymous news, as if padded.
So there is always an answer, with the same noise, and which clicks are left out depends on how many answers there
were, never on what was clicked.

**What a person declares non-sensitive is sent as it is**, and paid for as what it is: without bound. `spent` leaves
such clicks out as long as they are declared. A click whose declaration is withdrawn counts, and is used no more.

Reference:
    Liu et al., "PrivateRec", 2022, Algorithms 1 and 2; docs/privacy-privaterec.md, section 6.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import struct
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.claim.events import DpEvent
from tfdp_rec.core.claim.ledger import Mark, Payment, Snapshot
from tfdp_rec.core.claim.profiles import epsilon_of_releases, releases_of
from tfdp_rec.core.ground.files import open_atomically
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import accounting, graphs
from tfdp_rec.federated.mechanism import AttentionMechanism
from tfdp_rec.sums.fixed_point import event_with

DATA = Snapshot(None, "clicks that one person is served by")
FORMAT = "tfdp_rec bundle 2"
MOST_HISTORY = 1_000


def pack_query(attention: ArrayLike) -> bytes:
    """A serving query on the wire: the number of weights (2 bytes), then 4 bytes each."""
    values = np.asarray(attention, dtype="<f4")
    return struct.pack("<H", len(values)) + values.tobytes()


def unpack_query(message: bytes) -> NDArray[np.float32]:
    """The attention vector of a query, from its `message` on the wire.

    Raises:
        ValueError: If the message is not a query.

    Example:
        >>> unpack_query(pack_query([0.25, 0.75])).tolist()
        [0.25, 0.75]
    """
    if len(message) < 2 or len(message) != 2 + 4 * struct.unpack_from("<H", message)[0]:
        raise ValueError(f"message of {len(message)} bytes is not a query.")
    return np.frombuffer(message, dtype="<f4", offset=2).astype(np.float32)


@dataclasses.dataclass
class State:
    """What the phone remembers besides its ledger: its clicks, the last draw, and the ledger's mark."""

    # A click is its news, its category, and an id of its own under which it is paid for. No other click ever has it,
    # also where this file was lost or is an older copy.
    clicks: list[list[str]] = dataclasses.field(default_factory=list)
    draw_key: str = ""
    draw: list[float] = dataclasses.field(default_factory=list)
    mark: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> State:
        """The state in a file; an empty one if there is none."""
        if not os.path.exists(path):
            return cls()
        try:
            with open(path, encoding="utf-8") as file:
                state = cls(**json.load(file))
            if any(not isinstance(click, list) or len(click) != 3 for click in state.clicks):
                raise ValueError("a click has a news id, a category and a place.")
        except (ValueError, TypeError) as problem:
            raise ValueError(
                f"{path} does not hold clicks: restore it, or remove it and its ledger to forget them."
            ) from problem
        return state


class PrivateClient:
    """One user's client, over an exported bundle and a ledger on disk.

    Args:
        bundle: Folder written by `serving.export_client`.
        ledger: Path of this user's ledger; the clicks are beside it, in a file of the same name with `.clicks`.
            One that is gone while the clicks are there is refused.
        budget_epsilon: Largest ε of one click, over all the answers that it is in.
        budget_delta: Failure probability at which the budget is measured.
        non_sensitive: Categories whose clicks, as the phone showed them, need no protection.
        runtime: Name of the bundle's graph to run: "graph" or "tflite".
        source: Source of the random words. Answers of words other than the operating system's are booked without bound.

    Raises:
        ValueError: On a budget that is out of range or less than one answer costs, a published calibration, an unknown
            runtime, a bundle that a phone does not run, or a ledger that is no evidence.
        FileNotFoundError: If the bundle lacks the graph that the runtime needs.
    """

    def __init__(
        self,
        bundle: str | Path,
        ledger: str | Path,
        budget_epsilon: float,
        budget_delta: float = 1e-5,
        non_sensitive: tuple[str, ...] = (),
        runtime: Literal["graph", "tflite"] = "graph",
        source: words.WordSource = words.os_entropy,
    ) -> None:
        if not (budget_epsilon > 0 and math.isfinite(budget_epsilon)):
            raise ValueError(f"budget_epsilon must be positive and finite, got {budget_epsilon}.")
        if not 0 <= budget_delta < 1:
            raise ValueError(f"budget_delta must be in [0, 1), got {budget_delta}.")
        folder = Path(bundle)
        self._about = _read_about(folder)
        self.mechanism = AttentionMechanism.from_settings(self._about["mechanism"])
        self.mechanism.guarantee()
        self._row, self._vectors = _news(folder)
        self._encode = _encoder(folder, runtime, self._about["history_length"], self._vectors.shape[1], self.mechanism)
        self.non_sensitive = tuple(sorted(non_sensitive))
        self.budget_epsilon, self.budget_delta, self._source = budget_epsilon, budget_delta, source
        self._known: list[tuple[dict[DpEvent, int], bool]] = []
        if not self._affords({}):
            raise ValueError(
                f"One answer at these settings costs more than budget_epsilon = {budget_epsilon:g}: no click could "
                "ever be used. Allow more, or ask for a bundle with more noise."
            )
        # An app records clicks in one thread while another answers: `_answering` is held for a whole answer, so that
        # budgets are asked one answer at a time, and `_writing` while the clicks' file is read and written back.
        self._answering, self._writing = threading.Lock(), threading.Lock()
        self._state_path = f"{ledger}.clicks"
        state = State.read(self._state_path)
        self._ledger = accounting.open_ledger(ledger, DATA, Mark(*state.mark) if state.mark else None)

    def record(self, news_id: str, category: str = "") -> None:
        """Remember a click, also on news that the bundle does not have.

        Args:
            news_id: Id of the clicked news.
            category: Category that it was shown in; a click without one is always protected.

        Raises:
            ValueError: If the id is empty.
        """
        if not news_id:
            raise ValueError("news_id must not be empty: it is what was clicked.")
        with self._writing:
            state = State.read(self._state_path)
            state.clicks.append([news_id, category, secrets.token_hex(8)])
            self._save(state)

    def spent(self) -> float:
        """ε spent so far, at the budget's δ, of the undeclared click with the largest sum of payments."""
        clicks = State.read(self._state_path).clicks
        declared = {click[2] for click in clicks if not self._protects(click)}
        return accounting.epsilon(self._ledger.paid, self.budget_delta, declared)

    def attention(self) -> NDArray[np.float64]:
        """This user's private attention vector; the same one until something public changes."""
        with self._answering:
            return self._answer()

    def query(self) -> bytes:
        """The message for the server: `attention`, packed."""
        return pack_query(self.attention())

    def close(self) -> None:
        """Release the ledger."""
        self._ledger.close()

    def _answer(self) -> NDArray[np.float64]:
        """The stored draw, or one that is paid for now."""
        state = State.read(self._state_path)
        key = self._draw_key(state)
        if state.draw_key == key:
            return np.array(state.draw)
        window = state.clicks[-self._about["history_length"] :]
        protected = np.array([self._protects(click) for click in window], dtype=bool)
        used = self._find_room([click[2] for click in window if self._protects(click)])
        exact = [click[2] for click in window if not self._protects(click)]
        payments = accounting.exact_payments(self._ledger, exact)
        if used:
            event = event_with(self._source, self.mechanism.event)
            payments.append(Payment(event, 1, "answer", self.mechanism.settings(), about=tuple(used)))
        for payment in payments:
            self._ledger.pay(**vars(payment))
        shown = [self._row.get(news, 0) if click in {*used, *exact} else 0 for news, _, click in window]
        drawn = self._release(shown, protected)
        with self._writing:
            state = State.read(self._state_path)  # anew: clicks may have been recorded since
            state.draw, state.draw_key = drawn.tolist(), key
            self._save(state)
        return drawn

    def _save(self, state: State) -> None:
        state.mark = list(dataclasses.astuple(self._ledger.mark))
        with open_atomically(self._state_path, private=True) as file:
            json.dump(dataclasses.asdict(state), file)

    def _protects(self, click: list[str]) -> bool:
        return not click[1] or click[1] not in self.non_sensitive

    def _draw_key(self, state: State) -> str:
        public = [len(state.clicks), self._about["model"], self._about["mechanism"], self.non_sensitive]
        return json.dumps(public, sort_keys=True)

    # Budgets: one a click.

    def _find_room(self, clicks: list[str]) -> list[str]:
        """Those of the clicks, by their ids, whose budget has room for one answer more."""
        spent: dict[str, dict[DpEvent, int]] = {click: {} for click in clicks}
        for paid in self._ledger.paid:
            for item in paid.about or ():
                counts = spent.get(item, {})  # else of a click that the window has left behind
                for release, count in releases_of(paid.event, paid.attempts).items():
                    counts[release] = counts.get(release, 0) + count
        by_load = sorted(clicks, key=lambda click: -sum(spent[click].values()))  # the dearest decides for most others
        fits = {click: self._affords(spent[click]) for click in by_load}
        return [click for click in clicks if fits[click]]

    def _affords(self, spent: dict[DpEvent, int]) -> bool:
        """Whether one answer more fits after these; a click that has spent less than one that fits, fits too."""
        more = {**spent, self.mechanism.event: spent.get(self.mechanism.event, 0) + 1}
        for known, fits in self._known:
            cheaper, dearer = (more, known) if fits else (known, more)
            if all(count <= dearer.get(release, 0) for release, count in cheaper.items()):
                return fits
        fits = epsilon_of_releases(more, self.budget_delta) <= self.budget_epsilon
        self._known.append((more, fits))
        return fits

    def _release(self, rows: list[int], protected: NDArray[np.bool_]) -> NDArray[np.float64]:
        """From the window's rows, 0 for those that are left out; every position that is there is padded anew."""
        length, width = self._about["history_length"], self._vectors.shape[1]
        vectors = np.zeros((1, length, width), dtype=np.float32)
        mask = np.zeros((1, length), dtype=bool)
        padded = self.mechanism.padding_mask((len(rows),), self._source)
        for place, row in enumerate(rows):
            shown = 0 if padded[place] and protected[place] else row
            vectors[0, place], mask[0, place] = self._vectors[shown], True
        if not rows:
            vectors[:], mask[:] = self._vectors[0], True
        try:
            clipped = self._encode(vectors, mask)[0]
        except Exception:  # what fails for some clicks must not show: it counts as no number, which is noised
            clipped = np.full(self.mechanism.num_basis, np.nan)
        noise = self.mechanism.noise(clipped.shape, self._source)
        return self.mechanism.finish(clipped, noise if protected.any() else np.zeros_like(noise))


def _read_about(folder: Path) -> dict[str, Any]:
    """What bundle.json says, with sizes that a phone has room for."""
    about: dict[str, Any] = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{folder} is no bundle of this version ({FORMAT}): export it anew.")
    length = about["history_length"]
    if not isinstance(length, int) or not 1 <= length <= MOST_HISTORY:
        raise ValueError(f"history_length must be a whole number from 1 to {MOST_HISTORY}, got {length!r}.")
    return about


def _news(folder: Path) -> tuple[dict[str, int], NDArray[np.float32]]:
    news = np.load(folder / "news.npz")
    ids, vectors = news["ids"].tolist(), news["vectors"]
    if vectors.ndim != 2 or len(ids) != len(vectors) or not ids:
        raise ValueError(f"{folder / 'news.npz'} must hold one vector for each news: export the bundle anew.")
    return {name: row for row, name in enumerate(ids)}, _finite(vectors)


def _finite(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors that are no numbers as the anonymous one (row 0), and that as zeros if it is none."""
    whole = np.asarray(np.isfinite(vectors).all(axis=1, keepdims=True))
    return np.where(whole, vectors, np.where(whole[0], vectors[0], 0.0)).astype(np.float32)


def _encoder(folder: Path, runtime: str, length: int, width: int, mechanism: AttentionMechanism) -> graphs.Encoder:
    kinds = {"graph": ("attention.pb", graphs.encoder), "tflite": ("client.tflite", graphs.lite_encoder)}
    if runtime not in kinds:
        raise ValueError(f"runtime must be 'graph' or 'tflite', got {runtime!r}.")
    name, kind = kinds[runtime]
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder / name} is missing from the bundle; export_client says when it is made.")
    return kind((folder / name).read_bytes(), length, width, mechanism.num_basis)
