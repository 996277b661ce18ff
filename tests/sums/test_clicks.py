"""The model of clicks: a unit moves its sums by at most 1, by brute force; its price, predictions and SavedModel."""

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent
from scipy import special

from tfdp_rec.core.claim import ledger as ledgers
from tfdp_rec.core.mechanism.noise.words import os_entropy, seeded
from tfdp_rec.privacy import Accountant, PoissonSampling
from tfdp_rec.sums import ClickModel, clicks
from tfdp_rec.sums.fixed_point import ONE

COLUMNS = {"item": 3, "hour": 4, "user": 2}
COUNTED = ["item", "hour", ("item", "hour"), ("user", "hour", "item")]
SIGMA = 0.7


def drawn(count, users, seed=0, unknown=False):
    """Rows with many of some users and few of others."""
    rng = np.random.default_rng(seed)
    rows = {name: rng.integers(-unknown, size + unknown, count) for name, size in COLUMNS.items()}
    return rows, rng.integers(0, 2, count), np.unique(rng.integers(0, users, count) ** 2, return_inverse=True)[1]


@pytest.fixture
def released(monkeypatch):
    """(Sums without noise, sums with it, σ) of each release of the counts."""
    seen, release = [], clicks.release_sums

    def spied(total, noise, words):
        seen.append((total, release(total, noise, words), noise))
        return seen[-1][1]

    monkeypatch.setattr(clicks, "release_sums", spied)
    return seen


def sums_of(released, rows, labels, unit, counted=COUNTED):
    """All sums of a fit in one vector, in grid steps."""
    released.clear()
    ClickModel(COLUMNS, counted, noise_multiplier=SIGMA).fit(rows, labels, unit)
    return np.concatenate([total.ravel() for total, _, _ in released])


@pytest.mark.parametrize("counted", [["item"], ["item", "hour"], COUNTED])
@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("users", [None, 6])
def test_no_unit_moves_the_sums_by_more_than_one_and_none_wastes_the_bound(released, counted, unknown, users):
    rows, labels, unit = drawn(60, users or 60, seed=len(counted), unknown=unknown)
    unit = unit if users else None
    whole, moved = sums_of(released, rows, labels, unit, counted), []
    for each in np.unique(np.arange(60) if unit is None else unit):
        left = (np.arange(60) if unit is None else unit) != each
        others = {name: values[left] for name, values in rows.items()}
        without = sums_of(released, others, labels[left], None if unit is None else unit[left], counted)
        moved.append(math.sqrt(sum(int(step) ** 2 for step in whole - without)) / ONE)
    assert 0.99 < max(moved) <= 1
    assert unknown or min(moved) > 0.99, "every unit uses what there is, however many rows it has"


@pytest.mark.parametrize("unit", [np.zeros(400, int), None])
def test_the_correction_counts_a_user_once(unit):
    rows, labels, _ = drawn(400, 1)
    found = ClickModel(COLUMNS, noise_multiplier=1e-4).fit(rows, labels, unit).reliability
    counted = np.linalg.norm([found.clicks, found.others])
    assert counted == pytest.approx(1, abs=0.1) if unit is not None else counted > 20


def test_the_sums_are_those_of_the_definition(released):
    rows, labels, unit = drawn(80, 7, seed=3, unknown=True)
    sums_of(released, rows, labels, unit)
    whole = sum(1 if isinstance(each, str) else len(each) for each in COUNTED)
    for (total, _, _), crossing in zip(released, [("item",), ("hour",), *COUNTED[2:]]):
        cells = list(itertools.product(*(range(COLUMNS[name]) for name in crossing)))
        expected = np.zeros((len(cells), 2))
        for each in np.unique(unit):
            own = np.zeros_like(expected)
            for row in np.flatnonzero(unit == each):
                value = tuple(rows[name][row] for name in crossing)
                if value in cells:
                    own[cells.index(value)] += [3 if labels[row] else -3, 2]
            if own.any():
                expected += own / np.linalg.norm(own) * (len(crossing) / whole) ** 0.5
        np.testing.assert_allclose(total / ONE, expected, atol=1e-3)


