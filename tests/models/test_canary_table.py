"""The one-run audit on real, small trainings: correct mechanisms stand, planted faults are caught."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent
from scipy import stats

import tfdp_rec
from tfdp_rec.audit import flip_coins, one_run_audit
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.event_family import EventFamily
from tfdp_rec.core.sensitivity import engine
from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.models.canary_table import AuditPlan, CanaryTable, audit_runs
from tfdp_rec.noise import EntropyNoise, NoiseSource
from tfdp_rec.privacy import optimised_correlation
from tfdp_rec.sums.counts import private_counts

SIGMA = 4.0
PLAN = AuditPlan()
CLAIM = PLAN.epsilon_claim(GaussianDpEvent(SIGMA))
MECHANISMS = [pytest.param("DPSGD", marks=pytest.mark.slow), "LazyDPSGD"]


def mechanism(name="LazyDPSGD", noise_multiplier=SIGMA, **options):
    sizes = {"l2_norm_clip": 1.0, "expected_batch_size": PLAN.num_canaries / 2}
    return getattr(tfdp_rec, name)(1.0, noise_multiplier=noise_multiplier, **sizes, **options)


def bounds(optimizer, runs, seed=0, plan=PLAN, **options):
    return [audit.epsilon for audit in itertools.islice(audit_runs(optimizer, plan, seed, **options), runs)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_correct_mechanisms_stand_in_20_runs(name):
    """Over 20 runs no more false claims than the confidence allows, and the bounds are not vacuous."""
    found = np.array(bounds(mechanism(name), 20))
    assert np.sum(found > CLAIM) <= stats.binom.isf(1e-6, 20, 1 - PLAN.confidence)
    assert np.median(found) > CLAIM / 3


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_no_noise_is_caught(name):
    assert min(bounds(mechanism(name, noise_multiplier=0.0), 2)) > 2 * CLAIM


class Less(NoiseSource):
    """Gaussians of part of the standard deviation they should have."""

    def __init__(self, part):
        self.inner, self.part = EntropyNoise(), part

    def draw(self, requests, step):
        return [self.part * found for found in self.inner.draw(requests, step)]


def three_bounds(optimizer, runs, plan=PLAN, **options):
    audits = itertools.islice(audit_runs(optimizer, plan, seed=0, **options), runs)
    return np.array([(audit.epsilon, audit.curve_epsilon, audit.independent_epsilon) for audit in audits])


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_at_half_scale_is_caught(name):
    assert np.all(np.median(three_bounds(mechanism(name, noise=Less(0.5)), 3), axis=0) > CLAIM)


@pytest.mark.parametrize("name", MECHANISMS)
def test_noise_at_four_fifths_is_caught_by_the_closest_bound(name):
    found = three_bounds(mechanism(name, noise=Less(0.8)), 3)
    assert np.min(found[:, 2]) > CLAIM and np.median(found[:, 0]) < np.median(found[:, 1]) < CLAIM


def test_the_closest_bound_reaches_nine_tenths_of_the_claim():
    found = three_bounds(mechanism(), 5)
    assert 0.85 * CLAIM < np.median(found[:, 2]) < 1.02 * CLAIM
    assert np.median(found[:, 0]) < np.median(found[:, 1]) < 0.85 * CLAIM


SAMPLED = AuditPlan(20_000, num_guesses=200, steps=4, confidence=0.95, sampling_rate=0.25)


@pytest.mark.slow
def test_a_batch_that_is_not_sampled_is_caught():
    claim = SAMPLED.epsilon_claim(GaussianDpEvent(1.0))

    def found(**options):
        optimizer = tfdp_rec.LazyDPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2500)
        return three_bounds(optimizer, 2, plan=SAMPLED, **options)

    honest = found()
    assert np.max(honest) < claim and np.min(honest[:, 2]) > 0.4 * claim
    assert np.min(found(batch_of=lambda included: included)[:, 1:]) > claim


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPSGD", "LazyDPSGD"])
def test_no_sampled_training_of_200_is_refuted(name, monkeypatch):
    """Each of the three bounds is wrong in at most 0.1% of runs: 0.6 of 200 are expected at most, and none is seen."""
    # The first strength that is tried is 1, the true one. What follows only tells how far a bound is, and takes long.
    monkeypatch.setattr(EventFamily, "tolerance", 0.25)
    monkeypatch.setattr(EventFamily, "epsilon", lambda self, strength, delta: strength)
    plan = AuditPlan(2000, num_guesses=50, steps=4, confidence=0.999, sampling_rate=0.25)
    claims = [plan.epsilon_claim(GaussianDpEvent(1.0)), 1.0, 1.0]

    def found(runs, **options):
        optimizer = getattr(tfdp_rec, name)(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=250)
        return three_bounds(optimizer, runs, plan=plan, **options)

    assert np.all(found(200) < claims)
    assert np.all(found(3, batch_of=lambda included: included)[:, 2] >= 1)


def test_a_debt_that_is_not_paid_is_caught(monkeypatch):
    monkeypatch.setattr(tfdp_rec.LazyDPSGD, "settle", lambda self: None)
    assert np.min(three_bounds(mechanism(), 1)[:, 2]) > CLAIM


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_clipping_turned_off_is_caught(name, monkeypatch):
    monkeypatch.setattr(engine, "clip_weights", lambda norms, *_: tf.ones_like(norms))
    assert min(bounds(mechanism(name), 2)) > CLAIM


@pytest.mark.slow
def test_pending_noise_never_settled_is_caught(monkeypatch):
    """Rows that no example read have no noise then, and tell who was in the batch."""
    monkeypatch.setattr(tfdp_rec.LazyDPSGD, "settle", lambda self: None)
    model = CanaryTable(1000)
    model.compile(optimizer=mechanism())
    model.fit(tf.data.Dataset.from_tensors(np.arange(500)), verbose=0)
    np.testing.assert_array_equal(model.distances() != 0, np.arange(1000) < 500)


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_repeated_example_is_caught(name):
    """Every included canary stands in the batch three times, as three examples, each clipped by itself."""
    fewer = AuditPlan(40_000)  # so that the batch stays below the 65,536 examples that a step takes
    found = bounds(mechanism(name), 3, plan=fewer, batch_of=lambda included: np.repeat(included, 3))
    assert np.median(found) > CLAIM


def test_noise_for_touched_rows_alone_is_caught():
    """EANA claims nothing; held to DP-SGD's claim it would be refuted: untouched rows do not move."""
    optimizer = mechanism("EANA")
    assert PLAN.epsilon_claim(optimizer.dp_event()) == float("inf")
    model = CanaryTable(1000)
    model.compile(optimizer=optimizer)
    model.fit(tf.data.Dataset.from_tensors(np.arange(500)), verbose=0)
    coins, moved = np.arange(1000) < 500, model.distances()
    np.testing.assert_array_equal(moved != 0, coins)


