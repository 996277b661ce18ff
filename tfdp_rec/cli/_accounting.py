"""Arguments that `epsilon` and `calibrate` share."""

from __future__ import annotations

import argparse

from tfdp_rec.sampling.schemes import PoissonSampling, Sampling, ShuffledEpochs
from tfdp_rec.settings import whole


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Units, batch, steps, δ, and how units are sampled and accounted."""
    add = parser.add_argument
    add("--units", type=whole, required=True, metavar="N", help="users (or examples) in the training data; public")
    add("--batch-size", type=float, required=True, metavar="B", help="expected number of units in a batch")
    add("--steps", type=whole, required=True, metavar="T", help="training steps")
    add("--delta", type=float, metavar="D", help="delta, at most 1/N (default: 1/(10 N))")
    add("--unit", default="user", help='what a unit is called (default "user")')
    add("--shuffled", action="store_true", help="batches come from shuffled epochs, not from Poisson sampling")
    add("--rdp", action="store_true", help="account with Renyi DP: faster, a little larger")
    add("--allow-large-delta", action="store_true", help="accept a delta above 1/N")


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling scheme that the arguments describe."""
    scheme = ShuffledEpochs if args.shuffled else PoissonSampling
    return scheme(args.units, args.batch_size, unit=args.unit)


def delta_of(args: argparse.Namespace) -> float:
    """--delta, or its default."""
    return 0.1 / args.units if args.delta is None else args.delta


def accountant_of(args: argparse.Namespace) -> str:
    """The accountant's name."""
    return "rdp" if args.rdp else "pld"


def circumstances(args: argparse.Namespace) -> str:
    """What an ε rests on, for a line of output."""
    sampling = sampling_of(args)
    how = "shuffled epochs, no amplification"
    if isinstance(sampling, PoissonSampling):
        how = f"Poisson sampling, q = {sampling.probability:.4g}"
    return f"{accountant_of(args).upper()}, {how}"
