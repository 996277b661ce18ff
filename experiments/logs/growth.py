"""`python -m experiments.logs growth`: a trained model that takes in new items every day, against one made anew.

  python -m experiments.logs growth --out runs/growth       an hour on two cores

The days are those of `days`. Each is added by `tfdp-rec train --continue`, as a user would, to a two-tower under
LazyDPSGD, or to a model upon sums: all days together have one ε and one ledger. On some days it is compared, on the day
after, with

    made anew     a model of all rows so far, with all of ε for this one training
    first day     the model that the first day left, frozen
    popularity    exact counts of the day: no privacy

Users who were held back on all days are asked, as in `days`. Work is steps, and processor seconds of whole commands.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

_TESTED = 10  # recall@10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `growth`."""
    parser.add_argument("--days", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=10, help="days between two tests; default: %(default)s")
    parser.add_argument(
        "--mechanism", choices=("lazydpsgd", "upon-sums"), default="lazydpsgd", help="default: %(default)s"
    )
    parser.add_argument("--users", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--drift", type=float, default=0.03, help="of tastes, a day; default: %(default)s")
    parser.add_argument("--life", type=float, default=12.0, help="of items, in days; default: %(default)s")
    parser.add_argument("--epsilon", type=float, default=8.0, help="of all days; default: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="of a day; default: %(default)s")
    parser.add_argument("--anew-steps", type=int, default=600, help="of a model made anew; default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--public-items", action="store_true", help="items are a public list that grows")
    parser.add_argument("--days-per-user", type=int, metavar="K", help="as in tfdp-rec train")
    parser.add_argument("--seed", type=int, default=0, help="of the stream; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/growth"), metavar="FOLDER", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Runs the stream and prints the table; results.json has all of it."""
    from experiments.logs.stream import Stream
    from experiments.tables import markdown

    args.out.mkdir(parents=True, exist_ok=True)
    stream = Stream(users=args.users, drift=args.drift, life=args.life, seed=args.seed)
    study = _Growth(args, list(stream.days(args.days + 1)))
    for day in range(1, args.days + 1):
        study.take(day)
        if day == 1:
            shutil.copytree(study.run, args.out / "first", dirs_exist_ok=True)
        if day % args.every == 0:
            study.compare(day)
            (args.out / "results.json").write_text(json.dumps(study.results, indent=1), encoding="utf-8")
    columns = {"day": "day", "way": "way", "recall": "recall@10 on the next day", "items": "items", "epsilon": "ε",
               "steps": "steps", "seconds": "processor s"}  # fmt: skip
    rows = [[str(result[name]) for name in columns] for result in study.results]
    print("\n".join(markdown(list(columns.values()), rows)))
    return 0


class _Growth:
    def __init__(self, args: argparse.Namespace, tables: list[Any]):
        self.args, self.tables, self.run = args, tables, args.out / "run"
        self.results: list[dict[str, Any]] = []
        self.seconds: list[float] = []

    def train(self, data: Any, more: list[str], out: Path, steps: int, days: int, continues: bool) -> float:
        """Runs the command on some rows; returns its processor seconds."""
        import pyarrow.parquet

        from tfdp_rec.cli import main

        args, path = self.args, self.args.out / "day.parquet"
        pyarrow.parquet.write_table(data, path)
        given = ["train", "--data", str(path), *more, "--quiet"]
        given += [] if continues else ["--metrics-epsilon", "0"]  # days have none: the same for what is made anew
        if continues:
            given += ["--continue", str(out)]
        else:
            given += ["--user", "user", "--item", "item", "--time", "time", "--mechanism", args.mechanism]
            given += ["--out", str(out), "--epsilon", str(args.epsilon), "--days", str(days), "--steps", str(steps)]
            given += ["--delta", "1e-6", "--batch-size", str(args.batch_size)]
            given += ["--days-per-user", str(args.days_per_user)] if days > 1 and args.days_per_user else []
        began = time.process_time()
        if main(given):
            raise RuntimeError(f"tfdp-rec {' '.join(given)} failed.")
        return time.process_time() - began

    def listed(self, tables: list[Any]) -> list[str]:
        """The option of a public list of all items so far, if it is asked for."""
        import numpy as np

        if not self.args.public_items:
            return []
        path = self.args.out / "items.csv"
        ids = np.unique(np.concatenate([table["item"].to_numpy() for table in tables]))
        path.write_text("item\n" + "".join(f"{each}\n" for each in ids), encoding="utf-8")
        return ["--items", str(path)]

    def take(self, day: int) -> None:
        """Adds a day to the run."""
        more, args = self.listed(self.tables[:day]), self.args
        self.seconds.append(self.train(self.tables[day - 1], more, self.run, args.steps, args.days, day > 1))
        print(f"day {day}: {self.seconds[-1]:.0f} processor seconds", flush=True)

    def compare(self, day: int) -> None:
        """Tests all ways on the next day."""
        import pyarrow as pa

        from tfdp_rec.job.evaluation import same_for_all

        args, anew = self.args, self.args.out / f"anew-{day}"
        shutil.rmtree(anew, ignore_errors=True)
        so_far = self.tables[:day]
        spent = self.train(pa.concat_tables(so_far), self.listed(so_far), anew, args.anew_steps, 1, False)
        tomorrow = _Next(self.tables[day])
        today = _Next(self.tables[day - 1])
        for way, folder, steps, seconds in (
            ("day after day", self.run, args.steps, self.seconds[-1]),
            ("made anew of all rows", anew, args.anew_steps, spent),
            ("first day, frozen", args.out / "first", 0, 0.0),
        ):
            items, scores, epsilon = _released(folder)
            self.note(day, way, tomorrow.recall(scores, items), len(items), epsilon, steps, seconds)
        items, _, _ = _released(self.run)
        counts = today.counts(items)
        self.note(day, "popularity of the day", tomorrow.recall(same_for_all(counts), items), len(items), None, 0, 0.0)

    def note(
        self, day: int, way: str, recall: Any, items: int, epsilon: float | None, steps: int, seconds: float
    ) -> None:
        """Keeps a result."""
        found = {"day": day, "way": way, "recall": f"{recall.value:.4f} ± {recall.error:.4f}", "items": items}
        spent = "none" if epsilon is None else f"{epsilon:.3f}"
        self.results.append({**found, "epsilon": spent, "steps": steps, "seconds": round(seconds)})
        print(self.results[-1], flush=True)


class _Next:
    """A day whose held-back users are asked; they are those of `tfdp-rec train`."""

    def __init__(self, table: Any):
        import tempfile

        from tfdp_rec.data import Interactions
        from tfdp_rec.job.settings import JobSettings
        from tfdp_rec.job.users import split_users

        self.holder = tempfile.TemporaryDirectory()
        self.log = Interactions.read(table, user="user", item="item", time="time", folder=Path(self.holder.name) / "l")
        self.users = split_users(self.log, JobSettings())

    def recall(self, scores: Any, items: Any) -> Any:
        """Mean over the held-back users; items that the model does not know count as not found."""
        from tfdp_rec.job.evaluation import Evaluation, NewItemExamples
        from tfdp_rec.metrics import Mean

        examples = NewItemExamples(self.log.with_items(items), self.users.test)
        return Mean.of((Evaluation(examples, 0, 500).ranks(scores) < _TESTED).astype(float))

    def counts(self, items: Any) -> Any:
        """How many of those who are not held back have each item today."""
        from tfdp_rec.job.users import UserSubset

        log = self.log.with_items(items)
        return UserSubset(log, self.users.train).exact_counts(log.catalogue)


def _released(folder: Path) -> tuple[Any, Any, float]:
    """Items, scores and ε by the ledger of what a run has released."""
    import keras
    import numpy as np

    from tfdp_rec.core.claim.ledger import read
    from tfdp_rec.job.run_state import WarmStart
    from tfdp_rec.models import SASRec, TwoTower

    model: SASRec | TwoTower = keras.models.load_model(folder / "release" / "model.keras", compile=False)
    epsilon = read(folder / "release" / "ledger.jsonl").epsilon(1e-6)
    return WarmStart.load(folder).items, lambda told: np.asarray(model(told)), epsilon
