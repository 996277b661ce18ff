"""Reads a traced loss and its gradients, operation by operation, and says what is known of each tensor (`values.py`).

A reading begins where the batch does: its tensors are by example along their first axis, entries that all examples
share are shared, and so is every variable. Each operation in turn gives its outputs values, by its rule (`rules/`); one
whose inputs are all shared gives shared outputs, whatever it does. Bodies of functions, branches and loops are read
like the graph itself, loops again and again until nothing changes.

What mixes examples is not refused where it stands, but where it matters: when it is found in a loss, a gradient or the
input of a layer with weights. Metrics may mix. What writes state or leaves the graph is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp_rec.clipping.independence import refusals
from tfdp_rec.clipping.independence.sizes import BATCH, Numbers, Size, letter, size
from tfdp_rec.clipping.independence.values import (
    ByExample,
    Flat,
    Handle,
    Mixed,
    Places,
    Seed,
    Shared,
    Sized,
    Tuples,
    Value,
    Within,
)
from tfdp_rec.clipping.rules import NotPrivate
from tfdp_rec.demands import is_check

Rule = Callable[["At"], Any]
_RULES: dict[str, Rule] = {}
_TAKES: dict[str, set[str]] = {"places": set(), "sizes": set(), "mixed": set()}


def rule(*types: str, places: bool = False, sizes: bool = False, mixed: bool = False) -> Callable[[Rule], Rule]:
    """Registers how operations of these types treat the examples of a batch.

    Args:
        *types: TensorFlow's names of the operations, as `op.type` gives them.
        places: whether the rule knows what to do with the numbers of examples in their batch.
        sizes: whether it knows what to do with values made of the batch's size.
        mixed: whether it is asked about tensors that mix examples, too.

    Returns:
        A decorator for `rule(at)`, which gives one `Value`, or a list of one for each output.

    Example:
        >>> from tfdp_rec.clipping.independence import rule, rules
        >>> rule("MyOwnSquash")(rules.elementwise)  # doctest: +ELLIPSIS
        <function elementwise at ...>
    """

    def register(function: Rule) -> Rule:
        for kind in types:
            _RULES[kind] = function
            for name, takes in (("places", places), ("sizes", sizes), ("mixed", mixed)):
                (_TAKES[name].add if takes else _TAKES[name].discard)(kind)
        return function

    return register


def known_operations() -> frozenset[str]:
    """The types of operations that have a rule."""
    return frozenset(_RULES)


class Reading:
    """What one traced private computation does with the batch.

    Args:
        writable: handles of variables that may be written: by id of the handle, "metric" or "seed".
        names: of variables, by id of the handle.
        layers: names of the model's layers, for refusals.
    """

    def __init__(
        self,
        writable: dict[Any, str] | None = None,
        names: dict[Any, str] | None = None,
        layers: Iterable[str] = (),
    ):
        self.writable, self.names = writable or {}, names or {}
        self.layers = tuple(layers)
        self.draws: dict[Any, Any] = {}  # read of a seed -> the operation that drew from it
        self.writes: dict[Any, int] = {}  # how often a seed's state was written so far
        self.without_rule: set[str] = set()  # types of operations that met what is not shared, and have no rule
        self.within: set[tuple[int, Size]] = set()  # tensors of numbers, and below what an operation checks them to be
        self.walks = 0  # so that lengths of two walks through one graph have names of their own
        self.turns = 0  # loops that are being read
        self.unwritten = False  # whether this turn read an entry of a list that nobody wrote

    def captured(self, tensor: Any, operation: Any) -> Value:
        """What a graph's placeholder stands for: a variable, a constant, or nothing that is known of."""
        outside = _captured(tensor)
        if outside is None:
            return Mixed(operation, "outside")
        if outside.dtype == tf.resource:
            return Handle(id(outside))
        small = outside.dtype.is_integer and (outside.shape.num_elements() or 0) <= Numbers.LIMIT
        return Shared(Numbers.of(outside.numpy()) if small else None)

    def contents(self, at: At, handle: Value) -> Value:
        """What a variable holds: shared, but for metrics; a seed, for a random layer's."""
        if not isinstance(handle, Handle):
            return handle if isinstance(handle, Mixed) else at.mixed("outside")
        kind = self.writable.get(handle.key)
        if kind == "metric":
            return at.mixed("metric")
        return Seed(frozenset({(handle.key, self.writes.get(handle.key, 0))})) if kind == "seed" else Shared()

    def refuse(self, operation: Any, reason: str, detail: str = "", subject: str = "") -> NotPrivate:
        """The exception that says so."""
        refusal = NotPrivate(refusals.sentence(operation, reason, detail, subject, self.layers))
        refusal.operation = operation
        return refusal


