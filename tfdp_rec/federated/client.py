"""The phone's side of serving.

    clicks (on disk) -> window, padded -> user encoder and attention (exported graph) -> noise -> 4 B + 2 bytes

A query is answered from the stored draw until a click is recorded or another model arrives, so that asking again
tells nothing new. The draw's key is the *number* of clicks, the model and the settings: all public. (Under a key
made of the clicks themselves the server would see whether two histories are equal.) The payment is on disk before the
answer is computed.

**Each click has its own budget**, and pays for the answers that its window was open for, no more. Once the next
answer would cost it more than the budget, it is left out: from then on it counts as the anonymous news, as if padded.
So there is always an answer, with the same noise, and which clicks are left out depends on how many answers there
were, never on what was clicked. News that the bundle does not have (any more), or whose vector is no number, count as
anonymous too.

Reference:
    Liu et al., "PrivateRec", 2022, Algorithms 1 and 2; docs/privacy-privaterec.md, section 6.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.federated.mechanism import AttentionMechanism
from tfdp_rec.files import writing
from tfdp_rec.noise import words
from tfdp_rec.privacy.profiles import composed_epsilon, releases_of
from tfdp_rec.spending.ledger import REPLACE, Ledger
from tfdp_rec.spending.ledger_lines import Mark, Snapshot

UNIT, DATA = "click", Snapshot(None, "clicks that one person is served by")

Encoder = Callable[[NDArray[np.float32], NDArray[np.bool_]], NDArray[np.float32]]


def pack_query(attention: ArrayLike) -> bytes:
    """A serving query on the wire: the number of weights (2 bytes), then 4 bytes each.

    Example:
        >>> len(pack_query([0.2, 0.3, 0.5]))
        14
    """
    values = np.asarray(attention, dtype="<f4")
    return struct.pack("<H", len(values)) + values.tobytes()


def unpack_query(message: bytes) -> NDArray[np.float32]:
    """The attention vector of a query.

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
    """What the phone remembers besides its ledger.

    Args:
        clicks: News ids, oldest first.
        draw_key: What the stored draw belongs to.
        draw: The released attention vector.
        mark: Where the ledger stood when this was written.
    """

    clicks: list[str] = dataclasses.field(default_factory=list)
    draw_key: str = ""
    draw: list[float] = dataclasses.field(default_factory=list)
    mark: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> State:
        """From a file; an empty one if there is none.

        Raises:
            ValueError: If the file is not one of these.
        """
        if not os.path.exists(path):
            return cls()
        try:
            with open(path, encoding="utf-8") as file:
                return cls(**json.load(file))
        except (ValueError, TypeError) as problem:
            raise ValueError(f"{path} does not hold clicks: restore it, or remove it to forget them.") from problem


