"""The command `tfdp-rec`. Help and accounting answer at once: only the module of the asked command is imported."""

from __future__ import annotations

from collections.abc import Sequence

import tfdp_rec
from tfdp_rec.cli.commands import Command, run

COMMANDS = tuple(
    Command(name, f"tfdp_rec.cli.{name}", headline)
    for name, headline in {
        "plan": "three settings of a private training, by time and by what epsilon lets it learn",
        "train": "train private recommenders, of movies or of a log of your own",
        "recommend": "what comes next: a history of ids in, ids and titles out",
        "serve": "answer over HTTP, in the shape of TensorFlow Serving's REST interface",
        "index": "an approximate index beside a two-tower of many items, for quicker answers",
        "card": "a card of a run whose every number is public, paid for, or computed from those; and its check",
        "track": "what a run promises, as a run of MLflow",
        "export": "a saved model as a SavedModel for serving",
        "epsilon": "the epsilon of a training: noise, sampling and steps in, (epsilon, delta) out",
        "calibrate": "the least noise multiplier for a privacy budget",
        "ledger": "what a ledger says was spent, and whether it is whole",
        "audit": "a lower bound on a mechanism's epsilon, from one training run with planted canaries",
        "doctor": "all that private training would refuse of a model, before any training",
        "federate": "train a news recommender over federated clients, privately",
        "server": "run one worker or parameter server of a cluster",
    }.items()
)

DESCRIPTION = """\
Differentially private training of recommenders.

  tfdp-rec train                      the main job, on generated data
  tfdp-rec train --data logs/*.parquet --user user_id --item sku
  tfdp-rec calibrate --epsilon 8 --units 110794 --batch-size 1024 \\
      --steps 2000 --delta 1e-6
  tfdp-rec epsilon --noise-multiplier 1.0 --units 110794 --batch-size 1024 \\
      --steps 2000 --delta 1e-6

Each command explains itself: tfdp-rec COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tfdp-rec`; returns the exit code.

    Args:
        argv: Arguments; those of the process if left out.

    Example:
        >>> main("epsilon --noise-multiplier 2 --units 1000 --batch-size 10 --steps 100 --delta 1e-4 --rdp".split())
        epsilon = 0.1913 at delta = 0.0001 (RDP, Poisson sampling, q = 0.01)
        odds of a guess about one user, ... change by a factor of at most 1.21..., but for a chance of 0.0001
        0
    """
    return run("tfdp-rec", DESCRIPTION, COMMANDS, argv, tfdp_rec.__version__)
