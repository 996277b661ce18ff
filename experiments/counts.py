"""`python -m experiments.counts FILE ...`: `make_private` alone and with counts to begin at, beside popularity.

A row is a user and an item: an item that the user took, or one drawn at random beside it. Of each user the last item is
asked, and another drawn one; up to --events items before it are learnt from. Printed is the AUC of what is asked, of
all users together. Popularity is exact, of the same rows, and has no privacy; "private popularity" is
clicks by item with the noise of the whole ε. The model: vectors of users and items, their product, a dense layer.

A folder of MovieLens-100K (.inter, .user, .item) has rows with labels of their own: 4 or 5 stars; a fifth is asked.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

import tfdp_rec
from experiments.clicks.sources import movielens
from experiments.generated.clicks import auc
from experiments.spectral.data import read
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release


def rows_of(path: Path, events: int, seed: int) -> tuple[Any, Any, str]:
    """Rows (user, item, label) to learn from and to be asked, each `[rows, 3]`, and a name."""
    if path.is_dir():
        parts = movielens([path], seed).parts
        learnt, asked = (np.column_stack([parts[part].ids[:, :2], parts[part].labels]) for part in ("train", "test"))
        return learnt.astype(np.int64), asked.astype(np.int64), "stars"
    name, histories, items = read(str(path))
    rng, known = np.random.default_rng(seed), [each - 1 for each in histories if len(each) > 1]

    def beside_others(taken: Any) -> Any:
        drawn = taken.copy()
        drawn[:, 1] = (taken[:, 1] + rng.integers(1, items, len(taken))) % items
        drawn[:, 2] = 0
        return np.concatenate([taken, drawn])

    before = [(user, item, 1) for user, each in enumerate(known) for item in each[:-1][-events:]]
    last = [(user, each[-1], 1) for user, each in enumerate(known)]
    return beside_others(np.array(before)), beside_others(np.array(last)), name


def network(users: int, items: int) -> keras.Model:
    """The model that is trained."""
    user, item = keras.Input([], dtype="int32", name="user"), keras.Input([], dtype="int32", name="item")
    taste = keras.layers.Dot(1)([keras.layers.Embedding(users, 16)(user), keras.layers.Embedding(items, 16)(item)])
    model = keras.Model([user, item], keras.layers.Dense(1)(taste))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def main() -> None:
    """Prints a line for each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 1.0])
    parser.add_argument("--events", type=int, default=3)
    parser.add_argument("--trainings", type=int, default=2)
    parser.add_argument("--begin-at", nargs="+", choices=["nothing", "counts"], default=["nothing", "counts"])
    args = parser.parse_args()
    for path in args.files:
        learnt, asked, name = rows_of(path, args.events, 0)
        users, items = (int(max(learnt[:, k].max(), asked[:, k].max())) + 1 for k in (0, 1))
        clicks = np.bincount(learnt[learnt[:, 2] == 1, 1], minlength=items)

        score = functools.partial(auc, asked[:, 2])
        exact, given = score(clicks[asked[:, 1]]), (asked[:, 0].astype("int32"), asked[:, 1].astype("int32"))
        print(f"{name}: {len(learnt)} rows, {users} users, {items} items; popularity {exact:.4f}", flush=True)
        data = (learnt[:, 0].astype("int32"), learnt[:, 1].astype("int32")), learnt[:, 2:].astype("float32")
        for epsilon in args.epsilons:
            noise = noise_of_one_release(epsilon, 10.0 ** math.floor(math.log10(0.1 / len(learnt))))
            noisy = clicks + noise * np.random.default_rng().normal(size=items)
            print(f"  epsilon {epsilon:g}: private popularity {score(noisy[asked[:, 1]]):.4f}")
            for begin in args.begin_at * args.trainings:
                at: Literal["counts"] | None = "counts" if begin == "counts" else None
                start = time.time()
                private = tfdp_rec.make_private(network(users, items), data, epsilon=epsilon, unit="row", begin_at=at)
                private.fit(verbose=0)
                found = score(private.predict(given, batch_size=8192, verbose=0)[:, 0])
                scale = [float(w.kernel[0]) for w in private.model.layers if w.name.startswith("beside_counts")]
                print(f"    {begin}: {found:.4f}, training x {scale}, {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
