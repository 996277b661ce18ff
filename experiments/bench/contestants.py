"""What the speed benchmarks compare: the same model, data and batch size under every way to train it.

=================  ============================================================================================
`keras-sgd`        plain `keras.Model`, `keras.layers.Embedding`, `keras.optimizers.SGD`: no privacy
`sparse-sgd`       the same, its tables read by a gather from the variable itself: no privacy, no copy of a table
`xla-sgd`          the same, its step compiled by XLA
`dp-sgd-book`      DP-SGD, clipped by book-keeping; `-f` by ghost norms, `-r` reweighted, `-b` example by example
`eana`             noise on the touched rows
`ada-fest`         noise on rows that are chosen privately: those read often, and 3 in a million of the others
`lazy`             LazyDPSGD
`lazy-each-step`   LazyDPSGD that draws every owed step by itself (the paper's "without ANS")
`lazy-ftrl`        LazyDPFTRL with one buffer; `dp-ftrl`, the same noise on every row at every step
=================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from experiments.bench import models
from experiments.bench.access_patterns import AccessPattern, click_batches, table_ids
from experiments.bench.baselines import compare_by
from experiments.bench.cases import MECHANISMS, RMC_WIDTH, STRATEGIES, Case
from experiments.bench.timing import Time, timed
from tfdp_rec.core.sensitivity.arithmetic import ask_for_float32_products
from tfdp_rec.models import TwoTower
from tfdp_rec.models.dlrm import DLRMLayers
from tfdp_rec.privacy import BufferedToeplitz, Correlation
from tfdp_rec.sparse.draws import split_noise_multiplier
from tfdp_rec.training.lookahead import lookahead

FORMS_GRADIENTS = ("dp-sgd-r", "dp-sgd-b")  # examples at a time, or their formed gradients would not fit
CHOOSES_BY = 0.1  # share of AdaFEST's privacy budget by which it chooses rows
FALSE_ALARMS = 4.5  # standard deviations that a row's noisy count must reach


class Contestant:
    """A model ready to be stepped.

    Args:
        name: of the contestant.
        case: what it is to do.

    Attributes:
        model: compiled and built.
        batches: the iterator its steps read.
    """

    def __init__(self, name: str, case: Case):
        ask_for_float32_products()  # of plain SGD, too
        self.name, self.case, self.model, data = name, case, *_model_and_data(name, case)
        self.batches = iter(data)
        self.model.make_train_function()
        self._train = self.model.train_function

    def step(self) -> None:
        """One training step, as `fit` makes it; a GPU has done its work."""
        self._train(self.batches)
        if tf.config.list_physical_devices("GPU"):
            tf.test.experimental.sync_devices()

    def timed(self, steps: int) -> list[Time]:
        """The time of each step; one more step before them does not count."""
        self.step()
        return [timed(self.step) for _ in range(steps)]


def _model_and_data(name: str, case: Case) -> tuple[Any, tf.data.Dataset]:
    if case.workload == "main-job":
        return _main_job(name, case)
    layers, arguments, loss, data = _WORKLOADS[case.workload](case)
    if name not in MECHANISMS:
        model = models.plain(layers, sparse=name != "keras-sgd", **arguments)
        model.compile(keras.optimizers.SGD(models.LEARNING_RATE), loss=loss, jit_compile=name == "xla-sgd")
        return model, data.prefetch(2)
    model = models.private(layers, **arguments)
    model.compile(_optimizer(name, case), loss=loss)
    if name in STRATEGIES:
        compare_by(model, STRATEGIES[name], models.MICROBATCH if name in FORMS_GRADIENTS else None)
    model.prepare(data.element_spec)
    return model, lookahead(data, model)


def _main_job(name: str, case: Case) -> tuple[Any, tf.data.Dataset]:
    """The package's two-tower model as `scripts/train` trains it, under a mechanism or plain SGD."""
    (movies,), pattern = case.table_sizes, AccessPattern.named(case.pattern)

    def batch(number: tf.Tensor) -> dict[str, tf.Tensor]:
        def ids(which: int, count: int, per: int, law: AccessPattern) -> tf.Tensor:
            seed = tf.stack([tf.constant(which, tf.int64), number])
            return 1 + table_ids(law, [movies], count, per, seed)[:, 0]

        return {
            "context": ids(0, case.batch_size, case.pooling, pattern),
            "label": ids(1, case.batch_size, 1, pattern)[:, 0],
            "negatives": ids(2, 4000, 1, AccessPattern())[:, 0],
        }

    data = tf.data.Dataset.counter().map(batch).prefetch(2)
    model = TwoTower(np.arange(1, movies + 1), width=32, hidden=32)
    if name not in MECHANISMS:
        model.compile(keras.optimizers.SGD(models.LEARNING_RATE), jit_compile=name == "xla-sgd")
        return model, data
    model.compile(_optimizer(name, case))
    model.prepare(data.element_spec)
    return model, lookahead(data, model)


