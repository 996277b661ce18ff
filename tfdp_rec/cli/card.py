r"""`tfdp-rec card`.

  tfdp-rec card runs/spring
  tfdp-rec card runs/spring --metrics-epsilon 1
  tfdp-rec card --verify runs/spring/card

Writes RUN/card: README.md, privacy.json, a copy of the ledger, and a plot. Every number in it is public, paid for, or
computed from those; the report's figures never enter it. With --metrics-epsilon or --metrics-noise, private figures of
the held-out users are made once: paid for in the run's ledger before these users are looked at, and kept there. That is
more than --epsilon of the training; the card tells the sum. --verify makes a card again from its own files.
"""

from __future__ import annotations

import argparse

from tfdp_rec.cli import quiet
from tfdp_rec.core.claim.composition import check_epsilon
from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.claim.ledger import Payment, read
from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.job.run_folder import LEDGER, find
from tfdp_rec.sums.fixed_point import check_noise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `card`."""
    parser.add_argument("folder", metavar="RUN", help="a run folder; of --verify a card")
    price = parser.add_mutually_exclusive_group()
    price.add_argument("--metrics-epsilon", type=float, metavar="E", help="release figures that by themselves cost E")
    price.add_argument("--metrics-noise", type=float, metavar="SIGMA", help="the same by their noise multiplier")
    price.add_argument("--verify", action="store_true", help="check a card: exit code 1 if it was changed")


def run(args: argparse.Namespace) -> int:
    """Writes a card, or checks one."""
    from tfdp_rec.job import card

    if args.verify:
        try:
            said = card.verify(args.folder)
        except ValueError as problem:
            print(f"CHANGED: {problem}")
            return 1
        print(f"whole: epsilon = {said['epsilon']:g} at delta = {said['delta']:g}, by {said['ledger']['lines']} lines")
        return 0
    folder = card.write(args.folder)  # whatever cannot be written fails here, before anything is paid
    if args.metrics_epsilon is not None or args.metrics_noise is not None:
        _add_figures(args)
        card.write(args.folder)
    said = card.verify(folder)
    for name, figure in said["metrics"].items():
        print(f"{name:<17} {card.figure_of(figure)}")
    print(f"{folder}: epsilon = {said['epsilon']:g} at delta = {said['delta']:g}")
    return 0


def _add_figures(args: argparse.Namespace) -> None:
    """Pays for figures and makes them, unless the run has some."""
    from tfdp_rec.job.budget import Budget
    from tfdp_rec.job.held_out import kept_figures, release_figures

    chain = read(find(args.folder, LEDGER))
    if kept_figures(chain)[0]:
        print("the run has its figures: they are shown as they are kept, and nothing is paid")
        return
    delta, noise = Budget.read(chain).delta, args.metrics_noise
    noise = noise_of_one_release(args.metrics_epsilon, delta) if noise is None else check_noise(noise)
    after = chain.epsilon(delta, more=[Payment(GaussianDpEvent(noise))])
    check_epsilon(after)
    print(f"figures of held-out users take epsilon to {round_up(after):g}, at delta = {delta:g}", flush=True)
    quiet.import_tensorflow()
    release_figures(args.folder, noise)
