"""Programs drawn at random: a few operations, with their arguments, on what there is.

There are tensors by example, shared ones, seeds, and what came out before. All axes have four entries and the batch
has four examples, so that what mixes them up fits together. Bodies of functions, branches and loops are programs
themselves. Each program has a few kinds of operations to choose from, so that the rare ones meet: drawn at random, or
one of `FAMILIES`.
"""

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfdp_rec.core.sensitivity.independence import ByExample, Shared, known_operations
from tfdp_rec.core.sensitivity.independence.values import Seed
from tfdp_rec.core.sensitivity.own_rows import own_rows

N = 4
WEIGHTS = np.random.default_rng(1).normal(size=[N, N])
ROW = np.arange(1.0, N + 1)
LEAVES = (
    (tf.TensorSpec([None, N], tf.float64), ByExample(0)),
    (tf.TensorSpec([None, N, N], tf.float64), ByExample(0)),
    (tf.TensorSpec([None, N], tf.int32), ByExample(0)),
    (tf.TensorSpec([None, N], tf.int32), ByExample(0)),
    (tf.TensorSpec([None, N], tf.uint8), ByExample(0)),
    (tf.TensorSpec([N, N], tf.float64), Shared()),
    (tf.TensorSpec([N], tf.float64), Shared()),
    (tf.TensorSpec([2], tf.int64), Seed(frozenset({"a draw"}))),
    (tf.TensorSpec([2], tf.int64), Seed(frozenset({"another draw"}))),
)
UNARY = (tf.sin, tf.exp, tf.abs, tf.sign, tf.nn.relu, tf.round, tf.zeros_like, tf.ones_like, tf.stop_gradient)
BINARY = (tf.add, tf.multiply, tf.maximum, tf.subtract, tf.math.floordiv, tf.math.divide_no_nan,
          tf.math.squared_difference)  # fmt: skip
REDUCTIONS = (tf.reduce_sum, tf.reduce_max, tf.reduce_mean, tf.reduce_prod, tf.reduce_min, tf.reduce_logsumexp)
SEGMENTS = (tf.math.unsorted_segment_sum, tf.math.unsorted_segment_max, tf.math.unsorted_segment_mean)
EQUATIONS = ("ij,jk->ik", "ij,kj->ik", "ij,ij->i", "ij,ij->j", "bij,jk->bik", "bij,bjk->bik", "bij,bij->b",
             "bij,bik->jk", "bij,cij->bc", "ij,kj->ikj", "bij,bi->bj", "bij,ij->bi", "bij->bji", "bij->jbi", "ij->ji",
             "bij->b")  # fmt: skip
TYPES = (tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.bool, tf.bfloat16, tf.float16, tf.float32, tf.float64)
FAILURES = (ValueError, TypeError, IndexError, LookupError, AttributeError, NotImplementedError, tf.errors.OpError)
DEPTH = 2  # of bodies within bodies


def batch(size, rng):
    """Arguments of a program: entries of the second array of whole numbers are often out of range."""
    return [
        rng.normal(size=[size, N]),
        rng.normal(size=[size, N, N]),
        rng.integers(0, N, [size, N], np.int32),
        rng.integers(-2, 3 * N, [size, N], np.int32),
        rng.integers(0, 256, [size, N], np.uint8),
        WEIGHTS,
        ROW,
        rng.integers(0, 1 << 40, [2]),
        rng.integers(0, 1 << 40, [2]),
    ]


