"""A parameter server: a private optimizer of its own over the rows and weights it holds.

Every step of every worker lands on every server, as one critical section (`sections.py`):

    land    the server's clock ticks, and with it all its rows owe, or get, the noise of one more step; rows to which
            the step has a gradient, and dense weights, get gradient and noise in one write
    read    the rows about to be read are brought up to the clock, then read

So a server is exactly the single-machine mechanism, run over the steps in the order in which they landed on it. Of any
step a reader sees both gradient and noise or neither, whether or not the step touched the rows it reads: a step that
has nothing for a server lands there too. Steps may land in different orders on different servers; why that costs no
privacy is in docs/scaling-semantics.md.

The optimizer's variables (marks, totals, clock, velocities, the generator of the noise) live on the server.
The key of the noise comes from the operating system of that machine and never leaves it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec import mechanisms
from tfdp_rec.core.ground.keras_internals import learning_rate_of, resource
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.system_words import system_numbers
from tfdp_rec.core.ground.withheld_rows import largest_of, size_of
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.checks import regularizer_decay
from tfdp_rec.core.mechanism.lazy_dp_sgd import LazyDPSGD
from tfdp_rec.core.mechanism.noise.base import NoiseSource, Request
from tfdp_rec.core.mechanism.noise.gaussian import EntropyNoise
from tfdp_rec.core.mechanism.noise.keyed import KeyedNoise
from tfdp_rec.core.mechanism.pending import History, RowMarks
from tfdp_rec.core.mechanism.row_debts import RowDebts
from tfdp_rec.core.mechanism.tables import Table, recursion_of
from tfdp_rec.core.mechanism.weight_bound import WeightBound
from tfdp_rec.core.sensitivity.engine import ClippedSum
from tfdp_rec.distribute.checkpoint import ServerState
from tfdp_rec.distribute.sections import Lock


class ServedHistory(History):
    """A history whose variable can be named in a call to another machine."""

    # TensorFlow cannot send the name of a variable of which some dimensions are known and others not: here none is.

    def __init__(self, columns: int):
        self.columns = columns
        self.table = tf.Variable(tf.zeros([1, columns], tf.float64), trainable=False, shape=tf.TensorShape(None))

    def look_up(self, steps: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(super().look_up(steps), [*steps.shape, self.columns])


class ServedBound(WeightBound):
    """The bound of the weights on a server, which measures them where they are settled."""

    def __init__(self, optimizer: Any, marks: RowMarks):
        super().__init__(optimizer, marks)
        self._size = tf.Variable(math.inf, trainable=False, dtype=tf.float64)  # none is known before a settling

    @property
    def sizes(self) -> list[tf.Variable]:
        return [self._size]

    def measure(self) -> None:
        """Finds the largest weight, and where a velocity takes one, of rows that owe nothing."""
        self._size.assign(0.0)
        for table in self.tables.values():

            def act(ids: tf.Tensor, table: Table = table) -> None:
                weights, *velocities = (size_of(rows) for rows in table.read(ids))
                found = tf.maximum(weights, sum((recursion_of(table).reach * each for each in velocities), 0.0))
                self._size.assign(tf.maximum(self._size.read_value(), largest_of(found)))

            table.sweep(act)


class ServedDebts(RowDebts):
    """What rows of a server owe; the steps of other workers may have landed since the rows of a gradient were read."""

    history_kind = ServedHistory
    arrives_late = True
    bound_kind = ServedBound
    bound: ServedBound

    def settle_all(self) -> None:
        super().settle_all()
        self.bound.measure()

    @property
    def pending_variables(self) -> dict[str, tf.Variable]:
        """The clock, and the totals, those of regularized tables under their decay."""
        # What a server's checkpoint holds: a schedule's totals go on. All rows are settled in it.
        own = self.optimizer.recursion
        named = {r: "totals" if r == own else f"totals/{r.weight_decay!r}" for r in self.accounts}
        totals = {named[recursion]: account.history.table for recursion, account in self.accounts.items()}
        return {"clock": self.marks.clock, "largest": self.marks.largest, **totals}

    def settle_marks(self) -> None:
        """Has the marks of all rows say that they are settled, as in a checkpoint that was read."""
        self.marks.settle_all(self.marks.now())


def refuse_unserved(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises `NotPrivate` for an optimizer, mechanism, rule or option that parameter servers do not have."""
    mechanism = mechanisms.of(optimizer)
    if mechanism is None or not mechanism.served:
        served = ", ".join(known.label for known in mechanisms.MECHANISMS if known.served)
        if not isinstance(optimizer, PrivateOptimizer):
            reason = "it is no mechanism of tfdp_rec"
        elif mechanism is not None and mechanism.in_order:
            reason = "its steps have one order, and there they land in none"
        else:
            reason = "it decides about rows of all servers at once"
        raise NotPrivate(
            f"{type(optimizer).__name__} does not run on parameter servers: {reason}. Use {served}, or train on one "
            "machine."
        )
    if optimizer.table_rule is not None:
        raise NotPrivate(
            f"{type(optimizer).__name__} with table_rule={optimizer.table_rule!r} does not run on parameter servers: "
            "leave it out, or train on one machine."
        )
    source_on_server(optimizer.noise)


