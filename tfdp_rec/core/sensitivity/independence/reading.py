"""Reads a traced loss and its gradients, operation by operation, and gives each tensor an abstract value (`values.py`).

A reading begins with the batch: its tensors are by example along their first axis, entries that all examples share are
shared, and so is every variable. Each operation in turn gives its outputs values by its rule (`rules/`); an operation
whose inputs are all shared gives shared outputs. Bodies of functions, branches and loops are read like the graph,
loops again until nothing changes.

An operation that mixes examples is refused where its result matters: in a loss, a gradient or the input of a layer with
weights. Metrics may mix. Operations that write state or leave the graph are refused at once.

**Lengths.** The static shape of a tensor may have been declared: TensorFlow believes `set_shape` without a check. So a
reading assumes no static shapes but those of the batch, which a step's signature checks, of constants and of variables.
Each operation is made once more, in a graph of its own, with inputs of the lengths that the reading has found; the
lengths that TensorFlow's shape function then gives its outputs are true if those are (`lengths_of_outputs`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import is_check
from tfdp_rec.core.ground.keras_internals import function_graph
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.independence import refusals
from tfdp_rec.core.sensitivity.independence.sizes import BATCH, ONE, Size, SizeArray, letter, size
from tfdp_rec.core.sensitivity.independence.values import (
    ByExample,
    Handle,
    Mixed,
    Seed,
    Shared,
    Sized,
    Value,
    forget_numbers,
    value_of_numbers,
)

Rule = Callable[["At"], Any]


class _Registered(NamedTuple):
    """A rule, with what it takes."""

    function: Rule
    sizes: bool = False
    mixed: bool = False
    numbers: bool = False
    apart: bool = False
    arguments: tuple[int, ...] = ()


_RULES: dict[str, _Registered] = {}


def rule(
    *types: str,
    sizes: bool = False,
    mixed: bool = False,
    numbers: bool = False,
    apart: bool = False,
    arguments: tuple[int, ...] = (),
) -> Callable[[Rule], Rule]:
    """Registers how operations of these types treat the examples of a batch.

    Args:
        *types: TensorFlow's names of the operations, as `op.type` gives them.
        sizes: Whether the rule takes inputs made of the batch's size; otherwise the outputs are mixed.
        mixed: Whether the rule takes inputs that mix examples; otherwise the outputs mix too.
        numbers: Whether outputs may have known whole numbers; otherwise these are forgotten.
        apart: Whether an output may depend on some of the inputs alone, or on their lengths alone; otherwise a value
            made of examples is never taken for shared.
        arguments: Places of the inputs that say what the operation does: axes, lengths, an order. The outputs are mixed
            if these are made of data.

    Returns:
        A decorator for `rule(at)`, which gives one `Value`, or a list of one for each output.

    Example:
        >>> from tfdp_rec.core.sensitivity.independence import rule
        >>> from tfdp_rec.core.sensitivity.independence import rules
        >>> rule("MyOwnSquash")(rules.elementwise)  # doctest: +ELLIPSIS
        <function elementwise at ...>
    """

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(types, _Registered(function, sizes, mixed, numbers, apart, arguments)))
        return function

    return register


class Settled(Exception):
    """Ends a rule: the value of all outputs, or one of each, is settled."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value


def known_operations() -> frozenset[str]:
    """The types of operations that have a rule."""
    return frozenset(_RULES)


class Reading:
    """The state of reading one traced private computation.

    Args:
        writable: Kind of each variable that may be written, "metric" or "seed", by `resource_key` of its handle.
        names: Names of variables, likewise.
        layers: Names of the model's layers, for refusals.
    """

    def __init__(
        self,
        writable: dict[Any, str] | None = None,
        names: dict[Any, str] | None = None,
        layers: Iterable[str] = (),
    ):
        self.writable, self.names = writable or {}, names or {}
        self.layers = tuple(layers)
        self.draws: set[Any] = set()  # reads of seeds from which numbers were drawn
        self.writes: dict[Any, int] = {}  # number of writes to each seed so far
        self.without_rule: set[str] = set()  # types of operations without a rule whose inputs were not all shared
        self.walks = 0  # so that lengths of two walks through one graph have different names
        self.turns = 0  # depth of loops being read: their bodies may run any number of times
        self.unwritten = False  # whether this turn read an unwritten entry of a list

    def contents(self, at: At, handle: Value) -> Value:
        """The value of a variable's contents: a seed for a random layer's, mixed for a metric's, otherwise shared."""
        if not isinstance(handle, Handle):
            return handle if isinstance(handle, Mixed) else at.mixed("outside")
        kind = self.writable.get(handle.key)
        if kind == "metric":
            return at.mixed("metric")
        return Seed(frozenset({(handle.key, self.writes.get(handle.key, 0))})) if kind == "seed" else Shared()

    def refuse(self, operation: Any, reason: str, detail: str = "", subject: str = "") -> NotPrivate:
        """The exception for an operation at fault."""
        refusal = NotPrivate(refusals.sentence(operation, reason, detail, subject, self.layers))
        refusal.operation = operation
        return refusal


