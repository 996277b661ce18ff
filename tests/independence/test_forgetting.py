"""Refined facts are forgotten unless a rule keeps them: what was believed of places, lengths, shapes and seeds.

`removal` is how far a clipped sum moves, in clips, when one example is taken out. The figures are those of 986fe75.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from brute import claims, holds
from keras import layers

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.sensitivity.batches import hide_batch_axis
from tfdp_rec.core.sensitivity.independence import ByExample, Shared, Walk, known_operations, reading
from tfdp_rec.core.sensitivity.independence.rules.elementwise import ENTRY_BY_ENTRY, IN_MEMORY_ORDER
from tfdp_rec.core.sensitivity.independence.sizes import BATCH, SizeArray, letter, size
from tfdp_rec.core.sensitivity.independence.values import Mixed
from tfdp_rec.core.sensitivity.own_rows import own_rows

N = 600
FIRST = np.where(np.arange(N) == 0, 1, -1).astype("float32")
TURNS = np.repeat(FIRST[:64, None], 4, axis=1)


class Weighed(tfdp_rec.PrivateTraining, keras.Model):
    """A dense layer of one input, whose output is multiplied by what `factor` makes of the batch."""

    def __init__(self, factor):
        super().__init__()
        self.dense, self.factor = layers.Dense(1, use_bias=False, kernel_initializer="ones"), factor
        self.four = keras.Variable(np.array(4, "int32"), trainable=False, dtype="int32", name="four")

    def per_example_loss(self, data, training=True):
        return self.dense(data["x"])[:, 0] * self.factor(self, data)


def removal(factor, **batch):
    batch = {"x": np.ones([len(next(iter(batch.values()))), 1], "float32"), **batch}
    model = Weighed(factor)
    model.dense.build([None, 1])
    model.built = True
    with_all, without = (clipped_sum(model, b, 1.0) for b in (batch, {k: v[1:] for k, v in batch.items()}))
    return sum(float(tf.norm(g - without.gradients[path])) for path, g in with_all.gradients.items())


def places(data):
    return tf.range(tf.shape(data["x"])[0])


@pytest.mark.parametrize("kind", ["uint8", "bool", "bfloat16", "float16", "int8", "int16", "int64"])
def test_places_in_another_type(kind):
    """4.8 clips for uint8, 1,161 for bool (by the second example)."""

    def row_of_another(model, data):
        return tf.gather(data["s"], tf.cast(tf.cast(places(data), kind), tf.int32))

    with pytest.raises(tfdp_rec.NotPrivate, match="Range in .*place of an example"):
        removal(row_of_another, s=FIRST)


def test_tuples_run_together():
    def rows_of_others(model, data):
        tuples = tf.stack([tf.tile(places(data)[:, None], [1, 4]), data["c"]], axis=2)
        found = tf.function(lambda v: v * 1.0, autograph=False)(tf.gather_nd(data["t"], tf.reshape(tuples, [-1, 2])))
        return found[: tf.shape(data["x"])[0]]

    with pytest.raises(tfdp_rec.NotPrivate, match="place of an example"):
        removal(rows_of_others, t=TURNS, c=np.zeros([64, 4], "int32"))


def test_places_times_a_factor_of_more_axes():
    values, _, _ = claims(lambda x: tf.gather(x, tf.range(tf.shape(x)[0]) * tf.constant([[1]])), TURNS)
    assert not isinstance(values[0], (ByExample, Shared))


def test_a_vector_of_conditions_in_the_older_form():
    """It lines up from the left, which no model needs."""
    older = lambda x: tf.raw_ops.Select(condition=x[:, 0] > 0, x=x, y=-x)  # noqa: E731
    values, _, _ = claims(older, TURNS)
    assert not isinstance(values[0], (ByExample, Shared))
    holds(lambda x: tf.raw_ops.Select(condition=x > 0, x=x, y=-x), TURNS[:4], expect=[ByExample(0)])


def test_own_places_with_batch_dims():
    square = np.ones([4, 4], "float32")
    values, _, _ = claims(lambda x: tf.gather(x, tf.range(tf.shape(x)[0]), batch_dims=1), square)
    assert not isinstance(values[0], (ByExample, Shared))


def test_bits_that_take_the_axis_of_the_batch_along():
    values, _, _ = claims(lambda x: tf.bitcast(tf.transpose(x), tf.float32), np.ones([4, 3], "uint8"))
    assert not isinstance(values[0], (ByExample, Shared))


def test_a_declared_shape_is_not_believed():
    """2.9 clips."""

    def cut_anew(model, data):
        several = data["t"][:, : model.four.value]
        several.set_shape([None, 2])  # four, in truth
        return tf.reshape(several, [-1, 2])[:, 0][: tf.shape(data["x"])[0]]

    with pytest.raises(tfdp_rec.NotPrivate, match="another order"):
        removal(cut_anew, t=TURNS)


def test_a_length_of_one_turn_is_not_that_of_the_next():
    """2.9 clips."""

    def cut_by_the_turn_before(model, data):
        def turn(i, several, lengths, _):
            lengths = lengths.write(i, tf.shape(several)[1])
            before = lengths.read(tf.maximum(i - 1, 0))
            cut = tf.reshape(several, tf.stack([-1, before]))[:, 0][: tf.shape(data["x"])[0]]
            return i + 1, tf.concat([several, several], 1), lengths, cut

        start = (0, data["t"][:, : model.four.value], tf.TensorArray(tf.int32, 2, element_shape=[]), data["t"][:, 0])
        shapes = (tf.TensorShape([]), tf.TensorShape([None, None]), None, tf.TensorShape([None]))
        return tf.while_loop(lambda i, *_: i < 2, turn, start, shape_invariants=shapes)[3]

    with pytest.raises(tfdp_rec.NotPrivate, match="another order"):
        removal(cut_by_the_turn_before, t=TURNS)


def test_an_own_row_beyond_the_last_is_no_row_of_another():
    """Id 8 of the first example was row 0 of the third; the forward gather, which would stop, is pruned."""

    @tf.function(autograph=False)
    def gradient(rows, ids):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            found = tf.gather(rows, ids, batch_dims=1)
        with own_rows():
            return tape.gradient(found, rows)

    found = gradient(tf.ones([4, 4]), tf.constant([8, 0, 0, 0]))
    np.testing.assert_array_equal(found, np.array([[0], [1], [1], [1]]) * [1, 0, 0, 0])


@pytest.mark.parametrize("stripped", [False, True])
def test_a_tensor_of_one_row_is_not_one_row_an_example(stripped):
    """123 clips at 64 examples."""
    tf.config.optimizer.set_experimental_options({"debug_stripper": stripped})
    try:
        model = Weighed(lambda model, data: data["s"])
        model.dense.build([None, 1])
        with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
            clipped_sum(model, {"x": np.ones([64, 1], "float32"), "s": np.ones([1], "float32")}, 1.0)
    finally:
        tf.config.optimizer.set_experimental_options({"debug_stripper": False})


def test_a_batch_has_as_many_rows_in_each_tensor_as_in_its_first():
    signature = [{"x": tf.TensorSpec([None, 1]), "s": tf.TensorSpec([None])}]
    rows = tf.function(lambda batch: hide_batch_axis(batch)["s"], input_signature=signature, autograph=False)
    assert len(rows({"x": tf.ones([4, 1]), "s": tf.ones([4])})) == 4
    with pytest.raises(tf.errors.InvalidArgumentError, match="one row an example"):
        rows({"x": tf.ones([4, 1]), "s": tf.ones([1])})


def in_tuples_of(number, data):
    """The first entries of the tuples of `number` that the turns are cut into, one for each example."""
    return tf.reshape(data["t"], tf.stack([-1, number]))[:, 0][: tf.shape(data["x"])[0]]


def cut(model, data, number):
    """A tensor with a length of `number` that is unknown while tracing."""
    return data["t"][:, : model.four.value * 0 + number]


def a_length_of_zero_and_one(model, data):
    none = tf.shape(cut(model, data, 0))[1]
    return in_tuples_of(4 // (1 + (tf.maximum(none, 1) - none)), data)


def a_length_of_one_that_is_broadcast(model, data):
    one = tf.shape(cut(model, data, 1))[1]
    axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=tf.stack([one]), s1=[5])
    return in_tuples_of(4 // (1 + tf.minimum(5 - tf.concat([axes, [5]], 0)[0], 1)), data)


def equal_shapes_that_are_broadcast(model, data):
    axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=[1, 3], s1=[1, 3])
    return in_tuples_of(4 // (1 + tf.minimum(tf.concat([axes, [5]], 0)[0], 1)), data)


def a_difference_of_minus_one(model, data):
    one, two = (tf.shape(cut(model, data, number))[1] for number in (1, 2))
    length = one - two
    several = tf.reshape(data["t"], tf.stack([tf.shape(data["t"])[0], length, 2]))
    return in_tuples_of(4 // (1 + tf.minimum(tf.shape(several)[1] - length, 1)), data)


def a_negative_length(model, data):
    length = 0 - tf.shape(cut(model, data, 1))[1]
    several = tf.reshape(data["t"], tf.stack([tf.shape(data["t"])[0], length, 2]))
    return in_tuples_of(4 // (1 + tf.minimum(tf.shape(several)[1] - length, 1)), data)


def a_length_beyond_32_bits(model, data):
    length = tf.shape(tf.zeros([model.four.value * 2**23]))[0]
    return in_tuples_of(4 // (1 + tf.minimum(length - length * 64 // 64, 1)), data)


@pytest.mark.parametrize("way", [a_length_of_zero_and_one, a_length_of_one_that_is_broadcast, a_difference_of_minus_one,
                                 equal_shapes_that_are_broadcast, a_negative_length, a_length_beyond_32_bits],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_arithmetic_with_unknown_lengths_is_right_for_all_of_them(way):
    """2.9 clips where it was followed for lengths above 1 alone."""
    with pytest.raises(tfdp_rec.NotPrivate, match="another order|place of an example"):
        removal(way, t=TURNS)


LONG = np.ones([17, 20], "float32")  # computed as 32 rows, and without the first as 16


def strides_of_the_batch(model, data):
    found = tf.strided_slice(data["l"], [0, 0], [0, 0], tf.stack([1, tf.shape(data["l"])[0]]), 3, 3)
    return tf.where(tf.reduce_sum(tf.ensure_shape(found, [None, None]), 1) > 1.5, 1.0, -1.0)


def a_gradient_at_the_place_of_the_batch(model, data):
    size = tf.shape(data["l"])[0]
    found = tf.raw_ops.StridedSliceGrad(
        shape=tf.stack([size, 40]), begin=tf.stack([0, size]), end=tf.stack([size, size + 1]), strides=[1, 1],
        dy=data["l"][:, :1], begin_mask=1, end_mask=1,
    )  # fmt: skip
    return tf.where(tf.ensure_shape(found, [None, 40])[:, 16] > 0.5, 1.0, -1.0)


def images_as_large_as_the_batch_says(model, data):
    size = tf.shape(data["l"])[0]
    shape, filters = tf.stack([size, 15 + size // 16 % 2, 1, 1]), tf.reshape([1.0, 2.0, 3.0], [3, 1, 1, 1])
    found = tf.nn.conv2d_transpose(data["l"][:, :8, None, None], filters, shape, [1, 2, 1, 1], "SAME")
    return tf.sin(100.0 * tf.reduce_sum(found[:, :15, 0, 0] * tf.range(1.0, 16.0), 1))


@pytest.mark.parametrize("way", [strides_of_the_batch, a_gradient_at_the_place_of_the_batch,
                                 images_as_large_as_the_batch_says], ids=lambda f: f.__name__)  # fmt: skip
def test_the_number_of_examples_is_no_argument(way):
    """32 clips with one row less, 9.7 for the image."""
    with pytest.raises(tfdp_rec.NotPrivate, match="number of examples"):
        removal(way, l=LONG)


def written_into(model, data):
    zeros = tf.zeros([4]) + tf.cast(model.four.value * 0, tf.float32)
    written = tf.raw_ops.InplaceUpdate(x=zeros, i=[0], v=data["t"][:1, 0])
    with tf.control_dependencies([written]):
        return tf.identity(zeros)[0] * tf.ones_like(data["t"][:, 0])


def written_to_a_file(model, data):
    copied = tf.raw_ops.DebugIdentity(input=data["t"], debug_urls=["file:///nowhere"])
    with tf.control_dependencies([copied]):
        return tf.identity(data["t"][:, 0])


@pytest.mark.parametrize("way", [written_into, written_to_a_file], ids=lambda f: f.__name__)
def test_effects_of_operations_that_tensorflow_calls_stateless(way):
    """A shared tensor that was written into moved the sum by 123 clips."""
    with pytest.raises(tfdp_rec.NotPrivate, match="has an effect beside its result"):
        removal(way, t=TURNS)


@pytest.mark.parametrize("same", [lambda handle: handle, tf.identity])
def test_a_metric_is_read_by_no_other_tensor_of_its_handle(same):
    def count_so_far(model, data):
        model.seen.update_state(tf.reduce_sum(data["t"]))
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) * tf.ones_like(data["x"][:, 0])

    model = Weighed(count_so_far)
    model.seen = keras.metrics.Sum()
    handle = same(model.seen.total.value.handle)
    model.dense.build([None, 1])
    with pytest.raises(tfdp_rec.NotPrivate, match="reads a metric"):
        clipped_sum(model, {"x": np.ones([64, 1], "float32"), "t": TURNS}, 1.0)


def test_places_that_nothing_is_put_into_hold_what_was_in_memory():
    values, _, _ = claims(lambda x: tf.dynamic_stitch([[0], [2]], [[1.0], [2.0]]), TURNS)
    assert not isinstance(values[0], (ByExample, Shared))


def test_what_a_function_without_a_rule_reads_is_unknown():
    values, _, _ = claims(lambda x: tf.switch_case(tf.constant(0), [lambda: tf.constant(1.0)]), TURNS)
    assert not isinstance(values[0], (ByExample, Shared))


class Gate(layers.Layer):
    """Multiplies by a weight, and by something that is no argument of its call."""

    def __init__(self, way):
        super().__init__()
        self.way, self.beside = way, None

    def build(self, shape):
        self.scale = self.add_weight(shape=[shape[-1]], initializer="ones")

    def call(self, x):
        return x * self.way(self.scale.value, self.beside)


def a_product(scale, beside):
    return scale * beside


def a_gradient_alone(scale, beside):
    return tf.custom_gradient(lambda v: (v * 1.0, lambda g: g * tf.reduce_mean(beside)))(scale)


class Gated(tfdp_rec.PrivateTraining, keras.Model):
    def __init__(self, way):
        super().__init__()
        self.gate = Gate(way)
        self.gate.build([None, 3])

    def per_example_loss(self, data, training=True):
        self.gate.beside = data["c"]
        return tf.reduce_sum(self.gate(data["x"]), axis=1)


@pytest.mark.parametrize("way", [a_product, a_gradient_alone], ids=lambda f: f.__name__)
def test_a_layer_that_is_run_again_for_each_example_reads_its_arguments_alone(way):
    """123 clips: the second run saw all examples at once."""
    batch = {"x": np.ones([64, 3], "float32"), "c": np.where(np.arange(64) == 0, -1e6, 1.0).astype("float32")[:, None]}
    with pytest.raises(tfdp_rec.NotPrivate, match="as an argument"):
        clipped_sum(Gated(way), batch, 1.0)


class Moved(tfdp_rec.PrivateTraining, keras.Model):
    """Weights of its own, whose gradient goes where the examples together say."""

    def __init__(self, way):
        super().__init__()
        self.way, self.own, self.built = way, self.add_weight(shape=[8], initializer="ones"), True

    def per_example_loss(self, data, training=True):
        there = tf.cast(tf.reduce_sum(data["s"]) > 0, tf.int32)
        part = tf.custom_gradient(lambda own: (tf.concat([own, own], 0), lambda g: self.way(g, there)))
        return tf.reduce_sum(data["x"] * part(tf.convert_to_tensor(self.own.value)), axis=1)


def a_place_in_a_slice(g, there):
    begin, part = tf.reshape(there, [1]), tf.reduce_sum(tf.reshape(g, [4, 4]), 0)
    return tf.raw_ops.StridedSliceGrad(shape=[8], begin=begin, end=begin + 4, strides=[1], dy=part)


def a_shape(g, there):
    return tf.reshape(tf.reduce_sum(tf.reshape(g, tf.stack([4 + 4 * there, 2, 2 // (1 + there)])), 1), [8])


@pytest.mark.parametrize("way", [a_place_in_a_slice, a_shape], ids=lambda f: f.__name__)
def test_data_does_not_say_where_shares_of_a_gradient_go(way):
    """41 clips for the place, 7.4 for the shape."""
    rng = np.random.default_rng(0)
    x = np.abs(rng.normal(size=[64, 16])).astype("float32") * np.arange(16, dtype="float32")
    with pytest.raises(tfdp_rec.NotPrivate, match="each example's part in it is unknown"):
        clipped_sum(Moved(way), {"x": x, "s": np.where(np.arange(64) == 0, 1000, -1).astype("float32")}, 1.0)


class Recalling(layers.Layer):
    """Attends to rows that all examples share."""

    def build(self, shape):
        self.scale = self.add_weight(shape=[shape[-1]], initializer="ones")

    def call(self, x, memory):
        return tf.matmul(tf.nn.softmax(tf.matmul(x * self.scale, memory, transpose_b=True)), memory)


def test_shared_rows_as_many_as_examples_are_not_split_among_them():
    class Recalls(tfdp_rec.PrivateTraining, keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = Recalling()
            self.layer.build([None, 3])
            self.memory = tf.Variable(np.eye(16, 3, dtype="float32"), False, shape=[None, 3])

        def per_example_loss(self, data, training=True):
            return tf.reduce_sum(self.layer(data, self.memory.read_value()), axis=1)

    with pytest.raises(tfdp_rec.NotPrivate, match="first axis is not the batch"):
        clipped_sum(Recalls(), np.ones([16, 3], "float32"), 1.0)


def test_a_loop_that_doubles_a_length_has_neither_of_both():
    def turn(i, several):
        return i + 1, tf.concat([several, several], 1)

    free = tf.TensorShape([]), tf.TensorShape([None, None])
    holds(lambda x: tf.while_loop(lambda i, _: i < 2, turn, (0, x), free)[1], TURNS[:4], expect=[ByExample(0)])


class Draws(layers.Layer):
    """Draws from its seed as `way` says."""

    def __init__(self, way):
        super().__init__()
        self.generator, self.other, self.way = keras.random.SeedGenerator(3), keras.random.SeedGenerator(4), way

    def call(self, x):
        vars(self.generator)["other"] = self.other
        return x * self.way(self.generator, tf.shape(x)[0])


_drawn = tf.function(lambda shape, seed: tf.random.stateless_uniform(shape, seed), autograph=False)


def two_shapes(generator, size):
    seed = tf.cast(generator.next(), tf.int32)
    return _drawn([size, 3], seed)[:, :1] * _drawn([size, 6], seed)[:, :1]


def zero_times_a_seed(generator, size):
    return tf.random.stateless_uniform([size, 1], tf.cast(generator.next() * 0, tf.int32))


def a_bool_of_a_seed(generator, size):
    return tf.random.stateless_uniform([size, 1], tf.cast(tf.cast(generator.next(), tf.bool), tf.int32))


def a_byte_of_a_seed(generator, size):
    return tf.random.stateless_uniform([size, 1], tf.cast(tf.cast(generator.next(), tf.uint8), tf.int32))


def a_constant_state(generator, size):
    generator.state.assign(tf.constant([1, 2], generator.state.dtype))
    return tf.random.stateless_uniform([size, 1], tf.cast(generator.next(), tf.int32))


def a_write_that_may_not_happen(generator, size):
    first = tf.random.stateless_uniform([size, 1], tf.cast(generator.state.value, tf.int32))

    def turn(i):
        generator.state.value.assign_add(tf.constant([0, 1], generator.state.value.dtype))
        return i + 1

    tf.while_loop(lambda i: i < 0, turn, [0])
    return first * tf.random.stateless_uniform([size, 2], tf.cast(generator.state.value, tf.int32))[:, :1]


def the_same_state_again(generator, size):
    state = generator.state.value
    first = tf.random.stateless_uniform([size, 3], tf.cast(state, tf.int32))[:, :1]
    generator.state.assign(state)
    return first * tf.random.stateless_uniform([size, 6], tf.cast(generator.state.value, tf.int32))[:, :1]


def the_next_state_before_its_time(generator, size):
    following = generator.state.value + tf.constant([0, 1], tf.int64)
    first = tf.random.stateless_uniform([size, 3], tf.cast(following, tf.int32))[:, :1]
    generator.state.assign(following)
    return first * tf.random.stateless_uniform([size, 6], tf.cast(generator.state.value, tf.int32))[:, :1]


def the_state_of_another(generator, size):
    generator.state.assign(generator.other.state.value + tf.constant([0, 1], tf.int64))
    first = tf.random.stateless_uniform([size, 3], tf.cast(generator.state.value, tf.int32))[:, :1]
    generator.other.next()
    return first * tf.random.stateless_uniform([size, 6], tf.cast(generator.other.state.value, tf.int32))[:, :1]


def a_known_key(generator, size):
    _, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.cast(generator.next(), tf.int32))
    key = tf.constant([5], tf.uint64)
    return tf.raw_ops.StatelessRandomUniformV2(shape=[size, 1], key=key, counter=counter, alg=1, dtype=tf.float32)


@pytest.mark.parametrize("way", [the_same_state_again, the_next_state_before_its_time, the_state_of_another,
                                 a_known_key, two_shapes, zero_times_a_seed, a_bool_of_a_seed, a_byte_of_a_seed,
                                 a_constant_state, a_write_that_may_not_happen], ids=lambda f: f.__name__)  # fmt: skip
def test_a_seed_is_secret_and_drawn_from_once(way):
    """All but the byte were accepted."""
    inputs = keras.Input([1])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(Draws(way)(inputs)))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse")
    with pytest.raises(tfdp_rec.NotPrivate, match="seed"):
        model.train_on_batch(np.ones([4, 1], "float32"), np.ones([4, 1], "float32"))


def test_numbers_that_32_bits_do_not_hold_are_forgotten():
    entries = [size(2**31 - 1), size(2**31), BATCH * size(2**15 - 1), BATCH * size(2**15), BATCH * letter("T")]
    held = SizeArray.row(entries)
    assert [entry is not None for entry in held.sizes] == [True, False, True, False, False]
    # B · 2³¹ is 0 or -2³¹ in 32 bits, as B is even or odd; divided by B it was taken for a number that all share.
    values, _, _ = claims(lambda x: x * tf.cast(tf.shape(x)[0] * 2**30 * 2 // tf.shape(x)[0], tf.float32), TURNS)
    assert not isinstance(values[0], (ByExample, Shared))


def test_a_rule_that_does_not_say_so_keeps_no_numbers(monkeypatch):
    monkeypatch.setitem(reading._RULES, "Invert", reading._Registered(lambda at: at.values[0]))
    values, _, _ = claims(lambda x: tf.bitwise.invert(tf.constant([1, 2])), TURNS)
    assert values == [Shared()]


def test_a_rule_makes_nothing_shared_of_an_example(monkeypatch):
    monkeypatch.setitem(reading._RULES, "Invert", reading._Registered(lambda at: Shared()))
    values, _, _ = claims(lambda x: tf.bitwise.invert(x), np.ones([4, 3], "int32"))
    assert not isinstance(values[0], (ByExample, Shared))


def test_numbers_of_other_types_are_not_followed():
    """0 - 1 is 4,294,967,295 in uint32."""
    less = lambda x: tf.cast(tf.constant([0], tf.uint32) - tf.constant([1], tf.uint32), tf.int64)  # noqa: E731
    assert holds(less, TURNS) == [Shared()]


def _operands(name):
    """Raw arguments of an operation that works entry by entry."""
    x = np.random.default_rng(0).uniform(0.1, 0.9, size=[4, 3]).astype("float32")
    if name.startswith("Logical"):
        x = x > 0.5
    if name.startswith("String"):
        x = x.astype(str).astype(object)
    given = {"num_buckets": 5, "boundaries": [0.3, 0.6]}
    told = inspect.signature(tf.raw_ops.__dict__[name]).parameters.values()
    tensors = [p.name for p in told if p.default is inspect.Parameter.empty and p.name not in given]
    return x, tensors, {p.name: given[p.name] for p in told if p.name in given}


@pytest.mark.parametrize("name", [*ENTRY_BY_ENTRY, *IN_MEMORY_ORDER])
def test_every_operation_that_works_entry_by_entry_does(name):
    x, tensors, fixed = _operands(name)
    run = lambda a: tf.raw_ops.__dict__[name](**dict.fromkeys(tensors, a), **fixed)  # noqa: E731
    holds(run, x, expect=[ByExample(0)])


@pytest.mark.parametrize("name", ["IsNan", "SoftplusGrad"])
def test_what_gradients_hold_under_tensorflow_2_22_alone_is_known(name):
    assert name in known_operations()


@pytest.mark.parametrize("name", ["RsqrtGrad", "SigmoidGrad", "SqrtGrad", "TanhGrad"])
@pytest.mark.parametrize("case", ["shared", "another rank", "another layout"])
def test_an_operation_in_the_order_of_memory_lines_no_axes_up(name, case):
    """These kernels take any two tensors of equally many entries: [4] and [1, 4], or [2, B, 3] and [3, B, 2]."""
    first, second = [a.name for a in tf.raw_ops.__dict__[name].__signature__.parameters.values()][:2]

    def run(x):
        b = tf.shape(x)[0]
        wide = tf.transpose(tf.reshape(x, [b, 2, 3]), [1, 0, 2])
        other = {
            "shared": tf.ones([6]),
            "another rank": x[None],
            "another layout": tf.transpose(tf.reshape(x, [b, 3, 2]), [1, 0, 2]),
        }[case]
        return tf.raw_ops.__dict__[name](**{first: wide if case == "another layout" else x, second: other})

    (found,), *_ = claims(run, np.ones([1, 6], "float32"))
    assert isinstance(found, Mixed)


def test_there_are_no_more_operations_than_models_need():
    assert len(known_operations()) < 160


@pytest.mark.parametrize("by_size", [True, False])
def test_a_reshape_that_the_optimizer_removes_says_nothing_of_lengths(by_size):
    """[4, 4] is [4, 4] still where [B, 4] or [T, 4] was asked for, in a batch of one and for a list of one."""
    weights = np.arange(16, dtype="float32").reshape(4, 4)

    def reshaped(x, shared):
        asked = tf.concat([tf.shape(x if by_size else shared)[:1], [4]], 0)
        return tf.sin(tf.reshape(tf.constant(weights), asked))

    one = np.ones([1, 4], "float32")
    specs = [tf.TensorSpec([None, 4]), tf.TensorSpec([None, 4])]
    graph = tf.function(reshaped, autograph=False).get_concrete_function(*specs)
    assert graph(tf.constant(one), tf.constant(one)).shape == (4, 4)  # if TensorFlow refuses it, believe the lengths
    walk = Walk(reading.Reading(), graph.graph)
    for number, tensor in enumerate(graph.graph.inputs[:2]):
        walk.leaf(tensor, number == 0)
    walk.read()
    (output,) = (operation.outputs[0] for operation in graph.graph.get_operations() if operation.type == "Reshape")
    lengths = walk.sizes(output)
    assert lengths is None or BATCH not in lengths
    assert lengths is None or walk.sizes(graph.graph.inputs[1])[0] not in lengths


def test_a_reshape_that_the_entries_fill_up_keeps_its_lengths():
    def reshaped(x, shared):
        rows = tf.shape(shared)[0]
        return tf.reshape(shared, [rows * 2, 2]), tf.reshape(shared, [2, -1, 2]), tf.reshape(tf.ones([2, 6]), [3, -1])

    found, traced, walk = claims(reshaped, np.ones([2, 4], "float32"), shared=[np.ones([6, 4], "float32")])
    outputs = [operation.outputs[0] for operation in traced.graph.get_operations() if operation.type == "Reshape"]
    assert [walk.sizes(t) for t in outputs] == [tuple(map(size, n)) for n in ((12, 2), (2, 6, 2), (3, 4))]
