"""Variables, seeds and random numbers: reads, permitted writes, and writes that are refused at once.

A variable's contents are shared, but for metrics, which count data. Writes are permitted to the model's metrics, and to
the state of its random layers if the new state is made of the old one.

Noise: an example's entries of a random tensor are drawn independently of all others, so its value depends on its own
data and noise of its own, at any place in the batch. That needs a seed with a single draw (two draws from one seed in
different shapes would share noise between examples), new at every step and secret (`core/sensitivity/recorder.py`).
"""

from __future__ import annotations

import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import lengths_of_handle, resource_key
from tfdp_rec.core.sensitivity.independence.reading import At, outermost, rule
from tfdp_rec.core.sensitivity.independence.rules.shapes import fill_shape
from tfdp_rec.core.sensitivity.independence.sizes import SizeArray, size
from tfdp_rec.core.sensitivity.independence.values import ByExample, Handle, Seed, Shared, Value


@rule("Placeholder", numbers=True)
def read_placeholder(at: At) -> Value:
    """An input of a graph: a variable or constant; otherwise mixed."""
    outside = outermost(at.op.outputs[0])
    if outside.dtype == tf.resource:
        declared = lengths_of_handle(outside)  # of the contents: TensorFlow refuses to assign others
        lengths = None if declared is None else tuple(None if n < 0 else size(n) for n in declared)
        return Handle(resource_key(outside), lengths)
    if not isinstance(outside, tf.__internal__.EagerTensor):
        return at.mixed("outside")
    small = outside.dtype.is_integer and (outside.shape.num_elements() or 0) <= SizeArray.LIMIT
    value = Shared(SizeArray.from_integers(outside.numpy()) if small else None)
    return at.give(value, [size(n) for n in outside.shape])


@rule("PlaceholderWithDefault", sizes=True, mixed=True, numbers=True)
def read_default(at: At) -> Value:
    """The same tensor; its declared shape is not believed."""
    return at.give(at.values[0], at.sizes(0))


@rule("VariableShape")
def shape_of_a_variable(at: At) -> Value:
    """Independent of the variable's contents."""
    return Shared()


@rule("ReadVariableOp")
def read(at: At) -> Value:
    """A variable's contents."""
    handle = at.values[0]
    return at.give(at.reading.contents(at, handle), handle.lengths if isinstance(handle, Handle) else None)


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", sizes=True, mixed=True)
def write(at: At) -> list[Value]:
    """A write into a metric, or into a seed of a state made of the old one; others are refused."""
    # A constant would make the seed known; an earlier state, or that of another layer, would draw the same again. A
    # write in a loop may be left out.
    target = at.values[0]
    key = target.key if isinstance(target, Handle) else None
    kind = at.reading.writable.get(key)
    if kind == "seed":
        number = at.reading.writes.get(key, 0)
        follows = at.values[1] == Seed(frozenset({(key, number)}), next=True)
        if at.op.type != "AssignVariableOp" or not follows or at.reading.turns:
            raise at.reading.refuse(at.op, "seed")
        at.reading.writes[key] = number + 1
    elif kind != "metric":
        name = at.reading.names.get(key)
        raise at.reading.refuse(at.op, "write", f"the variable '{name}'" if name else "a variable")
    return []


@rule("PyFuncStateless", sizes=True, mixed=True)
def python(at: At) -> list[Value]:
    """Refused: Python code may read and write anything."""
    raise at.reading.refuse(at.op, "effect")


@rule("NoOp", "DisableCopyOnRead", sizes=True, mixed=True)
def nothing(at: At) -> list[Value]:
    """No output."""
    return []


_FROM_SEED = ("StatelessRandomUniformV2", "StatelessRandomUniformIntV2", "StatelessRandomNormalV2")


@rule(*_FROM_SEED, sizes=True, arguments=(0,))
def from_seed(at: At) -> Value:
    """Noise from a seed: by example if the seed is new and serves this operation alone."""
    # One use in all that is read: a second call of a function may ask for another shape. Under a known key, numbers
    # tell the counter, and with it all other numbers.
    key, counter, others = at.values[1], at.values[2], at.values[3:]
    seeds = [v for v in (key, counter) if isinstance(v, Seed)]
    fit = isinstance(key, (Seed, Shared)) and isinstance(counter, (Seed, Shared)) and not any(s.next for s in seeds)
    if not fit or not all(isinstance(v, Shared) for v in others):
        return at.mixed("seed")
    found = fill_shape(at, at.numbers(0), isinstance(at.values[0], Shared))
    if isinstance(found, ByExample) and not isinstance(key, Seed):
        return at.mixed("seed")
    draws = frozenset().union(*(seed.draws for seed in seeds))
    if draws & at.reading.draws:
        return at.mixed("seed twice")
    at.reading.draws |= draws
    return found


@rule("StatelessRandomGetKeyCounter")
def key_and_counter(at: At) -> Value:
    """A seed in another form."""
    seed = at.values[0]
    return seed if isinstance(seed, (Seed, Shared)) else at.mixed("seed")
