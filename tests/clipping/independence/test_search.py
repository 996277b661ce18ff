"""A search for programs that the reading takes for independent and that are not.

A program applies a few operations, drawn with their arguments, to what there is: tensors by example, shared ones, and
what came out before. All axes have four entries and the batch has four examples, so that what mixes them up fits
together. Every output, and every gradient, that is claimed to be an example's own is held against brute force.

`TFDP_REC_PROGRAMS=100000 pytest tests/clipping/independence/test_search.py -m slow -s` searches for a night.
"""

import os

import numpy as np
import pytest
import tensorflow as tf
from brute import holds

from tfdp_rec.clipping.independence import ByExample

PROGRAMS = int(os.environ.get("TFDP_REC_PROGRAMS", "2000"))
FIRST_SEED = int(os.environ.get("TFDP_REC_FIRST_PROGRAM", "0"))
N = 4
WEIGHTS = np.random.default_rng(1).normal(size=[N, N]).astype("float32")
ROW = np.arange(1, N + 1, dtype="float32")
UNARY = (tf.sin, tf.exp, tf.abs, tf.sign, tf.nn.relu, tf.round, tf.zeros_like, tf.ones_like, tf.stop_gradient)
BINARY = (tf.add, tf.multiply, tf.maximum, tf.subtract, tf.math.floordiv, tf.math.divide_no_nan,
          tf.math.squared_difference)  # fmt: skip
REDUCTIONS = (tf.reduce_sum, tf.reduce_max, tf.reduce_mean, tf.reduce_prod, tf.reduce_min, tf.reduce_logsumexp)
SEGMENTS = (tf.math.unsorted_segment_sum, tf.math.unsorted_segment_max, tf.math.unsorted_segment_mean)
EQUATIONS = ("ij,jk->ik", "ij,kj->ik", "ij,ij->i", "ij,ij->j", "bij,jk->bik", "bij,bjk->bik", "bij,bij->b",
             "bij,bik->jk", "bij,cij->bc", "ij,kj->ikj", "bij,bi->bj", "bij,ij->bi", "bij->bji", "bij->jbi", "ij->ji",
             "bij->b")  # fmt: skip
SHAPES = ("[-1]", "[-1, N]", "[N, -1]", "[B, -1]", "[-1, B]", "[B, N, -1]", "[N, B, -1]", "[-1, N, N]",
          "[-1, 2, 2]", "[B * N, -1]", "[2, -1]", "[-1, 2]", "[-1, 1]", "[1, -1]", "[B, -1, N]", "[-1, B, N]",
          "[N * N, -1]", "[-1, B * N]", "[B, 1, -1]")  # fmt: skip


class Program:
    """Operations drawn from a seed: the same ones at every call.

    Args:
        seed: which.
        length: how many operations are tried.
    """

    def __init__(self, seed, length=5):
        self.seed, self.length = seed, length

    def __call__(self, x, s, ids, weights, row):
        self.rng, self.said = np.random.default_rng(self.seed), []
        self.b = tf.shape(x)[0]
        self.floats = [row, weights, tf.transpose(s, [1, 0, 2]), tf.transpose(x), x[:, 1], s, x]
        self.whole = [tf.range(self.b), ids, ids[:, 0]]
        made = []
        for _ in range(self.length):
            kind = self.rng.choice(KINDS)
            try:
                several = tf.nest.flatten(kind(self))
            except (ValueError, TypeError, IndexError, tf.errors.InvalidArgumentError):
                continue  # does not fit together
            self.said.append(kind.__name__)
            for tensor in several:
                (self.floats if tensor.dtype.is_floating else self.whole).append(tensor)
                made.append(tensor)
        return made or [tf.sin(x)]

    # What operations are given. Late tensors are likelier, so that programs get deep.

    def one_of(self, things):
        return things[self.rng.choice(len(things))]

    def late(self, tensors):
        weights = 1.5 ** np.arange(len(tensors))
        return tensors[self.rng.choice(len(tensors), p=weights / weights.sum())]

    @property
    def float(self):
        return self.late(self.floats)

    @property
    def int(self):
        return self.late(self.whole)

    @property
    def any(self):
        return self.late(self.floats + self.whole)

    def axis(self, tensor):
        return int(self.rng.integers(-1, len(tensor.shape)))

    def places(self, of=None):
        """Whole numbers from 0 to 3; one for each row of a tensor, if there is one."""
        if of is not None and self.rng.integers(4):
            flat = tf.reshape(of, [tf.shape(of)[0], -1])[:, 0]
            return self.one_of((tf.range(tf.shape(of)[0]), tf.math.floormod(tf.cast(flat, tf.int32), N)))
        kind = self.rng.integers(4)
        if kind == 0:
            return tf.constant(self.rng.integers(0, N, self.rng.integers(1, 5)), tf.int32)
        if kind == 1:
            return tf.math.floormod(tf.cast(self.float, tf.int32), N)
        return tf.math.floormod(self.int, N) if kind == 2 else self.int


