"""The price of the best of several runs: against exact selections, dp_accounting's divergences, and closed forms."""

import math

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    NonPrivateDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, special, stats

from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.composition import divergences, epsilon_of, orders
from tfdp_rec.core.claim.events import FailingDpEvent, PlannedDpEvent, PureDpEvent, RandomAllocationDpEvent
from tfdp_rec.core.claim.secret_draws import number_of_runs
from tfdp_rec.core.claim.selection import chance_to_end, losses_of_best
from tfdp_rec.privacy import RenyiFilter

GRID = 1e-3


def best_of(event, mean=10.0, shape=0.0):
    return RepeatAndSelectDpEvent(event, mean, shape)


def chances(gamma, shape, upto):
    """P(K = k) for k = 1, 2, ...: from the ratio of neighbours."""
    weights = [1.0]
    for k in range(1, upto):
        weights.append(weights[-1] * (1 - gamma) * (k + shape) / (k + 1))
    return np.array(weights) / sum(weights)


def best_chances(run, gamma, shape):
    """Chance of each result to be the best of K runs: Σ_k P(K = k) (F^k - F₋^k), results in ascending order."""
    below = np.concatenate([[0.0], np.cumsum(run)])
    p = chances(gamma, shape, 1000)
    return np.diff([float(p @ np.power(min(f, 1.0), np.arange(1, len(p) + 1))) for f in below])


@pytest.mark.parametrize("seed", range(12))
def test_no_exact_selection_tells_more(seed):
    """Runs with a few results, in an order of their own, and every ε: the exact profile is below the priced one."""
    rng = np.random.default_rng(seed)
    size, mean, shape = int(rng.integers(2, 6)), float(rng.choice([1.5, 3.0, 10.0])), float(rng.choice([0.0, 1.0, 2.5]))
    one = rng.dirichlet(np.full(size, rng.choice([0.3, 1.0, 5.0]))) + 1e-4
    other = one * np.exp(rng.normal(size=size) * rng.choice([0.1, 0.5, 1.5]))
    one, other = one / one.sum(), other / other.sum()

    def delta_at(epsilon):
        times = np.exp(epsilon)[..., None]
        return np.maximum(*(np.maximum(a - times * b, 0).sum(axis=-1) for a, b in ((one, other), (other, one))))

    priced = losses_of_best(delta_at, 0.0, mean, shape, GRID)
    gamma = chance_to_end(mean, shape)
    best, best_other = best_chances(one, gamma, shape), best_chances(other, gamma, shape)
    for epsilon in np.linspace(-2.0, 4.0, 25):
        exact = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((best, best_other), (best_other, best)))
        assert exact <= priced.get_delta_for_epsilon(float(epsilon)) + 1e-9


def worst_gaussian(noise, gamma, shape, epsilon):
    """δ(ε) of the best of K Gaussian results, by the score that is the result: a run is best with chance f'(Φ)."""
    x = np.linspace(-12 * noise, 12 * noise + 1, 100_001)
    logs = [-((x - at) ** 2) / (2 * noise**2) for at in (1.0, 0.0)]
    better = [special.ndtr(-(x - at) / noise) for at in (1.0, 0.0)]
    density = [np.exp(log) / (noise * math.sqrt(2 * math.pi)) for log in logs]
    mass = [d * np.power(gamma + (1 - gamma) * p, -(1 + shape)) for d, p in zip(density, better)]
    total = [m.sum() * (x[1] - x[0]) for m in mass]
    one, other = (m / t for m, t in zip(mass, total))
    return max(
        np.maximum(a - math.exp(epsilon) * b, 0).sum() * (x[1] - x[0]) for a, b in ((one, other), (other, one))
    )


@pytest.mark.parametrize("shape", [0.0, 1.0])
def test_a_gaussian_run_is_priced_above_what_its_own_order_tells(shape):
    noise, mean, delta = 4.0, 10.0, 1e-6
    told = epsilon_of(best_of(GaussianDpEvent(noise), mean, shape), delta)
    gamma = chance_to_end(mean, shape)
    exact = optimize.brentq(lambda e: math.log(max(worst_gaussian(noise, gamma, shape, e), 1e-300) / delta), 0.0, 5.0)
    assert exact <= told <= 1.4 * exact


