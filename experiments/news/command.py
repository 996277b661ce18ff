"""`python -m experiments.news`: private federated news recommendation (PrivateRec paper, section 4).

  python -m experiments.news --quick                  ten minutes on two cores
  python -m experiments.news --data MIND_FOLDER       on the real files (news.tsv, behaviors.tsv); hours

Centralized, DP-FedRec and PrivateRec (as published, and corrected with four ways to train the user encoder) train
on readers' clicks and answer their last impression. Everything goes into one folder; run it again to go on where
it stopped. The published form does not have the privacy it claims: it is there for comparison.
"""

from __future__ import annotations

import argparse

from experiments.news.settings import QUICK, Sizes
from tfdp_rec.settings import add_options, choose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `study news`."""
    parser.add_argument("--quick", action="store_true", help="small sizes, ten minutes")
    parser.add_argument("--data", metavar="FOLDER", help="MIND files; left out, generated readers like them")
    parser.add_argument("--out", default="runs/study-news", metavar="FOLDER", help="default: %(default)s")
    add_options(parser, Sizes)


def run(args: argparse.Namespace) -> int:
    """Runs the study and writes its folder."""
    sizes = choose(args, QUICK if args.quick else Sizes())
    from experiments.news import report
    from experiments.news.trainings import Trainings, cells_of
    from experiments.study import Study

    study = Study(args.out, {**sizes.shaping(), "data": args.data})
    trainings = Trainings(sizes, args.data, study.folder)
    cells = cells_of(sizes)
    found = study.cells({cell.name: lambda cell=cell: trainings.measure(cell) for cell in cells})  # type: ignore[misc]
    study.report(report.write(study.folder, found, sizes.encoders))
    return 0
