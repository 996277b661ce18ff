"""`tfdp-rec recommend`."""

from __future__ import annotations

import argparse
import json
import os
import pathlib

HELP = """\
  tfdp-rec recommend runs/20260101-120000 --history 318 296 593
  tfdp-rec recommend runs/20260101-120000                      nothing watched yet: the most popular

RUN is a folder that `tfdp-rec train` wrote. Ids are those of the files; ids that are not in the catalogue are named and
ignored; the answer leaves out what the history holds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `recommend`."""
    parser.add_argument("folder", metavar="RUN", help="a run folder")
    parser.add_argument("--history", type=int, nargs="*", default=[], metavar="ID", help="movie ids, the last one last")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the recommendations."""
    folder = pathlib.Path(args.folder)
    if not (folder / "servable" / "saved_model.pb").is_file():
        raise FileNotFoundError(f"{folder} holds no exported model (expected {folder / 'servable'}).")
    titles = json.loads((folder / "titles.json").read_text(encoding="utf-8"))
    unknown = [movie for movie in args.history if str(movie) not in titles]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    served = tf.saved_model.load(str(folder / "servable"))
    answer = served.serve(tf.constant([args.history], tf.int64, shape=[1, len(args.history)]))
    pairs = [(i, s) for i, s in zip(answer["movie_ids"][0].numpy().tolist(), answer["scores"][0].numpy().tolist()) if i]
    if args.json:
        rows = [{"movie_id": i, "title": titles[str(i)], "score": s} for i, s in pairs]
        print(json.dumps({"unknown": unknown, "recommendations": rows}))
        return 0
    for movie in args.history:
        print(f"watched  {movie:>7}  {titles.get(str(movie), '(not in the catalogue: ignored)')}")
    for movie, score in pairs:
        print(f"{score:7.3f}  {movie:>7}  {titles[str(movie)]}")
    return 0
