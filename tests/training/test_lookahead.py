"""Each batch comes with what the next one will read, derived from the model alone."""

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf

import tfdp_rec
from tfdp_rec.training.lookahead import LookAhead, is_lookahead, lookahead


def optimizer_of():
    return tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2)


class Towers(tfdp_rec.PrivateTraining, keras.Model):
    """Strings, a table that both towers share, negatives that the batch shares, ids worked out in the model."""

    shared_inputs = ("negatives",)

    def __init__(self):
        super().__init__()
        self.lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c", "d"])
        self.items = keras.layers.Embedding(20, 3, name="items")
        self.users = keras.layers.Embedding(5, 3, name="users")
        self.scores = tfdp_rec.CandidateScores(12, 3, name="scores")
        self.dropout = keras.layers.Dropout(0.5)
        self.seen = keras.metrics.Sum(name="seen")

    def per_example_loss(self, data, training=True):
        self.seen.update_state(tf.size(data["user"]))
        user = self.users(self.lookup(data["user"]))
        context = tf.reduce_mean(self.items(data["context"]), axis=1) + self.items(data["label"] + 10)
        query = self.dropout(user + context, training=training)
        return tf.reduce_mean(self.scores(query, data["label"], data["negatives"]), axis=1)


BATCHES = [
    {"user": ["a", "b"], "context": [[1, 2], [3, 3]], "label": [4, 5], "negatives": [0, 7]},
    {"user": [], "context": np.zeros([0, 2]), "label": [], "negatives": [9]},
    {"user": ["d"], "context": [[0, 6]], "label": [8], "negatives": [1, 2, 3]},
]
SPEC = {
    "user": tf.TensorSpec([None], tf.string),
    "context": tf.TensorSpec([None, 2], tf.int64),
    "label": tf.TensorSpec([None], tf.int64),
    "negatives": tf.TensorSpec([None], tf.int64),
}


def dataset():
    return tf.data.Dataset.from_generator(lambda: iter(BATCHES), output_signature=SPEC)


def test_ids_of_strings_shared_tables_and_shared_negatives():
    model = Towers()
    model.compile(optimizer_of())
    for _ in range(2):  # each pass over the data starts anew
        elements = list(lookahead(dataset(), model))
        assert [len(e.batch["user"]) for e in elements] == [2, 0, 1]
        found = [{path: sorted(ids.numpy().tolist()) for path, ids in e.upcoming.items()} for e in elements]
        assert found == [
            {"items/embeddings": [], "users/embeddings": [], "scores/embeddings": [9]},
            {"items/embeddings": [0, 6, 18], "users/embeddings": [4], "scores/embeddings": [1, 2, 3, 8]},
            {"items/embeddings": [], "users/embeddings": [], "scores/embeddings": []},
        ]
    for element, batch in zip(elements, BATCHES, strict=True):
        for key, value in batch.items():
            assert element.batch[key].numpy().tolist() == [
                v.encode() if isinstance(v, str) else v for v in np.asarray(value).tolist()
            ]


def test_a_dataset_keeps_its_length():
    """Keras then knows the number of steps in the first epoch. A stream has none."""
    model = Towers()
    model.compile(optimizer_of())
    known = dataset().apply(tf.data.experimental.assert_cardinality(3))
    for data in (known, known.repeat(), known.filter(lambda batch: True)):
        assert lookahead(data, model).cardinality() == data.cardinality()


def test_only_what_makes_ids_runs_ahead():
    model = Towers()
    model.compile(optimizer_of())
    graph = tf.function(model.private_tables.find(SPEC)).get_concrete_function(SPEC).graph.as_graph_def()
    kinds = {node.op for function in graph.library.function for node in function.node_def}
    assert "LookupTableFindV2" in kinds
    assert not any("Random" in kind or "Assign" in kind or "MatMul" in kind for kind in kinds)
    before = float(model.seen.result())
    list(lookahead(dataset(), model))
    assert float(model.seen.result()) == before


@pytest.mark.slow
def test_fit_adds_it_and_announces_every_row(monkeypatch):
    """With look-ahead the guard finds nothing to do after the first batch."""
    seeding.seed(0)
    ids = keras.Input([2], dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(50, 2)(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer_of(), loss="mse")
    found = []

    def watching(rows):
        owing = tf.reduce_any(model.optimizer.debts.owe_noise(rows))
        tf.py_function(lambda late: found.append(bool(late)), [owing], [])
        guard(rows)

    data = tf.data.Dataset.from_tensor_slices((np.arange(24).reshape(12, 2) % 17, np.ones([12, 1]))).batch(2)
    model.prepare(data.element_spec)
    guard, model.optimizer.debts.settle_before_reads = model.optimizer.debts.settle_before_reads, watching
    model.fit(data, verbose=0)
    assert found == [False] * 6
    assert is_lookahead(lookahead(data, model)) and not is_lookahead(data)


@pytest.mark.slow
def test_autotuning_is_off_unless_it_was_asked_for(monkeypatch):
    given, fit = [], keras.Model.fit
    monkeypatch.setattr(keras.Model, "fit", lambda self, x, *rest, **how: given.append(x) or fit(self, x, *rest, **how))
    asked = tf.data.Options()
    asked.autotune.enabled = True
    inputs = keras.Input([], dtype="int32")
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Embedding(9, 2)(inputs)))
    data = tf.data.Dataset.from_tensor_slices((np.arange(8), np.ones([8, 1]))).batch(4)
    for optimizer in (tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "sgd"):
        model.compile(optimizer, "mse")
        model.fit(data, verbose=0)
        model.fit(data.with_options(asked), verbose=0)
    assert [each.options().autotune.enabled for each in given] == [False, True] * 2


