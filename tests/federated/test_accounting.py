"""Composition over rounds against closed forms and against simulation of the privacy loss."""

import math

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, NonPrivateDpEvent, SelfComposedDpEvent
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from experiments.news.published import PublishedGaussian
from tfdp_rec.core.claim.events import PureDpEvent
from tfdp_rec.core.claim.profiles import releases_of
from tfdp_rec.federated import AttentionMechanism, ClientAccountant, PureLaplace


def history_epsilon(mechanism, count, delta):
    accountant = ClientAccountant()
    accountant.spend_history(mechanism.event, count)
    return accountant.epsilon(delta)


@pytest.mark.parametrize("padding", (0.0, 0.2, 0.7))
@pytest.mark.parametrize("epsilon", (0.01, 1.0, 10.0))
def test_one_release_costs_what_it_states(epsilon, padding):
    total = history_epsilon(AttentionMechanism(3, epsilon, 1e-5, padding=padding), 1, 1e-5)
    assert total == pytest.approx(epsilon, rel=1e-3)


def test_equal_releases_add_up_wherever_they_stand():
    pure, other = PureDpEvent(0.5), GaussianDpEvent(2.0)
    several = ComposedDpEvent([pure, other, SelfComposedDpEvent(pure, 3), pure])
    assert releases_of(several, times=2) == {pure: 10, other: 2}


@pytest.mark.parametrize("count", (2, 30))
def test_gaussian_releases_compose_as_dp_accounting_says(count):
    mechanism = AttentionMechanism(3, 2.0, 1e-5)
    oracle = privacy_loss_distribution.from_gaussian_mechanism(
        mechanism.noise_scale / math.sqrt(2), value_discretization_interval=1e-3
    ).self_compose(count)
    assert history_epsilon(mechanism, count, 1e-5) == pytest.approx(oracle.get_epsilon_for_delta(1e-5), rel=2e-3)


def test_padded_composition_bounds_the_worst_encoder_by_simulation():
    """A = M' (the anonymous news looks like the other click): the loss of 4 releases, 400,000 draws."""
    mechanism, rounds, padding = AttentionMechanism(2, 1.0, 1e-3, padding=0.5), 4, 0.5
    rng, sigma = np.random.default_rng(8), mechanism.noise_scale
    shift = math.sqrt(2)
    hit = rng.random((400_000, rounds)) >= padding
    outputs = hit * shift + sigma * rng.standard_normal(hit.shape)
    plain = stats.norm(scale=sigma)
    mixed = padding * plain.pdf(outputs) + (1 - padding) * plain.pdf(outputs - shift)
    loss = np.log(mixed / plain.pdf(outputs)).sum(axis=1)
    epsilon = history_epsilon(mechanism, rounds, 1e-2)
    simulated = np.maximum(0, -np.expm1(epsilon - loss)).mean()
    assert simulated < 1e-2 * 1.02
    looser = np.maximum(0, -np.expm1(0.6 * epsilon - loss)).mean()
    assert looser > 1e-2, "the simulation could not see an accountant that is too generous"


def test_pure_releases_add_up_at_delta_zero():
    accountant = ClientAccountant()
    mechanism = AttentionMechanism(3, 2.0, 0.0, padding=0.3, calibration=PureLaplace())
    accountant.spend_history(mechanism.event, 3)
    accountant.spend_labels(PureDpEvent(0.5))
    assert accountant.epsilon(0.0) == pytest.approx(6.5, rel=1e-5)
    assert accountant.epsilon(0.0, disjoint=True) == pytest.approx(6.0, rel=1e-5)
    assert accountant.epsilon(1e-2) < 6.5


def test_gaussian_at_delta_zero_and_unbounded_releases_are_infinite():
    assert history_epsilon(AttentionMechanism(3, 1.0), 1, 0.0) == math.inf
    accountant = ClientAccountant()
    accountant.spend_history(NonPrivateDpEvent())
    assert accountant.epsilon(1e-5) == math.inf
    assert history_epsilon(AttentionMechanism(3, math.inf), 1, 1e-5) == math.inf


def test_a_published_release_is_charged_what_it_really_costs():
    claimed = AttentionMechanism(3, 10.0, 1e-5, calibration=PublishedGaussian())
    assert history_epsilon(claimed, 1, 1e-5) > 15


def test_nothing_spent_is_zero_and_bad_arguments_are_refused():
    accountant = ClientAccountant()
    assert accountant.epsilon(1e-5) == 0.0
    with pytest.raises(ValueError, match="count"):
        accountant.spend_labels(PureDpEvent(1.0), -1)
    with pytest.raises(ValueError, match="delta"):
        accountant.epsilon(1.0)
