"""Public features: their part of a score by its definition, in Python, in files and in the served model, at no ε."""

import numpy as np
import pytest
from scipy import sparse

from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.serving import own_ids
from tfdp_rec.spectral import SpectralRecommender, rules
from tfdp_rec.spectral.features import item_vectors, likeness

FEATURES = [["red", "old"], ["red", "own"], ["blue", "old", "old"], [], ["blue", "new"], ["new", "old"]]
ITEMS = np.arange(100, 220)
KINDS = [[f"kind {place % 6}", "sold here"] if place % 10 else [] for place in range(len(ITEMS))]


def slow_vectors():
    names = ["red", "old", "blue", "new"]
    found = np.zeros((6, 4))
    for item, mine in enumerate(FEATURES):
        for feature in set(mine) - {"own"}:
            found[item, names.index(feature)] = np.sqrt(np.log(6 / sum(feature in each for each in FEATURES)))
        found[item] /= np.linalg.norm(found[item]) or 1
    return found


def test_vectors_are_by_the_rarity_of_features_and_of_length_one():
    vectors = item_vectors(FEATURES, 6).toarray()
    np.testing.assert_allclose(vectors, slow_vectors(), rtol=1e-6)
    assert np.linalg.norm(vectors, axis=1).round(6).tolist() == [1, 1, 1, 0, 1, 1]


def test_a_feature_of_all_items_or_of_one_alone_counts_nothing():
    features = [["here", "tea"], ["here", 7, "own"], ["here"], ["here", "tea", 7], ["here", 7]]
    expected = [[1, 0], [0, 1], [0, 0], [0.801, 0.598], [0, 1]]
    np.testing.assert_allclose(item_vectors(features, 5).toarray(), expected, atol=1e-3)
    for nothing in ([["here"]] * 3, [[]] * 3, [["one"], ["two"], ["three"]]):
        assert item_vectors(nothing, 3).nnz == 0


