"""Private metrics: what one unit moves, by brute force; figures against definitions; what intervals hold; payment."""

import functools
import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, NonPrivateDpEvent

from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.privacy import (
    Accountant,
    Ledger,
    PoissonSampling,
    PublicGroups,
    RecommendedLists,
    ScoredRows,
    Snapshot,
    epsilon_of,
    noise_of_metrics,
    noise_of_one_release,
    private_metrics,
)
from tfdp_rec.sums import private_metrics as room
from tfdp_rec.sums.fixed_point import ONE

THRESHOLDS = np.linspace(0, 1, 9)


class Data:
    """Held-out units with all that metrics can be made of; `without` a unit it is as if that contributed nothing."""

    def __init__(self, rng, units, k=3, items=12, most_rows=4):
        self.units = [f"u{n}" for n in range(units)]
        self.share, self.loss = rng.choice([0.0, 1.0, 0.3, rng.random()], units), rng.exponential(1.0, units)
        self.hit = (rng.random(units) < 0.2).astype(float)
        self.owner = np.repeat(np.arange(units), rng.integers(0, most_rows + 1, units))
        self.scores, self.labels = rng.random(len(self.owner)), rng.integers(0, 2, len(self.owner))
        self.group = rng.integers(0, 3, units)
        self.lists, self.items, self.slots = rng.integers(0, items + 1, [units, k]), items, units + 2

    def parts(self, kept):
        rows = np.isin(self.owner, kept)
        return {
            "means": {"means": {"recall@10": self.share[kept], "hit@10": self.hit[kept]}},
            "losses": {"losses": {"log loss": (self.loss[kept], 2.5)}},
            "groups": {"groups": PublicGroups(self.group[kept], [0, 1, 2])},
            "AUC": {"rows": ScoredRows([self.units[n] for n in self.owner[rows]], self.scores[rows], self.labels[rows],
                                       THRESHOLDS)},
            "lists": {"lists": RecommendedLists(self.lists[kept], self.items, self.slots)},
        }  # fmt: skip

    def asked(self, names, without=None):
        kept = [n for n in range(len(self.units)) if n != without]
        merged = {name: given for part in names for name, given in self.parts(kept)[part].items()}
        return {"units": [self.units[n] for n in kept], **merged}


def exact(monkeypatch, **asked):
    """The vector before noise, in grid steps."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(room, "release_sums", lambda total, noise, words: found.append(total) or total / ONE)
        private_metrics(**asked, noise_multiplier=1.0)
    return found[0]


def most_moved(monkeypatch, data, names):
    """The most, in ℓ₂, by which leaving one unit out moves the vector; and by which it moves each number."""
    whole = exact(monkeypatch, **data.asked(names))
    moves = [whole - exact(monkeypatch, **data.asked(names, n)) for n in range(len(data.units))]
    assert max(sum(int(x) ** 2 for x in move) for move in moves) <= ONE**2  # in whole numbers
    return max(np.linalg.norm(move) for move in moves) / ONE, np.abs(moves).max(axis=0) / ONE


@pytest.mark.parametrize(
    "names", [["means"], ["losses"], ["AUC"], ["lists"], ["means", "losses"], ["means", "losses", "AUC", "lists"],
              ["means", "groups"], ["means", "losses", "groups", "AUC", "lists"]],
)  # fmt: skip
def test_no_unit_moves_the_vector_by_more_than_one_and_some_by_nearly_so(monkeypatch, names):
    rng, found = np.random.default_rng(0), []
    for _ in range(25):
        data = Data(rng, units=int(rng.integers(2, 8)), k=int(rng.integers(1, 5)), items=int(rng.integers(2, 14)))
        found.append(most_moved(monkeypatch, data, names)[0])
    # The worst unit: values at the ends, one row, an item that no other has while all others have none.
    data = Data(rng, units=3, k=1, items=40)
    data.share, data.hit, data.loss, data.owner = np.array([1.0, 0, 0]), np.ones(3), np.full(3, 9.0), np.arange(3)
    data.scores, data.labels, data.lists = np.full(3, 0.5), np.ones(3, int), np.array([[7], [0], [0]])
    found.append(most_moved(monkeypatch, data, names)[0])
    assert 0.95 < max(found) <= 1


@pytest.mark.parametrize("items, k", [(40, 1), (41, 2), (6, 5), (2, 4), (30, 30)])
def test_coverage_and_gini_are_moved_by_what_is_said(monkeypatch, items, k):
    """Coverage by min(k, m) items at most; Gini by max a (m − a) of its numerator, and so by 1/n at most."""
    rng, found = np.random.default_rng(items), np.zeros(2)
    for trial in range(30):
        data = Data(rng, units=4, k=k, items=items)
        if trial % 2:
            data.lists[1:] = 0  # one list alone: of all a items or of half of them
            full = np.arange(1, k + 1) * (np.arange(1, k + 1) <= (min(k, items) if trial % 4 == 1 else items // 2))
            data.lists[0] = np.where(full <= items, full, 0)
        found = np.maximum(found, most_moved(monkeypatch, data, ["lists"])[1])
    found /= [0.75**0.5, 0.25**0.5]  # three parts of four, and one
    assert (0.95 < found).all() and (found <= 1 + 1e-6).all()


def slow_auc(owner, scores, labels):
    """Pairs of rows, each row with its unit's share; scores of one cell are equal."""
    cells, weight = np.searchsorted(THRESHOLDS, scores, side="right"), 1 / np.bincount(owner)[owner]
    won = weighed = 0.0
    for i in np.flatnonzero(labels == 1):
        for j in np.flatnonzero(labels == 0):
            weighed += weight[i] * weight[j]
            won += weight[i] * weight[j] * (1.0 if cells[i] > cells[j] else 0.5 if cells[i] == cells[j] else 0.0)
    return won / weighed


