"""`tfdp-rec calibrate`."""

from __future__ import annotations

import argparse
import math
import sys

from dp_accounting import GaussianDpEvent

from tfdp_rec.cli import _accounting
from tfdp_rec.spending.accountant import Accountant
from tfdp_rec.spending.calibration import calibrate_noise
from tfdp_rec.spending.statement import rounded_up

HELP = """\
  tfdp-rec calibrate --epsilon 8 --units 110794 --batch-size 1024 --steps 2000 --delta 1e-6
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `calibrate`."""
    parser.add_argument("--epsilon", type=float, required=True, metavar="E", help="the budget, never exceeded")
    parser.add_argument("--also", type=float, action="append", default=[], metavar="S", help="one more Gaussian, once")
    _accounting.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the noise multiplier, and the ε that it comes to."""
    sampling, delta, accountant = (
        _accounting.sampling_of(args),
        _accounting.delta_of(args),
        _accounting.accountant_of(args),
    )
    if not args.rdp:
        print("searching for the least noise (--rdp answers at once) ...", file=sys.stderr, flush=True)
    spent = [(GaussianDpEvent(noise), "besides training") for noise in args.also]
    noise = calibrate_noise(
        args.epsilon, delta, sampling, args.steps, accountant, spent=spent, allow_large_delta=args.allow_large_delta
    )
    trained = Accountant(GaussianDpEvent(noise), sampling, delta, accountant, args.allow_large_delta)
    for event, label in spent:
        trained.spend(event, label)
    enough, epsilon = math.ceil(noise * 1e4) / 1e4, rounded_up(trained.epsilon(args.steps))
    circumstances = _accounting.circumstances(args)
    print(f"noise multiplier = {enough:.4f}: epsilon = {epsilon:g} at delta = {delta:g} ({circumstances})")
    return 0
