"""recall@k as a metric of compile: what evaluate shows is what predict and numpy give."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.metrics import recall_at_k

rng = np.random.default_rng(0)
USERS = rng.integers(0, 30, 50)
ITEMS = np.array([f"item {n}" for n in range(40)])


class Retrieval(tfdp_rec.PrivateModel):
    def __init__(self, vocabulary):
        super().__init__()
        self.users = keras.layers.Embedding(30, 8)
        named = {"vocabulary": vocabulary} if vocabulary is not None else {"vocabulary_size": 40}
        self.items = tfdp_rec.CandidateScores(width=8, negatives=10, embeddings_initializer="normal", **named)

    def call(self, user):
        return self.items.top_k(self.users(user), k=10)

    def per_example_loss(self, data, training=True):
        user, item = data[:2]
        return self.items.cross_entropy(self.users(user), item)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [None, ITEMS.tolist()])
def test_evaluate_shows_what_predict_gives(vocabulary):
    model = Retrieval(vocabulary)
    model.compile(
        tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=50),
        metrics=[tfdp_rec.RecallAtK(3), tfdp_rec.RecallAtK()],
    )  # fmt: skip
    numbers = rng.integers(0, 40, 50)
    bought = numbers if vocabulary is None else ITEMS[numbers]
    batches = tf.data.Dataset.from_tensor_slices((USERS, bought)).batch(16)
    history = model.fit(batches, validation_data=batches, verbose=0).history
    shown = model.evaluate(batches, verbose=0, return_dict=True)
    ids = model.predict(tf.data.Dataset.from_tensor_slices(USERS).batch(16), verbose=0)
    assert ids.shape == (50, 10)
    for name, k in (("recall_at_3", 3), ("recall", 10)):
        expected = np.mean([item in row[:k] for row, item in zip(ids.tolist(), [_like(ids, b) for b in bought])])
        assert shown[name] == pytest.approx(expected) and history[f"val_{name}"][0] == pytest.approx(expected)
    assert "recall" not in history and shown["recall"] > 0


def _like(ids, item):
    return item.encode() if ids.dtype == object and not isinstance(ids.flat[0], str) else item


def test_several_relevant_items_padding_and_weights():
    recommended = rng.permuted(np.tile(np.arange(1, 31), (20, 1)), axis=1)[:, :8]
    relevant = [rng.choice(np.arange(1, 31), rng.integers(1, 5), replace=False) for _ in range(20)]
    padded = np.zeros([21, 5], int)
    for row, items in zip(padded, relevant):
        row[: len(items)] = items
    metric = tfdp_rec.RecallAtK(6, padding=0)
    metric.update_state(padded, np.vstack([recommended, recommended[:1]]))  # the last has nothing relevant
    each = recall_at_k(recommended[:, :6], relevant)
    assert float(metric.result()) == pytest.approx(each.mean())
    weights = rng.random(20)
    weighted = tfdp_rec.RecallAtK(6, padding=0)
    weighted.update_state(padded[:20], recommended, sample_weight=weights)
    assert float(weighted.result()) == pytest.approx(np.average(each, weights=weights))


def test_it_is_saved_and_refuses_no_items():
    again = keras.metrics.deserialize(keras.metrics.serialize(tfdp_rec.RecallAtK(7, padding=0)))
    assert (again.k, again.padding, again.name) == (7, 0, "recall_at_7")
    with pytest.raises(ValueError, match="k must be positive"):
        tfdp_rec.RecallAtK(0)
