"""Each rule against brute force: what it claims is so when an example is changed or taken away.

And what mixes is called mixed: a rule that claims less than it could costs a user; one that claims more, the guarantee.
"""

# ruff: noqa: E501 (a table reads better with a line a case)

import numpy as np
import pytest
import tensorflow as tf
from brute import claims, holds

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.independence import ByExample, Mixed, Shared, known_operations
from tfdp_rec.core.sensitivity.independence.sizes import size
from tfdp_rec.core.sensitivity.independence.values import Sized
from tfdp_rec.core.sensitivity.own_rows import own_rows

rng = np.random.default_rng(0)
X = rng.normal(size=[4, 3]).astype("float32")
Y = rng.normal(size=[4, 3]).astype("float32")
S = rng.normal(size=[4, 5, 3]).astype("float32")
IDS = rng.integers(0, 3, size=[4, 5])
ID = rng.integers(0, 3, size=[4])
IMAGE = rng.normal(size=[4, 6, 6, 2]).astype("float32")
WORDS = np.array([[b"a", b"b"], [b"c", b"a"], [b"dd", b""], [b"a", b"a"]], object)
W = rng.normal(size=[3, 2]).astype("float32")
FILTER = rng.normal(size=[2, 2, 2, 3]).astype("float32")
ROW = rng.normal(size=[3]).astype("float32")

FIRST, SECOND = ByExample(0), ByExample(1)


def B(x):
    return tf.shape(x)[0]


def whole(x):
    return tf.cast(x[:, 0], tf.int32)


def listed(x, made=-1, entries=2):
    """A list whose first entry alone is written."""
    held = tf.raw_ops.TensorListReserve(element_shape=made, num_elements=entries, element_dtype=tf.float32)
    return tf.raw_ops.TensorListSetItem(input_handle=held, index=0, item=x)


def taken(held, index, asked=-1):
    return tf.raw_ops.TensorListGetItem(input_handle=held, index=index, element_shape=asked, element_dtype=tf.float32)


def all_of(held, asked=-1):
    return tf.raw_ops.TensorListStack(input_handle=held, element_shape=asked, element_dtype=tf.float32)


