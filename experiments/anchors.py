"""`python -m experiments.anchors PROTOCOL FILE`: private sums on protocols that others have published, to the letter.

Popularity without noise is measured first: where its published figure is met to the digit, the protocol is the same.

    cs-670      MovieLens-100K (ml-100k.inter) as in a public course project on private recommenders: ratings of 4 and
                more, users with 3 of them at least, in the order of (time, SHA-256 of "user:item:2026"). A user's last
                item is the test; the one before it is told and not counted. All 1,682 items are ranked but those that
                the user rated before, at any rating. δ = 1e-5; nDCG@10. Popularity has 0.044292.
    next-item   Any file of ordered histories (`experiments/spectral/data.py`): the last item is the test, the one
                before it is told and not counted, all items are ranked but those of the history. δ = 1e-6; HR@10.

`--features` adds rows with public features of items: a JSON file of lists by item (as S3Rec's data have it), or
RecBole's ml-100k.item, of which genres and years in bands of five are taken.

Equal scores count against the recommender. `--validate` asks for the item before the last instead, and tells and counts
one item less: to choose by. Noise is from seeds, so that results repeat: for study, and none is private.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from experiments.spectral.data import read
from experiments.tables import markdown

HELP = """\
  python -m experiments.anchors cs-670 ml-100k.inter --epsilon 8 4 2 1
  python -m experiments.anchors next-item ml-1m.txt Video.txt LastFM.txt Yelp.txt
  python -m experiments.anchors next-item LastFM.txt --features LastFM_item2attributes.json
"""
ORDERS = {"any pairs": False, "near pairs": True, "by a vote": None}
_USERS_AT_ONCE, _LARGEST = 512, 6000

Ids = NDArray[np.int64]
Scores = Callable[[Sequence[Ids]], NDArray[np.float32]]


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What is counted, told, excluded and asked.

    Attributes:
        name: Name of the data.
        num_items: Number of items, ids 1 to that.
        counted: Histories from which recommenders are made.
        told: History of each user that is asked.
        excluded: Items of each asked user that are not ranked.
        target: Item of each asked user that is to be found.
        delta: δ.
        metric: "nDCG@10" or "HR@10".
    """

    name: str
    num_items: int
    counted: list[Ids]
    told: list[Ids]
    excluded: list[Ids]
    target: Ids
    delta: float
    metric: str

    def measured(self, scores: Scores) -> NDArray[np.float64]:
        """The metric of each asked user."""
        found = []
        for start in range(0, len(self.told), _USERS_AT_ONCE):
            users = slice(start, start + _USERS_AT_ONCE)
            for row, excluded, target in zip(
                scores(self.told[users]), self.excluded[users], self.target[users], strict=True
            ):
                own, row = row[target - 1], row.copy()
                row[excluded - 1] = row[target - 1] = -np.inf
                place = int((row >= own).sum()) if target not in excluded else self.num_items
                found.append((1 / np.log2(place + 2) if self.metric == "nDCG@10" else 1.0) if place < 10 else 0.0)
        return np.array(found)


def cs_670(path: str, validate: bool = False) -> Protocol:
    """The protocol of that name, from ml-100k.inter."""
    rows = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines()[1:]]
    tie = [hashlib.sha256(f"{user}:{item}:2026".encode()).hexdigest() for user, item, *_ in rows]
    order = sorted(range(len(rows)), key=lambda at: (int(rows[at][0]), float(rows[at][3]), tie[at]))
    users = np.array([int(rows[at][0]) for at in order])
    items = np.array([int(rows[at][1]) for at in order])
    liked = np.array([float(rows[at][2]) >= 4 for at in order])
    counted, told, excluded, target = [], [], [], []
    back = 2 if validate else 1
    for rated, likes in zip(_by_user(users, items), _by_user(users, liked), strict=True):
        places = np.flatnonzero(likes)
        if len(places) < 3:
            continue
        counted.append(rated[places[: max(1, len(places) - 1 - back)]])
        told.append(rated[places[:-back]])
        excluded.append(rated[: places[-back]])
        target.append(rated[places[-back]])
    return Protocol("cs-670", 1682, counted, told, excluded, np.array(target), 1e-5, "nDCG@10")


def next_item(path: str, validate: bool = False) -> Protocol:
    """The protocol of that name."""
    name, users, num_items = read(path)
    users, back = [user for user in users if len(user) > 2], 2 if validate else 1
    told = [user[:-back] for user in users]
    counted = [user[: max(1, len(user) - 1 - back)] for user in users]
    return Protocol(name, num_items, counted, told, told, np.array([user[-back] for user in users]), 1e-6, "HR@10")


def _by_user(users: Ids, values: NDArray[Any]) -> list[NDArray[Any]]:
    return np.split(values, np.flatnonzero(np.diff(users)) + 1)


PROTOCOLS = {"cs-670": cs_670, "next-item": next_item}


def popularity(protocol: Protocol) -> Scores:
    """The same for all, counted exactly: no privacy."""
    counts = np.bincount(np.concatenate(protocol.counted), minlength=protocol.num_items + 1)[1:].astype(np.float32)
    return lambda told: np.tile(counts, (len(told), 1))


