"""Vectors of a pair of columns: a unit moves each turn by at most 1, by brute force; what they find; their price."""

import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import special

from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.sums import ClickModel, click_factors, clicks
from tfdp_rec.sums.fixed_point import ONE, unit_sums

COLUMNS = {"user": 7, "item": 5, "hour": 3}
PAIR = ("user", "item")


def drawn(count, users, seed=0):
    """Rows with many of some users and few of others; some values are unknown."""
    rng = np.random.default_rng(seed)
    rows = {name: rng.integers(-1, size + 1, count) for name, size in COLUMNS.items()}
    return rows, rng.integers(0, 2, count), np.unique(rng.integers(0, users, count) ** 2, return_inverse=True)[1]


@pytest.fixture
def given_out(monkeypatch):
    """(Sums without noise, σ) of each release, which gives out the same numbers whatever the sums are."""
    seen = []

    def told(total, noise, words):
        seen.append((total, noise))
        return 5.0 * np.random.default_rng(len(seen)).normal(size=total.shape)

    monkeypatch.setattr(clicks, "release_sums", told)
    monkeypatch.setattr(click_factors, "release_sums", told)
    return seen


def sums_of(given_out, rows, labels, unit):
    given_out.clear()
    model = ClickModel(COLUMNS, ["item", ("hour", "item")], noise_multiplier=0.7, factors=PAIR, click_weight=2)
    return model.fit(rows, labels, unit), list(given_out)


@pytest.mark.parametrize("users", [None, 6])
def test_no_unit_moves_a_turn_by_more_than_one_whatever_was_released_before(given_out, users):
    rows, labels, unit = drawn(70, users or 70, seed=2)
    unit = unit if users else None
    owners, moved = np.arange(70) if unit is None else unit, []
    _, whole = sums_of(given_out, rows, labels, unit)
    for each in np.unique(owners):
        left = owners != each
        others = {name: values[left] for name, values in rows.items()}
        _, without = sums_of(given_out, others, labels[left], None if unit is None else unit[left])
        squares = [int(np.square(a - b).sum()) for (a, _), (b, _) in zip(whole, without)]
        assert sum(squares[:2]) <= ONE**2, "columns and crossed columns share one bound"
        moved.append(np.sqrt(squares[2:]) / ONE)
    assert len(moved[0]) == click_factors.TURNS and 0.99 < np.max(moved) <= 1
    assert np.min(np.max(moved, axis=0)) > 0.99 or not users, "a user of many rows uses the bound in every turn"


def test_all_releases_cost_what_the_model_says(given_out):
    model, releases = sums_of(given_out, *drawn(60, 9))
    columns, turns = {noise for _, noise in releases[:2]}, [noise for _, noise in releases[2:]]
    spent = sum(noise**-2 for noise in [*columns, *turns, model.reliability.noise_multiplier])
    assert len(columns) == 1 and spent == pytest.approx(model.noise_multiplier**-2)


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.95, False), (1.05, False)])
def test_the_noise_of_a_turn_has_its_size(monkeypatch, error, accepted):
    seen, release = [], click_factors.release_sums

    def spied(total, noise, words):
        seen.append((noise, release(total, noise, words)))
        return seen[-1][1]

    monkeypatch.setattr(click_factors, "release_sums", spied)
    nobody = np.zeros(0, np.int64)
    click_factors.release_factors(nobody, np.zeros((2, 0), np.int64), np.zeros(0), [3000, 3000], 3.0, seeded(4))
    noise, noisy = seen[1]
    assert (abs(noisy.std() / (noise * error) - 1) < 5.5 / math.sqrt(2 * noisy.size)) == accepted and noise == 3.0


def test_a_turn_is_that_of_the_definition(monkeypatch):
    seen = []
    monkeypatch.setattr(click_factors, "release_sums", lambda total, *_: seen.append(total / ONE) or total / ONE)
    rng, noise = np.random.default_rng(3), 0.5
    owners, users, items = (rng.integers(0, size, 90) for size in (30, 7, 5))
    off = rng.uniform(-1, 1, 90)
    found, known = click_factors.release_factors(owners, np.stack([users, items]), off, [7, 5], noise, None)
    assert (np.linalg.norm(known, axis=1) <= 3 + 1e-9).all() and known.shape[1] == found.shape[1] <= 8
    expected = np.zeros((7, known.shape[1] + 1))
    for each in range(30):
        own = np.zeros_like(expected)
        for row in np.flatnonzero(owners == each):
            own[users[row]] += np.rint([*(64 * 4 * off[row] * known[items[row]]), 64 / 4]) / 64
        expected += own / max(np.linalg.norm(own), 1.0)
    np.testing.assert_allclose(seen[-1], expected, atol=1e-4)
    bent = 4 * expected[:, -1:] * 0.2 / known.shape[1]
    vectors = expected[:, :-1] / 4 * bent / (bent**2 + (bent + (noise / 4) ** 2) / 0.4)
    np.testing.assert_allclose(found, vectors, atol=1e-4)
    assert len(seen) == click_factors.TURNS and {len(sums) for sums in seen[::2]} == {5}