class Program:
    """Operations drawn from a seed: the same ones at every call.

    Args:
        seed: which.
        family: kinds of operations it is made of; without it, ten that the seed draws.
        length: how many operations are tried.
        depth: within how many bodies it stands.
    """

    def __init__(self, seed, family=None, length=7, depth=0):
        self.seed, self.family, self.length, self.depth = seed, family, length, depth

    def __call__(self, x, s, ids, wild, bytes_, weights, row, *seeds):
        made = self.made([row, weights, x, s, ids, wild, bytes_], seeds, tf.shape(x)[0])
        floats = [t for t in made if t.dtype == tf.float64]
        try:
            with own_rows():
                made += [g for g in tf.gradients(floats, [x, s], [tf.cos(t) for t in floats]) if g is not None]
        except FAILURES:
            pass  # TensorFlow has no such gradient, or none of that shape
        return [tf.identity(t) for t in made] or [tf.sin(x)]

    def made(self, given, seeds, size):
        """What its operations make of tensors."""
        self.rng, self.said, self.seeds, self.b = np.random.default_rng(self.seed), [], seeds, size
        self.floats, self.whole, self.others, made = [], [tf.range(self.b)], [], []
        for tensor in given:
            self.take(tensor)
        kinds = self.family or self.rng.choice(np.array(KINDS), 10, replace=False)
        for _ in range(self.length):
            kind = self.rng.choice(kinds)
            try:
                several = tf.nest.flatten(kind(self))
            except FAILURES:
                continue  # does not fit together
            self.said.append(kind.__name__)
            for tensor in several:
                if isinstance(tensor, tf.Tensor) and tensor.dtype not in (tf.variant, tf.resource):
                    self.take(tensor)
                    made.append(tensor)
        return made

    def take(self, tensor):
        """Has later operations use a tensor."""
        kind = {tf.float64: self.floats, tf.int32: self.whole}.get(tensor.dtype, self.others)
        kind.append(tensor)

    def body(self):
        """A program of its own, as a function of tensors to one of the type of the first."""
        seed, outer = int(self.rng.integers(1 << 30)), [*self.floats[:2]]
        if self.depth == DEPTH:
            raise ValueError("deep enough")

        def inner(*given):
            program = Program(seed, self.family, 3, self.depth + 1)
            made = program.made([*outer, *given], self.seeds, tf.shape(given[0])[0])
            fits = [t for t in made if t.dtype == given[0].dtype]
            return fits[-1] if fits else tf.identity(given[0])

        return inner

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
        return self.late(self.one_of([pool for pool in (self.floats, self.floats, self.whole, self.others) if pool]))

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

    def count(self):
        """A length: a number, one of a tensor's, or what is computed with them."""
        kind = self.rng.integers(6)
        if kind == 0:
            return tf.constant(self.one_of((1, 2, N, N * N)))
        if kind == 1:
            return self.b
        if kind == 2:
            return tf.shape(self.any)[self.one_of((0, 1, -1))]
        if kind == 3:
            return tf.size(self.any) // self.one_of((self.b, N))
        if kind == 4:
            return self.one_of((tf.multiply, tf.add, tf.math.floordiv, tf.maximum, tf.subtract))(
                self.count(), self.count()
            )
        return tf.cast(tf.cast(self.count(), self.one_of(TYPES)), tf.int32)

    def of_data(self, count=None, kind=None):
        """What an operation takes as lengths, an order or a place, made of data; often so many as it needs."""
        numbers = tf.cast(self.one_of((self.one_of(self.floats), self.one_of(self.whole))), tf.int32)
        numbers = tf.math.floormod(tf.reshape(numbers, [self.b, -1])[:, :N], N)
        if count is None or not self.rng.integers(4):
            count, kind = self.one_of((1, 2, 3, N)), self.one_of(("lengths", "order", "places"))
        if kind == "lengths":  # that add up to four
            numbers = tf.cast(tf.reduce_sum(tf.one_hot(numbers, N), 1), tf.int32)[:, :count]
        elif kind == "order":
            numbers = tf.argsort(numbers[:, :count])
        else:
            numbers = numbers[:, :count] % self.one_of((2, 3, N)) - self.one_of((0, 0, 1))
        return self.one_of((tf.reshape(numbers, [-1]),) * 3 + (numbers[:, 0], numbers))

    def number_of_data(self):
        """A number made of data."""
        return tf.reshape(self.of_data(), [-1])[0]

    def argument(self, *otherwise):
        """An argument of an operation: made of data, or one of these, alike in how many numbers it has."""
        like = self.one_of(otherwise)
        count = np.size(like) if not tf.is_tensor(like) else like.shape.num_elements()
        return self.of_data(count, "places") if self.rng.integers(2) else like

    def number(self, *otherwise):
        """A number for operations that stop the process if they are given several."""
        return self.number_of_data() if self.rng.integers(3) == 0 else self.one_of(otherwise)

    def shape(self):
        """A shape of a few axes, one of which may be left open."""
        entries = [self.one_of((N, N, self.b, self.count(), 1, 2)) for _ in range(self.rng.integers(1, 4))]
        if self.rng.integers(2):
            entries[self.rng.integers(len(entries))] = -1
        return entries


