"""Membership attacks: rates by hand, intervals that hold, shadows that never saw a unit, and what a claim allows."""

import numpy as np
import pytest
from scipy import stats

from tfdp_rec.audit import attack_membership, flip_coins, one_run_audit
from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.privacy import attack_limit

MEMBERS, OTHERS = np.arange(300), np.arange(300, 600)


def attack(losses, members=MEMBERS, others=OTHERS, **options):
    return attack_membership(lambda units: losses[units], members, others, **options)


def auc_by_pairs(inside, outside):
    return np.mean((inside[:, None] < outside) + 0.5 * (inside[:, None] == outside))


@pytest.mark.parametrize("ties", [False, True])
def test_rates_and_area_are_those_of_their_definitions(ties):
    losses = np.random.default_rng(0).normal(size=600) + (np.arange(600) >= 300)
    losses = np.round(losses) if ties else losses
    found = attack(losses, MEMBERS[:200], rates=(0.01, 0.1))["loss"]
    inside, outside = losses[:200], losses[300:]
    assert found.auc.value == pytest.approx(auc_by_pairs(inside, outside))
    assert np.array_equal(found.scores, -np.append(inside, outside))
    for rate, reached in found.true_positives.items():
        thresholds = [t for t in np.append(losses, -np.inf) if np.mean(outside < t) <= rate]
        best = max(np.mean(inside < t) for t in thresholds)
        assert reached.low <= reached.value <= reached.high
        assert reached.value <= best and (ties or reached.value > best - 0.02)
    assert set(found.true_positives) == {0.01, 0.1}


def test_order_of_the_lists_and_numbers_of_units_do_not_matter():
    losses = np.random.default_rng(1).normal(size=600)
    there = np.random.default_rng(2).permutation(600)
    found, moved = attack(losses)["loss"], attack(losses[np.argsort(there)], there[:300], there[300:])["loss"]
    assert found.auc == moved.auc and found.true_positives == moved.true_positives


@pytest.mark.slow
@pytest.mark.parametrize("size", [80, 400])
def test_intervals_hold_as_often_as_they_say(size):
    """Members are better by one deviation: the true rates are a Gaussian's."""
    rng, missed = np.random.default_rng(3), np.zeros(4)
    true = [stats.norm.cdf(stats.norm.ppf(rate) + 1) for rate in (0.01, 0.05, 0.1)] + [stats.norm.cdf(0.5**0.5)]
    for _ in range(500):
        losses = rng.normal(size=2 * size) + (np.arange(2 * size) >= size)
        found = attack(losses, np.arange(size), np.arange(size, 2 * size), confidence=0.9)["loss"]
        rates = [*found.true_positives.values(), found.auc]
        missed += [not rate.low <= value <= rate.high for rate, value in zip(rates, true)]
    assert np.all(stats.binom.sf(missed - 1, 500, 0.1) > 1e-6)
    assert np.all([rate.high - rate.low < 0.8 for rate in rates[1:]])


def test_with_too_few_others_nothing_is_said_of_small_rates():
    losses = np.append(np.zeros(20), np.ones(20))
    found = attack(losses, np.arange(20), np.arange(20, 40))["loss"].true_positives[0.01]
    assert (found.value, found.low, found.high) == (1.0, 0.0, 1.0)
    losses = np.append(np.zeros(1000), np.ones(1000))
    found = attack(losses, np.arange(1000), np.arange(1000, 2000))["loss"].true_positives[0.01]
    assert found.low > 0.99


class Memory:
    """A training that lowers the losses of its units by one, below what makes each unit easy or hard."""

    def __init__(self, units=600, gain=1.0):
        self.hardness, self.gain, self.trained = 10 * np.random.default_rng(4).random(units), gain, []
        self.rng = np.random.default_rng(5)

    def train(self, units):
        self.trained.append(units)
        losses = self.hardness + 0.3 * self.rng.normal(size=len(self.hardness))
        losses[units] -= self.gain
        return lambda asked: losses[asked]


def test_shadows_tell_members_where_units_differ_more_than_models_do():
    memory = Memory()
    found = attack_membership(memory.train(MEMBERS), MEMBERS, OTHERS, train=memory.train, seed=0)
    assert found["loss"].auc.value < 0.65 and found["loss"].auc.low < 0.5
    assert found["shadows"].auc.low > 0.9 and found["shadows"].true_positives[0.05].low > 0.5


