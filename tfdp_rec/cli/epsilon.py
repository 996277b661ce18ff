"""`tfdp-rec epsilon`.

`tfdp-rec epsilon --noise-multiplier 1.0 --units 110794 --batch-size 1024 --steps 2000 --delta 1e-6`

Give --noise-multiplier more than once for a step of several Gaussians (AdaFEST: that of the gradient and that of the
contribution map), and --also for a Gaussian that is spent once in addition, such as DP popularity counts.
"""

from __future__ import annotations

import argparse
import math

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.events import ComposedDpEvent, DpEvent, GaussianDpEvent
from tfdp_rec.core.claim.schemes import PoissonSampling, RandomAllocation, Sampling
from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.settings import integer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `epsilon`."""
    parser.add_argument(
        "--noise-multiplier", type=float, required=True, action="append", metavar="S", help="noise / clip of a step"
    )
    add_sampling_arguments(parser)
    parser.add_argument("--statement", action="store_true", help="print the whole privacy statement")


def run(args: argparse.Namespace) -> int:
    """Prints ε or the statement."""
    gaussians = [GaussianDpEvent(noise) for noise in args.noise_multiplier]
    event = gaussians[0] if len(gaussians) == 1 else ComposedDpEvent(gaussians)
    accountant = make_accountant(event, args)
    if args.statement:
        print(accountant.statement(args.steps), end="")
    else:
        epsilon = accountant.epsilon(args.steps)
        print(describe(epsilon, accountant))
        if math.isfinite(epsilon):
            print(
                f"odds of a guess about one {accountant.sampling.unit}, with all other data known, change by a factor "
                f"of at most {math.exp(min(round_up(epsilon), 700)):,.4g}, but for a chance of {accountant.delta:g}"
            )
    return 0


# What `calibrate` shares.


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds units, batch, steps, δ, sampling and method."""
    add = parser.add_argument
    add("--also", type=float, action="append", default=[], metavar="S", help="a further Gaussian that is spent once")
    add("--units", type=integer, required=True, metavar="N", help="users (or examples) in the training data; public")
    add("--batch-size", type=float, required=True, metavar="B", help="expected number of units in a batch")
    add("--steps", type=integer, required=True, metavar="T", help="training steps")
    add("--delta", type=float, metavar="D", help="delta, at most 1/N (default: 1/(10 N))")
    add("--unit", default="user", help='name of a unit (default "user")')
    add("--allocation", action="store_true", help="batches by random allocation, N/B of them in each epoch")
    add("--rdp", action="store_true", help="account with Renyi DP: faster, a little larger")
    add("--allow-large-delta", action="store_true", help="accept a delta above 1/N")


def make_accountant(event: DpEvent, args: argparse.Namespace) -> Accountant:
    """An accountant of steps of this event, which was charged with --also."""
    delta = 0.1 / args.units if args.delta is None else args.delta
    sampling: Sampling = PoissonSampling(args.units, args.batch_size, unit=args.unit)
    if args.allocation:
        sampling = RandomAllocation(args.units, max(1, round(args.units / args.batch_size)), unit=args.unit)
    accountant = Accountant(event, sampling, delta, "rdp" if args.rdp else "pld", args.allow_large_delta)
    for noise in args.also:
        accountant.spend(GaussianDpEvent(noise), "besides training")
    return accountant


def describe(epsilon: float, accountant: Accountant) -> str:
    """ε with its δ, method and sampling, for a line of output."""
    sampling = accountant.sampling
    how = f"Poisson sampling, q = {sampling.expected_batch_size / sampling.num_units:.4g}"
    if isinstance(sampling, RandomAllocation):
        how = f"random allocation, whole epochs of {sampling.steps_at_once} steps"
    method = accountant.accountant.upper()
    return f"epsilon = {round_up(epsilon):g} at delta = {accountant.delta:g} ({method}, {how})"
