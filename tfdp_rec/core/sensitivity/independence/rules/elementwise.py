"""Operations entry by entry, with broadcasting, and operations along the last axis.

Broadcasting lines axes up from the right. Example i's entries meet example i's if all tensors by example have their
axis in the same place and of the same layout, and shared tensors have length one there.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdp_rec.core.sensitivity.independence.reading import At, rule
from tfdp_rec.core.sensitivity.independence.sizes import ONE, Size
from tfdp_rec.core.sensitivity.independence.values import (
    ByExample,
    ListOf,
    Nothing,
    Seed,
    Shared,
    Sized,
    Value,
    forget_numbers,
    join,
)

ENTRY_BY_ENTRY = """
    Abs AsString Bucketize Cos DivNoNan Elu Equal Erf Erfc Exp Expm1 Floor Greater GreaterEqual IsFinite IsNan LeakyRelu
    Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr NotEqual OnesLike Pow Reciprocal Relu Relu6 Rsqrt Selu
    Sigmoid Sign Sin Softplus Softsign Sqrt SquaredDifference StringToHashBucketFast Tanh
""".split()
IN_MEMORY_ORDER = """
    EluGrad LeakyReluGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad
""".split()
PASSED_ON = ("Identity", "StopGradient", "EnsureShape")
ALONG_THE_LAST = ("Softmax", "LogSoftmax")
_NARROW = (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32, tf.uint64)
_WHOLE = (tf.int32, tf.int64, tf.uint32, tf.uint64)  # types that hold a seed, and lengths, as they are


@rule(*ENTRY_BY_ENTRY)
def elementwise(at: At) -> Value:
    """Entry by entry, axes lined up from the right.

    Args:
        at: Operation to give a value.
    """
    return line_up(at, range(len(at.values)))


@rule("ClipByValue")
def clip(at: At) -> Value:
    """Entry by entry, of whole numbers: of fractions NaN may become another number at the end of a vector."""
    return line_up(at, range(len(at.values))) if at.op.inputs[0].dtype.is_integer else at.mixed("unknown")


@rule("Bitcast")
def bitcast(at: At) -> Value:
    """Entry by entry, between types of one size: between others an axis comes or goes."""
    alike = at.op.inputs[0].dtype.size == at.op.outputs[0].dtype.size
    return line_up(at, (0,)) if alike else at.mixed("unknown")


@rule("ZerosLike")
def zeros_like(at: At) -> Value:
    """Zeros in place of each entry, those of a list too; numbers are forgotten."""
    return at.values[0] if isinstance(at.values[0], (ListOf, Nothing)) else line_up(at, (0,))


@rule(*IN_MEMORY_ORDER)
def match_in_memory_order(at: At) -> Value:
    """Entry by entry in the order of memory: TensorFlow lines no axes up, and may compare numbers of entries alone."""
    found = line_up(at, (0, 1))
    if not isinstance(found, ByExample):
        return found
    one, other = at.sizes(0) or (), at.sizes(1) or ()
    if not all(isinstance(v, ByExample) for v in at.values):
        return at.mixed("position")
    # Examples along the first axis have equal parts of both, one after the other, whatever the other lengths are.
    if found.axis and one != other:
        return at.mixed("order")
    return at.give(found, [a if a == b else None for a, b in zip(one, other)])


def line_up(at: At, inputs: Any) -> Value:
    """The value of a function of one entry of each of these inputs."""
    values = {n: at.values[n] for n in inputs}
    if any(isinstance(v, Seed) for v in values.values()):  # zero times a seed is no seed
        return at.mixed("seed")
    if all(isinstance(v, Shared) for v in values.values()):
        return Shared()
    if any(isinstance(v, Nothing) for v in values.values()):  # till a later turn of the loop has a value
        return Nothing()
    return _broadcast(at, values)


def _broadcast(at: At, values: dict[int, Value]) -> Value:
    ranks = {n: at.rank(n) for n in values}
    if any(rank is None for rank in ranks.values()):
        return at.mixed("unknown")
    rank = max(r for r in ranks.values() if r is not None)
    owners = {n: v.move_to(v.axis + rank - (ranks[n] or 0)) for n, v in values.items() if isinstance(v, ByExample)}
    if len(owners) + sum(isinstance(v, Shared) for v in values.values()) < len(values):
        return at.mixed("unknown")
    first = next(iter(owners.values()))
    if any(v.axis != first.axis or v.inner != first.inner for v in owners.values()):
        return at.mixed()
    for n, value in values.items():
        place = first.axis - (rank - (ranks[n] or 0))
        if isinstance(value, Shared) and place >= 0 and at.sizes(n)[place] != ONE:  # type: ignore[index]
            return at.mixed("position")
    lengths = broadcast_sizes([at.sizes(n) or () for n in values])
    # `==` of shapes that do not fit is one entry for the whole batch.
    if None in lengths and at.op.type in ("Equal", "NotEqual") and not at.attr("incompatible_shape_error"):
        return at.mixed("unknown")
    return at.give(first, lengths)


def broadcast_sizes(several: list[tuple[Size, ...]]) -> list[Size | None]:
    """Lengths after broadcasting, None for an unknown one."""
    rank = max(len(sizes) for sizes in several)
    found: list[Size | None] = []
    for axis in range(rank):
        here = {s[axis - rank + len(s)] for s in several if axis >= rank - len(s)} - {ONE}
        found.append(ONE if not here else next(iter(here)) if len(here) == 1 else None)
    return found


@rule(*PASSED_ON, sizes=True, numbers=True)
def pass_on(at: At) -> Value:
    """The same tensor, with all facts."""
    sizes = at.sizes(0)
    if at.op.type == "EnsureShape" and sizes is not None:  # which fails at a length that it does not name
        return at.give(at.values[0], [None if length.plain is None else length for length in sizes])
    return at.give(at.values[0], sizes)


@rule("Cast", sizes=True, numbers=True)
def cast(at: At) -> Value:
    """Entry by entry; numbers and seeds stay if both types hold them."""
    # Casts of fractions to narrow whole numbers are refused: TensorFlow's kernel gives 255 for 768.0 in a whole vector
    # of uint8 and 0 in the remainder of one, so an entry would depend on its place in the batch.
    value, whole = at.values[0], at.op.outputs[0].dtype in _WHOLE and at.op.inputs[0].dtype in _WHOLE
    if isinstance(value, ByExample) and at.op.inputs[0].dtype.is_floating and at.op.outputs[0].dtype in _NARROW:
        return at.mixed("narrow")
    if isinstance(value, Seed):
        return value if whole else at.mixed("seed")
    if not isinstance(value, (Shared, Sized, ByExample)):
        return at.mixed("unknown")
    return at.give(value if whole else forget_numbers(value), at.sizes(0))


@rule("IdentityN", sizes=True, mixed=True, apart=True)
def one_each(at: At) -> list[Value]:
    """Several tensors, each by itself."""
    for number in range(len(at.values)):
        at.give(at.values[number], at.sizes(number), number)
    return list(at.values)


@rule("Select", "SelectV2")
def select(at: At) -> Value:
    """One or the other, entry by entry. In the older form, a vector of conditions lines up from the left: refused."""
    older = at.op.type == "Select" and at.rank(0) != at.rank(1)
    return at.mixed("unknown") if older and any(isinstance(v, ByExample) for v in at.values) else line_up(at, range(3))


@rule("AddN")
def add_several(at: At) -> Value:
    """A sum of tensors of one shape, or of lists, whose unwritten entries count as zeros."""
    real = [n for n, v in enumerate(at.values) if not isinstance(v, Nothing)]
    if not real:
        return Nothing()
    lists = [v for v in at.values if isinstance(v, ListOf)]
    if lists:  # entry by entry: an entry of the sum is by example if both entries are, and there alike
        return functools.reduce(lambda a, b: join(a, b, at.op), at.values)
    return line_up(at, real)


@rule("BiasAdd")
def bias_add(at: At) -> Value:
    """A shared vector along the channels."""
    value, bias = at.values
    if not isinstance(value, ByExample) or not isinstance(bias, Shared):
        return Shared() if isinstance(value, Shared) and isinstance(bias, Shared) else at.mixed()
    channels = 1 if at.attr("data_format") == b"NCHW" else (at.rank(0) or 0) - 1
    return at.mixed() if value.axis == channels else at.give(value, at.sizes(0))


@rule(*ALONG_THE_LAST)
def along_the_last(at: At) -> Value:
    """Each row by itself: y[..., :] = f(x[..., :]).

    Args:
        at: Operation to give a value.
    """
    value, rank = at.values[0], at.rank(0)
    if isinstance(value, Shared):
        return Shared()
    if not isinstance(value, ByExample) or rank is None or value.axis >= rank - 1 or len(at.values) > 1:
        return at.mixed()
    return value if at.op.type not in ALONG_THE_LAST else at.give(value, at.sizes(0))


@rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def cross_entropy(at: At) -> list[Value] | Value:
    """A loss and a gradient for each row of logits."""
    logits, labels = at.values
    if isinstance(logits, Shared) and isinstance(labels, Shared):
        return Shared()
    owners = [v for v in at.values if isinstance(v, ByExample)]
    if any(v.axis or v != owners[0] for v in owners) or len(owners) < 2:
        return at.mixed()
    # One may be stretched to the other: then the gradient is as long as that.
    alike = at.op.type == "SparseSoftmaxCrossEntropyWithLogits" or at.sizes(0) == at.sizes(1)
    return [owners[0], at.give(owners[0], at.sizes(0) if alike else None, 1)]
