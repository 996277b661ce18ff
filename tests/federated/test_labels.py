"""Label permutation: exact output distributions, counted over every (label, negatives) pair."""

import functools
import itertools
import math

import numpy as np
import pytest
from dp_accounting import NonPrivateDpEvent
from scipy import stats

from experiments.news.published import PublishedLabelPermutation
from tfdp_rec.core.claim.events import PureDpEvent
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import LabelPermutation


def joint(num_candidates, clicked, num_negatives, epsilon):
    """Pr[(label, set of negatives)] of the corrected order, from its definition."""
    label = LabelPermutation(epsilon, num_negatives).probabilities(num_candidates, clicked)
    sets = math.comb(num_candidates - 1, num_negatives)
    return {
        (j, negatives): label[j] / sets
        for j in range(num_candidates)
        for negatives in itertools.combinations([i for i in range(num_candidates) if i != j], num_negatives)
    }


@pytest.mark.parametrize("epsilon", (0.01, 1.0, 8.0))
def test_no_outcome_changes_by_more_than_the_stated_factor(epsilon):
    tables = [joint(5, clicked, 2, epsilon) for clicked in range(5)]
    for first, second in itertools.permutations(tables, 2):
        ratio = max(first[outcome] / second[outcome] for outcome in first)
        assert ratio <= math.exp(epsilon) * (1 + 1e-12)
    assert max(tables[0][o] / tables[1][o] for o in tables[0]) == pytest.approx(math.exp(epsilon))


@pytest.mark.parametrize("clicked", (0, 3))
def test_samples_follow_the_stated_distribution(clicked):
    permutation, source = LabelPermutation(1.0, 2), words.seeded(11)
    expected = joint(4, clicked, 2, 1.0)
    counts = dict.fromkeys(expected, 0)
    for _ in range(4_000):
        label, *negatives = permutation.sample(4, clicked, source).tolist()
        counts[label, tuple(sorted(negatives))] += 1
    observed = np.array(list(counts.values()))
    assert stats.chisquare(observed, 4_000 * np.array(list(expected.values()))).pvalue > 1e-6
    wrong = np.array(list(joint(4, clicked, 2, 1.3).values()))
    assert stats.chisquare(observed, 4_000 * wrong).pvalue < 1e-6


def test_the_published_order_always_samples_the_click():
    source = words.seeded(3)
    published, private = PublishedLabelPermutation(0.5, 4), LabelPermutation(0.5, 4)
    assert all(17 in published.sample(20, 17, source) for _ in range(500))
    assert np.mean([17 in private.sample(20, 17, source) for _ in range(500)]) < 0.5


def test_a_label_costs_its_epsilon_and_a_published_one_has_no_bound():
    assert LabelPermutation(0.5, 4).event == PureDpEvent(0.5)
    for unbounded in (PublishedLabelPermutation(0.5, 4), LabelPermutation(math.inf, 4)):
        assert unbounded.event == NonPrivateDpEvent()


def test_the_published_label_alone_misses_a_small_epsilon():
    """Pr[click keeps its label] against Pr[another click gets it]: (C - 1)/k when beta is cut at 0."""
    published = PublishedLabelPermutation(0.1, 4)
    keep = published.keep_probability(20)
    other = 4 / 19 * (1 - keep) / 4
    assert keep / other > math.exp(0.1) * 2
    large = PublishedLabelPermutation(3.0, 4)
    keep = large.keep_probability(20)
    assert keep / (4 / 19 * (1 - keep) / 4) == pytest.approx(math.exp(3.0))


@pytest.mark.parametrize("epsilon", (0.5, 10.0, 29.9, 30.0, 36.0, 40.0, 750.0))
@pytest.mark.parametrize("candidates", (2, 7, 300))
def test_a_draws_values_are_shared_out_within_the_stated_factor(epsilon, candidates):
    """At 29.9 the draw was of 29.9016, since alternatives had a value less than their share; at 40 it had none."""
    label, values = LabelPermutation(epsilon, 1), 2**52
    tables = [[int(p * values) for p in label.probabilities(candidates, clicked)] for clicked in (0, 1, candidates - 1)]
    for counts in tables:
        assert sum(counts) == values and min(counts) >= 1
        assert math.log(max(counts)) - math.log(min(counts)) <= epsilon
    for clicked, counts in enumerate(tables[:2]):
        ends = np.cumsum([0, *counts])
        for place in {0, 1, candidates - 1}:
            for value in (ends[place], ends[place + 1] - 1):  # the first and the last of its values
                source = functools.partial(np.full, fill_value=int(value) << 12, dtype="uint64")
                assert label.sample(candidates, clicked, source)[0] == place
    assert label.event == PureDpEvent(epsilon)


def test_an_epsilon_that_rounding_would_exceed_is_refused():
    """The clicked news gets what the others leave: with many others it was rarer than they, by more than epsilon."""
    for epsilon, candidates in ((1e-12, 1000), (1e-7, 100_000)):
        with pytest.raises(ValueError, match=f"too small for {candidates} choices"):
            LabelPermutation(epsilon).probabilities(candidates, 0)
    for epsilon, candidates in ((1e-12, 2), (1e-4, 1000)):
        found = LabelPermutation(epsilon).probabilities(candidates, 1)
        assert 0 <= math.log(found[1] / found[0]) <= epsilon


def test_infinite_epsilon_keeps_the_label():
    assert {LabelPermutation(math.inf, 1).sample(3, 2)[0] for _ in range(20)} == {2}


@pytest.mark.parametrize(
    "call, name",
    (
        (lambda: LabelPermutation(0.0), "epsilon"),
        (lambda: LabelPermutation(1.0, 0), "num_negatives"),
        (lambda: LabelPermutation(1.0, 4).sample(1, 0), "num_candidates"),
        (lambda: LabelPermutation(1.0, 2).sample(4, 4), "clicked"),
    ),
)
def test_values_that_do_not_fit_are_refused(call, name):
    with pytest.raises(ValueError, match=name):
        call()


@pytest.mark.parametrize("kind", (LabelPermutation, PublishedLabelPermutation))
def test_where_there_are_too_few_others_all_are_negatives_over_and_over(kind):
    for candidates in (2, 3, 4):
        label, *negatives = kind(1.0, 4).sample(candidates, 1, words.seeded(candidates)).tolist()
        assert len(negatives) == 4 and set(negatives) == set(range(candidates)) - {label}


def test_a_short_impressions_label_follows_the_stated_distribution():
    source = words.seeded(11)
    counts = np.bincount([LabelPermutation(1.0, 4).sample(3, 2, source)[0] for _ in range(4_000)], minlength=3)
    expected = LabelPermutation(1.0, 4).probabilities(3, 2)
    assert stats.chisquare(counts, 4_000 * expected).pvalue > 1e-6
    assert stats.chisquare(counts, 4_000 * LabelPermutation(1.3, 4).probabilities(3, 2)).pvalue < 1e-6
