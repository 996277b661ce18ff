"""`tfdp-rec forget`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tfdp_rec import quiet
from tfdp_rec.job.run_folder import FORGETTING, PRIVATE

HELP = """\
  tfdp-rec forget runs/spring sku-30 sku-31
  tfdp-rec forget runs/spring --items withdrawn.txt
  tfdp-rec forget runs/spring                      ends one that was cut off

Removes items from a run: from its list, titles, sums or tables, its servable, card and report. No log is read, and no
epsilon is spent or given back. A further day takes an item in again if its public list or its log has it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `forget`."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("items", metavar="ITEM", nargs="*", help="ids of the items that leave")
    parser.add_argument("--items", dest="file", metavar="FILE", type=Path, help="text file with an id a line")


def run(args: argparse.Namespace) -> int:
    """Removes and says what stays."""
    ids = list(args.items)
    if args.file is not None:
        lines = args.file.read_text(encoding="utf-8-sig").splitlines()
        ids += [line.strip() for line in lines if line.strip()]
    pending = (args.folder / PRIVATE / FORGETTING).exists()
    if not ids and not pending:
        raise ValueError("Say which items leave: tfdp-rec forget RUN ITEM ..., or --items FILE.")
    quiet.import_tensorflow()
    from tfdp_rec.job.forgetting import forget, still_listed

    stay = forget(args.folder, ids)
    done = f"{len(set(ids)):,} items are forgotten" if ids else "what was begun is ended"
    print(f"{done}; {len(stay):,} items stay in {args.folder}")
    path = still_listed(args.folder, ids)
    if path:
        print(f"{path} lists one of them still: remove it there, or a further day takes it in again.", file=sys.stderr)
    return 0
