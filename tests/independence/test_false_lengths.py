"""What a hostile reader got past the reading: a false length, number or value that it believed, and writes unread.

In each of these programs a sum over the batch passed for one of something else, and one example moved a clipped sum of
32 examples by up to 38 clips; or what a function or a second run wrote stayed in the model.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from brute import claims

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.sensitivity.independence import ByExample, Shared
from tfdp_rec.core.sensitivity.independence.values import Sized

raw = tf.raw_ops


class Loss(tfdp_rec.PrivateTraining, keras.Model):
    """A dense layer, and a loss of what `function` makes of it."""

    def __init__(self, function):
        super().__init__()
        self.dense, self.function = keras.layers.Dense(3), function
        self.dense.build([None, 3])
        self.built = True

    def per_example_loss(self, data, training=True):
        return self.function(self, data)


def mechanism():
    return tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4)


def total(x):
    return tf.reduce_sum(tf.square(x), axis=-1)


X = np.random.default_rng(0).normal(size=[4, 3]).astype("float32")
IDS = np.array([0, 1, 2, 1])


def table(kind):
    """A lookup table whose entries are vectors of one number: what it gives has an axis more than its keys."""
    more = {"empty_key": -1, "deleted_key": -2} if kind.__name__ == "DenseHashTable" else {}
    return kind(tf.int64, tf.float32, default_value=[0.0], **more)


def list_of(value, shape=()):
    made = raw.EmptyTensorList(
        element_shape=tf.constant(shape, tf.int32), max_num_elements=-1, element_dtype=value.dtype
    )
    return raw.TensorListPushBack(input_handle=made, tensor=value)


def last(held, dtype=tf.int32, shape=()):
    return raw.TensorListPopBack(
        input_handle=held, element_shape=tf.constant(shape, tf.int32), element_dtype=dtype
    )[1]


def sum_along(x, axis):
    return tf.reduce_sum(x, axis=axis)


def rows_of_unlike_shapes(x, keep):
    """`==` of shapes that do not fit is one False: its first length is none."""
    length = tf.shape(tf.boolean_mask(tf.constant([1.0, 2.0, 3.0]), keep))[0]
    rows = tf.reduce_prod(tf.shape(x == tf.ones([length]))[:1])
    return tf.reduce_sum(tf.reshape(x, tf.stack([rows, -1])), axis=1)


def grown(x):
    """A list that grows to its second entry: the first is zeros, of the shape that is asked for."""
    made = raw.EmptyTensorList(element_shape=tf.constant(-1), max_num_elements=-1, element_dtype=tf.float32)
    held = raw.TensorListSetItem(input_handle=made, index=1, item=x, resize_if_index_out_of_bounds=True)
    hole = raw.TensorListGetItem(
        input_handle=held, index=0, element_shape=tf.constant([1, 1]), element_dtype=tf.float32
    )
    return tf.reduce_sum(tf.reshape(x, tf.stack([raw.Shape(input=hole)[0], -1])), axis=1)


def grown_numbers(x):
    held = tf.TensorArray(tf.int32, size=1, dynamic_size=True, element_shape=[]).unstack(tf.constant([1]))
    return sum_along(x, held.write(2, tf.constant(1)).read(1))


def hole_before_a_loop(x):
    """An entry that was never written, and a loop of its own behind it, which took the note of that away."""

    def turn(i, rows):
        never = tf.TensorArray(tf.float32, size=1, element_shape=[1], infer_shape=False)
        rows = tf.ensure_shape(never.read(0), [1]) + x[:, :1]
        tf.while_loop(lambda j: j < 1, lambda j: (j + 1,), [tf.constant(0)])
        return i + 1, rows

    shapes = [tf.TensorShape([]), tf.TensorShape([None, 1])]
    return tf.reduce_sum(tf.while_loop(lambda i, s: i < 1, turn, [tf.constant(0), tf.zeros([1, 1])], shapes)[1])


def choose(x, select):
    chosen = select(list_of(tf.ones([4]), [-1]), list_of(x[:, 0], [-1]))
    return tf.reduce_sum(
        raw.TensorListGetItem(input_handle=chosen, index=0, element_shape=tf.constant(-1), element_dtype=tf.float32), 0
    )


def axis_of_a_stretched_gradient(x):
    """Features [B, 1] and labels [B, 3] have a gradient [B, 3]: three, modulo three, is the batch's axis."""
    gradient = raw.SoftmaxCrossEntropyWithLogits(features=x[:, :1], labels=x)[1]
    return sum_along(x[:, :1], raw.Shape(input=gradient)[1] % 3)


