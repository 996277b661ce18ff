"""`tfdp-rec train`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfdp_rec.movies.settings import MECHANISMS, Settings, Source
from tfdp_rec.settings import add_options, chosen

if TYPE_CHECKING:
    from tfdp_rec.data import Timelines
    from tfdp_rec.movies.job import Train

HELP = """\
  tfdp-rec train                                        the main job: embedded data, all mechanisms, epsilon 8
  tfdp-rec train --mechanism lazydpsgd --epsilon 4      one mechanism, another budget
  tfdp-rec train --data ml-20m --out runs/ml20m         MovieLens files (ml-1m, ml-20m, ml-25m, ml-32m) of your own
  tfdp-rec train --local 2 2                            on 2 workers and 2 parameter servers, started here
  tfdp-rec train --cluster cluster.json                 on a cluster that is up (tfdp-rec server); see docs/scaling.md

The privacy unit is a user. Writes a folder with the configuration, metrics (JSON lines, TensorBoard), report.md with
plots, and the released model as a SavedModel; then try: tfdp-rec recommend RUN --history ID ID ...
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `train`."""
    parser.add_argument(
        "--mechanism", action="append", choices=MECHANISMS, help="may be given several times; all if left out"
    )
    add_options(parser, Source)
    add_options(parser, Settings)
    cluster = parser.add_argument_group("parameter servers").add_mutually_exclusive_group()
    cluster.add_argument("--cluster", metavar="FILE", help="the cluster's JSON, or TF_CONFIG for that variable's")
    cluster.add_argument(
        "--local", type=int, nargs=2, metavar=("WORKERS", "SERVERS"), help="start so many on this machine, and end them"
    )
    parser.add_argument("--out", help="run folder; default: runs/<time>")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


def run(args: argparse.Namespace) -> int:
    """Trains and writes the run folder."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    source, settings = chosen(args, Source()), chosen(args, Settings())
    if args.mechanism:
        settings = dataclasses.replace(settings, mechanisms=tuple(dict.fromkeys(args.mechanism)))
    _refuse_other_places(args)
    from tfdp_rec.movies import job

    if not args.quiet:
        print("Reading" if source.data else "Generating", "watch timelines ...", flush=True)
    timelines = timelines_of(source, settings.seed)
    verbose = 0 if args.quiet else (1 if sys.stdout.isatty() else 2)
    with _training(args) as train:
        job.run(timelines, settings, args.out, verbose, train)
    return 0


def timelines_of(source: Source, seed: int) -> Timelines:
    """The watch timelines of a source.

    Args:
        source: files or a generator.
        seed: of the generator.
    """
    from tfdp_rec.datasets.movielens import files, generated

    if source.data:
        return files.read(source.data)
    # A small catalogue allows fewer events a user than the real data has.
    events = source.events or round(source.users * min(generated.MEAN_LENGTH, source.movies / 6))
    return generated.timelines(source.users, source.movies, events, seed=seed)


@contextlib.contextmanager
def _training(args: argparse.Namespace) -> Iterator[Train]:
    """What trains one mechanism: this process, or a cluster."""
    from tfdp_rec.movies import job

    if not args.cluster and not args.local:
        yield job.train_one
        return
    from tfdp_rec.distribute import Cluster, LocalCluster
    from tfdp_rec.movies.on_cluster import ClusterTraining

    if args.local:
        with LocalCluster(*args.local) as local:
            yield ClusterTraining(local.resolver())
    else:
        yield ClusterTraining(Cluster.read(args.cluster).resolver())


def _refuse_other_places(args: argparse.Namespace) -> None:
    """A folder that is taken, a cluster that cannot be, and a worker that was given the coordinator's command."""
    if args.out and os.path.exists(os.path.join(args.out, "config.json")):
        raise FileExistsError(f"{args.out} holds another run; give another --out.")
    if args.local and min(args.local) < 1:
        raise ValueError(f"--local needs at least one worker and one server, got {args.local[0]} and {args.local[1]}.")
    if args.cluster:
        from tfdp_rec.distribute import Cluster

        task = Cluster.read(args.cluster).task
        if task is not None and task[0] != "chief":
            raise ValueError(f"this process is {task[0]} {task[1]} of the cluster; start it with: tfdp-rec server.")
