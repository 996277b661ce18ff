"""`python -m experiments.bench`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

COMMANDS = (
    Command(
        "lazydp",
        "experiments.bench.lazydp",
        "private training against SGD: time and memory by table size, batch, bags, skew, model",
    ),
    Command(
        "clipping",
        "experiments.bench.clipping",
        "clipping without noise against SGD: time by strategy, by table size, and memory",
    ),
    Command("gpu", "experiments.bench.gpu", "the private step on a GPU against SGD, in four minutes"),
    Command("noise", "experiments.bench.noise", "what Gaussian noise costs, by sampler"),
    Command(
        "ps",
        "experiments.bench.ps",
        "private training on parameter servers: steps a second and bytes a step, by table size",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code."""
    return commands.run("python -m experiments.bench", "Measurements of speed and memory.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