class Walk:
    """The reading of one graph: values and lengths of its tensors, in the order in which they were made.

    Args:
        reading: that this is part of.
        graph: a `FuncGraph`.
        skipped: numbers of operations, in order of creation, that are this package's own business.
    """

    def __init__(self, reading: Reading, graph: Any, skipped: frozenset[int] = frozenset()):
        self.reading, self.graph, self.skipped = reading, graph, skipped
        reading.walks += 1
        self.name = f"{reading.walks}:{graph.name}"
        self._values: dict[int, Value] = {}
        self._sizes: dict[int, tuple[Size, ...]] = {}
        self._kept: list[Any] = []  # so that no id is given twice

    def set(self, tensor: Any, value: Value, sizes: Sequence[Size] | None = None) -> None:
        """States what is known of a tensor."""
        self._kept.append(tensor)
        self._values[id(tensor)] = value
        if sizes is not None:
            self._sizes[id(tensor)] = tuple(sizes)

    def leaf(self, tensor: Any, by_example: bool) -> None:
        """States that a tensor is part of the batch."""
        self.set(tensor, ByExample(0) if by_example else Shared())

    def value(self, tensor: Any) -> Value:
        """What is known of a tensor; reads what it is made of first, if that was made before the reading began."""
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

    def sizes(self, tensor: Any) -> tuple[Size, ...] | None:
        """Lengths of a tensor's axes, or None if not even their number is known."""
        if id(tensor) in self._sizes:
            return self._sizes[id(tensor)]
        if tensor.shape.rank is None:
            return None
        value = self._values.get(id(tensor))
        found = []
        for axis, length in enumerate(tensor.shape):
            if isinstance(value, ByExample) and axis == value.axis:
                found.append(value.outer * BATCH * value.inner)
            else:
                found.append(letter(f"{self.name}/{tensor.name}[{axis}]") if length is None else size(length))
        self._sizes[id(tensor)] = tuple(found)
        return self._sizes[id(tensor)]

    def read(self, start: int = 0) -> None:
        """Reads every operation from number `start` on."""
        for number, operation in enumerate(self.graph.get_operations()):
            if number >= start and number not in self.skipped:
                self.visit(operation)

    def visit(self, operation: Any, before: bool = False) -> None:
        """Gives the outputs of an operation their values."""
        if operation.outputs and all(id(t) in self._values for t in operation.outputs):
            return
        ids = getattr(operation, _ROWS_OF, None)
        if ids is not None:
            self.set(operation.outputs[0], self.value(ids))
            return
        if is_check(operation):  # of this package: its last operation gives 0 or fails, those before it are for that
            ends = _is_stateful(operation)
            for tensor in operation.outputs:
                self.set(tensor, Shared() if ends else Mixed(operation, "mixes"))
            return
        found = _apply(At(self, operation, before))
        for tensor, value in zip(operation.outputs, found):
            self.set(tensor, value)


