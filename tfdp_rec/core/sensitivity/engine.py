"""The clipped sum: Σ over the batch of each example's gradient g_b scaled to w_b g_b, ‖w_b g_b‖ ≤ C (`weights.py`).

Removing or adding one example changes the sum by at most C, its sensitivity, whatever the other examples are. The sum
carries that number with it, and the mechanisms scale their noise by it.

An example whose gradient is not finite has weight zero: it counts as an example of gradient zero. A row that is not
*present*, since its unit has no data, contributes nothing at all, whatever the row holds.

In floating point a sum's rounding errors change when one example is removed. So examples are clipped to
C / (1 + `SLACK`), and the sum is exact enough (`float_sums.py`) that the results with and without an example differ by
at most C, for all inputs (docs/privacy-floating-point.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import HOST, Check, depend_on, require_all
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity import cross_terms, factors, float_sums
from tfdp_rec.core.sensitivity.arithmetic import check_exactness, refuse_other_arithmetic
from tfdp_rec.core.sensitivity.batches import ALIGNED, align, batch_size, hide_batch_axis, open_specs
from tfdp_rec.core.sensitivity.factors import Reads, fold
from tfdp_rec.core.sensitivity.independence.reading import ours
from tfdp_rec.core.sensitivity.recorder import (
    BeforeRead,
    Recording,
    SettledAhead,
    record_calls,
    refuse_unrecorded,
    secret_seeds,
    settle_by_owner,
)
from tfdp_rec.core.sensitivity.rules import Call
from tfdp_rec.core.sensitivity.step_reading import CallRead, StepReading
from tfdp_rec.core.sensitivity.weights import WeightRule, clip_weight

Gradient = Any  # tf.Tensor, or tf.IndexedSlices for a table


SLACK = 1 / 32
"""The share of the clip that is left to rounding. A larger one makes large batches faster: see `float_sums.Depth`."""
MOST_EXAMPLES = 1 << 16  # rounding a float32 sum of more would exceed the slack
_WRITTEN = 2  # roundings of the sum as a whole: added up from parts, and scaled by the mechanism
_MOST_TERMS = 2.0**36  # B² T, for T positions an example: the same for float64, where all examples' positions cancel
_TOO_MANY = f"At most {MOST_EXAMPLES:,} examples a step can be clipped, fewer of many positions."
_OF_WEIGHTS = 2.0**-12  # share of the slack for the roundings of weights and of weighted contributions
_NOTHING = 2.0**-30  # share of the clip below which the norm of a row that does not count is that of a zero gradient

Factors = dict[str, list[factors.Factor]]


class ByPath(Mapping[str, Any]):
    """Values by variable path, computed from the variable's factors when they are read."""

    def __init__(self, collected: Factors, compute: Callable[[str, Any], Any]):
        self._collected, self._compute = collected, compute

    def __getitem__(self, path: str) -> Any:
        return self._compute(path, self._collected[path])

    def __contains__(self, path: object) -> bool:
        return path in self._collected  # the mix-in's would compute the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._collected)

    def __len__(self) -> int:
        return len(self._collected)


class Weighted(ByPath):
    """Σ_b w_b g_b by variable path, added up to the path's `depths`."""

    def __init__(self, collected: Factors, weights: tf.Tensor, depths: Mapping[str, float_sums.Depth]):
        self._weights, self._depths = weights, depths
        self._scaled: tuple[Any, tf.Tensor] = None, weights  # the last scale, and the weights times it
        self._rows: tuple[Any, dict[str, tf.IndexedSlices]] = None, {}  # the last weights, and sums of rows by them
        super().__init__(collected, lambda path, _: self._add_up(path, weights))

    def scaled(self, path: str, scale: tf.Tensor) -> Gradient:
        """A sum times a scalar. The scalar goes into the weights, one number an example, and costs nothing."""
        if self._scaled[0] is not scale:  # that of all variables of a kind
            with tf.device(HOST):
                factor = tf.cast(scale, self._weights.dtype)
            self._scaled = scale, factor * self._weights
        return self._add_up(path, self._scaled[1])

    def _add_up(self, path: str, weights: tf.Tensor) -> Gradient:
        if not _is_rows(self._collected[path]):
            return cross_terms.weighted_sum(self._collected[path], weights, self._depths[path])
        if self._rows[0] is not weights:
            self._rows = weights, {}
        if path not in self._rows[1]:  # with all tables of its type
            depth = self._depths[path]
            alike = {other: own for other, own in self._collected.items() if self._depths[other] is depth}
            tables: dict[str, Any] = {other: own[0] for other, own in alike.items() if _is_rows(own)}
            sums = factors.add_rows(list(tables.values()), weights, depth)
            self._rows[1].update(zip(tables, sums, strict=True))
        return self._rows[1][path]