class Walk:
    """The reading of one graph: values and lengths of its tensors, in the order in which they were made.

    Args:
        reading: Reading that this walk is part of.
        graph: Graph to read, a `FuncGraph`.
        skipped: Numbers of operations that are not read, in order of creation.
    """

    def __init__(self, reading: Reading, graph: Any, skipped: frozenset[int] = frozenset()):
        self.reading, self.graph, self.skipped = reading, graph, skipped
        reading.walks += 1
        self.name = f"{reading.walks}:{graph.name}"
        self._values: dict[int, Value] = {}
        self._sizes: dict[int, tuple[Size, ...] | None] = {}
        self._tensors: list[Any] = []  # referenced, so that no id is used twice

    def set(self, tensor: Any, value: Value, sizes: Sequence[Size | None] | None = None) -> None:
        """Sets the value of a tensor and the lengths of its axes."""
        self._tensors.append(tensor)
        self._values[id(tensor)] = value
        self._sizes[id(tensor)] = None if sizes is None else self._name_lengths(tensor, value, sizes)

    def leaf(self, tensor: Any, by_example: bool) -> None:
        """Sets the value of a tensor of the batch, whose static shape the step's signature checks."""
        value = ByExample(0) if by_example else Shared()
        rank = tensor.shape.rank
        self.set(tensor, value, None if rank is None else [None if n is None else size(n) for n in tensor.shape])

    def value(self, tensor: Any) -> Value:
        """The value of a tensor; operations made before the reading began are read when they are needed."""
        todo = [tensor]
        while todo:
            if id(todo[-1]) in self._values:
                todo.pop()
                continue
            missing = [i for i in todo[-1].op.inputs if id(i) not in self._values]
            if missing and todo[-1].op.type not in ("PlaceholderWithDefault",):
                todo.extend(missing)
            else:
                self.visit(todo[-1].op, before=True)
        return self._values[id(tensor)]

    def require_rows(self, tensor: Any, subject: str, rows: Size | None = ONE) -> ByExample:
        """The value of a tensor by example along its first axis, with `rows` for each; raises for any other."""
        if isinstance(tensor, tf.IndexedSlices):  # the gradient of rows that were looked up by their place in the batch
            raise self.reading.refuse(tensor.values.op, "order", subject=subject)
        value = self.value(tensor)
        if isinstance(value, Mixed):
            raise self.reading.refuse(value.operation, value.reason, value.detail, subject)
        if not isinstance(value, ByExample) or value.axis or (rows is not None and value.inner != rows):
            reason = "order" if isinstance(value, ByExample) else "unknown"
            raise self.reading.refuse(tensor.op, reason, subject=subject)
        return value

    def sizes(self, tensor: Any) -> tuple[Size, ...] | None:
        """Lengths of a tensor's axes; None if their number is unknown."""
        return self._sizes.get(id(tensor))

    def _name_lengths(self, tensor: Any, value: Value, sizes: Sequence[Size | None]) -> tuple[Size, ...] | None:
        """Lengths, with a new letter for each unknown one."""
        if isinstance(value, Sized) and None in sizes:
            return None  # a letter does not depend on the number of examples; this length may
        if isinstance(value, ByExample) and value.axis < len(sizes):
            sizes = [*sizes[: value.axis], BATCH * value.inner, *sizes[value.axis + 1 :]]
        names = (letter(f"{self.name}/{tensor.name}[{axis}]") for axis in range(len(sizes)))
        return tuple(name if found is None else found for name, found in zip(names, sizes))

    def _set_outputs(self, at: At, values: Sequence[Value]) -> None:
        """Sets values of outputs, and lengths by the rule or else by TensorFlow's shape function."""
        inferred = None
        for number, (tensor, value) in enumerate(zip(at.op.outputs, values)):
            sizes = at.given.get(number)
            if sizes is None or None in sizes:
                inferred = inferred or lengths_of_outputs(at.op, *at.shape_function_inputs())
                shape = inferred[number] if number < len(inferred) else None
                own = None if shape is None else [None if n is None else size(n) for n in shape]
                sizes = own if sizes is None else sizes if own is None else [a or b for a, b in zip(sizes, own)]
            self.set(tensor, value, sizes)

    def read(self, start: int = 0) -> None:
        """Reads every operation from number `start` on, but those of this package's own step."""
        for number, operation in enumerate(self.graph.get_operations()):
            if number >= start and number not in self.skipped and not is_ours(operation):
                self.visit(operation)

    def visit(self, operation: Any, before: bool = False) -> None:
        """Gives the outputs of an operation their values."""
        if operation.outputs and all(id(t) in self._values for t in operation.outputs):
            return
        ids = getattr(operation, _ROWS_OF, None)
        if ids is not None:
            value, sizes = self.value(ids), self.sizes(ids)
            self.set(operation.outputs[0], forget_numbers(value), None if sizes is None else [*sizes, None])
            return
        if is_check(operation):  # a check of this package: its last operation gives 0 or fails, others serve that one
            ends = _is_stateful(operation)
            for tensor in operation.outputs:
                self.set(tensor, Shared() if ends else Mixed(operation, "mixes"), ())
            return
        at = At(self, operation, before)
        self._set_outputs(at, _apply(at))