def entry_by_entry(p):
    return p.one_of(UNARY)(p.float)


def two_together(p):
    return p.one_of(BINARY)(p.float, p.float)


def two_with_another_axis(p):
    a, b = p.float, p.float
    return p.one_of(BINARY)(tf.expand_dims(a, p.axis(a)), b)


def whole_numbers_together(p):
    return p.one_of((tf.add, tf.multiply, tf.maximum, tf.math.floormod))(p.int, p.int)


def times_a_number(p):
    return p.one_of((tf.add, tf.multiply))(p.int, tf.constant(int(p.rng.integers(1, 5)), shape=[1] * p.rng.integers(4)))


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
    return tf.reshape(p.any, p.shape())


def shaped_like(p):
    return tf.reshape(p.any, tf.shape(p.any))


def broadcast(p):
    return tf.broadcast_to(p.any, p.one_of((tf.shape(p.any), p.shape())))


def filled(p):
    return p.one_of((tf.fill(p.shape(), p.float[0, 0]), tf.zeros(p.shape(), tf.float64), tf.range(p.count())))


def looked_up(p):
    a = p.any
    return tf.gather(a, p.places(), axis=p.axis(a))


def looked_up_by_example(p):
    rows = p.any
    rows = p.one_of((rows, tf.transpose(rows)))
    return tf.gather(rows, p.one_of((p.places(), tf.range(p.b))), batch_dims=1, axis=p.one_of((1, 1, -1)))


def looked_up_by_number(p):
    a = p.any
    return tf.gather_nd(a, tf.stack([tf.range(p.b), p.places(a)], 1))


def looked_up_by_several_numbers(p):
    ids = p.int
    pairs = tf.stack([tf.broadcast_to(p.one_of((tf.range(p.b)[:, None], tf.range(p.b))), tf.shape(ids)), ids], -1)
    return tf.gather_nd(p.any, p.one_of((pairs, tf.reshape(pairs, [-1, 2]))))


def looked_up_in_a_row(p):
    rows, ids = p.any, p.int
    if p.rng.integers(2):
        p.take(tf.gather(rows, ids, batch_dims=1, axis=1))  # checks the numbers, where it is run
    flat = tf.reshape(rows, [-1, *rows.shape[2:]])
    return tf.gather(flat, ids + tf.reshape(tf.range(p.b) * N, [-1, *[1] * (len(ids.shape) - 1)]))


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


def tiled_by_a_count(p):
    return tf.tile(p.any[None], [p.count(), *[1] * len(p.any.shape)])


def repeated(p):
    a = p.any
    return tf.repeat(a, int(p.rng.integers(1, 3)), axis=p.axis(a))


def padded(p):
    a = p.float
    return tf.pad(a, p.rng.integers(0, 2, [len(a.shape), 2]), p.one_of(("CONSTANT", "REFLECT")))


def sliced(p):
    a = p.any
    cut = [p.one_of((slice(None), slice(1, None), slice(None, -1), slice(None, None, -1), 0, -1, None,
                     slice(None, p.count()), slice(0, None, 2))) for _ in a.shape]  # fmt: skip
    return a[tuple(cut)]


def a_block(p):
    a = p.any
    sizes = [p.one_of((-1, 2, N, p.count())) for _ in a.shape]
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
    return tf.one_hot(p.places(), p.one_of((N, p.b)), axis=int(p.rng.integers(-1, 2)), dtype=tf.float64)


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
    return tf.nn.conv1d(p.float, tf.ones([2, N, 3], tf.float64), 1, "SAME")


