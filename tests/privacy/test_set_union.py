"""Terms found privately: the frequent are found, one individual's stay hidden, and the noise has the size claimed."""

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from scipy import stats

from tfdp_rec.noise.words import seeded
from tfdp_rec.privacy import private_terms
from tfdp_rec.privacy.set_union import clipped_weights, threshold


def crowd(counts):
    """One individual a use: term i is used by counts[i] individuals, each with that term alone."""
    return [[term] for term, count in counts.items() for _ in range(count)]


def test_the_frequent_are_found_and_the_rare_hidden():
    people = crowd({"often": 500, "common": 100, "rare": 1})
    found = private_terms(people, 10, noise_multiplier=1.0, threshold_delta=1e-6, words=seeded(0))
    assert found == (("often", "common"), GaussianDpEvent(1.0), 1e-6)
    assert private_terms(people, 1, noise_multiplier=1.0, threshold_delta=1e-6, words=seeded(0)).terms == ("often",)


def test_the_operating_system_decides_unless_told_otherwise():
    people = crowd({f"term {i}": 8 for i in range(200)})
    one, other = (private_terms(people, 200, noise_multiplier=2.0, threshold_delta=1e-2).terms for _ in range(2))
    assert one != other


def passes(people, sigma, delta, max_terms, runs=4000):
    settings = {"noise_multiplier": sigma, "threshold_delta": delta, "max_terms": max_terms}
    return sum(bool(private_terms(people, 100, **settings, words=seeded(seed)).terms) for seed in range(runs))


@pytest.mark.parametrize("own, max_terms", [(1, 1), (4, 4), (9, 4)])
def test_terms_of_one_individual_pass_with_probability_at_most_delta(own, max_terms):
    found = passes([[f"own{i}" for i in range(own)]], sigma=0.5, delta=0.05, max_terms=max_terms)
    assert stats.binom.sf(found - 1, 4000, 0.05) > 1e-6, f"{found} of 4000 pass"
    if own == max_terms == 1:
        assert stats.binom.cdf(found, 4000, 0.05) > 1e-6  # attained where one term is the worst case


def test_weights_get_noise_of_the_right_size():
    """A term about one σ above the threshold passes as often as a Gaussian says; a wrong σ would not."""
    sigma, delta = 4.0, 1e-3
    above = threshold(sigma, delta, 1)
    count = math.ceil(above) + 4
    found = passes(crowd({"near": count}), sigma, delta, 1, runs=2000)
    assert stats.binomtest(found, 2000, stats.norm.cdf((count - above) / sigma)).pvalue > 1e-6
    assert stats.binomtest(found, 2000, stats.norm.cdf((count - above) / (2 * sigma))).pvalue < 1e-6


@pytest.mark.parametrize("max_terms", [1, 7, 100])
def test_one_individual_moves_the_weights_by_exactly_one(max_terms):
    person = [term for t in range(3, 60) for term in ("Q1", "Q2", f"Q{t}")]
    others = crowd({f"Q{t}": 3 for t in range(1, 60)})
    with_, without = (clipped_weights(people, max_terms, seeded(1)) for people in ([*others, person], others))
    assert with_.keys() == without.keys()
    moved = np.linalg.norm([with_[term] - without[term] for term in with_])
    assert moved == pytest.approx(1.0, abs=1e-9)


def test_what_an_individual_gives_is_any_of_its_terms_alike():
    given = [next(iter(clipped_weights([["a", "b", "c", "d"]], 1, seeded(seed)))) for seed in range(4000)]
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
        ({"max_terms": 0}, "max_terms"),
    ],
)
def test_bad_arguments_are_refused(change, words):
    good = {"size": 5, "noise_multiplier": 1.0, "threshold_delta": 1e-6}
    with pytest.raises(ValueError, match=words):
        private_terms([["a"]], **{**good, **change})
