"""What the speed benchmarks compare: the same model, data and batch size under every way to train it.

=================  ============================================================================================
`keras-sgd`        plain `keras.Model`, `keras.layers.Embedding`, `keras.optimizers.SGD`: no privacy
`sparse-sgd`       the same, its tables read by a gather from the variable itself: no privacy, no copy of a table
`dp-sgd-book`      DP-SGD, clipped by book-keeping; `-f` by ghost norms, `-r` reweighted, `-b` example by example
`eana`             noise on the touched rows
`lazy`             LazyDPSGD
`lazy-each-step`   LazyDPSGD that draws every owed step by itself (the paper's "without ANS")
=================  ============================================================================================
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from experiments.bench.access_patterns import AccessPattern, click_batches, table_ids
from experiments.bench.baselines import compare_by
from tfdp_rec import mechanisms
from tfdp_rec.clipping import CandidateScores
from tfdp_rec.models.dlrm import DLRMLayers, rmc_arguments
from tfdp_rec.training.lookahead import lookahead
from tfdp_rec.training.model import PrivateTraining

STRATEGIES = {
    "dp-sgd-book": "bookkeeping",
    "dp-sgd-f": "ghost",
    "dp-sgd-r": "reweighted",
    "dp-sgd-b": "per_example",
}
MECHANISMS = {
    **dict.fromkeys(STRATEGIES, mechanisms.dp_sgd),
    "eana": mechanisms.eana,
    "lazy": mechanisms.lazy_dp_sgd,
    "lazy-each-step": mechanisms.lazy_dp_sgd,
}
NAMES = ("keras-sgd", "sparse-sgd", *MECHANISMS)
FORMS_GRADIENTS = ("dp-sgd-r", "dp-sgd-b")  # examples at a time, or their formed gradients would not fit
MICROBATCH = 32
LEARNING_RATE = 0.05


@dataclasses.dataclass(frozen=True)
class Spec:
    """One contestant on one workload.

    Attributes:
        name: one of `NAMES`.
        workload: `dlrm`, `rmc1`, `rmc2`, `rmc3`, `two-tower` or `one-table`.
        table_sizes: rows of each table.
        batch_size: examples a step.
        pooling: ids a bag (history of the two-tower model).
        pattern: which rows are read; see `AccessPattern.named`.
        width: of the table of `one-table`.
    """

    name: str
    workload: str
    table_sizes: tuple[int, ...]
    batch_size: int
    pooling: int = 1
    pattern: str = "uniform"
    width: int = 16

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"contestant must be one of {', '.join(NAMES)}, got {self.name!r}.")
        if self.workload not in WORKLOADS:
            raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {self.workload!r}.")


class GatheredEmbedding(keras.layers.Embedding):
    """Keras' Embedding, read by a gather from the variable: what sparse SGD reads its tables with."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.gather(self._embeddings._value, inputs)


class GatheredScores(CandidateScores):
    """Scores without anything private about them; CandidateScores gathers from the variable."""


class WholeReadScores(CandidateScores):
    """The same from a read of the whole table, as layers of Keras do."""

    def raw_logits(self, query: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor) -> tf.Tensor:
        table = tf.convert_to_tensor(self.embeddings)
        own = tf.reduce_sum(query * tf.gather(table, positives), axis=1, keepdims=True)
        return tf.concat([own, tf.matmul(query, tf.gather(table, negatives), transpose_b=True)], axis=1)


class TwoTowerLayers:
    """EANA's two-tower recommender as a Keras model; `embedding_layer` and `scores_layer` say how tables are read."""

    embedding_layer: type[keras.layers.Embedding] = keras.layers.Embedding
    scores_layer: type[CandidateScores] = CandidateScores
    shared_inputs = ("negatives",)

    def __init__(self, rows: int, width: int = 128, hidden: int = 128):
        super().__init__()
        self.context = self.embedding_layer(rows, width, name="context")
        self.hidden = keras.layers.Dense(hidden, activation="tanh", name="hidden")
        self.out = keras.layers.Dense(width, name="out")
        self.scores = self.scores_layer(rows, width, name="label")
        self.context.build()
        self.hidden.build((None, width))
        self.out.build((None, hidden))
        self.built = True

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        bag = tf.reduce_mean(self.context(inputs["context"]), axis=1)
        return self.scores(self.out(self.hidden(bag)), inputs["label"], inputs["negatives"])


