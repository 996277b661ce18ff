"""`python -m experiments.adaptive`: adaptive tables against SGD, each with the best of as many learning rates.

  python -m experiments.adaptive                     twenty minutes on one core
  python -m experiments.adaptive --seeds 10          goes on where it stopped, with more seeds

One click model on generated logs of Criteo's schema, at the same ε, by SGD and by rules for the tables. Each
takes the best of four learning rates on examples of their own, then is judged on others, from other weights.
"""

from __future__ import annotations

import argparse
import dataclasses

from experiments.adaptive.settings import Grid, Sizes
from tfdp_rec.settings import add_options, choose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the study."""
    parser.add_argument("--out", metavar="FOLDER", default="runs/study-adaptive", help="default: %(default)s")
    add_options(parser, Sizes)
    add_options(parser, Grid)


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, then writes report.md."""
    from experiments.adaptive.trainings import Trainings, report
    from experiments.study import Study

    sizes, grid = choose(args, Sizes()), choose(args, Grid())
    study = Study(args.out, dataclasses.asdict(sizes))
    study.report(report(Trainings(sizes, study), grid))
    return 0
