"""`tfdp-rec recommend`."""

from __future__ import annotations

import argparse
import pathlib
import sys

from tfdp_rec import quiet
from tfdp_rec.job.run_folder import servable_in
from tfdp_rec.settings import whole

HELP = """\
  tfdp-rec recommend --history 318 296 593                             of the newest run in runs/
  tfdp-rec recommend runs/spring --history sku-17 sku-4 --top-k 5      of a log of your own
  tfdp-rec recommend runs/spring                                       nothing had yet: the most popular

RUN is a folder that `tfdp-rec train` wrote, or its part `release`. Ids are those of the files, the last one last; ids
that the model does not know are named and ignored; the answer leaves out what the history holds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `recommend`."""
    parser.add_argument("folder", metavar="RUN", nargs="?", help="a run folder; default: the newest in runs/")
    parser.add_argument("--history", nargs="*", default=[], metavar="ID", help="ids, the last one last")
    parser.add_argument("--top-k", type=whole, metavar="K", help="items to answer (default: what the run was given)")
    parser.add_argument("--among", nargs="+", metavar="ID", help="answer these items alone")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the recommendations."""
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k must be positive, got {args.top_k}.")
    if args.folder is None:
        args.folder = _newest()
    servable = servable_in(args.folder)
    if not (servable / "saved_model.pb").is_file():
        raise FileNotFoundError(f"{args.folder} holds no exported model (expected {servable}).")
    quiet.import_tensorflow()
    from tfdp_rec.job import answers

    return answers.run(args)


def _newest() -> str:
    """The run that was finished last, of those in `runs`; says which."""
    runs = [run for run in pathlib.Path("runs").glob("*") if servable_in(run).is_dir()]
    if not runs:
        raise FileNotFoundError("There is no run in runs/ here: name a run folder, or make one with tfdp-rec train.")
    newest = max(runs, key=lambda run: servable_in(run).stat().st_mtime)
    print(f"of {newest}:", file=sys.stderr)
    return str(newest)
