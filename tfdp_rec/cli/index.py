"""`tfdp-rec index`: an approximate index of a released two-tower's items, in the folder of its SavedModel.

  tfdp-rec index runs/spring

`tfdp-rec serve` and `tfdp-rec recommend` then ask the index first. It is made of the released model alone, so it costs
no epsilon. Its recall against the exact answers is measured and printed; below 0.95, and for less than 50,000 items,
none is written.
"""

from __future__ import annotations

import argparse

from tfdp_rec.cli import quiet
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.job.run_folder import find_servable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `index`."""
    parser.add_argument("folder", metavar="RUN", help="a run folder, or an exported model")


def run(args: argparse.Namespace) -> int:
    """Writes the index."""
    optional("faiss", "ann")
    quiet.import_tensorflow()
    from tfdp_rec.serving.item_index import MEASURED, write_index

    made = write_index(find_servable(args.folder))
    print("{items} items, {probes} of {lists} lists searched: ".format(**made), end="")
    print(f"recall@{MEASURED} {made['recall']:.3f} against every item scored; written to {made['folder']}")
    return 0
