"""An approximate index of the items of a released two-tower, by faiss: an answer scores some of the items.

A score is q · x, of the query q of a history and the vector x of an item. The index has the vectors x − m, with m their
mean: that changes no order, since q · m is added to all scores of an answer, and the items then differ in direction.

    servable/assets.extra/index/items.faiss   the vectors, in lists of those that lie near each other
    servable/assets.extra/index/index.json    digests of the model and of the vectors, m, settings, the measured recall

No graph can ask it, so it answers in Python, beside the SavedModel, in place of three signatures; `among`, histories
without a known item, and answers for which it finds too few items are the SavedModel's own. A SavedModel that replaces
the folder takes the index of the old one away. It is made of the released model alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfdp_rec.core.ground.files import Path, digest, replace_atomically
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.datasets.log import NO_ITEM

FOLDER = pathlib.Path("assets.extra") / "index"  # TensorFlow Serving reads nothing there
MEASURED = 100  # items of an answer whose recall is measured
_ITEMS, _ABOUT = "items.faiss", "index.json"
_FEWEST_ITEMS = 50_000  # with fewer, all of them are scored as quickly
_LEAST_RECALL, _ENOUGH_RECALL = 0.95, 0.99
_ASKED, _HISTORY = 128, 10  # histories of each kind, and their length


def write_index(servable: Path) -> dict[str, Any]:
    """Makes the index of a SavedModel's items, and measures it; returns what its `index.json` says, and its folder.

    The items are divided into about 4 √M lists. The number of those that an answer searches is doubled until the
    recall is 0.99, to at most a quarter of them.

    Args:
        servable: Folder of the SavedModel of a `TwoTower`.

    Raises:
        ImportError: The extra `ann` is missing.
        ValueError: The model does not answer by products with the vectors of its items, has less than 50,000 of them,
            or the index would have a recall below 0.95.
        OSError: The folder holds no SavedModel, or cannot be written.
    """
    faiss, servable = optional("faiss", "ann"), pathlib.Path(servable)
    if not (servable / "saved_model.pb").is_file():
        raise FileNotFoundError(f"{servable.parent} holds no exported model (expected {servable}).")
    about: dict[str, Any] = {"model": _digest_model(servable)}
    loaded = tf.saved_model.load(str(servable))
    if not hasattr(loaded, "to_outputs"):
        raise ValueError(
            f"{servable} does not answer by products with vectors of its items; only a TwoTower does, exported by this "
            "version (tfdp-rec export)."
        )
    vectors = loaded.answers.candidates.numpy()
    vectors -= (mean := vectors.mean(axis=0))
    if len(vectors) < _FEWEST_ITEMS:
        raise ValueError(
            f"{servable} has {len(vectors)} items; below {_FEWEST_ITEMS} every item is scored as quickly as an index "
            "is asked, so none is written: serve it as it is."
        )
    lists = 2 ** round(math.log2(4 * math.sqrt(len(vectors))))
    index = faiss.index_factory(vectors.shape[1], f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    index.nprobe = max(1, lists // 32)
    while (recall := _measure(loaded, index, mean)) < _ENOUGH_RECALL and index.nprobe < lists // 4:
        index.nprobe *= 2
    if recall < _LEAST_RECALL:
        raise ValueError(
            f"The index would find {recall:.3f} of the best {MEASURED} items, less than {_LEAST_RECALL}: none is "
            "written; serve the model as it is."
        )
    about |= {"items": len(vectors), "lists": lists, "probes": index.nprobe, "recall": recall, "mean": mean.tolist()}
    (servable / FOLDER).parent.mkdir(exist_ok=True)
    with replace_atomically(servable / FOLDER) as temporary:
        (folder := pathlib.Path(temporary)).mkdir()
        (folder / _ITEMS).write_bytes(faiss.serialize_index(index))
        about["vectors"] = digest(folder / _ITEMS)
        (folder / _ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    return {**about, "folder": str(servable / FOLDER)}


def open_signatures(loaded: Any, servable: Path) -> dict[str, Any]:
    """The signatures of a SavedModel that was loaded; by its index, if there is one."""
    signatures, folder = dict(loaded.signatures), pathlib.Path(servable) / FOLDER
    if not folder.exists():
        return signatures
    faiss = optional("faiss", "ann")
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        mean = np.array(about["mean"], np.float32)
        held = about["model"] == _digest_model(pathlib.Path(servable)) and about["vectors"] == digest(folder / _ITEMS)
    except (OSError, ValueError, KeyError, TypeError):
        held = False
    if not held:
        raise ValueError(
            f"{folder} is broken, or another model's index: remove it, and make it anew with tfdp-rec index."
        )
    index = faiss.read_index(str(folder / _ITEMS))
    for name in ("serving_default", "top_k", "ragged"):
        signatures[name] = IndexedQuestion(signatures[name], loaded, index, mean)
    return signatures


class IndexedQuestion:
    """A signature that the index answers; where it cannot, the SavedModel, for these histories alone."""

    def __init__(self, question: Any, loaded: Any, index: Any, mean: NDArray[np.float32]):
        self.structured_input_signature = question.structured_input_signature
        self._loaded, self._index, self._mean = loaded, index, mean
        self._exact, usual = (loaded.signatures[name] for name in ("top_k", "serving_default"))
        kind = loaded.ids.dtype
        self._padding = "" if kind == tf.string else NO_ITEM
        self._k = usual(history=tf.zeros([1, 0], kind))["ids"].shape[1]

    def __call__(self, **asked: Any) -> dict[str, tf.Tensor]:
        if "lengths" in asked:
            rows = tf.RaggedTensor.from_row_lengths(asked["items"], asked["lengths"])
            asked["history"] = rows.to_tensor(self._padding)
        history, k = asked["history"], int(asked.get("k", self._k))
        known, slots, scores = self.search(history, k)
        found: dict[str, tf.Tensor] = self._loaded.to_outputs(known, tf.constant(slots), tf.constant(scores))
        short = (slots < 0).any(axis=1)
        if short.any():
            exact = self._exact(history=tf.boolean_mask(history, short), k=tf.constant(k))
            found = {name: tf.tensor_scatter_nd_update(found[name], tf.where(short), exact[name]) for name in found}
        return found

    def search(self, history: tf.Tensor, k: int) -> tuple[tf.Tensor, NDArray[np.int64], NDArray[np.float32]]:
        """Slots of the histories, and slots and scores of the k best that they do not hold; −1 for what is missing."""
        known, queries = (each.numpy() for each in self._loaded.encode(history))
        lengths = (known >= 0).sum(axis=1)
        scores, slots = self._index.search(queries, k + int(lengths.max(initial=0)))
        gone = np.array([np.isin(row, seen) for row, seen in zip(slots, known)], bool)
        # The query of a history without a known item is like no other, and its recall was not measured.
        slots[gone.reshape(slots.shape) | (lengths == 0)[:, None]] = -1
        best = np.argsort(slots < 0, axis=1, kind="stable")[:, :k]  # those that are left, in their order
        scores += queries @ self._mean[:, None]
        return known, np.take_along_axis(slots, best, axis=1), np.take_along_axis(scores, best, axis=1)


def _measure(loaded: Any, index: Any, mean: NDArray[np.float32]) -> float:
    """The share of the exact answers that the index gives; of three kinds of histories the least."""
    exact = loaded.signatures["top_k"]
    indexed = IndexedQuestion(exact, loaded, index, mean)
    places = np.linspace(0, len(loaded.ids.numpy()) - 1, _ASKED * _HISTORY).astype(int)
    mixed = tf.transpose(tf.reshape(tf.gather(loaded.ids, places), [_HISTORY, _ASKED]))
    single = mixed[:, :1]
    alike = tf.concat([single, exact(history=single, k=tf.constant(_HISTORY - 1))["ids"]], axis=1)
    recalls = []
    for history in (single, alike, mixed):
        wanted, _ = loaded.encode(exact(history=history, k=tf.constant(MEASURED))["ids"])
        _, found, _ = indexed.search(history, MEASURED)
        recalls.append(np.mean([np.isin(*rows).mean() for rows in zip(wanted.numpy(), found)]))
    return float(min(recalls))


def _digest_model(servable: pathlib.Path) -> str:
    """SHA-256 of the graph and of all variables."""
    files = [servable / "saved_model.pb", *sorted((servable / "variables").iterdir())]
    return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()
