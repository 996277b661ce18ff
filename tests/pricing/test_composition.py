"""ε of composed events is never below the exact one, also where dp_accounting's rounding errors are as large as δ."""

import math

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, NoOpDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from scipy import optimize, special

from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import FailingDpEvent, PureDpEvent


def gaussian_epsilon(mu, delta):
    """Of a Gaussian whose shift is μ deviations: exact."""

    def above(epsilon):
        tail = math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu) - special.log_ndtr(mu / 2 - epsilon / mu))
        return special.log_ndtr(mu / 2 - epsilon / mu) + math.log1p(-tail) - math.log(delta)

    return optimize.brentq(above, 1e-3, 100)


@pytest.mark.parametrize("delta", [1e-14, 1e-13, 1e-12, 1e-9, 1e-6])
@pytest.mark.parametrize("noise, steps", [(20.0, 1000), (10.0, 1000), (50.0, 10_000)])
def test_epsilon_is_never_below_the_exact_one(noise, steps, delta):
    """It was, by .05 at δ = 10⁻¹⁴: each step is drawn with certainty, so that all together are one Gaussian."""
    event = SelfComposedDpEvent(PoissonSampledDpEvent(1.0, GaussianDpEvent(noise)), steps)
    exact = gaussian_epsilon(math.sqrt(steps) / noise, delta)
    found = epsilon_of(event, delta)
    assert exact <= found <= exact * (1.06 if delta < 1e-11 else 1 + 2e-4)


def response_epsilon(epsilon, times, delta):
    """Of randomised response, composed: exact, from the binomial law of its losses."""

    def delta_at(target):
        total = 0.0
        for wins in range(times + 1):
            loss = (2 * wins - times) * epsilon
            if loss > target:
                log_p = special.gammaln(times + 1) - special.gammaln(wins + 1) - special.gammaln(times - wins + 1)
                log_p += wins * epsilon - times * math.log1p(math.exp(epsilon))
                total += math.exp(log_p) * -math.expm1(target - loss)
        return total

    most = 10 * epsilon * math.sqrt(times)
    return optimize.brentq(lambda target: math.log(delta_at(target)) - math.log(delta), 0.0, most)


@pytest.mark.parametrize("epsilon, times", [(0.1, 500), (0.02, 2000)])
@pytest.mark.parametrize("delta", [1e-14, 1e-12, 1e-6])
def test_pure_releases_too(epsilon, times, delta):
    found = epsilon_of(SelfComposedDpEvent(PureDpEvent(epsilon), times), delta)
    exact = response_epsilon(epsilon, times, delta)
    assert exact <= found <= (epsilon * times if delta < 1e-11 else exact * 1.01)


def test_what_is_not_convolved_loses_nothing():
    """Gaussians that are not sampled are one, of however many steps."""
    found = epsilon_of(SelfComposedDpEvent(GaussianDpEvent(1e4), 10**8), 1e-8)
    assert gaussian_epsilon(1.0, 1e-8) <= found <= gaussian_epsilon(1.0, 1e-8) * (1 + 1e-4)
    assert epsilon_of(NoOpDpEvent(), 1e-15) == 0.0


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [1e-320, 1e-200])
def test_noise_whose_square_is_zero_guarantees_nothing(noise, accountant):
    """Its price ended in a division by zero."""
    assert epsilon_of(PoissonSampledDpEvent(0.1, GaussianDpEvent(noise)), 1e-6, accountant) == math.inf
    assert epsilon_of(GaussianDpEvent(noise), 1e-6, accountant) == math.inf


@pytest.mark.parametrize("delta", [math.nan, 1.0, 2.0, -1e-9])
def test_a_delta_that_is_no_probability_is_refused(delta):
    """ε was 0 at NaN and from 1 on."""
    with pytest.raises(ValueError, match="delta must be at least 0 and below 1"):
        epsilon_of(GaussianDpEvent(1.0), delta, "rdp")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_failure_that_never_comes_costs_nothing(accountant):
    alone, none = GaussianDpEvent(2.0), FailingDpEvent(0.0)
    for event in (ComposedDpEvent([alone, none]), ComposedDpEvent([alone, SelfComposedDpEvent(none, 3)])):
        assert epsilon_of(event, 1e-6, accountant) == epsilon_of(alone, 1e-6, accountant)
    sampled = PoissonSampledDpEvent(0.1, ComposedDpEvent([SelfComposedDpEvent(none, 3), alone]))
    assert epsilon_of(sampled, 1e-6, accountant) == epsilon_of(PoissonSampledDpEvent(0.1, alone), 1e-6, accountant)
    assert epsilon_of(SelfComposedDpEvent(PoissonSampledDpEvent(0.1, none), 4), 1e-6, accountant) == 0.0
    with pytest.raises(ValueError, match="no price here"):  # another failure is not lost
        epsilon_of(PoissonSampledDpEvent(0.1, ComposedDpEvent([none, FailingDpEvent(0.1)])), 1e-6, accountant)
