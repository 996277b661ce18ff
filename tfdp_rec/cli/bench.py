"""`tfdp-rec bench`."""

from __future__ import annotations

import argparse

HELP = """\
Measurements and repeated papers are no part of the installed package. From the root of a checkout:

  tfdp-rec bench                               says so
  python -m experiments.bench lazydp sizes     private training against SGD
  python -m experiments.bench --help           the others
  python -m experiments.adafest --help         one of the studies, beside eana and news
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whatever `bench` used to take."""
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Says where to go.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"run  {' '.join(['python -m experiments.bench', *args.rest])}  in a checkout of tfdp_rec.")