def test_the_predictions_are_those_of_the_definition(released):
    rows, labels, unit = drawn(4000, 300, seed=4)
    labels = labels | (rows["item"] == 0) & (rows["hour"] == 0)
    model = ClickModel(COLUMNS, ["item", ("item", "hour")], noise_multiplier=SIGMA, threshold=2.0, shrinkage=1.1)
    model.fit(rows, labels, unit)
    (_, item, noise), (_, both, _) = released

    def shrunk(sums, own, centre):
        signed, shown = sums[0] / 3, sums[1] / 2
        rate = centre + ((signed + shown) / 2 - centre * shown) * trust(shown)
        return special.logit(np.clip(rate, 1e-3, 1 - 1e-3)) - special.logit(np.clip(own, 1e-3, 1 - 1e-3))

    def trust(shown):
        there = shown if shown * 2 > 2.0 * noise else 0.0
        return there / (there**2 + (1.1 * noise) ** 2)

    rate = (1 + item[:, 0].sum() / 3 / (item[:, 1].sum() / 2)) / 2
    rare = [value for value in item if value[1] <= 3 * noise]
    a, s = sum(x / 3 + y / 2 for x, y in rare) / 2, sum(y / 2 for _, y in rare)
    centre = rate + (a - rate * s) * max(s, 0) / (s**2 + max(len(rare), 1) * (1.1 * noise) ** 2)
    for k, (tea, hour) in enumerate(itertools.product(range(3), range(4))):
        alone = special.logit(rate) + shrunk(item[tea], rate, centre)
        expected = alone + shrunk(both[k], special.expit(alone), special.expit(alone))
        asked = {"item": [tea], "hour": [hour]}
        assert model.logits(asked)[0] == pytest.approx(expected)
        found = model.reliability
        assert model.predict(asked)[0] == pytest.approx(special.expit(found.scale * expected + found.offset))
    assert model.logits({"item": [2, -1], "hour": [99, 1]}) == pytest.approx(
        [special.logit(rate) + shrunk(item[2], rate, centre), special.logit(rate)]
    )


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.95, False), (1.05, False)])
def test_the_noise_has_its_size(released, error, accepted):
    model = ClickModel({"item": 20_000}, noise_multiplier=3.0, words=seeded(5))
    model.fit({"item": np.full(10, -7)}, np.ones(10))
    ((total, noisy, noise),) = released
    assert not total.any()
    counts = noise * error  # what the noise is said to be
    assert (abs(noisy.std() / counts - 1) < 5.5 / np.sqrt(2 * noisy.size)) == accepted
    assert noise**-2 + model.reliability.noise_multiplier**-2 == pytest.approx(3.0**-2)


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 8.0])
def test_the_ledger_holds_what_dp_accounting_says_of_both_releases(released, tmp_path, epsilon):
    sampling = PoissonSampling(1000, 10, unit="user")
    accountant = Accountant(GaussianDpEvent(2.0), sampling, delta=1e-6, ledger=tmp_path / "ledger.jsonl")
    rows, labels, unit = drawn(500, 40)
    model = ClickModel(COLUMNS, COUNTED, epsilon=epsilon).fit(rows, labels, unit, accountant=accountant)
    assert accountant.epsilon() == pytest.approx(model.epsilon)
    accountant.close()
    (paid,) = ledgers.read(tmp_path / "ledger.jsonl").paid
    assert paid.label == clicks.LABEL and paid.whole == GaussianDpEvent(model.noise_multiplier)
    noises = {noise for _, _, noise in released} | {model.reliability.noise_multiplier}
    by_hand = dp_accounting.pld.PLDAccountant()
    for noise in noises:
        by_hand.compose(GaussianDpEvent(noise))
    assert len(noises) == 2 and 0.99 * epsilon < by_hand.get_epsilon(1e-6) <= epsilon * (1 + 1e-3)
    assert model.epsilon <= epsilon
    said = model.statement().fields
    assert said["Guarantee"].startswith(f"(epsilon = {epsilon:g}, ") and "one user" in said["Protected unit"]
    assert "item × hour" in said["Mechanism"]


