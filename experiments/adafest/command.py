"""`python -m experiments.adafest`: how few table rows a private step may update, and what that costs in AUC.

  python -m experiments.adafest --quick                    clicks at ε 1: ten minutes on two cores
  python -m experiments.adafest --data train.txt           the Kaggle logs; a folder of day files for the stream too
  python -m experiments.adafest --task text --quick        sentiment of generated sentences, the token table sparse
  python -m experiments.adafest --task text --data SST-2   of SST-2's files, with public.csv to train on before

DPSGD, AdaFEST, FEST, AdaFEST+ and exponential selection train the same model at the same ε; the reduction is
how many times fewer table values a step updates than DPSGD's. "frozen" trains no table at all. The stream trains
day by day on drifting logs; speed lets all mechanisms step in turn; tuning shows DPSGD and AdaFEST at other learning
rates; sparsity counts the zeros of a batch's gradient. Run it again to go on where it stopped, or with more
--epsilons, --mechanisms or --seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from experiments.adafest.settings import Grid, Sizes, defaults
from tfdp_rec.settings import add_options, choose

PARTS = ("frontier", "stream", "speed", "tuning", "sparsity")
SPEED_ROUNDS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `study adafest`."""
    parser.add_argument("--quick", action="store_true", help="small sizes, epsilon 1 only")
    parser.add_argument("--task", choices=["clicks", "text"], default="clicks", help="default: %(default)s")
    parser.add_argument(
        "--data", metavar="PATH",
        help="Criteo file or folder of day files, or of text the folder of SST-2; left out, generated",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", help="default: runs/study-adafest, runs/study-adafest-text")
    add_options(parser, Sizes)
    add_options(parser, Grid)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: frontier, stream (of clicks), speed")


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, then writes results.json, the plots and report.md."""
    wanted, (sizes, grid) = parts(args), settings(args)
    from experiments.adafest import report as pages
    from experiments.adafest.sparsity import gradient_sparsity
    from experiments.adafest.speed import step_times
    from experiments.adafest.trainings import Trainings
    from experiments.study import Study

    problem = make_problem(args.task, args.data, sizes)
    folder = args.out or f"runs/study-adafest{'-text' if args.task == 'text' else ''}"
    config = {**dataclasses.asdict(sizes), "task": args.task, "data": args.data}
    study = Study(folder, config, say=lambda line: None)
    trainings = Trainings(sizes, problem, study, lambda line: print(line, flush=True))
    works: dict[str, Any] = {
        "frontier": lambda: trainings.frontier(grid),
        "stream": trainings.stream,
        "speed": lambda: step_times(trainings, SPEED_ROUNDS),
        "tuning": lambda: trainings.tuning(grid),
        "sparsity": lambda: gradient_sparsity(trainings),
    }
    results: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "grid": dataclasses.asdict(grid)}
    results |= {"data": args.data or "generated"} | {part: works[part]() for part in wanted}
    study.write("results.json", results)
    for part, plot in {"frontier": pages.plot_frontier, "stream": pages.plot_stream}.items():
        if part in results:
            plot(results[part], problem.metric, study.folder / f"{part}.png")
    study.report(pages.report(results, problem.metric))
    return 0


def parts(args: argparse.Namespace) -> list[str]:
    """What to do.

    Raises:
        ValueError: sentences have no days to stream.
    """
    if args.task == "text" and "stream" in (args.parts or []):
        raise ValueError("--parts stream is of --task clicks: generated sentences have no days.")
    usual = ["frontier", "stream", "speed"] if args.task == "clicks" else ["frontier", "speed"]
    return args.parts or usual


def settings(args: argparse.Namespace) -> tuple[Sizes, Grid]:
    """The sizes of a training and the grid of trainings that were asked for."""
    sizes, grid = defaults(args.task, args.quick)
    return choose(args, sizes), choose(args, grid)


def make_problem(task: str, data: str | None, sizes: Any) -> Any:
    """What to learn.

    Raises:
        FileNotFoundError: there are no such files.
    """
    from experiments.adafest import problems
    from experiments.adafest.sentence_files import SentenceFiles
    from experiments.adafest.sentences import SyntheticText
    from experiments.generated.clicks import SyntheticCriteo

    if task == "text":
        return problems.sentences(SentenceFiles(data) if data else SyntheticText(seed=2), public=sizes.public)
    logs = problems.FileLogs(data) if data else SyntheticCriteo(seed=2, drift=0.08, churn=0.0005)
    return problems.clicks(logs, sizes.hidden)
