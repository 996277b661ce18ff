"""News encoders and the recommender: masks, saving, and the pieces against hand computation."""

import inspect

import keras
import numpy as np
import pytest

from tfdp_rec.federated import mechanism
from tfdp_rec.models import news
from tfdp_rec.models.news.layers import AdditiveAttention, PrivateAttention, SelfAttentionPooling

VOCABULARY, TITLE, DIM = 40, 6, 8


def features(count, seed, title=TITLE):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, TITLE - 1, size=count)
    text = rng.integers(2, VOCABULARY, size=(count, TITLE)) * (np.arange(TITLE) < lengths[:, None])
    padded = np.zeros((count, title), dtype="int32")
    padded[:, :TITLE] = text
    groups = rng.integers(1, 4, size=count).astype("int32")
    values = {"title": padded, "body": padded.copy(), "category": groups, "subcategory": groups}
    for value in values.values():
        value[0] = 0
    return values


def encoder(kind, title=TITLE):
    if kind == "nrms":
        return news.NRMSEncoder(VOCABULARY, 12, DIM, num_heads=2, attention_units=5)
    if kind == "naml":
        return news.NAMLEncoder(VOCABULARY, 4, 4, 12, DIM, category_dim=5, attention_units=5)
    return news.PLMEncoder(news.tiny_transformer(VOCABULARY, title, width=8, num_heads=2), DIM, 5)


def recommender(kind, decomposed=True):
    return news.NewsRecommender(
        encoder(kind), news.user_encoder(kind, DIM, 2, 5), num_basis=3, decomposed=decomposed
    )


def batch(seed=0, users=3):
    rng = np.random.default_rng(seed)
    history = rng.integers(1, 20, size=(users, 7)).astype("int32")
    history[0, 3:] = 0
    return {
        "news": features(20, seed),
        "history": history,
        "candidates": rng.integers(1, 20, size=(users, 5)).astype("int32"),
    }


@pytest.mark.parametrize("kind", ("nrms", "naml"))
def test_news_vectors_do_not_depend_on_how_far_a_text_is_padded(kind):
    layer = encoder(kind)
    short = np.array(layer(features(6, 1)))
    long = np.array(layer(features(6, 1, title=TITLE + 4)))
    np.testing.assert_allclose(short[1:], long[1:], atol=1e-5)


def test_a_masked_token_does_not_reach_a_text_encoder_of_the_callers():
    layer = encoder("plm")
    given = features(6, 1)
    before = np.array(layer(given))
    table = layer.backbone.get_layer("tokens").embeddings
    changed = np.array(table)
    changed[0] += 3.0
    table.assign(changed)
    after = np.array(layer(given))
    np.testing.assert_allclose(before[1:], after[1:], atol=1e-5)
    assert np.abs(before[0] - after[0]).max() > 1e-3, "the anonymous news is the padding embedding encoded"


@pytest.mark.parametrize("kind", ("nrms", "naml", "plm"))
def test_user_embedding_ignores_empty_positions(kind):
    model, given = recommender(kind), batch()
    vectors = model.news_vectors(given["news"])
    _, users = model.encode_history(vectors, given["history"])
    _, alone = model.encode_history(vectors, given["history"][:1, :3])
    np.testing.assert_allclose(np.array(users)[:1], alone, atol=1e-5)
    _, empty = model.encode_history(vectors, np.zeros((1, 4), "int32"))
    assert np.isfinite(empty).all()


@pytest.mark.parametrize("kind, decomposed", [("nrms", True), ("nrms", False), ("naml", True), ("plm", True)])
def test_scores_survive_saving(kind, decomposed, tmp_path):
    model, given = recommender(kind, decomposed), batch()
    scores = model(given)
    assert scores.shape == (3, 5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(given), scores, atol=1e-5)


def test_padding_replaces_clicks_by_the_anonymous_news():
    model, given = recommender("nrms"), batch()
    vectors = model.news_vectors(given["news"])
    padded = np.zeros((3, 7), bool)
    padded[1, 2] = True
    weights, _ = model.encode_history(vectors, given["history"], padded)
    plain, _ = model.encode_history(vectors, given["history"])
    assert np.abs(np.array(weights - plain)[1]).max() > 0
    np.testing.assert_allclose(np.array(weights)[[0, 2]], np.array(plain)[[0, 2]], atol=1e-6)
    # a padded position is read (as the anonymous news), an empty one is not
    emptied = given["history"].copy()
    emptied[1, 2] = 0
    assert np.abs(np.array(model.encode_history(vectors, emptied)[0])[1] - np.array(weights)[1]).max() > 0


@pytest.mark.parametrize("theta", (0.2, 0.6, 1.0, 2.0))
def test_attention_is_the_mechanisms_clip_of_the_softmax(theta):
    layer = PrivateAttention(4, theta)
    users = np.random.default_rng(0).normal(size=(5, DIM)).astype("float32") * 8
    weights = np.array(layer(users))
    scores = users @ np.array(layer.basis).T / np.sqrt(DIM)
    softmax = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, mechanism.clip(softmax, theta), atol=1e-6)
    np.testing.assert_allclose(layer.reconstruct(weights), weights @ np.array(layer.basis), atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    (
        PrivateAttention(3),
        AdditiveAttention(2),
        SelfAttentionPooling(1, 2, 3, 4),
        encoder("nrms"),
        encoder("naml"),
        encoder("plm"),
        recommender("naml"),
    ),
    ids=lambda layer: type(layer).__name__,
)
def test_config_has_every_argument(layer):
    arguments = set(inspect.signature(type(layer).__init__).parameters) - {"self", "kwargs"}
    assert arguments <= set(layer.get_config())


@pytest.mark.parametrize(
    "call, name",
    (
        (lambda: PrivateAttention(1), "num_basis"),
        (lambda: PrivateAttention(3, 0.0), "clip_norm"),
        (lambda: AdditiveAttention(0), "units"),
        (lambda: news.user_encoder("gru", 8), "kind"),
    ),
)
def test_bad_arguments_are_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()


def test_a_backbone_must_be_a_layer():
    with pytest.raises(TypeError, match="backbone"):
        news.PLMEncoder("bert-base")