class At:
    """One operation in a walk: what a rule is shown."""

    def __init__(self, walk: Walk, operation: Any, before: bool = False):
        self.walk, self.op, self.before = walk, operation, before
        self.values = [walk.value(t) for t in operation.inputs]

    @property
    def reading(self) -> Reading:
        """The reading this is part of."""
        return self.walk.reading

    def attr(self, name: str) -> Any:
        """An attribute of the operation."""
        return self.op.get_attr(name)

    def sizes(self, number: int) -> tuple[Size, ...] | None:
        """Lengths of the axes of an input."""
        return self.walk.sizes(self.op.inputs[number])

    def rank(self, number: int = 0) -> int | None:
        """How many axes an input has."""
        found = self.sizes(number)
        return None if found is None else len(found)

    def numbers(self, number: int) -> Numbers | None:
        """The whole numbers that an input holds, as far as they can be followed."""
        value = self.values[number]
        return value.numbers if isinstance(value, (Shared, Sized)) else None

    def plain(self, number: int) -> list[int] | None:
        """The whole numbers that an input holds, if all are known, as a list."""
        found = self.numbers(number)
        plain = None if found is None else found.plain
        return None if plain is None else [int(n) for n in plain.flat]

    def give(self, value: Value, sizes: Sequence[Size | None] | None = None, output: int = 0) -> Value:
        """`value`, for an output whose axes have these lengths (an unknown one gets a name of its own)."""
        if sizes is not None:
            tensor = self.op.outputs[output]
            rank = tensor.shape.rank
            named = [
                s if s is not None else letter(f"{self.walk.name}/{tensor.name}[{axis}]")
                for axis, s in enumerate(sizes)
            ]
            if rank is None or rank == len(named):
                static = [None] * len(named) if rank is None else list(tensor.shape)
                named = [s if n is None else size(n) for s, n in zip(named, static)]
                self.walk._sizes[id(tensor)] = tuple(named)
                self.walk._kept.append(tensor)
        return value

    def mixed(self, reason: str = "mixes", detail: str = "") -> Mixed:
        """The value of an output that is not each example's own."""
        return Mixed(self.op, reason, detail)

    def alone(self) -> tuple[int, ByExample] | None:
        """The one input that is by example, if the others are shared."""
        found = [(n, v) for n, v in enumerate(self.values) if isinstance(v, ByExample)]
        return found[0] if len(found) == 1 else None


def _apply(at: At) -> list[Value]:
    operation, kind = at.op, at.op.type
    count = len(operation.outputs)
    mixed = next((v for v in at.values if isinstance(v, Mixed)), None)
    if _is_stateful(operation) and (kind not in _RULES or at.before):
        if at.before:
            return [Mixed(operation, "outside")] * count
        raise at.reading.refuse(operation, "effect")
    if mixed is not None and kind not in _TAKES["mixed"]:
        return [mixed] * count
    function = _RULES.get(kind)
    if function is None:
        shared = all(isinstance(v, Shared) for v in at.values)
        at.reading.without_rule.update([] if shared else [kind])
        return [Shared() if shared else at.mixed("unknown")] * count
    if kind not in _TAKES["places"] and any(isinstance(v, (Places, Tuples, Flat)) for v in at.values):
        return [at.mixed("position")] * count
    if kind not in _TAKES["sizes"] and any(isinstance(v, Sized) for v in at.values):
        return [at.mixed("size")] * count
    if kind not in _TAKES["places"]:
        at.values = [ByExample(v.axis, *v.layout) if isinstance(v, Within) else v for v in at.values]
    found = function(at)
    return list(found) if isinstance(found, (list, tuple)) else [found] * count


_ROWS_OF = "_tfdp_rec_rows_of"


def rows_of(rows: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Declares that `rows` are rows of a shared table, each for the id that asks: for tables that are not variables.

    Args:
        rows: `[..., width]`.
        ids: `[...]`.

    Returns:
        `rows`.
    """
    if isinstance(rows, tf.Tensor) and not tf.executing_eagerly():
        rows = tf.identity(rows)
        setattr(rows.op, _ROWS_OF, ids)
    return rows


_STATEFUL: dict[str, bool] = {}


def _is_stateful(operation: Any) -> bool:
    if operation.type not in _STATEFUL:
        _STATEFUL[operation.type] = bool(operation.op_def.is_stateful)
    return _STATEFUL[operation.type]


def _captured(tensor: Any) -> Any:
    """The constant or resource that a placeholder stands for, through however many graphs; None if it is neither."""
    while not isinstance(tensor, tf.__internal__.EagerTensor):
        outside = {id(inner): outer for outer, inner in getattr(tensor.graph, "captures", ())}
        if id(tensor) not in outside:
            return tensor if tensor.dtype == tf.resource else None
        tensor = outside[id(tensor)]
    return tensor
