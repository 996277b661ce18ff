"""`python -m experiments.rates`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

STUDY = Command("rates", "experiments.rates.command", "rates, clips and batches: where training begins to fail")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    return commands.run_one("python -m experiments.rates", STUDY, argv)


if __name__ == "__main__":
    sys.exit(main())
