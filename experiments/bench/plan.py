"""`python -m experiments.bench plan`: bytes, seconds and memory of a step on a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.bench.step_costs import Constants, Deployment, Step

HELP = """\
  python -m experiments.bench plan --rows 5e6 --dim 64 --batch 64 --ids 69 --workers 2 --servers 2 --gbps 10
  python -m experiments.bench plan --terabytes 100 --dim 128 --batch 2048 --ids 26 --workers 256 --servers 256
  python -m experiments.bench plan --rows 5e6 --dim 64 --batch 64 --constants here.json

Bytes, seconds and memory by mechanism, computed from constants; nothing is trained. docs/scaling.md says what they are,
how to measure them, and how far from real runs this is.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `plan`."""
    from experiments.bench.step_costs import MECHANISMS

    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--rows", type=_count, help="of all tables together")
    size.add_argument("--terabytes", type=float, help="of all tables together (10^12 bytes), instead of rows")
    parser.add_argument("--dim", type=_count, required=True, help="values a row")
    parser.add_argument("--batch", type=_count, required=True, help="examples a step")
    parser.add_argument("--ids", type=_count, default=1, help="rows an example looks up (default: %(default)s)")
    parser.add_argument("--dense-weights", type=_count, default=0, help="weights outside the tables (default: 0)")
    parser.add_argument("--workers", type=_count, default=2, help="default: %(default)s")
    parser.add_argument("--servers", type=_count, default=2, help="parameter servers (default: %(default)s)")
    parser.add_argument("--gbps", type=float, default=10.0, help="network of each machine (default: %(default)s)")
    parser.add_argument("--cores", type=_count, default=8, help="of each machine (default: %(default)s)")
    parser.add_argument(
        "--steps", type=_count, default=1_000_000, help="of the whole training: what totals are kept for (default: 1e6)"
    )
    parser.add_argument("--example-us", type=float, help="processor time of an example without clipping, microseconds")
    parser.add_argument("--mechanism", action="append", choices=MECHANISMS, help="may be repeated; default: all")
    parser.add_argument("--one-machine", action="store_true", help="all processes share one machine (loopback)")
    parser.add_argument("--constants", type=Path, metavar="FILE", help="JSON of constants measured elsewhere")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")


def run(args: argparse.Namespace) -> int:
    """Plans and prints."""
    from experiments.bench.step_costs import MECHANISMS, Constants, Deployment, on_one_machine, plan

    at = Deployment(
        _rows(args), args.dim, args.batch, args.ids, args.dense_weights, args.workers, args.servers, args.cores,
        args.gbps, args.steps,
    )  # fmt: skip
    known = dataclasses.replace(Constants(), **(_constants(args.constants) if args.constants else {}))
    if args.example_us is not None:
        known = dataclasses.replace(known, example=1e3 * args.example_us)
    steps = [plan(mechanism, at, known) for mechanism in dict.fromkeys(args.mechanism or MECHANISMS)]
    if args.one_machine:
        steps = [on_one_machine(step, at) for step in steps]
    _print(at, known, steps, bool(args.constants))
    if args.json:
        found = {
            "deployment": dataclasses.asdict(at),
            "constants": dataclasses.asdict(known),
            "steps": [dataclasses.asdict(step) for step in steps],
        }
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def _rows(args: argparse.Namespace) -> int:
    if args.rows is not None:
        return int(args.rows)
    if not 0 < args.terabytes < math.inf or args.dim < 1:
        raise ValueError(f"--terabytes and --dim must be positive, got {args.terabytes} and {args.dim}.")
    return max(1, int(args.terabytes * 1e12 / (4 * args.dim)))


def _count(text: str) -> int:
    """A whole number; 5e6 and 5_000_000 are, too."""
    value = float(text)
    if not math.isfinite(value) or value != int(value):
        raise ValueError(text)
    return int(value)


_count.__name__ = "whole number"  # what argparse calls it


def _constants(path: Path) -> dict[str, float]:
    """The constants in a file, checked."""
    from experiments.bench.step_costs import Constants

    found = json.loads(path.read_text(encoding="utf-8"))
    known = [field.name for field in dataclasses.fields(Constants)]
    if not isinstance(found, dict) or not set(found) <= set(known):
        raise ValueError(f"{path} must be a JSON object of constants; known are {', '.join(known)}.")
    if not all(isinstance(value, int | float) and 0 < value < math.inf for value in found.values()):
        raise ValueError(f"every constant in {path} must be a positive number.")
    return found


def _print(at: Deployment, known: Constants, steps: list[Step], measured: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.width >= _WIDTH else Console(width=_WIDTH)
    print(
        f"{at.rows:,} rows × {at.dim} = {bytes_text(at.table_bytes)} of tables, {at.lookups:,} rows a step; "
        f"{at.workers} workers and {at.servers} servers of {at.cores} cores, {at.gbps:g} Gbit/s"
    )
    if measured:
        text = ", ".join(f"{name} {value:.3g}" for name, value in dataclasses.asdict(known).items())
        print(f"constants: {text}")
    table = Table()
    columns = ("mechanism", "to servers", "to worker", "one step", "steps/s", "bound by", "memory a server", "release")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number in (0, 5) else "right")
    for step in steps:
        table.add_row(
            step.mechanism, bytes_text(step.to_servers), bytes_text(step.to_workers), seconds_text(step.seconds),
            f"{step.steps_per_second:.3g}", step.bound, bytes_text(step.server_bytes),
            seconds_text(step.settle_seconds) if step.settle_seconds else "–",
        )  # fmt: skip
    console.print(table)


_WIDTH = 118  # of the table


def bytes_text(count: float) -> str:
    """Bytes, for people.

    Example:
        >>> bytes_text(96e9), bytes_text(12)
        ('96 GB', '12 B')
    """
    return _scaled(count, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)))


def seconds_text(count: float) -> str:
    """Seconds, for people.

    Example:
        >>> seconds_text(0.0123), seconds_text(7200)
        ('12.3 ms', '2 h')
    """
    return _scaled(count, (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def _scaled(count: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, size = next(((unit, size) for unit, size in units if count >= size), units[-1])
    return f"{count / size:.3g} {unit}"