def _is_rows(several: Sequence[factors.Factor]) -> bool:
    return len(several) == 1 and isinstance(several[0], factors.Rows)


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """The clipped sum of a batch with its sensitivity; immutable.

    Attributes:
        gradients: Σ_b w_b g_b by variable path; `tf.IndexedSlices` with distinct ids for tables.
        norms: ‖g_b‖ over all variables together, rounded up, `[batch]`. Private: computed from the examples.
        sensitivity: Largest change C of `gradients` by one example.
        losses: Losses of the examples, `[batch]`. Private.
        reads: Rows at which each example has a gradient, by table path. Private.
        ticket: Optimizer and step that the sum was computed for, and the only ones that accept it; None for none.
    """

    gradients: Mapping[str, Gradient]
    norms: tf.Tensor
    sensitivity: tf.Tensor
    losses: tf.Tensor
    reads: Mapping[str, Reads] = dataclasses.field(default_factory=dict)
    ticket: Any = None

    def scaled(self, path: str, scale: tf.Tensor) -> Gradient:
        """`gradients[path]` times a scalar, in float32; ids are distinct, also in sums made by hand."""
        if isinstance(self.gradients, Weighted):
            return _float32(self.gradients.scaled(path, scale))
        found, factor = _float32(self.gradients[path]), tf.cast(scale, tf.float32)
        if isinstance(found, tf.IndexedSlices):
            once = cross_terms.join([found])
            return tf.IndexedSlices(factor * once.values, once.indices, found.dense_shape)
        return factor * found


