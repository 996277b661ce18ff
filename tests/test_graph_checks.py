"""What a check guards cannot be had without it, whatever TensorFlow's graph optimizers are told to remove."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.ground.graph_checks import depend_on, negate, require, require_all
from tfdp_rec.privacy import Accountant, PoissonSampling

UNITS, BATCH = 60, 10
IDS = np.arange(UNITS, dtype=np.int32)
REFUSED = (ValueError, tfdp_rec.NotPrivate, tf.errors.InvalidArgumentError)
REWRITING = {
    "as it is": {},
    "without assertions": {"debug_stripper": True},
    "all that prunes": {
        "debug_stripper": True, "constant_folding": True, "dependency_optimization": True, "loop_optimization": True,
        "function_optimization": True, "arithmetic_optimization": True, "remapping": True,
    },
}  # fmt: skip


@pytest.fixture(params=REWRITING)
def rewriting(request, monkeypatch):
    """As if the options had been turned on after they were looked at: a step that knows of them is refused."""
    monkeypatch.setattr("tfdp_rec.core.sensitivity.engine.refuse_other_arithmetic", lambda: None)
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(REWRITING[request.param])
    yield
    tf.config.optimizer.set_experimental_options({**dict.fromkeys(REWRITING[request.param], False), **before})


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_each_condition_of_a_joint_check_fails_with_its_own_sentence(wrong):
    @tf.function(autograph=False)
    def run(met):
        checks = [(met[number] | tf.fill([2], False), f"sentence {number}") for number in range(3)]
        return depend_on(tf.constant(1.0), require_all(*checks))

    assert run(tf.constant([True] * 3)) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"sentence {wrong}"):
        run(tf.constant([number != wrong for number in range(3)]))


def test_what_waits_for_a_check_is_not_done_without_it(rewriting):
    done = tf.Variable(0)

    @tf.function(autograph=False)
    def count(x):
        with tf.control_dependencies(require(x > 0, "x must be positive, and is ", x, ".")):
            done.assign_add(1)

    count(tf.constant(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="x must be positive, and is -3."):
        count(tf.constant(-3))
    assert int(done) == 1


@pytest.mark.parametrize("dtype", [tf.float32, tf.int64])
def test_what_is_given_a_check_is_computed_from_it(rewriting, dtype):
    @tf.function(autograph=False)
    def doubled(x):
        return 2 * depend_on(x, require(x > 0, "x must be positive."))

    assert float(doubled(tf.constant(3, dtype))) == 6
    with pytest.raises(tf.errors.InvalidArgumentError, match="x must be positive."):
        doubled(tf.constant(-3, dtype))


def test_what_is_given_a_check_has_it_among_what_it_is_made_of():
    """A check runs by itself as well: that a value hangs on it shows in the graph alone."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        checks = require(x > 0, "x must be positive.")
        todo, made_of = [depend_on(x, checks).op], set()
        while todo:
            made_of.add(todo[-1].name)
            todo += [t.op for t in todo.pop().inputs]
        assert checks[0].name in made_of


def test_in_a_loop_whose_outcome_is_not_used(rewriting):
    @tf.function(autograph=False)
    def run(x):
        turn = lambda i, y: (i + 1, depend_on(y, require(y > 0, "y must be positive.")))  # noqa: E731
        tf.while_loop(lambda i, y: i < 3, turn, (tf.constant(0), x))
        return tf.constant(1)

    run(tf.constant(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="y must be positive."):
        run(tf.constant(-1.0))


def test_eagerly_it_raises_at_once():
    with pytest.raises(tf.errors.InvalidArgumentError, match="Never."):
        require(tf.constant([True, False]), "Never.")
    assert require(tf.constant(True), "Never.") == []


@pytest.fixture
def model(rewriting):
    ids = keras.Input([1], dtype="int32")
    model = tfdp_rec.PrivateModel(ids, keras.layers.Flatten()(keras.layers.Embedding(UNITS, 1, name="items")(ids)))
    optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=BATCH)
    model.compile(optimizer, loss="mse")
    return model


def fetch(indices):
    return IDS[indices][:, None], np.ones([len(indices), 1], np.float32)


