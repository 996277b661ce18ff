"""`python -m experiments.adaptive`: adaptive tables against SGD, each with the best of as many learning rates."""

from __future__ import annotations

import argparse
import dataclasses

from tfdp_rec.settings import POSITIVE, add_options, chosen, option

HELP = """\
  python -m experiments.adaptive                     twenty minutes on one core
  python -m experiments.adaptive --seeds 10          goes on where it stopped, with more seeds

One click model on generated logs of Criteo's schema, at the same epsilon, by SGD and by rules for the tables. Each
takes the best of four learning rates on examples of their own, then is judged on others, from other weights.
"""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all trainings share."""

    examples: int = option(50_000, "training examples", POSITIVE)
    test_examples: int = option(30_000, "examples to choose a rate by, and as many to judge by", POSITIVE)
    largest_table: int = option(1000, "rows of the largest tables", POSITIVE)
    width: int = option(8, "of a row", POSITIVE)
    batch_size: int = option(256, "expected batch size", POSITIVE)
    steps: int = option(250, "training steps", POSITIVE)
    delta: float = option(1e-6, "of the guarantee", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which trainings."""

    seeds: int = option(3, "trainings of the best rate", POSITIVE)
    epsilons: tuple[float, ...] = option((1.0, 3.0, 8.0), "budgets", POSITIVE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the study."""
    parser.add_argument("--out", metavar="FOLDER", default="runs/study-adaptive", help="default: %(default)s")
    add_options(parser, Sizes)
    add_options(parser, Grid)


def run(args: argparse.Namespace) -> int:
    """Trains what is missing, then writes report.md."""
    from experiments.adaptive.trainings import Trainings, report
    from experiments.study import Study

    sizes, grid = chosen(args, Sizes()), chosen(args, Grid())
    study = Study(args.out, dataclasses.asdict(sizes))
    study.report(report(Trainings(sizes, study), grid))
    return 0
