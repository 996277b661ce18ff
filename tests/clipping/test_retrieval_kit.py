"""Negatives are drawn by nothing that is private, by their own law, and the loss estimates the whole catalogue's."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, assert_matches_oracle
from keras import layers

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.layers import negatives

ROWS, WIDTH, SIZE = 6, 3, 5
TITLES = np.array([f"m{n}" for n in range(ROWS)])
RNG = np.random.default_rng(0)
USERS, POSITIVES = RNG.integers(0, 4, SIZE), RNG.integers(0, ROWS, SIZE)
COUNTS = [40.0, 0.0, -3.0, 10.0, 0.0, 10.0]  # released: noise made one negative


def table(rows=ROWS):
    return layers.Embedding(rows, WIDTH, embeddings_initializer="normal")


@pytest.mark.parametrize("counts", [None, COUNTS])
def test_draws_follow_their_law_and_the_correction_is_its(counts):
    """A wrong law would have to be within 6σ of this one at each of six places: once in 10⁸."""
    drawn = tfdp_rec.Negatives(60_000, ROWS, released_counts=counts)
    numbers = drawn.draw().numpy()
    seen = np.bincount(numbers, minlength=ROWS)
    expected = np.exp(drawn.log_expectation(np.arange(ROWS)))
    np.testing.assert_allclose(expected.sum(), 60_000, rtol=1e-5)
    assert (np.abs(seen - expected) < 6 * np.sqrt(expected)).all()
    if counts is not None:
        np.testing.assert_allclose(expected / 60_000, 0.5 / 6 + 0.5 * np.maximum(COUNTS, 0) / 60, rtol=1e-5)
        assert (np.abs(seen - 10_000) > 6 * np.sqrt(10_000)).any()  # another law is seen to be one


def test_the_loss_estimates_that_of_the_catalogue():
    """Its expectation, positives apart, is the softmax's sum: within 6σ of the mean of many draws."""
    layer = tfdp_rec.CandidateScores(ROWS, WIDTH, "normal", negatives=tfdp_rec.Negatives(4, ROWS, COUNTS))
    query, positives = tf.constant(RNG.normal(size=[SIZE, WIDTH]), tf.float32), tf.constant(POSITIVES)
    everything = tf.exp(tf.matmul(query, layer.embeddings.value, transpose_b=True)).numpy()
    others = everything.sum(1) - everything[np.arange(SIZE), POSITIVES]
    logits = tf.function(lambda: layer(query, positives), autograph=False)
    sums = np.array([np.exp(logits().numpy()[:, 1:]).sum(1) for _ in range(2_000)])
    assert (np.abs(sums.mean(0) - others) < 6 * sums.std(0) / np.sqrt(len(sums))).all()
    uncorrected = (sums * 4 / ROWS).mean(0)
    assert (np.abs(uncorrected - others) > 6 * sums.std(0) / np.sqrt(len(sums))).all()


def scored(layer, positives):
    parts = [table(4), layer]
    batch = {"user": USERS, "item": positives, "weight": np.linspace(0.5, 2.0, SIZE).astype("float32")}
    return Scored(parts, lambda p, b: tf.nn.log_softmax(p[1](p[0](b["user"]), b["item"]))), batch


def fixed(layer, numbers):
    """The same negatives at every draw: what is clipped can then be compared."""
    layer.negatives.draw = lambda: tf.constant(numbers, tf.int64)
    return layer


def deep():
    return keras.Sequential([table(), layers.Dense(4, activation="tanh"), layers.Dense(WIDTH)])


TOWERS = {
    "a table": lambda: tfdp_rec.CandidateScores(ROWS, WIDTH, "normal", negatives=4),
    "a vocabulary": lambda: tfdp_rec.CandidateScores(None, WIDTH, "normal", vocabulary=TITLES, negatives=4),
    "counts": lambda: tfdp_rec.CandidateScores(ROWS, WIDTH, "normal", negatives=tfdp_rec.Negatives(4, ROWS, COUNTS)),
    "a deep tower": lambda: tfdp_rec.TowerScores(deep(), np.arange(ROWS), negatives=4),
    "hard negatives": lambda: tfdp_rec.CandidateScores(
        ROWS, WIDTH, "normal", negatives=4, temperature=0.1, num_hard_negatives=2
    ),
    "a tower's hard negatives": lambda: tfdp_rec.TowerScores(
        deep(), np.arange(ROWS), negatives=4, temperature=0.1, num_hard_negatives=2
    ),
}