def test_a_draw_is_trained_on_once(model):
    """986fe75, without assertions: five steps on one draw."""
    once = PoissonSampling(UNITS, BATCH).batches(fetch).take(1).cache().repeat()
    with pytest.raises(REFUSED, match="trained on before"):
        model.fit(once, steps_per_epoch=5, verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_rows_that_were_not_drawn_are_refused(model):
    """986fe75, without assertions: a step on two rows a unit."""

    def doubled(drawn):
        return drawn._replace(batch=tf.nest.map_structure(lambda t: tf.concat([t, t], 0), drawn.batch))

    with pytest.raises(REFUSED, match="one row"):
        model.train_on_batch(doubled(next(iter(PoissonSampling(UNITS, BATCH).batches(fetch)))))
    assert int(model.optimizer.iterations) == 0


@pytest.mark.fast_cases("without assertions")
def test_a_budget_is_no_longer_than_it_is(model):
    """986fe75, without assertions: a step of the training loop past the limit of the budget."""
    sampling = PoissonSampling(UNITS, BATCH)
    accountant = Accountant(model.optimizer.dp_event(), sampling, 1e-3, "rdp")
    batches = sampling.batches(fetch)
    model.fit(batches, steps_per_epoch=2, verbose=0, callbacks=[PrivacyBudget(accountant, 100.0)])
    model.optimizer.privacy_history.open(0, sampling.name)
    before = model.get_weights()[0]
    with pytest.raises(REFUSED, match="Refused batch"):
        model.train_on_batch(next(iter(batches)))
    np.testing.assert_array_equal(before, model.get_weights()[0])


@pytest.mark.slow_cases("all that prunes")
def test_an_id_outside_the_table_reaches_no_other_row(rewriting):
    """986fe75, without assertions: id 5 of a table of 5 rows, taken for row 0 of the next example."""
    ids = np.array([[1, 5], [0, 2], [3, 4]])
    model = Scored([keras.layers.Embedding(5, 2)], lambda p, b: p[0](b["ids"]))
    batch = {"ids": ids, "weight": np.ones([3], "float32")}
    model.per_example_loss({k: tf.constant(v) for k, v in batch.items()} | {"ids": tf.constant(ids % 5)})
    with pytest.raises(REFUSED, match="outside its table of 5 rows"):
        tfdp_rec.clipping.clipped_sum(model, batch, 1.0)


@pytest.mark.fast_cases("-1-0", "2147483648-2", "5-1", "-1099511627776-0")
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("wrong", [-1, 5, 2**31, -(2**40)])
def test_one_check_of_all_ids_names_the_layer_whose_ids_are_outside(place, wrong):
    tables = [keras.layers.Embedding(5, 2, name=name) for name in ("first", "second", "third")]
    model = Scored(tables, lambda p, b: sum(layer(b["ids"][:, number]) for number, layer in enumerate(p)))
    ids = np.arange(12).reshape(4, 3) % 5
    batch = {"ids": ids, "weight": np.ones([4], "float32")}
    model.per_example_loss({k: tf.constant(v) for k, v in batch.items()})
    tfdp_rec.clipping.clipped_sum(model, batch, 1.0)
    tfdp_rec.clipping.clipped_sum(model, {k: v[:0] for k, v in batch.items()}, 1.0)
    ids[2, place] = wrong
    with pytest.raises(REFUSED, match=f"'{tables[place].name}' was given ids outside its table of 5 rows"):
        tfdp_rec.clipping.clipped_sum(model, batch, 1.0)


def test_no_gradient_is_had_without_the_check_of_ids():
    model = Scored([keras.layers.Embedding(5, 2)], lambda p, b: p[0](b["ids"]))
    batch = {"ids": np.array([[1], [2]]), "weight": np.ones([2], "float32")}
    model.per_example_loss({k: tf.constant(v) for k, v in batch.items()})
    specs = {k: tf.TensorSpec([None, *v.shape[1:]], v.dtype) for k, v in batch.items()}
    # Not a tf.function, which orders operations that may write, and with them the checks.
    graph = tf.compat.v1.wrap_function(lambda b: tfdp_rec.clipping.clipped_sum(model, b, 1.0).norms, [specs]).graph
    seen, left = set(), [graph.outputs[0].op]
    while left:
        operation = left.pop()
        if operation not in seen:
            seen.add(operation)
            left += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    constants = [tf.make_ndarray(each.get_attr("value")) for each in seen if each.type == "Const"]
    assert any("outside its table" in str(each) for each in constants)


@pytest.mark.parametrize("compare", [tf.less_equal, tf.greater_equal, tf.less, tf.greater])
def test_a_comparison_that_does_not_hold_of_no_number_is_negated(compare):
    """In a graph that TensorFlow optimises, where "not at most" becomes "more than"."""
    limit = tf.constant([1.0, np.nan, 3.0])
    graph = tf.function(lambda x: negate(compare(x, limit)), autograph=False, input_signature=[tf.TensorSpec([3])])
    x = np.array([np.nan, 2.0, 2.0], np.float32)
    np.testing.assert_array_equal(graph(tf.constant(x)), [True, True, not compare(2.0, 3.0)])
