"""`tfdp-rec train`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfdp_rec import quiet
from tfdp_rec.files import hold, let_go
from tfdp_rec.movies import contestants
from tfdp_rec.movies.kept import Asked, RunCheckpoint
from tfdp_rec.movies.settings import POISSON, SHUFFLED, Place, Settings, Source
from tfdp_rec.run_folder import refuse_another
from tfdp_rec.settings import add_options, chosen, whole

if TYPE_CHECKING:
    from tfdp_rec.data import Timelines
    from tfdp_rec.movies.job import Train

HELP = """\
  tfdp-rec train                                        the main job: embedded data, epsilon 8
  tfdp-rec train --mechanism spectral                   private sums alone, in seconds to minutes
  tfdp-rec train --mechanism lazydpsgd --epsilon 4      one two-tower, another budget
  tfdp-rec train --export lazydpsgd                     the same, and the two-tower released
  tfdp-rec train --sampling shuffled                    in one order, as from a shuffled file: LazyDPFTRL
  tfdp-rec train --data ml-20m --out runs/ml20m         MovieLens files (ml-1m, ml-20m, ml-25m, ml-32m) of your own
  tfdp-rec train --local 2 2                            on 2 workers and 2 parameter servers, started here
  tfdp-rec train --cluster cluster.json                 on a cluster that is up (tfdp-rec server); see docs/scaling.md
  tfdp-rec train --checkpoint private/run               keep what is needed to go on after Ctrl-C or a crash ...
  tfdp-rec train --checkpoint private/run --resume      ... and go on; all other options are those it began with