def slow_lists(lists, items, slots):
    counts = [sum(item in row for row in lists.tolist()) for item in range(1, items + 1)]
    gaps = sum(abs(a - b) for a in counts for b in counts)
    return sum(c > 0 for c in counts) / items, gaps / (2 * items * slots * lists.shape[1])


@pytest.mark.parametrize("seed", range(5))
def test_each_figure_is_its_definition(seed):
    data = Data(np.random.default_rng(seed), units=60)
    found = private_metrics(**data.asked(["means", "losses", "AUC", "lists"]), noise_multiplier=1e-6).figures
    coverage, gini = slow_lists(data.lists, data.items, data.slots)
    expected = {
        "recall@10": data.share.mean(), "hit@10": data.hit.mean(), "log loss": np.minimum(data.loss, 2.5).mean(),
        "AUC": slow_auc(data.owner, data.scores, data.labels), "coverage": coverage, "Gini": gini,
    }  # fmt: skip
    assert {name: figure.value for name, figure in found.items()} == pytest.approx(expected, abs=2e-5)
    for name, values in {"recall@10": data.share, "log loss": np.minimum(data.loss, 2.5)}.items():
        assert found[name].sampling == pytest.approx(values.std() / 60**0.5, rel=1e-3)
    assert max(figure.noise for figure in found.values()) < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_figures_of_groups_and_their_largest_gap_are_their_definition(seed):
    data = Data(np.random.default_rng(seed), units=90)
    found = private_metrics(**data.asked(["means", "losses", "groups"]), noise_multiplier=1e-6).figures
    values = {"recall@10": data.share, "hit@10": data.hit, "log loss": np.minimum(data.loss, 2.5)}
    assert list(found)[:3] == list(values) and len(found) == 3 * (1 + 3 + 1)
    for name, of_units in values.items():
        means = [of_units[data.group == group].mean() for group in range(3)]
        assert [found[f"{name}, {group}"].value for group in range(3)] == pytest.approx(means, abs=1e-4)
        gap = found[f"{name}, largest gap"]
        assert gap.value == pytest.approx(max(means) - min(means), abs=1e-4)
        errors = sorted(of_units[data.group == group].std() / (data.group == group).sum() ** 0.5 for group in range(3))
        # Three pairs: 1.96 such errors are the normal quantile of 1 − .05/6.
        assert gap.sampling * 1.959964 == pytest.approx(2.393980 * math.hypot(*errors[1:]), rel=1e-3)


def test_a_group_that_noise_hides_says_nothing_and_is_left_out_of_the_gap():
    recall, group = np.repeat([1.0, 0.0, 1.0], [4000, 4000, 3]), np.repeat(["a", "b", "c"], [4000, 4000, 3])
    asked = {"units": np.arange(8003), "means": {"m": recall}, "noise_multiplier": 5.0}
    found = private_metrics(**asked, groups=PublicGroups(group, ["a", "b", "c", "nobody"]), words=seeded(1)).figures
    assert [found[f"m, {name}"].interval() for name in ("c", "nobody")] == 2 * [(0.0, 1.0)]
    assert found["m, largest gap"].value > 0.97 and found["m, largest gap"].interval()[0] > 0.95
    alone = private_metrics(**asked, groups=PublicGroups(group, ["c", "a", "b"]), words=seeded(1)).figures
    assert alone["m, largest gap"].value > 0.97
    hidden = private_metrics([1, 2], means={"m": [0, 1]}, noise_multiplier=5.0, groups=PublicGroups([1, 2], [1, 2]))
    assert math.isnan(hidden.figures["m, largest gap"].value)


