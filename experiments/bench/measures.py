"""What a worker can be asked beside the time of its steps: memory, settling, and where a step's time goes.

The breakdown times ever longer beginnings of the step, each as a graph of its own, and takes differences; the parts of
the lazy update (de-duplication, marks, sampling, writing) are timed by themselves on the rows of one batch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from experiments.bench.baselines import Unread
from experiments.bench.cases import Case
from experiments.bench.contestants import Contestant
from experiments.bench.workers import peak_megabytes
from tfdp_rec.core.sensitivity import engine
from tfdp_rec.core.sensitivity.recorder import record_calls
from tfdp_rec.noise import EntropyNoise, Request
from tfdp_rec.optimizers import LazyDPSGD
from tfdp_rec.training.batch import Batch
from tfdp_rec.training.lookahead import LookAhead

REPEATS = 15


def build(name: str, case: dict[str, Any]) -> Contestant:
    """A contestant of the case that JSON describes."""
    return Contestant(name, Case(**{**case, "table_sizes": tuple(case["table_sizes"])}))


def settle(contestant: Contestant) -> dict[str, float]:
    """Seconds to pay what all rows owe, the first time (with tracing) and once more after another step."""
    optimizer = contestant.model.optimizer
    if not isinstance(optimizer, LazyDPSGD):
        raise ValueError(f"'{contestant.name}' has nothing to settle.")
    seconds = []
    for _ in range(2):
        contestant.step()
        began = time.perf_counter()
        optimizer.settle()
        seconds.append(time.perf_counter() - began)
    values = sum(table.rows * table.width for table in optimizer.tables.values())
    return {"first_seconds": seconds[0], "seconds": seconds[1], "values": values}


def memory(contestant: Contestant) -> dict[str, float]:
    """Peak memory of the process, and what its tables take."""
    variables = contestant.model.trainable_variables
    tables = sum(math.prod(v.shape) * 4 for v in variables if "embeddings" in v.path)
    return {"peak_megabytes": peak_megabytes(), "table_megabytes": tables / 2**20}


def machine(contestant: Contestant) -> dict[str, float]:
    """Values a second that this process can draw, and write to rows of a large table."""
    width, rows = contestant.case.width, 1 << 17
    noise, step = EntropyNoise(), tf.constant(0, tf.int64)
    table = tf.Variable(tf.zeros([16 * rows, width]))
    values = tf.ones([rows, width])

    def draw() -> tf.Tensor:
        return noise.normal(0, tf.range(rows, dtype=tf.int64), step, width)[0, 0]

    def write() -> None:
        for block in range(16):
            at = tf.range(block * rows, (block + 1) * rows, dtype=tf.int64)
            table.scatter_update(tf.IndexedSlices(values, at))

    size = rows * width
    return {"drawn_a_second": size / _seconds(draw), "written_a_second": 16 * size / _seconds(write)}


def breakdown(contestant: Contestant) -> dict[str, float]:
    """Milliseconds by part of the step."""
    model, element = contestant.model, next(contestant.batches)
    for table in model.optimizer.tables.values():
        table.withhold(model.optimizer)  # a step's graph reads the rows where a step keeps them
    stages = {name: 1e3 * _seconds(stage) for name, stage in _beginnings(model, element).items()}
    parts = {"forward": stages["forward"]}
    for before, after in zip(list(stages), list(stages)[1:]):
        parts[after] = stages[after] - stages[before]
    whole = statistics.median(wall for wall, _ in contestant.timed(REPEATS))
    parts["update, guard, metrics, input"] = whole - stages["weighted sum"]
    if isinstance(model.optimizer, LazyDPSGD):
        parts |= {
            f"alone: {name}": 1e3 * _seconds(f) for name, f in _lazy_parts(model.optimizer, element).items()
        }
    return {**parts, "step": whole}


def _beginnings(model: Any, element: Any) -> dict[str, Callable[[], Any]]:
    step = model.private_step

    def forward() -> Any:
        with model.private_weights.in_step(), record_calls(model):
            return step.losses(Batch.from_data(element, model.shared_inputs))

    def collected() -> tuple[Any, Any]:
        with model.private_weights.in_step(), tf.GradientTape(watch_accessed_variables=False) as tape:
            with record_calls(model, tape) as recorder:
                losses = step.losses(Batch.from_data(element, model.shared_inputs))
        return engine.collect(recorder, losses, Unread()), losses  # type: ignore[arg-type]

    def backward() -> Any:
        return [[f.__dict__.get("g") for f in several] for several in collected()[0].values()]

    def norms() -> Any:
        return engine.measure(collected()[0]).norms

    def weighted() -> Any:
        found, losses = collected()
        return engine.clip(found, losses, tf.constant(1.0)).gradients

    return {"forward": forward, "backward": backward, "norms": norms, "weighted sum": weighted}


def _lazy_parts(optimizer: LazyDPSGD, element: LookAhead) -> dict[str, Callable[[], Any]]:
    tables = {path: t for path, t in optimizer.tables.items() if path in element.upcoming}
    distinct = {path: tf.unique(element.upcoming[path])[0] for path in tables}
    values = {path: tf.zeros([tf.size(ids), tables[path].width]) for path, ids in distinct.items()}
    requests = [
        Request(t.number, distinct[path], t.width, tf.ones([tf.size(distinct[path]), 1]))
        for path, t in tables.items()
    ]
    marks, now = optimizer.debts.marks, tf.constant(0, tf.int64)
    gradient = {p: tf.IndexedSlices(values[p], distinct[p]) for p in tables}
    return {
        "de-duplication": lambda: [tf.unique(element.upcoming[path])[0] for path in tables],
        "reading marks": lambda: marks.read_marks(marks.find_places(distinct)),
        "sampling": lambda: optimizer.noise.draw(requests, now),
        "noise to rows": lambda: [
            t.write(distinct[p], (t.read(distinct[p])[0] - values[p],)) for p, t in tables.items()
        ],
        "gradient to rows": lambda: [
            t.step(gradient[p].indices, gradient[p].values, tf.constant(0.0)) for p, t in tables.items()
        ],
    }


def _seconds(act: Callable[[], Any]) -> float:
    """The median time of `act` as a graph. What it computes is given out: TensorFlow leaves undone what nobody gets."""
    graph = tf.function(lambda: [v for v in tf.nest.flatten(act()) if tf.is_tensor(v)], autograph=False)
    times = []
    for repeat in range(REPEATS + 2):
        began = time.perf_counter()
        graph()
        if repeat >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


CALLS: dict[str, Callable[[Contestant], Any]] = {
    "settle": settle, "memory": memory, "machine": machine, "breakdown": breakdown,
}  # fmt: skip
