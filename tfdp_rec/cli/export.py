"""`tfdp-rec export`.

  tfdp-rec export runs/20260101-120000/release/released.npz servable --top-k 20
  tfdp-rec export runs/20260101-120000 servable --top-k 20

Takes a run folder, or what a SpectralRecommender saved, or a .keras file of a released TwoTower: histories of raw ids
in, the best items out. Ids and titles are those of the run, if its released.npz is there. A training checkpoint is
refused: its weights may lack noise.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
from typing import Any

from tfdp_rec.cli import quiet
from tfdp_rec.job.run_folder import MODEL, RELEASED, find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `export`."""
    parser.add_argument("model", metavar="MODEL", help="a run folder, an .npz or a .keras file")
    parser.add_argument("folder", metavar="FOLDER", help="where to write the SavedModel; must not exist")
    parser.add_argument("--top-k", type=int, default=10, help="items an answer (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Loads and exports."""
    path = pathlib.Path(args.model)
    if path.is_dir():
        path = next((each for each in map(functools.partial(find, path), (MODEL, RELEASED)) if each.is_file()), path)
    if not path.is_file() or path.suffix not in (".keras", ".npz"):
        raise FileNotFoundError(f"{path} is no run with a released recommender, nor its .keras or .npz file.")
    if os.path.exists(args.folder):
        raise FileExistsError(f"{args.folder} exists already.")
    quiet.import_tensorflow()
    from tfdp_rec.job.run_state import WarmStart

    found: Any
    if path.suffix == ".npz":
        from tfdp_rec.spectral import SpectralRecommender

        found = SpectralRecommender.load(path)
    else:
        from tfdp_rec.models.own_catalogue import load_model

        found = load_model(path)
    # Sums of a run have its ids in their own file; a model has them in the file beside it.
    told = path if path.suffix == ".npz" else path.with_name(RELEASED)
    run = WarmStart.read(told)
    if run is None:
        found.export(args.folder, k=args.top_k)
    else:
        from tfdp_rec.serving import export

        if told is not path:
            run.refuse_another_model(told, path)
        export(args.folder, found, run.items, run.titles, args.top_k)
    print(f"{args.folder}: signature serving_default, input `history` [batch, n], outputs ids, titles and scores")
    return 0