@pytest.mark.fast_cases("a vocabulary-False", "a tower-True")
@pytest.mark.parametrize("excluded", [False, True])
@pytest.mark.parametrize(
    "names",
    [["a vocabulary"], ["a tower's hard negatives"], pytest.param(sorted(TOWERS), marks=pytest.mark.slow)],
    ids=["a vocabulary", "a tower", "all"],
)
def test_they_are_clipped_as_by_the_oracle(names, excluded):
    """With a negative that is a positive, and one drawn twice; with and without items of one's own."""
    towers = [fixed(TOWERS[name](), [3, 3, int(POSITIVES[0]), 5]) for name in names]
    batch = {"user": USERS, "weight": np.linspace(0.5, 2.0, SIZE).astype("float32")}
    for n, name in enumerate(names):
        known = batch[f"item{n}"] = by_name(name)
        named = np.stack([known, np.roll(known, 1)], 1)
        batch[f"seen{n}"] = named if name == "a vocabulary" else np.array([[3, -1]] * 3 + [[5, 9]] * 2)

    def forward(p, b):
        query = p[0](b["user"])
        seen = [b[f"seen{n}"] if excluded else None for n in range(len(towers))]
        return [tf.nn.log_softmax(p[1 + n](query, b[f"item{n}"], exclude=each)) for n, each in enumerate(seen)]

    model = Scored([table(4), *towers], forward)
    model.per_example_loss(batch)
    found = assert_matches_oracle(model, batch, rtol=1e-4)
    assert isinstance(found.gradients[model.parts[0].embeddings.path], tf.IndexedSlices)


