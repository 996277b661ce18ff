r"""`tfdp-rec card`.

  tfdp-rec card runs/spring
  tfdp-rec card --verify runs/spring/card

Writes RUN/card: README.md, privacy.json, a copy of the ledger, and a plot. Every number in it is public, paid for, or
computed from those; figures are the private ones that the run has paid for. --verify makes a card again from its own
files.
"""

from __future__ import annotations

import argparse

from tfdp_rec.core.ground.lazy_imports import optional


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `card`."""
    parser.add_argument("folder", metavar="RUN", help="a run folder; of --verify a card")
    parser.add_argument("--verify", action="store_true", help="check a card: exit code 1 if it was changed")


def run(args: argparse.Namespace) -> int:
    """Writes a card, or checks one."""
    for library in ("pyarrow", "markdown_it"):
        optional(library, "job")
    from tfdp_rec.job import card

    folder = args.folder if args.verify else card.write(args.folder)
    try:
        said = card.verify(folder)
    except ValueError as problem:
        print(f"CHANGED: {problem}")
        return 1
    print(f"{folder}: epsilon = {said['epsilon']:g} at delta = {said['delta']:g}, by all of its files")
    return 0
