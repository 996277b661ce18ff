"""`python -m experiments.logs generate`: a log as somebody's might be, in files of a million rows.

  python -m experiments.logs generate --rows 1e7 --out runs/log-1e7
  python -m experiments.logs generate --rows 1e6 --items 2e4 --tastes 20 --out logs

Users have a heavy tail: user u = ⌊n r^1.5⌋ with r uniform, so that some have a hundred times the rows of others. Items
follow Zipf's law, P(item < i) = log(i) / log(items + 1). With tastes, user u is of taste u mod tastes, and every other
row of theirs is an item of that taste. Times are seconds of 2024, in no order. titles.csv beside them names the items.
"""

from __future__ import annotations

import argparse
from pathlib import Path

_ROWS = 10**6  # of a file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `generate`."""
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--users", type=float, help="default: a twentieth of the rows")
    parser.add_argument("--items", type=float, default=2e5)
    parser.add_argument("--tastes", type=int, default=1, help="of users; default: one, so that all like the same")
    parser.add_argument("--out", default="runs/log", metavar="FOLDER", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Writes the files."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet

    folder, rows, users = Path(args.out), int(args.rows), int(args.users or args.rows / 20)
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number, start in enumerate(range(0, rows, _ROWS)):
        size = min(_ROWS, rows - start)
        user = (users * rng.random(size) ** 1.5).astype(np.int64)
        item = ((args.items + 1) ** rng.random(size)).astype(np.int64)
        theirs = np.minimum(item // args.tastes * args.tastes + user % args.tastes + 1, int(args.items))
        item = np.where(rng.random(size) < 0.5, theirs, item) if args.tastes > 1 else item
        columns = {
            "user_id": pc.binary_join_element_wise("u-", pa.array(user * 7919 % 10**9).cast(pa.string()), ""),
            "sku": pc.binary_join_element_wise("sku-", pa.array(item).cast(pa.string()), ""),
            "ts": rng.integers(1_704_067_200, 1_735_689_600, size),
            "price": rng.random(size).astype(np.float32),
        }
        pyarrow.parquet.write_table(pa.table(columns), folder / f"{number:04}.parquet")
    with open(folder / "titles.csv", "w", encoding="utf-8") as file:
        file.write("sku,title\n")
        file.writelines(f"sku-{i},Item {i} of taste {(i - 1) % args.tastes}\n" for i in range(1, int(args.items) + 1))
    print(f"{rows} rows of {users} users and {int(args.items)} items in {folder}")
    return 0
