"""Strategies for correlated noise, held against matrices written out and every pattern of participation."""

import itertools

import dp_accounting
import numpy as np
import pytest
from scipy import linalg

from tfdp_rec.privacy import BufferedToeplitz, Correlation, epsilon_of, optimised_correlation

STRATEGIES = [
    BufferedToeplitz(),
    BufferedToeplitz([0.46], [0.954]),
    BufferedToeplitz([1.0], [0.0]),
    BufferedToeplitz([0.3, 0.5], [0.99, 0.2]),
    BufferedToeplitz([0.25, 0.25, 0.5], [0.999, 0.9, 0.9]),
]
EVERY = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"{strategy.scales}")


def matrix(strategy, steps):
    """C written out: by its definition, not by the code's own powers."""
    column = [1.0]
    for i in range(1, steps):
        column.append(sum(a * theta ** (i - 1) for a, theta in zip(strategy.scales, strategy.decays)))
    return linalg.toeplitz(column, np.zeros(steps))


def patterns(steps, separation, participations):
    """All sets of steps that a unit may be in."""
    for count in range(1, participations + 1):
        for several in itertools.combinations(range(steps), count):
            if all(later - earlier >= separation for earlier, later in itertools.pairwise(several)):
                yield list(several)


@EVERY
def test_the_inverse_is_the_inverse_and_what_the_buffers_make(strategy):
    steps = 40
    expected = np.linalg.inv(matrix(strategy, steps))
    lower = lambda column: linalg.toeplitz(column, np.zeros(steps))  # noqa: E731
    np.testing.assert_allclose(lower(strategy.inverse_coefficients(steps)), expected, atol=1e-12)
    np.testing.assert_allclose(lower(strategy.coefficients(steps)), matrix(strategy, steps))
    z, held, made = np.random.default_rng(0).normal(size=steps), [0.0] * strategy.buffers, []
    for unit in z:
        noise, held = strategy.next_noise(unit, held)
        made.append(noise)
    np.testing.assert_allclose(made, expected @ z, atol=1e-12)


@EVERY
@pytest.mark.parametrize(
    ("steps", "separation", "participations"), [(1, 1, 1), (9, 3, 3), (10, 3, 2), (11, 4, 3), (8, 1, 8), (10, 10, 1)]
)
def test_sensitivity_is_the_worst_of_all_patterns(strategy, steps, separation, participations):
    """Also with every sign of what a unit adds, and a little more than any, in float64."""
    whole, worst = matrix(strategy, steps), 0.0
    for pattern in patterns(steps, separation, participations):
        for signs in itertools.product([1, -1], repeat=len(pattern)):
            worst = max(worst, np.linalg.norm(whole[:, pattern] @ np.array(signs)))
    found = Correlation(strategy, steps, separation, participations).sensitivity
    assert worst <= found <= worst * (1 + 1e-8)


def test_directions_of_their_own_are_no_worse():
    """What a unit adds at its steps are vectors: no choice of unit vectors beats all of them alike."""
    plan, rng = Correlation(BufferedToeplitz([0.3, 0.5], [0.99, 0.2]), 12, 4), np.random.default_rng(1)
    whole = matrix(plan.strategy, 12)
    for _ in range(200):
        directions = rng.normal(size=[3, 2]) * [1, rng.uniform()]
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        assert np.linalg.norm(whole[:, [0, 4, 8]] @ directions) <= plan.sensitivity


@pytest.mark.parametrize("participations", [1, 3, 7])
def test_sensitivity_of_a_long_training(participations):
    plan = Correlation(BufferedToeplitz([0.4], [0.97]), 200, 30, participations)
    worst = np.linalg.norm(matrix(plan.strategy, 200)[:, : 30 * participations : 30].sum(axis=1))
    assert worst <= plan.sensitivity <= worst * (1 + 1e-8)


def test_sensitivity_is_rounded_up():
    """Against exact rational arithmetic: never less, by however little."""
    from fractions import Fraction

    strategy, steps, separation = BufferedToeplitz([0.37, 0.21], [0.913, 0.5]), 60, 7
    column = [Fraction(1)]
    for i in range(1, steps):
        column.append(sum(Fraction(a) * Fraction(t) ** (i - 1) for a, t in zip(strategy.scales, strategy.decays)))
    square = sum(sum(column[t - i] for i in range(0, t + 1, separation)) ** 2 for t in range(steps))
    found = Fraction(Correlation(strategy, steps, separation).sensitivity) ** 2
    assert square <= found <= square * (1 + Fraction(1, 10**8))


