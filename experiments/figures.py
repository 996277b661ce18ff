"""`python -m experiments.figures`: how far recall with noise is from exact recall, on held-out users of logs.

  python -m experiments.figures ml-100k.csv ml-1m.csv log.csv --out runs/figures

Each log is CSV with the columns user, item and time, and its items count as a public list. For each ε `tfdp-rec train`
makes private sums of four fifths of the users, or of all but about --held-out. The others are asked as in a run, and
their exact recall is compared with that of many releases of all five figures of a run in one vector, and of recall
alone, both at 5% of ε.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from experiments.tables import markdown

_DELTA = 1e-6


def main(argv: list[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--epsilons", nargs="+", type=float, default=[8.0, 3.0, 1.0])
    parser.add_argument("--held-out", type=int, help="about so many users to ask; default: a fifth")
    parser.add_argument("--noises", type=int, default=200, help="releases; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/figures"))
    args = parser.parse_args(argv)
    rows = [_row(path, epsilon, args) for path in args.logs for epsilon in args.epsilons]
    head = ["log", "held-out users", "ε", "σ", "exact recall@10", "five figures: median", "95% within", "recall alone"]
    print("\n".join(markdown(head, rows)))
    return 0


def _row(path: Path, epsilon: float, args: argparse.Namespace) -> list[str]:
    from tfdp_rec.cli import main as command
    from tfdp_rec.datasets.logs.interactions import Interactions
    from tfdp_rec.job import users
    from tfdp_rec.job.held_out import load_released, values_of
    from tfdp_rec.job.run_state import WarmStart
    from tfdp_rec.job.settings import JobSettings
    from tfdp_rec.sums.private_metrics import noise_of_metrics, private_metrics

    out, listed = args.out / f"{path.stem}-{epsilon:g}", args.out / f"{path.stem}.txt"
    args.out.mkdir(parents=True, exist_ok=True)
    log = Interactions.read(str(path), user="user", item="item", time="time")
    listed.write_text("".join(f"{each}\n" for each in log.found()[1].to_pylist()), encoding="utf-8")
    asked = ["--user", "user", "--item", "item", "--time", "time"]
    train = users.TRAIN if args.held_out is None else 1 - args.held_out / len(log)
    with mock.patch.object(users, "TRAIN", train):
        if command(["train", "--data", str(path), *asked, "--epsilon", str(epsilon), "--delta", str(_DELTA),
                    "--items", str(listed), "--out", str(out), "--quiet"]):  # fmt: skip
            raise RuntimeError(f"The training on {path} failed.")
        items = WarmStart.load(out).items
        log = log.with_items(items)
        values = values_of(log, users.split_users(log, JobSettings()).test, 0, load_released(out, items))
    noise, name = noise_of_metrics(epsilon, _DELTA), "recall@10"
    exact = float(values["means"][name].mean())
    alone = {"units": values["units"], "means": {name: values["means"][name]}}
    all_errors, errors = (
        [abs(private_metrics(**given, noise_multiplier=noise).figures[name].value / exact - 1)
         for _ in range(args.noises)] for given in (values, alone)
    )  # fmt: skip
    shown = [np.median(all_errors), np.quantile(all_errors, 0.95), np.quantile(errors, 0.95)]
    sizes = [path.stem, f"{values['lists'].num_slots:,}", f"{epsilon:g}", f"{noise:.3g}", f"{exact:.4f}"]
    return [*sizes, *("hidden by noise" if np.isnan(each) else f"{100 * each:.3g}%" for each in shown)]


if __name__ == "__main__":
    sys.exit(main())