def found_among(p):
    return tf.searchsorted(tf.sort(p.float), p.float)


def numbers_of_the_batch(p):
    return tf.cast(p.one_of((tf.shape, tf.size))(p.float), tf.float64)


def as_numbers(p):
    return tf.cast(p.any, tf.float64)


def as_whole_numbers(p):
    return tf.cast(p.any, tf.int32)


def narrowed(p):
    """Through a type that holds less, and back."""
    a = p.one_of((p.int, p.any))
    return tf.cast(tf.cast(a, p.one_of(TYPES)), a.dtype)


def recast(p):
    a = p.any
    return tf.bitcast(p.one_of((a, tf.transpose(a))), p.one_of((tf.uint8, tf.int32, tf.float32, tf.int64, tf.float64)))


def of_hidden_shape(p):
    """Nothing is known of its lengths while tracing; or what is said of them is a lie."""
    a = p.any
    hidden = p.one_of((lambda: tf.reshape(a, [p.b, -1]), lambda: tf.reshape(a, tf.shape(p.any)),
                       lambda: tf.raw_ops.PlaceholderWithDefault(input=a, shape=[None] * len(a.shape))))()  # fmt: skip
    said = [p.one_of((None, None, 2, N, 1)) for _ in hidden.shape]
    kind = p.rng.integers(3)
    if kind == 1:
        hidden.set_shape(said)
    return tf.ensure_shape(hidden, said) if kind == 2 else hidden


def noise(p):
    draw = p.one_of((tf.random.stateless_uniform, tf.random.stateless_normal))
    return draw(p.one_of((tf.shape(p.float), p.shape())), p.one_of(p.seeds), dtype=tf.float64)


def called(p):
    """A function, with one or more arguments of other shapes, once and again."""
    a = p.any
    spec = p.one_of((a.shape, [None] * len(a.shape), [None, *a.shape[1:]]))
    function = tf.function(p.body(), autograph=False, input_signature=[tf.TensorSpec(spec, a.dtype)])
    found = [function(a)]
    for _ in range(2):
        try:
            found.append(function(p.late({tf.float64: p.floats, tf.int32: p.whole}.get(a.dtype, p.others))))
        except FAILURES:
            continue
    return found


def noise_of_a_function(p):
    """One draw, in a function that is called with several shapes."""
    seed, draw = p.one_of(p.seeds), p.one_of((tf.random.stateless_uniform, tf.random.stateless_normal))
    function = tf.function(lambda shape: draw(shape, seed, dtype=tf.float64), autograph=False, reduce_retracing=True,
                           input_signature=[tf.TensorSpec([None], tf.int32)])  # fmt: skip
    return [function(tf.shape(p.float)) for _ in range(2)]


def branched(p):
    a, test = p.float, p.one_of((p.float, p.int, p.floats[0]))
    one, other = p.body(), p.body()
    return tf.cond(tf.reduce_sum(test) > 0, lambda: one(a), lambda: other(a))


def looped(p):
    a, times, body = p.float, p.one_of((3, tf.minimum(p.b, 3))), p.body()
    free = tf.TensorShape([None] * len(a.shape))
    return tf.while_loop(lambda i, y: i < times, lambda i, y: (i + 1, body(y)), (0, a), (tf.TensorShape([]), free))[1]