def entry_by_entry(p):
    return p.one_of(UNARY)(p.float)


def two_together(p):
    return p.one_of(BINARY)(p.float, p.float)


def two_with_another_axis(p):
    a, b = p.float, p.float
    return p.one_of(BINARY)(tf.expand_dims(a, p.axis(a)), b)


def whole_numbers_together(p):
    return p.one_of((tf.add, tf.multiply, tf.maximum, tf.math.floormod))(p.int, p.int)


def chosen(p):
    a, b = p.float, p.float
    return tf.where(a > b, a, p.float)


def summed(p):
    a = p.float
    axes = [int(n) for n in p.rng.permutation(len(a.shape))[: p.rng.integers(1, len(a.shape) + 1)]]
    return p.one_of(REDUCTIONS)(a, axes, keepdims=bool(p.rng.integers(2)))


def counted(p):
    return p.one_of((tf.reduce_sum, tf.reduce_max))(p.int, int(p.rng.integers(2)))


def transposed(p):
    a = p.any
    return tf.transpose(a, p.rng.permutation(len(a.shape)))


def reshaped(p):
    return tf.reshape(p.any, eval(p.one_of(SHAPES), {"B": p.b, "N": N}))


def shaped_like(p):
    return tf.reshape(p.any, tf.shape(p.any))


def broadcast(p):
    return tf.broadcast_to(p.float, tf.shape(p.float))


def looked_up(p):
    a = p.any
    return tf.gather(a, p.places(), axis=p.axis(a))


def looked_up_by_example(p):
    return tf.gather(p.any, p.places(), batch_dims=1, axis=1)


def looked_up_by_number(p):
    a = p.any
    return tf.gather_nd(a, tf.stack([tf.range(p.b), p.places(a)], 1))


def looked_up_anywhere(p):
    return tf.gather_nd(p.any, p.places()[..., None])


def scattered(p):
    a = p.float
    return tf.scatter_nd(p.places(a)[..., None], a, [p.one_of((N, p.b)), *a.shape[1:]])


def written_over(p):
    a = p.float
    return tf.tensor_scatter_nd_update(p.float, p.places(a)[..., None], a)


def added_to(p):
    a = p.float
    return tf.tensor_scatter_nd_add(a, tf.stack([tf.range(p.b), p.places(a)], 1), tf.reduce_sum(a, 1))


def put_together(p):
    a = p.float
    return tf.concat([a, p.float], p.axis(a))


def stacked(p):
    a = p.float
    return tf.stack([a, p.float], p.axis(a))


def pulled_apart(p):
    a = p.any
    return tf.split(a, 2, p.axis(a))


def tiled(p):
    a = p.any
    return tf.tile(a, p.rng.integers(1, 3, len(a.shape)))


def tiled_by_the_batch(p):
    return tf.tile(p.any[None], [p.b, *[1] * len(p.any.shape)])


def repeated(p):
    a = p.any
    return tf.repeat(a, int(p.rng.integers(1, 3)), axis=p.axis(a))


def padded(p):
    a = p.float
    return tf.pad(a, p.rng.integers(0, 2, [len(a.shape), 2]), p.one_of(("CONSTANT", "REFLECT")))


def sliced(p):
    a = p.any
    cut = [p.one_of((slice(None), slice(1, None), slice(None, -1), slice(None, None, -1), 0, -1, None, slice(None, p.b),
                     slice(0, None, 2))) for _ in a.shape]  # fmt: skip
    return a[tuple(cut)]


def a_block(p):
    a = p.any
    sizes = [p.one_of((-1, 2, N, p.b)) for _ in a.shape]
    return tf.slice(a, [0] * len(a.shape), sizes)


def reversed_(p):
    a = p.any
    return tf.reverse(a, [p.axis(a)])


def rolled(p):
    a = p.any
    return tf.roll(a, p.one_of((1, 2, N)), p.axis(a))


def accumulated(p):
    a = p.float
    return tf.cumsum(a, p.axis(a), exclusive=bool(p.rng.integers(2)), reverse=bool(p.rng.integers(2)))


def sorted_(p):
    a = p.float
    return tf.sort(a, p.axis(a))


def sorting(p):
    a = p.float
    return tf.argsort(a, p.axis(a))


def best(p):
    return list(tf.math.top_k(p.float, 2))


def arg(p):
    a = p.float
    return tf.argmax(a, p.axis(a), output_type=tf.int32)


def multiplied(p):
    turned, other = map(bool, p.rng.integers(0, 2, 2))
    return tf.matmul(p.float, p.one_of((p.float, p.floats[1])), transpose_a=turned, transpose_b=other)


def contracted(p):
    equation = p.one_of(EQUATIONS)
    return tf.einsum(equation, *[p.float for _ in equation.split("->")[0].split(",")])