class At:
    """One operation in a walk: the argument of a rule.

    Args:
        walk: Reading of the graph that the operation is part of.
        operation: Operation of TensorFlow, `op` from then on.
        before: Whether it was made before the reading began.
    """

    def __init__(self, walk: Walk, operation: Any, before: bool = False):
        self.walk, self.op, self.before = walk, operation, before
        self.given: dict[int, Sequence[Size | None]] = {}  # lengths of outputs, by number
        self.values = [walk.value(t) for t in operation.inputs]

    @property
    def reading(self) -> Reading:
        """The reading that the walk is part of."""
        return self.walk.reading

    def attr(self, name: str) -> Any:
        """An attribute of the operation."""
        return self.op.get_attr(name)

    def sizes(self, number: int) -> tuple[Size, ...] | None:
        """Lengths of the axes of an input."""
        return self.walk.sizes(self.op.inputs[number])

    def rank(self, number: int = 0) -> int | None:
        """The number of axes of an input, None if unknown."""
        found = self.sizes(number)
        return None if found is None else len(found)

    def numbers(self, number: int) -> SizeArray | None:
        """The whole numbers in an input, as far as they are followed."""
        value = self.values[number]
        return value.numbers if isinstance(value, (Shared, Sized)) else None

    def entries(self, number: int) -> tuple[Size | None, ...] | None:
        """The whole numbers in an input in their order, None for an unknown one; None if they are not followed."""
        found = self.numbers(number)
        return None if found is None else found.sizes

    def plain(self, number: int) -> list[int] | None:
        """The whole numbers in an input as a list, None if one is unknown."""
        found = self.numbers(number)
        plain = None if found is None else found.plain
        return None if plain is None else [int(n) for n in plain.flat]

    def by_example(
        self, number: int = 0, follow: Callable[..., Any] | None = None
    ) -> tuple[ByExample, tuple[Size, ...]]:
        """An input by example, and the lengths of its axes; settles the outputs for any other input, by `follow`."""
        value, sizes = self.values[number], self.sizes(number)
        if isinstance(value, ByExample) and sizes is not None:
            return value, sizes
        if follow is not None and not isinstance(value, ByExample):
            raise Settled(self.follow(follow))
        raise Settled(Shared() if all(isinstance(v, Shared) for v in self.values) else self.mixed("unknown"))

    def axes(self, number: int, rank: int) -> list[int]:
        """The axes that an argument names, from 0; settles the outputs if they are unknown."""
        found = self.plain(number)
        if found is None:
            raise Settled(self.mixed("unknown"))
        return [axis % rank for axis in found]

    def follow(self, function: Callable[..., Any]) -> Any:
        """The outputs for inputs without examples: `function` gives the numbers, if those of all inputs are known.

        Its parameters are the inputs' arrays of `Size`, or of integers for the rule's `arguments`.
        """
        shared = all(isinstance(v, Shared) for v in self.values)
        if not all(isinstance(v, (Shared, Sized)) for v in self.values):
            return self.mixed("size" if any(isinstance(v, Sized) for v in self.values) else "unknown")
        count = len(self.values)
        plain = {number % count for number in _RULES[self.op.type].arguments}
        several = [self.numbers(n) for n in range(count)]
        arrays = [n and (n.plain if place in plain else n.array) for place, n in enumerate(several)]
        try:
            found = None if any(array is None for array in arrays) else function(*arrays)
        except (ValueError, IndexError):  # it cannot run
            found = None
        if found is None:
            return Shared() if shared else Sized()
        outputs = [_numbers(one) for one in (found if isinstance(found, list) else [found])]
        values = [Shared(one) if shared else value_of_numbers(one) for one in outputs]
        return values if isinstance(found, list) else values[0]

    def give(self, value: Value, sizes: Sequence[Size | None] | None = None, output: int = 0) -> Value:
        """`value`, for an output with axes of these lengths, None for an unknown one."""
        if sizes is not None:
            self.given[output] = sizes
        return value

    def shape_function_inputs(self) -> tuple[list[Any], list[Any]]:
        """(shapes, numbers) of the inputs as plain integers, None where unknown."""
        shapes, numbers = [], []
        for number, sizes in enumerate(self.sizes(n) for n in range(len(self.values))):
            shapes.append(None if sizes is None else tuple(length.plain for length in sizes))
            found = self.numbers(number)
            plain = None if found is None else found.plain
            numbers.append(None if plain is None else _as_tuple(plain.tolist()))
        return shapes, numbers

    def mixed(self, reason: str = "mixes", detail: str = "") -> Mixed:
        """The value of an output that mixes examples."""
        return Mixed(self.op, reason, detail)


