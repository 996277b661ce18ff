"""`python -m experiments.spectral size`: a release of generated users, read from files that are mapped.

  python -m experiments.spectral size --users 1000000 --items 100000

Items fall as 1/rank; a user has 20 on average. The files are written first, and not timed.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `size`."""
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--mean", type=float, default=20.0, help="events of a user")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--order", choices=("no", "yes", "auto"), default="no", help="as of tfdp-rec train")
    parser.add_argument("--out", default="runs/spectral-size", metavar="FOLDER", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Times one release and says what memory it took."""
    import numpy as np

    from tfdp_rec.spectral import Histories, SpectralRecommender

    folder = Path(args.out)
    if not (folder / "items.npy").exists():
        _write(folder, args)
    before, load = _peak(), os.getloadavg()[0]
    start = time.perf_counter()
    ordered = {"no": False, "yes": True, "auto": None}[args.order]
    recommender = SpectralRecommender(np.arange(1, args.items + 1), args.epsilon, ordered=ordered)
    recommender.fit(Histories.load(folder))
    taken = time.perf_counter() - start
    events = (folder / "items.npy").stat().st_size / 8
    print(
        f"{args.users} users, {args.items} items, {events:.3g} events, ε {args.epsilon:g}, order {args.order}: head "
        f"{len(recommender.released.head)}, {taken:.0f} s, {(_peak() - before) / 1024:.0f} MB beside "
        f"{before / 1024:.0f} MB of Python, load before {load:.1f} on {os.cpu_count()} cores"
    )
    return 0


def _write(folder: Path, args: argparse.Namespace) -> None:
    import numpy as np

    from tfdp_rec.spectral import Histories

    rng = np.random.default_rng(0)
    lengths = np.minimum(1 + rng.geometric(1 / args.mean, args.users), args.items // 4)
    uniform = rng.random(lengths.sum())
    items = np.minimum((args.items + 1) ** uniform, args.items).astype(np.int64)  # P(item ≤ i) = log i / log items
    Histories(items, np.concatenate([[0], np.cumsum(lengths)])).save(folder)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