def tensordotted(p):
    return tf.tensordot(p.float, p.float, p.one_of((0, 1, [[0], [0]], [[1], [0]], [[0], [1]])))


def normalised(p):
    a = p.float
    return p.one_of((tf.nn.softmax, tf.nn.log_softmax, tf.math.l2_normalize))(a, p.axis(a))


def one_hot(p):
    return tf.one_hot(p.places(), p.one_of((N, p.b)), axis=int(p.rng.integers(-1, 2)))


def segments(p):
    a = p.float
    return p.one_of(SEGMENTS)(a, p.places(a), p.one_of((N, p.b)))


def diagonals(p):
    return p.one_of((tf.linalg.diag, tf.linalg.diag_part, lambda a: tf.linalg.band_part(a, 0, -1)))(p.float)


def squeezed(p):
    return tf.squeeze(tf.expand_dims(p.any, int(p.rng.integers(2))), [int(p.rng.integers(2))])


def blocks(p):
    return p.one_of((tf.space_to_batch, tf.batch_to_space))(p.float[..., None], [2], [[0, 0]])


def convolved(p):
    return tf.nn.conv1d(p.float, tf.ones([2, N, 3]), 1, "SAME")


def found_among(p):
    return tf.searchsorted(tf.sort(p.float), p.float)


def branched(p):
    a, test = p.float, p.one_of((p.float, p.int))
    return tf.cond(tf.reduce_sum(test) > 0, lambda: tf.sin(a), lambda: -a)


def looped(p):
    a, times = p.float, p.one_of((3, p.b))
    return tf.while_loop(lambda i, y: i < times, lambda i, y: (i + 1, tf.roll(y, 1, -1) * 0.5), (0, a))[1]


def mapped(p):
    return tf.map_fn(lambda y: tf.cumsum(y, 0), p.float)


def scanned(p):
    return tf.scan(lambda a, y: a * 0.5 + y, p.float)


def numbers_of_the_batch(p):
    return tf.cast(p.one_of((tf.shape, tf.size))(p.float), tf.float32)


def as_numbers(p):
    return tf.cast(p.int, tf.float32)


KINDS = tuple(f for f in list(globals().values()) if callable(f) and getattr(f, "__code__", None) is not None
              and f.__code__.co_varnames[:1] == ("p",))  # fmt: skip


def examples(seed):
    rng = np.random.default_rng([seed, 7])
    return (
        rng.normal(size=[N, N]).astype("float32"),
        rng.normal(size=[N, N, N]).astype("float32"),
        rng.integers(0, N, [N, N]).astype("int32"),
    )


def backward_of(program):
    """Gradients of all that a program makes."""

    def gradients(x, s, ids, weights, row):
        with tf.GradientTape() as tape:
            tape.watch([x, s])
            made = [o for o in program(x, s, ids, weights, row) if o.dtype.is_floating]
        try:
            found = tape.gradient(made, [x, s], [tf.cos(o) for o in made]) if made else []
        except (ValueError, LookupError):
            found = []  # TensorFlow has no such gradient, or none of that shape
        return [tf.convert_to_tensor(g) for g in found if g is not None] or [tf.sin(x)]

    return gradients


def tried(function, seed):
    """The values claimed of a function, all of which hold; None if it cannot be run on fewer examples."""
    try:
        return holds(function, *examples(seed), shared=(WEIGHTS, ROW))
    except (tf.errors.OpError, LookupError):
        return None  # TensorFlow stops: at a shape that does not fit, an index that is none, a gradient that is missing


def search(seeds):
    """How many programs ran, and how many outputs were claimed to be an example's own."""
    ran = claimed = 0
    for seed in seeds:
        for function in (Program(seed), backward_of(Program(seed))):
            try:
                values = tried(function, seed)
            except AssertionError as wrong:
                program = Program(seed)
                given = map(tf.constant, (*examples(seed), WEIGHTS, ROW))
                tf.function(program, autograph=False).get_concrete_function(*given)
                raise AssertionError(f"program {seed}, {program.said}: {wrong}") from wrong
            ran += values is not None
            claimed += sum(isinstance(v, ByExample) for v in values or [])
    return ran, claimed


@pytest.fixture(autouse=True)
def as_written():
    """Programs that cannot run stop: TensorFlow's optimizer may remove what stops them, and then folds ones_like(x) to
    the length that a faulty operation on it asks for. Constants alone are folded so, to what no data decide.
    """
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


def test_no_program_of_a_few_breaks_a_claim():
    ran, claimed = search(range(60))
    assert ran > 30 and claimed > 30


@pytest.mark.slow
def test_no_program_breaks_a_claim():
    ran, claimed = search(range(FIRST_SEED, FIRST_SEED + PROGRAMS))
    print(f"\n{ran} functions ran, {claimed} outputs were claimed to be by example")
    assert ran > PROGRAMS / 2