def looped_with_lengths(p):
    """A loop that keeps what it makes and how long it was, one turn back, and a list of all."""
    a, grows, body = p.any, p.one_of((True, False)), p.body()
    axis, place = p.one_of((0, 1, -1)), p.one_of((0, 1, -1))
    free, back = tf.TensorShape([None] * len(a.shape)), p.one_of(("[-1, n]", "[n, -1]", "[b, -1, n]", "[b, n, -1]"))
    held = tf.TensorArray(a.dtype, 3, infer_shape=False, element_shape=None)

    def turn(i, y, n, z, held):
        z = tf.reshape(p.one_of((y, z)), eval(back, {"n": n, "b": p.b}))
        new = tf.concat([y, y], axis) if grows else body(y)
        return i + 1, new, tf.shape(y)[place], z, held.write(i, new)

    start = (0, a, tf.shape(a)[place], tf.reshape(a, eval(back, {"n": tf.shape(a)[place], "b": p.b})), held)
    free_too = tf.TensorShape([None] * len(start[3].shape))
    _, y, n, z, held = tf.while_loop(
        lambda i, *_: i < 2, turn, start, (tf.TensorShape([]), free, tf.TensorShape([]), free_too, tf.TensorShape(None))
    )
    made = [y, n, z]
    for take in (lambda: held.read(p.one_of((0, 1))), held.stack, held.concat, lambda: held.gather([1, 0])):
        try:
            made.append(take())
        except FAILURES:
            continue
    return made


def looped_with_a_list(p):
    """A loop that keeps what it makes in a list, flat, and lays out an earlier entry by the length of a later one."""
    a, grows, body = p.float, p.one_of((True, False)), p.body()
    held = tf.TensorArray(a.dtype, 3, infer_shape=False, element_shape=[None], clear_after_read=False)

    def turn(i, y, z, held):
        held = held.write(i, tf.reshape(y, [-1]))
        earlier = held.read(p.one_of((i, tf.maximum(i - 1, 0))))
        return i + 1, tf.concat([y, y], 1) if grows else body(y), tf.reshape(earlier, [-1, tf.shape(y)[1]]), held

    free = tf.TensorShape([None] * len(a.shape))
    start = 0, a, a[:, :, 0] if len(a.shape) > 2 else a
    shapes = tf.TensorShape([]), free, tf.TensorShape([None, None])
    return tf.while_loop(lambda i, *_: i < 2, turn, (*start, held), (*shapes, tf.TensorShape(None)))[1:3]


def mapped(p):
    return p.one_of((tf.map_fn, tf.vectorized_map))(p.body(), p.float)


def scanned(p):
    return tf.scan(lambda a, y: a * 0.5 + y, p.float)


# Arguments made of data: what an operation takes beside the tensor that it works on.


def split_by_data(p):
    a, parts = p.any, p.one_of((1, 2, N))
    if not p.rng.integers(3):
        return tf.raw_ops.Split(axis=p.of_data(1, "places"), value=a, num_split=parts)
    # TensorFlow's shape function aborts the process on constant lengths that are not a vector.
    lengths = tf.reshape(p.of_data(N, "lengths"), [-1])
    return tf.raw_ops.SplitV(value=a, size_splits=lengths, axis=p.axis(a), num_split=N)


def ordered_by_data(p):
    a = p.any
    return p.one_of((
        lambda: tf.raw_ops.Transpose(x=a, perm=p.of_data(len(a.shape), "order")),
        lambda: tf.raw_ops.InvertPermutation(x=p.of_data(3, "order")),
        lambda: tf.raw_ops.ReverseV2(tensor=a, axis=p.of_data(1, "places")),
        lambda: tf.raw_ops.Roll(input=a, shift=p.argument([1]), axis=p.argument([1])),
        lambda: tf.transpose(a, tf.math.invert_permutation(p.of_data(len(a.shape), "order"))),
    ))()  # fmt: skip


def shaped_by_data(p):
    a = p.any
    return p.one_of((
        lambda: tf.reshape(a, p.of_data(2, "places")),
        lambda: tf.reshape(a, tf.concat([[-1], p.of_data(1, "places") + 1], 0)),
        lambda: tf.broadcast_to(a[None], tf.concat([p.of_data(1, "places"), tf.shape(a)], 0)),
        lambda: tf.tile(a, p.of_data(len(a.shape), "places")),
        lambda: tf.tile(a[None], tf.concat([p.of_data(1, "places"), [1] * len(a.shape)], 0)),
        lambda: tf.fill(p.of_data(2, "places"), p.one_of((0.0, 1.0))),
        lambda: tf.raw_ops.ExpandDims(input=a, axis=p.of_data(1, "places")),
        lambda: tf.raw_ops.Range(start=p.argument(0), limit=p.argument(2, N, p.b), delta=p.argument(1, -1)),
        lambda: tf.random.stateless_uniform(p.of_data(2, "places"), p.one_of(p.seeds), dtype=tf.float64),
    ))()  # fmt: skip


