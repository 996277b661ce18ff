"""Products of matrices and convolutions.

A product is judged as an `einsum`: each axis has a letter. The examples' axis must have the same letter in all terms by
example and in the output, and no shared tensor may have it, except with length one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdp_rec.core.sensitivity.independence.reading import At, rule
from tfdp_rec.core.sensitivity.independence.sizes import ONE, Size
from tfdp_rec.core.sensitivity.independence.values import ByExample, Shared, Value


def contract(at: At, terms: Sequence[str], output: str) -> Value:
    """The product of inputs with axes of the letters of `terms`, summed over letters that `output` lacks."""
    owners = [(v, term) for v, term in zip(at.values, terms) if isinstance(v, ByExample)]
    if any(not isinstance(v, (ByExample, Shared)) for v in at.values):
        return at.mixed("unknown")
    if not owners:
        return Shared()
    first, term = owners[0]
    letter = term[first.axis]
    letters_of_examples = {t[v.axis] for v, t in owners}
    if len(letters_of_examples) > 1 and letters_of_examples <= set(output):
        return at.mixed("in batch")
    if any(t[v.axis] != letter or v.inner != first.inner for v, t in owners):
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
    return at.give(first.move_to(output.index(letter)), [sizes[name] for name in output])


@rule("MatMul", "BatchMatMulV2", "Einsum")
def product(at: At) -> Value:
    """A product of matrices, with leading axes lined up from the right, or by an equation."""
    if any(at.rank(n) is None for n in range(len(at.values))):
        return Shared() if all(isinstance(v, Shared) for v in at.values) else at.mixed("unknown")
    return contract(at, *letters(at))


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
    return [_spell_out(t, (at.rank(n) or 0), free) for n, t in enumerate(terms)], output.replace("...", "".join(free))


def _spell_out(term: str, rank: int, free: list[str]) -> str:
    missing = rank - len(term.replace("...", ""))
    return term.replace("...", "".join(free[len(free) - missing :]) if missing else "")


@rule("Conv2D")
def convolution(at: At) -> Value:
    """Each sequence or image by itself, filtered by shared weights."""
    value, weights = at.values
    if not isinstance(weights, Shared) or not isinstance(value, (Shared, ByExample)):
        return at.mixed()
    return at.mixed() if isinstance(value, ByExample) and value.axis else value


@rule("Conv2DBackpropInput", sizes=True, arguments=(0,))
def convolution_gradient(at: At) -> Value:
    """The gradient by each sequence or image; the given shape has the batch as its first axis."""
    _, weights, value = at.values
    if not isinstance(weights, Shared) or not isinstance(value, (Shared, ByExample)):
        return at.mixed()
    if isinstance(value, Shared) and isinstance(at.values[0], Shared):
        return Shared()
    if not isinstance(value, ByExample) or value.axis:
        return at.mixed()
    lengths = at.entries(0) or ()
    if len(lengths) != 4 or any(length is None or length.has_batch for length in lengths[1:]):
        return at.mixed("size")
    return at.give(value, lengths)
