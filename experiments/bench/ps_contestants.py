"""What `bench ps` compares: one model on a loopback cluster of its own, under each mechanism.

=============  ================================================================================================
`eana`         noise on the touched rows, drawn on their server
`lazydpsgd`    owed noise, drawn on the row's server when it is read
`dpsgd`        noise on every row, drawn on its server (the honest baseline: from a worker all of it would travel)
=============  ================================================================================================

Two shapes of EANA's paper: `two-tower`, movies watched and movie next, one table each; `kg`, a transformer over twenty
activities of three features, a table each and one of labels. Ids are Zipf(0.8) but for the shared negatives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from experiments.bench import models
from experiments.bench.access_patterns import AccessPattern, table_ids
from experiments.bench.cases import ServedCase
from experiments.bench.models import LEARNING_RATE
from experiments.bench.timing import processor_ns
from experiments.bench.wire import Wire
from experiments.generated.knowledge_graph import FEATURES
from tfdp_rec import mechanisms
from tfdp_rec.data import PoissonSampling
from tfdp_rec.distribute import LocalCluster, ParameterServerTrainer
from tfdp_rec.models import KGEntity

HISTORY, NEGATIVES, UNITS = 20, 500, 1_000_000


def _two_tower(case: ServedCase) -> keras.Model:
    return models.private(models.TwoTowerLayers, rows=case.rows, width=case.dim, hidden=case.dim)


def _kg(case: ServedCase) -> keras.Model:
    tables = dict.fromkeys(FEATURES, case.rows)
    return KGEntity(tables, case.rows, case.dim, HISTORY, num_blocks=1, num_heads=4, hidden=case.dim)


MODELS = {"two-tower": _two_tower, "kg": _kg}


def _batches(case: ServedCase, sampling: PoissonSampling) -> tf.data.Dataset:
    """Batches whose ids are a function of who was drawn, and negatives of no one."""
    law = AccessPattern(exponent=0.8)

    def ids(which: int, shape: list[Any], by: AccessPattern, key: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([tf.constant(which, tf.int64), key])
        return tf.reshape(table_ids(by, [case.rows], shape[0], shape[1], seed), shape)

    def fetch(units: tf.Tensor) -> Any:
        size, key = tf.shape(units)[0], tf.reduce_sum(units)
        label = ids(0, [size, 1], law, key)[:, 0]
        if case.model == "two-tower":
            return {"context": ids(2, [size, HISTORY], law, key), "label": label}, tf.zeros([size], tf.int32)
        features = {f: ids(2 + i, [size, HISTORY], law, key)[:, :, None] for i, f in enumerate(FEATURES)}
        return {**features, "label": label}

    def shared() -> dict[str, tf.Tensor]:
        key = tf.random.uniform([], maxval=2**62, dtype=tf.int64)
        return {"negatives": ids(1, [NEGATIVES, 1], AccessPattern(), key)[:, 0]}

    return sampling.graph_batches(fetch, shared=shared)


class PSContestant:
    """A trainer and its cluster, which ends with this process.

    Args:
        name: of the mechanism.
        case: what to train.
    """

    def __init__(self, name: str, case: ServedCase):
        self.name, self.case = name, case
        self.cluster = LocalCluster(case.workers, case.servers).__enter__()
        self.processes = {"coordinator": [os.getpid()]} | {
            job: [self.cluster.pid(name) or 0 for name in self.cluster.names if name.startswith(job)]
            for job in ("worker", "ps")
        }
        sampling = PoissonSampling(UNITS, case.batch)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if case.model == "two-tower" else None
        self.trainer = ParameterServerTrainer(
            lambda: MODELS[case.model](case), lambda: _optimizer(name, case),
            lambda: _batches(case, sampling),
            self.cluster.resolver(), sampling=sampling, loss=loss,
        )  # fmt: skip

    def step(self) -> None:
        """A step on every worker, more or less: which worker takes one is not ours to say."""
        self.run(self.case.workers)

    def run(self, steps: int) -> None:
        """So many steps by all workers together."""
        self.trainer.fit(steps, steps_per_report=steps, verbose=0)

    def timed(self, steps: int) -> list[tuple[float, float]]:
        """Milliseconds a step, of wall time and of processor time of all processes, over one turn."""
        everybody = [pid for pids in self.processes.values() for pid in pids]
        wall, processor = time.perf_counter(), processor_ns(everybody)
        self.run(steps)
        wall, processor = time.perf_counter() - wall, processor_ns(everybody) - processor
        return [(1e3 * wall / steps, 1e-6 * processor / steps)]

    def traffic(self) -> dict[str, float]:
        """Bytes a step that arrive at each role, and the milliseconds of a step; more steps where these are fast."""
        wire, steps = Wire(self.processes), 2 * self.case.workers
        ((ms, _),) = self.timed(steps)
        steps = max(steps, min(50 * self.case.workers, int(3000 / ms)))
        before = wire.counts()
        ((ms, _),) = self.timed(steps)
        return {**{role: count / steps for role, count in wire.since(before).items()}, "ms": ms}

    def memory(self) -> dict[str, float]:
        """Megabytes that each role's processes hold now, the largest of each."""
        return {role: max(map(_megabytes, pids)) for role, pids in self.processes.items()}


def _optimizer(name: str, case: ServedCase) -> keras.optimizers.Optimizer:
    return mechanisms.named(name).optimizer(
        LEARNING_RATE, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=case.batch
    )


def _megabytes(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def build(name: str, case: Mapping[str, Any]) -> PSContestant:
    """A contestant of the case that JSON describes."""
    return PSContestant(name, ServedCase(**case))


CALLS: dict[str, Callable[[PSContestant], Any]] = {
    "traffic": PSContestant.traffic, "memory": PSContestant.memory,
}  # fmt: skip
