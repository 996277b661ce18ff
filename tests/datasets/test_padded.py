"""Bags of one length are those they were made of: the same ids, the same sums, the same clipped gradients."""

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from helpers import Scored, dense_gradients

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.sensitivity.engine import SLACK
from tfdp_rec.data import padded

BAGS, BY = [[7, 5], [], [1, 2, 3, 4], [2, 2, 8]], [[0.5, 2.0], [], [1.0, 3.0, 0.0, 1.0], [1.0, 1.0, 0.25]]
FLAT, SPLITS = np.array([7, 5, 1, 2, 3, 4, 2, 2, 8]), np.array([0, 2, 2, 6, 9])
RAGGED, RAGGED_BY = tf.ragged.constant(BAGS), tf.ragged.constant(BY)
SPARSE = tf.SparseTensor(RAGGED.to_sparse().indices[::-1], RAGGED.to_sparse().values[::-1], [4, 9])  # in no order
FORMS = {
    "lists": (BAGS, BY),
    "ragged": (RAGGED, RAGGED_BY),
    "sparse": (SPARSE, RAGGED_BY.to_sparse()),
    "arrays": ((FLAT, SPLITS), np.concatenate(BY)),
    "tensors": ((tf.constant(FLAT), tf.constant(SPLITS)), tf.constant(np.concatenate(BY))),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_padded_alike(form):
    given, by = FORMS[form]
    ids, weights = padded(given, 3)
    assert ids.tolist() == [[7, 5, 7], [0, 0, 0], [1, 2, 3], [2, 2, 8]] and ids.dtype.kind == "i"
    assert weights.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]] and weights.dtype == np.float32
    assert padded(given, 3, by)[1].tolist() == [[0.5, 2, 0], [0, 0, 0], [1, 3, 0], [1, 1, 0.25]]
    longer, _ = padded(given, 6)
    assert longer.shape == (4, 6) and all(set(row) == set(bag or [0]) for row, bag in zip(longer, BAGS))


def test_a_matrix_has_ids_for_columns_and_weights_for_values():
    ids, weights = padded(scipy.sparse.csr_matrix([[0, 2.0, 0, 1], [0, 0, 0, 0]]), 3)
    assert ids.tolist() == [[1, 3, 1], [0, 0, 0]] and weights.tolist() == [[2, 1, 0], [0, 0, 0]]


def test_text_and_bags_of_nothing():
    for text in (tf.ragged.constant([["a"], [], ["b", "ü"]]), [["a"], [], ["b", "ü"]]):
        ids, weights = padded(text, 2)
        assert [[tf.compat.as_text(one) for one in row] for row in ids] == [["a", "a"], ["", ""], ["b", "ü"]]
        assert weights.tolist() == [[1, 0], [0, 0], [1, 1]]
    ids, weights = padded([[], []], 2)
    assert ids.tolist() == weights.tolist() == [[0, 0], [0, 0]]
    assert padded([], 2)[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([[1]], 0), "length must be at least 1, got 0"),
        (((FLAT, SPLITS[:-1]), 3), "append that number to offsets that lack it"),
        (((FLAT, SPLITS[1:]), 3), "splits must begin with 0"),
        (((FLAT, np.array([0, 3, 2, 9])), 3), "not fall"),
        (([[1], [2]], 3, [[1.0, 1.0], []]), "in the same bags"),
        (((FLAT, SPLITS), 3, np.ones(4)), "one for each id"),
        ((scipy.sparse.eye(3), 3, [[1.0]] * 3), "leave weights= out"),
        ((tf.ragged.constant([[[1], [2, 3]], [[4]]]), 3), r"one axis beside .* got \(2, None, None\)"),
        ((tf.sparse.from_dense(np.ones([2, 2, 3], "int32")), 3), r"one axis beside .* got \(2, 2, 3\)"),
        ((tf.sparse.from_dense([1, 0, 2]), 3), r"one axis beside .* got \(3,\)"),
        (([[[1, 2]], [[3, 4], [5, 6]]], 3), "one axis beside .* have 2 axes"),
    ],
)
def test_what_is_no_bag_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        padded(*arguments)


DIVISORS = {
    "sum": lambda by: 1.0,
    "mean": lambda by: tf.reduce_sum(by, axis=1, keepdims=True),
    "sqrtn": lambda by: tf.sqrt(tf.reduce_sum(by**2, axis=1, keepdims=True)),
}


@pytest.mark.fast_cases("4-mean", "7-sum", "4-sqrtn")
@pytest.mark.parametrize("combiner", DIVISORS)
@pytest.mark.parametrize("length", [4, 7])
def test_clipped_gradients_are_those_of_the_bags_as_they_were(combiner, length):
    keras.utils.set_random_seed(1)
    parts = [keras.layers.Embedding(9, 3, embeddings_initializer="normal"), keras.layers.Dense(2)]

    def forward(parts, batch):
        rows, by = parts[0](batch["ids"]), batch["by"]
        return parts[1](tf.math.divide_no_nan(tf.reduce_sum(rows * by[..., None], axis=1), DIVISORS[combiner](by)))

    model, (ids, by) = Scored(parts, forward), padded(BAGS, length, BY)
    batch = {"ids": ids, "by": by, "weight": np.float32([0.2, 3.0, 1.0, 2.0])}
    model.per_example_loss(batch)
    total = {v.path: np.zeros(v.shape) for v in model.trainable_variables}
    for number, (bag, own) in enumerate(zip(BAGS, BY)):
        alone = {"ids": tf.constant([bag], tf.int64), "by": tf.constant([own], tf.float32)}
        with tf.GradientTape() as tape:
            loss = model.per_example_loss({**alone, "weight": batch["weight"][number : number + 1]})
        found = tape.gradient(loss, [v.value for v in model.trainable_variables], unconnected_gradients="zero")
        found = [np.asarray(tf.convert_to_tensor(g), np.float64) for g in found]
        norm = np.sqrt(sum(np.sum(g**2) for g in found))
        for variable, g in zip(model.trainable_variables, found):
            total[variable.path] += g * min(1, 0.7 / (1 + SLACK) / norm)
    clipped = clipped_sum(model, batch, 0.7)
    for path, gradient in dense_gradients(model, clipped).items():
        np.testing.assert_allclose(gradient, total[path], rtol=1e-4, atol=1e-6, err_msg=path)
    (reads,) = clipped.reads.values()
    assert set(zip(reads.example.numpy(), reads.ids.numpy())) == {
        (b, i) for b, (bag, own) in enumerate(zip(BAGS, BY)) for i, weight in zip(bag, own) if weight
    }, "an empty bag, and what weighs nothing, votes for no row"


@pytest.mark.parametrize("data", [RAGGED, SPARSE, scipy.sparse.eye(4).tocsr()], ids=lambda data: type(data).__name__)
def test_what_has_no_length_is_refused_with_its_name(data):
    model = keras.Sequential([keras.layers.Embedding(9, 3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    with pytest.raises(TypeError, match=r"tfdp_rec.data.padded\(ids, length\)"):
        tfdp_rec.make_private(model, (data, np.zeros([4, 1])), epsilon=1.0, batch_size=2, epochs=1)
