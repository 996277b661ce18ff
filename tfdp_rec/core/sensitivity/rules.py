"""Clipping rules: the gradients of a layer's variables from its recorded calls, one rule for each type of layer.

A rule runs the layer, watches the tensor whose gradient it needs (the output before the activation), and later turns
the call's input and that gradient into factors (`factors.py`). Rules are found by the layer's class. A subclass that
overrides a method or property of its parent does not inherit the rule, since it may compute something else: `call`, but
also what it calls, such as `convolution_op`. Layers without a rule get the universal one: the layer's own
vector-Jacobian product, one example at a time.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import require, require_equal
from tfdp_rec.core.ground.keras_internals import (
    CallSurroundings,
    embeddings_of,
    kernel_of,
    layers_within,
    own_state,
    resource,
    set_keras_mask,
)
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import rows_of
from tfdp_rec.core.sensitivity import factors
from tfdp_rec.core.sensitivity.bags import Bag, find_bag
from tfdp_rec.core.sensitivity.data_flow import find_write

NO_BATCH = (
    "was called on something without the batch as its first axis, so its gradient does not split by example. Give it "
    "one row an example (a position embedding: ids of shape [batch, T]), or, for candidates shared by the batch, use "
    "tfdp_rec.clipping.CandidateScores."
)

NO_ROWS = (
    "takes an input whose first axis is not the batch, and so is not split among the examples; give it [batch, ...] "
    "and reshape within the layer, or register a rule for it"
)


@dataclasses.dataclass
class Call:
    """One recorded call of a layer: its arguments, and the watched tensors, whose gradients the rule needs.

    Attributes:
        layer: Layer that is called.
        rule: Rule that runs the layer.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        watched: Tensors that the rule watches, in order.
        beside: Tensors other than arguments that the layer read when it was run for one example.
        masks: Factors by which calls of `Dropout` within the layer multiply, in order; None where nothing is dropped.
        surroundings: Masks on the arguments, and values such as `training`, that the layer finds beside them.
        bag: What the model adds the watched rows up to, once it is differentiated by that in their place.
    """

    layer: keras.layers.Layer
    rule: Rule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    watched: list[tf.Tensor] = dataclasses.field(default_factory=list)
    beside: list[tf.Tensor] = dataclasses.field(default_factory=list)
    masks: list[Any] = dataclasses.field(default_factory=list)
    surroundings: CallSurroundings | None = None
    bag: Bag | None = None

    @property
    def inputs(self) -> list[Any]:
        """All that the layer is given: arguments, and masks on them."""
        masks = {} if self.surroundings is None else self.surroundings.masks
        return [*tf.nest.flatten((self.args, self.kwargs)), *masks.values()]

    @property
    def input(self) -> Any:
        """The first argument of the layer's `call`, positional or by name."""
        if self.args:
            return self.args[0]
        first = next(itertools.islice(inspect.signature(type(self.layer).call).parameters, 1, None))
        return self.kwargs[first]


@dataclasses.dataclass
class Hooks:
    """Functions that a rule calls while its layer runs.

    Attributes:
        watch: Function that marks a tensor as one whose gradient the rule needs, and returns it.
        before_read: Function to call with a table and ids before the rule reads these rows.
        require_equal: Function to call with two tensors of whole numbers, and the sentence of the step's refusal where
            they differ.
    """

    watch: Callable[[tf.Tensor], tf.Tensor]
    before_read: Callable[[keras.Variable, tf.Tensor], None]
    require_equal: Callable[[tf.Tensor, tf.Tensor, str], Any] = require_equal


class Recorded:
    """What stands in the place of a layer's `call` while it is recorded."""

    def __init__(self, run: Callable[..., Any]):
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


class Rule(abc.ABC):
    """Runs a layer under recording and gives the factors of its variables."""

    way = "a rule of its own"  # of clipping, for reports

    @abc.abstractmethod
    def run(self, call: Call, original: Callable[..., Any], hooks: Hooks) -> Any:
        """The layer's output, equal to `original(*call.args, **call.kwargs)`, with tensors watched."""

    @abc.abstractmethod
    def factors(self, call: Call, gradients: list[tf.Tensor]) -> Iterator[tuple[keras.Variable, factors.Factor]]:
        """(variable, factor) for each variable of the layer, from the gradients of the watched tensors."""

    def tables(self, call: Call) -> dict[str, tf.Tensor]:
        """Variables that this call reads by row alone: path -> the ids."""
        return {}

    def announces_all(self, call: Call) -> bool:
        """Whether the call reads no other rows than those of `tables`, which are settled ahead of the step."""
        return True

    def find_bag(self, call: Call) -> Bag | None:
        """What the model adds the rows of this call up to, if it does."""
        return None