def test_likeness_is_what_is_defined():
    shares = np.array([0.5, 0.1, 0.3, 0.2, 0.05, 0.4], np.float32)
    weights = np.array([[1, 0, 0, 0, 0, 0], [0.5, 0, 2, 0.5, 0, 1], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    x = slow_vectors()
    usual = shares @ x / shares.sum()
    expected = np.zeros((4, 6))
    for row, mine in enumerate(weights):
        told = [item for item in range(6) if mine[item] and FEATURES[item]]
        if told:
            profile = sum(mine[item] * x[item] for item in told) / sum(mine[item] for item in told)
            expected[row] = shares * (x @ (profile - usual)) / (usual @ usual)
    got = likeness(item_vectors(FEATURES, 6), shares, sparse.csr_matrix(weights))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    assert not got[2:].any() and not got[:, 3].any() and (abs(expected[:2, :3]) > 0.01).all()


def kinds(users=400, seed=0):
    """Each user has six items of one kind of six; the last twenty items are new, and no user has any."""
    rng = np.random.default_rng(seed)
    for _ in range(users):
        yield rng.choice(ITEMS[:100][np.arange(100) % 6 == rng.integers(6)], 6, replace=False)


def made(**settings):
    told = {"epsilon": 1.0, "delta": 1e-4, "words": seeded(1), **settings}
    return SpectralRecommender(ITEMS, **told).fit(list(kinds()), verbose=0)


@pytest.fixture(scope="module")
def plain():
    return made()


@pytest.fixture(scope="module")
def featured():
    return made(features=KINDS)


def test_features_change_the_scores_and_nothing_that_is_released(plain, featured):
    assert featured.epsilon == plain.epsilon and featured.event == plain.event
    for name, values in plain.released.arrays().items():
        if name != "released_names":  # which no two fits have in common
            np.testing.assert_array_equal(values, featured.released.arrays()[name])
    np.testing.assert_array_equal(featured.estimates.weights, plain.estimates.weights)
    assert not np.allclose(featured.scores([ITEMS[:3]]), plain.scores([ITEMS[:3]]))
    np.testing.assert_array_equal(featured.scores([[]]), plain.scores([[]]))


@pytest.mark.parametrize("features", [None, KINDS])
def test_the_statement_says_that_features_are_taken_as_public(features):
    said = SpectralRecommender(ITEMS, 1.0, 1e-4, features=features).fit(list(kinds()), verbose=0).statement()
    assert ("catalogue of 120 items, with their features" in str(said)) == (features is not None)


def test_their_weight_is_less_where_histories_are_long(plain, featured, monkeypatch):
    """From the parts of a score: half of the weight at κ = 1, all of it at 0."""
    history = [ITEMS[:3]]
    added = featured.scores(history) - plain.scores(history)
    of_three = sparse.csr_matrix((np.ones(3, np.float32), ([0] * 3, [0, 1, 2])), (1, 120))
    whole = likeness(item_vectors(KINDS, 120), featured.estimates.prior / rules.PRIOR, of_three)
    assert 0 < rules.kappa(featured.released) < 1
    np.testing.assert_allclose(added, (1 - rules.kappa(featured.released) / 2) * whole, rtol=1e-3, atol=1e-5)
    monkeypatch.setattr(rules, "kappa", lambda made: 1.0)
    np.testing.assert_allclose(featured.scores(history) - plain.scores(history), whole / 2, rtol=1e-3, atol=1e-5)


def share_of_own_kind(recommender):
    histories = list(kinds(60, seed=1))
    ids, _ = recommender.recommend(histories, k=10)
    asked = np.array([history[0] - 100 for history in histories])
    return np.mean((ids - 100) % 6 == asked[:, None] % 6)


def test_what_noise_hides_features_tell(plain, featured):
    assert share_of_own_kind(featured) > 0.8 > 0.5 > share_of_own_kind(plain)


def test_items_that_no_user_has_are_ranked_by_features(featured):
    new = featured.scores([ITEMS[[1, 7, 13]]])[0, 100:]
    like = [place for place in range(100, 120) if place % 6 == 1 and place % 10]
    assert set(np.argsort(-new)[: len(like)] + 100) == set(like)


def test_a_file_keeps_features(featured, plain, tmp_path):
    for recommender in (featured, plain, made(features=[[]] * 120)):
        recommender.save(tmp_path / "kept.npz")
        loaded = SpectralRecommender.load(tmp_path / "kept.npz")
        np.testing.assert_array_equal(loaded.scores(list(kinds(5))), recommender.scores(list(kinds(5))))


@pytest.mark.slow
@pytest.mark.fast_cases("1.0")
@pytest.mark.parametrize("recency", [0.0, 1.0])
def test_the_export_answers_as_python_does(recency, tmp_path, monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(own_ids, "_MOST_SCORES", 240)  # two histories at a time
    recommender = made(features=KINDS, recency=recency)
    recommender.export(str(tmp_path / "servable"), k=120)
    signatures = tf.saved_model.load(str(tmp_path / "servable")).signatures
    histories = [], ITEMS[[110]], ITEMS[[0, 10]], ITEMS[[5, 50, 100, 5]], ITEMS[2:]
    padded = tf.constant([[*history, *[0] * (118 - len(history))] for history in histories], tf.int64)
    at_once = signatures["serving_default"](history=padded)["scores"]
    for history, beside_others in zip(histories, at_once):
        answer = signatures["serving_default"](history=tf.constant([[0, *history]], tf.int64))
        np.testing.assert_allclose(beside_others, answer["scores"][0], rtol=1e-4, atol=1e-6)
        ids, scores = recommender.recommend([history], k=120)
        found = np.isfinite(scores[0])
        np.testing.assert_allclose(answer["scores"][0].numpy()[found], scores[0][found], rtol=1e-4, atol=1e-6)
        assert np.mean(answer["ids"][0].numpy() == ids[0]) > 0.95  # but for scores that rounding makes equal
        allowed = ITEMS[[3, 110, 60, 9]]
        some = signatures["among"](
            history=tf.constant([[0, *history]], tf.int64), k=tf.constant(4), allowed=tf.constant(allowed, tf.int64)
        )
        whole = dict(zip(ids[0].tolist(), scores[0].tolist()))
        for item, score in zip(some["ids"][0].numpy().tolist(), some["scores"][0].numpy().tolist()):
            if item:
                assert score == pytest.approx(whole[item], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "features, words",
    [(KINDS[:-1], "each of the 120 items, in their order; got 119"), (["tea"] * 120, r"such as \['tea'\], not a text")],
)
def test_what_is_refused(features, words):
    with pytest.raises(ValueError, match=words):
        SpectralRecommender(ITEMS, epsilon=1.0, features=features)
