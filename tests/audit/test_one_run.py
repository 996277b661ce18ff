"""The one-run bound: its formula, its coverage and its tightness on mechanisms of known ε."""

import math

import numpy as np
import pytest
from scipy import stats

from tfdp_rec.audit.one_run import audit_p_value, flip_coins, least_epsilon, one_run_audit


def p_value_by_definition(m, r, v, epsilon, delta):
    """Theorem 5.2, term by term."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))

    def at_least(count):
        return sum(math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(max(count, 0), r + 1))

    slopes = [(at_least(v - i) - at_least(v)) / i for i in range(1, v + 1)]
    return min(1.0, at_least(v) + 2 * m * delta * max(slopes, default=0.0))


@pytest.mark.parametrize("m, r, v", [(10, 10, 10), (50, 20, 15), (40, 40, 20), (5, 3, 0), (100, 30, 30)])
@pytest.mark.parametrize("epsilon, delta", [(0.0, 0.0), (0.7, 0.0), (1.5, 1e-3), (3.0, 1e-5)])
def test_p_value_is_the_theorems(m, r, v, epsilon, delta):
    got = audit_p_value(num_canaries=m, num_guesses=r, num_correct=v, epsilon=epsilon, delta=delta)
    assert got == pytest.approx(p_value_by_definition(m, r, v, epsilon, delta), rel=1e-9)


def test_the_bound_is_where_the_p_value_crosses():
    sizes = {"num_canaries": 500, "num_guesses": 200, "num_correct": 170, "delta": 1e-5}
    bound = least_epsilon(**sizes, confidence=0.95)
    assert audit_p_value(**sizes, epsilon=bound - 1e-6) < 0.05 < audit_p_value(**sizes, epsilon=bound + 1e-6)
    assert least_epsilon(**sizes, confidence=0.999) < bound


def test_chance_refutes_nothing():
    assert least_epsilon(num_canaries=1000, num_guesses=400, num_correct=200, delta=0.0) == 0.0


def randomized_response(coins, epsilon, delta, rng):
    """Tells the truth with probability e^ε/(1+e^ε), and with probability δ tells it in another voice."""
    truthful = rng.random(coins.size) < 1 / (1 + math.exp(-epsilon))
    scores = np.where(coins == truthful, 1.0, -1.0)
    return np.where(rng.random(coins.size) < delta, np.where(coins, 2.0, -2.0), scores)


def bounds_on_randomized_response(epsilon, delta, claimed_delta, runs=150, confidence=0.9, m=400, seed=0):
    rng = np.random.default_rng(seed)
    bounds = []
    for run in range(runs):
        coins = flip_coins(m, seed=10_000 * seed + run)
        scores = randomized_response(coins, epsilon, delta, rng) + rng.uniform(-0.1, 0.1, size=m)
        audit = one_run_audit(scores, coins, num_guesses=m, delta=claimed_delta, confidence=confidence)
        bounds.append(audit.epsilon)
    return np.array(bounds)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_bound_is_attained_by_randomized_response(epsilon):
    """Independent answers, right with e^ε/(1+e^ε): wrong claims come near 1 - confidence, not above."""
    answers = np.random.default_rng(0).binomial(400, 1 / (1 + math.exp(-epsilon)), size=5000)
    correct, times = np.unique(answers, return_counts=True)
    sizes = {"num_canaries": 400, "num_guesses": 400, "delta": 0.0, "confidence": 0.9}
    bounds = np.array([least_epsilon(num_correct=int(v), **sizes) for v in correct])
    wrong = int(times[bounds > epsilon].sum())
    assert stats.binom.sf(wrong - 1, 5000, 0.1) > 1e-6, f"{wrong} of 5000 bounds exceed ε"
    assert wrong > 0.05 * 5000  # a vacuous bound would never err
    assert epsilon - 0.4 < np.median(np.repeat(bounds, times)) <= epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_whole_audit_covers(epsilon):
    bounds = bounds_on_randomized_response(epsilon, 0.0, 0.0)
    assert stats.binom.sf(int(np.sum(bounds > epsilon)) - 1, bounds.size, 0.1) > 1e-6
    assert epsilon - 0.6 < np.median(bounds) <= epsilon


def test_coverage_with_delta():
    bounds = bounds_on_randomized_response(1.0, 1e-3, 1e-3, seed=1)
    assert stats.binom.sf(int(np.sum(bounds > 1.0)) - 1, bounds.size, 0.1) > 1e-6
    assert np.median(bounds) > 0.3


def test_a_larger_epsilon_than_claimed_is_refuted():
    """The audit rejects a wrong scale: twice the claimed ε is caught every time."""
    assert np.mean(bounds_on_randomized_response(2.0, 0.0, 0.0, runs=100, seed=2) > 1.0) == 1.0


def test_gaussian_mechanism_is_bounded_from_below_by_less_than_its_epsilon():
    """Sum queries with noise 1: ε(1e-5) = 4.38; the audit's bound stays below it, and is not vacuous."""
    rng, epsilon = np.random.default_rng(3), 4.377
    bounds = []
    for run in range(100):
        coins = flip_coins(2000, seed=run)
        scores = coins + rng.normal(size=2000)
        bounds.append(one_run_audit(scores, coins, num_guesses=200, delta=1e-5).epsilon)
    assert max(bounds) < epsilon
    assert np.median(bounds) > 1.0


def test_share_included_chooses_the_side():
    coins = flip_coins(200, seed=7)
    scores = np.where(coins, np.arange(200.0), 0.0) + np.arange(200) * 1e-6  # only the top is telling
    top = one_run_audit(scores, coins, num_guesses=50, delta=0.0, share_included=1.0)
    assert top.num_correct == 50 and top.num_guesses == 50
    assert "50 of 50 guesses right, 200 canaries" in str(top)


def test_bad_arguments_are_refused():
    coins = flip_coins(100, seed=0)
    scores = np.zeros(100)
    for kwargs, words in [
        ({"num_guesses": 0, "delta": 0.0}, "num_guesses"),
        ({"num_guesses": 101, "delta": 0.0}, "num_guesses"),
        ({"num_guesses": 10, "delta": 2.0}, "delta"),
        ({"num_guesses": 10, "delta": 0.0, "confidence": 1.0}, "confidence"),
        ({"num_guesses": 10, "delta": 0.0, "share_included": 1.5}, "share_included"),
    ]:
        with pytest.raises(ValueError, match=words):
            one_run_audit(scores, coins, **kwargs)
    with pytest.raises(ValueError, match="fair coin"):
        one_run_audit(scores, np.ones(100, bool), num_guesses=10, delta=0.0)
    with pytest.raises(ValueError, match="booleans"):
        one_run_audit(scores, coins.astype(int), num_guesses=10, delta=0.0)
    with pytest.raises(ValueError, match="finite"):
        one_run_audit(np.full(100, np.nan), coins, num_guesses=10, delta=0.0)
    with pytest.raises(ValueError, match="equal length"):
        one_run_audit(scores[:50], coins, num_guesses=10, delta=0.0)
    with pytest.raises(ValueError, match="0 <= num_correct"):
        audit_p_value(num_canaries=3, num_guesses=4, num_correct=1, epsilon=0.0, delta=0.0)
    with pytest.raises(ValueError, match="num_canaries"):
        flip_coins(0)
