"""The constants of `plan`, measured: what a value costs when it is drawn, read, added, replaced, sent.

All are processor time, summed over cores and, for what is sent, over both processes: on a busy machine it stays what it
is, and it is what a server runs out of.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf  # noqa: E402

from experiments.bench.cases import Case  # noqa: E402
from experiments.bench.contestants import Contestant  # noqa: E402
from experiments.bench.timing import processor_ns  # noqa: E402
from tfdp_rec.distribute import LocalCluster  # noqa: E402
from tfdp_rec.noise import EntropyNoise  # noqa: E402
from tfdp_rec.optimizers.tables import scatter  # noqa: E402

HELP = """\
  python -m experiments.bench constants --json here.json       half a minute
  python -m experiments.bench plan --constants here.json --rows 5e6 --dim 64 --batch 64
"""
ROWS, WIDTH, TOUCHED = 1 << 20, 64, 1 << 15
REPEATS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `constants`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write them there, too, for `plan`")


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    found = measure()
    print("\n".join(f"{name:<12} {value:10.3g}" for name, value in found.items()))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


def measure() -> dict[str, float]:
    """Every constant of `experiments.bench.step_costs.Constants` that can be had without a model."""
    return _rows() | _whole_tables() | _network()


def _rows() -> dict[str, float]:
    table, marks = tf.Variable(tf.zeros([ROWS, WIDTH])), tf.Variable(tf.zeros([ROWS], tf.int32))
    noise, now = EntropyNoise(), tf.constant(0, tf.int64)
    ids = tf.constant(tf.random.shuffle(tf.range(ROWS, dtype=tf.int64))[:TOUCHED])
    values, dense, size = tf.ones([TOUCHED, WIDTH]), tf.ones([ROWS, WIDTH]), TOUCHED * WIDTH

    def mark() -> None:
        behind = tf.cast(tf.gather(marks, ids), tf.int64) <= now
        scatter("Update", marks, ids, tf.cast(behind, tf.int32))

    return {
        "draw": _core_ns(lambda: noise.normal(0, ids, now, WIDTH)) / size,
        "read": _core_ns(lambda: tf.gather(table, ids)) / size,
        "add": _core_ns(lambda: _done(scatter("Add", table, ids, values))) / size,
        "replace": _core_ns(lambda: _done(scatter("Update", table, ids, values))) / size,
        "write": _core_ns(lambda: _done(table.assign_sub(dense))) / (ROWS * WIDTH),
        "mark": _core_ns(mark) / TOUCHED,
    }


def _done(write: Any) -> None:
    """A write is made though nobody takes its result; returning the variable would copy all of it."""


def _whole_tables() -> dict[str, float]:
    """A value of DPSGD's step and of LazyDPSGD's settling, through the optimizers themselves."""
    found = {}
    for name, mechanism in (("dense", "dp-sgd-f"), ("settle", "lazy")):
        contestant = Contestant(mechanism, Case("", "one-table", (ROWS,), 8, width=WIDTH))
        times = []
        for _ in range(3):
            began = time.process_time_ns()
            contestant.step()
            stepped = time.process_time_ns()
            contestant.model.optimizer.settle()
            times.append(time.process_time_ns() - (stepped if name == "settle" else began))
        found[name] = times[-1] / (ROWS * WIDTH)
    return found


def _network() -> dict[str, float]:
    """A call from a worker to a parameter server and back, with few bytes and with many."""
    with LocalCluster(workers=1, servers=1) as cluster:
        strategy = tf.distribute.ParameterServerStrategy(cluster.resolver())
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        processes = [os.getpid(), *(cluster.pid(name) or 0 for name in cluster.names)]
        alone = _scheduled(coordinator, processes, None)
        few, many = (_scheduled(coordinator, processes, values) for values in (16, 1 << 18))
        del strategy, coordinator
        gc.collect()  # their functions are removed from the servers while these are there to be told
    sent = 2 * 4 * (1 << 18)  # there and back
    return {"call_us": (few - alone) / 1e3, "wire": (many - few) / sent, "dispatch_us": alone / 1e3}


def _scheduled(coordinator: Any, processes: list[int], values: int | None, repeats: int = 300) -> float:
    """Nanoseconds of all processes for one function on the worker that sends values to the server and back."""

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        x = tf.random.normal([values or 16])
        if values is not None:
            with tf.device("/job:ps/task:0/device:CPU:0"):
                x = -x
        return tf.reduce_sum(x)

    coordinator.schedule(step)
    coordinator.join()
    began = processor_ns(processes)
    for _ in range(repeats):
        coordinator.schedule(step)
    coordinator.join()
    return (processor_ns(processes) - began) / repeats


def _core_ns(act: Callable[[], Any]) -> float:
    """Median processor time of `act` as a graph, which returns its results: unused ones would not be computed."""
    graph, times = tf.function(act, autograph=False), []
    for _ in range(REPEATS + 2):
        began = time.process_time_ns()
        graph()
        times.append(time.process_time_ns() - began)
    return statistics.median(times[2:])
