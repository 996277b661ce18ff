"""What a worker does in a step: a batch, rows from the servers, the clipped sum, and the landing on every server.

    batch -> forward and one backward pass under recording -> clipped sum -> to each server its part

Rows come through `ServedTable`, settled; gradients are taken with respect to the rows that were read, and go back as
one row an id. A batch that has nothing for a server still lands there: its noise falls due there as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_rec.core.claim.sampling_proof import check_rows, draw_numbers
from tfdp_rec.core.mechanism.checks import refuse_data_beside_the_sum
from tfdp_rec.core.mechanism.tables import distinct_rows
from tfdp_rec.distribute.parameter_server import ParameterServer
from tfdp_rec.distribute.served_table import ServedTable, fetch
from tfdp_rec.training.batch import Batch
from tfdp_rec.training.lookahead import TableReader
from tfdp_rec.training.private_step import PrivateStep, finite_loss


class WorkerStep:
    """The step of a model whose variables live on servers."""

    def __init__(
        self, step: PrivateStep, tables: Mapping[str, ServedTable], servers: list[ParameterServer], reader: TableReader
    ):
        self._step, self._tables, self._servers, self._reader = step, tables, servers, reader

    def __call__(self, data: Any, rate: tf.Tensor) -> tf.Tensor:
        """Makes the step; returns what `Made.of` reads, int64, in one message to the coordinator."""
        shared = self._step.model.shared_inputs
        numbers, batch = draw_numbers(data), Batch.from_data(check_rows(data, shared), shared)
        with tf.control_dependencies(batch.tensors):
            with fetch(self._tables, self._reader(batch.examples)):
                clip = tf.cast(tf.constant(self._step.model.optimizer.l2_norm_clip, tf.float64), tf.float32)
                clipped = self._step.clipped_sum(batch, clip)
            with tf.control_dependencies([clipped.norms]):
                self._send(clipped.gradients, rate)
            losses = tf.cast(tf.stack(finite_loss(clipped)), tf.float64)
            return tf.concat([numbers, tf.bitcast(losses, tf.int64)], axis=0)

    def _send(self, gradients: Mapping[str, Any], rate: tf.Tensor) -> None:
        parts: dict[ParameterServer, dict[str, Any]] = {server: {} for server in self._servers}
        for path, gradient in gradients.items():
            for server, part in self._split(path, gradient):
                parts[server][path] = part
        # The servers' optimizers are given numbers: what computes them is the model's own.
        refuse_data_beside_the_sum(self._step.model.optimizer, self._step.model.trainable_variables)
        regularization = self._step.regularization()
        for server, part in parts.items():
            own = {path: gradient for path, gradient in regularization.items() if path in server.paths}
            server.land(part, rate, own)

    def _split(self, path: str, gradient: Any) -> list[tuple[ParameterServer, Any]]:
        """Each server's part: (values, rows) of a table, or a dense gradient."""
        if path not in self._tables:
            server = next(server for server in self._servers if path in server.paths)
            return [(server, tf.cast(tf.convert_to_tensor(gradient), tf.float32))]
        ids, values = distinct_rows(gradient)
        table = self._tables[path]
        split = table.split(ids, tf.cast(values, tf.float32))
        return [(shard.server, (part, own)) for shard, (_, own, part) in zip(table.shards, split)]


class Made(NamedTuple):
    """What a worker reports of a step. The losses are private: nothing protects them."""

    # `losses` is the sum of the examples' finite losses and their number.

    losses: np.ndarray
    draw: list[int]

    @classmethod
    def of(cls, message: np.ndarray) -> Made:
        """What the message of a step says."""
        return cls(message[2:].view(np.float64), message[:2].tolist())