def _optimizer(name: str, case: Case) -> keras.optimizers.Optimizer:
    options: dict[str, Any] = {"aggregate_noise": False} if name == "lazy-each-step" else {}
    if name == "ada-fest":
        counts, gradients = split_noise_multiplier(1.0, CHOOSES_BY)
        options = {"noise_multiplier": gradients, "threshold": FALSE_ALARMS * counts}
        options |= {"contribution_clip": 1.0, "contribution_noise_multiplier": counts}
    if MECHANISMS[name].in_order:
        options["correlation"] = Correlation(BufferedToeplitz([0.46], [0.954]), steps=100_000, separation=100)
    common: dict[str, Any] = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": case.batch_size}
    return MECHANISMS[name].optimizer(models.LEARNING_RATE, **(common | options))


Workload = tuple[type, dict[str, Any], Any, tf.data.Dataset]


# The data-centre shapes of Gupta et al., "DeepRecSys", ISCA 2020: they differ in tables, bags and where the work lies.
_TOWERS: dict[str, dict[str, Any]] = {
    "rmc1": {"bottom": (256, 128), "top": (256, 64), "width": RMC_WIDTH},
    "rmc2": {"bottom": (256, 128), "top": (512, 128), "width": RMC_WIDTH},
    "rmc3": {"bottom": (2560, 512), "top": (512, 128), "width": RMC_WIDTH},
}


def _dlrm(case: Case) -> Workload:
    towers = _TOWERS.get(case.workload, {})
    data = click_batches(AccessPattern.named(case.pattern), case.table_sizes, case.batch_size, case.pooling)
    arguments = {"table_sizes": case.table_sizes, "pooling": case.pooling, **towers}
    return DLRMLayers, arguments, "binary_crossentropy", data


def _two_tower(case: Case) -> Workload:
    pattern, (rows,), negatives = AccessPattern.named(case.pattern), case.table_sizes, 500

    def batch(number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        def ids(which: int, count: int, per: int, law: AccessPattern) -> tf.Tensor:
            seed = tf.stack([tf.constant(which, tf.int64), number])
            return table_ids(law, [rows], count, per, seed)[:, 0]

        inputs = {
            "context": ids(0, case.batch_size, case.pooling, pattern),
            "label": ids(1, case.batch_size, 1, pattern)[:, 0],
            "negatives": ids(2, negatives, 1, AccessPattern())[:, 0],
        }
        return inputs, tf.zeros([case.batch_size], tf.int32)

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return models.TwoTowerLayers, {"rows": rows}, loss, tf.data.Dataset.counter().map(batch)


def _one_table(case: Case) -> Workload:
    data = click_batches(AccessPattern.named(case.pattern), case.table_sizes, case.batch_size)
    return models.OneTableLayers, {"rows": case.table_sizes[0], "width": case.width}, "binary_crossentropy", data


_WORKLOADS: dict[str, Callable[[Case], Workload]] = {
    **dict.fromkeys(("dlrm", "rmc1", "rmc2", "rmc3"), _dlrm),
    "two-tower": _two_tower,
    "one-table": _one_table,
}