def _numbers(array: Any) -> SizeArray:
    plain = isinstance(array, np.ndarray) and array.dtype != object
    found = np.asarray(array, object)
    return SizeArray.from_integers(array) if plain else SizeArray(found.flat, found.shape)


def _as_tuple(nested: Any) -> Any:
    return tuple(map(_as_tuple, nested)) if isinstance(nested, list) else nested


def _apply(at: At) -> list[Value]:
    # The default is the refusal: state is refused at once, mixed stays mixed, an operation without a rule mixes.
    operation, kind = at.op, at.op.type
    count, known = len(operation.outputs), _RULES.get(kind)
    mixed = next((v for v in at.values if isinstance(v, Mixed)), None)
    if at.before and _is_stateful(operation):
        return [Mixed(operation, "outside")] * count
    # A word that a lookup layer lacks ends the training as an id outside a table does: the data are not the model's.
    if known is None and _has_effect(at.walk.graph, operation) and not refusals.is_librarys_check(operation):
        raise at.reading.refuse(operation, refusals.WITHOUT_RULE.get(kind, "effect"))
    if mixed is not None and not (known and known.mixed):
        return [mixed] * count
    if known is None:
        # What a function reads beside its arguments is unknown as long as its body is not read.
        shared = all(isinstance(v, Shared) for v in at.values) and not find_functions(operation)
        if shared and kind in refusals.GRAPHS:
            return [at.mixed("graph")] * count
        at.reading.without_rule.update([] if shared else [kind])
        return [Shared() if shared else at.mixed(refusals.WITHOUT_RULE.get(kind, "unknown"))] * count
    if not known.sizes and any(isinstance(v, Sized) for v in at.values):
        return [at.mixed("size")] * count
    for argument in (at.values[number] for number in known.arguments):
        if not isinstance(argument, (Shared, Sized)):
            return [argument if isinstance(argument, Mixed) else at.mixed("length")] * count
    try:
        found = known.function(at)
    except Settled as settled:
        found = settled.value
    values = list(found) if isinstance(found, (list, tuple)) else [found] * count
    if not known.apart and any(isinstance(v, ByExample) for v in at.values):
        # A rule looks at the inputs that it expects by example; here another one is made of data.
        values = [at.mixed("length") if isinstance(v, (Shared, Sized)) else v for v in values]
    # Numbers are forgotten unless the rule keeps them; types of fewer bits may hold other numbers.
    keeps = [known.numbers and tensor.dtype in (tf.int32, tf.int64, tf.variant) for tensor in operation.outputs]
    return [value if keep else forget_numbers(value) for value, keep in zip(values, keeps)]