_RULES: dict[type | str, Rule] = {}
_LOOPS: list[type] = [keras.layers.RNN, keras.layers.TimeDistributed]
_REFUSED: dict[type, str] = {
    keras.layers.BatchNormalization: (
        "mixes the examples of a batch; use LayerNormalization, or freeze it (trainable=False)"
    ),
    keras.layers.SpectralNormalization: "changes its weights while it is called; use weight_decay or a smaller clip",
}
_TFRS_TASKS = "tensorflow_recommenders.tasks"  # known by name: most users have no need of it
# What a subclass may override without computing anything else.
_NOT_COMPUTED = {
    "build", "get_config", "from_config", "get_build_config", "build_from_config", "compute_mask",
    "compute_output_shape", "compute_output_spec", "save_own_variables", "load_own_variables", "add_weight",
}  # fmt: skip
_OF_INSTANCES = {"build", "quantize", "call"}  # replaced in each layer, by Keras; `call` is looked at apart
_BY_AXIS = (keras.layers.LayerNormalization, keras.layers.UnitNormalization, keras.layers.Softmax)


def register(layer_type: type | str, rule: Rule) -> None:
    """Registers the clipping rule of a layer type. Run `tfdp_rec.clipping.check` on a model that uses it.

    Args:
        layer_type: Class of the layer, or "library.Class" if the library may not be installed; the rule holds for
            subclasses with the same `call`, too.
        rule: Instance of a `Rule` subclass.

    Raises:
        TypeError: The arguments are not a layer class and a rule.

    Example:
        >>> import keras, tfdp_rec
        >>> class Scaled(keras.layers.Dense):
        ...     pass
        >>> tfdp_rec.clipping.register(Scaled, tfdp_rec.clipping.DenseRule())
    """
    is_layer = isinstance(layer_type, type) and issubclass(layer_type, keras.layers.Layer)
    if not is_layer and not (isinstance(layer_type, str) and layer_type.count(".") == 1):
        raise TypeError(f'layer_type must be a keras.layers.Layer class, or "library.Class", got {layer_type!r}.')
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be an instance of tfdp_rec.clipping.Rule, got {rule!r}.")
    _RULES[layer_type] = rule


def refuse(layer_type: type, reason: str) -> None:
    """Makes private training refuse a layer type.

    Args:
        layer_type: Class of the layer.
        reason: End of a sentence that begins with the layer's name: the reason and the way out.
    """
    _REFUSED[layer_type] = reason


def refusal(layer: keras.layers.Layer) -> str | None:
    """The reason why this layer cannot be trained privately, or None."""
    if any(kind.__module__.startswith(_TFRS_TASKS) and kind.__name__ == "Retrieval" for kind in type(layer).__mro__):
        return (
            "scores each example against the others of its batch; in its place draw negatives from the public "
            "catalogue: self.items = tfdp_rec.CandidateScores(vocabulary=ids, width=32, negatives=100), and "
            "per_example_loss returns self.items.cross_entropy(queries, item_ids), plus other tasks' losses by "
            "example; for a tower, tfdp_rec.TowerScores(tower, candidates, negatives=100)"
        )
    if isinstance(layer, _BY_AXIS) and 0 in tf.nest.flatten(layer.axis):
        return "has axis 0, the batch's, and so mixes the examples of a batch; give it another axis"
    if layer.trainable_variables and (_has(layer, "lora_enabled") or _has(layer, "quantization_mode")):
        return "uses LoRA or quantisation, for which there is no clipping rule; leave them out"
    if layer.compute_dtype == "float16":
        return "computes in float16, which needs loss scaling, and that breaks the clip; use mixed_bfloat16"
    if isinstance(layer, keras.layers.BatchNormalization) and not (layer.trainable and layer.built):
        return None  # frozen, it normalises by constants; not built, it was never called
    return next((why for kind, why in _REFUSED.items() if isinstance(layer, kind)), None)


