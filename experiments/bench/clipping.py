"""`python -m experiments.bench clipping`: what clipping alone costs: a private step without noise against SGD.

  python -m experiments.bench clipping dlrm                          26 tables of 10,000 x 128, batch 2,048
  python -m experiments.bench clipping transformer --json out.json   two encoder layers, tied output table
  python -m experiments.bench clipping rows                          does a step's time depend on the table's size?
  python -m experiments.bench clipping memory                        what a step holds beyond the model, 5,000,000 x 128

All contestants train the same model on the same batch, in one process and in turn:

===============  ==============================================================================================
`sparse-sgd`     plain `keras.Model`, Keras' SGD, tables read by a gather from the variable: the reference
`keras-sgd`      the same with `keras.layers.Embedding`, which reads the whole table (and has it copied)
strategies       `PrivateModel` with each clipping strategy; the clipped sum is applied as it is, without noise
===============  ==============================================================================================

`rows` times the step at 50,000 and at 5,000,000 rows; `memory` measures what a step needs beyond the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.bench import timing

REFERENCE = "sparse-sgd"
STRATEGIES = ("bookkeeping", "ghost", "reweighted", "per_example")
SMALL, LARGE = 50_000, 5_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment, and how long to measure."""
    parser.add_argument("experiment", choices=["dlrm", "transformer", "rows", "memory"], help="what to measure")
    parser.add_argument("--contestants", nargs="+", help="default: both SGDs, bookkeeping and ghost; or `all`")
    parser.add_argument("--repeats", type=_positive, default=15, help="rounds (default 15)")
    parser.add_argument("--batch-size", type=_positive, help="default 2048 (transformer: 128)")
    parser.add_argument("--rows", type=_positive, help="of each table (default 10,000; memory: 5,000,000)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}.")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Measures and prints; returns 0."""
    names = _names(args.contestants)
    found = {
        "dlrm": lambda: speed("dlrm", names, args.repeats, args.batch_size or 2048, args.rows or 10_000),
        "transformer": lambda: speed("transformer", names, args.repeats, args.batch_size or 128, args.rows or 4000),
        "rows": lambda: by_rows(args.repeats, args.batch_size or 2048),
        "memory": lambda: memory(args.rows or LARGE, args.batch_size or 2048),
    }[args.experiment]()
    for line in _table(found):
        print(line)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _names(asked: Sequence[str] | None) -> list[str]:
    every = [REFERENCE, "keras-sgd", *STRATEGIES]
    if asked == ["all"]:
        return every
    chosen = list(dict.fromkeys([REFERENCE, *(asked or every[1:4])]))
    unknown = [name for name in chosen if name not in every]
    if unknown:
        raise ValueError(f"--contestants must be among {', '.join(every)}; got {', '.join(unknown)}.")
    return chosen


def _table(found: dict[str, dict[str, float]]) -> list[str]:
    """One line a contestant, a column for each figure."""
    columns = list(next(iter(found.values())))
    lines = ["  ".join([f"{'':14}", *(f"{c:>12}" for c in columns)])]
    return lines + ["  ".join([f"{name:14}", *(f"{row[c]:12.3f}" for c in columns)]) for name, row in found.items()]


def speed(workload: str, names: Sequence[str], repeats: int, batch_size: int, rows: int) -> dict[str, dict[str, float]]:
    """Milliseconds a step, and times the reference: the median over rounds of the ratio within a round."""
    return _ratios({n: _stepper(workload, n, batch_size, rows) for n in names}, REFERENCE, repeats)


def by_rows(repeats: int, batch_size: int) -> dict[str, dict[str, float]]:
    """The book-keeping step on one small and one large table."""
    steps = {f"{rows:,} rows": _stepper("one-table", "bookkeeping", batch_size, rows) for rows in (SMALL, LARGE)}
    return _ratios(steps, f"{SMALL:,} rows", repeats)


def _ratios(steps: dict[str, Callable[[], Any]], reference: str, repeats: int) -> dict[str, dict[str, float]]:
    times = timing.rounds(steps, repeats)
    return {name: summed_up(own, times[reference]) for name, own in times.items()}


def summed_up(own: list[tuple[float, float]], reference: list[tuple[float, float]]) -> dict[str, float]:
    """The processor's ratio stands beside the clock's: other work on the machine hardly touches it."""
    found = timing.summary(own)
    wall, processor = (timing.ratio(*times)[0] for times in zip(zip(*own), zip(*reference)))
    return {
        "median ms": found.median,
        "lowest ms": found.lowest,
        "highest ms": found.highest,
        "ratio": wall,
        "CPU ms": found.processor,
        "CPU ratio": processor,
    }


def memory(rows: int, batch_size: int) -> dict[str, dict[str, float]]:
    """Megabytes that training steps need at their peak beyond what the process held before, each in its own process."""
    import concurrent.futures
    import multiprocessing

    found = {}
    for name in (REFERENCE, "bookkeeping", "ghost", "keras-sgd"):
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            found[name] = pool.submit(peak_of_steps, name, rows, batch_size).result()
    return found


def peak_of_steps(name: str, rows: int, batch_size: int) -> dict[str, float]:
    """Peak memory of a few steps over what was held before them, in this process.

    Raises:
        OSError: on a system whose kernel does not keep and reset peaks (Linux does).
    """
    step = _stepper("one-table", name, batch_size, rows)
    step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
    before = _status("VmRSS")
    for _ in range(3):
        step()
    peak, table = _status("VmHWM") - before, rows * 128 * 4 / 2**20
    return {"step MB": peak, "table MB": table, "share": peak / table}


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def _stepper(workload: str, name: str, batch_size: int, rows: int) -> Callable[[], Any]:
    """A training step of one contestant, as `fit` makes it."""
    from experiments.bench.clipping_models import stepper

    return stepper(workload, name, batch_size, rows)
