"""Terms found privately: the frequent are found, one individual's stay hidden, and the noise has the size claimed."""

import math
from fractions import Fraction

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdp_rec.core.claim.events import FailingDpEvent, describe, from_json, is_private, to_json
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.mechanism.noise.words import os_entropy, seeded
from tfdp_rec.data import Interactions, PoissonSampling
from tfdp_rec.datasets.log import Log
from tfdp_rec.privacy import Accountant, epsilon_of, private_counts, private_items, private_terms
from tfdp_rec.sums import set_union
from tfdp_rec.sums.fixed_point import ONE
from tfdp_rec.sums.set_union import least_users, threshold, weights


def crowd(counts):
    """One individual a use: term i is used by counts[i] individuals, each with that term alone."""
    return [[term] for term, count in counts.items() for _ in range(count)]


def test_the_frequent_are_found_and_the_rare_hidden():
    people = crowd({"often": 500, "common": 100, "rare": 1})
    found = private_terms(people, 10, noise_multiplier=1.0, threshold_delta=1e-6, words=seeded(0))
    assert found == (("often", "common"), NonPrivateDpEvent())  # noise that can be drawn again hides nothing
    plan = ComposedDpEvent([GaussianDpEvent(1.0), FailingDpEvent(1e-6)])
    assert private_terms(people, 10, noise_multiplier=1.0, threshold_delta=1e-6).event == plan
    assert private_terms(people, 1, noise_multiplier=1.0, threshold_delta=1e-6, words=seeded(0)).terms == ("often",)


def test_one_text_is_no_list_and_half_a_character_ends_nothing():
    with pytest.raises(TypeError, match="a list of terms"):
        private_terms(["tea"] * 500, noise_multiplier=1.0, threshold_delta=1e-6)
    people = [["tea", "żur"]] * 500 + [["\ud800"]]
    assert set(private_terms(people, noise_multiplier=1.0, threshold_delta=1e-6).terms) == {"tea", "żur"}


def test_the_operating_system_decides_unless_told_otherwise():
    people = crowd({f"term {i}": 8 for i in range(200)})
    one, other = (private_terms(people, 200, noise_multiplier=2.0, threshold_delta=1e-2).terms for _ in range(2))
    assert one != other


RUNS = 1500


def passes(people, sigma, delta, max_terms, runs=RUNS, rounds=1):
    settings = {"noise_multiplier": sigma, "threshold_delta": delta, "max_terms": max_terms, "rounds": rounds}
    return sum(bool(private_terms(people, 100, **settings, words=seeded(seed)).terms) for seed in range(runs))


@pytest.mark.slow_cases("4-4-2")
@pytest.mark.parametrize("own, max_terms, rounds", [(1, 1, 1), (9, 4, 1), (4, 4, 2)])
def test_terms_of_one_individual_pass_with_probability_at_most_delta(own, max_terms, rounds):
    found = passes([[f"own{i}" for i in range(own)]], sigma=0.5, delta=0.05, max_terms=max_terms, rounds=rounds)
    assert stats.binom.sf(found - 1, RUNS, 0.05) > 1e-6, f"{found} of {RUNS} pass"
    if own == max_terms == 1:
        assert stats.binom.cdf(found, RUNS, 0.05) > 1e-6  # attained where one term is the worst case


@pytest.mark.parametrize(
    "wrong", [lambda s, d, m: threshold(s, d, m) - 0.3 * s, lambda s, d, m: threshold(s, 2 * d, m)], ids=["σ", "δ"]
)
def test_a_threshold_that_is_too_low_is_rejected_by_that_test(wrong, monkeypatch):
    monkeypatch.setattr(set_union, "threshold", wrong)
    assert stats.binom.sf(passes([["own"]], sigma=0.5, delta=0.05, max_terms=1) - 1, RUNS, 0.05) < 1e-6


def test_weights_get_noise_of_the_right_size():
    """A term about one σ above the threshold passes as often as a Gaussian says; a wrong σ would not."""
    sigma, delta = 4.0, 1e-3
    above = threshold(sigma, delta, 1)
    count = math.ceil(above) + 4
    found = passes(crowd({"near": count}), sigma, delta, 1, runs=2000)
    assert stats.binomtest(found, 2000, stats.norm.cdf((count - above) / sigma)).pvalue > 1e-6
    assert stats.binomtest(found, 2000, stats.norm.cdf((count - above) / (2 * sigma))).pvalue < 1e-6


