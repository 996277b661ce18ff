"""A search for data that breaks the clip: removal, as computed in float32, must stay within C for whatever it finds,
under both rules for weights.

Each kind of factor is clipped and summed by the code that trains, in one traced function; what differs from
try to try is
the data: magnitudes from 1e-30 to 1e30, positions and candidates that cancel to the last bit, ids that repeat, examples
that are copies of one another, ties of rounding, infinities, 1 to 4,096 examples. Hypothesis draws; a climber
keeps what came closest to breaking the clip, and changes a little of it.

`TFDP_REC_TRIES=100000 pytest tests/clipping/test_adversary.py -m slow -s` searches for a night and says what it found.
"""

import functools
import os

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_rec.clipping import Outer, PerExample, Rows, Scores
from tfdp_rec.core.sensitivity import cross_terms, engine, weights
from tfdp_rec.core.sensitivity.factors import BagRows

ROWS, WIDTH, CANDIDATES = 5, 3, 4
RULES = [weights.clip_weight, weights.normalise_weight]
EVERY_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
TRIES = int(os.environ.get("TFDP_REC_TRIES", "3000"))


def as_is(matrix):
    return matrix


# What an example's data are, by kind: name -> shape of one example; "ids" are drawn from few rows.
SHAPES = {
    "dense": {"x": (4,), "g": (WIDTH,)},
    "positions, formed": {"x": (3, 2), "g": (3, 2)},
    "positions, Gram": {"x": (2, 12), "g": (2, 9)},
    "rows": {"ids": (4,), "r": (4, WIDTH)},
    "one row": {"ids": (1,), "r": (1, WIDTH)},
    "a bag": {"ids": (4,), "k": (4,), "q": (WIDTH,)},
    "a bag and scores": {"ids": (3,), "k": (3,), "p": (WIDTH,), "d": (CANDIDATES,), "q": (WIDTH,)},
    "scores": {"d": (CANDIDATES,), "q": (WIDTH,)},
    "rows and scores": {"ids": (2,), "r": (2, WIDTH), "d": (CANDIDATES,), "q": (WIDTH,)},
    "two scores": {"d": (CANDIDATES,), "q": (WIDTH,), "c": (CANDIDATES,), "p": (WIDTH,)},
    "rows and logits": {"ids": (2,), "r": (2, WIDTH), "x": (2, ROWS), "g": (2, WIDTH)},
    "formed": {"v": (3, 2)},
    "formed twice": {"x": (2, 3), "g": (2, 2), "v": (3, 2)},
    "a model": {"x": (4,), "g": (WIDTH,), "b": (WIDTH,), "ids": (3,), "r": (3, WIDTH)},
}


def variables_of(kind, a):
    """Variable -> its factors."""
    negatives = tf.constant([1, 1, 4, 0])  # one drawn twice
    table = [ROWS, WIDTH]
    return {
        "dense": lambda: {"v": [Outer(a["x"], a["g"], as_is)]},
        "positions, formed": lambda: {"v": [Outer(a["x"], a["g"], as_is)]},
        "positions, Gram": lambda: {"v": [Outer(a["x"], a["g"], as_is)]},
        "rows": lambda: {"v": [Rows(a["ids"], a["r"], table)]},
        "one row": lambda: {"v": [Rows(a["ids"], a["r"], table)]},
        "a bag": lambda: {"v": [BagRows(a["ids"], a["k"], a["q"], table)]},
        "a bag and scores": lambda: {
            "v": [BagRows(a["ids"], a["k"], a["p"], table), Scores(negatives, a["d"], a["q"], table)]
        },
        "scores": lambda: {"v": [Scores(negatives, a["d"], a["q"], table)]},
        "rows and scores": lambda: {
            "v": [Rows(a["ids"], a["r"], table), Scores(negatives, a["d"], a["q"], table)]
        },
        "two scores": lambda: {
            "v": [Scores(negatives, a["d"], a["q"], table), Scores(negatives[::-1], a["c"], a["p"], table)]
        },
        "rows and logits": lambda: {"v": [Rows(a["ids"], a["r"], table), Outer(a["x"], a["g"], as_is)]},
        "formed": lambda: {"v": [PerExample(a["v"])]},
        "formed twice": lambda: {"v": [Outer(a["x"], a["g"], as_is), PerExample(a["v"])]},
        "a model": lambda: {
            "kernel": [Outer(a["x"], a["g"], as_is)], "bias": [PerExample(a["b"])],
            "table": [Rows(a["ids"], a["r"], table)],
        },
    }[kind]()  # fmt: skip


