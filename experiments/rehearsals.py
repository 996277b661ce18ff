"""`python -m experiments.rehearsals u.data`: a rehearsal's verdict against the training that it is about.

Five click models, each with two settings, on generated clicks and on MovieLens-100K's ratings of four stars or five
(its file u.data; left out, on generated clicks alone). A pair's truth is one private training and one by Adam on the
same rows, judged on others: settings *learn* if they find at least half of what Adam finds beyond averages, the AUC by
the shares of clicks of each user and of each item. The rehearsal has been asked before. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import keras
import numpy as np

import tfdp_rec
from experiments.generated.clicks import auc

L = keras.layers
EPSILON, WIDTH, ADAM_EPOCHS = 8.0, 16, 10
LEFT_OUT: dict[str, Any] = {}
SETTINGS = {
    "generated": (LEFT_OUT, {"batch_size": 2_000, "epochs": 20}),
    "MovieLens-100K": (LEFT_OUT, {"batch_size": 256, "epochs": 5}),
}
MODELS = ("product", "product and biases", "dense", "NeuMF", "cross")


def model_of(name: str, users: int, items: int) -> keras.Model:
    """One of the models, compiled."""
    user, item = keras.Input([], dtype="int32"), keras.Input([], dtype="int32")

    def rows(width: int) -> list[Any]:
        return [L.Embedding(users, width)(user), L.Embedding(items, width)(item)]

    def dense(values: Any, *widths: int) -> Any:
        for width in widths:
            values = L.Dense(width, activation="relu")(values)
        return values

    if name == "product":
        last = L.Dot(1)(rows(WIDTH))
    elif name == "product and biases":
        last = L.Add()([L.Dot(1)(rows(WIDTH)), *rows(1)])
    elif name == "dense":
        last = dense(L.Concatenate()(rows(2 * WIDTH)), 128, 64)
    elif name == "NeuMF":
        last = L.Concatenate()([L.Multiply()(rows(WIDTH)), dense(L.Concatenate()(rows(WIDTH)), 32, 16, 8)])
    else:
        last = first = L.Concatenate()(rows(WIDTH))
        for _ in range(2):
            last = L.Add()([L.Multiply()([first, L.Dense(2 * WIDTH)(last)]), last])
        last = dense(last, 32)
    model = keras.Model([user, item], L.Dense(1, activation="sigmoid")(last))
    model.compile("adam", "binary_crossentropy")
    return model


def generated(rows: int = 45_000, users: int = 500, items: int = 200) -> tuple[np.ndarray, ...]:
    """Users, items and clicks, by tastes of four dimensions."""
    rng = np.random.default_rng(0)
    user, item = rng.integers(users, size=rows), rng.integers(items, size=rows)
    tastes, kinds = rng.normal(size=[users, 4]) / 2**0.5, rng.normal(size=[items, 4]) / 2**0.5
    logits = 3 * np.sum(tastes[user] * kinds[item], axis=1) + rng.normal(size=items)[item] / 2
    return user, item, rng.random(rows) < 1 / (1 + np.exp(-logits))


def movielens(path: str) -> tuple[np.ndarray, ...]:
    """Users, films and whether a rating was of four stars or five."""
    ratings = np.loadtxt(path, dtype=np.int64)
    return ratings[:, 0] - 1, ratings[:, 1] - 1, ratings[:, 2] >= 4


def compare(data: str, columns: tuple[np.ndarray, ...]) -> list[bool]:
    """Rows of the table for one data set, and whether each verdict is right."""
    order = np.random.default_rng(1).permutation(len(columns[0]))
    user, item, clicked = (column[order].astype("float32" if column.dtype == bool else "int32") for column in columns)
    users, items, known = int(user.max()) + 1, int(item.max()) + 1, len(order) * 4 // 5
    x, y, asked, truth = (user[:known], item[:known]), clicked[:known], (user[known:], item[known:]), clicked[known:]
    averages = auc(truth, _odds(x[0], y, users)[asked[0]] + _odds(x[1], y, items)[asked[1]])
    right = []
    for name in MODELS:
        model, adam = model_of(name, users, items), 0.5
        for _ in range(ADAM_EPOCHS):
            model.fit(x, y, batch_size=256, verbose=0)
            adam = max(adam, auc(truth, model.predict(asked, batch_size=4096, verbose=0)[:, 0]))
        for settings in SETTINGS[data]:
            model = model_of(name, users, items)
            private = tfdp_rec.make_private(model, (x, y), epsilon=EPSILON, unit="row", **settings)
            start = time.monotonic()
            told = private.rehearse(verbose=0)
            seconds = time.monotonic() - start
            private.fit(verbose=0)
            found = auc(truth, private.predict(asked, batch_size=4096, verbose=0)[:, 0])
            share = min(max((found - averages) / max(adam - averages, 1e-9), 0.0), 1.0)
            right.append(told.learns == (share >= 0.5))
            print(
                f"| {data} | {name} | {private.plan.sampling.expected_batch_size:,} x {private.epochs} "
                f"| {averages:.3f} | {adam:.3f} | {found:.3f} | {share:.0%} | {told.share:.0%} | {seconds:.0f} "
                f"| {('right' if right[-1] else 'WRONG') + ('' if told.is_sure else ', on the edge')} |",
                flush=True,
            )
    return right


def _odds(ids: np.ndarray, clicked: np.ndarray, number: int) -> np.ndarray:
    shares = (np.bincount(ids, clicked, number) + 10 * clicked.mean()) / (np.bincount(ids, minlength=number) + 10)
    return np.log(shares / (1 - shares))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m experiments.rehearsals", description=__doc__.split("\n\n")[0])
    parser.add_argument("ratings", nargs="?", metavar="u.data", help="MovieLens-100K's ratings")
    parser.add_argument("--users", type=int, default=500, help="of the generated rows, which are 36,000 to train on")
    parser.add_argument("--items", type=int, default=200, help="of the generated rows")
    given = parser.parse_args()
    path, columns = given.ratings, generated(users=given.users, items=given.items)
    print("| data | model | batches x epochs | averages | Adam | private | of it | rehearsed | seconds | verdict |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    right = compare("generated", columns) + (compare("MovieLens-100K", movielens(path)) if path else [])
    print(f"{sum(right)} of {len(right)} verdicts are right.")


if __name__ == "__main__":
    main()
