"""`python -m experiments.rates`: rates, clips and batches of private training, by the length of noise in a row.

  python -m experiments.rates                about half an hour on one core
  python -m experiments.rates --seeds 5      goes on where it stopped, with more seeds

A two-tower on generated timelines and a click model on generated logs. Rates are given by what the noise alone
will do: the length of the noise in a row of a table at the end of the training.
"""

from __future__ import annotations

import argparse
import dataclasses

from experiments.rates.settings import Grid, Sizes
from tfdp_rec.settings import add_options, choose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the study."""
    parser.add_argument("--out", metavar="FOLDER", default="runs/study-rates", help="default: %(default)s")
    add_options(parser, Sizes)
    add_options(parser, Grid)


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, then writes report.md."""
    from experiments.rates import trainings
    from experiments.study import Study

    sizes, grid = choose(args, Sizes()), choose(args, Grid())
    study = Study(args.out, dataclasses.asdict(sizes))
    study.report(trainings.report(study, sizes, grid))
    return 0