def test_a_users_rows_without_end_stay_within_the_bound():
    entries = np.array([[2**40, -(2**40)], [2**33, 3]])
    sums = unit_sums(np.zeros(2, np.int64), np.array([0, 1]), entries, 2, least=64**2)
    assert 0.99 * ONE**2 < sum(int(each) ** 2 for each in sums.ravel()) <= ONE**2
    assert unit_sums(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([[32]]), 1, least=64**2) == ONE / 2


@pytest.fixture(scope="module")
def tastes():
    """Clicks that no column alone tells: users like the items of their own kind."""
    rng = np.random.default_rng(8)
    rows = {"user": rng.integers(0, 300, 40_000), "item": rng.integers(0, 200, 40_000)}
    likely = special.expit(np.where(rows["user"] % 2 == rows["item"] % 2, 1.5, -1.5))
    return rows, rng.random(40_000) < likely, likely


@pytest.mark.parametrize("click_weight", [1, 3])
def test_vectors_find_what_columns_do_not_tell(tastes, click_weight):
    rows, labels, likely = tastes
    errors, unit = [], np.arange(len(labels)) // 2 if click_weight > 1 else None
    for factors in ((), PAIR):
        model = ClickModel(
            {"user": 300, "item": 200}, epsilon=4.0, factors=factors, click_weight=click_weight, words=seeded(1)
        ).fit(rows, labels, unit)
        errors.append(np.abs(model.predict(rows) - likely).mean())
        assert model.predict(rows).mean() == pytest.approx(labels.mean(), abs=0.03)
    assert errors[0] > 0.25 and errors[1] < 0.2


def test_the_savedmodel_answers_the_same_also_of_unknown_values(tastes, tmp_path):
    rows, labels, _ = tastes
    model = ClickModel({"user": 300, "item": 200}, ["item"], epsilon=4.0, factors=PAIR).fit(rows, labels)
    assert "vectors of user × item" in model.statement().fields["Mechanism"]
    model.export(tmp_path / "clicks")
    asked = {"user": [0, 299, -1, 300, 5], "item": [1, 199, 3, 4, -7]}
    serve = tf.saved_model.load(str(tmp_path / "clicks")).signatures["serving_default"]
    answer = serve(**{name: tf.constant(ids, tf.int64) for name, ids in asked.items()})["probability"]
    np.testing.assert_allclose(answer, model.predict(asked), rtol=1e-6)
    np.testing.assert_allclose(answer[2], serve(user=[-9], item=[3])["probability"][0])


def test_no_rows_have_vectors_too():
    rows = {name: np.zeros(0, np.int64) for name in COLUMNS}
    model = ClickModel(COLUMNS, epsilon=1.0, factors=PAIR).fit(rows, np.zeros(0))
    assert np.isfinite(model.predict({name: [0, 9] for name in COLUMNS})).all()


@pytest.mark.parametrize(
    "change, words",
    [({"factors": ("user",)}, "two of"), ({"factors": ("user", "user")}, "two of"), ({"factors": "user"}, "two of"),
     ({"factors": ("user", "price")}, "two of"), ({"factors": ("user", "item", "hour")}, "two of"),
     ({"columns": {"user": 2**23 + 1, "item": 2}, "counted": ["item"]}, "two of"),
     ({"click_weight": 0}, "click_weight"), ({"click_weight": 17}, "click_weight"),
     ({"click_weight": 1.5}, "click_weight"), ({"click_weight": True}, "click_weight"),
     ({"click_weight": None}, "click_weight")],
)  # fmt: skip
def test_what_cannot_be_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        ClickModel(**{"columns": COLUMNS, "epsilon": 1.0, "factors": PAIR, **change})
    rows, labels, _ = drawn(9, 3)
    with pytest.raises(ValueError, match="column 'user'"):
        ClickModel(COLUMNS, ["item"], epsilon=1.0, factors=PAIR).fit({"item": rows["item"]}, labels)
