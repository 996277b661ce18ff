"""`python -m experiments.spectral quality`.

  python -m experiments.spectral quality --data films-like books-like places-like
  python -m experiments.spectral quality --data Video.txt LastFM.txt ml-100k.inter --seeds 5
  python -m experiments.spectral quality --data ml-100k.inter --split leave-two-out --epsilon 8 4

Data are files of yours (see experiments/spectral/data.py for their forms) or generated. Everything goes into one
folder; run it again to go on where it stopped. Seeds make the noise repeat: results are for study, and none is private.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

DELTA = 1e-6
RIDGES = (30.0, 100.0, 300.0, 1000.0)
PRIVATE = ("DP popularity", "spectral cut", "ridge filter", "alternating", "spectral", "spectral by recency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `quality`."""
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help="files, or names of generated shapes")
    parser.add_argument("--split", choices=("users-apart", "leave-two-out"), default="users-apart")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[8.0, 3.0, 1.0])
    parser.add_argument("--seeds", type=int, default=3, help="noises for each budget; default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=PRIVATE, default=list(PRIVATE[:-1]))
    parser.add_argument("--ridges", nargs="+", type=float, default=list(RIDGES), help="of EASE; the best counts")
    parser.add_argument("--out", default="runs/spectral", metavar="FOLDER", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measures every cell and writes the tables."""
    from experiments.spectral import data, methods
    from experiments.study import Study

    study = Study(args.out, {"split": args.split, "delta": DELTA})
    rows = []
    for source in args.data:
        split = data.users_apart(source) if args.split == "users-apart" else data.leave_two_out(source)
        cells = works(methods.Problem.of(split), args)
        rows += table(split.name, study.cells(cells), args)
    study.report(report(rows, args))
    return 0


def works(problem: Any, args: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """What finds each cell of a data set."""
    from experiments.spectral import methods
    from tfdp_rec.core.mechanism.noise.words import seeded

    def cell(make: Callable[..., Any], *given: Any) -> Callable[[], dict[str, Any]]:
        return lambda: measured(make(problem, *given), problem.split)

    found = {name_of(problem.split.name, "popularity"): cell(methods.popularity)}
    for ridge in args.ridges:
        found[name_of(problem.split.name, "EASE", ridge)] = cell(methods.ease, ridge)
    for method, epsilon, seed in itertools.product(args.methods, args.epsilon, range(args.seeds)):
        make = getattr(methods, method.replace(" ", "_").lower())
        found[name_of(problem.split.name, method, epsilon, seed)] = cell(make, epsilon, DELTA, seeded(seed))
    return found


def name_of(*parts: Any) -> str:
    """Of a cell's file."""
    return "-".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts).replace(" ", "-")


def measured(answer: Any, split: Any) -> dict[str, Any]:
    """What a method's answers are worth: means over users, and their errors."""
    from tfdp_rec import metrics

    answers = answer(split.given, 20)
    values = {
        "recall@20": metrics.recall_at_k(answers, split.relevant),
        "nDCG@10": metrics.ndcg_at_k(answers[:, :10], split.relevant),
        "HR@10": metrics.hit_at_k(answers[:, :10], split.relevant),
    }
    return {name: dataclasses.asdict(metrics.Mean.of(found)) for name, found in values.items()}


def table(name: str, found: dict[str, dict[str, Any]], args: argparse.Namespace) -> list[list[str]]:
    """Rows of one data set: mean over seeds ± error over users and, added in squares, over seeds."""
    rows = [[name, "popularity", "–", *_cells([found[name_of(name, "popularity")]])]]
    for method, epsilon in itertools.product(args.methods, args.epsilon):
        results = [found[name_of(name, method, epsilon, seed)] for seed in range(args.seeds)]
        rows.append([name, method, f"{epsilon:g}", *_cells(results)])
    best = max((found[name_of(name, "EASE", ridge)] for ridge in args.ridges), key=lambda f: f["recall@20"]["value"])
    return [*rows, [name, "EASE", "–", *_cells([best])]]


def _cells(results: list[dict[str, Any]]) -> list[str]:
    from tfdp_rec.metrics import Mean

    cells = []
    for metric in ("recall@20", "nDCG@10", "HR@10"):
        values = [result[metric]["value"] for result in results]
        over_seeds = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        error = float(np.hypot(np.mean([result[metric]["error"] for result in results]), over_seeds))
        cells.append(str(Mean(float(np.mean(values)), error, results[0][metric]["users"])))
    return cells


def report(rows: list[list[str]], args: argparse.Namespace) -> str:
    """The page."""
    from experiments.tables import markdown

    lines = markdown(["data", "method", "ε", "recall@20", "nDCG@10", "HR@10"], rows)
    note = f"Split: {args.split}; δ = {DELTA:g}; the user is the unit; {args.seeds} seeds a budget; ± a standard error."
    return "\n".join(["# Recommendations from private sums", "", note, "", *lines, ""])
