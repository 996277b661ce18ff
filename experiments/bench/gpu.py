"""`python -m experiments.bench gpu --json FILE`: what a private step costs on a GPU, in some four minutes.

DLRM at 96 and 960 MB, two towers at 64, 1,024 and 16,384 examples, each against sparse SGD. What was measured is in the
file after every case, in case the time runs out. The machine's first GPU is taken; without one, its processor.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.bench import lazydp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bench gpu`."""
    parser.add_argument("--megabytes", type=float, nargs="+", default=[96.0, 960.0], help="tables of DLRM in all")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table for each case, and writes the figures."""
    args.experiment, args.contestants, args.warm_up, args.apart, args.plot = "gpu", None, 4, False, None
    return lazydp.run(args)
