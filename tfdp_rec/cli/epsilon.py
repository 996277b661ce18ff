"""`tfdp-rec epsilon`.

`tfdp-rec epsilon --noise-multiplier 1.0 --units 110794 --batch-size 1024 --steps 2000 --delta 1e-6`

Give --noise-multiplier more than once for a step of several Gaussians (AdaFEST: that of the gradient and that of the
contribution map), and --also for a Gaussian that is spent once in addition, such as DP popularity counts.
"""

from __future__ import annotations

import argparse

from tfdp_rec.cli import _accounting
from tfdp_rec.core.claim.events import ComposedDpEvent, GaussianDpEvent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `epsilon`."""
    parser.add_argument(
        "--noise-multiplier", type=float, required=True, action="append", metavar="S", help="noise / clip of a step"
    )
    _accounting.add_sampling_arguments(parser)
    parser.add_argument("--statement", action="store_true", help="print the whole privacy statement")


def run(args: argparse.Namespace) -> int:
    """Prints ε or the statement."""
    gaussians = [GaussianDpEvent(noise) for noise in args.noise_multiplier]
    event = gaussians[0] if len(gaussians) == 1 else ComposedDpEvent(gaussians)
    accountant = _accounting.accountant_of(event, args)
    if args.statement:
        print(accountant.statement(args.steps), end="")
    else:
        print(_accounting.in_words(accountant.epsilon(args.steps), accountant))
    return 0
