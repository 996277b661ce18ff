"""`python -m experiments.logs days`: thirty days of a log that drifts, under one budget for all of them.

  python -m experiments.logs days --out runs/days

Each model of day t is asked about day t + 1: users who were held back on all days, told what they had before on that
day, are to be given an item of that day that is new to them; items that the model does not know count as not found.

    added up         a thirtieth of the budget a day, sums added to those before, which keep 1, 0.9, ... of themselves
    today alone      the same, and nothing of earlier sums
    from scratch     a thirtieth of the budget a day, items and sums made anew of all rows so far
    day 1, frozen    all of the budget on the first day
    popularity       exact counts of the day, for scale: no privacy

The ledger of what was added up is written as `tfdp-rec train --continue` writes it, for others to check.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KEEPS = (1.0, 0.9, 0.8, 0.6, 1e-6)
NAMES = {
    **{f"keep {keep:g}": f"added up, keep {keep:g}" for keep in KEEPS[:-1]}, f"keep {KEEPS[-1]:g}": "today alone",
    "scratch": "from scratch, all rows so far", "frozen": "day 1 with all of ε, frozen",
    "popularity": "popularity of the day, no privacy",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `days`."""
    parser.add_argument("--days", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=5, help="days between two tests; default: %(default)s")
    parser.add_argument("--users", type=int, default=30_000, help="default: %(default)s")
    parser.add_argument("--drift", type=float, default=0.03, help="of tastes, a day; default: %(default)s")
    parser.add_argument("--life", type=float, default=12.0, help="of items, in days; default: %(default)s")
    parser.add_argument("--epsilon", type=float, default=8.0, help="of all days; default: %(default)s")
    parser.add_argument("--items-epsilon", type=float, help="of finding items, by itself; default: a quarter")
    parser.add_argument("--days-per-user", type=int, metavar="K", help="of users' rows; default: all")
    parser.add_argument("--public-items", action="store_true", help="all items are known from the first day on")
    parser.add_argument("--seeds", type=int, default=3, help="streams; default: %(default)s")
    parser.add_argument("--out", default="runs/days", metavar="FOLDER", help="of ledgers; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Runs all streams and prints the table."""
    from experiments.tables import markdown

    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    found = [list(_measured(args, seed, folder / f"ledger-{seed}.jsonl")) for seed in range(args.seeds)]
    tested = sorted({day for day, _, _ in found[0]})
    rows = [
        [words, *(_cell(found, name, [day]) for day in (tested[0], tested[-1])), _cell(found, name, tested)]
        for name, words in NAMES.items()
    ]
    heading = ["recall@10 on the next day", f"day {tested[0]}", f"day {tested[-1]}", f"mean of {len(tested)} days"]
    print("\n".join(markdown(heading, rows)))
    return 0


def _cell(found: list[Any], name: str, days: list[int]) -> str:
    """Mean over days and streams ± its error over users and, added in squares, over streams."""
    import numpy as np

    each = [[mean for day, what, mean in stream if what == name and day in days] for stream in found]
    over_days = [np.mean([mean.value for mean in means]) for means in each]
    over_users = np.mean([np.mean([mean.error for mean in means]) / len(means) ** 0.5 for means in each])
    over_streams = np.std(over_days, ddof=1) / len(over_days) ** 0.5 if len(over_days) > 1 else 0.0
    error = np.hypot(over_users / len(each) ** 0.5, over_streams)
    return f"{np.mean(over_days):.4f} ± {error:.4f}"


def _measured(args: argparse.Namespace, seed: int, ledger: Path) -> Iterator[tuple[int, str, Any]]:
    """(day, name, recall) of one stream."""
    import pyarrow as pa

    from experiments.logs.stream import Stream
    from tfdp_rec.job.evaluation import same_for_all

    tables = list(Stream(users=args.users, drift=args.drift, life=args.life, seed=seed).days(args.days + 1))
    added = _Added(args, ledger)
    frozen = _scratch(_Day(tables[0]), args, 1)
    for day in range(1, args.days + 1):
        today = _Day(tables[day - 1])
        added.take(today)
        if day % args.every:
            continue
        tomorrow = _Day(tables[day])
        whole = _Day(pa.concat_tables(tables[:day]))
        models: dict[str, tuple[Any, Any]]
        models = {f"keep {keep:g}": (made, added.items) for keep, made in added.made.items()}
        models |= {"scratch": _scratch(whole, args, args.days), "frozen": frozen}
        for name, (model, items) in models.items():
            yield day, name, tomorrow.recall(functools.partial(_scores, model), items)
        counts = today.of(added.items).exact_counts(today.log.with_items(added.items).catalogue)
        yield day, "popularity", tomorrow.recall(same_for_all(counts), added.items)
        heads = {NAMES[name]: (len(items), len(model.released.head)) for name, (model, items) in models.items()}
        sizes = ", ".join(f"{name}: {items} items, head {head}" for name, (items, head) in heads.items())
        print(f"stream {seed}, day {day}: epsilon = {added.spent():.4f} by the ledger; {sizes}", flush=True)


def _scores(model: Any, context: Any) -> Any:
    return model.scores([told[told > 0] for told in context])


class _Day:
    """A day's log, or several days' as one; who is held back is held back on all days."""

    def __init__(self, table: Any):
        from tfdp_rec.data import Interactions

        self.holder = tempfile.TemporaryDirectory()
        self.log = Interactions.read(table, user="user", item="item", time="time", folder=Path(self.holder.name) / "l")
        self.train, self.test = self.log.split(0.8, key="days")

    def of(self, items: Any, counted: Any = None) -> Any:
        """Users who are in the sums, by these items."""
        from tfdp_rec.job.users import UserSubset

        train = self.train if counted is None else self.train[counted[self.train]]
        return UserSubset(self.log.with_items(items), train)

    def recall(self, scores: Callable[..., Any], items: Any) -> Any:
        """Of held-out users."""
        from tfdp_rec.job.evaluation import Evaluation, NewItemExamples
        from tfdp_rec.metrics import Mean

        ranks = Evaluation(NewItemExamples(self.log.with_items(items), self.test), 0, 500).ranks(scores)
        return Mean.of((ranks < 10).astype(float))


class _Added:
    """What `--continue` does on each day, for each of `KEEPS`; of these, one is paid for, as one would be run."""

    def __init__(self, args: argparse.Namespace, ledger: Path):
        from tfdp_rec.job.budget import Budget

        self.items: Any = None
        self.path, self.made = ledger, dict[float, Any]()
        ledger.unlink(missing_ok=True)
        self.seats = tempfile.TemporaryDirectory()
        self.decided = Budget(args.epsilon, 1e-6, args.days, args.public_items, args.items_epsilon, args.days_per_user)

    def take(self, day: _Day) -> None:
        """Pays for a day, and adds it."""
        import numpy as np

        from tfdp_rec.core.claim.ledger import ZERO_OUT
        from tfdp_rec.job.budget import LABELS, SUMS
        from tfdp_rec.job.seats import take_seats
        from tfdp_rec.privacy import Ledger, Snapshot
        from tfdp_rec.spectral import SpectralRecommender

        data = Snapshot(len(day.log), "user, item, time")
        with Ledger(self.path, "user", data, ZERO_OUT, data_changed=True) as ledger:
            budget = self.decided.decide(ledger)
            counted = np.ones(len(day.log), bool)
            if budget.days_per_user is not None:
                counted = take_seats(Path(self.seats.name), ledger, budget, day.log)[0]
            for name, event in budget.releases(SUMS).items():
                due = budget.event_due(ledger, event, LABELS[name])
                budget.refuse_excess(ledger, [due])
                ledger.pay(due, label=LABELS[name], settings={"sampling": None})
        self.items = _items(day, budget, self.items, counted)
        users, numbers = day.of(self.items, counted), list(range(1, len(self.items) + 1))
        for keep in KEEPS:
            before = self.made[keep].released.faded(keep) if keep in self.made else None
            model = SpectralRecommender(
                numbers, None, 1e-6, noise_multiplier=budget.sums, recency=0.25, before=before,
                users_private=budget.days_per_user is not None,
            )  # fmt: skip
            self.made[keep] = model.fit(users, verbose=0)

    def spent(self) -> float:
        """ε by the ledger."""
        from tfdp_rec.core.claim.ledger import read

        return read(self.path).epsilon(1e-6)


def _items(day: _Day, budget: Any, before: Any = None, counted: Any = None) -> Any:
    """Those of before, and those that are found; or all that there are, if they are public."""
    import numpy as np

    from experiments.logs.stream import Stream
    from tfdp_rec.data import Items
    from tfdp_rec.job.users import UserSubset
    from tfdp_rec.privacy import private_items

    if budget.items is None:
        return Items(list(range(1, Stream.tastes * Stream.items + 1)))
    known: list[Any] = before.ids.to_pylist() if before else []
    log: Any = day.log if counted is None else UserSubset(day.log, np.flatnonzero(counted))
    found = private_items(log, epsilon=budget.items[0], delta=budget.items[1], known=known)
    return Items([*known, *found.terms])


def _scratch(day: _Day, args: argparse.Namespace, days: int) -> tuple[Any, Any]:
    """(recommender, its items) of a day by itself, at one of so many shares of ε."""
    from tfdp_rec.job.budget import Budget
    from tfdp_rec.spectral import SpectralRecommender

    budget = Budget(args.epsilon, 1e-6, days, args.public_items, args.items_epsilon)
    items = _items(day, budget)
    numbers = list(range(1, len(items) + 1))
    made = SpectralRecommender(numbers, None, 1e-6, noise_multiplier=budget.sums, recency=0.25)
    return made.fit(day.of(items), verbose=0), items
