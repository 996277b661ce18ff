"""`tfdp-rec audit`.

  tfdp-rec audit --mechanism LazyDPSGD --noise-multiplier 4 --runs 5

Trains a table of canaries through the package's own fit, half of them left out by fair coins, and guesses from the
released weights which were. Prints the ε that the mechanism claims and three lower bounds: the first assumes nothing
(Steinke, Nasr and Jagielski 2023), the second that noise is Gaussian, whatever its scale (Mahloujifar, Melis and
Chaudhuri 2025), the third that it is independent from row to row, too. The exit code is 1 if a bound refutes the
claim. A bound can show a fault, not its absence.

  tfdp-rec audit --run runs/spring

Tries to tell the users that a run's released recommender was made of from held-out ones. The result is a page in the
run's private folder: it is not private itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

from tfdp_rec import mechanisms
from tfdp_rec.cli import quiet
from tfdp_rec.core.ground.lazy_imports import optional

MECHANISMS = {mechanism.class_name: mechanism for mechanism in mechanisms.COMMON}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `audit`."""
    usual = mechanisms.lazy_dp_sgd.class_name
    parser.add_argument("--run", dest="folder", metavar="RUN", help="attack this run's recommender, audit no mechanism")
    parser.add_argument("--mechanism", choices=MECHANISMS, default=usual, help="default: %(default)s")
    parser.add_argument("--noise-multiplier", type=float, default=4.0, metavar="S", help="default: %(default)s")
    parser.add_argument("--claim", type=float, metavar="EPS", help="epsilon to test; default: the accountant's")
    parser.add_argument("--canaries", type=int, default=100_000, metavar="M", help="default: %(default)s")
    parser.add_argument("--guesses", type=int, metavar="R", help="default: 800, or the canaries if these are fewer")
    parser.add_argument("--steps", type=int, default=2, metavar="T", help="steps of each run; default: %(default)s")
    parser.add_argument(
        "--sampling-rate", type=float, default=1.0, metavar="Q", help="of a Poisson draw at each step; default: all"
    )
    parser.add_argument("--delta", type=float, default=1e-6, help="default: %(default)s")
    parser.add_argument("--confidence", type=float, default=0.99, help="of each bound of a run; default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="independent audits; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="file for the results, in JSON")


def run(args: argparse.Namespace) -> int:
    """Audits and prints; the exit code is 1 if the claim was refuted."""
    if args.folder is not None:
        return _attack(args.folder)
    if args.runs < 1:
        raise ValueError(f"--runs must be at least 1, got {args.runs}.")
    if args.claim is not None and not args.claim >= 0:
        raise ValueError(f"--claim must not be negative, got {args.claim}.")
    if args.json:  # before the trainings: a file that cannot be written would lose them
        open(args.json, "a", encoding="utf-8").close()
    quiet.import_tensorflow()
    from tfdp_rec.models.canary_table import AuditPlan, audit_runs

    guesses = min(800, args.canaries) if args.guesses is None else args.guesses
    plan = AuditPlan(args.canaries, guesses, args.steps, args.delta, args.confidence, sampling_rate=args.sampling_rate)
    batch_size = args.sampling_rate * args.canaries / 2
    optimizer = MECHANISMS[args.mechanism].optimizer(
        1.0, l2_norm_clip=1.0, noise_multiplier=args.noise_multiplier, expected_batch_size=batch_size
    )
    claim = plan.epsilon_claim(optimizer.dp_event()) if args.claim is None else args.claim
    print(f"{args.mechanism}, noise multiplier {args.noise_multiplier:g}, {plan.steps} steps: claims ε = {claim:.4g}")
    refuted, found = 0, []
    for number, audit in enumerate(itertools.islice(audit_runs(optimizer, plan), args.runs), start=1):
        is_refuted = audit.greatest_epsilon > claim
        refuted += is_refuted
        found.append((audit.epsilon, audit.curve_epsilon, audit.independent_epsilon))
        print(f"run {number}: {audit}{'  REFUTED' if is_refuted else ''}", flush=True)
    if args.json:
        bounds = dict(zip(("bounds", "curve_bounds", "independent_bounds"), zip(*found)))
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"mechanism": args.mechanism, "claim": claim, **bounds, "refuted": refuted}, file)
    verdict = f"refuted in {refuted} of {args.runs} runs" if refuted else "not refuted"
    print(f"The claim is {verdict}.")
    return 1 if refuted else 0


def _attack(run: str) -> int:
    for library in ("pyarrow", "markdown_it"):
        optional(library, "job")
    quiet.import_tensorflow()
    from tfdp_rec.job import membership

    print(f"{membership.write_page(Path(run))}: for you alone, no epsilon covers it")
    return 0
