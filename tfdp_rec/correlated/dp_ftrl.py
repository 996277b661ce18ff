"""DP-FTRL: DP-SGD whose noise takes back, a little at every step, what was added before; on all rows at every step.

Where other mechanisms add s z_t, z_t ~ N(0, I), to a step's clipped sum, this adds s n_t, n = C⁻¹ z, with buffers T_m
of every weight's own (`core/mechanism/correlated_noise.py` has C, its sensitivity and the event of the whole training):

    θ ← (1 − ηλ) θ − η (ĝ + s n_t),    n_t = z_t − Σ_m a_m T_m,    T_m ← θ_m T_m + n_t,    s = σ C / B

s multiplies what the buffers make, so that a change of clip or batch size in mid-training stays exact: it is g_t / s_t
that C acts on. Under several σ the least counts.

Guarantee: the weights after every step, all of them together, are one Gaussian mechanism: (ε, δ)-DP for the event
`correlation.dp_event(σ)`, for batches in a fixed order, under zero-out adjacency, no sampling needed. Checked before a
step is counted or anything written:

- the plan has a step left;
- a batch of an order (`FixedOrder`, `BoundedStream`) is the one whose turn it is;
- no step and no payment was cut short. A weight that was written and its buffers that were not would let the next
  noise take back what was never added: after that every step is refused, and every release in which rows owe noise, but
  from a training checkpoint.

**The buffers are secret**: with them, noise that was released can be subtracted. No release and no saved model holds
them; a training checkpoint does. A model that was loaded therefore begins a plan anew, an event of its own.

Reference:
    Kairouz et al., "Practical and private (deep) learning without sampling or shuffling", 2021.
    Dvijotham et al., "Efficient and near-optimal noise generation for streaming differential privacy", 2024.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack, overload

import keras
import tensorflow as tf

from tfdp_rec.core.claim.events import DpEvent, PlannedDpEvent
from tfdp_rec.core.claim.orders import Order
from tfdp_rec.core.claim.sampling_proof import Source
from tfdp_rec.core.ground.graph_checks import Check, require_all
from tfdp_rec.core.mechanism.arguments import Numbers, Planned
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.core.mechanism.correlated_noise import BufferedToeplitz, Correlation
from tfdp_rec.core.mechanism.dp_sgd import DPSGD
from tfdp_rec.core.mechanism.noise.base import Request
from tfdp_rec.core.mechanism.noise.meeting import add_on_grid
from tfdp_rec.core.mechanism.tables import Operations, assign, run_after, scatter
from tfdp_rec.correlated.bounded_stream import BoundedStream


class CorrelatedOptimizer(PrivateOptimizer):
    """Base of the mechanisms with correlated noise. Not for use by itself."""

    correlates_noise = True
    why_no_table_rule = "correlated noise takes back what it added, which steps of changing sizes would not let it"

    @overload
    def __init__(self, learning_rate: Any, *, correlation: Correlation, **settings: Unpack[Numbers]) -> None: ...
    @overload
    def __init__(self, learning_rate: Any, *, correlation: Correlation = ..., **settings: Unpack[Planned]) -> None: ...
    def __init__(self, learning_rate: Any, *, correlation: Correlation | None = None, **settings: Any):
        correlation = Correlation.from_config(correlation) if isinstance(correlation, dict) else correlation
        if not isinstance(correlation, Correlation):
            raise ValueError(
                f"{type(self).__name__} needs the plan of its noise: correlation=tfdp_rec.privacy."
                f"optimised_correlation(steps, separation); got {correlation!r}."
            )
        super().__init__(learning_rate, **settings)
        self._correlation = correlation
        self.course = Course(correlation.steps)

    @property
    def correlation(self) -> Correlation:
        """The plan of the noise; another one would have another price, and the buffers of this one."""
        return self._correlation

    @property
    def position(self) -> int:
        """Number of steps of the plan that are made: `position` of `FixedOrder.batches(fetch, position=...)`."""
        return int(self.course.made.numpy())

    def dp_event(self) -> DpEvent:
        """A step of the plan, which costs as a whole: for an accountant with `FixedOrder`."""
        plan, whole = self.correlation, self.correlation.dp_event(self.noise_multiplier)
        return PlannedDpEvent(whole, plan.steps, plan.separation, plan.participations, self.course.plan)

    def build_tables(self) -> None:
        super().build_tables()
        shapes = {path: dense.variable.shape for path, dense in self.dense.items()}
        shapes |= {path: (table.rows, table.width) for path, table in self.tables.items()}
        self.course.buffers = Buffers(self.correlation.strategy, shapes)

    def meet(self, wanted: Sequence[tuple[str, Request]], number: tf.Tensor) -> list[tuple[tf.Tensor, Operations]]:
        units = self.noise.draw([Request(each.variable, each.rows, each.width) for _, each in wanted], number)
        return [self._add_noise(*each, unit[:, 0]) for each, unit in zip(wanted, units, strict=True)]

    def _add_noise(self, path: str, request: Request, unit: tf.Tensor) -> tuple[tf.Tensor, Operations]:
        whole = path in self.dense
        unit = tf.reshape(unit, self.dense[path].variable.shape) if whole else unit
        noise, remembered = self.course.buffers.noise(path, unit, None if whole else request.rows)
        scaled = tf.cast(request.scale, tf.float64) * tf.reshape(noise, [-1, request.width])
        return add_on_grid(scaled, request.addends, request.grid), remembered

    def load_own_variables(self, store: Any) -> None:
        """Loads what was released; the buffers were not, so that a plan begins anew."""
        with self.privacy_history.change_plan():
            super().load_own_variables(store)
            if self.built:
                self.course.buffers.clear()
            self.course.restart()

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "correlation": self.correlation.get_config()}


@keras.saving.register_keras_serializable(package="tfdp_rec")
class DPFTRL(CorrelatedOptimizer, DPSGD):
    """Differentially private SGD with correlated noise on every weight, for data in a fixed order.

    Arguments as `PrivateOptimizer`, and correlation: a `tfdp_rec.privacy.Correlation`.

    Example:
        >>> from tfdp_rec.privacy import optimised_correlation
        >>> plan = optimised_correlation(steps=600, separation=100)
        >>> settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 256}
        >>> DPFTRL(0.1, correlation=plan, **settings).dp_event().event == plan.dp_event(4.0)
        True
    """


class Buffers:
    """T_1 … T_d of every weight."""

    # A plain object, which neither Keras nor TensorFlow tracks, so that no release holds them.

    def __init__(self, strategy: BufferedToeplitz, shapes: Mapping[str, Any]):
        self._strategy = strategy
        self._held = {
            path: [tf.Variable(tf.zeros(shape), trainable=False, name="buffer") for _ in range(strategy.buffers)]
            for path, shape in shapes.items()
        }

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """All of them, by number: paths are not the same in every process."""
        every = enumerate(self._held.values())
        return {f"buffers/{number}/{m}": held for number, several in every for m, held in enumerate(several)}

    def read(self, path: str, ids: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Those of some rows; of the whole variable, if left out."""
        return [held.read_value() if ids is None else tf.gather(held, ids) for held in self._held[path]]

    def write(self, path: str, values: Sequence[tf.Tensor], ids: tf.Tensor | None = None) -> Operations:
        """Replaces them."""
        done: Operations = []
        for held, value in zip(self._held[path], values, strict=True):
            if ids is None:
                done += assign(held, tf.cast(value, held.dtype))
            else:
                done += scatter("Update", held, ids, value)
        return done

    def noise(self, path: str, unit: tf.Tensor, ids: tf.Tensor | None = None) -> tuple[tf.Tensor, Operations]:
        """n_t from z_t, in z_t's type, and the writes by which the buffers remember it."""
        noise, values = self._strategy.next_noise(unit, [tf.cast(each, unit.dtype) for each in self.read(path, ids)])
        return noise, self.write(path, values, ids)

    def clear(self) -> None:
        """As before the first step."""
        for held in self.variables.values():
            held.assign(tf.zeros_like(held))