def ease(protocol: Protocol, ridge: float) -> Scores:
    """EASE on the most popular items: no privacy."""
    head = np.argsort(-popularity(protocol)([np.zeros(0, np.int64)])[0], kind="stable")[:_LARGEST]
    has = _matrix(protocol, protocol.counted)[:, head]
    inverse = np.linalg.inv((has.T @ has).toarray() + ridge * np.eye(len(head), dtype=np.float32))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)

    def scores(told: Sequence[Ids]) -> NDArray[np.float32]:
        found = np.full((len(told), protocol.num_items), -1e6, np.float32)
        found[:, head] = _matrix(protocol, told)[:, head] @ weights
        return found

    return scores


def _matrix(protocol: Protocol, histories: Sequence[Ids]) -> sparse.csr_matrix:
    rows = np.repeat(np.arange(len(histories)), [len(history) for history in histories])
    columns = np.concatenate(histories) - 1
    cells = sparse.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), (len(histories), protocol.num_items))
    cells.data[:] = 1
    return cells


def features_in(path: str, num_items: int) -> list[list[Any]]:
    """Public features of items 1 to `num_items`."""
    text = Path(path).read_text(encoding="utf-8")
    if path.endswith(".json"):
        by_item = {int(item): features for item, features in json.loads(text).items()}
    else:
        rows = [line.split("\t") for line in text.splitlines()[1:]]
        by_item = {int(item): [*genres.split(), *_band(year)] for item, _, year, genres in rows}
    return [by_item.get(item, []) for item in range(1, num_items + 1)]


def _band(year: str) -> list[int]:
    return [int(year) // 5] if year.isdigit() else []


def private_sums(
    protocol: Protocol, epsilon: float, ordered: bool | None, seed: int, features: list[list[Any]] | None = None
) -> Any:
    """The package's recommender, with noise from a seed."""
    from tfdp_rec.core.mechanism.noise.words import seeded
    from tfdp_rec.spectral import SpectralRecommender

    items = np.arange(1, protocol.num_items + 1)
    made = SpectralRecommender(items, epsilon, protocol.delta, ordered=ordered, features=features, words=seeded(seed))
    return made.fit(protocol.counted, verbose=0)


def table(protocol: Protocol, args: argparse.Namespace) -> list[str]:
    """All figures of a data set, as lines of markdown."""

    def figure(values: Sequence[NDArray[np.float64]]) -> str:
        # Over users, and in squares over noises.
        means = [each.mean() for each in values]
        between = np.var(means, ddof=1) / len(means) if len(means) > 1 else 0.0
        over_users = np.mean(values, axis=0).std(ddof=1) ** 2 / len(protocol.told)
        return f"{np.mean(means):.4f} ± {(over_users + between) ** 0.5:.4f}"

    users, items = len(protocol.counted), protocol.num_items
    lines = [f"**{protocol.name}**: {users:,} users, {items:,} items, {protocol.metric}", ""]
    rows = [["popularity, no privacy", *[f"{protocol.measured(popularity(protocol)).mean():.6f}"] * len(args.epsilon)]]
    for ridge in args.ridges:
        found = figure([protocol.measured(ease(protocol, ridge))])
        rows.append([f"EASE, ridge {ridge:g}, no privacy", *[found] * len(args.epsilon)])
    features = features_in(args.features, protocol.num_items) if args.features else None
    for name, told in itertools.product(args.orders, [None, *([features] if features else [])]):
        cells, votes = [], []
        label = f"{name}, features" if told else name
        for epsilon in args.epsilon:
            start, values = time.monotonic(), []
            for seed in range(args.seeds):
                made = private_sums(protocol, epsilon, ORDERS[name], seed, told)
                values.append(protocol.measured(made.scores))
                votes.append(f"{made.vote.votes:+.0f}/{made.vote.noise:.0f}" if made.vote else "")
            cells.append(figure(values))
            print(f"{protocol.name}, {label}, ε {epsilon:g}: {cells[-1]}, {time.monotonic() - start:.0f} s, "
                  f"{' '.join(votes[-args.seeds :])}", file=sys.stderr)  # fmt: skip
        rows.append([f"private sums, {label}", *cells])
    return [*lines, *markdown(["", *(f"ε = {epsilon:g}" for epsilon in args.epsilon)], rows), ""]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser("python -m experiments.anchors", description=HELP,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("protocol", choices=PROTOCOLS)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[8.0, 3.0, 1.0])
    parser.add_argument("--seeds", type=int, default=5, help="noises for each budget; default: %(default)s")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS), help="which private sums")
    parser.add_argument("--ridges", nargs="*", type=float, default=[], help="of EASE, beside them")
    parser.add_argument("--features", metavar="FILE", help="public features of the items, for further rows")
    parser.add_argument("--validate", action="store_true", help="ask for the item before the last")
    args = parser.parse_args(argv)
    pages = [table(PROTOCOLS[args.protocol](file, args.validate), args) for file in args.files]
    print("\n".join(line for page in pages for line in page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
