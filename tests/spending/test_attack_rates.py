"""What an attack can find out at most, against the attacks that are the best: those whose rates have a formula."""

import dp_accounting
import numpy as np
import pytest
from scipy.stats import norm

from tfdp_rec.core.claim.attack_rates import most_true_positives, profile_of
from tfdp_rec.core.claim.composition import deltas_of, epsilon_of
from tfdp_rec.core.claim.events import FailingDpEvent, RandomAllocationDpEvent
from tfdp_rec.core.claim.gaussian_release import gaussian_mu
from tfdp_rec.core.claim.ledger import Payment

Gaussian, Sampled = dp_accounting.GaussianDpEvent, dp_accounting.PoissonSampledDpEvent
Composed, Times = dp_accounting.ComposedDpEvent, dp_accounting.SelfComposedDpEvent
RATES = [0.0, 1e-4, 0.01, 0.05, 0.1, 0.5, 0.9, 1.0]


@pytest.mark.parametrize("noise", [0.3, 0.7, 2.0, 20.0])
def test_a_gaussian_is_told_apart_as_well_as_by_the_likelihood_ratio_and_no_better(noise):
    exact = norm.sf(norm.isf(RATES) - 1 / noise)
    found = most_true_positives(profile_of([Payment(Gaussian(noise))]), RATES)
    inside = exact < 1 - np.exp(-5)  # the profile is taken up to ε = 5
    assert (found >= exact - 1e-12).all() and (found[inside] - exact[inside])[2:].max(initial=0) < 1e-4


@pytest.mark.slow_cases("0.01-0.3")
@pytest.mark.parametrize("rate, noise", [(0.1, 0.5), (0.5, 1.0), (0.01, 0.3)])
def test_no_attack_on_a_sampled_gaussian_passes_the_bound(rate, noise):
    threshold = norm.isf(RATES)
    there = rate * norm.sf(threshold - 1 / noise) + (1 - rate) * norm.sf(threshold)
    bound = most_true_positives(profile_of([Payment(Sampled(rate, Gaussian(noise)))]), RATES)
    assert (bound >= there - 1e-12).all() and bound[2] < there[2] + 0.02


def test_the_worst_item_counts_and_a_failure_is_added():
    one, other = Payment(Gaussian(1.0), about=("tea",)), Payment(Gaussian(3.0), about=("jam",))
    assert np.array_equal(profile_of([one, other]), profile_of([Payment(Gaussian(1.0))]))
    failing = profile_of([Payment(Composed([Gaussian(1.0), FailingDpEvent(0.125)]))])
    assert np.allclose(failing - profile_of([Payment(Gaussian(1.0))]), 0.125, rtol=1e-12)


EVENTS = {
    "a release": Gaussian(1.5), "many": Times(Gaussian(20.0), 50), "laplace": dp_accounting.LaplaceDpEvent(1.0),
    "a training": Composed([Gaussian(4.0), Times(Sampled(0.05, Gaussian(1.0)), 300)]),
    "epochs": Times(RandomAllocationDpEvent(Gaussian(1.0), 20), 3),
    "what may fail": Composed([Gaussian(2.0), FailingDpEvent(1e-7)]),
}  # fmt: skip


@pytest.mark.slow_cases("epochs")
@pytest.mark.parametrize("name", EVENTS)
def test_the_profile_is_that_of_epsilon_at_delta(name):
    for delta in (1e-6, 1e-4, 1e-2):
        epsilon = epsilon_of(EVENTS[name], delta)
        assert 0.98 * delta < deltas_of(EVENTS[name], np.array([epsilon]))[0] < 1.02 * delta


def test_what_promises_nothing_is_found_out():
    none = [dp_accounting.NonPrivateDpEvent(), Gaussian(0.0), Gaussian(0.01)]
    assert all((deltas_of(event, np.array([0.0, 5.0])) == 1).all() for event in none)
    assert (deltas_of(Composed([]), np.array([0.0, 5.0])) < 1e-13).all()


@pytest.mark.parametrize("noise", [0.3, 1.0, 8.0])
def test_mu_is_the_gaussian_of_equal_epsilon(noise):
    assert gaussian_mu(epsilon_of(Gaussian(noise), 1e-6), 1e-6) == pytest.approx(1 / noise, rel=2e-4)