class Course:
    """The plan under way: its order, how many of its steps were begun, whether one was cut short, and its buffers."""

    buffers: Buffers  # made when the optimizer is built

    def __init__(self, steps: int):
        self._steps, self._within = steps, False
        with tf.init_scope(), tf.device("CPU:0"):
            *several, self._seats = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(5)]
        self.made, self._plan, self._order, self._unfinished = several
        self.restart()

    def restart(self) -> None:
        """Begins a new plan, at its first step."""
        new = 0, secrets.randbits(62), _NO_ORDER_YET
        for variable, value in zip((self.made, self._plan, self._order), new, strict=True):
            variable.assign(value)
        self.mark_unfinished(0)
        self._seats.assign(_NO_SEATS_YET)

    @property
    def plan(self) -> str:
        """Id of the plan."""
        return f"{int(self._plan.numpy()):016x}"

    @property
    def kept_variables(self) -> dict[str, tf.Variable]:
        """What a training checkpoint holds."""
        return {**self.buffers.variables, "made": self.made, "plan": self._plan, "order": self._order}

    @contextlib.contextmanager
    def restoration(self) -> Iterator[None]:
        """A block in which the plan, and its buffers, become those of a training checkpoint, which go on."""
        plan = self.plan
        self.mark_unfinished(1)  # till all of it is there: mixed buffers belong to no plan
        yield
        if plan != self.plan:  # another process seats the same events anew
            self._seats.assign(_NO_SEATS_YET)
        self.mark_unfinished(0)

    def checks(self, source: Source) -> list[Check]:
        """Conditions for a step on a batch of this source."""
        known = (self._order == _NO_ORDER_YET) | (self._order == _number_of(source))
        left = self.made < self._steps, _PLAN_IS_OVER
        same = (self._seats == _NO_SEATS_YET) | (self._seats == _seats_of(source))
        return [self._completeness_check(), left, (known, _OTHER_ORDER), (same, _OTHER_SEATS), *self._turn(source)]

    def _turn(self, source: Source) -> list[Check]:
        """A unit's steps are apart as planned if every batch of the order comes when it is its turn."""
        if not isinstance(source.sampling, Order):
            return []
        due, came = (source.sampling.batch_at(place) for place in (self.made, source.place))
        return [(due == came, _NOT_ITS_TURN, due, " of its order and was given batch ", came, _POSITION)]

    def count(self, source: Source) -> Operations:
        """A step begins, on a batch from there."""
        order = tf.constant(_number_of(source), tf.int64)
        seats = tf.constant(_seats_of(source), tf.int64)
        return assign(self.made, self.made + 1) + assign(self._order, order) + assign(self._seats, seats)

    @contextlib.contextmanager
    def writes_of_step(self, source: Source) -> Iterator[None]:
        """A block of all that a step on a batch of this source writes."""
        with run_after(self.count(source)), self.whole():
            yield

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """A block of writes; if it is cut short, the mark `unfinished` stays, and further steps are refused."""
        if self._within:
            yield
            return
        self._within = True
        try:
            with run_after(require_all(self._completeness_check())):
                begun = self.mark_unfinished(1)
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            before = 0 if graph is None else len(graph.get_operations())
            with run_after(begun):
                yield
            # Writes and loops of writes that the graph got inside; eagerly they are done.
            made = [] if graph is None else graph.get_operations()[before:]
            with run_after([operation for operation in made if operation.op_def.is_stateful]):
                self.mark_unfinished(0)
        finally:
            self._within = False

    @property
    def is_unfinished(self) -> bool:
        """Whether weights and buffers may not belong together."""
        return bool(self._unfinished.numpy())

    def _completeness_check(self) -> Check:
        return self._unfinished == 0, _CUT_SHORT

    def mark_unfinished(self, value: int) -> Operations:
        """Notes that weights and buffers belong together (0), or may not (1)."""
        return assign(self._unfinished, tf.constant(value, tf.int64))


