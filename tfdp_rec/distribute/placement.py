"""Where a model's variables go: tables too large for one server in shards, by size; everything else whole.

While a model is built under `Placement.scope`, every variable that it makes is made on a server. A shard of a table
whose initializer draws values independently is drawn there; any other initial value is computed here and sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.distribute.parameter_server import ParameterServer
from tfdp_rec.distribute.served_table import ServedTable, Shard
from tfdp_rec.keras_internals import initializer_of

_BY_VALUE = (  # their values do not depend on the shape
    keras.initializers.Constant, keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.RandomUniform,
    keras.initializers.RandomNormal, keras.initializers.TruncatedNormal,
)  # fmt: skip


class Placement:
    """Puts variables on servers; no shard of a table is smaller than `min_shard_bytes`."""

    def __init__(self, servers: Sequence[ParameterServer], min_shard_bytes: int):
        self.servers = list(servers)
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner
        self._partitions = partitioner(min_shard_bytes, max_shards=len(self.servers))

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Variables made inside are made on servers."""
        with tf.variable_creator_scope(self._create):
            yield

    def _create(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        initial = options["initial_value"]
        spec = _spec(initial, options.get("dtype"))
        divisible = options.get("trainable", True) and spec.shape.rank == 2 and spec.dtype.is_floating
        shards = self._partitions(spec.shape, spec.dtype)[0] if divisible else 1
        if shards > 1:
            return self._create_shards(next_creator, options, spec, shards)
        server = self._emptiest(1)[0]
        server.bytes_held += _size(spec)
        with tf.device(server.device):
            return next_creator(**options)

    def _emptiest(self, count: int) -> list[ParameterServer]:
        chosen = sorted(range(len(self.servers)), key=lambda i: (self.servers[i].bytes_held, i))[:count]
        return [self.servers[i] for i in sorted(chosen)]

    def _create_shards(
        self, create: Callable[..., Any], options: dict[str, Any], spec: tf.TensorSpec, count: int
    ) -> ServedTable:
        ends = [spec.shape[0] * (i + 1) // count for i in range(count)]
        starts = [0, *ends[:-1]]
        values = _Rows(options["initial_value"], spec)
        shards = []
        for server, start, end in zip(self._emptiest(count), starts, ends):
            server.bytes_held += (end - start) * _size(spec) // spec.shape[0]
            with tf.device(server.device):
                shards.append(Shard(server, start, create(**{**options, "initial_value": values(start, end)})))
        return ServedTable(shards)

    def as_table(self, variable: tf.Variable) -> ServedTable:
        """A variable that was made whole, as a table of one shard."""
        server = next(s for s in self.servers if s.device == variable.device)
        return ServedTable([Shard(server, 0, variable)])

    def as_whole(self, table: ServedTable) -> tf.Variable:
        """A variable that was divided because of its size, but turned out not to be a table."""
        server = table.shards[0].server
        with tf.device(server.device):
            return tf.Variable(tf.concat([tf.identity(shard.variable) for shard in table.shards], axis=0))


class _Rows:
    """Initial values of some rows of a table."""

    def __init__(self, initial: Any, spec: tf.TensorSpec):
        self._spec = spec
        self._initializer: Any = initializer_of(initial)
        self._whole: Any = None if type(self._initializer) in _BY_VALUE else _value(initial)

    def __call__(self, start: int, end: int) -> tf.Tensor:
        if self._whole is not None:
            return self._whole[start:end]
        config = self._initializer.get_config()
        if isinstance(config.get("seed"), int):  # one seed would give every shard the same rows
            config["seed"] = int(np.random.SeedSequence([config["seed"], start]).generate_state(1)[0] // 2)
        initializer = type(self._initializer).from_config(config)
        return initializer([end - start, *self._spec.shape[1:]], dtype=self._spec.dtype.name)


def _value(initial: Any) -> Any:
    return initial() if callable(initial) else initial


def _spec(initial: Any, dtype: Any) -> tf.TensorSpec:
    """Shape and type of an initial value, without computing it."""
    if not callable(initial):
        tensor = tf.convert_to_tensor(initial, dtype)
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    traced = tf.function(lambda: tf.convert_to_tensor(initial(), dtype), autograph=False).get_concrete_function()
    return tf.TensorSpec(traced.outputs[0].shape, traced.outputs[0].dtype)


def _size(spec: tf.TensorSpec) -> int:
    return int(spec.shape.num_elements()) * spec.dtype.size
