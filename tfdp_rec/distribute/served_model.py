"""A model whose variables live on parameter servers, and how it comes to be.

build on servers (`Placement`) -> the model says which variables are tables -> each server takes what is its own

Tables too large for one server are divided by size; everything else stays whole. A shard of a table whose initializer
draws values independently is drawn on its server; any other initial value is computed here and sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import initializer_of, resource, set_resource
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.tables import scatter
from tfdp_rec.distribute.parameter_server import ParameterServer
from tfdp_rec.distribute.served_table import ServedTable, Shard
from tfdp_rec.training.lookahead import build_layers

_CHUNK_VALUES = 1 << 22
_BY_VALUE = (  # their values do not depend on the shape
    keras.initializers.Constant, keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.RandomUniform,
    keras.initializers.RandomNormal, keras.initializers.TruncatedNormal,
)  # fmt: skip


class ServedModel:
    """Builds a compiled model, tables divided, on the servers."""

    def __init__(
        self,
        make: Callable[[], Any],
        optimizer: PrivateOptimizer,
        spec: Any,
        devices: list[str],
        min_shard_bytes: int,
    ):
        self._spec = spec
        self.servers = [ParameterServer(device) for device in devices]
        placement = Placement(self.servers, min_shard_bytes)
        with placement.scope():
            self.model = make()
            build_layers(self.model, spec)
        optimizer.build([], {})  # the variables are the servers'
        self.tables = self._hand_over(placement)
        for server in self.servers:
            server.open(optimizer)
        for table in self.tables.values():
            table.open = True

    def _hand_over(self, placement: Placement) -> dict[str, ServedTable]:
        """Gives each variable to the server it is on, now that the model says which ones are tables."""
        model = self.model
        self.reader = model.private_tables.find(self._spec)
        tables = {}
        for number, variable in enumerate(model.trainable_variables):
            held: Any = resource(variable)
            if variable in model.private_tables:
                whole = not isinstance(held, ServedTable)
                table = ServedTable([Shard(placement.server_of(held), 0, held)]) if whole else held
                table.hold(variable, number)
                tables[variable.path] = table
                set_resource(variable, table)
                continue
            if isinstance(held, ServedTable):
                held = placement.as_whole(held)
                set_resource(variable, held)
            placement.server_of(held).hold(variable, False, number)
        trained, metrics = {id(v) for v in model.trainable_variables}, {id(v) for v in model.metrics_variables}
        for variable in model.variables:
            if id(variable) not in trained | metrics:
                placement.server_of(resource(variable)).keep(resource(variable))
        return tables

    def settle(self) -> None:
        """Has each server pay what its rows owe, and note how large they are, ahead of steps from there."""
        for server in self.servers:
            server.settle()

    def fetch(self, local: Any) -> None:
        """Brings the settled weights into a local model, tables some rows at a time."""
        self.settle()  # a sweep on each server; a step that lands after it makes the reads below pay for itself
        for mine, variable in zip(local.weights, self.model.weights, strict=True):
            table = self.tables.get(variable.path)
            if table is None:
                mine.assign(resource(variable).numpy())
                continue
            if not resource(mine).is_initialized():  # a table that its servers write (`hollow_model.py`)
                continue
            for shard, rows in table.chunks(_CHUNK_VALUES):
                values = shard.server.read({variable.path: rows})[variable.path]
                scatter("Update", resource(mine), rows + shard.first, tf.constant(values.numpy()))

    def send(self, local: Any) -> None:
        """Gives the servers a local model's weights, tables some rows at a time; before the first step."""
        pairs = list(zip(local.weights, self.model.weights))
        shapes = [[(*each.shape, each.dtype) for each in model.weights] for model in (local, self.model)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"begin_with has variables of {shapes[0]}, and what model_fn makes of {shapes[1]}.")
        for mine, variable in pairs:
            table = self.tables.get(variable.path)
            if table is None:
                resource(variable).assign(tf.constant(mine.numpy()))
                continue
            for shard, rows in table.chunks(_CHUNK_VALUES):
                scatter("Update", shard.variable, rows, tf.gather(resource(mine), rows + shard.first))


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
        spec = spec_of(initial, options.get("dtype"))
        shards = self._partitions(spec.shape, spec.dtype)[0] if is_divisible(options, spec) else 1
        if shards > 1:
            return self._create_shards(next_creator, options, spec, shards)
        server = self._emptiest(1)[0]
        server.bytes_held += bytes_of(spec)
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
            server.bytes_held += (end - start) * bytes_of(spec) // spec.shape[0]
            with tf.device(server.device):
                shards.append(Shard(server, start, create(**{**options, "initial_value": values(start, end)})))
        return ServedTable(shards)

    def server_of(self, variable: tf.Variable) -> ParameterServer:
        """The server that a variable is on."""
        return next(server for server in self.servers if server.device == variable.device)

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
        self._whole: Any = None
        if type(self._initializer) not in _BY_VALUE:
            self._whole = initial() if callable(initial) else initial

    def __call__(self, start: int, end: int) -> tf.Tensor:
        if self._whole is not None:
            return self._whole[start:end]
        config = self._initializer.get_config()
        if isinstance(config.get("seed"), int):  # one seed would give every shard the same rows
            config["seed"] = int(np.random.SeedSequence([config["seed"], start]).generate_state(1)[0] // 2)
        initializer = type(self._initializer).from_config(config)
        return initializer([end - start, *self._spec.shape[1:]], dtype=self._spec.dtype.name)


def is_divisible(options: dict[str, Any], spec: tf.TensorSpec) -> bool:
    """Whether a variable that is made with these options may be a table."""
    return options.get("trainable", True) and spec.shape.rank == 2 and spec.dtype.is_floating


def spec_of(initial: Any, dtype: Any) -> tf.TensorSpec:
    """Shape and type of an initial value, without computing it."""
    if not callable(initial):
        tensor = tf.convert_to_tensor(initial, dtype)
        return tf.TensorSpec(tensor.shape, tensor.dtype)
    traced = tf.function(lambda: tf.convert_to_tensor(initial(), dtype), autograph=False).get_concrete_function()
    return tf.TensorSpec(traced.outputs[0].shape, traced.outputs[0].dtype)


def bytes_of(spec: tf.TensorSpec) -> int:
    """The size of its values."""
    return int(spec.shape.num_elements()) * spec.dtype.size
