"""ε of composed events is never below the exact one, also where dp_accounting's rounding errors are as large as δ."""

import math

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import integrate, optimize, special, stats

from tfdp_rec.core.claim.composition import deltas_of, epsilon_of
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


SEVERAL = ComposedDpEvent([GaussianDpEvent(4.0), NoOpDpEvent(), SelfComposedDpEvent(GaussianDpEvent(6.0), 9)])
TOGETHER = math.sqrt(1 / 16 + 9 / 36)  # deviations that they shift by


def test_gaussians_of_several_noises_are_one():
    exact = gaussian_epsilon(TOGETHER, 1e-8)
    assert exact <= epsilon_of(SEVERAL, 1e-8) <= exact * (1 + 1e-6)
    epsilons = np.arange(0.0, 3.0, 0.5)

    def delta_at(epsilon):
        first = epsilon / TOGETHER + TOGETHER / 2  # from where on the loss is above ε
        law = lambda z: stats.norm.pdf(z, TOGETHER) - math.exp(epsilon) * stats.norm.pdf(z)  # noqa: E731
        return integrate.quad(law, first, first + 12, epsabs=0, epsrel=1e-11)[0]

    curve = np.array(list(map(delta_at, epsilons)))
    excess = deltas_of(SEVERAL, epsilons) - curve
    assert (excess > 0).all() and (excess < 1e-9 * curve + 2e-14).all()


def test_gaussians_beside_other_steps_are_as_by_the_library():
    steps = SelfComposedDpEvent(PoissonSampledDpEvent(0.1, GaussianDpEvent(2.0)), 20)
    library = PLDAccountant()
    for event in (*SEVERAL.events, steps):
        library.compose(event)
    event = ComposedDpEvent([SEVERAL, steps])
    assert epsilon_of(event, 1e-8) == pytest.approx(library.get_epsilon(1e-8), rel=1e-6)
    assert deltas_of(event, np.array([1.0]))[0] == pytest.approx(library.get_delta(1.0), rel=1e-6)


def test_renyis_price_is_that_of_the_best_of_all_orders():
    """By all orders of dp_accounting, of which few are looked at."""
    rng, best = np.random.default_rng(0), set()
    for place in range(30):
        noise, rate, steps = 10 ** rng.uniform([-0.3, -3, 0], [2, 0, 4])
        sampled = SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), int(steps))
        event = sampled if place % 3 else ComposedDpEvent([GaussianDpEvent(noise), LaplaceDpEvent(noise)])
        delta, library = 10 ** rng.uniform(-12, -1), RdpAccountant()
        epsilon, order = library.compose(event).get_epsilon_and_optimal_order(delta)
        best.add(order)
        assert epsilon <= epsilon_of(event, delta, "rdp") <= epsilon * (1 + 1e-6) + 1e-6
    assert len(best) > 15 and any(not float(order).is_integer() for order in best)


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
