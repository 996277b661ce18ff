"""`python -m experiments.logs size`: what a log costs from its files to the training step, a line for each thing.

  python -m experiments.logs generate --rows 1e7 --out runs/log-1e7
  python -m experiments.logs size runs/log-1e7 --into runs/prepared-1e7

Memory is the most that the process has had so far. Files that were read before may still be in the system's cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `size`."""
    parser.add_argument("log", help="folder of Parquet files, as `generate` writes them")
    parser.add_argument("--into", required=True, metavar="FOLDER", help="where to put what is made")
    parser.add_argument("--batch-size", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--batches", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=50, help="of training; default: %(default)s")
    parser.add_argument("--epsilon", type=float, default=1.0, help="of the private vocabulary; default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Does all of it once."""
    import pyarrow.parquet

    import tfdp_rec
    from tfdp_rec.data import Interactions, NextItemExamples, PoissonSampling
    from tfdp_rec.models import TwoTower
    from tfdp_rec.privacy import private_counts, private_items

    paths = sorted(Path(args.log).glob("*.parquet"))
    rows = sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)
    on_disk = sum(path.stat().st_size for path in paths) / 2**20
    print(f"{rows:.3g} rows, {on_disk:.0f} MB of Parquet, load {os.getloadavg()[0]:.1f}; {_peak():.0f} MB before")

    def read() -> Interactions:
        return Interactions.read(paths, user="user_id", item="sku", time="ts", features=["price"], folder=args.into)

    log = _timed("grouped by user", read)
    _timed("found again", read)
    found = _timed("private vocabulary", lambda: private_items(log, epsilon=args.epsilon, delta=1e-7))
    known = _timed("numbered", lambda: log.with_items(found.terms))
    train, _ = _timed("split by hash", lambda: known.split(0.8))
    _timed("private counts", lambda: private_counts(known, known.catalogue, noise_multiplier=4.0))
    print(known.summary(), end="")
    print(f"{len(found.terms)} of {len(log.found()[1])} items found, {known.num_rows / log.num_rows:.1%} of the rows")
    examples = NextItemExamples(known, train, negatives=min(500, known.num_items))
    sampling = PoissonSampling(len(examples), args.batch_size, unit="user")
    indices = sampling.index_batches()
    _rate("fetch alone", args.batches, lambda: examples.fetch(next(indices)))
    batches = iter(sampling.batches(examples.fetch, shared=examples.shared))
    _rate("Poisson batches", args.batches, lambda: next(batches))
    model = TwoTower(known.catalogue.ids, width=32, hidden=32, ks=(1,))
    model.compile(tfdp_rec.LazyDPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=args.batch_size))
    drawn = sampling.batches(examples.fetch, shared=examples.shared)
    model.fit(drawn, steps_per_epoch=2, verbose=0)
    start = time.perf_counter()
    model.fit(drawn, steps_per_epoch=args.steps, verbose=0)
    print(f"{'training steps':20} {args.steps / (time.perf_counter() - start):8.1f} a second   {_peak():6.0f} MB")
    return 0


def _timed(name: str, work: Callable[[], Any]) -> Any:
    start, used = time.perf_counter(), time.process_time()
    answer = work()
    seconds, of_processor = time.perf_counter() - start, time.process_time() - used
    print(f"{name:20} {seconds:8.1f} s   {of_processor:8.1f} s of processors   {_peak():6.0f} MB", flush=True)
    return answer


def _rate(name: str, count: int, work: Callable[[], Any]) -> None:
    work()
    start = time.perf_counter()
    for _ in range(count):
        work()
    print(f"{name:20} {count / (time.perf_counter() - start):8.1f} a second   {_peak():6.0f} MB", flush=True)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