_NO_ORDER_YET, _NO_ORDER = 0, 1
_NO_SEATS_YET = 0


def _number_of(source: Source) -> int:
    """Number of the order of a batch; `_NO_ORDER` for other batches."""
    return source.sampling.fingerprint if isinstance(source.sampling, Order) else _NO_ORDER


def _seats_of(source: Source) -> int:
    """Number of the object that knows which units had seats; one for all orders in which a unit's place is its own."""
    # Another stream of equal settings would seat a unit as often again.
    return 2 + int(source.sampling.name[:15], 16) if isinstance(source.sampling, BoundedStream) else 1


_NOT_ITS_TURN = "Refused batch: the plan of the noise is at batch "
_POSITION = (
    ": a unit would be in two steps that are nearer than planned. Go on where the plan is: "
    "sampling.batches(fetch, position=model.optimizer.position).\n"
)
_OTHER_ORDER = (
    "Refused batch: the plan of the noise was begun on data of another order, or of none that is known: a unit could "
    "be in steps that are nearer than planned. Train on one order throughout, or save and load the model: a new plan.\n"
)
_OTHER_SEATS = (
    "Refused batch: the plan of the noise was begun with another BoundedStream, which knows how often each unit was "
    "seated. Go on with that object; further events are its next_part.\n"
)
_PLAN_IS_OVER = (
    "Refused batch: all steps that the noise was planned for are made. To go on, save the model and load it: it begins "
    "a plan anew, which costs its own event.\n"
)
_CUT_SHORT = (
    "Refused batch: a step or payment of correlated noise was cut short, so that weights and noise no longer belong "
    "together. Resume from the last training checkpoint, or begin anew from the last model released.\n"
)