_ROWS_OF = "_tfdp_rec_rows_of"


def rows_of(rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Declares that `rows` are rows of a shared table that is not a variable, looked up by `ids`.

    Args:
        rows: Rows `[..., width]`, row by row those of `ids`.
        ids: Ids `[...]`.

    Returns:
        `rows`, marked for the reading.
    """
    if isinstance(rows, tf.Tensor) and not tf.executing_eagerly():
        rows = tf.identity(rows)
        setattr(rows.op, _ROWS_OF, ids)
    return rows


_OURS = "_tfdp_rec_ours"


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Marks operations as parts of this package's own step: their writes are clipped and noised."""
    if tf.executing_eagerly():
        yield
        return
    graph: Any = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    yield
    for operation in graph.get_operations()[start:]:
        setattr(operation, _OURS, True)


def is_ours(operation: Any) -> bool:
    """Whether an operation is a part of this package's own step."""
    return getattr(operation, _OURS, False)


_STATEFUL: dict[str, bool] = {}


def _is_stateful(operation: Any) -> bool:
    if operation.type not in _STATEFUL:
        _STATEFUL[operation.type] = bool(operation.op_def.is_stateful)
    return _STATEFUL[operation.type]


def _has_effect(graph: Any, operation: Any) -> bool:
    """Whether an operation that no rule reads may do more than give its result, in the functions that it calls too."""
    bodies = (function_graph(graph, name) for name in find_functions(operation))
    return (
        _is_stateful(operation)
        or operation.type.startswith(refusals.EFFECTS)
        or any(_has_effect(body, each) for body in bodies for each in body.get_operations())
    )


def find_functions(operation: Any) -> list[str]:
    """The names of the functions that an operation calls."""
    several = (one for attr in operation.node_def.attr.values() for one in (attr.func, *attr.list.func))
    return [one.name for one in several if one.name]


def outermost(tensor: Any) -> Any:
    """What a placeholder of nested graphs stands for; other tensors are themselves."""
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        outside = {id(inner): outer for outer, inner in getattr(tensor.graph, "captures", ())}
        if id(tensor) not in outside:
            return tensor
        tensor = outside[id(tensor)]
    return tensor


Shape = tuple[int | None, ...] | None
_NOT_MADE_ANEW = ("Placeholder", "PlaceholderWithDefault", "TensorListGetItem", "TensorListStack", "TensorListPopBack")
"""Operations whose shape function repeats what their attributes or arguments declare."""


def lengths_of_outputs(operation: Any, shapes: Sequence[Shape], numbers: Sequence[Any]) -> tuple[Shape, ...]:
    """The shapes of an operation's outputs by its shape function, None for one of unknown rank."""
    if operation.type in _NOT_MADE_ANEW or find_functions(operation):
        return (None,) * len(operation.outputs)
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(operation.node_def)
    for name in [name for name in node.attr if name.startswith("_")]:
        del node.attr[name]
    node.name = "operation"
    del node.input[:]
    node.device = ""
    node.input.extend(f"given_{n}" for n in range(len(shapes)))
    kinds = tuple(tensor.dtype for tensor in operation.inputs)
    return _infer(node.SerializeToString(deterministic=True), kinds, tuple(shapes), tuple(numbers))


@functools.lru_cache(maxsize=1 << 14)
def _infer(node: bytes, kinds: tuple[Any, ...], shapes: tuple[Shape, ...], numbers: tuple[Any, ...]) -> Any:
    if any(length is not None and length < 0 for shape in shapes for length in shape or ()):
        return ()  # it cannot run
    definition = tf.compat.v1.GraphDef()
    definition.versions.producer = tf.version.GRAPH_DEF_VERSION
    definition.node.add().ParseFromString(node)
    with tf.Graph().as_default() as graph:
        given = {}
        for n, (kind, shape, known) in enumerate(zip(kinds, shapes, numbers)):
            if known is None:
                given[f"given_{n}"] = tf.compat.v1.placeholder(kind, shape)
            else:
                given[f"given_{n}"] = tf.constant(np.asarray(known, kind.as_numpy_dtype))
        try:
            tf.graph_util.import_graph_def(definition, input_map=given, name="")
        except ValueError:  # it cannot run
            return ()
        made = graph.get_operation_by_name("operation").outputs
    return tuple(None if t.shape.rank is None else tuple(t.shape.as_list()) for t in made)
