"""`tfdp-rec recommend`: the answer of a run's SavedModel to one history.

  tfdp-rec recommend --history 318 296 593        of the newest run in runs/
  tfdp-rec recommend runs/spring --history sku-17 sku-4 --top-k 5
  tfdp-rec recommend runs/spring                  for an empty history

RUN is a folder that `tfdp-rec train` wrote, or its part `release`. Ids are those of the files, the last one last; ids
that the model does not know are named and ignored; the answer leaves out what the history holds.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import numpy as np

from tfdp_rec.cli import quiet
from tfdp_rec.cli.commands import escape
from tfdp_rec.job.run_folder import find_servable
from tfdp_rec.settings import integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `recommend`."""
    parser.add_argument("folder", metavar="RUN", nargs="?", help="a run folder; default: the newest in runs/")
    parser.add_argument("--history", nargs="*", default=[], metavar="ID", help="ids, the last one last")
    parser.add_argument("--top-k", type=integer, metavar="K", help="items to answer (default: what the run was given)")
    parser.add_argument("--among", nargs="+", metavar="ID", help="answer these items alone")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the recommendations."""
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k must be positive, got {args.top_k}.")
    folder = _newest() if args.folder is None else args.folder
    servable = find_servable(folder)
    if not (servable / "saved_model.pb").is_file():
        raise FileNotFoundError(f"{folder} holds no exported model (expected {servable}).")
    quiet.import_tensorflow()
    import tensorflow as tf

    from tfdp_rec.serving.item_index import open_signatures

    loaded = tf.saved_model.load(str(servable))
    signatures = open_signatures(loaded, servable)
    if "top_k" not in signatures:
        raise ValueError(
            f"{folder} was not written by tfdp-rec: write its servable with tfdp-rec export."
        )
    usual = signatures["serving_default"]
    kind = usual.structured_input_signature[1]["history"].dtype
    history = ids_of(args.history, kind, "--history")
    asked: dict[str, Any] = {"history": tf.constant([history], kind, [1, len(history)])}
    name = "serving_default"
    if args.top_k is not None or args.among:
        k = args.top_k or usual(history=asked["history"])["ids"].shape[1]
        # There are no more answers than items, and the memory of padded ones is that of as many as were asked for.
        name, asked["k"] = "top_k", tf.constant(min(k, len(loaded.ids.numpy())), tf.int32)
    if args.among:
        name, asked["allowed"] = "among", tf.constant(ids_of(args.among, kind, "--among"), kind)
    answer = signatures[name](**asked)
    rows = zip(*(answer[name][0].numpy().tolist() for name in ("ids", "titles", "scores")))
    found = [{"id": _plain(i), "title": t.decode(), "score": s} for i, t, s in rows if s > tf.float32.min]
    unknown = [item for item in history if not bool(usual(history=tf.constant([[item]], kind))["known"][0])]
    if args.json:
        print(escape(json.dumps({"unknown": unknown, "recommendations": found}, ensure_ascii=False)))
        return 0
    for item in history:
        print(f"{'had':>8}  {escape(item)}{'  (unknown: ignored)' if item in unknown else ''}")
    for each in found:
        print(f"{each['score']:8.3f}  {escape(each['id'])}{'  ' if each['title'] else ''}{escape(each['title'])}")
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


def _newest() -> str:
    """The run that was finished last, of those in `runs`; says which."""
    runs = [run for run in pathlib.Path("runs").glob("*") if find_servable(run).is_dir()]
    if not runs:
        raise FileNotFoundError("There is no run in runs/ here: name a run folder, or make one with tfdp-rec train.")
    newest = max(runs, key=lambda run: find_servable(run).stat().st_mtime)
    print(f"of {newest}:", file=sys.stderr)
    return str(newest)
