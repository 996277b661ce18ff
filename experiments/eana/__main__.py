"""`python -m experiments.eana`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

COMMANDS = (
    Command(
        "movielens",
        "experiments.eana.movielens",
        "next movie on MovieLens-20M or timelines like it: Figures 4 and 5, first column of Table 3",
    ),
    Command(
        "kg",
        "experiments.eana.kg",
        "knowledge-graph entities from activity timelines: Figures 6 and 7, the other columns of Table 3",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a study; returns the exit code."""
    return commands.run("python -m experiments.eana", "The experiments of the EANA paper.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
