"""`python -m experiments.news`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

STUDY = Command("news", "experiments.news.command", "federated news: Tables 1 and 2, Figures 4 to 7")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit code."""
    return commands.run_one("python -m experiments.news", STUDY, argv)


if __name__ == "__main__":
    sys.exit(main())
