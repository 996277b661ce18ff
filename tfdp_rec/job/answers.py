"""What `tfdp-rec recommend` prints: the answer of a run's SavedModel to one history."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from tfdp_rec.job.run_folder import servable_in


def run(args: argparse.Namespace) -> int:
    """Prints the recommendations."""
    import tensorflow as tf

    signatures = tf.saved_model.load(str(servable_in(args.folder))).signatures
    if "top_k" not in signatures:
        raise ValueError(
            f"{args.folder} was written by an older version, or not by tfdp-rec: write its servable anew with tfdp-rec "
            "export, from the model.keras or recommender.npz beside it."
        )
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
    rows = zip(*(answer[name][0].numpy().tolist() for name in ("ids", "titles", "scores")))
    found = [{"id": _plain(i), "title": t.decode(), "score": s} for i, t, s in rows if s > tf.float32.min]
    known = signatures["serving_default"]
    unknown = [item for item in history if not bool(known(history=tf.constant([[item]], kind))["known"][0])]
    _print(args, history, unknown, found)
    return 0


def ids_of(given: list[str], kind: Any, option: str) -> list[Any]:
    """Ids as a model of TensorFlow's dtype `kind` takes them."""
    if kind.name == "string":
        return given
    try:
        return [int(np.int64(int(item))) for item in given]
    except (ValueError, OverflowError) as problem:
        raise ValueError(f"{option}: the ids of this run are whole numbers of 64 bits ({problem}).") from None


def _plain(item: Any) -> Any:
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else item


def _print(args: argparse.Namespace, history: list[Any], unknown: list[Any], found: list[dict[str, Any]]) -> None:
    if args.json:
        print(json.dumps({"unknown": unknown, "recommendations": found}, ensure_ascii=False))
        return
    for item in history:
        print(f"{'had':>8}  {item}{'  (unknown: ignored)' if item in unknown else ''}")
    for each in found:
        print(f"{each['score']:8.3f}  {each['id']}{'  ' if each['title'] else ''}{each['title']}")