def _has(layer: keras.layers.Layer, attribute: str) -> bool:
    return bool(getattr(layer, attribute, None))


def rule_for(layer: keras.layers.Layer) -> Rule | None:
    """The rule registered for this layer's class, or for the class whose `call` it runs."""
    if isinstance(layer, tuple(_LOOPS)):
        return UNIVERSAL
    for kind in type(layer).__mro__:
        rule = _RULES.get(kind) or _RULES.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
        if rule is not None:
            return None if _computes_otherwise(layer, kind) else rule
    return None


def _computes_otherwise(layer: keras.layers.Layer, kind: type) -> bool:
    """Whether a layer overrides something that a class above it computes with."""
    below = type(layer).__mro__[: type(layer).__mro__.index(kind)]
    if not isinstance(vars(layer).get("call"), (Recorded, type(None))):
        return True
    names = {name for each in below for name in vars(each)} | (set(vars(layer)) - _OF_INSTANCES)
    computed = {name for name in names - _NOT_COMPUTED if name == "__call__" or not name.startswith("__")}
    return any(callable(before := getattr(kind, name, None)) or isinstance(before, property) for name in computed)


def _positions(tensor: tf.Tensor) -> tf.Tensor:
    """`[batch, ..., n]` as `[batch, T, n]`; without positions, as it is."""
    return tensor if tensor.shape.rank in (2, 3) else factors.join_axes(tensor, 1, tensor.shape.rank - 1)


def _bias(gradient: tf.Tensor, shape: tuple[int, ...]) -> factors.PerExample:
    """The factor of a bias: the gradient summed over the axes that `shape` lacks, or has with length 1."""
    rank, lead = gradient.shape.rank, gradient.shape.rank - len(shape)
    axes = [a for a in range(1, rank) if a < lead or (shape[a - lead] == 1 and gradient.shape[a] != 1)]
    if not axes and gradient.shape[1:] == shape:
        return factors.PerExample(gradient)
    summed = tf.reduce_sum(factors.wide(gradient), axis=axes) if axes else factors.wide(gradient)
    return factors.PerExample(_shaped(summed, shape))