def test_what_was_begun_is_paid_for_and_done_once(monkeypatch):
    rows, labels, unit = drawn(50, 5)
    accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-6)
    model = ClickModel(COLUMNS, noise_multiplier=2.0)
    monkeypatch.setattr(clicks, "unit_sums", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(rows, labels, unit, accountant=accountant)
    assert accountant.epsilon() > 0
    with pytest.raises(RuntimeError, match="fitted already"):
        model.fit(rows, labels, unit)
    for ask in (model.statement, lambda: model.predict(rows), lambda: model.logits(rows), lambda: model.export("x")):
        with pytest.raises(RuntimeError, match="Nothing was released yet"):
            ask()


@pytest.mark.parametrize("unit", [np.zeros(0, int), None])
def test_no_rows_are_data_too(unit):
    """Of two neighbours one may have none: a refusal would tell them apart."""
    rows = {name: np.zeros(0, np.uint64) for name in COLUMNS}
    model = ClickModel(COLUMNS, COUNTED, epsilon=1.0).fit(rows, np.zeros(0), unit)
    assert model.predict({name: np.array([0, 2**63], np.uint64) for name in COLUMNS}).shape == (2,)


def test_noise_that_can_be_drawn_again_has_no_guarantee():
    rows, labels, _ = drawn(50, 5)
    model = ClickModel(COLUMNS, epsilon=1.0, words=seeded(0)).fit(rows, labels)
    assert model.epsilon == np.inf and model.statement().fields["Guarantee"].startswith("none")


@pytest.mark.parametrize(
    "change, words",
    [({"epsilon": None}, "either"), ({"noise_multiplier": 1.0}, "either"), ({"epsilon": -1.0}, "epsilon"),
     ({"delta": 0.0}, "delta"), ({"shrinkage": 0.0}, "shrinkage"), ({"threshold": np.nan}, "threshold"),
     ({"counted": ["price"]}, "name columns of"), ({"counted": [("item", "item")]}, "once"),
     ({"counted": ["item", "item"]}, "once"), ({"counted": [()]}, "once"), ({"columns": {}}, "empty"),
     ({"columns": {"item": 0}}, "must have 1 to"), ({"columns": {"item": -3}}, "must have 1 to"),
     ({"columns": {"the item": 1}}, "by letters"),
     ({"columns": {"a": 3000, "b": 3000}, "counted": [("a", "b")]}, "count other columns"),
     ({"epsilon": None, "noise_multiplier": 2.0**18}, "noise_multiplier"),
     ({"epsilon": None, "noise_multiplier": 0.0}, "noise_multiplier")],
)  # fmt: skip
def test_a_model_that_cannot_be_is_refused(change, words):
    with pytest.raises((TypeError, ValueError), match=words):
        ClickModel(**{"columns": COLUMNS, "counted": None, "epsilon": 1.0, **change})


@pytest.mark.parametrize(
    "change, words",
    [({"rows": {"item": np.zeros(50, int)}}, "column 'hour'"), ({"labels": np.ones(49)}, "as many of each"),
     ({"labels": ["yes"] * 50}, "one number"), ({"labels": np.ones((50, 1))}, "one number"),
     ({"item": ["tea"] * 50}, "a whole number a row"), ({"hour": np.full(50, 7.0)}, "a whole number a row"),
     ({"hour": np.full((50, 1), 3)}, "a whole number a row"), ({"item": [0] * 49}, "as many of each"),
     ({"unit": None}, "unit="), ({"unit": np.zeros(49, int)}, "one id for each"), ({"unit": [None] * 50}, "no user id"),
     ({"unit": np.arange(50)}, "The accountant's units are 40")],
)  # fmt: skip
def test_data_that_do_not_fit_are_refused_before_anything_is_paid(released, change, words):
    rows, labels, unit = drawn(50, 5)
    given = {"rows": rows, "labels": labels, "unit": unit, **change}
    given["rows"] = given["rows"] | {name: each for name, each in change.items() if name in COLUMNS}
    accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(40, 10, unit="user"), delta=1e-6)
    with pytest.raises(ValueError, match=words) as refused:
        ClickModel(COLUMNS, epsilon=1.0).fit(given["rows"], given["labels"], given["unit"], accountant=accountant)
    assert not accountant.spent_besides and not released and str(refused.value).count(".") == 1