def given_by(people, max_terms=100, known=(), seed=1):
    """Each term's weight in units of 1."""
    terms = sorted({term for held in people for term in held})
    histories = Log([terms.index(t) + 1 for held in people for t in held], np.cumsum([0, *map(len, people)]))
    total = weights(histories, np.array([term in known for term in terms]), max_terms, seeded(seed))
    return dict(zip(terms, total / ONE))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from("abcdefg"), max_size=9), min_size=1, max_size=6),
    st.lists(st.sampled_from("abcdefg"), max_size=9),
    st.sampled_from([1, 2, 100]),
    st.sets(st.sampled_from("abc")),
)
def test_one_individual_moves_the_weights_by_at_most_one(others, person, max_terms, known):
    everybody = [list("abcdefg"), *others]
    with_, without = (given_by(people, max_terms, known) for people in ([*everybody, person], [*everybody, []]))
    if max_terms == 100:  # else who gives what is drawn anew
        moved = [with_[term] - without[term] for term in with_]
        assert sum(Fraction(move) ** 2 for move in moved) <= 1
    assert all(with_[term] == 0 for term in known)
    alone = given_by([[*person, "z"]], max_terms, known)
    assert sum(Fraction(weight) ** 2 for weight in alone.values()) <= 1
    left = {*person, "z"} - known
    assert sum(weight > 0 for weight in alone.values()) == min(max_terms, len(left))


def test_one_individual_uses_all_the_room_there_is():
    alone = given_by([[f"Q{t}" for t in range(50)]], 7)
    assert np.linalg.norm(list(alone.values())) == pytest.approx(1.0, abs=1e-5)


def test_what_an_individual_gives_is_any_of_its_terms_alike():
    given = [next(t for t, w in given_by([["a", "b", "c", "d"]], 1, seed=seed).items() if w) for seed in range(4000)]
    counts = [given.count(term) for term in "abcd"]
    assert stats.chisquare(counts).pvalue > 1e-6
    assert stats.chisquare([counts[0] + 200, counts[1] - 200, *counts[2:]]).pvalue < 1e-6


def test_threshold_is_the_definition():
    sigma, delta, m = 1.3, 1e-5, 50
    expected = max(1 / math.sqrt(t) + sigma * stats.norm.ppf((1 - delta) ** (1 / t)) for t in range(1, m + 1))
    assert threshold(sigma, delta, m) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"size": 0}, "size"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"threshold_delta": 0.0}, "threshold_delta"),
        ({"max_terms": 0}, "at least 1"),
        ({"rounds": 40}, "noise_multiplier must be positive and below"),  # the first round's noise overflowed the grid
    ],
)
def test_bad_arguments_are_refused(change, words):
    good = {"size": 5, "noise_multiplier": 1.0, "threshold_delta": 1e-6}
    with pytest.raises(ValueError, match=words):
        private_terms([["a"]], **{**good, **change})


# Rounds, and logs.


def zipf(users, items, rows, seed=0):
    """A log in which item i has popularity 1/i, some users with many rows."""
    rng = np.random.default_rng(seed)
    drawn = (items + 1) ** rng.random(rows)
    return {"u": rng.integers(0, users, rows), "i": [f"sku-{int(i)}" for i in drawn]}


def test_more_rounds_find_more_of_a_long_tail_at_the_same_price():
    log = Interactions.read(zipf(5_000, 20_000, 200_000), user="u", item="i")
    budget = {"epsilon": 4.0, "delta": 1e-6}
    one, two = (private_items(log, **budget, rounds=rounds, words=seeded(3)) for rounds in (1, 3))
    costs = [private_items(log, **budget, rounds=rounds).event for rounds in (1, 3)]
    assert costs[0] == costs[1] and epsilon_of(costs[1], 1e-6) <= 4.0
    assert len(two.terms) > 1.1 * len(one.terms) > 100, (len(one.terms), len(two.terms))
    assert two.terms[0] == "sku-1" and len(set(two.terms)) == len(two.terms)