def test_done_once():
    model = Towers()
    model.compile(optimizer_of())
    ahead = lookahead(dataset(), model)
    assert lookahead(ahead, model) is ahead
    assert isinstance(next(iter(ahead)), LookAhead)


@pytest.mark.parametrize("data", [[1, 2], np.zeros([3]), None])
def test_other_data_is_refused(data):
    with pytest.raises(TypeError, match="tf.data.Dataset"):
        lookahead(data, Towers())


def test_ragged_batches_are_refused():
    ids = keras.Input([None], dtype="int32")
    model = tfdp_rec.PrivateModel(ids, keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 1)(ids)))
    model.compile(optimizer_of(), loss="mse")
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).batch(2)
    with pytest.raises(TypeError, match="to_tensor"):
        lookahead(ragged, model)


class Shifted(tfdp_rec.PrivateModel):
    """Reads rows of two tables, by ids that a variable may shift."""

    def __init__(self, shifts=False):
        super().__init__()
        self.one, self.two = keras.layers.Embedding(9, 2), keras.layers.Embedding(9, 2)
        self.shift = tf.Variable(1, trainable=False, dtype=tf.int64) if shifts else 0

    def per_example_loss(self, data, training=True):
        first = data[:, 0] + self.shift
        return tf.reduce_sum((self.one(first) + self.two(data[:, 1]) - 1) ** 2, axis=1)


BATCH = tf.constant([[1, 2], [3, 4]], tf.int64)


def count_guards(model):
    """How often a step's graph asks whether rows owe noise, to pay them."""
    step = tf.function(lambda data: model.train_step(data) and None, autograph=False)
    graph = step.get_concrete_function(BATCH).graph
    functions = [graph, *(each.graph for each in graph._functions.values())]
    return sum(o.type == "If" and "Any" in o.inputs[0].op.type for each in functions for o in each.get_operations())


@pytest.mark.parametrize(("shifts", "guards"), [(False, 1), (True, 2)])
def test_tables_are_settled_by_one_guard_where_ids_follow_from_the_batch(shifts, guards):
    model = Shifted(shifts)
    model.compile(optimizer_of())
    model.prepare(BATCH)
    assert (model.private_tables.find_ids_ahead(BATCH) is None) == shifts
    assert model.private_tables.find_ids_ahead(tf.cast(BATCH, tf.int32)) is None
    assert count_guards(model) == guards


@pytest.mark.parametrize("path", ["one", "two"])
def test_rows_that_were_not_settled_ahead_are_not_read(path, monkeypatch):
    """Whatever is known ahead, a step that reads a row that owes noise fails, and changes nothing."""
    model = Shifted()
    model.compile(optimizer_of())
    model.prepare(BATCH)
    known = model.private_tables.find_ids_ahead(BATCH)

    def wrong(batch):
        return {name: tf.zeros_like(ids) if name in getattr(model, path).embeddings.path else ids
                for name, ids in known(batch).items()}  # fmt: skip

    monkeypatch.setattr(model.private_tables, "find_ids_ahead", lambda batch: wrong)
    model.train_on_batch(BATCH)  # nothing is owed yet
    with pytest.raises((tfdp_rec.NotPrivate, tf.errors.InvalidArgumentError), match="when the model was prepared"):
        model.train_on_batch((BATCH + 4) % 9)
    assert int(model.optimizer.iterations) == 1


def test_ids_outside_a_table_are_refused_by_name_where_they_are_settled_ahead():
    model = Shifted()
    model.compile(optimizer_of())
    model.train_on_batch(BATCH)
    for _ in range(8):  # whether rows read owe noise, which is asked at the same time, has another sentence
        model.train_on_batch(BATCH)
        for wrong in ([[9, 0]], [[-1, 0]], [[0, 9]], [[0, -30]], [[9, 9]]):
            with pytest.raises(tf.errors.InvalidArgumentError, match="outside its table of 9 rows"):
                model.train_on_batch(tf.constant(wrong * 2, tf.int64))


class Picking(Shifted):
    """Takes its ids by the batch's keys."""

    def per_example_loss(self, data, training=True):
        first, second = (data["a"], data["b"]) if "b" in data else (data["z"], data["a"])
        return super().per_example_loss(tf.stack([first, second], axis=1))


def test_ids_are_known_ahead_of_batches_of_the_same_keys_alone():
    model = Picking()
    model.compile(optimizer_of())
    model.train_on_batch({"a": BATCH[:, 0], "b": BATCH[:, 1]})
    for shift in (3, 5):
        other = (BATCH + shift) % 9
        model.train_on_batch({"z": other[:, 0], "a": other[:, 1]})
    assert int(model.optimizer.iterations) == 3
