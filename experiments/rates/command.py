"""`python -m experiments.rates`: rates, clips and batches of private training, by the length of noise in a row."""

from __future__ import annotations

import argparse
import dataclasses

from tfdp_rec.settings import POSITIVE, add_options, chosen, option

HELP = """\
  python -m experiments.rates                about half an hour on one core
  python -m experiments.rates --seeds 5      goes on where it stopped, with more seeds

A two-tower on generated timelines and a click model on generated logs. Rates are given by what the noise alone
will do: the length of the noise in a row of a table at the end of the training.
"""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all trainings share."""

    users: int = option(20_000, "generated users of the timelines", POSITIVE)
    movies: int = option(1_000, "generated movies", POSITIVE)
    width: int = option(16, "of the two-tower's rows", POSITIVE)
    steps: int = option(200, "training steps", POSITIVE)
    delta: float = option(1e-6, "of the guarantee", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which trainings."""

    seeds: int = option(2, "trainings of each cell", POSITIVE)
    epsilons: tuple[float, ...] = option((1.0, 8.0), "budgets", POSITIVE)
    clips: tuple[float, ...] = option((0.1, 1.0), "bounds on an example's gradient norm", POSITIVE)
    batches: tuple[int, ...] = option((256, 1024), "users in a batch, on average", POSITIVE)
    lengths: tuple[float, ...] = option((0.1, 0.3, 1.0, 3.0, 10.0, 30.0), "of the noise in a row", POSITIVE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the study."""
    parser.add_argument("--out", metavar="FOLDER", default="runs/study-rates", help="default: %(default)s")
    add_options(parser, Sizes)
    add_options(parser, Grid)


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, then writes report.md."""
    from experiments.rates import trainings
    from experiments.study import Study

    sizes, grid = chosen(args, Sizes()), chosen(args, Grid())
    study = Study(args.out, dataclasses.asdict(sizes))
    study.report(trainings.report(study, sizes, grid))
    return 0