FALSE = {
    "zeros like a list of numbers": lambda x: sum_along(x, last(tf.zeros_like(list_of(tf.constant(1))))),
    "a sum of lists of numbers": lambda x: sum_along(x, last(raw.AddN(inputs=[list_of(tf.constant(-1))] * 2))),
    "one of two lists": lambda x: choose(x, lambda a, b: raw.SelectV2(condition=tf.constant(False), t=a, e=b)),
    "one of two lists, in the older form": lambda x: choose(
        x, lambda a, b: raw.Select(condition=tf.constant(False), x=a, y=b)
    ),
    "a list that grows": grown,
    "a list of numbers that grows": grown_numbers,
    "a hole before a loop": hole_before_a_loop,
    "a stretched gradient": axis_of_a_stretched_gradient,
    "a pad before the examples": lambda x: tf.pad(tf.transpose(x), [[0, 0], [1, 0]]),
}


@pytest.mark.parametrize("name", FALSE)
def test_no_sum_over_the_batch_passes_for_another(name):
    values, _, _ = claims(FALSE[name], X)
    assert not any(isinstance(v, (ByExample, Shared, Sized)) for v in values), values


@pytest.mark.parametrize("kind", [tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable])
def test_tables_of_vectors_are_not_read(kind):
    held = table(kind)
    held.insert(tf.constant([0, 1, 2], tf.int64), [[1.0], [2.0], [5.0]])
    looked_up = Loss(
        lambda model, d: total(model.dense(d["x"]))
        * tf.reduce_sum(raw.Transpose(x=held.lookup(d["ids"]), perm=[1, 0]), axis=1)
    )
    with pytest.raises(tfdp_rec.NotPrivate, match="LookupTableFindV2"):
        clipped_sum(looked_up, {"x": X, "ids": IDS}, 1.0)


def test_equality_of_shapes_that_may_not_fit_is_not_read():
    values, _, _ = claims(rows_of_unlike_shapes, X, shared=(np.array([True, True, False]),))
    assert not any(isinstance(v, (ByExample, Shared, Sized)) for v in values), values


def test_the_length_that_fills_up_an_empty_tensor_is_another_one():
    """Of lengths 0, 1, 0 a reshape to -1, 0 leaves zeros out: its first length is 1, and was taken for the first 0."""

    @tf.function(autograph=False)
    def kept(keep):
        return tf.shape(tf.boolean_mask(tf.ones([3]), keep))[0]

    def reshaped(x, one, other):
        some = tf.ones([kept(one), 1, 1]) * tf.ones([1, 1, kept(other)])
        return tf.shape(some)[0], tf.shape(tf.reshape(some, [-1, tf.shape(some)[2]]))[0]

    nothing = np.zeros([3], bool)
    (first, filled), _, _ = claims(reshaped, X, shared=(nothing, nothing))
    assert first.numbers is not None and first != filled


def test_lengths_of_two_calls_have_two_names():
    @tf.function(autograph=False)
    def kept(keep):
        return tf.shape(tf.boolean_mask(tf.ones([3]), keep))[0]

    def stretched(x, one, other):
        return tf.reshape(x[:, :1] + tf.zeros([kept(one)]), [-1, kept(other)])

    (value,), _, _ = claims(stretched, X, shared=(np.array([True, True, True]), np.array([True, False, False])))
    assert value != ByExample(0)


def test_a_length_that_grows_from_turn_to_turn_is_not_known():
    """Each turn hands a length on by one variable: the last learns of it when all values have settled."""

    def handed_on(x):
        shapes = [tf.TensorShape([]), *[tf.TensorShape([None, None])] * 3]
        turn = lambda i, a, b, c: (i + 1, tf.concat([a, a], 1), a, b)  # noqa: E731
        last = tf.while_loop(lambda i, *_: i < 4, turn, [tf.constant(0), *[x[:, :1]] * 3], shapes)[3]
        return tf.reshape(last, [-1])

    (value,), _, _ = claims(handed_on, X)
    assert value != ByExample(0)


