"""`python -m experiments.sequences FILE`: the next item, by private training and by private sums.

  python -m experiments.sequences ml-1m.txt                             users generated after these, 1,000 to 1,000,000
  python -m experiments.sequences ml-1m.txt --users 10000 --epsilons 8  a part of it
  python -m experiments.sequences ml-1m.txt --real                      the file's own users

The file has ordered histories (experiments/spectral/data.py tells the forms). A user's last item is asked for, the
one before it is told and not counted: HR@10 among all items but those of the history. Every method spends exactly its
ε for users with all their items. --validate asks for the item before the last, to choose settings by. Run it
again to go on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from experiments.sequences.settings import Grid, Sizes
from tfdp_rec.settings import add_options, choose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the study."""
    parser.add_argument("file", type=Path, help="ordered histories of real users")
    parser.add_argument("--real", action="store_true", help="the file's users instead of generated ones")
    parser.add_argument("--validate", action="store_true", help="ask for the item before the last")
    parser.add_argument("--out", default="runs/study-sequences", metavar="FOLDER", help="default: %(default)s")
    add_options(parser, Sizes)
    add_options(parser, Grid)


def run(args: argparse.Namespace) -> int:
    """Measures what is missing, then writes results.json, the plot and report.md."""
    sizes, grid = choose(args, Sizes()), choose(args, Grid())
    from experiments.sequences import report
    from experiments.sequences.trainings import Trainings, cells_of
    from experiments.spectral.data import read
    from experiments.study import Study

    name, real, items = read(str(args.file))
    config = {**dataclasses.asdict(sizes), "file": name, "real": args.real, "validate": args.validate}
    study = Study(args.out, config)
    trainings = Trainings(sizes, real, items, args.real, args.validate)
    cells = cells_of(dataclasses.replace(grid, users=(len(real),)) if args.real else grid)
    found = study.cells({cell.name: lambda cell=cell: trainings.measure(cell) for cell in cells})  # type: ignore[misc]
    results = list(found.values())
    study.write("results.json", results)
    report.plot(results, study.folder / "users.png")
    study.report(report.page(results, name, args.real))
    return 0
