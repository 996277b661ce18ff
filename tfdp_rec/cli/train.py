r"""`tfdp-rec train`: a log of one's own, MovieLens files or generated timelines to a private recommender.

  tfdp-rec train --data logs/*.parquet --user user_id --item sku --time ts \
      --out runs/spring                       a log of your own (docs/logs.md)
  tfdp-rec train --continue runs/spring --data next/*.parquet
                                              a further day of it
  tfdp-rec train                              generated timelines
  tfdp-rec train --confidential               the main job, and others beside it
  tfdp-rec train --mechanism spectral         private sums alone
  tfdp-rec train --mechanism upon-sums        a model trained upon private sums
  tfdp-rec train --mechanism auto             one of these two, by a choice
  tfdp-rec train --mechanism lazydpsgd --epsilon 4
  tfdp-rec train --export lazydpsgd           all, and the two-tower is released
  tfdp-rec train --sampling shuffled          users in one order: LazyDPFTRL
  tfdp-rec train --data ml-20m                MovieLens files (ml-1m to ml-32m)
  tfdp-rec train --local 2 2                  2 workers, 2 servers, started here
  tfdp-rec train --cluster cluster.json       on a cluster (docs/scaling.md)
  tfdp-rec train --checkpoint private/run     keep the grouped log, too
  tfdp-rec train --checkpoint private/run --resume
                                              go on after Ctrl-C or a crash

All options go with any log. The privacy unit is a user. Each ε is of one recommender by itself, and one of them
is released. Writes a folder in two parts: release/, to be handed on, with the SavedModel, statement.txt and
ledger.jsonl; private/, with report.html (and report.md), results and settings. The figures of held-out users in it
have noise, which is paid for within --epsilon (--metrics-epsilon). Exact ones, losses and curves, and comparisons with
other recommenders, are made with --confidential alone, in private/confidential/. Then try:

  tfdp-rec recommend RUN --history ID ID ...
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdp_rec.cli import quiet
from tfdp_rec.core.ground.files import end_hold, hold
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.run_folder import LEDGER
from tfdp_rec.job.settings import POISSON, SHUFFLED, JobSettings
from tfdp_rec.settings import add_options, choose, integer

if TYPE_CHECKING:
    from tfdp_rec.core.claim.ledger import Mark
    from tfdp_rec.job.run_state import RunState

# What may be chosen anew for a further day is what costs nothing.
_FREE = ("data", "titles", "features", "keep", "recency", "top_k", "local", "cluster", "engine", "confidential")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `train`."""
    add_options(parser, JobSettings)
    going_on = parser.add_argument_group("going on")
    going_on.add_argument("--checkpoint", metavar="DIR", help="keep what a run needs here; as private as the data")
    every = "between checkpoints (default: %(default)s)"
    going_on.add_argument("--checkpoint-every", type=integer, default=50, metavar="STEPS", help=every)
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
    state = _resume(args) if args.resume else None
    settings, continues = (state.settings, None) if state else _settings_to_begin(args)
    if settings.engine:
        optional("pyspark", settings.engine)
    if settings.local:
        code = _run_in_own_network(args, state)
        if code is not None:
            return code
    state = state or _begin(args, settings, continues)
    with _clean_up_after(state, args):
        quiet.import_tensorflow(of_a_cluster=bool(settings.servers))
        from tfdp_rec.job import pipeline
        from tfdp_rec.job.sources import choose_source

        with _cluster(settings) as train:
            pipeline.run(choose_source(settings), state, verbose, train)
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


def _settings_to_begin(args: argparse.Namespace) -> tuple[JobSettings, Mark | None]:
    """Settings of a run that begins, or of a day that is added to one, and where the ledger of that one stood."""
    if not args.continues:
        return _choose_settings(args, JobSettings()), None
    from tfdp_rec.job.run_state import settings_to_continue

    before, mark = settings_to_continue(args.continues)
    if before.data and not args.data:
        raise ValueError("--data is missing: say which files hold the day.")
    settings = _choose_settings(args, before)
    read_anew = ("items",) if before.items and settings.items else ()  # a public list, whose new items join
    settings.refuse_changes(before, args.continues, _FREE + read_anew)
    return settings, mark