def test_the_best_of_ten_costs_less_than_twice_a_run():
    run = SelfComposedDpEvent(PoissonSampledDpEvent(1024 / 110_794, GaussianDpEvent(1.93)), 2000)
    assert epsilon_of(run, 1e-6) == pytest.approx(0.995, abs=0.002)
    found = {shape: epsilon_of(best_of(run, 10.0, shape), 1e-6) for shape in (0.0, 1.0)}
    assert found[0.0] == pytest.approx(1.433, abs=0.003)
    assert found[1.0] == pytest.approx(1.527, abs=0.003)
    assert epsilon_of(best_of(run), 1e-6, "rdp") > 1.7  # dp_accounting's way


@pytest.mark.slow
def test_few_more_runs_than_one_cost_hardly_more_than_one():
    run = GaussianDpEvent(2.0)
    alone = epsilon_of(run, 1e-6)
    told = [epsilon_of(best_of(run, mean), 1e-6) for mean in (1.01, 2.0, 100.0)]
    assert alone < told[0] < 1.01 * alone and told == sorted(told)


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("mean", [1.5, 10.0, 200.0])
def test_divergences_are_dp_accountings(mean, shape):
    event = best_of(SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.2)), 500), mean, shape)
    theirs = RdpAccountant(list(orders())).compose(event).get_epsilon(1e-6)
    # One of their orders for the other runs is left out here: whole ones alone are tried.
    assert theirs - 1e-9 <= epsilon_of(event, 1e-6, "rdp") <= 1.02 * theirs
    assert np.all(divergences(event, orders()) >= divergences(event.event, orders()))


def test_it_composes_with_other_uses():
    run = GaussianDpEvent(3.0)
    both = ComposedDpEvent([best_of(run), GaussianDpEvent(5.0)])
    assert epsilon_of(best_of(run), 1e-6) < epsilon_of(both, 1e-6)
    assert epsilon_of(both, 1e-6) < epsilon_of(best_of(run), 5e-7) + epsilon_of(GaussianDpEvent(5.0), 5e-7)
    twice = SelfComposedDpEvent(best_of(run), 2)
    assert epsilon_of(best_of(run), 1e-6) < epsilon_of(twice, 1e-6) < 2 * epsilon_of(best_of(run), 5e-7)


def test_a_run_of_allocated_epochs_has_a_price():
    run = SelfComposedDpEvent(RandomAllocationDpEvent(GaussianDpEvent(2.0), 20), 5)
    assert epsilon_of(run, 1e-6) < epsilon_of(best_of(run), 1e-6) < epsilon_of(best_of(run), 1e-6, "rdp")


def test_what_fails_in_a_run_fails_in_each():
    run = ComposedDpEvent([GaussianDpEvent(3.0), FailingDpEvent(1e-8)])
    rest, failing = events.split_failures(best_of(run, 7.0))
    assert failing == pytest.approx(7e-8)
    assert epsilon_of(best_of(run, 7.0), 1e-6) == pytest.approx(epsilon_of(rest, 1e-6 - 7e-8))
    assert epsilon_of(best_of(run, 101.0), 1e-6) == math.inf


def test_what_has_no_price_is_refused():
    for run in (PureDpEvent(1.0), PlannedDpEvent(GaussianDpEvent(1.0), 10, 2, 5, "plan")):
        with pytest.raises(ValueError, match="cannot|Correlated"):
            epsilon_of(best_of(run), 1e-6)
    assert epsilon_of(best_of(NonPrivateDpEvent()), 1e-6) == math.inf
    assert epsilon_of(best_of(GaussianDpEvent(1e-3)), 1e-6) > 1000
    with pytest.raises(ValueError, match="cannot|sampl"):
        epsilon_of(PoissonSampledDpEvent(0.1, best_of(GaussianDpEvent(1.0))), 1e-6)
    for mean, shape in ((1.0, 0.0), (math.nan, 0.0), (math.inf, 0.0), (1e4, 0.0), (10.0, -0.5), (10.0, math.nan)):
        with pytest.raises(ValueError, match="mean|shape"):
            epsilon_of(best_of(GaussianDpEvent(1.0), mean, shape), 1e-6)