@EVERY
def test_errors_against_the_matrices(strategy):
    steps, rng = 30, np.random.default_rng(2)
    inverse = np.linalg.inv(matrix(strategy, steps))
    plan = Correlation(strategy, steps, 10)
    for rates in (None, rng.uniform(0.1, 1, steps)):
        sums = np.tril(np.ones([steps, steps])) * (1.0 if rates is None else rates)
        by_step = np.linalg.norm(sums @ inverse, axis=1)
        assert plan.error("last", rates) == pytest.approx(by_step[-1], rel=1e-9)
        assert plan.error("mean", rates) == pytest.approx(np.sqrt(np.mean(by_step**2)), rel=1e-9)


ISSUE = {(27, 22): (0.243, 0.243, 0.242), (27, 1): (0.425, 0.420, 0.420), (100, 6): (0.171, 0.171, 0.167),
         (600, 1): (0.149, 0.131, 0.130)}  # fmt: skip


@pytest.mark.fast_cases("27-1")
@pytest.mark.parametrize("separation, epochs", ISSUE)
def test_optimised_noise_is_as_little_as_was_promised(separation, epochs):
    found = [optimised_correlation(separation * epochs, separation, d) for d in (1, 2, 3)]
    ratios = np.array([plan.against_independent() for plan in found])
    assert np.all(ratios <= np.array(ISSUE[separation, epochs]) * 1.01)
    assert np.all(np.diff(ratios) <= 1e-4)  # a buffer more does no harm
    steps = separation * epochs
    whole = matrix(found[-1].strategy, steps)
    noise = np.linalg.norm(np.ones(steps) @ np.linalg.inv(whole))
    unit = np.linalg.norm(whole[:, ::separation].sum(axis=1))
    assert ratios[-1] == pytest.approx(noise * unit / np.sqrt(steps * epochs), rel=1e-6)


def test_strategies_are_chosen_for_their_measure_and_schedule():
    falling = np.linspace(1, 0.01, 60)
    plans = {
        "last": optimised_correlation(60, 20),
        "mean": optimised_correlation(60, 20, measure="mean"),
        "falling": optimised_correlation(60, 20, rates=falling),
    }
    assert plans["mean"].against_independent("mean") < plans["last"].against_independent("mean")
    assert plans["falling"].against_independent("last", falling) < plans["last"].against_independent("last", falling)


def test_one_event_for_the_whole_training():
    plan = Correlation(BufferedToeplitz(), steps=100, separation=10)
    one = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(4.0), 10)
    assert epsilon_of(plan.dp_event(4.0), 1e-6) == pytest.approx(epsilon_of(one, 1e-6), rel=1e-3)
    assert epsilon_of(plan.dp_event(0.0), 1e-6) == np.inf
    noise = Correlation(BufferedToeplitz([0.46], [0.954]), 594, 27)
    assert 7.9 < epsilon_of(noise.dp_event(noise.noise_multiplier(8.0, 1e-6)), 1e-6) <= 8.0


@pytest.mark.parametrize(
    ("scales", "decays", "word"),
    [([0.6, 0.5], [0.9, 0.5], "sum to at most 1"), ([-0.1], [0.5], "scales"), ([0.5], [1.0], "decays"),
     ([0.5], [-0.1], "decays"), ([0.5], [], "a scale and a decay"), ([float("nan")], [0.5], "scales"),
     ([0.5], [1 - 1e-9], "decays")],
)  # fmt: skip
def test_strategies_whose_sensitivity_would_be_another_are_refused(scales, decays, word):
    with pytest.raises(ValueError, match=word):
        BufferedToeplitz(scales, decays)


@pytest.mark.parametrize(
    "change",
    [{"steps": 0}, {"steps": 2**22}, {"steps": 1.5}, {"separation": 0}, {"participations": 5}, {"participations": -1}],
)
def test_numbers_that_are_no_plan_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Correlation(BufferedToeplitz(), **{"steps": 40, "separation": 10, **change})


def test_a_decay_that_a_float32_cannot_hold_is_the_one_that_counts():
    assert BufferedToeplitz([0.1], [0.9]).decays == (float(np.float32(0.9)),)
    assert sum(BufferedToeplitz([0.3, 0.2, 0.5], [0.9, 0.5, 0.1]).scales) <= 1