def _shaped(values: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """`[batch, …]` as `[batch, *shape]`."""
    return values if values.shape[1:] == tuple(shape) else tf.reshape(values, [tf.shape(values)[0], *shape])


class ActivatedRule(Rule):
    """Layers that end in `self.activation`; the activation's input is watched."""

    way = "closed form"

    def run(self, call: Call, original: Callable[..., Any], hooks: Hooks) -> Any:
        layer = call.layer
        activation = layer.activation

        def activate(z: tf.Tensor) -> tf.Tensor:
            return activation(hooks.watch(z)) if activation is not None else hooks.watch(z)

        layer.__dict__["activation"] = activate
        try:
            return original(*call.args, **call.kwargs)
        finally:
            layer.__dict__["activation"] = activation


    @abc.abstractmethod
    def kernel_factor(self, layer: Any, x: tf.Tensor, g: tf.Tensor) -> factors.Factor:
        """The factor of the kernel, by the layer's input and the gradient of the activation's input."""

    def factors(self, call: Call, gradients: list[tf.Tensor]) -> Iterator[tuple[keras.Variable, factors.Factor]]:
        (g,), layer = gradients, call.layer
        yield kernel_of(layer), self.kernel_factor(layer, call.input, g)
        if layer.bias is not None:
            yield layer.bias, _bias(g, tuple(layer.bias.shape))


class DenseRule(ActivatedRule):
    """z = x W + b: the gradient of W is Σ_t x_t g_tᵀ, that of b is Σ_t g_t."""

    def kernel_factor(self, layer: Any, x: tf.Tensor, g: tf.Tensor) -> factors.Factor:
        return factors.Outer(_positions(x), _positions(g), lambda matrix: matrix)


class EinsumDenseRule(ActivatedRule):
    """z = einsum(x, W) + b. Axes of W shared with x alone are summed over, those shared with z alone are new.

    With I the contracted axes, O the new ones and T those that x and z share but W has not, this is DenseRule on
    x `[batch, T, I]` and g `[batch, T, O]`. Equations with an axis in all three are formed for each example.
    """

    def kernel_factor(self, layer: Any, x: tf.Tensor, g: tf.Tensor) -> factors.Factor:
        x_axes, w_axes, z_axes = self._axes(layer.equation, x.shape.rank)
        batch = x_axes[0]
        if z_axes[0] != batch or batch in w_axes:
            raise NotPrivate(f"Layer '{layer.name}' ({layer.equation}) does not keep the batch as its first axis.")
        contracted = [a for a in w_axes if a in x_axes and a not in z_axes]
        new = [a for a in w_axes if a in z_axes and a not in x_axes]
        kept = [a for a in x_axes[1:] if a in z_axes]
        if len(contracted) + len(new) != len(w_axes) or len(contracted) + len(kept) + 1 != len(x_axes):
            return factors.PerExample(
                tf.einsum(f"{x_axes},{z_axes}->{batch}{w_axes}", factors.wide(x), factors.wide(g))
            )
        # Axes in the order batch, T, then I or O, each group as one axis: `[batch, T, I]` and `[batch, T, O]`.
        sizes = dict(zip(w_axes, kernel_of(layer).shape))

        def flat(tensor: tf.Tensor, axes: str, last: list[str]) -> tf.Tensor:
            order = [axes.index(a) for a in [batch, *kept, *last]]
            moved = tensor if order == list(range(len(order))) else tf.transpose(tensor, order)
            wide = factors.join_axes(moved, 1 + len(kept), len(order))
            wide = tf.ensure_shape(wide, [*wide.shape[:-1], math.prod(sizes[a] for a in last)])
            return factors.join_axes(wide, 1, 1 + len(kept))

        def assemble(matrix: tf.Tensor) -> tf.Tensor:
            axes = [*contracted, *new]
            separate = tf.reshape(matrix, [-1, *(sizes[a] for a in axes)])
            return tf.transpose(separate, [0, *(1 + axes.index(a) for a in w_axes)])

        return factors.Outer(flat(x, x_axes, contracted), flat(g, z_axes, new), assemble)

    @staticmethod
    def _axes(equation: str, x_rank: int) -> tuple[str, str, str]:
        """The equation's three terms, with unused letters for `...`."""
        left, z_axes = equation.replace(" ", "").split("->")
        x_axes, w_axes = left.split(",")
        free = iter(c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation)
        dots = "".join(next(free) for _ in range(x_rank - len(x_axes.replace("...", "")))) if "..." in x_axes else ""
        return x_axes.replace("...", dots), w_axes, z_axes.replace("...", dots)


class Conv1DRule(ActivatedRule):
    """A convolution is a dense layer on windows of its input; the windows are gathered."""

    def kernel_factor(self, layer: Any, x: tf.Tensor, g: tf.Tensor) -> factors.Factor:
        if layer.data_format != "channels_last" or layer.dilation_rate != (1,):
            raise NotPrivate(f"Layer '{layer.name}': Conv1D is supported channels_last and without dilation.")
        (size,), (stride,) = layer.kernel_size, layer.strides
        steps = tf.shape(g)[1]
        missing = tf.maximum((steps - 1) * stride + size - tf.shape(x)[1], 0)
        before = {"valid": 0, "same": missing // 2, "causal": size - 1}[layer.padding]
        padded = tf.pad(x, [[0, 0], [before, tf.maximum(missing - before, 0)], [0, 0]])
        places = tf.range(steps)[:, None] * stride + tf.range(size)[None, :]
        windows = tf.gather(padded, places, axis=1)
        kernel_shape = tuple(kernel_of(layer).shape)
        if layer.groups == 1:
            flat = tf.reshape(windows, [tf.shape(x)[0], steps, size * x.shape[2]])
            return factors.Outer(flat, g, lambda matrix: tf.reshape(matrix, [-1, *kernel_shape]))
        # The gradient of a grouped kernel is no single outer product, so it is formed.
        apart = tf.reshape(windows, [tf.shape(x)[0], steps, size, layer.groups, kernel_shape[1]])
        own = tf.reshape(g, [tf.shape(x)[0], steps, layer.groups, layer.filters // layer.groups])
        formed = tf.einsum("btsgi,btgo->bsigo", factors.wide(apart), factors.wide(own))
        return factors.PerExample(tf.reshape(formed, [-1, *kernel_shape]))


class LayerNormalizationRule(Rule):
    """y = x̂ γ + β with x̂ the normalised input: the gradients are Σ_t x̂_t g_t and Σ_t g_t."""

    way = "closed form"

    def run(self, call: Call, original: Callable[..., Any], hooks: Hooks) -> Any:
        return hooks.watch(original(*call.args, **call.kwargs))

    def factors(self, call: Call, gradients: list[tf.Tensor]) -> Iterator[tuple[keras.Variable, factors.Factor]]:
        layer, x, g = call.layer, factors.wide(call.input), factors.wide(gradients[0])
        rank = x.shape.rank
        axes = [a % rank for a in ([layer.axis] if isinstance(layer.axis, int) else layer.axis)]
        others = [a for a in range(1, rank) if a not in axes]
        if 0 in axes:
            raise NotPrivate(f"Layer '{layer.name}' normalises over the batch; give it another axis.")

        def sum_positions(tensor: tf.Tensor) -> factors.PerExample:
            found = tf.reduce_sum(tensor, axis=others) if others else tensor
            return factors.PerExample(_shaped(found, [x.shape[a] for a in layer.axis]))

        if layer.gamma is not None:
            mean, variance = tf.nn.moments(x, axes=axes, keepdims=True)
            if layer.rms_scaling:  # Keras' own form: centred variance, uncentred input
                mean = tf.zeros_like(mean)
            yield layer.gamma, sum_positions(g * (x - mean) * tf.math.rsqrt(variance + layer.epsilon))
        if layer.beta is not None:
            yield layer.beta, sum_positions(g)


def check_ids(ids: tf.Tensor, layer: keras.layers.Layer, table: keras.Variable, hooks: Hooks) -> tf.Tensor:
    """`ids`, which the step requires to be rows of the table; others become its first or last row."""
    # A GPU reads zeros at an id outside the table, without an error. And (example, id) pairs are one number in
    # `factors`, where such an id would be a row of the next example. A row of the table concerns its own example alone.
    rows = table.shape[0]
    least, most = (tf.constant(number, ids.dtype) for number in (0, rows - 1))
    within = tf.raw_ops.ClipByValue(t=ids, clip_value_min=least, clip_value_max=most)
    hooks.require_equal(
        within,
        ids,
        f"Layer '{layer.name}' was given ids outside its table of {rows} rows, which takes 0 to {rows - 1}: make the "
        "table larger, or number the ids first, by keras.layers.IntegerLookup.",
    )
    return within


def refuse_other_lengths(layer: keras.layers.Layer, given: Any) -> None:
    """Refuses a layer's argument that is no tensor of a fixed length."""
    if isinstance(given, (tf.RaggedTensor, tf.SparseTensor)):
        raise NotPrivate(
            f"Layer '{layer.name}' is given a {type(given).__name__}, which has no axis with one row an example; give "
            "it ids and weights of one fixed length, as tfdp_rec.data.padded(ids, length) makes them, weights 0 for "
            "padding."
        )


def refuse_text(layer: keras.layers.Layer, ids: Any) -> None:
    """Refuses ids that are text, for which a layer has no rows."""
    # Keras casts them, which TensorFlow refuses when the step is run, of one of its own operations.
    if tf.convert_to_tensor(ids).dtype == tf.string:
        raise NotPrivate(
            f"Layer '{layer.name}' is given text, and looks up its rows by number: put a "
            "keras.layers.StringLookup(vocabulary=...) before it, whose vocabulary is public, or give numbers."
        )


class EmbeddingRule(Rule):
    """Rows looked up by id, by a gather from the variable itself: the table is never read as a whole."""

    way = "by row"

    def run(self, call: Call, original: Callable[..., Any], hooks: Hooks) -> Any:
        layer = call.layer
        refuse_other_lengths(layer, call.input)
        refuse_text(layer, call.input)
        ids = check_ids(self._ids(call), layer, embeddings_of(layer), hooks)
        hooks.before_read(embeddings_of(layer), ids)
        rows = hooks.watch(tf.gather(rows_of(embeddings_of(layer)), ids))
        return tf.cast(rows, layer.compute_dtype)

    @staticmethod
    def _ids(call: Call) -> tf.Tensor:
        return tf.cast(call.input, tf.int64)  # GPUs have few kernels for int32

    def factors(self, call: Call, gradients: list[tf.Tensor]) -> Iterator[tuple[keras.Variable, factors.Factor]]:
        (g,), ids, table = gradients, self._ids(call), embeddings_of(call.layer)
        if ids.shape.rank == 1:
            ids, g = tf.expand_dims(ids, 1), tf.expand_dims(g, 1)
        elif ids.shape.rank > 2:
            ids = _positions(ids[..., None])[..., 0]
        if call.bag is not None and g is call.bag.of_rows:  # and not what a subclass has made of it
            yield table, factors.BagRows(ids, call.bag.coefficients, call.bag.gradient, table.shape)
        else:
            yield table, factors.Rows(ids, _positions(g), table.shape)

    def tables(self, call: Call) -> dict[str, tf.Tensor]:
        return {embeddings_of(call.layer).path: self._ids(call)}

    def find_bag(self, call: Call) -> Bag | None:
        return find_bag(call.watched[0]) if len(call.watched) == 1 else None


class EmbedReduceRule(EmbeddingRule):
    """keras-rs' bags of embeddings, lookups with one sum an example.

    With ids i_t and weights v_t of one example, E the table, a bag is

        z = Σ_t v_t E[i_t] / d,    d = 1 ("sum"),  Σ_t v_t ("mean"),  √(Σ_t v_t²) ("sqrtn"),   z = 0 where d is 0

    The rows E[i_t] are watched, before weights and divisor; their gradients are those of a lookup.
    """

    way = "by row, put together by example"

    def run(self, call: Call, original: Callable[..., Any], hooks: Hooks) -> Any:
        ids, weights = self._ids_and_weights(call)
        for tensor in (ids, weights):
            refuse_other_lengths(call.layer, tensor)
        if len(ids.shape) > 2:  # which axis is summed differs between what keras-rs says and what it does
            raise NotPrivate(
                f"Layer '{call.layer.name}' makes bags of ids [batch] or [batch, T], got {ids.shape}: use a layer for "
                "each bag of an example, or keras.layers.Embedding and a sum of its rows."
            )
        rows = super().run(call, original, hooks)
        weights = None if weights is None else tf.convert_to_tensor(weights)
        return _combine(rows, weights, call.layer.combiner)  # type: ignore[attr-defined]

    @staticmethod
    def _ids_and_weights(call: Call) -> tuple[Any, Any]:
        named = dict(zip(("inputs", "weights"), call.args)) | call.kwargs
        return named["inputs"], named.get("weights")


def _combine(rows: tf.Tensor, weights: tf.Tensor | None, combiner: str) -> tf.Tensor:
    """Bags of the rows `[batch, width]` or `[batch, T, width]`, by the formula of `EmbedReduceRule`."""
    alone = rows.shape.rank == 2  # one row: its mean is the row
    if weights is None or (alone and combiner != "sum"):
        weights = tf.ones(tf.shape(rows)[:-1], rows.dtype)
    common = keras.backend.result_type(rows.dtype, weights.dtype)
    rows, weights = tf.cast(rows, common), tf.cast(weights, common)
    for _ in range(rows.shape.rank - weights.shape.rank):
        weights = weights[..., None]
    if alone:
        return rows * weights
    total = tf.reduce_sum(rows * weights, axis=1)
    if combiner == "sum":
        return total
    divisor = tf.reduce_sum(weights if combiner == "mean" else tf.square(weights), axis=1)
    return tf.math.divide_no_nan(total, divisor if combiner == "mean" else tf.sqrt(divisor))


class ReversibleEmbeddingRule(EmbeddingRule):
    """An embedding whose table also gives the logits: h Eᵀ has the gradient Σ_t d_t h_tᵀ, d that of the logits."""

    @staticmethod
    def _is_reversed(call: Call) -> bool:
        return bool(call.kwargs.get("reverse", call.args[1] if len(call.args) > 1 else False))

    def run(self, call: Call, original: Callable[..., Any], hooks: Hooks) -> Any:
        layer = call.layer
        if not self._is_reversed(call):
            rows = super().run(call, original, hooks)
            if layer.mask_zero:
                set_keras_mask(rows, tf.not_equal(call.input, 0))
            return rows
        if not layer.tie_weights or layer.logit_soft_cap is not None:
            raise NotPrivate(f"Layer '{layer.name}': only tie_weights=True without logit_soft_cap has a rule.")
        return hooks.watch(original(*call.args, **call.kwargs))

    def factors(self, call: Call, gradients: list[tf.Tensor]) -> Iterator[tuple[keras.Variable, factors.Factor]]:
        if not self._is_reversed(call):
            yield from super().factors(call, gradients)
        else:
            yield (
                embeddings_of(call.layer),
                factors.Outer(_positions(gradients[0]), _positions(call.input), lambda matrix: matrix),
            )

    def tables(self, call: Call) -> dict[str, tf.Tensor]:
        return {} if self._is_reversed(call) else super().tables(call)

    def find_bag(self, call: Call) -> Bag | None:
        return None if self._is_reversed(call) else super().find_bag(call)


class UniversalRule(Rule):
    """The layer's own vector-Jacobian product, one example at a time, at the price of one formed gradient an example.

    It is exact for every layer whose output row depends on its input row alone. The layer is run a second time for it:
    what its `Dropout` layers multiplied by is kept, and each example is given its row of it.
    """

    way = "one formed gradient an example"

    def run(self, call: Call, original: Callable[..., Any], hooks: Hooks) -> Any:
        self.refuse_randomness_and_state(call.layer)
        call.surroundings = CallSurroundings.of(tf.nest.flatten((call.args, call.kwargs)))
        with _replace_dropout(call.layer, functools.partial(_draw_mask, call.masks)), _turn_cudnn_off(call.layer):
            return tf.nest.map_structure(hooks.watch, original(*call.args, **call.kwargs))

    @staticmethod
    def refuse_randomness_and_state(layer: keras.layers.Layer) -> None:
        """Refuses layers that a second run would change: dropout inside, or state."""
        parts = list(layers_within(layer))
        loops = any(isinstance(part, tuple(_LOOPS)) for part in parts)
        for part in parts:
            random = any(_is_positive(getattr(part, name, None)) for name in _RANDOM)
            if random and (loops or not _is_plain_dropout(part)):
                raise NotPrivate(
                    f"Layer '{layer.name}' has dropout inside ('{part.name}'), so running it again for its gradient "
                    f"would draw another mask; {_way_past_dropout(layer)}."
                )
        state = [v.path for part in parts for v in own_state(part) if "float" in v.dtype]
        if state or any(getattr(part, "stateful", False) for part in parts):
            raise NotPrivate(
                f"Layer '{layer.name}' keeps state between batches ({', '.join(state) or 'stateful=True'}), which "
                "is neither clipped nor noised; use a layer without such state."
            )

    def factors(self, call: Call, gradients: list[tf.Tensor]) -> Iterator[tuple[keras.Variable, factors.Factor]]:
        variables = call.layer.trainable_variables
        flat = tf.nest.flatten((call.args, call.kwargs))
        batched = [i for i, value in enumerate(flat) if tf.is_tensor(value) and value.shape.rank]
        around, masks = call.surroundings, tuple(mask for mask in call.masks if mask is not None)
        assert around is not None
        parts = (tuple(flat[i] for i in batched), masks, around.masks)
        check = functools.partial(self._check_batch_axis, call, gradients[0])
        inputs, masks, padding = tf.nest.map_structure(check, parts)

        def gradient_of_one(example: Any) -> list[tf.Tensor]:
            own, outputs, drawn, there = tf.nest.map_structure(lambda row: row[None], example)
            left, given = iter(drawn), dict(zip(batched, own))
            again = iter([mask if mask is None else next(left) for mask in call.masks])
            values = [given.get(i, value) for i, value in enumerate(flat)]
            args, kwargs = tf.nest.pack_sequence_as((call.args, call.kwargs), values)
            sources = [resource(v) for v in variables]
            known = [*values, *outputs, *drawn, *there.values()]
            dropping = _replace_dropout(call.layer, lambda part, x, training: next(again))
            with _note_inputs(call, known), dropping, _turn_cudnn_off(call.layer), around.again(values, there):
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(sources)
                    output = tf.nest.flatten(call.layer(*args, **kwargs))
                found = tape.gradient(output, sources, outputs, unconnected_gradients="zero")
            return [tf.convert_to_tensor(g) for g in found]

        # `vectorized_map` refuses an empty batch: it gets one example of zeros, whose gradient is dropped.
        count = tf.shape(inputs[0])[0]
        pad = tf.cast(tf.equal(count, 0), tf.int32)
        padded = tf.nest.map_structure(
            lambda t: tf.pad(t, [[0, pad]] + [[0, 0]] * (t.shape.rank - 1)), (inputs, tuple(gradients), masks, padding)
        )
        for variable, values in zip(variables, tf.vectorized_map(gradient_of_one, padded)):
            yield variable, factors.PerExample(values[:count])

    @staticmethod
    def _check_batch_axis(call: Call, output: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """`value`, refused if its first axis is not the batch: it would be split among the examples."""
        message = f"Layer '{call.layer.name}' {NO_ROWS}."
        if value.shape[0] is not None:
            raise NotPrivate(message)
        rows = tf.shape(output)[:1]
        with tf.control_dependencies(require(tf.equal(tf.shape(value)[:1], rows), message)):
            return tf.reshape(value, tf.concat([rows, tf.shape(value)[1:]], axis=0))


def _way_past_dropout(layer: keras.layers.Layer) -> str:
    # The way out. What `TimeDistributed` runs step by step may as well be run on all steps at once.
    if isinstance(layer, keras.layers.TimeDistributed):
        return (
            f"in place of TimeDistributed call '{layer.layer.name}' on all steps at once: inner = "
            "layer(ops.reshape(x, [-1, *x.shape[2:]])), and then ops.reshape(inner, [-1, x.shape[1], *inner.shape[1:]])"
        )
    return "put a keras.layers.Dropout before or after it"


def _is_plain_dropout(layer: keras.layers.Layer) -> bool:
    return type(layer) is keras.layers.Dropout and layer.noise_shape is None


def _draw_mask(masks: list[Any], part: Any, x: Any, training: bool) -> Any:
    # Where nothing is dropped, that is noted: the second run is told so, since it is outside the first one's context.
    ones = tf.ones_like(x) if training else None
    masks.append(ones if ones is None else keras.random.dropout(ones, part.rate, seed=part.seed_generator))
    return masks[-1]


@contextlib.contextmanager
def _turn_cudnn_off(layer: keras.layers.Layer) -> Iterator[None]:
    """Has GRU and LSTM layers within a layer computed by TensorFlow's operations: cuDNN's kernel cannot be read."""
    fast = [part for part in layers_within(layer) if getattr(part, "use_cudnn", False)]
    before = [part.use_cudnn for part in fast]
    for part in fast:
        part.use_cudnn = False
    try:
        yield
    finally:
        for part, wish in zip(fast, before):
            part.use_cudnn = wish


@contextlib.contextmanager
def _replace_dropout(layer: keras.layers.Layer, mask_of: Callable[[Any, Any, bool], Any]) -> Iterator[None]:
    """Has each `Dropout` within a layer multiply by a mask, or pass on its input where there is None."""

    def call(part: Any, inputs: Any, training: bool = False) -> Any:
        mask = mask_of(part, inputs, training)
        return inputs if mask is None else inputs * mask

    random = [part for part in layers_within(layer) if _is_plain_dropout(part) and part.rate > 0]
    for part in random:
        part.__dict__["call"] = Recorded(functools.partial(call, part))
    try:
        yield
    finally:
        for part in random:
            del part.__dict__["call"]


@contextlib.contextmanager
def _note_inputs(call: Call, given: list[Any]) -> Iterator[None]:
    """Notes in `call.beside` what the operations of a block are computed from, apart from `given` tensors."""
    graph: Any = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    yield
    own = graph.get_operations()[start:]
    if (write := find_write(graph, own)) is not None:  # the first run alone is read
        raise NotPrivate(
            f"Layer '{call.layer.name}' is run again for each example, and {write.type} '{write.name}' in it has an "
            "effect beside its result. Leave that out, or call the layer outside of the loss."
        )
    inside = {id(operation) for operation in own}
    inputs = {id(t): t for operation in own for t in operation.inputs if id(t.op) not in inside}
    call.beside += [t for t in inputs.values() if not any(t is one for one in given)]


_RANDOM = ("rate", "dropout", "recurrent_dropout", "stddev")  # Keras' names for the strength of a layer's noise


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


UNIVERSAL = UniversalRule()
register(keras.layers.Dense, DenseRule())
register(keras.layers.EinsumDense, EinsumDenseRule())
register(keras.layers.Conv1D, Conv1DRule())
register(keras.layers.LayerNormalization, LayerNormalizationRule())
register(keras.layers.Embedding, EmbeddingRule())
register(keras.layers.ReversibleEmbedding, ReversibleEmbeddingRule())
register("keras_rs.EmbedReduce", EmbedReduceRule())