@pytest.mark.slow
def test_a_dataset_of_unknown_length_ends_without_a_step():
    """The end of such a dataset once counted as a step whose noise was never paid."""
    optimizer = tfdp_rec.LazyDPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=4.0, expected_batch_size=50)
    model = CanaryTable(1000, width=8)
    model.compile(optimizer=optimizer)
    data = tf.data.Dataset.from_tensor_slices(np.arange(50)).batch(25).filter(lambda batch: tf.size(batch) > 0)
    model.fit(data, epochs=2, verbose=0)
    assert int(optimizer.iterations.numpy()) == 4
    (table,) = model.get_weights()
    assert stats.kstest(table[50:].ravel(), stats.norm(scale=4.0 / 50 * 4**0.5).cdf).pvalue > 1e-6


@pytest.mark.slow
def test_a_private_sum_stands():
    claim, found = epsilon_of(GaussianDpEvent(1.0), 1e-6), []
    for seed in range(5):
        coins = flip_coins(20_000, seed)
        users = [[int(canary)] for canary in np.flatnonzero(coins)]
        scores = private_counts(users, Catalogue(list(range(20_000))), noise_multiplier=1.0).values
        audit = one_run_audit(scores, coins, num_guesses=200, delta=1e-6)
        found.append((audit.epsilon, audit.curve_epsilon, audit.independent_epsilon))
    any_mechanism, curve, independent = np.median(found, axis=0)
    assert claim / 3 < any_mechanism < curve < independent < 1.05 * claim and independent > 0.85 * claim


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LazyDPFTRL", "DPFTRL"])
def test_correlated_noise_stands(name):
    """A canary is in one step of four; the last weights alone, in which noise is not yet taken back, are read."""
    plan, correlation = AuditPlan(steps=4, confidence=0.95), optimised_correlation(steps=4, separation=4)
    claim, step = epsilon_of(correlation.dp_event(2.0), 1e-6), itertools.count()
    optimizer = getattr(tfdp_rec, name)(
        1.0, correlation=correlation, l2_norm_clip=1.0, noise_multiplier=2.0, expected_batch_size=12_500
    )
    found = three_bounds(optimizer, 1, plan=plan, batch_of=lambda included: included[included % 4 == next(step)])
    assert np.max(found) < 0.75 * claim and found[0, 2] > claim / 2


@pytest.mark.slow
def test_chosen_rows_stand():
    plan = AuditPlan(20_000, num_guesses=400, confidence=0.95)
    optimizer = tfdp_rec.AdaFEST(
        1.0, l2_norm_clip=1.0, noise_multiplier=SIGMA, expected_batch_size=10_000, contribution_clip=1.0,
        contribution_noise_multiplier=10 * SIGMA, threshold=1e-3,
    )  # fmt: skip
    found = three_bounds(optimizer, 3, plan=plan)
    assert np.max(found) < plan.epsilon_claim(optimizer.dp_event()) and np.median(found[:, 1]) > 0.4


def test_the_plan_refuses_what_makes_no_audit():
    for change, words in [({"num_canaries": 0}, "num_canaries"), ({"steps": 0}, "steps"), ({"width": 0}, "width"),
                          ({"sampling_rate": 0.0}, "sampling_rate"), ({"sampling_rate": 1.5}, "sampling_rate"),
                          ({"num_guesses": 200_000}, "num_guesses")]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            AuditPlan(**change)


def test_canary_table_config_and_gradient():
    model = CanaryTable(10, width=4, gradient_norm=3.0)
    assert type(model).from_config(model.get_config()).get_config() == model.get_config()
    model.compile(optimizer=mechanism())
    clipped = tfdp_rec.clipping.clipped_sum(model, tf.constant([1, 7]), l2_norm_clip=1.0)
    np.testing.assert_allclose(clipped.norms, [3.0, 3.0], rtol=1e-5)