def test_examples_along_the_second_axis_are_no_rows():
    class Turned(tfdp_rec.PrivateTraining, keras.Model):
        def per_example_loss(self, data, training=True):
            return tf.reduce_sum(self.items(tf.transpose(data)), axis=[0, 2])

    model = Turned()
    model.items, model.built = keras.layers.Embedding(4, 3), True
    model.items.build(None)
    with pytest.raises(tfdp_rec.NotPrivate, match="order"):
        clipped_sum(model, np.stack([IDS] * 4, 1), 1.0)


# Writes.


class Kept(Loss):
    """A loss with a place for rows."""

    def __init__(self, function):
        super().__init__(function)
        self.bank = self.add_weight(shape=[3], initializer="zeros", trainable=False, name="bank")
        self.mean = keras.metrics.Mean(name="mean")


def call_within(kind):
    def loss(model, x):
        put = tf.function(lambda row: [model.bank.assign(tf.reshape(row, [-1, 3])[0]), tf.reduce_sum(row)][1])
        body = put.get_concrete_function(tf.TensorSpec([3] if kind != "BatchFunction" else [None, 3]))
        first, beside = tf.reduce_sum(x, 0), body.captured_inputs
        if kind == "StatelessIf":
            out = raw.StatelessIf(cond=True, input=[first, *beside], Tout=[tf.float32], then_branch=body,
                                  else_branch=body)  # fmt: skip
        elif kind == "StatelessCase":
            out = raw.StatelessCase(branch_index=0, input=[first, *beside], Tout=[tf.float32], branches=[body, body])
        elif kind == "MapDefun":
            out = raw.MapDefun(arguments=[x], captured_inputs=beside, output_types=[tf.float32], output_shapes=[[]],
                               f=body)  # fmt: skip
        else:
            out = raw.BatchFunction(in_tensors=[x], captured_tensors=beside, f=body, num_batch_threads=1,
                                    max_batch_size=4, batch_timeout_micros=0, Tout=[tf.float32])  # fmt: skip
        result = out[0] if isinstance(out, (list, tuple)) else out
        result.set_shape([4] if kind == "MapDefun" else [])
        model.mean.update_state(result)
        return total(model.dense(x))

    return loss


@pytest.mark.parametrize("kind", ["StatelessIf", "StatelessCase", "MapDefun", "BatchFunction"])
def test_functions_in_operations_without_a_rule_are_read_for_what_they_write(kind):
    model = Kept(call_within(kind))
    with pytest.raises(tfdp_rec.NotPrivate):
        clipped_sum(model, X, 1.0)
    assert not model.bank.numpy().any()


class WritesWhenRunAgain(keras.layers.Layer):
    """A layer without a rule: it is run again for one example, which is a row."""

    def __init__(self, write):
        super().__init__()
        self.w, self.write = self.add_weight(shape=[3, 3], name="w"), write
        self.bank = self.add_weight(shape=[3], dtype="int32", initializer="zeros", trainable=False, name="bank")
        self.generator, self.built = tf.random.Generator.from_seed(1), True

    def call(self, x):
        if x.shape[0] == 1:
            self.write(self, x[0])
        return tf.square(tf.matmul(x, self.w))


@pytest.mark.parametrize("way", ["a weight", "a generator", "a file"])
def test_what_a_second_run_of_a_layer_writes_is_refused(way, tmp_path):
    path = tmp_path / "rows"
    write = {
        "a weight": lambda layer, row: layer.bank.assign(tf.cast(row * 1000, tf.int32)),
        "a generator": lambda layer, row: layer.generator.skip(tf.cast(row[0] * 1e6, tf.int64)),
        "a file": lambda layer, row: tf.io.write_file(str(path), tf.strings.as_string(row[0])),
    }[way]

    class Model(tfdp_rec.PrivateTraining, keras.Model):
        def per_example_loss(self, data, training=True):
            return tf.reduce_sum(self.layer(data), axis=-1)

    model = Model()
    model.layer, model.built = WritesWhenRunAgain(write), True
    before = model.layer.generator.state.numpy()
    with pytest.raises(tfdp_rec.NotPrivate, match="run again for each example"):
        clipped_sum(model, X, 1.0)  # by hand, where no step's writes are read
    model.compile(mechanism())
    with pytest.raises(tfdp_rec.NotPrivate):
        model.train_on_batch(X)
    assert not model.layer.bank.numpy().any() and not path.exists()
    assert np.array_equal(before, model.layer.generator.state.numpy())