The privacy unit is a user. Each epsilon is of one recommender by itself, and one of them is released. Writes a folder
with the configuration, metrics (JSON lines, TensorBoard), report.html (and report.md), and the released recommender as
a SavedModel; then try: tfdp-rec recommend RUN --history ID ID ...
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `train`."""
    names, usual = ", ".join(contestants.NAMES), ", ".join(contestants.USUAL)
    several = f"of {names}; may be given several times; {usual} if left out"
    parser.add_argument("--mechanism", action="append", choices=contestants.NAMES, metavar="NAME", help=several)
    add_options(parser, Source)
    add_options(parser, Settings)
    cluster = parser.add_argument_group("parameter servers").add_mutually_exclusive_group()
    cluster.add_argument("--cluster", metavar="FILE", help="the cluster's JSON, or TF_CONFIG for that variable's")
    cluster.add_argument(
        "--local", type=int, nargs=2, metavar=("WORKERS", "SERVERS"), help="start so many on this machine, and end them"
    )
    going_on = parser.add_argument_group("going on")
    going_on.add_argument(
        "--checkpoint", metavar="DIR", help="keep checkpoints and ledgers here; as private as the data"
    )
    going_on.add_argument(
        "--checkpoint-every", type=whole, default=50, metavar="STEPS", help="between checkpoints (default: %(default)s)"
    )
    going_on.add_argument("--resume", action="store_true", help="go on with the run in --checkpoint")
    parser.add_argument("--out", help="run folder; default: runs/<time>")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


def run(args: argparse.Namespace) -> int:
    """Trains and writes the run folder."""
    kept = _kept(args)
    asked = _asked(args, kept.asked if kept and kept.asked else Asked())
    _refuse_other_places(args, asked.place, kept)
    code = _in_own_network(args, kept) if asked.place.local else None
    if code is not None:
        return code
    try:
        _train(args, asked, kept)
    except KeyboardInterrupt:
        if kept and kept.asked:
            print(f"Go on with: tfdp-rec train --checkpoint {args.checkpoint} --resume", file=sys.stderr)
        raise
    return 0


def _in_own_network(args: argparse.Namespace, kept: RunCheckpoint | None) -> int | None:
    """Runs the same command where a local cluster's servers are reached by nothing else; None if it runs there, or if
    the system gives no such place.
    """
    from tfdp_rec.distribute import own_network
    from tfdp_rec.distribute.local_cluster import other_interfaces

    if not other_interfaces():
        return None
    if kept:
        let_go(kept.directory)
    code = own_network.run([sys.executable, "-m", "tfdp_rec.cli", *args.given])
    if code is None and kept and kept.asked:
        hold(kept.directory)
    return code


def _train(args: argparse.Namespace, asked: Asked, kept: RunCheckpoint | None) -> None:
    quiet.import_tensorflow(of_a_cluster=bool(asked.place.local or asked.place.cluster))
    from tfdp_rec.movies import job

    if not args.quiet:
        print("Reading" if asked.source.data else "Generating", "watch timelines ...", flush=True)
    timelines = timelines_of(asked.source, asked.settings.seed)
    verbose = 0 if args.quiet else (1 if sys.stdout.isatty() else 2)
    with _training(asked.place) as train:
        job.run(timelines, asked, args.out, verbose, train, kept)


def _kept(args: argparse.Namespace) -> RunCheckpoint | None:
    """Where the run is kept, if it is."""
    if args.checkpoint_every < 1:
        raise ValueError(f"--checkpoint-every must be positive, got {args.checkpoint_every}.")
    if args.checkpoint:
        found = RunCheckpoint.kept if args.resume else RunCheckpoint.fresh
        return found(args.checkpoint, args.checkpoint_every)
    if args.resume:
        raise ValueError("--resume needs --checkpoint DIR, the folder that the run was kept in.")
    return None


def _asked(args: argparse.Namespace, before: Asked) -> Asked:
    """What is asked for now; what a run that goes on was asked for is only repeated."""
    settings = chosen(args, before.settings)
    if args.mechanism:
        settings = dataclasses.replace(settings, mechanisms=tuple(dict.fromkeys(args.mechanism)))
    given = args.local or args.cluster
    if given and settings.sampling != POISSON:
        raise ValueError("--sampling shuffled trains in one process: a cluster's workers draw users anew.")
    if settings.sampling == SHUFFLED and not args.mechanism and not args.resume:
        settings = dataclasses.replace(settings, mechanisms=contestants.in_one_order(settings.mechanisms))
    if given and not args.mechanism and not args.resume:
        settings = dataclasses.replace(settings, mechanisms=contestants.on_servers(settings.mechanisms))
    if args.checkpoint and settings.sampling == SHUFFLED:
        contestants.refuse_unkept(settings.mechanisms)
    place = Place(tuple(args.local or ()), args.cluster or "") if given else before.place
    asked = Asked(chosen(args, before.source), settings, place)
    if args.resume:
        before.refuse_other(asked, args.checkpoint)
    return asked


def timelines_of(source: Source, seed: int) -> Timelines:
    """The watch timelines of a source.

    Args:
        source: files or a generator.
        seed: of the generator.
    """
    from tfdp_rec.datasets.movielens import files, generated

    if source.data:
        return files.read(source.data[0])
    # A small catalogue allows fewer events a user than the real data has.
    events = source.events or round(source.users * min(generated.MEAN_LENGTH, source.movies / 6))
    return generated.timelines(source.users, source.movies, events, seed=seed)


@contextlib.contextmanager
def _training(place: Place) -> Iterator[Train]:
    """What trains one mechanism: this process, or a cluster."""
    from tfdp_rec.movies import job

    if not place.cluster and not place.local:
        yield job.train_one
        return
    quiet.when_all_is_said()
    from tfdp_rec.distribute import Cluster, LocalCluster
    from tfdp_rec.movies.on_cluster import ClusterTraining

    if place.local:
        workers, servers = place.local
        with LocalCluster(workers, servers) as local:
            yield ClusterTraining(local.resolver())
    else:
        yield ClusterTraining(Cluster.read(place.cluster).resolver())


def _refuse_other_places(args: argparse.Namespace, place: Place, kept: RunCheckpoint | None) -> None:
    """A folder that is taken, a cluster that cannot be, and a worker that was given the coordinator's command."""
    if kept and kept.asked and args.out and os.path.abspath(args.out) != kept.out:
        raise ValueError(f"The run in {args.checkpoint} writes to {kept.out}: leave --out out to go on with it.")
    if not args.resume and args.out:
        refuse_another(args.out)
    if place.local and min(place.local) < 1:
        workers, servers = place.local
        raise ValueError(f"--local needs at least one worker and one server, got {workers} and {servers}.")
    if place.cluster:
        from tfdp_rec.distribute import Cluster

        task = Cluster.read(place.cluster).task
        if task is not None and task[0] != "chief":
            raise ValueError(f"this process is {task[0]} {task[1]} of the cluster; start it with: tfdp-rec server.")
