"""`python -m experiments.logs latency`: how long an answer takes, from a SavedModel in one's own ids and over HTTP.

  python -m experiments.logs latency --items 1e5 1e6 1e7

The recommender is not fitted: what an answer costs does not hang on what the numbers are. Its head is as large as heads
get, histories hold 20 items, three of four of the head. Beside it stands what a model costs that scores every item: the
inner products of a two-tower of width 32, and the best k of them.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST_SCORES = 10**8  # 0.4 GB, and a second or two


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `latency`."""
    parser.add_argument("--items", type=float, nargs="+", default=[1e5, 1e6], help="of the catalogue")
    parser.add_argument("--head", type=int, default=6000, help="default: %(default)s")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64], help="histories at once")
    parser.add_argument("--times", type=int, default=50, help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measures each size."""
    import tensorflow as tf

    from tfdp_rec.data import Items
    from tfdp_rec.serving import Served, Server, export

    for count in map(int, args.items):
        with tempfile.TemporaryDirectory() as folder:
            path, start = str(Path(folder) / "servable"), time.perf_counter()
            export(path, _unfitted(count, args.head), Items([f"sku-{i}" for i in range(count)]), k=10)
            written, start = time.perf_counter() - start, time.perf_counter()
            served = Served(path)
            loaded = time.perf_counter() - start
            size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file()) / 2**20
            print(f"{count:,} items: {size:.0f} MB, written in {written:.0f} s, loaded in {loaded:.0f} s", flush=True)
            model = tf.saved_model.load(path)
            for batch in args.batch:
                histories = _histories(count, args.head, batch)
                asked = {"history": tf.constant(histories), "k": tf.constant(10)}
                _show("SavedModel", batch, args.times, functools.partial(model.signatures["top_k"], **asked))
                if count * batch <= _MOST_SCORES:
                    _show("every item scored", batch, min(args.times, 10), _two_tower(count, batch))
                with Server(served, port=0) as server:
                    _show("HTTP", batch, args.times, _http(server.port, histories))
            print(f"{'':20} at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GB", flush=True)
    return 0


def _unfitted(count: int, head: int) -> Any:
    import numpy as np

    from tfdp_rec.spectral import Release, SpectralRecommender
    from tfdp_rec.spectral.rules import Split
    from tfdp_rec.spectral.scores import Estimates

    rng = np.random.default_rng(0)
    made = SpectralRecommender(np.arange(1, count + 1), noise_multiplier=1.0, head=head)
    made.num_users, made.split = count, Split.from_budget(1.0, count, count)
    counts, prior = rng.random(count), rng.random(count, np.float32)
    made.released = Release(counts=counts, head=np.sort(rng.permutation(count)[:head]))
    made.estimates = Estimates(rng.standard_normal([head, head], np.float32), prior, rng.random(head, np.float32))
    return made


def _histories(count: int, head: int, batch: int) -> list[list[str]]:
    import numpy as np

    places = np.sort(np.random.default_rng(0).permutation(count)[:head])  # the head's, as above
    rng = np.random.default_rng(1)
    rows = np.concatenate([rng.choice(places, [batch, 15]), rng.integers(0, count, [batch, 5])], axis=1)
    return [[f"sku-{i}" for i in row] for row in rows]


def _two_tower(count: int, batch: int) -> Callable[[], Any]:
    import tensorflow as tf

    table = tf.Variable(tf.random.normal([count, 32]))
    users = tf.random.normal([batch, 32])
    best = tf.function(lambda: tf.math.top_k(tf.matmul(users, table, transpose_b=True), 10))
    return best


def _http(port: int, histories: list[list[str]]) -> Callable[[], Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"signature_name": "top_k", "inputs": {"history": histories, "k": 10}})

    def ask() -> bytes:
        connection.request("POST", "/v1/models/recommender:predict", body)
        return connection.getresponse().read()

    return ask


def _show(name: str, batch: int, times: int, answer: Callable[[], Any]) -> None:
    for _ in range(3):
        answer()
    took = []
    for _ in range(times):
        start = time.perf_counter()
        answer()
        took.append(1e3 * (time.perf_counter() - start))
    took.sort()
    print(f"{name:20} batch {batch:3}   {took[times // 2]:8.1f} ms, 95%: {took[int(0.95 * times)]:8.1f} ms", flush=True)
