"""`python -m experiments.logs`."""

import sys
from collections.abc import Sequence

from tfdp_rec.cli import commands
from tfdp_rec.cli.commands import Command

COMMANDS = (
    Command("days", "experiments.logs.days", "thirty days that drift: sums added up, made anew, or frozen"),
    Command("generate", "experiments.logs.generate", "writes a log in Parquet, items by Zipf's law, ids as text"),
    Command("growth", "experiments.logs.growth", "a trained model that takes in items every day"),
    Command("latency", "experiments.logs.latency", "how long an answer of a served recommender takes"),
    Command("size", "experiments.logs.size", "time and memory from the files to Poisson batches"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a study; returns the exit code."""
    return commands.run("python -m experiments.logs", "Logs on disk.", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
