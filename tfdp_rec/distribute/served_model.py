"""A model whose variables live on parameter servers, and how it comes to be.

build on servers (`Placement`) -> the model says which variables are tables -> each server takes what is its own
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.distribute.parameter_server import ParameterServer, PlainServer
from tfdp_rec.distribute.placement import Placement
from tfdp_rec.distribute.served_table import ServedTable
from tfdp_rec.keras_internals import layers_within, resource, set_resource
from tfdp_rec.optimizers import PrivateOptimizer
from tfdp_rec.optimizers.tables import scatter

_CHUNK_VALUES = 1 << 22


class ServedModel:
    """Builds a compiled model, tables divided, on the servers."""

    def __init__(
        self,
        make: Callable[[], Any],
        optimizer: keras.optimizers.Optimizer,
        spec: Any,
        devices: list[str],
        min_shard_bytes: int,
    ):
        self._spec = spec
        private = isinstance(optimizer, PrivateOptimizer)
        self.servers = [(ParameterServer if private else PlainServer)(device) for device in devices]
        placement = Placement(self.servers, min_shard_bytes)
        with placement.scope():
            self.model = make()
            self._build_layers()
        if private:
            optimizer.build([], {})  # the variables are the servers'
        self.tables = self._hand_over(placement)
        for server in self.servers:
            server.open(optimizer)
        for table in self.tables.values():
            table.open = True

    def _build_layers(self) -> None:
        """Makes the variables of layers that have none yet."""
        model = self.model
        if all(layer.built for layer in layers_within(model)):
            return
        flat = [tf.TensorSpec([None, *s.shape[1:]], s.dtype) for s in tf.nest.flatten(self._spec)]

        def loss(*tensors: tf.Tensor) -> tf.Tensor:
            return model.per_example_loss(tf.nest.pack_sequence_as(self._spec, tensors), training=False)

        with keras.StatelessScope():  # variables are made when it ends, outside the trace
            tf.function(loss, autograph=False).get_concrete_function(*flat)

    def _hand_over(self, placement: Placement) -> dict[str, ServedTable]:
        """Gives each variable to the server it is on, now that the model says which ones are tables."""
        model = self.model
        self.reader = model.table_reader(self._spec)
        paths = set(self.reader.tables)
        tables = {}
        for number, variable in enumerate(model.trainable_variables):
            held: Any = resource(variable)
            if variable.path in paths:
                table = held if isinstance(held, ServedTable) else placement.as_table(held)
                table.hold(variable, number)
                tables[variable.path] = table
                set_resource(variable, table)
                continue
            if isinstance(held, ServedTable):
                held = placement.as_whole(held)
                set_resource(variable, held)
            self._server_of(held).hold(variable, False, number)
        trained, metrics = {id(v) for v in model.trainable_variables}, {id(v) for v in model.metrics_variables}
        for variable in model.variables:
            if id(variable) not in trained | metrics:
                self._server_of(resource(variable)).keep(resource(variable))
        return tables

    def _server_of(self, variable: tf.Variable) -> ParameterServer:
        return next(server for server in self.servers if server.device == variable.device)

    def fetch(self, local: Any) -> None:
        """Brings the settled weights into a local model, tables some rows at a time."""
        for server in self.servers:
            server.settle()  # a sweep on the server; a step that lands after it makes the reads below pay for itself
        for mine, variable in zip(local.weights, self.model.weights, strict=True):
            table = self.tables.get(variable.path)
            if table is None:
                mine.assign(resource(variable).numpy())
                continue
            for shard, rows in table.chunks(_CHUNK_VALUES):
                values = shard.server.read({variable.path: rows})[variable.path]
                scatter("Update", resource(mine), rows + shard.first, tf.constant(values.numpy()))
