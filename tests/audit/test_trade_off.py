"""The bounds from trade-off curves: their formula, published numbers, coverage, and faults that they catch."""

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, special, stats

from tfdp_rec.audit import Gaussian, flip_coins, one_run_audit
from tfdp_rec.audit.trade_off import greatest_refuted, is_refuted, strength_if_independent
from tfdp_rec.core.claim.event_family import EventFamily
from tfdp_rec.core.claim.events import GaussianDpEvent, PoissonSampledDpEvent

DELTA = 1e-6
MU = 2**0.5 / 4  # two steps at noise multiplier 4


def least_mu(**counts):
    return greatest_refuted(lambda mu: is_refuted(Gaussian().curve(mu), **counts), 1e-7)


def most_probable(mu, slots, guesses, correct):
    """The greatest P[at least v right] that the inequalities allow: a linear program, with F as its tangents' least."""
    at = special.ndtr(np.linspace(-6, 6, 801))
    value = special.ndtr(special.ndtri(at) + mu)
    slope = np.exp(-mu * special.ndtri(at) - mu**2 / 2)
    j = np.arange(guesses + 1)
    rows, limits = [], []
    for k in range(1, guesses + 1):
        right, wrong = np.where(j >= k, j, 0), np.where(j >= k - 1, guesses - j, 0)
        rows += [right - s * wrong for s in slope]
        limits += list(slots * (value - slope * at))
    found = optimize.linprog(-(j >= correct).astype(float), rows, limits, np.ones((1, guesses + 1)), [1.0])
    assert found.status == 0
    return -found.fun


@pytest.mark.parametrize("mu, slots, guesses, correct", [
    (0.5, 40, 8, 7), (1.0, 10, 10, 8), (1.0, 12, 6, 6), (0.2, 9, 5, 3), (2.0, 100, 9, 9),
])  # fmt: skip
def test_refuted_is_what_no_distribution_allows(mu, slots, guesses, correct):
    most = most_probable(mu, slots, guesses, correct)
    counts = {"num_slots": slots, "num_guesses": guesses, "num_correct": correct}
    assert not is_refuted(Gaussian().curve(mu), **counts, confidence=1 - 0.998 * most)
    assert is_refuted(Gaussian().curve(mu), **counts, confidence=1 - 1.002 * most)


@pytest.mark.parametrize("guesses, correct, thresholds, epsilon", [
    (406, 379, 386, 2.164749), (938, 934, 374, 4.7218075), (5436, 5436, 140, 9.133752),
])  # fmt: skip
def test_published_numbers(guesses, correct, thresholds, epsilon):
    """Scores of jax_privacy's tests, of 10,000 canaries in and as many out, with the best of so many thresholds."""
    confidence = 1 - 0.05 / thresholds
    mu = least_mu(num_slots=20_000, num_guesses=guesses, num_correct=correct, confidence=confidence)
    assert Gaussian().epsilon(mu, DELTA) == pytest.approx(epsilon, rel=1e-5)
    twice = least_mu(num_slots=10_000, num_guesses=guesses, num_correct=correct, confidence=confidence)
    assert twice > mu  # all guesses are "included": half the slots


@pytest.mark.parametrize("mu", [0.01, MU, 1.0, 5.0, 20.0])
def test_epsilon_of_mu_is_dp_accountings(mu):
    assert Gaussian().epsilon(mu, DELTA) == pytest.approx(dp_accounting.get_epsilon_gaussian(1 / mu, DELTA), abs=1e-6)


def test_epsilon_at_the_ends():
    assert Gaussian().epsilon(0.0, DELTA) == 0 == Gaussian().epsilon(1e-7, DELTA)
    assert Gaussian().epsilon(1.0, 0.0) == float("inf")


