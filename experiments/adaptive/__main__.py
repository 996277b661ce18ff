"""`python -m experiments.adaptive`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

STUDY = Command("adaptive", "experiments.adaptive.command", "SGD against adaptive tables: AUC at an epsilon")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    return commands.run_one("python -m experiments.adaptive", STUDY, argv)


if __name__ == "__main__":
    sys.exit(main())
