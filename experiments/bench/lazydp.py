"""`python -m experiments.bench lazydp`: LazyDPSGD against SGD, DP-SGD and EANA, figure by figure of the LazyDP paper.

  python -m experiments.bench lazydp sizes --megabytes 96 960        time against table size (figure 13a)
  python -m experiments.bench lazydp sizes --megabytes 9600 --apart  one contestant in memory at a time
  python -m experiments.bench lazydp sizes --contestants lazy lazy-ftrl dp-ftrl     correlated noise
  python -m experiments.bench lazydp batch --json batch.json         batches of 1,024 to 4,096 (figures 10 and 14)
  python -m experiments.bench lazydp pooling | skew | models         figures 13b, 13d, 13c
  python -m experiments.bench lazydp breakdown                       where a step's time goes (figure 11)
  python -m experiments.bench lazydp strategies                      DP-SGD by clipping strategy
  python -m experiments.bench lazydp two-tower | big-table           MovieLens-20M's size; 100 million rows
  python -m experiments.bench lazydp main-job                        the two-tower of scripts/train; 10 million movies
  python -m experiments.bench lazydp rows                            one table of 10^5 to 10^7 rows, AdaFEST too

Every contestant has a process of its own; in each round all of them take a turn of a few steps, so that the machine's
drift hits all alike. A ratio is taken within a round; what is reported is the median over rounds, and the range.
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
from experiments.bench.cases import RMC_WIDTH, USUAL, Case
from experiments.bench.race import machine, race
from experiments.bench.workers import Worker

REFERENCE = "sparse-sgd"
MLPERF_TABLES, MLPERF_WIDTH = 26, 128
MOVIES = 27_279


def mlperf(megabytes: float, label: str = "", **changes: Any) -> Case:
    """MLPerf's DLRM with tables of so many megabytes (10^6 bytes) in all.

    Example:
        >>> mlperf(96).table_sizes[0], len(mlperf(96).table_sizes)
        (7211, 26)
    """
    rows = max(1, int(megabytes * 1e6 / (4 * MLPERF_WIDTH * MLPERF_TABLES)))
    return Case(label or f"{megabytes:g} MB", "dlrm", (rows,) * MLPERF_TABLES, **changes)


def cases(experiment: str, megabytes: Sequence[float]) -> list[Case]:
    """The cases of an experiment; those about something else than size run at the first size.

    Raises:
        ValueError: for an unknown experiment.
    """
    size = megabytes[0]
    rows = max(1, int(size * 1e6 / (4 * RMC_WIDTH * 10)))
    return {
        "sizes": lambda: [mlperf(m, contestants=(*USUAL, "lazy-each-step")) for m in megabytes],
        "batch": lambda: [mlperf(size, f"batch {b}", batch_size=b) for b in (1024, 2048, 4096)],
        "pooling": lambda: [mlperf(size, f"pooling {p}", pooling=p) for p in (1, 10, 20, 30)],
        "skew": lambda: [
            mlperf(size, p, pattern=p) for p in ("uniform", "skew-low", "skew-medium", "skew-high", "zipf-1.05")
        ],
        "models": lambda: [
            Case("rmc1", "rmc1", (rows,) * 10, 256, 80),
            Case("rmc2", "rmc2", (max(1, rows // 4),) * 40, 256, 80),
            Case("rmc3", "rmc3", (rows,) * 10, 256, 20),
        ],
        "strategies": lambda: [
            mlperf(
                size, "batch 256", batch_size=256,
                contestants=("sparse-sgd", "dp-sgd-book", "dp-sgd-f", "dp-sgd-r", "dp-sgd-b"),
            )
        ],
        "breakdown": lambda: [mlperf(size, contestants=("eana", "lazy"))],
        "two-tower": lambda: [
            Case(f"batch {b}", "two-tower", (MOVIES,), b, 20, "zipf-0.8") for b in (64, 1024)
        ],
        "gpu": lambda: [
            mlperf(size, contestants=("sparse-sgd", "eana", "lazy")),
            *(
                Case(f"batch {b}", "two-tower", (MOVIES,), b, 20, "zipf-0.8", ("sparse-sgd", "lazy"))
                for b in (64, 1024, 16_384)
            ),
            *(mlperf(m, contestants=("sparse-sgd", "lazy")) for m in megabytes[1:]),
        ],
        "main-job": lambda: [
            Case(f"{movies:,} movies", "main-job", (movies,), 4096, 20, "zipf-0.8", ("sparse-sgd", "eana", "lazy"))
            for movies in (MOVIES, 10_000_000)
        ],
        "rows": lambda: [
            Case(
                f"{count:,} rows", "one-table", (count,), 2048, pattern="zipf-1.05", width=64,
                contestants=("sparse-sgd", "keras-sgd", "dp-sgd-f", "ada-fest", "lazy"),
            )
            for count in (100_000, 1_000_000, 10_000_000)
        ],
        "big-table": lambda: [
            Case(f"{count:,} rows", "one-table", (count,), contestants=("sparse-sgd", "lazy"))
            for count in (1_000_000, 100_000_000)
        ],
    }[experiment]()  # fmt: skip


EXPERIMENTS = (
    "sizes", "batch", "pooling", "skew", "models", "strategies", "breakdown", "two-tower", "main-job", "big-table",
    "rows",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `bench lazydp`."""
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[96.0], help="tables in all (default: 96)"
    )
    parser.add_argument("--contestants", nargs="+", help="instead of the experiment's own")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each contestant (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps a turn (default: %(default)s)")
    parser.add_argument(
        "--warm-up", type=int, default=4, help="steps before the first turn (default: %(default)s)"
    )
    parser.add_argument(
        "--apart", action="store_true", help="one contestant in memory at a time; no alternation"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png, .pdf, .svg)")


def run(args: argparse.Namespace) -> int:
    """Measures, prints a table for each case, and writes what was asked for."""
    for name in ("rounds", "steps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}.")
    if min(args.megabytes) <= 0 or args.warm_up < 0:
        raise ValueError("--megabytes must be positive and --warm-up not negative.")
    found = []
    for case in cases(args.experiment, args.megabytes):
        if args.contestants:
            case = dataclasses.replace(case, contestants=tuple(args.contestants))
        measured = measure(case, args)
        found.append({"case": dataclasses.asdict(case), "contestants": measured})
        print(table(case, measured), flush=True)
        if args.json:
            figures = {"experiment": args.experiment, "machine": machine(), "cases": found}
            args.json.write_text(json.dumps(figures, indent=1))
    if args.plot:
        from experiments.bench.plots import plot

        plot(args.experiment, found, args.plot)
    return 0


def measure(case: Case, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each contestant's figures; with `apart`, one after the other."""

    def ready(worker: Worker, figures: dict[str, Any]) -> int:
        worker.ask(steps=args.warm_up)
        return args.steps

    def finish(worker: Worker) -> dict[str, Any]:
        return worker.ask(call="memory")["answer"] | _extras(worker, args.experiment)

    module = "experiments.bench.measures"
    found = race(case.contestants, case, module, args.rounds, ready=ready, finish=finish, apart=args.apart)
    reference = found.get(REFERENCE)
    for figures in found.values():
        figures |= summed_up(figures["rounds"], reference["rounds"] if reference else None, args.apart)
    return found


def _extras(worker: Worker, experiment: str) -> dict[str, Any]:
    if experiment == "breakdown":
        return {"breakdown": worker.ask(call="breakdown")["answer"]}
    if experiment == "big-table" and worker.name.startswith("lazy"):
        return {
            "settle": worker.ask(call="settle")["answer"],
            "machine": worker.ask(call="machine")["answer"],
        }
    return {}


Rounds = list[list[list[float]]]


def summed_up(rounds: Rounds, reference: Rounds | None, apart: bool) -> dict[str, Any]:
    """Medians and spread of a contestant's turns, and ratios to the reference's."""
    wall = sorted(step[0] for turn in rounds for step in turn)
    processor = statistics.median(step[1] for turn in rounds for step in turn)
    tenth = len(wall) // 10
    summary: dict[str, Any] = {
        "median_ms": statistics.median(wall), "spread_ms": [wall[tenth], wall[-1 - tenth]], "processor_ms": processor,
    }  # fmt: skip
    if reference is None:
        return summary
    for name, which in (("ratio", 0), ("processor_ratio", 1)):
        own, other = ([statistics.median(s[which] for s in turn) for turn in r] for r in (rounds, reference))
        middle, least, most = timing.ratio(own, other, apart)
        summary |= {name: middle, f"{name}_range": [least, most]}
    return summary


def table(case: Case, measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of a case, for people."""
    lines = [
        f"\n{case.workload}, {case.label}: {len(case.table_sizes)} tables of {case.table_sizes[0]:,} rows, batch "
        f"{case.batch_size:,}, pooling {case.pooling}, {case.pattern}",
        f"{'':<15}{'ms a step':>10} {'10% to 90%':>16} {'/ sparse SGD':>13} {'range':>14} {'cpu ms':>8} {'/ sparse':>9}"
        f" {'peak MB':>8} {'start s':>8}",
    ]
    for name, f in measured.items():
        low, high = f["spread_ms"]
        ratio = (
            f"{f['ratio']:13.2f} {f['ratio_range'][0]:6.2f} {f['ratio_range'][1]:6.2f} "
            if "ratio" in f
            else " " * 29
        )
        of_processor = f"{f['processor_ratio']:9.2f}" if "ratio" in f else " " * 9
        lines.append(
            f"{name:<15}{f['median_ms']:10.1f} {low:8.1f}{high:8.1f} {ratio}{f['processor_ms']:8.0f} {of_processor}"
            f" {f['peak_megabytes']:8.0f} {f['start_seconds']:8.1f}"
        )
    for name, f in measured.items():
        for part, value in f.get("breakdown", {}).items():
            lines.append(f"  {name}: {part:<32}{value:8.1f} ms")
        if "settle" in f:
            lines.append(f"  {name}: {_settling(f)}")
    return "\n".join(lines)


def _settling(figures: Mapping[str, Any]) -> str:
    """How fast all noise was paid, against drawing as many Gaussians and writing as many values."""
    rate = figures["settle"]["values"] / figures["settle"]["seconds"]
    of_machine = figures["machine"]
    limit = 1 / (1 / of_machine["drawn_a_second"] + 1 / of_machine["written_a_second"])
    return (
        f"settling {figures['settle']['seconds']:.2f} s, {rate / 1e6:.0f} M values/s; the machine draws and writes "
        f"{limit / 1e6:.0f} M/s: {rate / limit:.0%}"
    )