# What is admitted: (function, inputs by example, shared inputs, values claimed).
ADMITTED = {
    "entry by entry": (lambda x, y: x * y + tf.exp(x), (X, Y), (), [FIRST]),
    "with a shared row": (lambda x, r: tf.maximum(x, r) ** 2, (X,), (ROW,), [FIRST]),
    "with another rank": (lambda s, x: s * x[:, None, :], (S, X), (), [FIRST]),
    "a scalar by example": (lambda x, i: x * tf.cast(i, tf.float32)[:, None], (X, ID), (), [FIRST]),
    "select": (lambda x, y: tf.where(x > 0, y, 0.0), (X, Y), (), [FIRST]),
    "softmax": (lambda s: (tf.nn.softmax(s), tf.nn.log_softmax(s, axis=1)), (S,), (), [FIRST, FIRST]),
    "sums": (lambda s: (tf.reduce_sum(s, [1, 2]), tf.reduce_max(s, -1, True), tf.norm(s, axis=1)), (S,), (), [FIRST] * 3),
    "mean, moments": (lambda s: tf.nn.moments(s, [1]), (S,), (), [FIRST, FIRST]),
    "transposed sums": (lambda s: tf.reduce_sum(tf.transpose(s, [1, 0, 2]), [0]), (S,), (), [FIRST]),
    "turned in a circle": (
        lambda s: (tf.transpose(s, [1, 2, 0]), tf.transpose(s, [2, 0, 1])), (S,), (), [ByExample(2), SECOND]
    ),
    "reverse": (lambda s: tf.reverse(s, [1]), (S,), (), [FIRST]),
    "matmul": (lambda x, w: (x @ w, tf.matmul(w, x, transpose_a=True, transpose_b=True)), (X,), (W,), [FIRST, SECOND]),
    "batched matmul": (lambda s: (tf.matmul(s, s, transpose_b=True), s @ W), (S,), (), [FIRST, FIRST]),
    "einsum": (
        lambda s, x: (tf.einsum("btd,bd->tb", s, x), tf.einsum("...d,de->...e", s, W)), (S, X), (), [SECOND, FIRST]
    ),
    "merged": (lambda s: tf.reshape(s, [-1, 3]) @ W, (S,), (), [ByExample(0, inner=size(5))]),
    "merged and back": (lambda s: tf.reshape(tf.reshape(s, [-1, 3]) @ W, [-1, 5, 2]), (S,), (), [FIRST]),
    "merged with the batch's size": (lambda s: tf.reshape(s, [B(s), tf.shape(s)[1] * 3]), (S,), (), [FIRST]),
    "time first, merged behind": (
        lambda s: tf.reshape(tf.transpose(s, [1, 0, 2]), [5, -1]), (S,), (), [ByExample(1, inner=size(3))]
    ),
    "tiled": (lambda x: tf.tile(x, [1, 2]), (X,), (), [FIRST]),
    "repeated": (lambda x: tf.repeat(x, 3, axis=0), (X,), (), [ByExample(0, inner=size(3))]),
    "repeated within": (lambda s: tf.repeat(s, 2, axis=1), (S,), (), [FIRST]),
    "shared rows for all": (
        lambda x, r: (tf.tile(r[None], [B(x), 1]), tf.broadcast_to(r, tf.shape(x)), tf.zeros([B(x), 2])),
        (X,), (ROW,), [FIRST] * 3,
    ),
    "more axes": (lambda x: (x[:, None], tf.squeeze(x[None, :, None], [0, 2])), (X,), (), [FIRST, FIRST]),
    "slices": (lambda s: (s[:, 1:, ::2], s[..., -1], s[:, 2], s[: B(s), :1]), (S,), (), [FIRST] * 4),
    "block": (lambda s: tf.slice(s, [0, 1, 0], [-1, 2, 2]), (S,), (), [FIRST]),
    "concat, stack": (
        lambda x, y: (tf.concat([x, y, x], 1), tf.stack([x, y], 1), tf.stack([x, y]), *tf.unstack(x, axis=1)),
        (X, Y), (), [FIRST, FIRST, SECOND, FIRST, FIRST, FIRST],
    ),
    "split": (lambda s: (*tf.split(s, [2, 3], 1), *tf.split(s, 3, -1)), (S,), (), [FIRST] * 5),
    "pad": (lambda s: tf.pad(s, [[0, 0], [1, 2], [0, 1]]), (S,), (), [FIRST]),
    "rows of a table": (lambda i, t: (tf.gather(t, i), tf.gather(t, i, axis=1)), (IDS,), (X,), [FIRST, SECOND]),
    "along another axis": (lambda s: (tf.gather(s, [4, 0, 0], axis=1), tf.gather(s, 2, axis=2)), (S,), (), [FIRST, FIRST]),
    "own rows": (lambda s, i: tf.gather(s, i, batch_dims=1, axis=1), (S, IDS), (), [FIRST]),
    "one hot": (lambda i: (tf.one_hot(i, 4), tf.one_hot(i, 4, axis=0)), (IDS,), (), [FIRST, SECOND]),
    "the last of each": (lambda s, i: tf.gather(s, i, batch_dims=1), (S, ID), (), [FIRST]),
    "cumulated": (lambda s: (tf.cumsum(s, 1), tf.cumsum(s, -1, reverse=True, exclusive=True)), (S,), (), [FIRST, FIRST]),
    "sorted": (lambda s: (*tf.math.top_k(s, 2), tf.argsort(s)), (S,), (), [FIRST] * 3),
    "whole numbers within bounds, and as other bits": (
        lambda i: (tf.raw_ops.ClipByValue(t=i, clip_value_min=tf.constant(1, i.dtype), clip_value_max=tf.constant(2, i.dtype)), tf.bitcast(i, tf.float64)),
        (IDS,), (), [FIRST, FIRST],
    ),
    "words": (
        lambda w: (tf.strings.to_hash_bucket_fast(w, 9), w == "a"),
        (WORDS,), (), [FIRST] * 2,
    ),
    "buckets": (lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[0.0, 1.0]), (X,), (), [FIRST]),
    "convolution": (lambda x, f: tf.nn.conv2d(x, f, 1, "SAME"), (IMAGE,), (FILTER,), [FIRST]),
    "cross entropy": (
        lambda x, y, i: (
            tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x),
            tf.nn.sparse_softmax_cross_entropy_with_logits(i, x),
            tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(y), x),
        ),
        (X, Y, ID), (), [FIRST] * 3,
    ),
    "shapes": (lambda s: (tf.shape(s)[1:], tf.shape(s), tf.size(s) // B(s)), (S,), (), None),
    "a loop": (lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y)), (0, x))[1], (X,), (), [FIRST]),
    "a function": (tf.function(lambda x: tf.nn.gelu(x) * 2, autograph=False), (X,), (), [FIRST]),
    "steps in a loop": (
        lambda s: tf.transpose(tf.map_fn(lambda y: tf.tanh(y) @ W, tf.transpose(s, [1, 0, 2]), fn_output_signature=tf.float32), [1, 0, 2]),
        (S,), (), [FIRST],
    ),
    "scan over steps": (
        lambda s: tf.scan(lambda a, y: a * 0.5 + y, tf.transpose(s, [1, 0, 2])), (S,), (), [SECOND],
    ),
    "a list": (lambda x: all_of(listed(x, [-1, 3]), tf.shape(x)), (X,), (), [SECOND]),
    "entries of a list": (lambda x: (taken(listed(x), 0), taken(listed(x, [-1, 3]), 1, tf.shape(x))), (X,), (), [FIRST] * 2),
    "running state": (lambda s: tf.foldl(lambda a, y: a * 0.5 + y, tf.transpose(s, [1, 0, 2])), (S,), (), [FIRST]),
}  # fmt: skip

