"""`python -m experiments.clicks`: what private training brings on a click log.

  python -m experiments.clicks generated                                generated displays of Criteo's schema
  python -m experiments.clicks generated-ads                            of CriteoPrivateAd's, by users
  python -m experiments.clicks generated-ads --rows-alone               the same by displays
  python -m experiments.clicks frappe-events train.csv test.csv         app use; an hour on two cores
  python -m experiments.clicks movielens ml-100k                        ratings; 4 and 5 stars are clicks
  python -m experiments.clicks movielens ml-100k --per-user 64          the same with users as units
  python -m experiments.clicks movielens-events train.csv test.csv      who rated which film of a million
  python -m experiments.clicks criteo train.txt                         and avazu, private-ad, frappe: see sources.py

Contestants are tuned on validation rows and judged on test rows: AUC, and log loss relative to that of the rate of
clicks. Run it again to go on where it stopped, or with more --epsilons or --seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from experiments.clicks.settings import Grid, Sizes
from tfdp_rec.settings import add_options, choose

NAMES = ("frappe", "frappe-events", "movielens", "movielens-events", "criteo", "avazu", "private-ad", "generated",
         "generated-ads")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the study."""
    parser.add_argument("log", choices=NAMES)
    parser.add_argument("files", nargs="*", type=Path, help="of the log")
    parser.add_argument("--out", metavar="FOLDER", help="default: runs/study-clicks-LOG")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="names, or parts of them; default: all")
    add_options(parser, Sizes)
    add_options(parser, Grid)


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, then writes results.json, the plot and report.md."""
    sizes, grid = choose(args, Sizes()), choose(args, Grid())
    if sizes.per_user and sizes.rows_alone:
        raise ValueError("--per-user and --rows-alone are two kinds of units: leave one out.")
    from experiments.clicks import report
    from experiments.clicks.sources import SOURCES
    from experiments.clicks.trainings import CONTESTANTS, Trainings
    from experiments.study import Study

    wanted = args.contestants or [""]
    among = [one for one in CONTESTANTS if any(part.lower() in one.name.lower() for part in wanted)]
    if not among:
        raise ValueError(f"--contestants: there are {', '.join(repr(one.name) for one in CONTESTANTS)}.")
    log = SOURCES[args.log](args.files)
    log = log.by_user(sizes.per_user) if sizes.per_user else log
    files = [str(path.resolve()) for path in args.files]
    config = {**dataclasses.asdict(sizes), "log": args.log, "files": files}
    log = log.by_row() if sizes.rows_alone else log
    if not log.public or log.per_unit > 1:  # nothing to train on with private labels alone, or labels that are no units
        among = [one for one in among if not one.public_first]
    if not among:
        raise ValueError(f"{log.name} has no public columns, or its units are not its rows (--rows-alone).")
    kind = "-users" if sizes.per_user else "-rows" if sizes.rows_alone else ""
    study = Study(args.out or f"runs/study-clicks-{args.log}{kind}", config)
    trainings = Trainings(log, sizes, grid, study)
    results = {
        one.name: {f"{epsilon or 0:g}": trainings.best(one, epsilon) for epsilon in _budgets(one.private, grid)}
        for one in among
    }
    study.write("results.json", results)
    report.plot(results, study.folder / "auc.png", log.name)
    study.report(report.page(log, sizes, results))
    return 0


def _budgets(private: bool, grid: Grid) -> list[float | None]:
    return list(grid.epsilons) if private else [None]