def cut_by_data(p):
    a, open_ = p.any, p.shape()
    return p.one_of((
        lambda: tf.slice(a, p.argument([0] * len(a.shape)), p.argument([-1] * len(a.shape), tf.shape(a))),
        lambda: tf.raw_ops.StridedSlice(input=a, begin=p.argument([0]), end=p.argument([1], [N]),
                                        strides=p.argument([1]), begin_mask=int(p.rng.integers(2)),
                                        end_mask=int(p.rng.integers(2)), shrink_axis_mask=int(p.rng.integers(2))),
        lambda: tf.raw_ops.StridedSlice(input=a, begin=p.argument([0, 0]), end=p.argument([1, 1], tf.shape(a)[:2]),
                                        strides=[1, 1], begin_mask=1, end_mask=1),
        lambda: tf.raw_ops.StridedSliceGrad(shape=p.argument(tf.shape(p.any), open_), begin=p.argument([0]),
                                            end=p.argument([N]), strides=p.argument([1]), dy=a, begin_mask=1,
                                            end_mask=int(p.rng.integers(2))),
        lambda: tf.raw_ops.Pad(input=a, paddings=tf.reshape(p.argument([0] * 2 * len(a.shape)), [-1, 2])),
        lambda: tf.pad(a, tf.concat([[[0, 0]], tf.reshape(p.of_data(2 * len(a.shape) - 2, "lengths"), [-1, 2])], 0)),
    ))()  # fmt: skip


def reduced_by_data(p):
    a = p.float
    return p.one_of((
        lambda: p.one_of(REDUCTIONS)(a, p.of_data(1, "places"), keepdims=bool(p.rng.integers(2))),
        lambda: tf.raw_ops.Cumsum(x=a, axis=p.of_data(1, "places")),
        lambda: tf.raw_ops.TopKV2(input=a, k=p.of_data(1, "places")),
        lambda: tf.raw_ops.ConcatV2(values=[a, a], axis=p.of_data(1, "places")),
        lambda: tf.math.unsorted_segment_sum(a, p.argument(p.places(a)), p.argument(N)),
        lambda: tf.raw_ops.All(input=a > 0, axis=p.of_data(1, "places")),
    ))()  # fmt: skip


def looked_up_by_data(p):
    a = p.any
    return p.one_of((
        lambda: tf.raw_ops.GatherV2(params=a, indices=p.places(), axis=p.of_data(1, "places")),
        lambda: tf.raw_ops.OneHot(indices=p.int, depth=p.argument(N), on_value=p.argument(1), off_value=p.argument(0),
                                  axis=int(p.rng.integers(-1, 2))),
        lambda: tf.dynamic_stitch([p.argument([0, 1]), p.argument([2, 3])], [a, a]),
        lambda: tf.raw_ops.ConcatOffset(concat_dim=p.argument(0), shape=[p.argument(tf.shape(a))] * 2),
        lambda: list(tf.raw_ops.BroadcastGradientArgs(s0=p.argument(tf.shape(a)), s1=p.argument(tf.shape(p.any)))),
        lambda: tf.where(p.of_data() > 0, p.argument(1), p.argument(0)),
    ))()  # fmt: skip


def blocks_by_data(p):
    images = tf.cast(p.float[..., None, None], tf.float32) if len(p.float.shape) == 2 else p.float[..., None]
    images = tf.cast(images, tf.float64)
    square = lambda: tf.reshape(p.argument([0, 0]), [-1, 2])  # noqa: E731
    return p.one_of((
        lambda: tf.raw_ops.SpaceToBatchND(input=images, block_shape=p.argument([2], [1]), paddings=square()),
        lambda: tf.raw_ops.BatchToSpaceND(input=images, block_shape=p.argument([2], [1]), crops=square()),
        lambda: tf.raw_ops.Conv2DBackpropInput(
            input_sizes=p.argument(tf.shape(images)), filter=tf.ones([1, 1, 1, 1], tf.float64), out_backprop=images,
            strides=[1] * 4, padding="SAME"),
    ))()  # fmt: skip


