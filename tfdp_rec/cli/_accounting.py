"""Arguments that `epsilon` and `calibrate` share."""

from __future__ import annotations

import argparse

from dp_accounting import DpEvent, GaussianDpEvent

from tfdp_rec.sampling.schemes import PoissonSampling, Sampling, ShuffledEpochs
from tfdp_rec.settings import whole
from tfdp_rec.spending.accountant import Accountant


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds units, batch, steps, δ, sampling and method."""
    add = parser.add_argument
    add("--also", type=float, action="append", default=[], metavar="S", help="a further Gaussian that is spent once")
    add("--units", type=whole, required=True, metavar="N", help="users (or examples) in the training data; public")
    add("--batch-size", type=float, required=True, metavar="B", help="expected number of units in a batch")
    add("--steps", type=whole, required=True, metavar="T", help="training steps")
    add("--delta", type=float, metavar="D", help="delta, at most 1/N (default: 1/(10 N))")
    add("--unit", default="user", help='name of a unit (default "user")')
    add("--shuffled", action="store_true", help="batches come from shuffled epochs, not from Poisson sampling")
    add("--rdp", action="store_true", help="account with Renyi DP: faster, a little larger")
    add("--allow-large-delta", action="store_true", help="accept a delta above 1/N")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling scheme that the arguments describe."""
    scheme = ShuffledEpochs if args.shuffled else PoissonSampling
    return scheme(args.units, args.batch_size, unit=args.unit)


def delta_of(args: argparse.Namespace) -> float:
    """δ of --delta, or its default."""
    return 0.1 / args.units if args.delta is None else args.delta


def method_of(args: argparse.Namespace) -> str:
    """Name of the method that composes."""
    return "rdp" if args.rdp else "pld"


def spent_besides(args: argparse.Namespace) -> list[tuple[DpEvent, str]]:
    """The Gaussians of --also, each with its label."""
    return [(GaussianDpEvent(noise), "besides training") for noise in args.also]


def accountant_of(event: DpEvent, args: argparse.Namespace) -> Accountant:
    """An accountant of steps of this event, which was charged with --also."""
    accountant = Accountant(event, sampling_of(args), delta_of(args), method_of(args), args.allow_large_delta)
    for besides, label in spent_besides(args):
        accountant.spend(besides, label)
    return accountant


def circumstances(args: argparse.Namespace) -> str:
    """Method and sampling of an ε, for a line of output."""
    sampling = sampling_of(args)
    how = "shuffled epochs, no amplification"
    if isinstance(sampling, PoissonSampling):
        how = f"Poisson sampling, q = {sampling.probability:.4g}"
    return f"{method_of(args).upper()}, {how}"