@pytest.mark.parametrize("epsilon, q, canaries", [(1.0, 0.1, 100), (2.0, 0.2, 60), (0.5, 0.3, 400)])
def test_it_holds_where_all_canaries_leak_at_once(epsilon, q, canaries):
    """With probability q all answers are right with e^ε/(1+e^ε), else they say nothing: exactly μ at one point."""
    p = special.expit(epsilon)
    mu = special.ndtri(q * p) - special.ndtri(q * (1 - p))
    bounds = []
    for correct in range(canaries // 2, canaries + 1):
        chance = q * stats.binom.sf(correct - 1, canaries, p) + (1 - q) * stats.binom.sf(correct - 1, canaries, 0.5)
        if chance > 1e-12:
            counts = {"num_guesses": canaries, "num_correct": correct, "confidence": 1 - 0.999 * chance}
            bounds.append(least_mu(num_slots=canaries, **counts))
    assert 0.7 * mu < max(bounds) <= mu


def test_independence_is_needed_where_it_is_assumed():
    """The same mechanism, where it leaks: no bound but the one that excludes it exceeds μ."""
    epsilon, q = 2.0, 0.06
    p = special.expit(epsilon)
    mu = special.ndtri(q * p) - special.ndtri(q * (1 - p))
    coins = flip_coins(2000, seed=1)
    scores = np.where(coins == (np.random.default_rng(2).random(2000) < p), 1.0, -1.0)
    audit = one_run_audit(scores, coins, num_guesses=2000, delta=DELTA)
    assert audit.strength < mu < audit.independent_strength


def audits(runs, seed, m=4000, mu=1.0, noise=1.0, guesses=200, **options):
    rng = np.random.default_rng(seed)
    for run in range(runs):
        coins = flip_coins(m, seed=1000 * seed + run)
        scores = mu * coins + noise * rng.normal(size=m)
        yield one_run_audit(scores, coins, num_guesses=guesses, delta=DELTA, **options)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_false_alarms_are_at_most_the_stated_share(share):
    found = list(audits(200, seed=3, share_included=share))
    claim = Gaussian().epsilon(1.0, DELTA)
    for bounds in ([a.curve_epsilon for a in found], [a.independent_epsilon for a in found]):
        assert stats.binom.sf(sum(np.array(bounds) > claim) - 1, 200, 0.05) > 1e-6
        assert np.median(bounds) > claim / 2
    assert all(a.epsilon < a.curve_epsilon for a in found)


def test_scores_without_a_signal_tell_nothing():
    found = list(audits(200, seed=4, mu=0.0))
    for bounds in ([a.curve_epsilon for a in found], [a.independent_epsilon for a in found]):
        assert stats.binom.sf(sum(np.array(bounds) > 0) - 1, 200, 0.05) > 1e-6


def test_unequal_canaries_are_covered():
    """Half of them leak nothing, half all that μ = 1 allows, and some scores have another scale."""
    rng, exceeded = np.random.default_rng(5), 0
    for run in range(200):
        coins = flip_coins(2000, seed=run)
        scores = (coins * (np.arange(2000) % 4 < 2) + rng.normal(size=2000)) * rng.choice([1, 5], 2000)
        exceeded += one_run_audit(scores, coins, num_guesses=200, delta=DELTA).independent_strength > 1
    assert exceeded == 0


def test_a_fifth_too_little_noise_is_caught():
    claim = Gaussian().epsilon(MU, DELTA)
    weak = list(audits(5, seed=6, m=100_000, mu=MU, noise=0.8, guesses=800))
    assert min(audit.independent_epsilon for audit in weak) > claim
    assert all(audit.greatest_epsilon == audit.independent_epsilon for audit in weak)


def test_few_canaries_and_equal_scores():
    for m in (1, 2, 3, 8):
        audit = one_run_audit(np.zeros(m), flip_coins(m, seed=m), num_guesses=1, delta=DELTA)
        assert audit.curve_epsilon == 0 == audit.independent_epsilon


def test_an_events_curve_is_a_gaussians_where_it_is_one():
    family = EventFamily(lambda strength: GaussianDpEvent(1 / strength))
    for power in (1e-4, 0.01, 0.3, 0.9, 0.999, 1.0):
        exact = Gaussian().curve(1.0)(power)
        assert 0.998 * exact - 1e-7 < family.curve(1.0)(power) <= exact + 1e-12
    assert family.curve(0.0)(0.3) == 0.3 and family.epsilon(0.0, DELTA) == 0
    assert family.epsilon(1.0, DELTA) == pytest.approx(Gaussian().epsilon(1.0, DELTA), abs=1e-3)
    assert family.curve(1e4)(0.9) == 0.0  # beyond what is priced, nothing is refuted


def test_a_sampled_step_is_beyond_its_curve_nowhere():
    """One step, whose trade-off is known: a mixture, at each threshold."""
    family = EventFamily(lambda strength: PoissonSampledDpEvent(0.2, GaussianDpEvent(1 / strength)))
    at = np.linspace(-2, 5, 40)
    false, right = special.ndtr(-at), 0.8 * special.ndtr(-at) + 0.2 * special.ndtr(1 - at)
    least = np.array([family.curve(1.0)(power) for power in right])
    assert np.all(least <= false + 1e-12)
    assert np.all((least > 0.995 * false - 1e-7)[at > 0.5])  # where the claim of leaving out is not the greater one


def test_independent_counts_by_hand():
    """70 of 100 right, 30 wrong, at 95%: 2.5% missed on either side."""
    mu = special.ndtri(stats.beta.ppf(0.025, 70, 31)) - special.ndtri(stats.beta.ppf(0.975, 31, 70))
    counts = {"num_canaries": 100, "num_correct": 70, "num_wrong": 30, "confidence": 0.95, "tolerance": 1e-7}
    assert strength_if_independent(Gaussian(), num_slots=100, **counts) == pytest.approx(mu, rel=1e-6)
    one_sided = special.ndtri(2 * stats.beta.ppf(0.025, 30, 71)) - special.ndtri(2 * stats.beta.ppf(0.975, 6, 95))
    counts |= {"num_correct": 30, "num_wrong": 5}
    assert strength_if_independent(Gaussian(), num_slots=50, **counts) == pytest.approx(one_sided, rel=1e-6)


@pytest.mark.parametrize("share, slots", [(0.5, 4000), (1.0, 2000), (0.0, 2000)])
def test_one_sided_guesses_have_half_the_slots(share, slots):
    (audit,) = audits(1, seed=7, share_included=share)
    counts = {"num_guesses": 200, "num_correct": audit.num_correct, "confidence": 0.95}
    assert audit.strength == pytest.approx(least_mu(num_slots=slots, **counts), rel=1e-5)


def test_the_better_side_is_found():
    """Only high scores tell, and all others are equal: one side's guesses, of the three quarters that do not choose."""
    coins = flip_coins(4000, seed=8)
    scores = 1.0 * (coins & (np.random.default_rng(9).random(4000) < 0.5))
    tested = np.arange(4000) % 4 != 0
    right = int(np.sum(tested & (scores > 0)))
    power, level = 2 * stats.beta.ppf(0.025, right, 3000 - right + 1), 2 * stats.beta.ppf(0.975, 1, 3000)
    audit = one_run_audit(scores, coins, num_guesses=200, delta=DELTA)
    assert audit.independent_strength == pytest.approx(special.ndtri(power) - special.ndtri(level), rel=1e-5)
