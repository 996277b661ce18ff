"""Arguments that `epsilon` and `calibrate` share."""

from __future__ import annotations

import argparse

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent
from tfdp_rec.core.claim.schemes import PoissonSampling
from tfdp_rec.core.claim.statement import rounded_up
from tfdp_rec.settings import integer


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds units, batch, steps, δ, sampling and method."""
    add = parser.add_argument
    add("--also", type=float, action="append", default=[], metavar="S", help="a further Gaussian that is spent once")
    add("--units", type=integer, required=True, metavar="N", help="users (or examples) in the training data; public")
    add("--batch-size", type=float, required=True, metavar="B", help="expected number of units in a batch")
    add("--steps", type=integer, required=True, metavar="T", help="training steps")
    add("--delta", type=float, metavar="D", help="delta, at most 1/N (default: 1/(10 N))")
    add("--unit", default="user", help='name of a unit (default "user")')
    add("--rdp", action="store_true", help="account with Renyi DP: faster, a little larger")
    add("--allow-large-delta", action="store_true", help="accept a delta above 1/N")


def accountant_of(event: DpEvent, args: argparse.Namespace) -> Accountant:
    """An accountant of steps of this event, which was charged with --also."""
    delta = 0.1 / args.units if args.delta is None else args.delta
    sampling = PoissonSampling(args.units, args.batch_size, unit=args.unit)
    accountant = Accountant(event, sampling, delta, "rdp" if args.rdp else "pld", args.allow_large_delta)
    for noise in args.also:
        accountant.spend(GaussianDpEvent(noise), "besides training")
    return accountant


def in_words(epsilon: float, accountant: Accountant) -> str:
    """ε with its δ, method and sampling, for a line of output."""
    how = f"Poisson sampling, q = {accountant.sampling.expected_batch_size / accountant.sampling.num_units:.4g}"
    method = accountant.accountant.upper()
    return f"epsilon = {rounded_up(epsilon):g} at delta = {accountant.delta:g} ({method}, {how})"
