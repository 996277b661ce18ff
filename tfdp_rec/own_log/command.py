"""`tfdp-rec train --user ... --item ...`: the part of the command that is about logs of one's own."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tfdp_rec import quiet, run_folder
from tfdp_rec.own_log.folders import is_kept
from tfdp_rec.own_log.settings import Asked, Columns, Days
from tfdp_rec.run_folder import LEDGER, PRIVATE, RESUME
from tfdp_rec.settings import add_options, chosen

if TYPE_CHECKING:
    from tfdp_rec.own_log.kept import Kept
    from tfdp_rec.spending.ledger_lines import Mark


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that are about a log's columns; the others are those of the movies' run."""
    add_options(parser, Columns)
    add_options(parser, Days)
    parser.add_argument("--continue", dest="continues", metavar="RUN", help="add the day in --data, of a log, to RUN")


def run(args: argparse.Namespace) -> int:
    """Trains on a log, and writes the run folder."""
    verbose = 0 if args.quiet else (1 if sys.stdout.isatty() else 2)
    with in_words_of_the_command_line(args):
        kept = _going_on(args) if args.resume else _further(args) if args.continues else _fresh(args)
        with _ended(kept, args):
            from tfdp_rec.own_log import job

            job.run(kept.asked, kept, verbose)
    return 0


@contextlib.contextmanager
def _ended(kept: Kept, args: argparse.Namespace) -> Iterator[None]:
    """Leaves no log behind that nobody asked to be kept, and says how to go on with a run that was cut off."""
    from tfdp_rec.own_log.kept import LOST, RESUMABLE, how

    try:
        yield
    except BaseException as problem:
        became = kept.ended(done=False)
        stopped = isinstance(problem, KeyboardInterrupt)
        if stopped if args.checkpoint else became == RESUMABLE and (stopped or not args.resume):
            print(f"Go on with: {how(args.checkpoint, kept.out)}", file=sys.stderr)
        elif became == LOST and not isinstance(problem, ValueError):  # which says so itself
            print(f"What it paid for was not kept; it stays paid in {kept.folder.release / LEDGER}.", file=sys.stderr)
        raise
    kept.ended(done=True)


def _asked(args: argparse.Namespace, before: Asked) -> Asked:
    return Asked(chosen(args, before.columns), chosen(args, before.terms), chosen(args, before.days)).checked()


def _further(args: argparse.Namespace) -> Kept:
    """A day that is added to a run: what may be asked for anew is what costs nothing."""
    if args.out:
        raise ValueError(f"--continue goes on in {args.continues} itself, where the ledger is: leave --out out.")
    quiet.import_tensorflow()
    from tfdp_rec.own_log.earlier import Earlier, asked_of

    before = asked_of(args.continues)
    asked = _asked(args, dataclasses.replace(before, terms=dataclasses.replace(before.terms, data=())))
    free = {"data": asked.terms.data, "titles": asked.columns.titles, "keep": asked.days.keep}
    free |= {"recency": asked.terms.recency, "top_k": asked.terms.top_k}
    if before.columns.items and asked.columns.items:
        free["items"] = asked.columns.items  # a public list, read anew: new ones join
    asked.refuse_other(before, free, args.continues)
    return _begun(args, asked, Path(args.continues), Earlier.load(args.continues).mark)


def _begun(args: argparse.Namespace, asked: Asked, out: Path, continues: Mark | None = None) -> Kept:
    from tfdp_rec.own_log.kept import Kept

    _sweep(out)
    return Kept.fresh(args.checkpoint, asked, out, continues)


def _fresh(args: argparse.Namespace) -> Kept:
    asked = _asked(args, Asked())
    out = Path(args.out or run_folder.default())
    if not is_kept(out / PRIVATE / RESUME):  # else how to go on with it is said
        run_folder.refuse_another(out)
    quiet.import_tensorflow()
    return _begun(args, asked, out)


def _going_on(args: argparse.Namespace) -> Kept:
    quiet.import_tensorflow()
    from tfdp_rec.own_log.kept import Kept, resume_folder

    kept = Kept.going_on(args.checkpoint or resume_folder(args.out), lambda before: _asked(args, before), args.out)
    _sweep(Path(kept.out))
    return kept


def _sweep(out: Path) -> None:
    from tfdp_rec.movies import laid_out
    from tfdp_rec.own_log.kept import sweep

    laid_out.sweep(out.absolute().parent)
    for command in sweep(out.absolute().parent):
        print(f"A run was killed. Its grouped log is removed now; go on with it: {command}", file=sys.stderr)


@contextlib.contextmanager
def in_words_of_the_command_line(args: argparse.Namespace) -> Iterator[None]:
    """Errors as somebody who typed options reads them.

    Args:
        args: what was typed.
    """
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(_full(problem, args)) from problem
        raise
    except ValueError as problem:
        raise type(problem)(_translated(str(problem), args)) from problem


def _full(problem: OSError, args: argparse.Namespace) -> str:
    where = f" ({problem.filename})" if problem.filename else ""
    on = f"go on with --checkpoint {args.checkpoint} --resume" if args.checkpoint else "try again"
    return (
        f"The disk is full{where}, and what was half written is removed. Grouping a log takes some 60 bytes a row "
        f"while it lasts, in the run folder or in --checkpoint DIR: free some space, and {on}."
    )


def _translated(words: str, args: argparse.Namespace) -> str:
    column = re.search(r"has no column '(.*?)'; it has", words)
    for name in ("user", "item", "time"):
        if column and column[1] == getattr(args, name, None):
            words = f"--{name}: {words}"
    return words.replace(
        "say which one holds the ids, column='...'.", f"call the one with the ids {args.item or 'item'!r}."
    )