class PrivateClient:
    """One user's client, over an exported bundle and a ledger on disk.

    Args:
        bundle: Folder written by `serving.export_client`.
        ledger: Path of this user's ledger; the clicks are beside it, in a file of the same name with `.clicks`.
        budget_epsilon: The most that answers may tell of one click, over all the answers that it is in.
        budget_delta: Failure probability at which the budget is measured.
        non_sensitive: Categories whose clicks need no protection.
        runtime: "saved_model" or "tflite": which exported graph to run.
        source: Where the randomness comes from.

    Raises:
        ValueError: On a budget that is out of range or less than one answer costs, a published calibration, an unknown
            category or runtime, or a ledger that is no evidence.
        FileNotFoundError: If the bundle lacks the graph that the runtime needs.
    """

    def __init__(
        self,
        bundle: str | Path,
        ledger: str | Path,
        budget_epsilon: float,
        budget_delta: float = 1e-5,
        non_sensitive: tuple[str, ...] = (),
        runtime: Literal["saved_model", "tflite"] = "saved_model",
        source: words.WordSource = words.os_entropy,
    ) -> None:
        if not (budget_epsilon > 0 and math.isfinite(budget_epsilon)):
            raise ValueError(f"budget_epsilon must be positive and finite, got {budget_epsilon}.")
        if not 0 <= budget_delta < 1:
            raise ValueError(f"budget_delta must be in [0, 1), got {budget_delta}.")
        folder = Path(bundle)
        self._about = json.loads((folder / "bundle.json").read_text(encoding="utf-8"))
        self.mechanism = AttentionMechanism.from_settings(self._about["mechanism"])
        self.mechanism.guarantee()
        news = np.load(folder / "news.npz")
        self._vectors, self._category = _finite(news["vectors"]), news["category"].tolist()
        self._row = {name: row for row, name in enumerate(news["ids"].tolist())}
        unknown = set(non_sensitive) - set(self._category)
        if unknown:
            raise ValueError(f"non_sensitive names unknown categories {sorted(unknown)}.")
        self.non_sensitive = tuple(sorted(non_sensitive))
        self.budget_epsilon, self.budget_delta, self._source = budget_epsilon, budget_delta, source
        self._encode, self._known = _encoder(folder, runtime), list[tuple[dict[DpEvent, int], bool]]()
        if not self._affords({}):
            raise ValueError(
                f"One answer at these settings costs more than budget_epsilon = {budget_epsilon:g}: no click could "
                "ever be used. Allow more, or ask for a bundle with more noise."
            )
        self._state_path = f"{ledger}.clicks"
        self._ledger = Ledger(ledger, UNIT, DATA, REPLACE)
        try:
            state = State.read(self._state_path)
            if state.mark:
                self._ledger.refuse_behind(0, Mark(*state.mark))
        except BaseException:
            self.close()
            raise

    def record(self, news_id: str) -> None:
        """Remember a click, also on news that the bundle does not have.

        Args:
            news_id: What was clicked.

        Raises:
            ValueError: If it is empty.
        """
        if not news_id:
            raise ValueError("news_id must not be empty: it is what was clicked.")
        state = State.read(self._state_path)
        state.clicks.append(news_id)
        self._save(state)

    def spent(self) -> float:
        """ε spent so far on the click that most was told of, at the budget's δ."""
        return self._ledger.epsilon(self.budget_delta)

    def attention(self) -> NDArray[np.float64]:
        """This user's private attention vector; the same one until something public changes."""
        state = State.read(self._state_path)
        key = self._draw_key(state)
        if state.draw_key == key:
            return np.array(state.draw)
        first = max(0, len(state.clicks) - self._about["history_length"])
        window = range(first, len(state.clicks))
        rows = [self._row.get(state.clicks[n], 0) for n in window]
        sensitive = np.array([self._protects(row) for row in rows], dtype=bool)
        used = self._used([n for n, protected in zip(window, sensitive) if protected])
        if used:
            self._ledger.pay(
                self.mechanism.event, label="answer", settings=self.mechanism.settings(), about=tuple(map(str, used))
            )
        shown = [row if n in used or not protected else 0 for n, row, protected in zip(window, rows, sensitive)]
        state.draw, state.draw_key = self._release(shown, sensitive).tolist(), key
        self._save(state)
        return np.array(state.draw)

    def query(self) -> bytes:
        """The message for the server: `attention`, packed."""
        return pack_query(self.attention())

    def close(self) -> None:
        """Release the ledger."""
        self._ledger.close()

    def _save(self, state: State) -> None:
        state.mark = list(dataclasses.astuple(self._ledger.mark))
        with writing(self._state_path, private=True) as file:
            json.dump(dataclasses.asdict(state), file)

    def _protects(self, row: int) -> bool:
        """Whether a click is private; on news that the bundle does not have (row 0) it always is."""
        return row == 0 or self._category[row] not in self.non_sensitive

    def _draw_key(self, state: State) -> str:
        public = [len(state.clicks), self._about["model"], self._about["mechanism"], self.non_sensitive]
        return json.dumps(public, sort_keys=True)

    # Budgets: one a click.

    def _used(self, clicks: list[int]) -> list[int]:
        """Those of the clicks whose budget has room for one answer more."""
        spent: dict[int, dict[DpEvent, int]] = {click: {} for click in clicks}
        for paid in self._ledger.paid:
            for item in paid.about or ():
                counts = spent.get(int(item), {})  # else of a click that the window has left behind
                for release, count in releases_of(paid.event, paid.attempts).items():
                    counts[release] = counts.get(release, 0) + count
        by_load = sorted(clicks, key=lambda click: -sum(spent[click].values()))  # the dearest decides for most others
        return sorted(click for click in by_load if self._affords(spent[click]))

    def _affords(self, spent: dict[DpEvent, int]) -> bool:
        """Whether one answer more fits after these; who has spent less than one that fits, fits too."""
        more = {**spent, self.mechanism.event: spent.get(self.mechanism.event, 0) + 1}
        for known, fits in self._known:
            cheaper, dearer = (more, known) if fits else (known, more)
            if all(count <= dearer.get(release, 0) for release, count in cheaper.items()):
                return fits
        fits = composed_epsilon(more, self.budget_delta) <= self.budget_epsilon
        self._known.append((more, fits))
        return fits

    def _release(self, rows: list[int], sensitive: NDArray[np.bool_]) -> NDArray[np.float64]:
        """From the window's rows, 0 for those that are left out; every position that is there is padded anew."""
        length, width = self._about["history_length"], self._vectors.shape[1]
        vectors = np.zeros((1, length, width), dtype=np.float32)
        mask = np.zeros((1, length), dtype=bool)
        padded = self.mechanism.padding_mask(len(rows), self._source)
        for place, row in enumerate(rows):
            shown = 0 if padded[place] and sensitive[place] else row
            vectors[0, place], mask[0, place] = self._vectors[shown], True
        if not rows:
            vectors[:], mask[:] = self._vectors[0], True
        clipped = self._encode(vectors, mask)[0]
        noise = self.mechanism.noise(clipped.shape, self._source)
        return self.mechanism.finish(clipped, noise if sensitive.any() else np.zeros_like(noise))


def _finite(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors that are no numbers as the anonymous one (row 0), and that as zeros if it is none."""
    whole = np.asarray(np.isfinite(vectors).all(axis=1, keepdims=True))
    return np.where(whole, vectors, np.where(whole[0], vectors[0], 0.0)).astype(np.float32)


def _encoder(folder: Path, runtime: str) -> Encoder:
    if runtime == "saved_model":
        return _saved_model(folder / "saved_model")
    if runtime == "tflite":
        return _tflite(folder / "client.tflite")
    raise ValueError(f"runtime must be 'saved_model' or 'tflite', got {runtime!r}.")


def _saved_model(path: Path) -> Encoder:
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is missing from the bundle.")
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    run = loaded.signatures["attention"]

    def encode(vectors: NDArray[np.float32], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        return run(vectors=tf.constant(vectors), mask=tf.constant(mask))["attention"].numpy()

    encode.keep = loaded  # type: ignore[attr-defined]  # the signatures die with what was loaded
    return encode


def _tflite(path: Path) -> Encoder:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing from the bundle; export_client says when it is made.")
    import tensorflow as tf

    run: Any = tf.lite.Interpreter(str(path)).get_signature_runner("attention")
    return lambda vectors, mask: run(vectors=vectors, mask=mask)["attention"]
