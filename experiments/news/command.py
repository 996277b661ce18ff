"""`python -m experiments.news`: private federated news recommendation (PrivateRec paper, section 4)."""

from __future__ import annotations

import argparse
import dataclasses
import math

HELP = """\
  python -m experiments.news --quick                  ten minutes on two cores
  python -m experiments.news --data MIND_FOLDER       on the real files (news.tsv, behaviors.tsv); hours

Centralized, DP-FedRec and PrivateRec (as published, and corrected with four ways to train the user encoder) train
on readers' clicks and answer their last impression. Everything goes into one folder; run it again to go on where
it stopped. The published form does not have the privacy it claims: it is there for comparison.
"""

METHODS = (
    "untrained",
    "centralized",
    "fedrec",
    "dp-fedrec",
    "published",
    "corrected",
    "corrected+user",
    "corrected+consented",
    "corrected+public",
)
ENCODERS = ("nrms", "naml", "plm")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the study; `epsilons` and `bases` are the further points of Figures 6 and 7, of one seed."""

    users: int = 20_000
    news: int = 3000
    dim: int = 64
    rounds: int = 1000
    cohort: int = 128
    seeds: int = 3
    consented: float = 0.05
    epsilons: tuple[float, ...] = (1.0, 5.0, 20.0, math.inf)
    bases: tuple[int, ...] = (2, 3, 10)


QUICK = Sizes(
    users=2000, news=600, dim=32, rounds=100, cohort=64, seeds=1, epsilons=(1.0, math.inf), bases=(2, 10)
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `study news`."""
    parser.add_argument("--quick", action="store_true", help="small sizes, ten minutes")
    parser.add_argument("--data", metavar="FOLDER", help="MIND files; left out, generated readers like them")
    parser.add_argument("--out", default="runs/study-news", metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, help="rounds of each training")
    parser.add_argument("--seeds", type=int, help="trainings of each cell")


def run(args: argparse.Namespace) -> int:
    """Runs the study and writes its folder."""
    given = {"rounds": args.rounds, "seeds": args.seeds}
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")
    chosen = {name: value for name, value in given.items() if value is not None}
    sizes = dataclasses.replace(QUICK if args.quick else Sizes(), **chosen)
    from experiments.news import report, trainings

    study = trainings.Study(args.out, sizes, args.data)
    cells = trainings.cells_of(args.encoders, sizes)
    results = study.run(cells)
    page = report.write(study.folder, results, args.encoders)
    print(f"{page}\n{study.folder}/report.md")
    return 0