def _choose_settings(args: argparse.Namespace, before: JobSettings) -> JobSettings:
    """Settings from what was typed and what holds otherwise, checked; with the recommenders that are made."""
    from tfdp_rec.job.sources import choose_source

    source = choose_source(choose(args, before))
    settings = source.check_settings()
    usual = names.replace_unfit(source.usual, bool(settings.servers), settings.sampling == SHUFFLED)
    if not settings.confidential:  # nothing would be said of the others
        trains = bool(settings.servers) or settings.sampling != POISSON  # asked for, and of no use to sums
        usual = (names.choose_released([*filter(names.is_two_tower, usual)] * trains or usual, settings.export),)
    settings = dataclasses.replace(settings, mechanism=tuple(dict.fromkeys(settings.mechanism or usual)))
    settings.refuse_contradictions(bool(args.continues))
    if settings.cluster:
        from tfdp_rec.distribute import Cluster

        task = Cluster.read(settings.cluster).task
        if task is not None and task[0] != "chief":
            raise ValueError(f"this process is {task[0]} {task[1]} of the cluster; start it with: tfdp-rec server.")
    return settings


# The folder of a run, from its beginning to its end.


def _begin(args: argparse.Namespace, settings: JobSettings, continues: Mark | None) -> RunState:
    from tfdp_rec.job.run_state import RunState

    out = Path(args.continues or args.out or Path("runs") / datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    _sweep(out)
    return RunState.begin(args.checkpoint, settings, out, args.checkpoint_every, continues)


def _resume(args: argparse.Namespace) -> RunState:
    from tfdp_rec.job.run_state import RunState, resume_folder

    directory = args.checkpoint or resume_folder(args.out)
    state = RunState.resume(directory, functools.partial(_choose_settings, args), args.out, args.checkpoint_every)
    _sweep(Path(state.out))
    return state


def _sweep(out: Path) -> None:
    from tfdp_rec.job.run_state import sweep

    for command in sweep(out.absolute().parent):
        print(f"A run was killed. Its grouped log is removed now; go on with it: {command}", file=sys.stderr)


@contextlib.contextmanager
def _clean_up_after(state: RunState, args: argparse.Namespace) -> Iterator[None]:
    """Leaves no log behind without --checkpoint, and says how to go on with a run that was cut off."""
    from tfdp_rec.job.run_state import LOST, RESUMABLE, resume_command

    try:
        yield
    except BaseException as problem:
        became = state.end(is_done=False)
        goes_on = became != LOST if args.checkpoint else became == RESUMABLE
        # A wrong argument is to be given otherwise first.
        if goes_on and (isinstance(problem, (KeyboardInterrupt, OSError)) or not (args.checkpoint or args.resume)):
            print(f"Go on with: {resume_command(args.checkpoint, state.out)}", file=sys.stderr)
        elif became == LOST and not isinstance(problem, ValueError):  # which says so itself
            ledger = state.folder.release / LEDGER
            print(f"What it paid for was not kept; it stays paid in {ledger}.", file=sys.stderr)
        raise
    state.end(is_done=True)


# Parameter servers.


def _run_in_own_network(args: argparse.Namespace, state: RunState | None) -> int | None:
    """The code of the same command in a network of its own; None if it runs there, or the system gives none."""
    from tfdp_rec.distribute import own_network
    from tfdp_rec.distribute.local_cluster import other_interfaces

    if not other_interfaces():
        return None
    if state:
        end_hold(state.directory)
    code = own_network.run([sys.executable, "-m", "tfdp_rec.cli", *args.given])
    if state and code is None:
        hold(state.directory)
    return code


@contextlib.contextmanager
def _cluster(settings: JobSettings) -> Iterator[Callable[..., Any] | None]:
    """What trains a two-tower: None for this process, or a cluster."""
    if not settings.servers or not any(map(names.is_two_tower, settings.mechanism)):
        yield None
        return
    quiet.silence_stderr_at_exit()
    from tfdp_rec.distribute import Cluster, LocalCluster
    from tfdp_rec.job.recommenders.cluster import ClusterTraining

    if settings.local:
        workers, servers = settings.local
        with LocalCluster(workers, servers) as local:
            yield ClusterTraining(local.resolver())
    else:
        yield ClusterTraining(Cluster.read(settings.cluster).resolver())