# What intervals hold: of releases of new units, the population's figure in about 95 of 100.


def drawn_mean(mean, n):
    return lambda rng: ({"units": np.arange(n), "means": {"m": (rng.random(n) < mean).astype(float)}}, mean)


def drawn_share(n):
    return lambda rng: ({"units": np.arange(n), "means": {"m": rng.beta(0.6, 1.4, n), "o": rng.random(n)}}, 0.3)


def drawn_loss(n):
    true = 1 - math.exp(-2.0)  # of an exponential variable that is cut at 2
    return lambda rng: ({"units": np.arange(n), "losses": {"m": (rng.exponential(1.0, n), 2.0)}}, true)


def drawn_groups(means, sizes):
    """Hits of units of groups of these sizes and means; true is the largest gap."""
    group, mean = np.repeat(np.arange(len(means)), sizes), np.repeat(means, sizes)

    def draw(rng):
        hits = (rng.random(len(group)) < mean).astype(float)
        named = PublicGroups(group, range(len(means)))
        return {"units": np.arange(len(group)), "means": {"m": hits}, "groups": named}, max(means) - min(means)

    return draw


def true_auc():
    """Of a score 1 − u² of the positives against 1 − u of the negatives, cut to cells."""
    edges = np.concatenate([[0], THRESHOLDS[1:-1], [1]])
    above, below = np.diff(np.sqrt(edges)), np.diff(edges)
    wins = np.cumsum(below) - below / 2
    return 1 - float(above @ wins)


def drawn_auc(n, most_rows=1):
    def draw(rng):
        owner = np.repeat(np.arange(n), rng.integers(1, most_rows + 1, n))
        labels = (rng.random(len(owner)) < 0.3).astype(int)
        scores = np.where(labels, 1 - rng.random(len(owner)) ** 2, 1 - rng.random(len(owner)))
        return {"units": np.arange(n), "rows": ScoredRows(owner, scores, labels, THRESHOLDS)}, true_auc()

    return draw


def held(draw, noise, releases=2000, name=None):
    """Share of releases whose interval holds the truth."""
    rng, inside = np.random.default_rng(7), 0
    for k in range(releases):
        asked, truth = draw(rng)
        figures = private_metrics(**asked, noise_multiplier=noise, words=seeded(k)).figures
        low, high = figures[name or next(iter(figures))].interval()
        inside += low <= truth <= high
    return inside / releases


@pytest.mark.fast_cases("noise and sampling")
@pytest.mark.parametrize(
    "draw, noise",
    [pytest.param(drawn_mean(0.13, 1500), 4.0, id="noise and sampling"),
     pytest.param(drawn_mean(0.3, 1000), 0.05, id="sampling alone"),
     pytest.param(drawn_mean(0.13, 2000), 40.0, id="noise alone"),
     pytest.param(drawn_share(1000), 3.0, id="shares of two metrics"),
     pytest.param(drawn_loss(1000), 3.0, id="loss"),
     pytest.param(drawn_auc(1500), 4.0, id="AUC"),
     pytest.param(drawn_auc(1500), 0.05, id="AUC, sampling alone")],
)  # fmt: skip
def test_an_interval_holds_the_truth_in_95_of_100_releases(draw, noise):
    assert abs(held(draw, noise) - 0.95) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.05, 2.0])
@pytest.mark.parametrize(
    "means, sizes", [([0.2, 0.3], [900, 300]), ([0.2, 0.2], [600, 600]), (5 * [0.2], 5 * [400]),
                     ([0.1, 0.3, 0.2, 0.2], [150, 1000, 1000, 1000])],
)  # fmt: skip
def test_the_largest_gap_is_held_at_least_as_often_whichever_pair_it_is(means, sizes, noise):
    assert held(drawn_groups(means, sizes), noise, releases=1000, name="m, largest gap") > 0.93


def test_the_largest_gap_of_many_equal_groups_is_not_told_to_be_one():
    assert held(drawn_groups(6 * [0.2], 6 * [300]), 1.0, releases=300, name="m, largest gap") > 0.93