@functools.cache
def clipped_sum_of(kind):
    """(arrays of a batch, whether weights are normalised) -> its clipped sum at C = 1, as training would compute it."""
    types = {name: tf.int64 if name == "ids" else tf.float32 for name in SHAPES[kind]}
    spec = {name: tf.TensorSpec([None, *shape], types[name]) for name, shape in SHAPES[kind].items()}

    @tf.function(input_signature=[spec, tf.TensorSpec([], tf.bool)], autograph=False)
    def compute(arrays, normalised):
        rule = lambda *given: tf.where(normalised, weights.normalise_weight(*given), weights.clip_weight(*given))  # noqa: E731
        collected = {path: cross_terms.merge(own) for path, own in variables_of(kind, arrays).items()}
        size = tf.shape(next(iter(arrays.values())))[0]
        clipped = engine.clip(collected, tf.zeros([size]), tf.constant(1.0), rule=rule)
        return [tf.reshape(tf.convert_to_tensor(g), [-1]) for g in clipped.gradients.values()]

    return compute


def removal(kind, arrays, out, rule=weights.clip_weight):
    compute = functools.partial(clipped_sum_of(kind), normalised=rule is weights.normalise_weight)
    whole = np.concatenate(compute({k: tf.constant(v) for k, v in arrays.items()})).astype(np.float64)
    fewer = {k: tf.constant(np.delete(v, out, axis=0)) for k, v in arrays.items()}
    found = np.linalg.norm(whole - np.concatenate(compute(fewer)).astype(np.float64))
    assert np.isfinite(found)
    return found


# Data meant to break it.


def _numbers(rng, shape):
    """float32 numbers of one of several characters."""
    character = rng.integers(8)
    ordinary = rng.normal(size=shape)
    if character == 0:
        return ordinary
    if character == 1:
        return ordinary * 10.0 ** rng.uniform(-30, 30)
    if character == 2:
        return ordinary * 10.0 ** rng.uniform(-30, 30, size=shape)
    if character == 3:
        return ordinary * 10.0 ** rng.uniform(-30, 30, size=(shape[0], *[1] * (len(shape) - 1)))
    if character == 4:
        return np.sign(ordinary) * 10.0 ** rng.choice([-19, 0, 12, 18])
    if character == 5:  # ties: odd multiples of half a last place
        return (2 * rng.integers(-(2**11), 2**11, size=shape) + 1) * 2.0 ** rng.integers(-30, -8)
    if character == 6:  # everybody the same
        return np.broadcast_to(rng.normal(size=(1, *shape[1:])), shape) * 10.0 ** rng.uniform(-3, 3)
    return np.where(rng.random(shape) < 0.02, rng.choice([np.inf, np.nan, 3e38, 1e-45]), ordinary)


def _tampered(rng, arrays, examples):
    """The same data with parts of some examples made to cancel, to the last bit or nearly so, and ids made equal."""
    arrays = {k: v.copy() for k, v in arrays.items()}
    how_near = rng.choice([0.0, 2.0**-23, 1e-5, 0.5])
    for b in examples:
        if "ids" in arrays:
            arrays["ids"][b] = arrays["ids"][b, 0]
        for name, value in arrays.items():
            if name != "ids" and value.ndim > 2 and value.shape[1] > 1 and rng.random() < 0.8:
                sign = -1 if name in ("g", "r") else 1
                value[b, 1] = sign * value[b, 0] * (1 + how_near)
        for one, other in (("d", "c"), ("q", "p")):
            if other in arrays and rng.random() < 0.8:
                copied = -arrays[one][b] if one == "q" else arrays[one][b][::-1]  # candidates stand the other way round
                arrays[other][b] = copied * (1 + how_near)
        if "k" in arrays and rng.random() < 0.8:
            arrays["k"][b, 1] = -arrays["k"][b, 0] * (1 + how_near)
        if "d" in arrays and rng.random() < 0.8:
            arrays["d"][b, 1] = -arrays["d"][b, 0] * (1 + how_near)
    return arrays


def draw(kind, seed, size):
    """A batch of the kind: `size` examples."""
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        arrays = {
            name: rng.integers(0, ROWS, size=(size, *shape)) if name == "ids" else _numbers(rng, (size, *shape))
            for name, shape in SHAPES[kind].items()
        }
        arrays = {k: v if k == "ids" else v.astype("float32") for k, v in arrays.items()}
        if rng.random() < 0.6:
            arrays = _tampered(rng, arrays, rng.integers(0, size, size=rng.integers(1, 4)))
    if rng.random() < 0.2:
        coarse = lambda v: np.asarray(tf.cast(tf.cast(v, tf.bfloat16), tf.float32))  # noqa: E731
        arrays = {k: v if k == "ids" else coarse(v) for k, v in arrays.items()}
    return arrays