def test_every_shadow_is_a_half_and_each_unit_is_left_out_by_half_of_them():
    memory = Memory()
    released = memory.train(MEMBERS)
    attack_membership(released, MEMBERS, OTHERS, train=memory.train, num_shadows=6, seed=0)
    shadows = memory.trained[1:]
    assert [len(units) for units in shadows] == [300] * 6
    assert np.array_equal(np.bincount(np.concatenate(shadows)), np.full(600, 3))
    assert 100 < np.sum(shadows[0] < 300) < 200  # members and others alike


def test_only_shadows_without_a_unit_are_asked_about_it():
    memory = Memory(gain=1e9)  # one loss of a shadow that was trained on the unit would decide its score
    found = attack_membership(lambda units: memory.hardness[units], MEMBERS, OTHERS, train=memory.train, seed=0)
    assert np.max(np.abs(found["shadows"].scores)) < 10


def test_scores_are_the_distance_from_the_fit_of_a_units_own_losses():
    """Many shadows: mean and deviation of each unit are nearly known."""
    rng, spread = np.random.default_rng(6), np.repeat([0.1, 1.0], 300)
    losses = rng.normal(size=600)
    found = attack_membership(
        lambda units: losses[units], MEMBERS, OTHERS, num_shadows=800, seed=0,
        train=lambda units: (lambda drawn: lambda asked: drawn[asked])(3 + spread * rng.normal(size=600)),
    )  # fmt: skip
    np.testing.assert_allclose(found["shadows"].scores, (3 - losses) / spread, rtol=0.35, atol=0.7)


def test_equal_losses_tell_nothing():
    found = attack(np.zeros(600))["loss"]
    assert found.auc.value == 0.5 and found.true_positives[0.1].value == 0 and found.true_positives[0.1].high == 1
    flat = attack_membership(lambda units: 0.0 * units, MEMBERS, OTHERS, train=lambda units: lambda asked: 0.0 * asked)
    assert flat["shadows"].auc.value == 0.5


def test_the_most_is_the_claims():
    limit = attack_limit(GaussianDpEvent(2.0))
    found = attack(np.zeros(600), limit=limit)["loss"]
    for rate, reached in found.true_positives.items():
        exact = stats.norm.cdf(stats.norm.ppf(rate) + 0.5)
        assert exact <= reached.most < exact + 1e-3
    area = stats.norm.cdf(0.5 / 2**0.5)
    assert area <= found.auc.most < area + 2e-3
    assert attack(np.zeros(600))["loss"].auc.most == 1.0


@pytest.mark.slow
def test_an_honest_release_stays_below_its_limit_and_one_with_less_noise_does_not():
    """The strongest losses that a Gaussian allows: intervals are above the limit by chance alone, or surely."""
    limit, coins = attack_limit(GaussianDpEvent(1.0)), flip_coins(4000, seed=1)
    members, others = np.flatnonzero(coins), np.flatnonzero(~coins)

    def alarms(noise, runs):
        rng = np.random.default_rng(7)
        for _ in range(runs):
            losses = noise * rng.normal(size=4000) - coins
            found = attack(losses, members, others, limit=limit)["loss"]
            yield sum(rate.low > rate.most for rate in (*found.true_positives.values(), found.auc))

    assert sum(alarms(1.0, 200)) <= stats.binom.isf(1e-6, 800, 0.025)
    assert min(alarms(0.5, 5)) == 4


def test_its_scores_are_what_an_audit_takes():
    memory, coins = Memory(4000), flip_coins(4000, seed=2)
    members, others = np.flatnonzero(coins), np.flatnonzero(~coins)
    found = attack_membership(memory.train(members), members, others, train=memory.train, seed=0)["shadows"]
    audit = one_run_audit(found.scores, np.arange(4000) < len(members), num_guesses=400, delta=1e-6)
    assert audit.refutes(2.0)


@pytest.mark.parametrize("change, words", [
    ({"members": []}, "neither empty"), ({"others": np.arange(299, 600)}, "different units"),
    ({"members": [1, 1]}, "different units"),
    ({"members": [1.5]}, "whole numbers"), ({"rates": (0.0,)}, "rates"), ({"confidence": 1.0}, "confidence"),
    ({"num_shadows": 5}, "num_shadows"), ({"num_shadows": 2}, "num_shadows"),
])  # fmt: skip
def test_wrong_arguments_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        attack_membership(**{"released": lambda units: 0.0 * units, "members": MEMBERS, "others": OTHERS, **change})


@pytest.mark.parametrize("losses", [lambda units: np.full(len(units), np.nan), lambda units: [0.0]])
def test_losses_must_be_one_number_a_unit(losses):
    with pytest.raises(ValueError, match="one finite number"):
        attack_membership(losses, MEMBERS, OTHERS)