def a_list(p, a):
    """A list of tensors like one, some of which may be missing, by any shape and number of entries."""
    like = p.argument(tf.shape(a), -1, [-1] * len(a.shape))
    entries = p.number(2, 3, p.count())
    held = p.one_of((
        lambda: tf.raw_ops.TensorListReserve(element_shape=like, num_elements=entries, element_dtype=a.dtype),
        lambda: tf.raw_ops.EmptyTensorList(element_shape=like, max_num_elements=entries, element_dtype=a.dtype),
        lambda: tf.raw_ops.TensorListFromTensor(tensor=tf.stack([a, a], p.axis(a)), element_shape=like),
    ))()  # fmt: skip
    for _ in range(p.rng.integers(3)):
        try:
            held = changed_list(p, held, a)
        except FAILURES:
            continue
    return held


def changed_list(p, held, a):
    one = p.one_of((a, a, p.late({tf.float64: p.floats, tf.int32: p.whole}.get(a.dtype, p.others))))
    return p.one_of((
        lambda: tf.raw_ops.TensorListSetItem(input_handle=held, index=p.number(0, 1), item=one),
        lambda: tf.raw_ops.TensorListPushBack(input_handle=held, tensor=one),
        lambda: tf.raw_ops.TensorListResize(input_handle=held, size=p.number(2, 3)),
    ))()  # fmt: skip


def taken_from(p, held, a):
    """What a list gives: shapes that are asked for may be made of data, and need not be those of what was written."""
    like = p.argument(tf.shape(a), tf.shape(a), -1, [-1] * len(a.shape), p.shape())
    found = []
    for take in p.rng.permutation([
        lambda: tf.raw_ops.TensorListGetItem(
            input_handle=held, index=p.number(0, 1), element_shape=like, element_dtype=a.dtype),
        lambda: tf.raw_ops.TensorListStack(input_handle=held, element_shape=like, element_dtype=a.dtype),
        lambda: tf.raw_ops.TensorListPopBack(input_handle=held, element_shape=like, element_dtype=a.dtype)[1],
        lambda: tf.raw_ops.TensorListLength(input_handle=held),
        lambda: tf.raw_ops.TensorListElementShape(input_handle=held, shape_type=tf.int32),
        lambda: tf.raw_ops.TensorListGather(
            input_handle=held, indices=p.argument([0, 1]), element_shape=like, element_dtype=a.dtype),
        lambda: list(tf.raw_ops.TensorListConcatV2(
            input_handle=held, element_shape=like, leading_dims=tf.zeros([0], tf.int64), element_dtype=a.dtype)),
    ])[:3]:  # fmt: skip
        try:
            found += tf.nest.flatten(take())
        except FAILURES:
            continue
    return found


def listed(p):
    a = p.any
    return taken_from(p, a_list(p, a), a)


def looped_with_any_list(p):
    """A loop that reads and writes a list of any shape, of which the first turn may find nothing written."""
    a = p.any
    held, like = a_list(p, a), p.argument(tf.shape(a), -1, p.shape())
    free = tf.TensorShape([None] * len(a.shape))

    def turn(i, y, held):
        earlier = tf.raw_ops.TensorListGetItem(
            input_handle=held, index=p.number(i, 1 - i), element_shape=like, element_dtype=a.dtype
        )
        held = tf.raw_ops.TensorListSetItem(input_handle=held, index=i, item=p.one_of((y, earlier)))
        return i + 1, tf.reshape(earlier, p.one_of((tf.shape(y), tf.shape(earlier)))), held

    shapes = tf.TensorShape([]), free, tf.TensorShape(None)
    _, y, held = tf.while_loop(lambda i, *_: i < 2, turn, (0, a, held), shapes)
    return [y, *taken_from(p, held, a)]


