"""`python -m experiments.clicks`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

STUDY = Command("clicks", "experiments.clicks.command", "click logs: private training, private sums, and neither")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    return commands.run_one("python -m experiments.clicks", STUDY, argv)


if __name__ == "__main__":
    sys.exit(main())