def few(rng):
    """Values whose variance the noise hides, or nearly."""
    values = {name: rng.beta(0.5, 2.5, 450) for name in "mnop"}
    return {"units": np.arange(450), "means": values}, 0.5 / 3


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1.0, 2.0, 4.0, 12.0])
def test_of_few_units_it_holds_it_at_least_as_often(noise):
    assert held(few, noise) > 0.93


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.05, 3.0])
def test_of_units_with_several_rows_it_holds_it_at_least_as_often(noise):
    assert held(drawn_auc(800, most_rows=5), noise) > 0.93


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coverage", "Gini"])
@pytest.mark.parametrize("noise, k", [(0.05, 1), (0.05, 5), (2.0, 5)])
def test_of_lists_it_holds_the_mean_of_such_lists_at_least_as_often(name, noise, k):
    rng, n, items = np.random.default_rng(3), 200, 300
    chances = 1 / np.arange(1, items + 1)

    def lists():  # by Gumbel's trick: k different items of each unit, popular ones first
        return 1 + np.argsort(-(np.log(chances) + rng.gumbel(size=[n, items])), axis=1)[:, :k]

    truth = np.mean([slow_lists_fast(lists(), items) for _ in range(2000)], axis=0)[["coverage", "Gini"].index(name)]
    asked = lambda _: ({"units": np.arange(n), "lists": RecommendedLists(lists(), items, n)}, truth)  # noqa: E731
    assert held(asked, noise, releases=1000, name=name) > 0.93


def slow_lists_fast(lists, items):
    counts = np.bincount(lists.ravel(), minlength=items + 1)[1:].astype(float)
    return (counts > 0).mean(), np.abs(counts[:, None] - counts).sum() / (2 * items * lists.size)


@functools.cache
def noisy_figures():
    rng = np.random.default_rng(1)
    asked = {
        "units": np.arange(500), "means": {"m": rng.random(500), "o": np.ones(500)},
        "rows": ScoredRows(np.arange(500), rng.random(500), rng.integers(0, 2, 500), THRESHOLDS),
        "lists": RecommendedLists(rng.integers(1, 30, [500, 3]), 100, 500),
    }  # fmt: skip
    return [private_metrics(**asked, noise_multiplier=0.5, words=seeded(k)).figures for k in range(3000)]


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.9, False), (1.1, False)])
def test_the_noise_has_its_size(error, accepted):
    drawn = noisy_figures()
    for name in ("m", "AUC", "coverage", "Gini"):
        said = np.mean([figures[name].noise for figures in drawn]) * error
        found = np.std([figures[name].value for figures in drawn])
        assert (abs(found / said - 1) < 4.9 / (2 * len(drawn)) ** 0.5) == accepted, name
    # By hand, of 12, 12, 3 and 1 parts of 28: σ √(28/1), ... in units of what one user moves a figure by.
    assert drawn[0]["Gini"].noise == pytest.approx(0.5 * 28**0.5 * 3 * 97 / (100 * 500 * 3), rel=1e-5)
    assert drawn[0]["coverage"].noise == pytest.approx(0.5 * (28 / 3) ** 0.5 * 3 / 100, rel=1e-5)
    half = (0.5**2 + (np.mean([figures["m"].value for figures in drawn]) - 0.5) ** 2) ** 0.5
    by_hand = 0.5 * (28 / 12) ** 0.5 * (1 + 2 + 2 / 16) ** 0.5 / 500 * half
    assert np.mean([figures["m"].noise for figures in drawn]) == pytest.approx(by_hand, rel=1e-3)


def test_where_noise_hides_the_units_an_interval_is_all_that_can_be():
    asked = {
        "units": [1, 2], "means": {"m": [0.0, 1.0]}, "losses": {"l": ([1.0, 2.0], 3.0)},
        "rows": ScoredRows([1, 2], [0.1, 0.9], [0, 1], [0.5]),
    }  # fmt: skip
    for k in range(20):
        found = private_metrics(**asked, noise_multiplier=50.0, words=seeded(k)).figures
        assert all(math.isnan(figure.value) for figure in found.values())
        assert [found[name].interval() for name in ("m", "l", "AUC")] == [(0.0, 1.0), (0.0, 3.0), (0.0, 1.0)]


# Payment.


def accountant(**given):
    return Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-5, **given)


