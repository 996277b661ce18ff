"""`python -m experiments.adafest`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

HEADLINE = "AdaFEST and its family: AUC (or accuracy) against gradient size reduction"
STUDY = Command("adafest", "experiments.adafest.command", HEADLINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    return commands.run_one("python -m experiments.adafest", STUDY, argv)


if __name__ == "__main__":
    sys.exit(main())
