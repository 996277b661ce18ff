"""A client encodes the news that it needs: the same gradients as over the whole catalogue, and no more told."""

import numpy as np
import pytest
from catalogues import catalogue_of

from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import AttentionMechanism, LabelPermutation, local
from tfdp_rec.federated.cohort import Draws
from tfdp_rec.federated.vector import VectorMechanism
from tfdp_rec.models import news

NEWS, TITLE, LENGTH, SAMPLES, NEGATIVES = 60, 4, 5, 3, 2
KINDS = {
    "private": (local.PrivateUpdate, {}),
    "user gradient": (local.PrivateUpdate, {"user_gradient": VectorMechanism(0.01, 5.0)}),
    "published": (local.PublishedUpdate, {}),
    "clipped": (local.GradientUpdate, {"noise": VectorMechanism(0.01, 5.0)}),
    "plain": (local.GradientUpdate, {"noise": VectorMechanism(0.01, np.inf)}),
}


@pytest.fixture(scope="module")
def features():
    titles = np.random.default_rng(1).integers(1, 24, size=(NEWS, TITLE)).astype("int32")
    titles[0], titles[3] = 0, 23
    titles[4:][titles[4:] == 23] = 22  # news 3 alone has word 23
    return {"title": titles}


@pytest.fixture(scope="module")
def model(world):
    return world.model()


def made(model, features, name="private"):
    kind, settings = KINDS[name]
    mechanism = AttentionMechanism(3, 5.0, 1e-5, activation="relu")
    return kind(model, catalogue_of(features), mechanism, LabelPermutation(2.0, NEGATIVES), LENGTH, SAMPLES, **settings)


def draws(clients=2, seed=0):
    """With repeated news, empty and padded positions, and a sample that is none."""
    rng = np.random.default_rng(seed)
    history = rng.integers(4, NEWS, size=(clients, LENGTH)).astype("int32")
    history[:, 1], history[0, 3:] = history[:, 0], 0
    samples = rng.integers(4, NEWS, size=(clients, SAMPLES, NEGATIVES + 1)).astype("int32")
    counted = np.ones((clients, SAMPLES), "float32")
    samples[0, 2], counted[0, 2] = 0, 0.0
    padded = rng.random(history.shape) < 0.3
    return Draws(history, padded & (history != 0), 0.1 * rng.standard_normal((clients, 3)), samples, counted)


def whole(update, *rows):
    """The oracle: every news is encoded."""
    return update.model.news_vectors(update.features), rows


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_the_whole_catalogue(eagerly, model, features, name, monkeypatch):
    update = made(model, features, name)
    found, loss = update.gradients(draws(), words.seeded(3))
    monkeypatch.setattr(local.LocalUpdate, "_news_of", whole)
    expected, expected_loss = update.gradients(draws(), words.seeded(3))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for mine, its in zip(found, expected):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
    assert max(np.abs(g).max() for g in expected) > 1e-3


def encoded(update, monkeypatch):
    """How many news each call encodes, filled as calls are made."""
    counts, encode = [], type(update.model).news_vectors
    monkeypatch.setattr(
        type(update.model), "news_vectors", lambda self, f, *a: (counts.append(f["title"].shape[0]), encode(self, f))[1]
    )
    return counts


@pytest.mark.parametrize("name, calls", [("private", [1 + 5, 1 + 9]), ("published", [1 + 14]), ("plain", [1 + 14])])
def test_how_many_news_are_encoded_is_a_matter_of_sizes_alone(eagerly, model, features, name, calls, monkeypatch):
    update = made(model, features, name)
    counts = encoded(update, monkeypatch)
    one, same = draws(1), draws(1, seed=4)
    same.history[:] = 7
    same.samples[:] = 7
    for drawn in (one, same):
        counts.clear()
        update.gradients(drawn)
        assert counts == calls


def test_a_catalogue_that_is_smaller_is_encoded_whole(eagerly, model, features, monkeypatch):
    update = made(model, features)
    counts = encoded(update, monkeypatch)
    update.gradients(draws(8))
    assert counts == [1 + 8 * 5, NEWS + 1], "and the anonymous news once more, for those that are not there"


def test_the_history_reaches_the_update_through_the_released_attention_alone(model, features, monkeypatch):
    """Other histories, one of a news that is no number: not one bit of the traced update differs."""
    update = made(model, features)
    released = update.mechanism.release(np.array([[0.5, 0.3, 0.2]]), words.seeded(1))
    monkeypatch.setattr(AttentionMechanism, "finish", lambda *arguments: released)
    table = next(v for v in model.trainable_variables if v.shape[0] == 24)
    before = np.array(table)
    table.assign(np.where(np.arange(24)[:, None] == 23, np.nan, before).astype("float32"))
    try:
        sent = []
        for history in ([9, 8, 7, 6, 5], [3, 3, 3, 3, 3], [0, 0, 0, 0, 0]):
            drawn = draws(1)
            drawn.history[:] = history
            sent.append(update.gradients(drawn)[0])
    finally:
        table.assign(before)
    assert all(np.isfinite(gradient).all() for gradient in sent[0])
    assert all(np.array_equal(a, b) for other in sent[1:] for a, b in zip(sent[0], other))


@pytest.mark.parametrize("wrong", [24, -25])
def test_ids_that_the_model_cannot_read_are_refused_before_anybody_clicks_them(model, features, wrong):
    """Else an answer would fail for the clients alone that clicked that news."""
    titles = features["title"].copy()
    titles[17, 2] = wrong
    with pytest.raises(ValueError, match="no row for"):
        made(model, {"title": titles})
    with pytest.raises(ValueError, match="one row for each news"):
        made(model, {"title": features["title"], "category": np.ones(NEWS - 1, "int32")})


def test_a_catalogue_is_encoded_in_pieces(model, features, monkeypatch):
    counts = encoded(made(model, features), monkeypatch)
    found = model.catalogue_vectors(features, at_once=25)
    assert counts == [25, 25, 10]
    np.testing.assert_allclose(found, news.NewsRecommender.news_vectors(model, features), atol=1e-6)
