"""`tfdp-rec epsilon`."""

from __future__ import annotations

import argparse

from dp_accounting import ComposedDpEvent, GaussianDpEvent

from tfdp_rec.cli import _accounting
from tfdp_rec.spending.accountant import Accountant
from tfdp_rec.spending.statement import rounded_up

HELP = """\
  tfdp-rec epsilon --noise-multiplier 1.0 --units 110794 --batch-size 1024 --steps 2000 --delta 1e-6

Give --noise-multiplier more than once for a step of several Gaussians (AdaFEST: the gradient's and the
contribution map's), and --also for Gaussians spent once besides, such as DP popularity counts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `epsilon`."""
    parser.add_argument(
        "--noise-multiplier",
        type=float,
        required=True,
        action="append",
        metavar="S",
        help="noise / clip norm of a step",
    )
    parser.add_argument("--also", type=float, action="append", default=[], metavar="S", help="one more Gaussian, once")
    _accounting.add_sampling_arguments(parser)
    parser.add_argument("--statement", action="store_true", help="print the whole privacy statement")


def run(args: argparse.Namespace) -> int:
    """Prints ε or the statement."""
    gaussians = [GaussianDpEvent(noise) for noise in args.noise_multiplier]
    event = gaussians[0] if len(gaussians) == 1 else ComposedDpEvent(gaussians)
    accountant = Accountant(
        event,
        _accounting.sampling_of(args),
        _accounting.delta_of(args),
        _accounting.accountant_of(args),
        args.allow_large_delta,
    )
    for noise in args.also:
        accountant.spend(GaussianDpEvent(noise), "besides training")
    if args.statement:
        print(accountant.statement(args.steps), end="")
    else:
        epsilon = accountant.epsilon(args.steps)
        print(f"epsilon = {rounded_up(epsilon):g} at delta = {accountant.delta:g} ({_accounting.circumstances(args)})")
    return 0