def any_operation(p):
    """One of those that have a rule, with any arguments that it takes."""
    name = p.one_of(OPERATIONS)
    definition = tf.raw_ops.__dict__[name]
    arguments, types = {}, {}
    op_def = op_def_registry.get(name)
    for attribute in op_def.attr:
        allowed = list(attribute.allowed_values.list.type)
        if attribute.type == "type":
            types[attribute.name] = [tf.as_dtype(t) for t in allowed]
        elif attribute.type == "bool":
            arguments[attribute.name] = bool(p.rng.integers(2))
        elif attribute.type == "string" and attribute.allowed_values.list.s:
            arguments[attribute.name] = p.one_of(list(attribute.allowed_values.list.s)).decode()
        elif attribute.type == "int" and not any(attribute.name == i.number_attr for i in op_def.input_arg):
            arguments[attribute.name] = int(p.rng.integers(0, 3))
        elif attribute.type == "list(int)":
            arguments[attribute.name] = [1, *[int(n) for n in p.rng.integers(1, 3, p.one_of((1, 2, 3)) - 1)], 1]
    bound = {}
    for given in op_def.input_arg:
        kind = tf.as_dtype(given.type) if given.type else bound.get(given.type_attr)
        tensor = p.any if kind is None else p.one_of([t for t in [*p.floats, *p.whole, *p.others] if t.dtype == kind])
        if p.rng.integers(2) and kind in (None, tf.int32, tf.int64) and given != op_def.input_arg[0]:
            tensor = tf.constant(p.rng.integers(-1, 3, p.rng.integers(0, 4)), kind or tf.int32)  # axes and the like
            tensor = tf.cast(p.argument(tensor), kind or tf.int32)
        if kind is None and types.get(given.type_attr) and tensor.dtype not in types[given.type_attr]:
            raise TypeError("no such type")
        bound[given.type_attr] = tensor.dtype
        arguments[given.name] = [tensor, tensor] if given.number_attr else tensor
    arguments |= {name: bound.get(name, p.one_of(TYPES)) for name in types if name not in
                  {i.type_attr for i in op_def.input_arg}}  # fmt: skip
    return list(tf.nest.flatten(definition(**arguments)))


OPERATIONS = sorted(name for name in known_operations() if name in tf.raw_ops.__dict__)
KINDS = tuple(f for f in list(globals().values()) if callable(f) and getattr(f, "__code__", None) is not None
              and f.__code__.co_argcount == 1 and f.__code__.co_varnames[:1] == ("p",))  # fmt: skip

FAMILIES = {
    "places": (narrowed, times_a_number, whole_numbers_together, looked_up, looked_up_by_number, as_whole_numbers),
    "own rows": (looked_up_by_example, looked_up, transposed, looked_up_by_number, sliced, best, sorting, accumulated),
    "tuples": (looked_up_by_several_numbers, looked_up_by_number, added_to, reshaped, stacked),
    "flat numbers": (looked_up_in_a_row, best, sorting, times_a_number, looked_up_by_example),
    "types": (recast, transposed, as_whole_numbers, narrowed, reshaped, as_numbers),
    "lengths": (of_hidden_shape, reshaped, shaped_like, broadcast, tiled_by_a_count, filled, two_together),
    "functions": (called, of_hidden_shape, reshaped, transposed, entry_by_entry, looked_up_by_number),
    "noise": (noise, noise_of_a_function, called, reshaped, transposed, two_together),
    "loops": (looped_with_lengths, looped_with_a_list, looped, mapped, branched, reshaped, put_together, two_together),
    "data as arguments": (split_by_data, ordered_by_data, shaped_by_data, cut_by_data, reduced_by_data,
                          looked_up_by_data, blocks_by_data, two_together, reshaped),
    "lists": (listed, looped_with_any_list, reshaped, shaped_like, two_together, put_together),
    "any operation": (any_operation, transposed, as_numbers, reshaped, of_hidden_shape),
}
