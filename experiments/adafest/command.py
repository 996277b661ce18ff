"""`python -m experiments.adafest`: how few table rows a private step may update, and what that costs in AUC."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

HELP = """\
  python -m experiments.adafest --quick                    clicks at epsilon 1: ten minutes on two cores
  python -m experiments.adafest --data train.txt           the Kaggle logs; a folder of day files for the stream too
  python -m experiments.adafest --task text --quick        sentiment of generated sentences, the token table sparse

DPSGD, AdaFEST, FEST, AdaFEST+ and exponential selection train the same model at the same epsilon; the reduction is
how many times fewer table values a step updates than DPSGD's. "frozen" trains no table at all. The stream trains
day by day on drifting logs; speed lets all mechanisms step in turn; tuning shows DPSGD and AdaFEST at other learning
rates. Run it again to go on where it stopped, or with more --epsilons, --mechanisms or --seeds.
"""

PARTS = ("frontier", "stream", "speed", "tuning")
SPEED_ROUNDS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `study adafest`."""
    parser.add_argument("--quick", action="store_true", help="small sizes, epsilon 1 only")
    parser.add_argument("--task", choices=["clicks", "text"], default="clicks", help="default: %(default)s")
    parser.add_argument("--data", metavar="PATH", help="Criteo file or folder of day files; left out, generated logs")
    parser.add_argument("--out", metavar="FOLDER", help="default: runs/study-adafest, runs/study-adafest-text")
    parser.add_argument("--epsilons", nargs="+", type=float, metavar="EPSILON", help="default: 1 3 8")
    parser.add_argument("--mechanisms", nargs="+", metavar="NAME", help="of the frontier and of tuning; default: all")
    parser.add_argument("--thresholds", nargs="+", type=float, metavar="Z", help="AdaFEST's, in deviations of noise")
    parser.add_argument("--seeds", type=int, help="trainings of each point; default: 1")
    parser.add_argument("--steps", type=int, help="of each training")
    parser.add_argument("--examples", type=int, help="to train on")
    parser.add_argument("--batch-size", type=int, help="expected examples in a step")
    parser.add_argument("--learning-rate", type=float, metavar="ETA", help="of the tables")
    parser.add_argument("--dense-learning-rate", type=float, metavar="ETA", help="of Adam, for all else")
    parser.add_argument("--table-rates", nargs="+", type=float, metavar="ETA", help="that tuning tries")
    parser.add_argument("--dense-rates", nargs="+", type=float, metavar="ETA", help="that tuning tries")
    parser.add_argument("--hidden", nargs="+", type=int, metavar="WIDTH", help="default: 64 64; the paper: 598 x 4")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: frontier, stream (of clicks), speed")


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, then writes results.json, the plots and report.md."""
    from experiments.adafest import report as pages
    from experiments.adafest.speed import step_times
    from experiments.adafest.trainings import Study

    sizes, grid = settings(args)
    problem = make_problem(args.task, args.data, sizes)
    folder = Path(args.out or f"runs/study-adafest{'-text' if args.task == 'text' else ''}")
    study = Study(sizes, problem, folder / "cells", lambda line: print(line, flush=True))
    results: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "grid": dataclasses.asdict(grid)}
    results["data"] = args.data or "generated"
    works: dict[str, Any] = {
        "frontier": lambda: study.frontier(grid),
        "stream": study.stream,
        "speed": lambda: step_times(study, SPEED_ROUNDS),
        "tuning": lambda: study.tuning(grid),
    }
    for part in parts(args):
        results[part] = works[part]()
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    if "frontier" in results:
        pages.plot_frontier(results["frontier"], problem.metric, folder / "frontier.png")
    if "stream" in results:
        pages.plot_stream(results["stream"], problem.metric, folder / "stream.png")
    page = pages.report(results, problem.metric)
    (folder / "report.md").write_text(page, encoding="utf-8")
    print(f"{page}\n{folder / 'report.md'}")
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


def settings(args: argparse.Namespace) -> tuple[Any, Any]:
    """The sizes of a training and the grid of trainings that were asked for.

    Raises:
        ValueError: a number or mechanism that cannot be.
    """
    from experiments.adafest.trainings import Grid, Sizes

    sizes, grid = Sizes(), Grid()
    if args.task == "text":
        sizes = dataclasses.replace(sizes, **TEXT_SIZES)
    if args.quick:
        small: dict[str, Any] = {"examples": 100_000, "test_examples": 40_000, "batch_size": 1000, "steps": 100}
        sizes = dataclasses.replace(sizes, **(TEXT_QUICK if args.task == "text" else small | {"days": 3}))
        grid = dataclasses.replace(grid, epsilons=(1.0,), rows=grid.rows[:2], draws=grid.draws[:2])
    return _given(sizes, args), _given(grid, args)


TEXT_SIZES: dict[str, Any] = {"examples": 200_000, "test_examples": 20_000, "batch_size": 2000, "steps": 200}
TEXT_QUICK: dict[str, Any] = {"examples": 60_000, "test_examples": 10_000, "batch_size": 1000, "steps": 60}


def _given(defaults: Any, args: argparse.Namespace) -> Any:
    """`defaults` with the fields that were given on the command line."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(defaults):
        value = getattr(args, field.name, None)
        if value is not None:
            changes[field.name] = tuple(value) if isinstance(value, list) else value
    for name in ("steps", "examples", "batch_size", "learning_rate", "dense_learning_rate", "seeds"):
        if name in changes and not changes[name] > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {changes[name]}.")
    known = getattr(defaults, "mechanisms", ())
    unknown = [name for name in changes.get("mechanisms", ()) if name not in known]
    if unknown:
        raise ValueError(f"--mechanisms must be of {', '.join(known)}; got {', '.join(unknown)}.")
    return dataclasses.replace(defaults, **changes)


def make_problem(task: str, data: str | None, sizes: Any) -> Any:
    """What to learn.

    Raises:
        ValueError: data files for a task that has none.
    """
    from experiments.adafest import problems
    from tfdp_rec.datasets.criteo.generated import SyntheticCriteo
    from tfdp_rec.datasets.text.generated import SyntheticText

    if task == "text":
        if data:
            raise ValueError("--data is of --task clicks; sentences are generated.")
        return problems.sentences(SyntheticText(seed=2))
    logs = problems.FileLogs(data) if data else SyntheticCriteo(seed=2, drift=0.08, churn=0.0005)
    return problems.clicks(logs, sizes.hidden)