def mutate(kind, arrays, out, rng):
    """A little of it changed: a number scaled, negated or moved by a last place; an example copied; parts made
    to cancel.
    """
    arrays = {k: v.copy() for k, v in arrays.items()}
    name = rng.choice([k for k in arrays])
    value, size = arrays[name], len(arrays[name])
    b = out if rng.random() < 0.5 else rng.integers(size)
    if name == "ids":
        value[b] = rng.integers(0, ROWS, size=value[b].shape)
        return arrays
    what, place = rng.integers(6), (b, *(rng.integers(n) for n in value.shape[1:]))
    with np.errstate(over="ignore", invalid="ignore"):
        if what == 0:
            value[b] *= np.float32(10.0 ** rng.uniform(-4, 4))
        elif what == 1:
            value[place] *= np.float32(rng.choice([-1, 2, 0.5, 1e6, 1e-6]))
        elif what == 2:
            value[place] = np.nextafter(value[place], np.float32(rng.choice([-np.inf, np.inf])))
        elif what == 3:
            other = rng.integers(size)
            for k in arrays:
                arrays[k][b] = arrays[k][other]
        elif what == 4:
            return _tampered(rng, arrays, [b])
        else:
            value[b] = -value[b]
    return arrays


def climb(kind, seed, size, steps, rule=weights.clip_weight):
    """The largest removal met on the way up from one batch."""
    rng = np.random.default_rng(seed)
    arrays, out = draw(kind, seed, size), int(rng.integers(size))
    highest = removal(kind, arrays, out, rule)
    for _ in range(steps):
        changed = mutate(kind, arrays, out, rng)
        found = removal(kind, changed, out, rule)
        if found >= highest:
            arrays, highest = changed, found
    return highest


@pytest.mark.parametrize("kind", SHAPES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32), size=st.sampled_from([1, 2, 3, 5, 17, 64]), place=st.integers(0, 63),
    rule=st.sampled_from(RULES),
)  # fmt: skip
def test_drawn(kind, seed, size, place, rule):
    assert removal(kind, draw(kind, seed, size), place % size, rule) <= 1


@pytest.mark.parametrize("kind", SHAPES)
def test_climbed(kind):
    assert max(climb(kind, seed, 6, 20, rule) for seed, rule in enumerate(RULES)) <= 1


@EVERY_RULE
@pytest.mark.parametrize("kind", ["dense", "rows", "a bag", "formed"])
@pytest.mark.parametrize("size", [1024, 4096])
def test_drawn_of_many(kind, size, rule):
    """Large batches are summed in pieces, or in float64."""
    assert max(removal(kind, draw(kind, seed, size), seed, rule) for seed in range(4)) <= 1


@EVERY_RULE
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e-2, 1.0, 1e18])
@pytest.mark.parametrize("kind", ["positions, formed", "positions, Gram", "rows", "a bag", "two scores"])
def test_parts_that_cancel_at_every_size(kind, scale, rule):
    rng = np.random.default_rng(7)
    for size in (2, 33):
        arrays = {
            name: rng.integers(0, ROWS, [size, *shape]) if name == "ids" else rng.normal(size=[size, *shape])
            for name, shape in SHAPES[kind].items()
        }
        arrays = {k: v if k == "ids" else (v * scale**0.5).astype("float32") for k, v in arrays.items()}
        assert removal(kind, _tampered(rng, arrays, range(size)), 0, rule) <= 1


@pytest.mark.slow
def test_a_night():
    """TFDP_REC_TRIES batches (3,000 by default), half of them drawn and half climbed to, all kinds, up to
    4,096 examples.
    """
    rng, highest, tries = np.random.default_rng(11), {}, 0
    while tries < TRIES:
        kind = str(rng.choice(list(SHAPES)))
        size = int(rng.choice([1, 2, 3, 8, 33, 257, 1024, 4096], p=[0.1, 0.2, 0.2, 0.2, 0.1, 0.1, 0.06, 0.04]))
        seed, steps, rule = int(rng.integers(2**62)), 20, RULES[rng.integers(2)]
        found = climb(kind, seed, size, steps, rule)
        assert found <= 1, (kind, seed, size, found)
        highest[kind] = max(found, highest.get(kind, 0.0))
        tries += steps + 1
    print(f"\n{tries} tries; largest removal / C: " + ", ".join(f"{k} {v:.5f}" for k, v in sorted(highest.items())))
