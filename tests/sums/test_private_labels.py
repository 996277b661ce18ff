"""Private labels: what is drawn, how often, what it costs, and that debiased labels have the true mean."""

import math

import numpy as np
import pytest
from scipy import stats

from tfdp_rec.core.claim.events import REPLACE
from tfdp_rec.core.claim.ledger import ZERO_OUT, read
from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.privacy import Ledger, Snapshot, private_labels
from tfdp_rec.sums.private_labels import response

ROWS = 40_000


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0, 30.0])
@pytest.mark.parametrize("num_classes", [2, 3, 10])
def test_the_chances_are_whole_steps_that_epsilon_bounds(epsilon, num_classes):
    own, other = response(epsilon, num_classes)
    assert own + (num_classes - 1) * other == 1.0 and own >= other > 0
    assert (own * 2**52).is_integer() and (other * 2**52).is_integer()
    assert math.log(own / other) <= epsilon
    if epsilon <= 8:
        assert math.log(own / other) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_each_class_is_released_as_often_as_is_said(num_classes):
    own, other = response(1.0, num_classes)
    for label in range(num_classes):
        released = private_labels(
            np.full(ROWS, label), epsilon=1.0, num_classes=num_classes, words=seeded(label)
        ).labels
        counts = np.bincount(released, minlength=num_classes)
        for chance, accepted in ((own, True), (own * 1.03, False), (own * 0.97, False)):
            expected = np.full(num_classes, (1 - chance) / (num_classes - 1))
            expected[label] = chance
            assert (stats.chisquare(counts, ROWS * expected).pvalue > 1e-4) == accepted
        others = np.delete(counts, label)
        assert stats.chisquare(others).pvalue > 1e-4 if len(others) > 1 else True
        assert abs(others.sum() - ROWS * (num_classes - 1) * other) < 5 * ROWS**0.5


def test_every_draw_falls_into_the_class_whose_interval_it_is_in():
    """By brute force over the ends of all intervals, where a rounded division would go wrong."""
    for epsilon, num_classes in ((0.3, 7), (2.0, 3), (36.0, 2), (36.0, 5), (1.0, 2)):
        own, other = (round(chance * 2**52) for chance in response(epsilon, num_classes))
        ends = [own + place * other for place in range(num_classes)]
        for label in range(num_classes):
            order = [label, *(c for c in range(num_classes) if c != label)]
            cells = [cell for end in ends for cell in (end - 1, end) if 0 <= cell < 2**52]
            words = np.array([cell << 12 for cell in cells], np.uint64)
            found = private_labels(
                np.full(len(cells), label), epsilon=epsilon, num_classes=num_classes, words=lambda n, w=words: w
            ).labels
            expected = [order[sum(cell >= end for end in ends)] for cell in cells]
            assert found.tolist() == expected


@pytest.mark.parametrize("num_classes", [2, 5])
def test_debiased_labels_have_the_mean_of_the_true_ones(num_classes):
    rng = np.random.default_rng(0)
    labels = rng.choice(num_classes, ROWS, p=np.arange(1, num_classes + 1) / np.arange(1, num_classes + 1).sum())
    released = private_labels(labels, epsilon=1.0, num_classes=num_classes, words=seeded(9))
    found = released.debiased()
    truth = labels if num_classes == 2 else np.eye(num_classes)[labels]
    assert found.shape == truth.shape
    spread = found.std(axis=0) / ROWS**0.5
    assert (np.abs(found.mean(axis=0) - truth.mean(axis=0)) < 4.5 * spread).all()
    raw = released.labels if num_classes == 2 else np.eye(num_classes)[released.labels]
    assert (np.abs(raw.mean(axis=0) - truth.mean(axis=0)) > 10 * ROWS**-0.5).any(), "without it they have not"
    own, other = released.chances
    values = {round(float(v), 4) for v in np.unique(found)}
    assert values == {round(-other / (own - other), 4), round((1 - other) / (own - other), 4)}


def test_it_is_paid_for_first_in_a_ledger_of_labels(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, "label", Snapshot(1000, "label"), REPLACE) as ledger:
        private_labels(np.zeros(1000, int), epsilon=1.5, ledger=ledger)
        assert ledger.epsilon(0.0) == 1.5 and ledger.epsilon(1e-5) <= 1.5
        with pytest.raises(ValueError, match="whole numbers"):
            private_labels(np.full(1000, 7), epsilon=1.0, ledger=ledger)
    spent = read(path)
    assert [paid.label for paid in spent.paid] == ["labels by randomised response"] * 2, "refused after it was paid"
    assert spent.epsilon(0.0) == 2.5


class Missing:
    """A missing value as pandas has it: what it is compared with is missing, too."""

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")

    __lt__ = __gt__ = __eq__
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "labels, settings, says",
    [
        ([0, 1], {"epsilon": 0.0}, "epsilon must be positive"),
        ([0, 1], {"epsilon": math.inf}, "epsilon must be positive and finite"),
        ([0, 1], {"epsilon": math.nan}, "epsilon must be positive"),
        ([0, 1], {"epsilon": 1e-300}, "too small for 2 choices"),
        ([0, 2], {"epsilon": 1.0}, "from 0 to 1"),
        ([0.5, 1], {"epsilon": 1.0}, "from 0 to 1"),
        ([np.nan, 1], {"epsilon": 1.0}, "from 0 to 1"),
        ([[0, 1]], {"epsilon": 1.0}, "one class a row"),
        (["0", "1"], {"epsilon": 1.0}, "from 0 to 1"),
        ([None, 1], {"epsilon": 1.0}, "none may be missing"),
        (np.array([0, Missing()], object), {"epsilon": 1.0}, "none may be missing"),
        (np.ma.array([0, 1], mask=[0, 1]), {"epsilon": 1.0}, "none may be missing"),
        (np.array([0, 1], "timedelta64[s]"), {"epsilon": 1.0}, "from 0 to 1"),
        ([0, 1], {"epsilon": 1.0, "num_classes": 2.5}, "a whole number, at least 2"),
        ([0, 1], {"epsilon": 1.0, "num_classes": 1}, "at least 2"),
    ],
)
def test_what_is_no_label_is_refused(labels, settings, says):
    with pytest.raises(ValueError, match=says):
        private_labels(np.array(labels) if isinstance(labels, list) else labels, **settings)


@pytest.mark.parametrize("epsilon, num_classes", [(0.3, 2), (2.0, 2), (1.0, 7)])
def test_an_empty_row_is_told_from_a_label_by_no_more_than_epsilon(epsilon, num_classes):
    """An empty row's class is uniform: what docs/your-model.md adds to the cost of steps, by basic composition."""
    own, other = response(epsilon, num_classes)
    assert max(own * num_classes, 1 / (num_classes * other)) <= math.exp(epsilon)


def test_a_ledger_of_users_or_of_another_relation_is_refused(tmp_path):
    for number, (unit, adjacency) in enumerate((("user", REPLACE), ("label", ZERO_OUT))):
        with Ledger(tmp_path / f"{number}.jsonl", unit, Snapshot(5, unit), adjacency) as ledger:
            with pytest.raises(ValueError, match=f"counts for one {unit}"):
                private_labels(np.zeros(5, int), epsilon=1.0, ledger=ledger)
            assert not ledger.paid
