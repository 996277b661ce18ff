"""`python -m experiments.sequences`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

STUDY = Command("sequences", "experiments.sequences.command", "the next item: private training, and private sums")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    return commands.run_one("python -m experiments.sequences", STUDY, argv)


if __name__ == "__main__":
    sys.exit(main())