def _float32(gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values, ids = tf.cast(gradient.values, tf.float32), tf.cast(gradient.indices, tf.int64)
        return tf.IndexedSlices(values, ids, gradient.dense_shape)
    return tf.cast(gradient, tf.float32)


def shared_inputs(model: keras.Model) -> tuple[str, ...]:
    """The keys of a batch that all examples share: the model's attribute of that name."""
    return tuple(getattr(model, "shared_inputs", ()))


def collect(
    recorder: Recording, losses: tf.Tensor, reading: StepReading, counted: tf.Tensor | None = None
) -> Factors:
    """The factors of every trainable variable from one backward pass; refused if `reading` finds examples mixed."""
    # Losses of rows that are not counted, being repeated or of no data, are not differentiated.
    gradients, direct = recorder.differentiate(losses, None if counted is None else tf.cast(counted, losses.dtype))
    read, size = reading.read(recorder.calls, losses, gradients), tf.size(losses)
    collected: Factors = {}
    covered: set[str] = set()
    for one in read:
        for variable, factor in factors_of(one, size, reading):
            covered.add(variable.path)
            if variable.trainable:
                collected.setdefault(variable.path, []).append(factor)
    refuse_uncovered(recorder.calls, covered)
    for variable, gradient in zip(recorder.direct, direct):
        collected.setdefault(variable.path, []).append(factors.PerExample(reading.shares(variable, gradient)))
    return {path: cross_terms.merge(several) for path, several in collected.items()}


def factors_of(
    read: CallRead, size: tf.Tensor, reading: StepReading
) -> Iterator[tuple[keras.Variable, factors.Factor]]:
    """(variable, factor) for each variable of a call's layer, of `size` examples."""
    call = read.call
    gradients = read.gradients
    if call.bag is None:  # gradients may lose static shapes, that of a concatenation for one
        gradients = [tf.ensure_shape(tf.convert_to_tensor(g), t.shape) for g, t in zip(gradients, call.watched)]
    for variable, factor in call.rule.factors(call, gradients):
        yield variable, fold(factor, size, call.layer.name) if read.merged else factor
    reading.refuse_beside(call)


def refuse_uncovered(calls: Sequence[Call], covered: set[str]) -> None:
    """Refuses weights that their layer's rule gives no factor for: those of an activation that is a layer, say."""
    for call in calls:
        lost = [v.path for v in call.layer.trainable_variables if v.path not in covered]
        if lost:
            raise NotPrivate(
                f"The clipping rule {type(call.rule).__name__} of layer '{call.layer.name}' gives no gradient for "
                f"{', '.join(lost)}; put them into a layer of their own in the model, or register a rule for them."
            )


def clip_weights(norms: tf.Tensor, l2_norm_clip: tf.Tensor, rule: WeightRule = clip_weight) -> tf.Tensor:
    """The weights by a rule, and zero where the norm is not finite."""
    weights = rule(norms, l2_norm_clip)
    return tf.where(tf.math.is_finite(norms), weights, tf.zeros_like(weights))


class Measured(NamedTuple):
    """Each example's gradient norm over all variables, rounded up; its reach; each variable's type."""

    norms: tf.Tensor
    reaches: tf.Tensor
    types: dict[str, tf.DType]


def measure(collected: Factors) -> Measured:
    """The norms of factored gradients, in the widest type among them."""
    sides = {path: own[0].sides for path, own in collected.items() if len(own) == 1}
    by_type: dict[tf.DType, dict[str, tuple[tf.Tensor, ...]]] = {}
    for path, own in sides.items():
        if own:  # their lengths are rounded up together
            by_type.setdefault(own[0].dtype, {})[path] = own
    several = {path: cross_terms.measure(own) for path, own in collected.items() if not sides.get(path)}
    types = {path: norm.dtype for path, (norm, _) in several.items()}
    types |= {path: dtype for dtype, measured in by_type.items() for path in measured}
    widest = tf.float64 if tf.float64 in types.values() else tf.float32
    together = [factors.norms(list(measured.values())) for measured in by_type.values()]
    norms, reaches = (
        tf.concat([tf.cast(each, widest) for each in (*together, *(v[:, None] for v in apart))], axis=1)
        for apart in (zip(*several.values()) if several else ((), ()))
    )
    total = factors.length(norms)
    if all(len(own) == 1 and own[0].whole for own in collected.values()):
        return Measured(total, total, types)
    return Measured(total, factors.length(reaches), types)


def reads_by_table(collected: Factors, counted: tf.Tensor | None = None) -> Mapping[str, Reads]:
    """`Reads` of the variables that are read by row alone, by the examples that are `counted`; computed when read."""

    def find(path: str, several: Sequence[factors.Factor]) -> Reads:
        example, ids, shared = (tf.concat(parts, 0) for parts in zip(*(factor.reads() for factor in several)))
        if counted is None:
            return Reads(example, ids, shared)
        counts = tf.gather(counted, example)
        return Reads(tf.boolean_mask(example, counts), tf.boolean_mask(ids, counts), shared)

    return ByPath({path: several for path, several in collected.items() if all(f.sparse for f in several)}, find)


def _here(leaf: Any) -> Any:
    """A tensor of the graph being traced: in a loop over microbatches, not of the one around it."""
    return leaf if leaf is None or tf.executing_eagerly() else tf.identity(leaf)


class Share(NamedTuple):
    """The part of a batch in a sum: one of `parts`, of `examples` in all, at most `each` in a part."""

    parts: tf.Tensor | int
    examples: tf.Tensor
    each: int | None = None


@dataclasses.dataclass(frozen=True)
class Clipping:
    """The arguments of a clipped sum other than the batch.

    Attributes:
        model: Built model.
        loss: Function that maps a batch to each example's loss, `[batch]`.
        l2_norm_clip: Largest norm C of an example's contribution.
        before_read: Function that is called with a table and ids before these rows are read.
        rule: Rule of the examples' weights.
        present: Whether each row of the batch has data, `[batch]`; the others contribute nothing. None if all have.
        ids_ahead: Function from a batch to the ids that it reads, by table path; None if that is not known ahead.
    """

    model: keras.Model
    loss: Callable[[Any], tf.Tensor]
    l2_norm_clip: tf.Tensor
    before_read: BeforeRead = settle_by_owner
    rule: WeightRule = clip_weight
    present: tf.Tensor | None = None
    ids_ahead: Callable[[Any], Mapping[str, tf.Tensor]] | None = None

    def batch_size(self, batch: Any) -> tf.Tensor:
        """The number of examples in a batch."""
        return batch_size(batch, shared_inputs(self.model))

    def sum(self, batch: Any, share: Share | None = None) -> ClippedSum:
        """The clipped sum by one forward and one backward pass, within a graph and with secret seeds."""
        with secret_seeds(self.model):
            return self.read_sum(batch, share)

    def read_sum(self, batch: Any, share: Share | None = None) -> ClippedSum:
        """The same sum with the layers' own seeds, which is not private."""
        if tf.executing_eagerly():
            raise RuntimeError("A clipped sum needs a graph, which is read for mixed examples: use traced(...).")
        refuse_other_arithmetic()
        shared = shared_inputs(self.model)
        batch, counted = given = hide_batch_axis(self._rows(tf.nest.map_structure(_here, batch), share), shared)
        size, reading = self.batch_size(batch), StepReading(self.model, given, shared)
        guard = self._settle_ahead(batch)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            with record_calls(self.model, tape, guard or self.before_read) as recorder:
                losses = check_losses(self.loss(batch), size, lambda: guard.checks if guard else [])
        refuse_unrecorded(self.model, recorder.calls, recorder.direct)
        collected = collect(recorder, losses, reading, counted)
        return clip(collected, losses, self.l2_norm_clip, share, counted, self.rule)

    def _settle_ahead(self, batch: Any) -> SettledAhead | None:
        if self.ids_ahead is None:
            return None
        with ours():
            with tf.device(HOST):  # where a batch comes from
                ahead = self.ids_ahead(batch)
            return SettledAhead(self.model.private_weights, ahead, self.model.trainable_variables)

    def _rows(self, batch: Any, share: Share | None) -> tuple[Any, tf.Tensor]:
        """A batch of whole vectors of rows, and whether each of them counts, `[rows]`."""
        shared = shared_inputs(self.model)
        # Microbatches of one example have one shape already.
        alone = share is not None and share.each == 1
        repeated = align(batch, shared, 1 if alone else ALIGNED)
        size = self.batch_size(batch)
        present = tf.fill([size], True) if self.present is None else _here(self.present)
        return repeated, tf.pad(present, [[0, self.batch_size(repeated) - size]])


def clip(
    collected: Factors,
    losses: tf.Tensor,
    l2_norm_clip: tf.Tensor,
    share: Share | None = None,
    counted: tf.Tensor | None = None,
    rule: WeightRule = clip_weight,
) -> ClippedSum:
    """The clipped sum of factored per-example gradients; microbatches share the slack."""
    norms, reaches, types = measure(collected)
    share = share or Share(1, tf.size(norms))
    exactness = check_exactness(norms)
    with tf.device(HOST):
        checks = require_all(_check_numbers(collected, tf.size(norms), share), exactness)
        bound = tf.cast(l2_norm_clip, norms.dtype) / (1 + SLACK)
    norms = depend_on(norms, checks)  # which all that is made of the sum waits for
    weights = clip_weights(norms, bound, rule)
    counted = tf.fill(tf.shape(norms), True) if counted is None else counted
    weights = tf.where(counted, weights, tf.zeros_like(weights))
    # Rows that do not count have zero gradients, and finite numbers, whose products with a weight of zero are none, so
    # that not all tensors are read once more to silence them. A gradient of the user's own may give something for
    # nothing.
    heard = tf.where(~counted & (norms <= _NOTHING * bound), True, tf.not_equal(weights, 0))
    sorts = {_find_sort(own) for own in collected.values()}
    reached, size = tf.reduce_sum(tf.math.multiply_no_nan(reaches, weights)), tf.size(norms)
    with tf.device(HOST):
        reach = reached / bound
        written = 2 * _WRITTEN * float_sums.unit(tf.float32) * tf.cast(share.examples, norms.dtype)
        slack = (SLACK - _OF_WEIGHTS - written) / len(sorts) ** 0.5 / tf.cast(share.parts, norms.dtype)
        # Each variable is added up in its own type, whatever the norms are in: float64 errors are no bound on float32
        # sums.
        several = dict.fromkeys(types.values())
        by_type = {dtype: float_sums.Depth.from_slack(slack, reach, size, dtype) for dtype in several}
    depths = {path: by_type[dtype] for path, dtype in types.items()}
    weighted = Weighted(_silence(collected, heard), weights, depths)
    reads = reads_by_table(collected, counted & tf.math.is_finite(norms))
    places = tf.squeeze(tf.where(counted), axis=1)
    norms, losses = (tf.gather(values, places) for values in (norms, losses))
    return ClippedSum(weighted, norms, l2_norm_clip, losses, reads)


def _find_sort(own: Sequence[factors.Factor]) -> str:
    """By what a variable's sum is bounded: sums of each sort may lose the whole slack, by other examples."""
    if len(own) > 1 or not own[0].whole:
        return "several terms"
    return "rows" if isinstance(own[0], factors.Rows) else "products"


def _silence(collected: Factors, heard: tf.Tensor) -> Factors:
    """The factors, silent for examples that are not heard."""
    silent = iter(factors.silence([factor for own in collected.values() for factor in own], heard))
    return {path: [next(silent) for _ in own] for path, own in collected.items()}


def _check_numbers(collected: Factors, size: tf.Tensor, share: Share) -> Check:
    """A check of the proof's assumptions: B ≤ 2¹⁶ examples, and B² T ≤ 2³⁶ for T terms an example."""
    terms = [f.terms for own in collected.values() for f in own if not f.whole]
    most = tf.cast(size, tf.float64) ** 2 * tf.cast(tf.reduce_max([1, *terms]), tf.float64)
    most *= tf.cast(share.parts, tf.float64)
    return (share.examples <= MOST_EXAMPLES) & (most <= _MOST_TERMS), _TOO_MANY


def check_losses(losses: Any, size: tf.Tensor, beside: Callable[[], Iterable[Check]] = list) -> tf.Tensor:
    """`losses` as a tensor `[batch]`, computed from checks; raises `ValueError` for other shapes."""
    losses = tf.convert_to_tensor(losses)
    if losses.shape.rank != 1:
        raise ValueError(f"per_example_loss must return one loss an example, shape [batch]; got shape {losses.shape}.")
    one_each = tf.equal(tf.shape(losses)[0], size), "per_example_loss must return one loss an example."
    with ours():
        others = list(beside())
        with tf.device(HOST):
            checks = require_all(one_each, *others)
    return depend_on(losses, checks)


def run_as_graph(run: Callable[[Any], ClippedSum], batch: Any, shared: Sequence[str] = ()) -> ClippedSum:
    """`run(batch)`, as a graph also where it would run eagerly."""
    return Graph(lambda batch: (run(batch), None), shared)(batch)[0]


class Graph:
    """A function that gives a clipped sum and other tensors, as a graph also where it would run eagerly."""

    def __init__(self, run: Callable[..., tuple[ClippedSum, Any]], shared: Sequence[str] = ()):
        self._run, self._shared = run, shared
        self._traced = tf.function(self._parts, autograph=False)

    def __call__(self, *given: Any) -> tuple[ClippedSum, Any]:
        """The function's results; it is traced once for batches of all sizes."""
        if not tf.executing_eagerly():
            return self._run(*given)
        graph = self._traced.get_concrete_function(*(open_specs(one, self._shared) for one in given))
        *parts, beside = graph(*given)
        return ClippedSum(*parts), beside

    def _parts(self, *given: Any) -> tuple[Any, ...]:
        found, beside = self._run(*given)
        return dict(found.gradients), found.norms, found.sensitivity, found.losses, dict(found.reads), beside
