"""`tfdp-rec train`: a log of one's own, MovieLens files or generated timelines to a private recommender."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tfdp_rec.cli import quiet
from tfdp_rec.core.ground.files import hold, let_go
from tfdp_rec.core.ground.lazily import optional
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.run_folder import LEDGER
from tfdp_rec.job.settings import POISSON, SHUFFLED, JobSettings
from tfdp_rec.settings import add_options, chosen, whole

if TYPE_CHECKING:
    from tfdp_rec.core.claim.ledger import Mark
    from tfdp_rec.job.checkpoint import RunCheckpoint
    from tfdp_rec.job.run import Train

HELP = """\
  tfdp-rec train --data logs/*.parquet --user user_id --item sku --time ts \\
      --out runs/spring                       a log of your own (docs/logs.md)
  tfdp-rec train --continue runs/spring --data next/*.parquet
                                              a further day of it
  tfdp-rec train                              the main job: generated timelines
  tfdp-rec train --mechanism spectral         private sums alone
  tfdp-rec train --mechanism upon-sums        a model trained upon private sums
  tfdp-rec train --mechanism lazydpsgd --epsilon 4
  tfdp-rec train --export lazydpsgd           all, and the two-tower is released
  tfdp-rec train --sampling shuffled          users in one order: LazyDPFTRL
  tfdp-rec train --data ml-20m                MovieLens files (ml-1m to ml-32m)
  tfdp-rec train --local 2 2                  2 workers, 2 servers, started here
  tfdp-rec train --cluster cluster.json       on a cluster (docs/scaling.md)
  tfdp-rec train --checkpoint private/run     keep the grouped log, too
  tfdp-rec train --checkpoint private/run --resume
                                              go on after Ctrl-C or a crash

All options go with any log. The privacy unit is a user. Each epsilon is of one recommender by itself, and one of them
is released. Writes a folder in two parts: release/, to be handed on, with the SavedModel, statement.txt and
ledger.jsonl; private/, with report.html (and report.md), results and settings. Then try:

  tfdp-rec recommend RUN --history ID ID ...
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `train`."""
    add_options(parser, JobSettings)
    going_on = parser.add_argument_group("going on")
    going_on.add_argument("--checkpoint", metavar="DIR", help="keep what a run needs here; as private as the data")
    going_on.add_argument(
        "--checkpoint-every", type=whole, default=50, metavar="STEPS", help="between checkpoints (default: %(default)s)"
    )
    going_on.add_argument("--resume", action="store_true", help="go on with the run in --checkpoint, or in --out")
    going_on.add_argument("--continue", dest="continues", metavar="RUN", help="add the day in --data to RUN")
    parser.add_argument("--out", help="run folder; default: runs/<time>")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


def run(args: argparse.Namespace) -> int:
    """Trains and writes the run folder."""
    for library in ("pyarrow", "matplotlib", "markdown_it", "tensorboard"):  # before anything is read or paid for
        optional(library, "job")
    verbose = 0 if args.quiet else (1 if sys.stdout.isatty() else 2)
    _refuse_combinations(args)
    checkpoint = _resumed(args) if args.resume else None
    settings, continues = (checkpoint.settings, None) if checkpoint else _asked(args)
    if settings.local:
        code = _in_own_network(args, checkpoint)
        if code is not None:
            return code
    checkpoint = checkpoint or _begun(args, settings, continues)
    with _ended(checkpoint, args), _training(settings) as train:
        from tfdp_rec.job import pipeline
        from tfdp_rec.job.sources import source_of

        pipeline.run(source_of(settings), checkpoint, verbose, train)
    return 0


def _refuse_combinations(args: argparse.Namespace) -> None:
    if args.checkpoint_every < 1:
        raise ValueError(f"--checkpoint-every must be positive, got {args.checkpoint_every}.")
    if args.continues and args.resume:
        raise ValueError("--resume goes on with what is in --checkpoint, --continue begins a day: leave one out.")
    if args.continues and args.out:
        raise ValueError(f"--continue goes on in {args.continues} itself, where the ledger is: leave --out out.")
    if args.resume and not args.checkpoint and not args.out:
        raise ValueError("--resume needs --checkpoint DIR, the folder that the run was kept in, or --out RUN.")


# Settings.


def _asked(args: argparse.Namespace) -> tuple[JobSettings, Mark | None]:
    """Settings of a run that begins, or of a day that is added to one, and where the ledger of that one stood."""
    if not args.continues:
        return _checked(args, JobSettings()), None
    quiet.import_tensorflow()
    from tfdp_rec.job.warm_start import continued

    before, mark = continued(args.continues)
    if before.data and not args.data:
        raise ValueError("--data is missing: say which files hold the day.")
    settings = _checked(args, before)
    # What may be chosen anew is what costs nothing.
    changeable = ("data", "titles", "features", "keep", "recency", "top_k", "local", "cluster")
    free = {name: getattr(settings, name) for name in changeable}
    if before.items and settings.items:
        free["items"] = settings.items  # a public list, read anew: new ones join
    settings.refuse_other(before, args.continues, free)
    return settings, mark


def _checked(args: argparse.Namespace, before: JobSettings) -> JobSettings:
    """Settings from what was typed and what holds otherwise, checked; with the recommenders that are made."""
    from tfdp_rec.job.seats import refuse_unfit
    from tfdp_rec.job.sources import source_of

    settings = chosen(args, before)
    if args.mechanism:
        settings = dataclasses.replace(settings, mechanism=tuple(dict.fromkeys(args.mechanism)))
    source = source_of(settings)
    settings = source.checked()
    if not settings.mechanism:
        usual = names.fitting(source.usual, bool(settings.servers), settings.sampling == SHUFFLED)
        settings = dataclasses.replace(settings, mechanism=usual)
    refuse_unfit(settings)
    _refuse_untrained(settings)
    _refuse_servers(settings)
    _refuse_release(settings, bool(args.continues))
    return settings


def _refuse_release(settings: JobSettings, continues: bool) -> None:
    """A recommender that cannot leave the run."""
    released = names.released(settings.mechanism, settings.export)
    planned = released in [each.name for each in names.IN_ORDER]
    trained = names.is_trained(released) and names.named(released).claims_epsilon
    added = released == names.spectral.name or trained and not planned
    if (settings.days > 1 or continues) and not added:
        raise ValueError(
            "--days and --continue go with private sums, and with trainings of independent noise: "
            f"leave them out, or release another than {released}, such as --mechanism spectral."
        )


def _refuse_untrained(settings: JobSettings) -> None:
    """What cannot be trained so as it is asked for: said before a log is read and paid for."""
    if settings.servers and names.adam.name in settings.mechanism:
        raise ValueError(
            "--mechanism adam keeps state for each weight, which parameter servers do not: take --mechanism sgd with "
            f"--{settings.servers}, or leave --{settings.servers} out."
        )
    upon = names.upon_sums.name
    if upon in settings.mechanism:
        for wrong, option in (
            (settings.servers, f"--{settings.servers}"), (settings.sampling != POISSON, "--sampling shuffled"),
            (settings.order == "no", "--order no"), (settings.user and not settings.time, "no --time"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(
                    f"--mechanism {upon} predicts what comes next, in one process, with users drawn anew for each "
                    f"batch: it does not go with {option}."
                )
    in_order = [each.name for each in names.IN_ORDER]
    planned = [name for name in in_order if name in settings.mechanism]
    priced = [name for name in settings.mechanism if names.is_trained(name) and names.named(name).claims_epsilon]
    others = [name for name in priced if name not in planned]
    if others and settings.sampling == SHUFFLED:
        raise ValueError(
            f"--sampling shuffled has a price for planned noise alone, and {others[0]} has noise of its own in each "
            f"step: take --mechanism {' or '.join(in_order)}."
        )
    if planned and settings.sampling == POISSON:
        elsewhere = f", without --{settings.servers}" if settings.servers else ""
        raise ValueError(
            f"--mechanism {planned[0]} plans its noise for users in one order: add --sampling shuffled{elsewhere}, or "
            "take --mechanism lazydpsgd."
        )


def _refuse_servers(settings: JobSettings) -> None:
    """A cluster that cannot be, and a worker that was given the coordinator's command."""
    if settings.local and settings.cluster:
        raise ValueError("--local starts a cluster, --cluster names one that is up: leave one out.")
    if settings.servers and settings.sampling != POISSON:
        raise ValueError("--sampling shuffled trains in one process: a cluster's workers draw users anew.")
    if settings.local and min(settings.local) < 1:
        workers, servers = settings.local
        raise ValueError(f"--local needs at least one worker and one server, got {workers} and {servers}.")
    if settings.cluster:
        from tfdp_rec.distribute import Cluster

        task = Cluster.read(settings.cluster).task
        if task is not None and task[0] != "chief":
            raise ValueError(f"this process is {task[0]} {task[1]} of the cluster; start it with: tfdp-rec server.")


# The folder of a run, from its beginning to its end.


def _begun(args: argparse.Namespace, settings: JobSettings, continues: Mark | None) -> RunCheckpoint:
    quiet.import_tensorflow(of_a_cluster=bool(settings.servers))
    from tfdp_rec.job.checkpoint import RunCheckpoint

    out = Path(args.continues or args.out or Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    _sweep(out)
    return RunCheckpoint.fresh(args.checkpoint, settings, out, args.checkpoint_every, continues)


def _resumed(args: argparse.Namespace) -> RunCheckpoint:
    quiet.import_tensorflow(of_a_cluster=bool(args.local or args.cluster))
    from tfdp_rec.job.checkpoint import RunCheckpoint, resume_folder

    directory = args.checkpoint or resume_folder(args.out)
    asked = functools.partial(_checked, args)
    checkpoint = RunCheckpoint.resumed(directory, asked, args.out, args.checkpoint_every)
    _sweep(Path(checkpoint.out))
    return checkpoint


def _sweep(out: Path) -> None:
    from tfdp_rec.job.checkpoint import sweep

    for command in sweep(out.absolute().parent):
        print(f"A run was killed. Its grouped log is removed now; go on with it: {command}", file=sys.stderr)


def _in_own_network(args: argparse.Namespace, checkpoint: RunCheckpoint | None) -> int | None:
    """The code of the same command in a network of its own; None if it runs there, or the system gives none."""
    from tfdp_rec.distribute import own_network
    from tfdp_rec.distribute.local_cluster import other_interfaces

    if not other_interfaces():
        return None
    if checkpoint:
        let_go(checkpoint.directory)
    code = own_network.run([sys.executable, "-m", "tfdp_rec.cli", *args.given])
    if checkpoint and code is None:
        hold(checkpoint.directory)
    return code


@contextlib.contextmanager
def _training(settings: JobSettings) -> Iterator[Train | None]:
    """What trains a two-tower: None for this process, or a cluster."""
    if not settings.servers or not any(map(names.is_two_tower, settings.mechanism)):
        yield None
        return
    quiet.when_all_is_said()
    from tfdp_rec.distribute import Cluster, LocalCluster
    from tfdp_rec.job.recommenders.cluster import ClusterTraining

    if settings.local:
        workers, servers = settings.local
        with LocalCluster(workers, servers) as local:
            yield ClusterTraining(local.resolver())
    else:
        yield ClusterTraining(Cluster.read(settings.cluster).resolver())


@contextlib.contextmanager
def _ended(checkpoint: RunCheckpoint, args: argparse.Namespace) -> Iterator[None]:
    """Leaves no log behind without --checkpoint, and says how to go on with a run that was cut off."""
    from tfdp_rec.job.checkpoint import LOST, RESUMABLE, how

    try:
        yield
    except BaseException as problem:
        became = checkpoint.ended(done=False)
        goes_on = became != LOST if args.checkpoint else became == RESUMABLE
        # A wrong argument is to be given otherwise first.
        if goes_on and (isinstance(problem, (KeyboardInterrupt, OSError)) or not (args.checkpoint or args.resume)):
            print(f"Go on with: {how(args.checkpoint, checkpoint.out)}", file=sys.stderr)
        elif became == LOST and not isinstance(problem, ValueError):  # which says so itself
            ledger = checkpoint.folder.release / LEDGER
            print(f"What it paid for was not kept; it stays paid in {ledger}.", file=sys.stderr)
        raise
    checkpoint.ended(done=True)
