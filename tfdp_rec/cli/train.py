"""`tfdp-rec train`: on movies, or, where its columns are named, on a log of one's own."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from tfdp_rec.movies import command as movies
from tfdp_rec.movies.settings import Settings, Source
from tfdp_rec.own_log import command as own_log
from tfdp_rec.own_log.folders import is_kept
from tfdp_rec.own_log.settings import Columns, Days, Terms
from tfdp_rec.run_folder import PRIVATE, RESUME
from tfdp_rec.settings import flag

HELP = f"""\
  tfdp-rec train --data logs/*.parquet --user user_id --item sku --time ts --out runs/spring
                                                        a log of your own (docs/logs.md), epsilon 8
  tfdp-rec train --continue runs/spring --data next/*.parquet
                                                        a further day of it; the first said --days
{movies.HELP}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `train`."""
    movies.add_arguments(parser)
    own_log.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Trains and writes the run folder."""
    if not _on_own_log(args):
        return movies.run(args)
    _refuse_options_of_movies(args)
    return own_log.run(args)


def _on_own_log(args: argparse.Namespace) -> bool:
    if args.continues and args.resume:
        raise ValueError("--resume goes on with what is in --checkpoint, --continue begins a day: leave one out.")
    if args.resume and (args.checkpoint or args.out):
        return is_kept(args.checkpoint or pathlib.Path(args.out, PRIVATE, RESUME))
    ours = [field.name for kind in (Columns, Days) for field in dataclasses.fields(kind)]
    return args.continues is not None or any(getattr(args, name) is not None for name in ours)


def _refuse_options_of_movies(args: argparse.Namespace) -> None:
    """What trains two-towers on movies says nothing to private sums of a log."""
    ours = {field.name for kind in (Columns, Terms) for field in dataclasses.fields(kind)}
    theirs = [field.name for kind in (Source, Settings) for field in dataclasses.fields(kind)]
    wrong = [flag(name) for name in theirs if name not in ours and getattr(args, name, None) is not None]
    wrong += [flag(name) for name in ("mechanism", "local", "cluster") if getattr(args, name)]
    if wrong:
        raise ValueError(
            f"{wrong[0]} is of the run on movies; on a log of your own private sums are made, which have no such "
            "setting: leave it out."
        )
