"""Variables, seeds and random numbers; what may be written, and what is refused at once.

A read gives what is shared, but for metrics: what these hold was counted from data. Written may be the metrics of the
model, and the state of its random layers with what is decided by no data.

Noise: an example's entries of a random tensor are drawn independently of all others', so that its value is decided by
its own data and noise of its own, wherever it stands in the batch. That needs a seed that no one else has drawn from
(two draws from one seed, laid out otherwise, would share noise between examples), that is new at every step and that
nobody knows (`clipping/seeds.py`).
"""

from __future__ import annotations

from typing import Any

from tfdp_rec.clipping.independence.reading import At, rule
from tfdp_rec.clipping.independence.rules.shapes import of_shape
from tfdp_rec.clipping.independence.values import ByExample, Handle, Mixed, Seed, Shared, Sized, Value


@rule("Placeholder")
def given(at: At) -> Value:
    """What a graph is given from outside: variables and constants, or else nobody knows what."""
    return at.reading.captured(at.op.outputs[0], at.op)


@rule("PlaceholderWithDefault", places=True, sizes=True, mixed=True)
def replaced(at: At) -> Value:
    """A tensor that hides a shape."""
    return at.values[0]


@rule("VarHandleOp", "HashTableV2", "MutableHashTableV2", "AnonymousHashTable", "VarIsInitializedOp")
def handle(at: At) -> Value:
    """A resource made here: by its name, so that it is never taken for a metric or a seed, which may be written."""
    return Handle(at.op.name) if at.op.type != "VarIsInitializedOp" else Shared()


@rule("VariableShape")
def shape_of_a_variable(at: At) -> Value:
    """The same whatever it holds."""
    return Shared()


@rule("ReadVariableOp")
def read(at: At) -> Value:
    """What a variable holds."""
    return at.reading.contents(at, at.values[0])


_WRITES = """
    AssignVariableOp AssignAddVariableOp AssignSubVariableOp ResourceScatterAdd ResourceScatterSub ResourceScatterUpdate
    ResourceScatterMul ResourceScatterDiv ResourceScatterMax ResourceScatterMin ResourceScatterNdUpdate
    ResourceScatterNdAdd ResourceScatterNdSub ResourceStridedSliceAssign
""".split()


@rule(*_WRITES, places=True, sizes=True, mixed=True)
def write(at: At) -> list[Value]:
    """Into a metric, or into a seed what no data decides; all else is refused."""
    target = at.values[0]
    key = target.key if isinstance(target, Handle) else None
    kind = at.reading.writable.get(key)
    if kind == "seed":
        if not all(isinstance(v, (Shared, Seed)) for v in at.values[1:]):
            raise at.reading.refuse(at.op, "seed")
        at.reading.writes[key] = at.reading.writes.get(key, 0) + 1
    elif kind != "metric":
        name = at.reading.names.get(key)
        raise at.reading.refuse(at.op, "write", f"the variable '{name}'" if name else "a variable")
    return []


@rule("PyFuncStateless", places=True, sizes=True, mixed=True)
def python(at: At) -> list[Value]:
    """Python code may look at anything."""
    raise at.reading.refuse(at.op, "effect")


@rule("Assert", "NoOp", "ControlTrigger", places=True, sizes=True, mixed=True)
def nothing(at: At) -> list[Value]:
    """No output."""
    return []


_FRESH = "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal".split()
_FROM_SEED = """
    StatelessRandomUniform StatelessRandomUniformInt StatelessRandomUniformFullInt StatelessRandomNormal
    StatelessTruncatedNormal StatelessRandomUniformV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2
    StatelessRandomNormalV2 StatelessTruncatedNormalV2
""".split()


@rule(*_FRESH, sizes=True)
def fresh(at: At) -> Value:
    """Noise of TensorFlow's own state, which is secret unless a seed was set for the process or the operation."""
    if not all(isinstance(v, Shared) for v in at.values[1:]):
        return at.mixed("seed")
    found = _noise(at)
    known = at.op.get_attr("seed") or at.op.get_attr("seed2")
    return at.mixed("seed known") if known and isinstance(found, ByExample) else found


@rule(*_FROM_SEED, sizes=True)
def from_seed(at: At) -> Value:
    """Noise from a seed: by example only if the seed is drawn anew, and for this alone."""
    places = (1, 2, 3) if at.op.type.endswith("V2") else (1,)
    seeds = [v for n, v in enumerate(at.values) if n in places and isinstance(v, Seed)]
    if not all(isinstance(v, (Shared, Seed)) for v in at.values[1:]):
        return at.mixed("seed")
    found = _noise(at)
    if isinstance(found, ByExample) and not seeds:
        return at.mixed("seed")
    for seed in seeds:
        for draw in seed.draws:
            if at.reading.draws.setdefault(draw, (at.op, found)) != (at.op, found):
                return at.mixed("seed twice")
    return found


def _noise(at: At) -> Value:
    if not isinstance(at.values[0], (Shared, Sized)):
        return at.mixed("length")
    return of_shape(at, at.numbers(0), isinstance(at.values[0], Shared))


@rule("StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg", "StatelessRandomGetAlg")
def key_and_counter(at: At) -> Value:
    """A seed in another form."""
    return at.values[0] if at.values and isinstance(at.values[0], (Seed, Mixed)) else (
        Shared() if all(isinstance(v, Shared) for v in at.values) else at.mixed("seed")
    )  # fmt: skip


@rule("RandomShuffle")
def shuffled(at: At) -> Value:
    """Along the first axis."""
    value: Any = at.values[0]
    if isinstance(value, Shared):
        return Shared()
    return at.mixed("position") if not isinstance(value, ByExample) or value.axis == 0 else at.give(value, at.sizes(0))