REFUSED_BACKWARD = ("sorted",)  # TensorFlow numbers the entries of the whole batch in one go

# What mixes, or may: refused when it matters.
MIXED = {
    "mean": lambda x: x - tf.reduce_mean(x, 0),
    "all": lambda x: x * tf.cast(tf.reduce_all(x > 0), tf.float32),
    "softmax over the batch": lambda x: tf.nn.softmax(x, axis=0),
    "roll": lambda x: tf.roll(x, 1, 0),
    "reverse": lambda x: tf.reverse(x, [0]),
    "sort": lambda x: tf.sort(x, axis=0),
    "sorted and put back": lambda x: tf.gather(tf.sort(x, axis=0), tf.argsort(tf.argsort(x[:, 0]))),
    "cumulative": lambda x: tf.cumsum(x, 0),
    "arg": lambda x: tf.argmax(x, 0),
    "top": lambda x: tf.math.top_k(tf.transpose(x), 2).values,
    "cumulative over merged rows": lambda x: tf.cumsum(tf.reshape(tf.stack([x, x], 1), [-1, 3]), 0),
    "as many as there are examples": lambda x: tf.math.top_k(x @ tf.ones([3, 9]), B(x)).values,
    "the first": lambda x: x * x[0],
    "a slice": lambda x: x[1:],
    "scores of all by all": lambda x: tf.matmul(x, x, transpose_b=True),
    "gram": lambda x: tf.matmul(x, x, transpose_a=True),
    "einsum": lambda x: tf.einsum("bi,ci->bc", x, x),
    "outer": lambda x: x[:, None] * x[None],
    "wrong reshape": lambda x: tf.reshape(x, [3, -1]),
    "wrong reshape and back": lambda x: tf.reshape(tf.reshape(x, [3, -1]) * ROW[:, None], [-1, 3]),
    "transpose as reshape": lambda x: tf.reshape(tf.transpose(x), [-1, 3]),
    "divided by the size": lambda x: x / tf.cast(tf.shape(x)[0], tf.float32),
    "the size as a factor": lambda x: x * tf.cast(tf.size(x), tf.float32),
    "filled with the size": lambda x: x + tf.fill([tf.shape(x)[0], 1], tf.cast(tf.shape(x)[0], tf.float32)),
    "fractions within bounds": lambda x: tf.raw_ops.ClipByValue(t=x, clip_value_min=0.0, clip_value_max=1.0),
    "bits of another size": lambda x: tf.cast(tf.bitcast(x, tf.uint8), tf.float32),
    "the place in the batch": lambda x: x * tf.cast(tf.range(tf.shape(x)[0]), tf.float32)[:, None],
    "a table by place": lambda x: x + tf.gather(tf.ones([9, 3]), tf.range(tf.shape(x)[0])),
    "a slice of a table": lambda x: x + tf.ones([9, 3])[: tf.shape(x)[0]],
    "a shared tensor as long as the batch": lambda x: x + tf.constant(Y),
    "rows of others": lambda x: tf.gather(x, tf.cast(x[:, 0] > 0, tf.int32)),
    "rows of others by number": lambda x: tf.gather_nd(x, tf.cast(x[:, :1] > 0, tf.int32)),
    "a place that data adds to": lambda x: tf.gather(
        tf.reshape(x, [-1]), tf.range(tf.shape(x)[0]) * 3 + whole(x)
    ),
    "a column by the size": lambda x: x[:, tf.shape(x)[0] - 2],
    "searched in shared rows": lambda x: tf.searchsorted(tf.constant(np.sort(Y)), x),
    "places by places": lambda x: x * tf.cast(tf.range(tf.shape(x)[0]) * tf.range(tf.shape(x)[0]), tf.float32)[:, None],
    "masked": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    "where": lambda x: tf.cast(tf.where(x > 0), tf.float32),
    "unique": lambda x: tf.unique(x[:, 0])[0],
    "partitioned": lambda x: tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 2)[0],
    "segments": lambda x: tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0] > 0, tf.int32), 2),
    "concatenated": lambda x: tf.concat([x, x * 2], 0),
    "time first, merged": lambda x: tf.reshape(tf.transpose(tf.stack([x, x], 1), [1, 0, 2]), [-1, 3]),
    "the batch twice": lambda x: tf.tile(x, [2, 1]),
    "dilated": lambda x: tf.space_to_batch(x[..., None], [2], [[0, 1]]),
    "pooled": lambda x: tf.nn.max_pool1d(x[..., None], 2, 1, "SAME"),
    "squeezed": lambda x: tf.squeeze(x[:, None]),
    "identity matrix": lambda x: tf.eye(tf.shape(x)[0]) @ x,
    "norm of all": lambda x: tf.clip_by_norm(x, 1.0),
    "batch norm": lambda x: tf.raw_ops.FusedBatchNormV3(
        x=x[:, None, None], scale=tf.ones([3]), offset=tf.zeros([3]), mean=[], variance=[], is_training=True
    ).y,
    "bigger branch": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x),
    "branch by size": lambda x: tf.cond(tf.shape(x)[0] > 2, lambda: x, lambda: -x),
    "loop by data": lambda x: tf.while_loop(
        lambda i, y: i < tf.cast(tf.reduce_max(x), tf.int32), lambda i, y: (i + 1, y * 2), (0, x)
    )[1],
    "map over examples": lambda x: tf.map_fn(lambda row: row * 2, x),
    "carry across examples": lambda x: tf.scan(lambda a, row: a + row, x),
    "a carry in a loop": lambda x: tf.while_loop(
        lambda i, a: i < 2, lambda i, a: (i + 1, a + tf.reduce_sum(x, 0)), (0, tf.zeros([3]))
    )[1]
    * x,
    "seeded noise": lambda x: x * tf.random.stateless_uniform(tf.shape(x), seed=[1, 2]),
    "seeded by data": lambda x: x * tf.random.stateless_uniform(tf.shape(x), seed=tf.cast(x[0, :2], tf.int32)),
    "lengths of data": lambda x: tf.sequence_mask(tf.cast(tf.abs(x[:, 0]), tf.int32)),
    "padded to data": lambda x: x[:, : tf.cast(tf.reduce_max(x), tf.int32)],
    "repeated as data says": lambda x: tf.repeat(x, tf.cast(x[:, 0] > 0, tf.int32), axis=0),
    "split at lengths of data": lambda x: tf.split(x, whole(x), axis=1, num=4)[0],
    "something shared, split at lengths of data": lambda x: tf.split(ROW, whole(x), num=4)[0],
    "padded by lengths of data": lambda x: tf.raw_ops.SpaceToBatchND(
        input=x, block_shape=[1], paddings=tf.cast(x[:, :2], tf.int32)
    ),
    "cropped by lengths of data": lambda x: tf.raw_ops.BatchToSpaceND(
        input=x, block_shape=[1], crops=tf.cast(x[:, :2], tf.int32)
    ),
    "a permutation of data": lambda x: tf.math.invert_permutation(whole(x)),
    "something shared, in an order of data": lambda x: tf.transpose(tf.ones([2, 3, 4, 5]), whole(x)),
    "the places of ones in data": lambda x: tf.raw_ops.BroadcastGradientArgs(s0=whole(x), s1=[1]).r0,
    "offsets of data": lambda x: tf.raw_ops.ConcatOffset(concat_dim=0, shape=[whole(x)] * 2)[1],
    "the gradient of a slice by data": lambda x: tf.raw_ops.StridedSliceGrad(
        shape=[B(x), 3, 1, 1], begin=whole(x), end=[0, 3, 1, 1], strides=[1, 1, 1, 1],
        dy=x[:, :, None, None], begin_mask=1, end_mask=1,
    ),
    "images as large as data says": lambda x: tf.raw_ops.Conv2DBackpropInput(
        input_sizes=whole(x), filter=FILTER, out_backprop=x[:, None, None], strides=[1] * 4,
        padding="VALID",
    ),
    "a shape that the number of examples decides": lambda x: x
    * tf.cast(tf.shape(tf.reshape(tf.ones([4, 4]), [B(x), -1]))[1], tf.float32),
    "a list of zeros in a shape of data": lambda x: all_of(
        tf.raw_ops.TensorListReserve(element_shape=whole(x), num_elements=2, element_dtype=tf.float32)
    ),
    "a list made in a shape of data": lambda x: taken(listed(x, whole(x)), 1),
    "the shape that data gave a list": lambda x: tf.raw_ops.TensorListElementShape(
        input_handle=listed(ROW, whole(x)), shape_type=tf.int32
    ),
    "an entry asked for in a shape of data": lambda x: taken(listed(x), 1, whole(x)),
    "an entry that was never written, in another shape": lambda x: taken(listed(x), 1, [1, 3]),
    "a list made in another shape": lambda x: all_of(listed(x, [1, 3])),
    "a list as long as data says": lambda x: all_of(listed(x, entries=whole(x)[0])),
    "the largest along an axis of the size": lambda x: tf.reduce_max(tf.cast(x, tf.int32), tf.minimum(B(x), 1)),
    "the product along an axis of the size": lambda x: tf.reduce_prod(tf.cast(x, tf.int32), tf.minimum(B(x), 1)),
    "the largest of rows of sizes": lambda x: tf.reshape(x, tf.reduce_max([[B(x), B(x)], [B(x), B(x)]], axis=0)),
}  # fmt: skip


