"""Products of matrices and convolutions.

A product is judged as an `einsum`: each axis has a letter. The examples' axis must have the same letter in all terms by
example and in the output, and no shared tensor may have it, except with length one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdp_rec.independence.reading import At, rule
from tfdp_rec.independence.sizes import ONE, Size
from tfdp_rec.independence.values import ByExample, Shared, Sized, Value


def contracted(at: At, terms: Sequence[str], output: str) -> Value:
    """The product of inputs with axes of the letters of `terms`, summed over letters that `output` lacks."""
    owners = [(v, term) for v, term in zip(at.values, terms) if isinstance(v, ByExample)]
    if any(not isinstance(v, (ByExample, Shared)) for v in at.values):
        return at.mixed("unknown")
    if not owners:
        return Shared()
    first, term = owners[0]
    letter = term[first.axis]
    if any(t[v.axis] != letter or v.layout != first.layout for v, t in owners):
        return at.mixed()
    if output.count(letter) != 1 or any(t.count(letter) > 1 for _, t in owners):
        return at.mixed()
    # A letter's length is that of the term by example if it has the batch in it, otherwise any that is not 1.
    sizes: dict[str, Size] = {}
    for number, (value, t) in enumerate(zip(at.values, terms)):
        for name, length in zip(t, at.sizes(number) or ()):
            if isinstance(value, Shared) and name == letter and length != ONE:
                return at.mixed("position")
            if sizes.get(name, ONE) == ONE or name == letter and isinstance(value, ByExample):
                sizes[name] = length
    return at.give(ByExample(output.index(letter), *first.layout), [sizes[name] for name in output])


@rule("MatMul", "BatchMatMulV2", "Einsum")
def product(at: At) -> Value:
    """A product of matrices, with leading axes lined up from the right, or by an equation."""
    if any(at.rank(n) is None for n in range(len(at.values))):
        return Shared() if all(isinstance(v, Shared) for v in at.values) else at.mixed("unknown")
    return contracted(at, *letters(at))


def letters(at: At) -> tuple[list[str], str]:
    """A letter for each axis of each input, and those of the output."""
    if at.op.type == "Einsum":
        return _letters_of_an_equation(at)
    ranks = [at.rank(n) or 0 for n in (0, 1)]
    turned = ("transpose_a", "transpose_b") if at.op.type == "MatMul" else ("adj_x", "adj_y")
    lead = "abcdefgh"[: max(r - 2 for r in ranks)]
    one, other = ("ji" if at.attr(turned[0]) else "ij"), ("kj" if at.attr(turned[1]) else "jk")
    return [lead[len(lead) - (r - 2) :] + end for r, end in zip(ranks, (one, other))], lead + "ik"


def _letters_of_an_equation(at: At) -> tuple[list[str], str]:
    left, output = at.attr("equation").decode().replace(" ", "").split("->")
    terms = left.split(",")
    dots = max((at.rank(n) or 0) - len(t.replace("...", "")) for n, t in enumerate(terms))
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in left][:dots]
    return [_spelled(t, (at.rank(n) or 0), free) for n, t in enumerate(terms)], output.replace("...", "".join(free))


def _spelled(term: str, rank: int, free: list[str]) -> str:
    missing = rank - len(term.replace("...", ""))
    return term.replace("...", "".join(free[len(free) - missing :]) if missing else "")


@rule("Conv2D", "DepthwiseConv2dNative")
def convolution(at: At) -> Value:
    """Each image by itself, filtered by shared weights."""
    return _each_image(at, 0, shared=(1,))


@rule("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput", sizes=True)
def convolution_gradient(at: At) -> Value:
    """The gradient by each image; the given shape has the batch as its first axis."""
    if not isinstance(at.values[0], (Shared, Sized)):
        return at.mixed("length")
    numbers = at.numbers(0)
    found = _each_image(at, 2, shared=(1,))
    if isinstance(found, ByExample) and numbers is not None and None not in numbers.sizes:
        return at.give(found, numbers.sizes)
    return found


@rule("MaxPool", "AvgPool")
def pooling(at: At) -> Value:
    """Within each image; not over the batch or, by windows on the first axis, over several."""
    return at.mixed() if at.attr("ksize")[0] != 1 else _each_image(at, 0)


@rule("MaxPoolGrad")
def max_pooling_gradient(at: At) -> Value:
    """The gradient at the place of the largest entry."""
    found = [_each_image(at, n) for n in range(3)]
    same = at.attr("ksize")[0] == 1 and all(isinstance(v, ByExample) and v == found[0] for v in found)
    if same:
        return at.give(found[0], at.sizes(0))
    return Shared() if all(isinstance(v, Shared) for v in at.values) else at.mixed()


@rule("AvgPoolGrad", sizes=True)
def average_pooling_gradient(at: At) -> Value:
    """The gradient spread over the window."""
    numbers, found = at.numbers(0), _each_image(at, 1)
    if not isinstance(found, ByExample):
        return found
    if numbers is None or None in numbers.sizes or at.attr("ksize")[0] != 1:
        return at.mixed("unknown")
    return at.give(found, numbers.sizes)


def _each_image(at: At, number: int, shared: Sequence[int] | range = ()) -> Value:
    value = at.values[number]
    if not all(isinstance(at.values[n], Shared) for n in shared):
        return at.mixed()
    if isinstance(value, Shared):
        return Shared()
    return ByExample(0, *value.layout) if isinstance(value, ByExample) and value.axis == 0 else at.mixed()
