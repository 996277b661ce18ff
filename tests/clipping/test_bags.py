"""Rows that a model only adds up: found in its graph, and their factor against the per-example oracle."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, assert_matches_oracle, double_precision, evaluated
from keras import layers, ops

from tfdp_rec.clipping import EmbeddingRule, register
from tfdp_rec.core.sensitivity import factors

ROWS, LENGTH, WIDTH, SIZE = 7, 5, 3, 6
DECAY = 0.9 ** np.arange(LENGTH)[None, :, None]


@pytest.fixture
def float64():
    with double_precision():
        yield


@pytest.fixture
def bags(monkeypatch):
    """The factors of bags that are made."""
    made, before = [], factors.BagRows.__init__

    def note(self, *given):
        before(self, *given)
        made.append(self)

    monkeypatch.setattr(factors.BagRows, "__init__", note)
    return made


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, [SIZE, LENGTH])  # some of them twice in an example
    ids[0] = 2
    return {"ids": ids, "mask": rng.integers(0, 2, [SIZE, LENGTH]).astype("float64"), "x": rng.normal(size=[SIZE, 2]),
            "weight": rng.uniform(0.1, 2.0, SIZE)}  # fmt: skip


def table(**options):
    return layers.Embedding(ROWS, WIDTH, **options)


def masked(rows, b):
    return rows * tf.cast(b["mask"], rows.dtype)[..., None]


def selected(b, then, otherwise):
    then, otherwise = (tf.cast(each, keras.config.floatx()) for each in (then, otherwise))
    return tf.reduce_sum(tf.where(b["mask"][..., None] > 0, then, otherwise), axis=1)


def attended(p, b):
    share = tf.nn.softmax(p[1](tf.cast(b["x"], keras.config.floatx())))  # [SIZE, LENGTH], of another input
    return tf.reduce_sum(p[0](b["ids"]) * share[:, :, None], axis=1)


BAGS = {
    "a sum": ([table], lambda p, b: tf.reduce_sum(p[0](b["ids"]), axis=1)),
    "a mean": ([table], lambda p, b: tf.reduce_mean(p[0](b["ids"]), axis=1)),
    "a sum that keeps its axis": ([table], lambda p, b: tf.reduce_sum(p[0](b["ids"]), axis=-2, keepdims=True)[:, 0]),
    "Keras' mean": ([table], lambda p, b: ops.mean(p[0](b["ids"]), axis=1)),
    "with a mask": ([table], lambda p, b: tf.reduce_sum(masked(p[0](b["ids"]), b), axis=1)),
    "a mean with two masks": ([table], lambda p, b: tf.reduce_mean(masked(masked(p[0](b["ids"]), b), b) , axis=1)),
    "Keras' pooling with its mask": (
        [lambda: table(mask_zero=True), layers.GlobalAveragePooling1D], lambda p, b: p[1](p[0](b["ids"]))
    ),
    "where a mask says so": ([table], lambda p, b: selected(b, p[0](b["ids"]), 2.0)),
    "where a mask says no": ([table], lambda p, b: selected(b, 2.0, p[0](b["ids"]))),
    "weights of positions": ([table], lambda p, b: tf.reduce_sum(p[0](b["ids"]) * DECAY, axis=1)),
    "attention by another input": ([table, lambda: layers.Dense(LENGTH)], attended),
    "one id": ([table], lambda p, b: tf.reduce_sum(p[0](b["ids"][:, :1]), axis=1)),
}  # fmt: skip
OTHERS = {
    "rows of their own": ([table, lambda: layers.Dense(2)], lambda p, b: tf.reduce_sum(p[1](p[0](b["ids"])), axis=1)),
    "a largest": ([table], lambda p, b: tf.reduce_max(p[0](b["ids"]), axis=1)),
    "a sum of columns": ([table], lambda p, b: tf.reduce_sum(p[0](b["ids"]), axis=2)),
    "a sum of all": ([table], lambda p, b: tf.reduce_sum(p[0](b["ids"]), axis=[1, 2])[:, None]),
    "a sum of squares": ([table], lambda p, b: tf.reduce_sum(p[0](b["ids"]) * p[0](b["ids"]), axis=1)),
    "a weight for each column": ([table], lambda p, b: tf.reduce_sum(p[0](b["ids"]) * [1.0, 2.0, 3.0], axis=1)),
}  # fmt: skip


def reads_twice(p, b):
    rows = p[0](b["ids"])
    return tf.reduce_sum(rows, axis=1) + rows[:, 0] ** 2


def weighs_by_itself(p, b):  # of width one, so that the rows could be taken for weights
    rows = p[0](b["ids"])
    return tf.reduce_sum(rows * rows, axis=1)


OTHERS |= {
    "rows that something else reads": ([table], reads_twice),
    "squares of width one": ([lambda: layers.Embedding(ROWS, 1)], weighs_by_itself),
}


def model_of(parts, forward, batch):
    model, rng = Scored([part() for part in parts], forward), np.random.default_rng(1)
    model.per_example_loss(batch)
    for variable in model.trainable_variables:
        variable.assign(rng.normal(size=variable.shape) * 0.5)
    return model


@pytest.mark.parametrize("name", [*BAGS, *OTHERS])
def test_a_bag_is_found_where_rows_are_only_added_up_and_is_exact(name, float64, bags):
    batch = batch_of()
    assert_matches_oracle(model_of(*(BAGS | OTHERS)[name], batch), batch)
    assert bool(bags) == (name in BAGS)


def test_the_gradient_of_a_bag_is_not_written_down_row_by_row(bags):
    batch = batch_of()
    model = model_of(*BAGS["a mean"], batch)
    found = evaluated(model, batch, 0.7)
    assert bags[0].q.shape.as_list() == [None, WIDTH] and bags[0].g.shape.as_list() == [None, LENGTH, 1]
    assert found.gradients[model.parts[0].embeddings.path].values.shape[1] == WIDTH


def test_a_table_that_is_read_in_a_bag_and_beside_it_is_one_gradient(float64, bags):
    def forward(p, b):
        return tf.reduce_sum(p[0](b["ids"]), axis=1) * p[0](b["ids"][:, 0])

    batch = batch_of()
    assert_matches_oracle(model_of([table], forward, batch), batch)
    assert bags


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_a_bag_of_fewer_bits_is_near_the_oracle(policy, bags):
    keras.config.set_dtype_policy(policy)
    try:
        batch = {k: v.astype("float32") if v.dtype == "float64" else v for k, v in batch_of().items()}
        assert_matches_oracle(model_of(*BAGS["with a mask"], batch), batch, rtol=0.05 if "16" in policy else 1e-5)
    finally:
        keras.config.set_dtype_policy("float32")
    assert bags and bags[0].q.dtype == tf.float32


def test_padding_of_a_bag_is_no_read():
    batch = batch_of()
    batch["mask"][:, 1:] = 0.0
    model = model_of(*BAGS["with a mask"], batch)
    reads = evaluated(model, batch, 0.7).reads[model.parts[0].embeddings.path]
    kept = {(b, int(batch["ids"][b, 0])) for b in range(SIZE) if batch["mask"][b, 0]}
    assert set(zip(reads.example.numpy().tolist(), reads.ids.numpy().tolist())) == kept


def test_memory_of_a_bag_does_not_grow_with_its_width_times_its_length():
    batch, length, width = 4, 1_000, 64
    rng = np.random.default_rng(0)
    ids, c, q = rng.integers(0, 50, [batch, length]), rng.normal(size=[batch, length]), rng.normal(size=[batch, width])
    norm = tf.function(lambda ids, c, q: factors.BagRows(ids, c, q, [50, width]).norm())
    graph = norm.get_concrete_function(*map(tf.constant, (ids, c, q))).graph
    static = [t.shape.num_elements() or 0 for o in graph.get_operations() for t in o.outputs]
    assert max(static) <= 2 * batch * length


def test_an_empty_bag_whose_sum_has_no_gradient_leaves_its_example_to_other_layers(float64, bags):
    """The gradient of a length is undefined at zero. Rows that a mask drops have none."""

    def forward(p, b):
        return tf.norm(selected(b, p[0](b["ids"]), 0.0), axis=1, keepdims=True) + p[1](b["x"])

    batch = batch_of()
    batch["mask"][:] = 1.0
    batch["mask"][2] = 0.0
    found = evaluated(model_of([table, lambda: layers.Dense(1)], forward, batch), batch, 0.7)
    assert bags and np.isfinite(found.norms).all()


class HalvedRule(EmbeddingRule):
    def factors(self, call, gradients):
        return super().factors(call, [gradients[0] / 2])


class TwiceWatchedRule(EmbeddingRule):
    def run(self, call, original, hooks):
        return hooks.watch(tf.identity(super().run(call, original, hooks)))

    def factors(self, call, gradients):
        return super().factors(call, gradients[1:])


@pytest.mark.parametrize("rule", [HalvedRule, TwiceWatchedRule])
def test_a_rule_of_ones_own_that_stands_on_that_of_embeddings_has_its_say(rule, float64, bags):
    class Own(layers.Embedding):
        pass

    register(Own, rule())
    batch, forward = batch_of(), BAGS["a sum"][1]
    plain, own = (model_of([kind], forward, batch) for kind in (table, lambda: Own(ROWS, WIDTH)))
    sums = [evaluated(m, batch, 1e9).gradients[m.parts[0].embeddings.path] for m in (plain, own)]
    plain, own = (tf.convert_to_tensor(tf.IndexedSlices(s.values, s.indices, [ROWS, WIDTH])) for s in sums)
    np.testing.assert_allclose(own, plain / 2 if rule is HalvedRule else plain, rtol=1e-9)
    assert len(bags) == 1


def test_several_bags_an_example_are_one_gradient(float64, bags):
    def forward(p, b):
        return tf.reshape(tf.reduce_sum(p[0](tf.reshape(b["pairs"], [-1, 2])), axis=1), [-1, 3, WIDTH])

    batch = {"pairs": np.random.default_rng(0).integers(0, ROWS, [SIZE, 3, 2]), "weight": batch_of()["weight"]}
    assert_matches_oracle(model_of([table], forward, batch), batch)
    assert bags