def test_they_are_paid_for_before_anything_is_summed_in_the_ledger_of_training(monkeypatch, tmp_path):
    with Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(1000, "user, item, time")) as ledger:
        of_training = accountant(ledger=ledger)
        of_training.spend(GaussianDpEvent(2.0), "popularity counts")
        found = private_metrics([1, 2], means={"m": [0, 1]}, noise_multiplier=5.0, accountant=of_training)
        assert found.event == GaussianDpEvent(5.0)
        both = ComposedDpEvent([GaussianDpEvent(2.0), GaussianDpEvent(5.0)])
        assert of_training.epsilon() == ledger.epsilon(1e-5) == pytest.approx(epsilon_of(both, 1e-5), rel=1e-6)
        assert [paid.label for paid in ledger.paid] == ["popularity counts", room.LABEL]
        assert room.LABEL in of_training.statement().fields["Spent besides"]
        monkeypatch.setattr(room._Means, "sums", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            private_metrics([1, 2], means={"m": [0, 1]}, noise_multiplier=5.0, accountant=of_training)
        assert len(ledger.paid) == 3


def test_noise_for_a_share_of_the_budget_takes_no_more():
    for epsilon in (1.0, 3.0, 8.0):
        whole = [GaussianDpEvent(noise_of_one_release(0.95 * epsilon, 1e-6)),
                 GaussianDpEvent(noise_of_metrics(epsilon, 1e-6))]  # fmt: skip
        assert 0.999 * epsilon < epsilon_of(ComposedDpEvent(whole), 1e-6) <= epsilon * 1.0001
    with pytest.raises(ValueError, match="share"):
        noise_of_metrics(1.0, 1e-6, share=1.0)


def test_test_noise_has_no_guarantee():
    assert private_metrics([1], means={"m": [0]}, noise_multiplier=1.0, words=seeded(0)).event == NonPrivateDpEvent()


ROWS, LISTS = ScoredRows([1, 2], [0.1, 0.9], [0, 1], [0.5]), RecommendedLists([[1], [2]], 5, 2)


@pytest.mark.parametrize(
    "change, words",
    [({"means": {"m": [0.0, np.nan]}}, "not NaN"), ({"means": {"m": [0.0, 1.1]}}, "between 0 and 1"),
     ({"means": {"m": [-0.1, 1.0]}}, "between 0 and 1"), ({"means": {"m": [0.0]}}, "for each of the units"),
     ({"means": {"m": [np.inf, 1.0]}}, "between 0 and 1"), ({"units": []}, "for each of the units"),
     ({"units": [1, 1]}, "twice"), ({"units": [1, None]}, "no user id"), ({"means": {}}, "at least one metric"),
     ({"means": {"AUC": [0, 1]}, "rows": ROWS}, "each name once"), ({"noise_multiplier": 0.0}, "noise_multiplier"),
     ({"losses": {"l": ([0.0, np.nan], 1.0)}}, "not NaN"), ({"losses": {"l": ([0.0, 1.0], 0.0)}}, "public bound"),
     ({"losses": {"l": ([0.0, 1.0], np.inf)}}, "public bound"), ({"losses": {"l": ([0.0], 1.0)}}, "for each of"),
     ({"rows": ROWS._replace(scores=[0.1, np.nan])}, "not NaN"), ({"rows": ROWS._replace(scores=[0.1])}, "one number"),
     ({"rows": ROWS._replace(labels=[0, 2])}, "0 or 1"), ({"rows": ROWS._replace(thresholds=[0.5, 0.5])}, "increasing"),
     ({"rows": ROWS._replace(thresholds=[np.nan])}, "increasing"), ({"rows": ROWS._replace(unit=[1, 3])}, "not in"),
     ({"rows": ROWS._replace(unit=[1])}, "one id for each"),
     ({"lists": LISTS._replace(recommended=np.zeros([2, 0], int))}, "k at least 1"),
     ({"lists": LISTS._replace(recommended=[[1]])}, "for each of the units"),
     ({"lists": LISTS._replace(recommended=[[1.0], [2.0]])}, "whole numbers"),
     ({"lists": LISTS._replace(recommended=[[1], [6]])}, "0..num_items"),
     ({"lists": LISTS._replace(num_items=1)}, "least 2"),
     ({"lists": LISTS._replace(recommended=[[-1], [2]])}, "0..num_items"),
     ({"lists": LISTS._replace(num_slots=1)}, "slots"),
     ({"groups": PublicGroups([1], [1, 2])}, "one of each unit"),
     ({"groups": PublicGroups([1, 1], [1])}, "at least two"),
     ({"groups": PublicGroups([1, 2], [1, 2, 2])}, "each once"),
     ({"groups": PublicGroups([1, 3], [1, 2])}, "not among"),
     ({"groups": PublicGroups([1, 2], [1, 2]), "means": {}, "rows": ROWS}, "means and losses"),
     ({"unit": "row"}, "units of training")],
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_sentence_before_anything_is_paid(change, words):
    of_training = accountant()
    given = {"units": [1, 2], "means": {"m": [0.0, 1.0]}, "noise_multiplier": 1.0, "accountant": of_training, **change}
    with pytest.raises(ValueError, match=words) as refused:
        private_metrics(**given)
    said = str(refused.value)
    assert said.endswith(".") and len(said) < 500 and ". " not in said and of_training.epsilon() == 0