def test_it_is_text_and_json():
    event = best_of(ComposedDpEvent([GaussianDpEvent(2.0), GaussianDpEvent(9.0)]), 5.0, 1.0)
    assert events.from_json(events.to_json(event)) == event
    assert events.describe(event) == (
        "the best of 5 runs on average, whose number is drawn, of Gaussian noise of multiplier 2 and Gaussian noise of "
        "multiplier 9 each"
    )


def test_a_filter_takes_it():
    limit = RenyiFilter(3.0, 1e-6)
    alone, best = limit.used(GaussianDpEvent(4.0)), limit.used(best_of(GaussianDpEvent(4.0)))
    assert 0 < alone < best < 1


@pytest.mark.parametrize(("mean", "shape"), [(3.0, 0.0), (3.0, 1.0), (10.0, 2.0)])
def test_numbers_of_runs_are_as_priced(mean, shape):
    gamma, size = chance_to_end(mean, shape), 10_000
    drawn = [number_of_runs(gamma, shape) for _ in range(size)]
    expected = chances(gamma, shape, 400)
    assert expected @ np.arange(1, 401) == pytest.approx(mean, rel=1e-6)
    assert np.mean(drawn) == pytest.approx(mean, abs=5 * np.std(drawn) / size**0.5)
    counted = np.bincount(np.minimum(drawn, 9), minlength=10)[1:]

    def distance(p):
        p = np.append(p[:8], p[8:].sum())
        return float(((counted - size * p) ** 2 / (size * p)).sum())

    assert distance(expected) < 34  # chi-square of 8 degrees of freedom: exceeded once in 20,000
    assert distance(chances(chance_to_end(1.2 * mean, shape), shape, 400)) > 100


def test_grid_of_a_run_is_kept():
    event = best_of(GaussianDpEvent(1.0))
    fine, coarse = (epsilon_of(event, 1e-6, coarser=each) for each in (1.0, 16.0))
    assert fine <= coarse < fine + 0.02
    nothing = losses_of_best(lambda epsilon: np.maximum(-np.expm1(epsilon), 0.0), 0.0, 3.0, 0.0, GRID)
    assert nothing.get_epsilon_for_delta(1e-9) < GRID  # runs that tell nothing


def test_what_rounding_takes_of_a_run_is_put_back():
    lost, mean = 1e-9, 7.0
    found = losses_of_best(lambda epsilon: np.maximum(-np.expm1(epsilon), 0.0), lost, mean, 0.0, GRID)
    assert found.get_delta_for_epsilon(3.0) >= mean * lost


def refuted_epsilon(accused_in, accused_out, delta):
    """A lower bound on ε at 99.9% from repeated runs: how often an attack accuses with a unit's data, and without."""
    (right, runs), (wrong, others) = accused_in, accused_out
    power = stats.beta.ppf(5e-4, right, runs - right + 1)
    level = stats.beta.isf(5e-4, wrong + 1, others - wrong)
    return math.log((power - delta) / level)


def test_a_selection_that_is_not_paid_for_is_caught_and_one_that_is_is_not():
    """Runs tell one unit through N(1, σ²) or N(0, σ²), and the score is that number."""
    noise, delta, size = 2.0, 1e-3, 100_000
    rng = np.random.default_rng(0)
    claim_of_a_run = epsilon_of(GaussianDpEvent(noise), delta)

    def accused(number_of):
        drawn = number_of(size)
        best = [rng.normal(at, noise, [size]) for at in (1.0, 0.0)]
        for turn in range(1, int(drawn.max())):
            for side, at in enumerate((1.0, 0.0)):
                new = rng.normal(at, noise, [size])
                best[side] = np.where(turn < drawn, np.maximum(best[side], new), best[side])
        level = np.quantile(best[1], 0.02)  # of the lowest results: the unit's data make a low maximum rarer
        counts = [(int(np.sum(each <= level)), size) for each in best]
        return refuted_epsilon(counts[1], counts[0], delta)

    dishonest = accused(lambda size: np.full(size, 50))
    assert dishonest > 2 * claim_of_a_run
    gamma = chance_to_end(10.0, 1.0)
    honest = accused(lambda size: rng.geometric(gamma, size))
    assert 0.5 < honest < epsilon_of(best_of(GaussianDpEvent(noise), 10.0, 1.0), delta)
