"""`tfdp-rec ledger`.

  tfdp-rec ledger show FILE                 every entry in words
  tfdp-rec ledger verify FILE               whether the chain is whole
  tfdp-rec ledger total FILE --delta 1e-6   ε of all its entries
  tfdp-rec ledger mend FILE                 put aside a last line cut short
  tfdp-rec ledger begin FILE --epsilon 8 --delta 1e-6   a new filter

The format, and a checker of 36 lines that does without this package, are in docs/ledger.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from tfdp_rec.cli.commands import escape
from tfdp_rec.core.claim import events, ledger
from tfdp_rec.core.claim.filters import GaussianFilter, RenyiFilter
from tfdp_rec.core.claim.ledger import Chain, Paid, Snapshot
from tfdp_rec.core.claim.statement import round_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ledger`."""
    parser.add_argument("action", choices=tuple(_ACTIONS), metavar="show|verify|total|mend|begin")
    parser.add_argument("file", metavar="FILE", help="a ledger")
    parser.add_argument("--delta", type=float, metavar="D", help="delta, for total and begin")
    parser.add_argument("--epsilon", type=float, metavar="E", help="the budget, for begin: what the ledger will claim")
    parser.add_argument("--gaussians", action="store_true", help="for begin: Gaussians alone, of which more fit")
    parser.add_argument("--rdp", action="store_true", help="quicker and a little larger than the default, PLD")


def run(args: argparse.Namespace) -> int:
    """Runs the action asked for."""
    return _ACTIONS[args.action](args)


def _show(args: argparse.Namespace) -> int:
    chain = ledger.read(args.file)
    for payment in chain.paid:
        print(_describe(payment))
    print(_headline(chain))
    return 0


def _verify(args: argparse.Namespace) -> int:
    try:
        chain = ledger.read(args.file)
    except ledger.BrokenLedger as problem:
        print(f"BROKEN: {problem}")
        return 1
    print(f"whole: {_headline(chain)}, head {chain.head[:16]}")
    return 0


def _total(args: argparse.Namespace) -> int:
    if args.delta is None or not 0 <= args.delta < 1:
        raise ValueError(f"--delta must be given, at least 0 and below 1, got {args.delta}.")
    chain = ledger.read(args.file)
    epsilon = chain.epsilon(args.delta, "rdp" if args.rdp else "pld")
    last = chain.last_paid
    about = f" for one {last.unit}, {last.adjacency}" if last else ""
    print(f"epsilon = {round_up(epsilon):g} at delta = {args.delta:g}{about} ({_headline(chain)})")
    return 0


def _mend(args: argparse.Namespace) -> int:
    print(f"the line that was cut short is now in {ledger.mend(args.file)}; the ledger is whole")
    return 0


def _begin(args: argparse.Namespace) -> int:
    if args.epsilon is None or args.delta is None:
        raise ValueError("--epsilon and --delta must be given: they are the budget that the ledger will claim.")
    if os.path.exists(args.file):
        raise ValueError(f"{args.file} exists: a ledger's kind never changes. Begin another.")
    limit = (GaussianFilter if args.gaussians else RenyiFilter)(args.epsilon, args.delta)
    with ledger.Ledger(args.file, "", Snapshot(None), limit=limit) as begun:  # payments say unit and data
        print(_headline(begun))
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "show": _show,
    "verify": _verify,
    "total": _total,
    "mend": _mend,
    "begin": _begin,
}


def _headline(chain: Chain) -> str:
    counts = f"{len(chain.lines)} lines, {len(chain.paid)} payments, {chain.steps} steps"
    return f"ledger {chain.id}, {counts}; {chain.kind}"


def _describe(payment: Paid) -> str:
    about = "" if payment.about is None else f", about {len(payment.about)} items"
    label = escape(payment.label or "unnamed")
    return f"{payment.number:>5}  {payment.attempts} x {events.describe(payment.event)}: {label}{about}"
