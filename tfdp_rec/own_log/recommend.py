"""What `tfdp-rec recommend` does of a run on a log of one's own."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np

from tfdp_rec.run_folder import servable_in


def run(args: argparse.Namespace) -> int:
    """Prints the recommendations."""
    import tensorflow as tf

    signatures = tf.saved_model.load(str(servable_in(args.folder))).signatures
    kind = signatures["serving_default"].structured_input_signature[1]["history"].dtype
    history = ids_of(args.history, kind, "--history")
    asked: dict[str, Any] = {"history": tf.constant([history], kind, [1, len(history)])}
    name = "serving_default"
    if args.top_k is not None or args.among:
        usual = args.top_k or signatures[name](history=asked["history"])["ids"].shape[1]
        name, asked["k"] = "top_k", tf.constant(usual, tf.int32)
    if args.among:
        name, asked["allowed"] = "among", tf.constant(ids_of(args.among, kind, "--among"), kind)
    answer = signatures[name](**asked)
    found = [{"id": _plain(i), "title": t.decode(), "score": s} for i, t, s in _first(answer) if s > tf.float32.min]
    unknown = [item for item in history if not _known(signatures["serving_default"], item, kind)]
    _print(args, history, unknown, found)
    return 0


def first_answers(folder: str | os.PathLike[str]) -> list[tuple[Any, str]]:
    """Ids and titles that a run answers somebody who has had nothing yet, the best first.

    Args:
        folder: the run folder.
    """
    import tensorflow as tf

    serve = tf.saved_model.load(str(servable_in(folder))).signatures["serving_default"]
    kind = serve.structured_input_signature[1]["history"].dtype
    answer = serve(history=tf.constant([[]], kind, [1, 0]))
    return [(_plain(item), _plain(title)) for item, title, score in _first(answer) if score > tf.float32.min]


def ids_of(given: list[str], kind: Any, option: str) -> list[Any]:
    """Ids as the model takes them.

    Args:
        given: as typed.
        kind: TensorFlow's dtype of the model's ids.
        option: by which they were given.

    Raises:
        ValueError: the model's are whole numbers, and these are not.
    """
    if kind.name == "string":
        return given
    try:
        return [int(np.int64(int(item))) for item in given]
    except (ValueError, OverflowError) as problem:
        raise ValueError(f"{option}: the ids of this run are whole numbers of 64 bits ({problem}).") from None


def _first(answer: Any) -> list[tuple[Any, ...]]:
    return list(zip(*(answer[name][0].numpy().tolist() for name in ("ids", "titles", "scores"))))


def _plain(item: Any) -> Any:
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else item


def _known(signature: Any, item: Any, kind: Any) -> bool:
    import tensorflow as tf

    return bool(signature(history=tf.constant([[item]], kind))["known"][0])


def _print(args: argparse.Namespace, history: list[Any], unknown: list[Any], found: list[dict[str, Any]]) -> None:
    if args.json:
        print(json.dumps({"unknown": unknown, "recommendations": found}, ensure_ascii=False))
        return
    for item in history:
        print(f"{'had':>8}  {item}{'  (unknown: ignored)' if item in unknown else ''}")
    for each in found:
        print(f"{each['score']:8.3f}  {each['id']}{'  ' if each['title'] else ''}{each['title']}")
