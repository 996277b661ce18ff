"""`python -m experiments.spectral`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

COMMANDS = (
    Command("quality", "experiments.spectral.quality", "recall, nDCG and hits on data sets, at several budgets"),
    Command("heads", "experiments.spectral.heads", "recall by the size of the head"),
    Command("size", "experiments.spectral.size", "time and memory of a release, from disk"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a study; returns the exit code."""
    return commands.run("python -m experiments.spectral", "Recommendations from private sums.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
