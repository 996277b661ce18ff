"""`tfdp-rec bench`."""

from __future__ import annotations

import argparse

HELP = """\
The measurements and the studies of papers are not in the installed package. From the root of a checkout:

  python -m experiments.bench lazydp sizes     private training against SGD
  python -m experiments.bench --help           the others
  python -m experiments.adafest --help         one of the studies, beside eana and news
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of earlier versions of `bench`."""
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Refuses with the command to run instead."""
    raise ValueError(f"run  {' '.join(['python -m experiments.bench', *args.rest])}  in a checkout of tfdp_rec.")