@pytest.mark.parametrize("epsilon, users", [(2.0, 14), (0.1, 231)])
def test_fewer_users_than_least_find_nothing_and_twice_as_many_find_their_item(epsilon, users):
    assert least_users(epsilon, 1e-6) == pytest.approx(users, abs=1)

    def found(users):
        log = Interactions.read({"u": range(users), "i": ["tea"] * users}, user="u", item="i")
        return private_items(log, epsilon=epsilon, delta=1e-6, words=seeded(users)).terms

    assert found(users // 2) == () and found(2 * users) == ("tea",)


def test_known_items_take_no_weight_and_are_not_found_again():
    told = zipf(3_000, 60, 30_000)
    log, known = Interactions.read(told, user="u", item="i"), ["sku-1", "sku-2", "never seen"]
    left = [at for at, item in enumerate(told["i"]) if item not in known]
    users = np.concatenate([told["u"][left], np.setdiff1d(told["u"], told["u"][left])])
    items = [told["i"][at] for at in left] + [None] * (len(users) - len(left))
    without = Interactions.read({"u": users, "i": items}, user="u", item="i")
    budget = {"epsilon": 1.0, "delta": 1e-6, "max_items": 60}
    found, again = (private_items(each, **budget, known=known) for each in (log, without))
    assert not set(found.terms) & set(known) and len(found.terms) > 10
    assert found.event == again.event == private_items(log, **budget).event

    def weight(each, names):
        histories, ids = each.found()
        ids = ids.combine_chunks().to_pylist()
        total = set_union.weights(histories, np.isin(ids, names), 60, os_entropy)
        return {item: value for item, value in zip(ids, total.tolist()) if value}

    assert weight(log, known) == weight(without, [])


def test_known_items_may_be_of_another_kind_than_a_logs():
    log = Interactions.read({"u": np.arange(900), "i": np.arange(900) % 3}, user="u", item="i")
    assert set(private_items(log, epsilon=4.0, delta=1e-6, known=["1", "x"]).terms) == {0, 2}
    assert set(private_items(log, epsilon=4.0, delta=1e-6, known=[0, 1, 2]).terms) == set()


def test_items_and_counts_are_paid_for_before_anybody_looks(tmp_path):
    log = Interactions.read(zipf(500, 30, 5_000), user="u", item="i")
    sampling = PoissonSampling(len(log), 50, unit="user")
    accountant = Accountant(GaussianDpEvent(2.0), sampling, delta=1e-4, ledger=tmp_path / "ledger.jsonl")
    found = private_items(log, epsilon=1.0, delta=5e-5, accountant=accountant)
    known = log.with_items(found.terms)
    counted = private_counts(known, known.catalogue, noise_multiplier=8.0, accountant=accountant)
    assert len(counted.values) == known.num_items == len(found.terms) > 5
    assert [paid.label for paid in read(tmp_path / "ledger.jsonl").paid] == ["private vocabulary", "popularity counts"]
    both = ComposedDpEvent([found.event, counted.event])
    assert accountant.epsilon() == pytest.approx(epsilon_of(both, 1e-4))
    assert "fails with probability 2.5e-05" in " ".join(accountant.statement().split())

    class Broke:
        def spend(self, event, label):
            raise ValueError("no budget")

    for release in (
        lambda: private_items(log, epsilon=1.0, delta=1e-5, accountant=Broke(), words=lambda count: 1 / 0),
        lambda: private_counts(known, known.catalogue, noise_multiplier=1.0, accountant=Broke(), words=lambda n: 1 / 0),
    ):
        with pytest.raises(ValueError, match="no budget"):
            release()


def test_what_may_fail_is_taken_off_delta():
    gaussian, failing = GaussianDpEvent(4.0), FailingDpEvent(4e-7)
    for accountant in ("pld", "rdp"):
        both = ComposedDpEvent([gaussian, SelfComposedDpEvent(failing, 2)])
        assert epsilon_of(both, 1e-6, accountant) == pytest.approx(epsilon_of(gaussian, 2e-7, accountant), rel=1e-9)
        assert epsilon_of(both, 8e-7, accountant) == math.inf
        assert epsilon_of(ComposedDpEvent([NonPrivateDpEvent(), failing]), 1e-6, accountant) == math.inf
    assert from_json(to_json(failing)) == failing and is_private(failing) and "4e-07" in describe(failing)
    with pytest.raises(ValueError, match="delta must be"):
        to_json(FailingDpEvent(1.0))
    with pytest.raises(ValueError, match="cannot account"):
        Accountant(failing, PoissonSampling(100, 10), delta=1e-3)
    with pytest.raises(ValueError, match="no price here"):
        epsilon_of(PoissonSampledDpEvent(0.1, ComposedDpEvent([gaussian, failing])), 1e-6)