@pytest.mark.parametrize("name", ADMITTED)
def test_what_is_claimed_is_so(name):
    function, inputs, shared, expect = ADMITTED[name]
    values = holds(function, *inputs, shared=shared, expect=expect)
    assert not any(isinstance(v, Mixed) for v in values), [str(v) for v in values]


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_is_not_claimed(name):
    values, _, _ = claims(MIXED[name], X)
    assert not any(isinstance(v, (ByExample, Shared, Sized)) for v in values), [str(v) for v in values]


@pytest.mark.parametrize("name", ADMITTED)
def test_gradients_of_what_is_admitted(name):
    """Backward too: each example's gradient with respect to its own input, as TensorFlow makes it."""
    function, inputs, shared, _ = ADMITTED[name]
    floats = [n for n, x in enumerate(inputs) if x.dtype == np.float32]
    if not floats:
        pytest.skip("nothing to differentiate")

    def backward(*tensors):
        with tf.GradientTape() as tape:
            tape.watch([tensors[n] for n in floats])
            outputs = [o for o in tf.nest.flatten(function(*tensors)) if o.dtype.is_floating]
        with own_rows():
            found = tape.gradient(outputs, [tensors[n] for n in floats], [tf.cos(o) for o in outputs])
        return [tf.convert_to_tensor(g) for g in found if g is not None]

    values = holds(backward, *inputs, shared=shared)
    if name not in REFUSED_BACKWARD:
        assert all(isinstance(v, ByExample) for v in values), [str(v) for v in values]
    assert not any(isinstance(v, (Shared, Sized)) for v in values)


@pytest.mark.parametrize("draw", [tf.random.uniform, tf.random.normal])
def test_noise_of_the_process_is_refused(draw):
    with pytest.raises(NotPrivate, match="SeedGenerator"):
        claims(lambda x: x * draw(tf.shape(x)), X)


def test_an_unknown_operation_is_named():
    values, _, walk = claims(tf.math.lgamma, X)
    assert values[0].reason == "unknown"
    assert walk.reading.without_rule == {"Lgamma"}


def test_every_rule_is_for_an_operation_that_exists():
    names = {name.lower() for name in dir(tf.raw_ops)}
    missing = [k for k in known_operations() if k.lower() not in names]
    assert not missing