@pytest.mark.fast_cases("uint64")
@pytest.mark.parametrize(
    "kinds",
    [["int8"], ["uint64"], pytest.param(["uint8", "int16", "uint16", "int32", "uint32"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_candidates_are_named_by_whole_numbers_of_any_type(kinds):
    batch = {"user": USERS, "weight": np.ones(SIZE, "float32"), **{kind: POSITIVES.astype(kind) for kind in kinds}}

    def forward(p, b):
        others = [np.array([1, 4, 4], kind) for kind in kinds]
        return [p[1 + n](p[0](b["user"]), b[kind], others[n]) for n, kind in enumerate(kinds)]

    model = Scored([table(4), *(tfdp_rec.CandidateScores(ROWS, WIDTH, "normal") for _ in kinds)], forward)
    model.per_example_loss(batch)
    assert_matches_oracle(model, batch, rtol=1e-4)


POSITIONS = 3


@pytest.mark.slow
@pytest.mark.parametrize("excluded", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("negatives", [[3, 3, 1, 5], pytest.param([0, 1, 2, 3, 4, 5], marks=pytest.mark.slow)])
def test_several_positions_of_an_example_are_clipped_as_one(negatives, excluded):
    """Some labels of an example are equal, some are negatives, and some are negatives of its other positions."""
    layer = fixed(tfdp_rec.CandidateScores(ROWS, WIDTH, "normal", negatives=len(negatives)), negatives)
    batch = {
        "user": RNG.integers(0, 4, [SIZE, POSITIONS]), "seen": np.array([[3, -1]] * 3 + [[5, 9]] * 2),
        "item": np.array([[3, 3, 1], [0, 1, 2], [5, 5, 5], [2, 0, 4], [1, 3, 3]]),
        "weight": np.linspace(0.5, 2.0, SIZE).astype("float32"),
    }  # fmt: skip

    def losses(parts, batch):
        queries = parts[0](batch["user"])
        return parts[1].cross_entropy(queries, batch["item"], exclude=batch["seen"] if excluded else None)

    model = Scored([table(4), layer], losses)
    assert model.per_example_loss(batch).shape == [SIZE]
    found = assert_matches_oracle(model, batch, rtol=1e-4)
    assert isinstance(found.gradients[layer.embeddings.path], tf.IndexedSlices)


def test_positions_are_scored_as_examples_of_their_own():
    layer = fixed(tfdp_rec.CandidateScores(ROWS, WIDTH, "normal", negatives=4), [3, 3, 1, 5])
    query = tf.constant(RNG.normal(size=[2, POSITIONS, WIDTH]), tf.float32)
    labels, seen = tf.constant([[3, 3, 1], [0, 5, 2]]), tf.constant([[1, -1], [5, 9]])
    own = tf.constant(RNG.normal(size=[2, POSITIONS]), tf.float32)
    found = layer(query, labels, exclude=seen, offsets=(own, None))
    assert found.shape == [2, POSITIONS, 5]
    for b in range(2):
        each = tf.repeat(seen[b : b + 1], POSITIONS, axis=0)
        alone = layer(query[b], labels[b], exclude=each, offsets=(own[b], None))
        np.testing.assert_allclose(found[b], alone, rtol=1e-6)
    losses = layer.cross_entropy(query, labels)
    assert losses.shape == [2, POSITIONS]
    np.testing.assert_allclose(losses[1], layer.cross_entropy(query[1], labels[1]), rtol=1e-6)


@pytest.mark.parametrize("kind", [tfdp_rec.CandidateScores, tfdp_rec.TowerScores])
def test_the_logits_are_those_of_the_definition(kind):
    """Divided by the temperature, then corrected; hits, exclusions and all but the hardest take no part."""
    options = dict(negatives=5, temperature=0.5, num_hard_negatives=2)
    make = {
        tfdp_rec.CandidateScores: lambda: kind(ROWS, WIDTH, "normal", **options),
        tfdp_rec.TowerScores: lambda: kind(table(), np.arange(ROWS), **options),
    }
    drawn = np.array([0, 1, 2, 3, 4])
    layer = fixed(make[kind](), drawn)
    query = RNG.normal(size=[2, WIDTH]).astype("float32")
    positives, seen = np.array([1, 5]), np.array([[3, -1], [7, 0]])
    found = layer(tf.constant(query), tf.constant(positives), exclude=tf.constant(seen)).numpy()
    rows = np.asarray(layer.embeddings if kind is tfdp_rec.CandidateScores else layer.tower(tf.range(ROWS)))
    products = query @ rows.T / 0.5
    for row in range(2):
        assert found[row, 0] == pytest.approx(products[row, positives[row]], rel=1e-5)
        left = [s for s in drawn if s != positives[row] and s not in seen[row]]
        hardest = sorted(left, key=lambda s: -products[row, s])[:2]
        expected = [products[row, s] - np.log(5 / ROWS) if s in hardest else -1e9 for s in drawn]
        np.testing.assert_allclose(found[row, 1:], expected, rtol=1e-5)


def test_more_hard_negatives_than_there_are_left():
    layer = fixed(tfdp_rec.CandidateScores(ROWS, WIDTH, "normal", negatives=3, num_hard_negatives=9), [1, 1, 2])
    logits = layer(tf.ones([1, WIDTH]), tf.constant([1])).numpy()
    assert logits[0, 2] > -1e3 and (logits[0, [1, 3]] == -1e9).all()  # the positive, and its repeat, which comes last


def by_name(name):
    return TITLES[POSITIVES] if name == "a vocabulary" else POSITIVES


@pytest.mark.slow
def test_a_private_step_draws_anew_and_by_no_seed_that_was_set():
    layer = TOWERS["a table"]()
    model, batch = scored(layer, POSITIVES)
    model.per_example_loss(batch)
    drawn = set()
    for _ in range(3):
        keras.utils.set_random_seed(3)
        layer.negatives.seed_generator.state.assign([7, 0])
        found = clipped_sum(model, batch, 1.0)
        drawn.add(tuple(np.asarray(found.reads[layer.embeddings.path].shared)))
    assert len(drawn) > 1  # alike three times in a row once in 6⁸


def test_what_a_layer_draws_is_not_announced():
    """Look-ahead reads the batch alone; the rows are settled when they are read."""
    user, item = keras.Input([], dtype="int64"), keras.Input([], dtype="int64")
    logits = TOWERS["a table"]()(table(4)(user), item)
    model = tfdp_rec.PrivateModel([user, item], logits)
    model.compile(
        tfdp_rec.LazyDPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=SIZE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    data = tf.data.Dataset.from_tensor_slices(((USERS, POSITIVES), np.zeros(SIZE, "int64"))).batch(SIZE).repeat(2)
    first = next(iter(tfdp_rec.data.lookahead(data, model)))
    announced = [ids.numpy() for path, ids in first.upcoming.items() if "candidate" in path]
    np.testing.assert_array_equal(np.sort(announced[0]), np.sort(POSITIVES))
    model.fit(data, verbose=0)


@pytest.mark.parametrize("name", ["a vocabulary", "a deep tower"])
def test_the_best_are_those_of_the_whole_catalogue(name):
    layer = TOWERS[name]()
    query = tf.constant(RNG.normal(size=[2, WIDTH]), tf.float32)
    layer(query, tf.constant(by_name(name)[:2]))
    rows = layer.embeddings.value[1:] if name == "a vocabulary" else layer.tower(tf.range(ROWS))
    best = np.argsort(-(query.numpy() @ np.asarray(rows).T), axis=1)[:, :3]
    found = layer.top_k(query, 3)
    if name == "a vocabulary":
        np.testing.assert_array_equal(found.numpy().astype(str), TITLES[best])
    else:
        np.testing.assert_array_equal(found.indices, best)


def ranked(scores, k, exclude=(), allowed=None):
    order = [n for n in np.argsort(-scores) if n not in exclude and (allowed is None or allowed[n])][:k]
    return order + [-1] * (k - len(order))


@pytest.mark.parametrize("k", [2, ROWS, ROWS + 3])
@pytest.mark.parametrize("allowed", [None, [True, False, True, True, False, True]])
@pytest.mark.parametrize("exclude", [None, [[3, 0], [-1, 77]]])
def test_what_is_recommended_can_be_chosen_when_it_is_asked_for(k, allowed, exclude):
    query = RNG.normal(size=[2, WIDTH]).astype("float32")
    plain = tfdp_rec.CandidateScores(ROWS, WIDTH, "normal", negatives=2)
    named = tfdp_rec.CandidateScores(None, WIDTH, "normal", vocabulary=TITLES, negatives=2)
    named.embeddings.assign(tf.concat([tf.zeros([1, WIDTH]), plain.embeddings], 0))
    tower = tfdp_rec.TowerScores(table(), np.arange(ROWS), negatives=2)
    tower.tower(tf.range(ROWS))
    tower.tower.embeddings.assign(plain.embeddings)
    scores = query @ np.asarray(plain.embeddings).T
    expected = np.array([ranked(scores[i], k, exclude[i] if exclude else (), allowed) for i in range(2)])

    given = None if exclude is None else tf.constant(exclude)
    np.testing.assert_array_equal(plain.top_k(query, tf.constant(k), given, allowed), expected)
    best = tower.top_k(query, k, given, allowed)
    np.testing.assert_array_equal(best.indices, expected)
    assert (np.isneginf(best.values) == (expected == -1)).all()
    titles = None if exclude is None else tf.constant([["m3", "m0"], ["", "unknown"]])
    found = named.top_k(query, k, titles, allowed).numpy().astype(str)
    np.testing.assert_array_equal(found, np.append(TITLES, "")[expected])


def test_a_tower_ranks_items_that_are_new():
    tower = keras.Sequential([layers.Dense(WIDTH)])
    scores = tfdp_rec.TowerScores(tower, RNG.normal(size=[ROWS, 4]).astype("float32"), negatives=2)
    scores(tf.ones([1, WIDTH]), tf.ones([1, 4]))
    new = RNG.normal(size=[9, 4]).astype("float32")
    query = tf.constant(RNG.normal(size=[2, WIDTH]), tf.float32)
    best = np.argsort(-(query.numpy() @ np.asarray(tower(new)).T), axis=1)[:, :3]
    np.testing.assert_array_equal(scores.top_k(query, 3, candidates=new).indices, best)


@pytest.mark.parametrize("name", TOWERS)
def test_it_comes_back_from_a_file(name, tmp_path):
    user, item = keras.Input([], dtype="int64"), keras.Input([], dtype="string" if name == "a vocabulary" else "int64")
    layer = fixed(TOWERS[name](), [3, 3, 1, 5])
    model = tfdp_rec.PrivateModel([user, item], layer(table(4)(user), item))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    (again,) = [one for one in loaded.layers if type(one) is type(layer)]
    fixed(again, [3, 3, 1, 5])
    given = [tf.constant(USERS), tf.constant(by_name(name))]
    np.testing.assert_allclose(loaded(given), model(given), rtol=1e-6)
    assert again.negatives.released_counts == layer.negatives.released_counts
    assert again.softmax.get_config() == layer.softmax.get_config()


def given_shapes(query, positives):
    return tfdp_rec.CandidateScores(ROWS, WIDTH, negatives=2)(tf.ones(query), tf.zeros(positives, tf.int64))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: tfdp_rec.CandidateScores(ROWS, WIDTH)(tf.ones([1, WIDTH]), tf.constant([1])), "without negatives"),
        (lambda: tfdp_rec.CandidateScores(width=WIDTH), "vocabulary_size or vocabulary"),
        (lambda: tfdp_rec.CandidateScores(ROWS, WIDTH, negatives=tfdp_rec.Negatives(3, 7)), "for 7 candidates"),
        (lambda: tfdp_rec.Negatives(0, 7), "at least 1"),
        (lambda: tfdp_rec.CandidateScores(ROWS, WIDTH, temperature=0), "temperature"),
        (lambda: tfdp_rec.CandidateScores(ROWS, WIDTH, temperature=1e-50), "temperature"),
        (lambda: given_shapes([4, WIDTH], [4, 1]), "one positive"),
        (lambda: given_shapes([4, 2, WIDTH], [4]), "one query an example"),
        (lambda: tfdp_rec.TowerScores(table(), np.arange(3), num_hard_negatives=0), "num_hard_negatives"),
        (lambda: tfdp_rec.Negatives(3, 7, released_counts=[1.0]), "7 numbers"),
        (lambda: tfdp_rec.TowerScores(table(), {"a": np.ones(2), "b": np.ones(3)}), "one row a candidate"),
    ],
)
def test_misuse_is_one_line(make, match):
    with pytest.raises(ValueError, match=match) as caught:
        make()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("own, others", [(500, -500), (-500, 500), (-300, -300), (500, 500)])
def test_large_logits_overflow_nothing(own, others):
    softmax = negatives.Softmax(1.0, None)
    logits = tf.constant([[own]], tf.float32), tf.constant([[others, others - 1]], tf.float32)
    expected = np.logaddexp.reduce([own, others, others - 1]) - own
    np.testing.assert_allclose(softmax.losses(*logits, None), [expected], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "float64"])
def test_offsets_are_added_to_logits(policy):
    """Also to those of positives where the layer draws the negatives, whose correction is float32 in every policy."""
    layer = fixed(tfdp_rec.CandidateScores(ROWS, WIDTH, "normal", negatives=3, dtype=policy), [0, 1, 2])
    query, positives = tf.constant(RNG.normal(size=[4, WIDTH])), tf.constant([3, 3, 4, 5])
    chosen = tf.constant([0, 1, 2])
    own, others = tf.constant([1.0, -2.0, 3.0, 0.5]), tf.constant([2.0, -1.0, 4.0])
    for called, beside in (([query, positives, chosen], others), ([query, positives], tf.zeros([3]))):
        offsets = (own, beside if len(called) > 2 else None)
        moved = tf.cast(layer(*called, offsets=offsets) - layer(*called), tf.float32)
        expected = np.concatenate([own[:, None], np.broadcast_to(beside, [4, 3])], axis=1)
        np.testing.assert_allclose(moved, expected, atol=0.05)
        assert layer.cross_entropy(*called, offsets=offsets).shape == [4]
    with pytest.raises(ValueError, match="offsets are for those that a call gives"):
        layer(query, positives, offsets=(own, others))


def test_strings_of_pandas_are_a_vocabulary():
    layer = tfdp_rec.CandidateScores(vocabulary=TITLES.astype(object), width=WIDTH, negatives=2)
    assert set(layer.top_k(tf.ones([1, WIDTH]), k=ROWS).numpy()[0].astype(str)) == set(TITLES)


@pytest.mark.parametrize("some", [False, True])
def test_the_loss_of_logits_beside_each_other_is_that_of_one_softmax(some):
    rng = np.random.default_rng(0)
    own, others = (tf.constant(rng.normal(0, 20, [6, n]), tf.float32) for n in (1, 9))
    left_out = tf.constant(rng.random([6, 9]) < 0.3) if some else None
    upstream, made = tf.constant(rng.random(6), tf.float32), []
    whole = negatives.Softmax(1.0, None)
    for loss in (whole.losses, lambda *given: negatives.cross_entropy(whole.logits(*given))):
        with tf.GradientTape() as tape:
            tape.watch([own, others])
            losses = loss(own, others, left_out)
        made.append([losses, *tape.gradient(losses, [own, others], upstream)])
    for one, other in zip(*made, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert not some or not np.any(np.array(made[0][2])[np.array(left_out)])