class ParameterServer:
    """One server's part of the model, and what may be done to it."""

    def __init__(self, device: str):
        self.device = device
        self.bytes_held = 0
        self.lock = Lock(device)
        self._variables: list[tuple[keras.Variable, bool, tuple[int, int]]] = []
        self._untrained: list[tf.Variable] = []

    def keep(self, variable: tf.Variable) -> None:
        """Takes a variable of the model that is not trained, for checkpoints."""
        self._untrained.append(variable)

    def hold(self, variable: keras.Variable, table: bool, number: int, first_row: int = 0) -> None:
        """Takes a variable that was made on this server: a dense one, or a shard of a table."""
        self._variables.append((variable, table, (number, first_row)))

    def open(self, optimizer: PrivateOptimizer) -> None:
        """Makes the server's own optimizer, like `optimizer`, and the sections."""
        refuse_unserved(optimizer)
        with tf.device(self.device):
            own = type(optimizer).from_config(optimizer.get_config())
            if isinstance(own, LazyDPSGD):
                own.debts_kind = ServedDebts
            places = [place for _, _, place in self._variables]
            own.counts_steps = False  # the coordinator does
            own.noise = ServedNoise(source_on_server(optimizer.noise)(), places)
            variables = [variable for variable, _, _ in self._variables]
            own.build(variables, {variable.path: None for variable, table, _ in self._variables if table})
        self.optimizer = own
        self.land = self.lock.section(self._land)
        self._rows_of, self._keep_rows = self.lock.section(self._read), self.lock.section(self._write)
        self.settle = self.lock.section((lambda: None) if own.debts is None else own.debts.settle_all)

    @property
    def layout(self) -> list[list[Any]]:
        """What it holds, as JSON: path, first row, shape, and the decay of a table that has one of its own."""
        held = [(v, first, regularizer_decay(v) if table else 0.0) for v, table, (_, first) in self._variables]
        return [[v.path, first, list(v.shape), *([decay] if decay else [])] for v, first, decay in held]

    def state(self) -> ServerState:
        """All that training depends on, for checkpoints; the key of the noise is not among it."""
        named = {f"model/{v.path}": resource(v) for v, _, _ in self._variables}
        named |= {f"untrained/{i}": v for i, v in enumerate(self._untrained)}
        named |= {f"optimizer/{i}": resource(v) for i, v in enumerate(self.optimizer.variables)}
        debts = self.optimizer.debts
        owed = {} if debts is None else debts.pending_variables
        acts = () if debts is None else (debts.settle_all, debts.settle_marks)
        return ServerState(self.lock, named | {f"ledger/{k}": v for k, v in owed.items()}, *acts)

    @property
    def paths(self) -> set[str]:
        """Of the variables it holds something of."""
        return {variable.path for variable, _, _ in self._variables}

    def read(self, rows: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Distinct rows of shards, by table, with the noise of all steps that have landed; in one call."""
        return self._rows_of(dict(rows))

    def write(self, rows: Mapping[str, tf.Tensor], prefix: str, key: str, place: str) -> None:
        """Writes what `read` gives of one table, as a slice of a tensor in a checkpoint of TensorFlow's."""
        self._keep_rows(dict(rows), tf.constant(prefix), tf.constant(key), tf.constant(place))

    # What runs on the server, under its lock.

    def _read(self, rows: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        found = {}
        for path, own in rows.items():
            shard = self.optimizer.tables[path].variable
            if self.optimizer.debts is not None:
                self.optimizer.debts.settle_before_reads({path: own})
            found[path] = tf.gather(resource(shard), own)
        return found

    def _write(self, rows: Mapping[str, tf.Tensor], prefix: tf.Tensor, key: tf.Tensor, place: tf.Tensor) -> None:
        found = list(self._read(rows).values())
        tf.raw_ops.SaveV2(prefix=prefix, tensor_names=[key], shape_and_slices=[place], tensors=found)

    def _land(self, gradients: Mapping[str, Any], rate: tf.Tensor, regularization: Mapping[str, tf.Tensor]) -> None:
        own = self.optimizer
        held = learning_rate_of(own)
        if isinstance(held, keras.Variable):  # one that is a schedule stays
            resource(held).assign(tf.cast(rate, tf.float32))
        nothing = tf.zeros([0])
        found = {path: tf.IndexedSlices(*g) if isinstance(g, tuple) else g for path, g in gradients.items()}
        clip = tf.constant(own.l2_norm_clip, tf.float64)
        own.apply(ClippedSum(found, nothing, clip, nothing), regularization=regularization)


# Noise.


class ServerEntropy(EntropyNoise):
    """`EntropyNoise` with the generator on the server on whose device it is made."""

    def __init__(self, jit_compile: bool = True) -> None:
        super().__init__(jit_compile)
        state = tf.zeros([3], tf.int64)
        self._generator = tf.random.Generator.from_state(state, alg="philox")
        tf.function(self._seed, autograph=False)()

    def _seed(self) -> None:
        self._generator.state.assign(system_numbers(3))  # a Philox generator: counter, counter, key

    def _current_generator(self) -> tf.random.Generator:
        return self._generator

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("A server's noise belongs to its server and is not copied.")


class ServedNoise(NoiseSource):
    """A noise source for one server, which numbers variables and rows as the whole model does."""

    # So a table in shards gets the keyed noise of an undivided one.

    def __init__(self, source: NoiseSource, places: Sequence[tuple[int, int]]):
        self._source, self._places = source, tuple(places)

    def draw(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        return self._source.draw([self._translate(request) for request in requests], step)

    def noisy(self, requests: Sequence[Request], step: tf.Tensor) -> list[tf.Tensor]:
        return self._source.noisy([self._translate(request) for request in requests], step)

    def _translate(self, request: Request) -> Request:
        number, first = self._places[request.variable]
        return dataclasses.replace(request, variable=number, rows=request.rows + first)


def source_on_server(noise: NoiseSource) -> Callable[[], NoiseSource]:
    """What makes a server's source on its device; a source that needs Python to draw is refused."""
    if type(noise) is EntropyNoise:
        return lambda: ServerEntropy(noise.jit_compile)
    if type(noise) is KeyedNoise:
        return lambda: noise
    raise NotPrivate(
        f"{type(noise).__name__} cannot draw on a parameter server: it would run Python there. Leave out noise= and "
        "secure=True; the servers' noise is keyed by their own operating systems."
    )
