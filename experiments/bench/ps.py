"""`python -m experiments.bench ps`: speed and bytes on the wire of each mechanism on parameter servers, by rows.

  python -m experiments.bench ps                                      the shapes and sizes of the EANA paper's Table 3
  python -m experiments.bench ps --rows 100000 --dim 64 --json ps.json    one size
  python -m experiments.bench ps --rows 27278 100000 --model two-tower    one shape
  python -m experiments.bench ps --rows 5000000 --dim 128 --apart         one mechanism in memory at a time

Starts its own clusters on loopback and ends every process it started.

Every mechanism has a cluster of its own on loopback: a coordinator, workers and servers, real processes. In each round
each takes a turn while the others stand still; a ratio is taken within a round, and the median over rounds is reported,
with the range. All processes share this machine's cores, so a step costs what all of them need for it.

Reference:
    Ning et al., "EANA", RecSys 2022, Table 3.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench import timing
from experiments.bench.cases import SERVED, SERVED_TABLES, ServedCase
from experiments.bench.race import free_bytes, machine, race
from experiments.bench.workers import Worker
from tfdp_rec.mechanisms import dp_sgd, eana, lazy_dp_sgd

PAPER: dict[str, dict[str, float]] = {  # steps a second
    "two-tower 27,278": {dp_sgd.name: 78, eana.name: 223},
    "kg 100,000": {dp_sgd.name: 37, eana.name: 175},
    "kg 5,000,000": {dp_sgd.name: 1.3, eana.name: 70},
}
RATIOS = tuple((one.name, other.name) for one, other in ((lazy_dp_sgd, eana), (eana, dp_sgd), (lazy_dp_sgd, dp_sgd)))
_FEWEST_STEPS = 2  # of each worker, in a turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bench ps`."""
    parser.add_argument("--rows", type=int, nargs="+", help="of each table; left out: the paper's three cases")
    parser.add_argument("--dim", type=int, default=64, help="values a row (default: %(default)s)")
    parser.add_argument("--model", choices=SERVED_TABLES, action="append", help="with --rows; default: both")
    parser.add_argument("--batch", type=int, default=64, help="examples a step (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--servers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--mechanism", choices=SERVED, action="append", help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each mechanism (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn, about (default: %(default)s)")
    parser.add_argument("--apart", action="store_true", help="one mechanism in memory at a time; no alternation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png, .pdf, .svg)")


def run(args: argparse.Namespace) -> int:
    """Measures case by case, prints a table of each, and writes what was asked for."""
    for name in ("dim", "batch", "workers", "servers", "rounds", "seconds"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name} must be positive, got {getattr(args, name)}.")
    found = []
    names = tuple(dict.fromkeys(args.mechanism or SERVED))
    cases = cases_of(args)
    for case in cases:
        _refuse_too_large(case, 1 if args.apart else len(names))
    for case in cases:
        measured = measure(case, names, args)
        found.append({"case": dataclasses.asdict(case), "label": case.label, **measured})
        print(table(case, measured), flush=True)
        _write(found, args)  # after every case: what has been measured is not lost to what comes
    return 0


def cases_of(args: argparse.Namespace) -> list[ServedCase]:
    """What the command line asks for.

    Raises:
        ValueError: for tables without rows, or a model without sizes.
    """
    shared = {"dim": args.dim, "batch": args.batch, "workers": args.workers, "servers": args.servers}
    if args.rows is None:
        if args.model:
            raise ValueError("--model goes with --rows; left out, both mean the paper's three cases.")
        paper = (("two-tower", 27_278), ("kg", 100_000), ("kg", 5_000_000))
        return [ServedCase(model, rows, **shared) for model, rows in paper]
    if min(args.rows) < 1:
        raise ValueError(f"--rows must be positive, got {min(args.rows)}.")
    return [ServedCase(model, rows, **shared) for model in args.model or SERVED_TABLES for rows in args.rows]


def _refuse_too_large(case: ServedCase, together: int) -> None:
    """Before anything starts: a machine that swaps measures nothing, and one that runs out kills others' work."""
    free = free_bytes()
    needed = together * (1.3 * case.table_bytes + 1.2e9)
    if free is not None and needed > free:
        raise ValueError(
            f"{case.label} rows × {case.dim} need about {needed / 1e9:.0f} GB for {together} mechanisms at once, and "
            f"{free / 1e9:.0f} GB are free. Use --apart, a smaller --dim or fewer --mechanism."
        )


def measure(case: ServedCase, names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Each mechanism's figures in one case, and the ratios between them."""
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task(case.label, total=len(names) * args.rounds)
        found = race(
            names, case, "experiments.bench.ps_contestants", args.rounds, apart=args.apart,
            ready=lambda worker, figures: _turn(worker, figures, case, args.seconds),
            finish=lambda worker: {"megabytes": worker.ask(call="memory")["answer"]},
            done=lambda: progress.advance(task),
        )  # fmt: skip
    for figures in found.values():
        steps = figures.pop("steps")
        turns = [{"steps": steps, "ms": ms, "processor_ms": own} for ((ms, own),) in figures["rounds"]]
        figures |= {
            "rounds": turns, "bytes": sum(figures["traffic"].values()),
            "steps_per_second": statistics.median(1e3 / turn["ms"] for turn in turns),
            "processor_ms": statistics.median(turn["processor_ms"] for turn in turns),
        }  # fmt: skip
    pairs = [(one, other) for one, other in RATIOS if one in found and other in found]
    ratios = {f"{one} / {other}": compared(found[one], found[other], args.apart) for one, other in pairs}
    return {"mechanisms": found, "ratios": ratios, "apart": args.apart}


def _turn(worker: Worker, figures: dict[str, Any], case: ServedCase, seconds: float) -> int:
    """Counts what a step sends, and says how many steps make a turn of so many seconds."""
    traffic = worker.ask(call="traffic")["answer"]
    steps = max(_FEWEST_STEPS * case.workers, round(1e3 * seconds / traffic.pop("ms")))
    figures |= {"traffic": traffic, "steps": steps}
    return steps


def compared(one: Mapping[str, Any], other: Mapping[str, Any], apart: bool) -> dict[str, float]:
    """How many steps the one makes while the other makes one; processor time the other way round."""
    own, others = ([turn["ms"] for turn in figures["rounds"]] for figures in (one, other))
    median, least, most = timing.ratio(others, own, apart)
    processor = other["processor_ms"] / one["processor_ms"]
    return {"median": median, "least": least, "most": most, "processor": processor}


def table(case: ServedCase, measured: Mapping[str, Any]) -> str:
    """The figures of a case, for people."""
    lines = [
        f"\n{case.label} rows × {case.dim} in each of {SERVED_TABLES[case.model]} tables, batch {case.batch}, "
        f"{case.workers} workers, {case.servers} servers",
        f"{'':<11}{'steps/s':>9}{'range':>18}{'cpu ms/step':>13}{'kB/step to servers':>20}{'to workers':>12}"
        f"{'to chief':>10}{'server MB':>11}{'paper':>7}",
    ]
    paper: dict[str, float] = PAPER.get(case.label, {})
    for name, f in measured["mechanisms"].items():
        rates = sorted(1e3 / turn["ms"] for turn in f["rounds"])
        to = f["traffic"]
        lines.append(
            f"{name:<11}{f['steps_per_second']:9.2f}{rates[0]:9.2f}{rates[-1]:9.2f}{f['processor_ms']:13.1f}"
            f"{to['ps'] / 1e3:20.1f}{to['worker'] / 1e3:12.1f}{to['coordinator'] / 1e3:10.2f}"
            f"{f['megabytes']['ps']:11.0f}{paper.get(name, ''):>7}"
        )
    for pair, r in measured["ratios"].items():
        one, other = pair.split(" / ")
        there = f", paper {paper[one] / paper[other]:.2f}" if one in paper and other in paper else ""
        lines.append(
            f"  {pair}: {r['median']:.2f} ({r['least']:.2f} to {r['most']:.2f}); by processor time "
            f"{r['processor']:.2f}{there}"
        )
    return "\n".join(lines)


def _write(found: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "paper": PAPER, "cases": found}, indent=1))
    if args.plot:
        from experiments.bench.plots import plot_servers

        plot_servers(found, args.plot)