class OneTableLayers:
    """One table and one dense layer: as little beside the table as can be."""

    embedding_layer: type[keras.layers.Embedding] = keras.layers.Embedding

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.table = self.embedding_layer(rows, width, embeddings_initializer="zeros", name="table")
        self.logit = keras.layers.Dense(1, activation="sigmoid", name="logit")
        self.table.build()
        self.logit.build((None, width))
        self.built = True

    def call(self, inputs: Mapping[str, tf.Tensor], training: bool | None = None) -> tf.Tensor:
        return self.logit(self.table(inputs["ids"][:, 0]))


class Contestant:
    """A model ready to be stepped.

    Attributes:
        model: compiled and built.
        batches: the iterator its steps read.
    """

    def __init__(self, spec: Spec):
        self.spec, self.model, data = spec, *_model_and_data(spec)
        self.batches = iter(data)
        self.model.make_train_function()
        self._train = self.model.train_function

    def step(self) -> None:
        """One training step, as `fit` makes it."""
        self._train(self.batches)

    def timed(self, steps: int) -> list[tuple[float, float]]:
        """Milliseconds of wall and of processor time of each step; one more step before them does not count."""
        self.step()
        found = []
        for _ in range(steps):
            wall, processor = time.perf_counter(), time.process_time()
            self.step()
            found.append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)))
        return found


def _model_and_data(spec: Spec) -> tuple[keras.Model, tf.data.Dataset]:
    layers, arguments, loss, data = WORKLOADS[spec.workload](spec)
    if spec.name in MECHANISMS:
        bases: tuple[type, ...] = (layers, PrivateTraining, keras.Model)
        members: dict[str, Any] = {}
    else:
        bases = (layers, keras.Model)
        members = _sparse(layers) if spec.name == "sparse-sgd" else _whole(layers)
    model = type("Plain" if spec.name not in MECHANISMS else "Private", bases, members)(**arguments)
    if spec.name not in MECHANISMS:
        model.compile(keras.optimizers.SGD(LEARNING_RATE), loss=loss, jit_compile=False)
        return model, data.prefetch(2)
    model.compile(_optimizer(spec), loss=loss)
    if spec.name in STRATEGIES:
        compare_by(model, STRATEGIES[spec.name], MICROBATCH if spec.name in FORMS_GRADIENTS else None)
    model.prepare(data.element_spec)
    return model, lookahead(data, model)


def _sparse(layers: type) -> dict[str, Any]:
    members: dict[str, Any] = {"embedding_layer": GatheredEmbedding}
    return members | ({"scores_layer": GatheredScores} if hasattr(layers, "scores_layer") else {})


def _whole(layers: type) -> dict[str, Any]:
    return {"scores_layer": WholeReadScores} if hasattr(layers, "scores_layer") else {}


def _optimizer(spec: Spec) -> keras.optimizers.Optimizer:
    options = {"aggregate_noise": False} if spec.name == "lazy-each-step" else {}
    return MECHANISMS[spec.name].optimizer(
        LEARNING_RATE, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=spec.batch_size, **options
    )


Workload = tuple[type, dict[str, Any], Any, tf.data.Dataset]


def _dlrm(spec: Spec) -> Workload:
    towers = {} if spec.workload == "dlrm" else rmc_arguments(int(spec.workload[-1]))
    data = click_batches(AccessPattern.named(spec.pattern), spec.table_sizes, spec.batch_size, spec.pooling)
    arguments = {"table_sizes": spec.table_sizes, "pooling": spec.pooling, **towers}
    return DLRMLayers, arguments, "binary_crossentropy", data


def _two_tower(spec: Spec) -> Workload:
    pattern, (rows,), negatives = AccessPattern.named(spec.pattern), spec.table_sizes, 500

    def batch(number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        def ids(which: int, count: int, per: int, law: AccessPattern) -> tf.Tensor:
            seed = tf.stack([tf.constant(which, tf.int64), number])
            return table_ids(law, [rows], count, per, seed)[:, 0]

        inputs = {
            "context": ids(0, spec.batch_size, spec.pooling, pattern),
            "label": ids(1, spec.batch_size, 1, pattern)[:, 0],
            "negatives": ids(2, negatives, 1, AccessPattern())[:, 0],
        }
        return inputs, tf.zeros([spec.batch_size], tf.int32)

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return TwoTowerLayers, {"rows": rows}, loss, tf.data.Dataset.counter().map(batch)


def _one_table(spec: Spec) -> Workload:
    data = click_batches(AccessPattern.named(spec.pattern), spec.table_sizes, spec.batch_size)
    return OneTableLayers, {"rows": spec.table_sizes[0], "width": spec.width}, "binary_crossentropy", data


WORKLOADS: dict[str, Callable[[Spec], Workload]] = {
    **dict.fromkeys(("dlrm", "rmc1", "rmc2", "rmc3"), _dlrm),
    "two-tower": _two_tower,
    "one-table": _one_table,
}
