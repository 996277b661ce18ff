r"""`tfdp-rec calibrate`.

  tfdp-rec calibrate --epsilon 8 --units 110794 --batch-size 1024 \
      --steps 2000 --delta 1e-6

The noise is rounded up to four decimals.
"""

from __future__ import annotations

import argparse
import math
import sys

from tfdp_rec.cli.epsilon import add_sampling_arguments, describe, make_accountant
from tfdp_rec.core.claim.calibration import calibrate_noise
from tfdp_rec.core.claim.events import GaussianDpEvent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `calibrate`."""
    parser.add_argument("--epsilon", type=float, required=True, metavar="E", help="the budget, never exceeded")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the noise multiplier, and its ε."""
    if not args.rdp:
        print("searching for the least noise (--rdp answers at once) ...", file=sys.stderr, flush=True)
    checked = make_accountant(GaussianDpEvent(1.0), args)
    noise = calibrate_noise(
        args.epsilon, checked.delta, checked.sampling, args.steps, checked.accountant, spent=checked.spent_besides,
        allow_large_delta=args.allow_large_delta,
    )  # fmt: skip
    trained = make_accountant(GaussianDpEvent(noise), args)
    enough, epsilon = math.ceil(noise * 1e4) / 1e4, trained.epsilon(args.steps)
    print(f"noise multiplier = {enough:.4f}: {describe(epsilon, trained)}")
    return 0