@pytest.fixture(scope="module")
def many():
    """Clicks that a column and a pair decide, beside which a third says nothing."""
    rng = np.random.default_rng(8)
    rows = {name: rng.integers(0, size, 60_000) for name, size in COLUMNS.items()}
    truth = -1.0 + 1.5 * (rows["item"] == 0) + 2.0 * ((rows["item"] == 1) & (rows["hour"] == 1))
    return rows, rng.random(60_000) < special.expit(truth), special.expit(truth)


def test_probabilities_are_near_the_true_ones_and_crossed_columns_find_pairs(many):
    rows, labels, truth = many
    errors = []
    for counted in (["item", "hour"], ["item", ("item", "hour")]):
        model = ClickModel(COLUMNS, counted, epsilon=2.0).fit(rows, labels)
        errors.append(np.abs(model.predict(rows) - truth).mean())
        assert abs(model.predict(rows).mean() - labels.mean()) < 0.02
    assert errors[1] < 0.02 and 2 * errors[1] < errors[0]


def test_the_savedmodel_answers_the_same_and_holds_no_more_than_was_released(many, tmp_path):
    rows, labels, _ = many
    model = ClickModel(COLUMNS, COUNTED, epsilon=2.0, words=os_entropy).fit(rows, labels)
    model.export(tmp_path / "clicks")
    asked = {"item": [0, 1, -1, 2, 3], "hour": [1, 1, 2, 99, 0], "user": [1, 0, 1, 7, 0]}
    serve = tf.saved_model.load(str(tmp_path / "clicks")).signatures["serving_default"]
    answer = serve(**{name: tf.constant(ids, tf.int64) for name, ids in asked.items()})
    np.testing.assert_allclose(answer["probability"], model.predict(asked), rtol=1e-6)
    assert set(model.weights) == {("item",), ("hour",), ("item", "hour"), ("user", "hour", "item")}


def test_what_is_too_rare_to_be_told_from_noise_counts_as_zero():
    model = ClickModel({"item": 5000}, epsilon=2.0, threshold=4.0)
    model.fit({"item": np.zeros(3000, int)}, np.arange(3000) % 2)
    (weights,) = model.weights.values()
    assert (weights[1:] == np.median(weights)).mean() > 0.998, "as if never seen"
    model = ClickModel({"item": 2000, "a": 2}, ["a", ("a", "item")], epsilon=2.0, threshold=4.0)
    model.fit({"item": np.zeros(3000, int), "a": np.arange(3000) % 2}, np.arange(3000) % 2)
    assert (model.weights["a", "item"][1:] == 0).mean() > 0.998, "columns have the say"


def test_rare_values_are_drawn_to_the_rate_of_rare_values(released):
    """Drawn to the rate of all, what nobody clicks on would be recommended for being unknown."""
    ids = np.concatenate([np.repeat(np.arange(10), 500), np.arange(10, 4010)])
    labels = np.concatenate([np.arange(5000) % 2, np.zeros(4000)])
    model = ClickModel({"item": 4010}, noise_multiplier=0.7).fit({"item": ids}, labels)
    ((_, sums, noise),) = released
    rates = special.expit(model.logits({"item": np.arange(4010)}))
    assert model.rate == pytest.approx(2500 / 9000, abs=0.03)
    assert rates[:10] == pytest.approx(0.5, abs=0.05) and np.median(rates[10:]) < 0.05
    rare = sums[sums[:, 1] <= 3 * noise]
    a, s = rare.sum(axis=0) @ [1 / 6, 1 / 4], rare[:, 1].sum() / 2
    centre = model.rate + (a - model.rate * s) * s / (s**2 + len(rare) * (0.8 * noise) ** 2)
    assert rates[sums[:, 1] < 0] == pytest.approx(max(centre, 1e-3), rel=1e-6)
