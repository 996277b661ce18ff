"""`tfdp-rec calibrate`."""

from __future__ import annotations

import argparse
import math
import sys

from dp_accounting import GaussianDpEvent

from tfdp_rec.cli import _accounting
from tfdp_rec.spending.calibration import calibrate_noise
from tfdp_rec.spending.statement import rounded_up

HELP = """\
  tfdp-rec calibrate --epsilon 8 --units 110794 --batch-size 1024 \\
      --steps 2000 --delta 1e-6
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `calibrate`."""
    parser.add_argument("--epsilon", type=float, required=True, metavar="E", help="the budget, never exceeded")
    _accounting.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the noise multiplier, and its ε."""
    if not args.rdp:
        print("searching for the least noise (--rdp answers at once) ...", file=sys.stderr, flush=True)
    noise = calibrate_noise(
        args.epsilon,
        _accounting.delta_of(args),
        _accounting.sampling_of(args),
        args.steps,
        _accounting.method_of(args),
        spent=_accounting.spent_besides(args),
        allow_large_delta=args.allow_large_delta,
    )
    trained = _accounting.accountant_of(GaussianDpEvent(noise), args)
    enough, epsilon = math.ceil(noise * 1e4) / 1e4, rounded_up(trained.epsilon(args.steps))
    circumstances = _accounting.circumstances(args)
    print(f"noise multiplier = {enough:.4f}: epsilon = {epsilon:g} at delta = {trained.delta:g} ({circumstances})")
    return 0
