"""The command `tfdp-rec`. Help and accounting answer at once: only the module of the asked command is imported."""

from __future__ import annotations

from collections.abc import Sequence

import tfdp_rec
from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

COMMANDS = (
    Command("train", "tfdp_rec.cli.train", "train private recommenders, of movies or of a log of your own"),
    Command("recommend", "tfdp_rec.cli.recommend", "what comes next: a history of ids in, ids and titles out"),
    Command("serve", "tfdp_rec.cli.serve", "answer over HTTP, in the shape of TensorFlow Serving's REST interface"),
    Command("export", "tfdp_rec.cli.export", "a saved model as a SavedModel for serving"),
    Command(
        "epsilon",
        "tfdp_rec.cli.epsilon",
        "the epsilon of a training: noise, sampling and steps in, (epsilon, delta) out",
    ),
    Command("calibrate", "tfdp_rec.cli.calibrate", "the least noise multiplier for a privacy budget"),
    Command("ledger", "tfdp_rec.cli.ledger", "what a ledger says was spent, and whether it is whole"),
    Command(
        "audit",
        "tfdp_rec.cli.audit",
        "a lower bound on a mechanism's epsilon, from one training run with planted canaries",
    ),
    Command("doctor", "tfdp_rec.cli.doctor", "all that private training would refuse of a model, before any training"),
    Command("federate", "tfdp_rec.cli.federate", "train a news recommender over federated clients, privately"),
    Command("server", "tfdp_rec.cli.server", "run one worker or parameter server of a cluster"),
    Command("bench", "tfdp_rec.cli.bench", "where the measurements of speed and memory are"),
)

DESCRIPTION = """\
Differentially private training of recommenders.

  tfdp-rec train                      the main job, on generated data
  tfdp-rec train --data logs/*.parquet --user user_id --item sku
  tfdp-rec calibrate --epsilon 8 --units 110794 --batch-size 1024 --steps 2000 --delta 1e-6
  tfdp-rec epsilon --noise-multiplier 1.0 --units 110794 --batch-size 1024 --steps 2000 --delta 1e-6

Each command explains itself: tfdp-rec COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tfdp-rec`; returns the exit code.

    Args:
        argv: the arguments; sys.argv's if left out.

    Example:
        >>> main("epsilon --noise-multiplier 2 --units 1000 --batch-size 10 --steps 100 --delta 1e-4 --rdp".split())
        epsilon = 0.1913 at delta = 0.0001 (RDP, Poisson sampling, q = 0.01)
        0
    """
    return commands.run("tfdp-rec", DESCRIPTION, COMMANDS, argv, tfdp_rec.__version__)
