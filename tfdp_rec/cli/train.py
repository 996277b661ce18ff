"""`tfdp-rec train`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfdp_rec import mechanisms

if TYPE_CHECKING:
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
        "--mechanism",
        action="append",
        choices=mechanisms.names((mechanisms.sgd, *mechanisms.COMMON)),
        help="may be given several times; all if left out"
    )
    budget = parser.add_argument_group("privacy")
    budget.add_argument("--epsilon", type=float, default=8.0, help="the budget; never exceeded (default: %(default)s)")
    budget.add_argument("--delta", type=float, help="default: 1e-6, or 1/users if that is less")
    budget.add_argument(
        "--noise-multiplier", type=float, help="use this noise; the budget may then stop training early"
    )
    budget.add_argument(
        "--clip", type=float, default=1.0, help="bound on an example's gradient norm (default: %(default)s)"
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", help="folder with MovieLens files; generated timelines if left out")
    data.add_argument("--users", type=int, default=138_493, help="generated users (default: %(default)s)")
    data.add_argument("--movies", type=int, default=27_278, help="generated movies (default: %(default)s)")
    data.add_argument("--events", type=int, help="generated events; default: as many a user as MovieLens-20M, or fewer")
    data.add_argument(
        "--seed", type=int, default=0, help="of the generated data, split and first weights; never of noise"
    )
    model = parser.add_argument_group("model and training")
    model.add_argument("--steps", type=int, help="training steps (default: the main job's)")
    model.add_argument("--batch-size", type=int, help="users in a batch, on average")
    model.add_argument("--width", type=int, help="of the embedding tables")
    model.add_argument("--hidden", type=int, help="units of the hidden layer; 0 for none")
    model.add_argument("--learning-rate", type=float, help="of the private mechanisms")
    model.add_argument("--sgd-learning-rate", type=float, help="of the SGD without privacy, which does not clip")
    model.add_argument("--negatives", type=int, help="shared uniform negatives a batch")
    parser.add_argument(
        "--top-k", type=int, default=10, help="movies the exported model returns (default: %(default)s)"
    )
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
    _refuse_nonsense(args)
    from tfdp_rec.datasets.movielens import files, generated
    from tfdp_rec.movies import job

    if args.out and os.path.exists(os.path.join(args.out, "config.json")):
        raise FileExistsError(f"{args.out} holds another run; give another --out.")
    given = {
        name: getattr(args, name)
        for name in (
            "epsilon", "delta", "noise_multiplier", "clip", "seed", "steps", "batch_size", "width", "hidden",
            "learning_rate", "sgd_learning_rate", "negatives", "top_k",
        )
        if getattr(args, name) is not None
    }  # fmt: skip
    if args.mechanism:
        given["mechanisms"] = tuple(dict.fromkeys(args.mechanism))
    settings = job.Settings(**given)
    if not args.quiet:
        print("Reading" if args.data else "Generating", "watch timelines ...", flush=True)
    if args.data:
        timelines = files.read(args.data)
    else:
        # A small catalogue allows fewer events a user than the real data has.
        events = args.events or round(args.users * min(generated.MEAN_LENGTH, args.movies / 6))
        timelines = generated.timelines(args.users, args.movies, events, seed=args.seed)
    verbose = 0 if args.quiet else (1 if sys.stdout.isatty() else 2)
    with _training(args) as train:
        job.run(timelines, settings, args.out, verbose, train)
    return 0


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


def _refuse_other_jobs(source: str) -> None:
    """A worker or server that was given the coordinator's command."""
    from tfdp_rec.distribute import Cluster

    task = Cluster.read(source).task
    if task is not None and task[0] != "chief":
        raise ValueError(f"this process is {task[0]} {task[1]} of the cluster; start it with: tfdp-rec server")


def _refuse_nonsense(args: argparse.Namespace) -> None:
    """What can be known to be wrong before anything slow starts."""
    for name in (
        "epsilon",
        "clip",
        "users",
        "movies",
        "steps",
        "batch_size",
        "width",
        "learning_rate",
        "sgd_learning_rate",
        "negatives",
        "top_k",
    ):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}.")
    if args.delta is not None and not 0 < args.delta < 1:
        raise ValueError(f"--delta must be between 0 and 1, got {args.delta}.")
    if args.noise_multiplier is not None and not 0 < args.noise_multiplier < float("inf"):
        raise ValueError(f"--noise-multiplier must be positive, got {args.noise_multiplier}.")
    if args.hidden is not None and args.hidden < 0:
        raise ValueError(f"--hidden must not be negative, got {args.hidden}.")
    if args.local and min(args.local) < 1:
        raise ValueError(f"--local needs at least one worker and one server, got {args.local[0]} and {args.local[1]}.")
    if args.cluster:
        _refuse_other_jobs(args.cluster)
    if args.data and not os.path.isdir(args.data):
        raise FileNotFoundError(f"--data: there is no folder {args.data}.")
