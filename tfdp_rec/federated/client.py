"""The phone's side of serving.

    clicks (on disk) -> padded history -> user encoder and attention (exported graph) -> noise -> 4 B + 2 bytes

A query is answered from the stored draw until a click is recorded or another model arrives, so that asking again
tells nothing new. The draw's key is the *number* of clicks, the model and the settings: all public. (Under a key
made of the clicks themselves the server would see whether two histories are equal.) The ledger is on disk before
the answer leaves, and a query beyond the budget is refused.

Reference:
    Liu et al., "PrivateRec", 2022, Algorithms 1 and 2; docs/privacy-privaterec.md, section 6.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.federated.ledger import BudgetSpent, Ledger, State
from tfdp_rec.federated.mechanism import AttentionMechanism
from tfdp_rec.noise import words

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


class PrivateClient:
    """One user's client, over an exported bundle and a ledger on disk.

    Args:
        bundle: Folder written by `serving.export_client`.
        ledger: Path of this user's ledger file.
        budget_epsilon: The most this user will spend in all, per clicked item.
        budget_delta: Failure probability at which the budget is measured.
        non_sensitive: Categories whose clicks need no protection.
        runtime: "saved_model" or "tflite": which exported graph to run.
        source: Where the randomness comes from.

    Raises:
        ValueError: On a budget out of range, a published calibration, or an unknown category or runtime.
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
        self._vectors, self._category = news["vectors"], news["category"].tolist()
        self._row = {name: row for row, name in enumerate(news["ids"].tolist())}
        unknown = set(non_sensitive) - set(self._category)
        if unknown:
            raise ValueError(f"non_sensitive names unknown categories {sorted(unknown)}.")
        self.non_sensitive = tuple(sorted(non_sensitive))
        self.budget_epsilon, self.budget_delta, self._source = budget_epsilon, budget_delta, source
        self._encode = _encoder(folder, runtime)
        self._ledger = Ledger(ledger)

    def record(self, news_id: str) -> None:
        """Remember a click.

        Args:
            news_id: An id of the bundle's news.

        Raises:
            ValueError: If the bundle has no such news.
        """
        if not news_id or news_id not in self._row:
            raise ValueError(f"news_id must be one of the bundle's news, got {news_id!r}.")
        state = self._ledger.load()
        state.clicks.append(news_id)
        self._ledger.save(state)

    def spent(self) -> float:
        """ε spent so far at the budget's δ."""
        return self._ledger.load().epsilon(self.budget_delta)

    def attention(self) -> NDArray[np.float64]:
        """This user's private attention vector; the same one until something public changes.

        Raises:
            BudgetSpent: If a new draw would cost more than the budget allows.
        """
        state = self._ledger.load()
        key = self._draw_key(state)
        if state.draw_key == key:
            return np.array(state.draw)
        history = state.clicks[-self._about["history_length"] :]
        sensitive = np.array([self._category[self._row[news]] not in self.non_sensitive for news in history])
        if sensitive.any():
            self._spend(state)
        state.draw, state.draw_key = self._release(history, sensitive).tolist(), key
        self._ledger.save(state)
        return np.array(state.draw)

    def query(self) -> bytes:
        """The message for the server: `attention`, packed.

        Raises:
            BudgetSpent: If a new draw would cost more than the budget allows.
        """
        return pack_query(self.attention())

    def close(self) -> None:
        """Release the ledger."""
        self._ledger.close()

    def _draw_key(self, state: State) -> str:
        public = [len(state.clicks), self._about["model"], self._about["mechanism"], self.non_sensitive]
        return json.dumps(public, sort_keys=True)

    def _spend(self, state: State) -> None:
        state.add(self.mechanism.settings())
        total = state.epsilon(self.budget_delta)
        if total > self.budget_epsilon:
            raise BudgetSpent(
                f"another answer would bring epsilon to {total:.3g}, above this user's budget of "
                f"{self.budget_epsilon:.3g} (delta {self.budget_delta:g})."
            )

    def _release(self, history: list[str], sensitive: NDArray[np.bool_]) -> NDArray[np.float64]:
        length, width = self._about["history_length"], self._vectors.shape[1]
        vectors = np.zeros((1, length, width), dtype=np.float32)
        mask = np.zeros((1, length), dtype=bool)
        padded = self.mechanism.padding_mask(len(history), self._source)
        for place, news in enumerate(history):
            row = 0 if padded[place] and sensitive[place] else self._row[news]
            vectors[0, place], mask[0, place] = self._vectors[row], True
        if not history:
            vectors[:], mask[:] = self._vectors[0], True
        clipped = self._encode(vectors, mask)[0]
        noise = self.mechanism.noise(clipped.shape, self._source)
        return self.mechanism.finish(clipped, noise if sensitive.any() else np.zeros_like(noise))


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


__all__ = ["BudgetSpent", "PrivateClient", "pack_query", "unpack_query"]
