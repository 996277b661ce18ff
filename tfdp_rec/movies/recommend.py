"""What `tfdp-rec recommend` does of a run on movies."""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np

from tfdp_rec.run_folder import servable_in


def answers(folder: pathlib.Path, history: list[int]) -> tuple[list[tuple[int, float]], int]:
    """What a run's servable answers: movies and scores, the best first; and how many movies it can answer.

    Args:
        folder: the run folder.
        history: ids of movies, the last one last.
    """
    import tensorflow as tf

    served = tf.saved_model.load(str(servable_in(folder)))
    answer = served.serve(tf.constant([history], tf.int64, shape=[1, len(history)]))
    pairs = zip(answer["movie_ids"][0].numpy().tolist(), answer["scores"][0].numpy().tolist())
    return [(movie, score) for movie, score in pairs if movie], answer["scores"].shape[1]


def run(args: argparse.Namespace) -> int:
    """Prints the recommendations."""
    folder = servable_in(args.folder)
    if args.among:
        raise ValueError("--among is of runs on logs of your own: a recommender of movies answers from all of them.")
    history = _numbers(args.history)
    titles = json.loads(folder.with_name("titles.json").read_text(encoding="utf-8"))
    unknown = [movie for movie in history if str(movie) not in titles]
    pairs, most = answers(folder, history)
    if (args.top_k or 1) > most:
        raise ValueError(f"--top-k must be at most {most}, what this run was exported for, got {args.top_k}.")
    pairs = pairs[: args.top_k]
    if args.json:
        rows = [{"movie_id": i, "title": titles[str(i)], "score": s} for i, s in pairs]
        print(json.dumps({"unknown": unknown, "recommendations": rows}))
        return 0
    for movie in history:
        print(f"watched  {movie:>7}  {titles.get(str(movie), '(not in the catalogue: ignored)')}")
    for movie, score in pairs:
        print(f"{score:7.3f}  {movie:>7}  {titles[str(movie)]}")
    return 0


def _numbers(history: list[str]) -> list[int]:
    try:
        return [int(np.int64(int(movie))) for movie in history]
    except (ValueError, OverflowError) as problem:
        raise ValueError(f"--history: ids of movies are whole numbers of 64 bits ({problem}).") from None
