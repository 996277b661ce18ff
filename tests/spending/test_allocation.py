"""The price of random allocation against what two neighbours can tell, by integration and by counting allocations."""

import functools
import itertools

import dp_accounting
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, LaplaceDpEvent, SelfComposedDpEvent
from scipy import stats

from tfdp_rec.core.claim import allocation
from tfdp_rec.core.claim.events import FailingDpEvent, RandomAllocationDpEvent, from_json, to_json
from tfdp_rec.privacy import PoissonSampling, RandomAllocation, RenyiFilter, epsilon_of


def priced(noise, steps, epochs=1):
    return SelfComposedDpEvent(RandomAllocationDpEvent(GaussianDpEvent(noise), steps), epochs)


def positive_part(scale, strike, noise):
    """E max(0, scale X - strike), log X ~ N(-σ⁻²/2, σ⁻²): in closed form, and for strikes below 0 too."""
    strike, width = np.broadcast_to(strike, np.broadcast_shapes(np.shape(scale), np.shape(strike))), 1 / noise
    above = np.maximum(strike, 1e-300)
    d = np.log(scale / above) / width + width / 2
    return np.where(strike > 0, scale * stats.norm.cdf(d) - strike * stats.norm.cdf(d - width), scale - strike)


def normals(count):
    """Points of independent normal numbers and their weights."""
    z, gap = np.linspace(-9, 9, {1: 40_001, 2: 1001, 3: 121}[count], retstep=True)
    weight = stats.norm.pdf(z) * gap
    return np.meshgrid(*[z] * count, indexing="ij"), np.prod(np.meshgrid(*[weight] * count, indexing="ij"), axis=0)


def exact_deltas(noise, steps, epochs, epsilon):
    """δ(ε) with and without the unit, and the reverse: all X but one by quadrature, one in closed form."""
    places, weights = normals(steps * epochs - 1)
    ratios = [np.exp(z / noise - noise**-2 / 2) for z in places]
    rest = sum(ratios[: steps - 1], 0.0) / steps
    other = np.ones(())
    for epoch in range(1, epochs):
        other = other * sum(ratios[epoch * steps - 1 : (epoch + 1) * steps - 1], 0.0) / steps
    # R = (X / T + rest) other, and E R = 1, so that E max(0, 1 - e^ε R) = 1 - e^ε + e^ε E max(0, R - e^-ε).
    above = lambda strike: float(np.sum(weights * positive_part(other / steps, strike - rest * other, noise)))  # noqa: E731
    return above(np.exp(epsilon)), 1 - np.exp(epsilon) + np.exp(epsilon) * above(np.exp(-epsilon))


@pytest.mark.slow_cases("0.7-2-2", "0.5-2-1")
@pytest.mark.parametrize("noise, steps, epochs", [(1.0, 2, 1), (0.5, 2, 1), (3.0, 2, 1), (1.0, 3, 1), (0.7, 2, 2)])
def test_an_epoch_costs_what_neighbours_can_tell_and_no_less(noise, steps, epochs):
    for epsilon in (0.1, 0.5, 2.0):
        exact = max(exact_deltas(noise, steps, epochs, epsilon))
        if exact < 1e-9:
            continue
        found = epsilon_of(priced(noise, steps, epochs), exact)
        assert epsilon - 1e-7 <= found <= epsilon + 2e-3 * epsilon + 2e-4


def test_both_directions_are_priced_each_by_itself():
    ratios = allocation.losses_of_epoch(0.6, 3, 1e-4)
    for epsilon in (0.1, 0.3, 1.0):
        removed, added = exact_deltas(0.6, 3, 1, epsilon)
        assert added < removed
        for direction, exact in ((ratios._pmf_remove, removed), (ratios._pmf_add, added)):
            assert exact - 1e-12 <= direction.get_delta_for_epsilon(epsilon) <= exact * 1.01


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_more_steps_by_a_convolution_on_equal_cells(steps):
    """The sum of X_t by plain convolution of cells, rounded down and rounded up: δ lies between."""
    noise, cell, most = 1.5, 2e-3, 60.0
    edges = np.arange(0, most, cell)
    chance = np.diff(stats.norm.cdf(noise * np.log(np.maximum(edges, 1e-300)) + 0.5 / noise))
    total = np.ones(1)
    for _ in range(steps - 1):
        total = np.convolve(total, chance)[: len(edges)]
    sums = cell * np.arange(len(total))
    for epsilon in (0.2, 0.8):
        low, high = (
            np.sum(total * positive_part(1.0, steps * np.exp(epsilon) - sums - up, noise)) / steps
            for up in (0.0, cell * (steps - 1))
        )
        assert high / low < 1.05
        assert epsilon_of(priced(noise, steps), float(low)) >= epsilon - 1e-9
        assert epsilon_of(priced(noise, steps), float(high)) <= epsilon * 1.002 + 2e-4


@pytest.mark.parametrize("noise, steps", [(0.3, 4), (1.0, 108), (1.0, 109), (5.0, 1000), (20.0, 37)])
def test_ratios_keep_mean_and_variance(noise, steps):
    """E R = 1 and Var R = (e^(1/σ²) - 1) / T, but for what the grid spreads: a little, and never less."""
    ratios = allocation.ratios_of_epoch(noise, steps, 2048)
    values = np.exp(ratios.logs)
    assert ratios.mass.min() >= 0
    assert ratios.mass.sum() + ratios.at_zero == pytest.approx(1, abs=1e-13)
    assert ratios.mass @ values + ratios.at_infinity == pytest.approx(1, abs=1e-13)
    assert max(ratios.at_zero, ratios.at_infinity) < 1e-15
    spread = ratios.mass @ (values - 1) ** 2 / (np.expm1(noise**-2) / steps)
    assert 1 - 1e-9 < spread < 1.005


def test_what_lies_beyond_the_grid_is_counted(monkeypatch):
    """With the ends of the grid where much is lost, the mean stays, no price falls, and Rényi's bounds hold."""
    allocation.ratios_of_epoch.cache_clear()
    fine = epsilon_of(priced(1.0, 8, 2), 1e-2), epsilon_of(priced(1.0, 8, 2), 1e-2, "rdp")
    z, gap = np.linspace(-12, 12, 4001, retstep=True)
    chance, one = stats.norm.pdf(z) * gap, np.exp(z - 0.5)
    exact = np.log((np.outer(chance, chance) * ((one[:, None] + one) / 2) ** -8).sum())
    monkeypatch.setattr(allocation, "_TAIL", 1e-3)
    allocation.ratios_of_epoch.cache_clear()
    try:
        ratios = allocation.ratios_of_epoch(1.0, 8, 2048)
        assert ratios.at_zero > 1e-4 and ratios.at_infinity > 1e-4
        assert ratios.mass.sum() + ratios.at_zero == pytest.approx(1, abs=1e-13)
        assert ratios.mass @ np.exp(ratios.logs) + ratios.at_infinity == pytest.approx(1, abs=1e-13)
        assert epsilon_of(priced(1.0, 8, 2), 1e-2) > 1.05 * fine[0]
        assert allocation._log_inverse_moments(1.0, 2, np.array([8.0]))[0] > exact
    finally:
        allocation.ratios_of_epoch.cache_clear()


@pytest.mark.parametrize("noise", [1e6, 1e14, 1e100])
def test_huge_noise_has_a_price(noise):
    assert epsilon_of(priced(noise, 7), 1e-6) == 0 < epsilon_of(priced(noise, 7), 1e-6, "rdp") < 0.1
    assert epsilon_of(RandomAllocationDpEvent(GaussianDpEvent(2.0), 7.0), 1e-6) > 0  # a whole number of another type


def test_a_finer_grid_lowers_epsilon_by_its_square(monkeypatch):
    found = []
    for points in (256, 512, 1024):
        monkeypatch.setattr(allocation, "_POINTS", points)
        losses = allocation.losses_of_epoch(1.0, 108, 1e-4).self_compose(19)
        found.append(losses.get_epsilon_for_delta(1e-6))
    assert found[0] > found[1] > found[2] and (found[0] - found[1]) / (found[1] - found[2]) > 2.5


def test_the_example_of_the_page():
    """An independent program that was published gives 2.561 to 2.638 (docs/privacy-allocation.md)."""
    assert 2.595 < epsilon_of(priced(1.0, 108, 19), 1e-6) < 2.600


def test_one_step_is_a_gaussian_and_no_noise_is_worth_nothing():
    for epochs in (1, 9):
        bare = epsilon_of(SelfComposedDpEvent(GaussianDpEvent(3.0), epochs), 1e-6)
        assert bare <= epsilon_of(priced(3.0, 1, epochs), 1e-6) < bare + 2e-4
    assert epsilon_of(priced(0.0, 10), 1e-6) == np.inf
    assert epsilon_of(priced(0.05, 10), 1e-6) == epsilon_of(GaussianDpEvent(0.05), 1e-6)


@pytest.mark.fast_cases("others0", "others2")
@pytest.mark.parametrize("others", [(-1.0, -1.0), (-1.0, 0.4), (0.4, 0.4), (1.0, -1.0, 0.5, -0.5, 1.0, 0.0, -1.0)])
def test_every_allocation_of_up_to_eight_units_counted(others):
    """In two batches: all allocations, the two noisy sums in the plane. Others hide a unit, and never show it."""
    noise, epsilon = 1.0, 0.4
    x = np.linspace(-11, 11, 441)
    cell = (x[1] - x[0]) ** 2

    def density(units):
        found = 0.0
        for batches in itertools.product((0, 1), repeat=len(units)):
            sums = [sum(unit for unit, batch in zip(units, batches) if batch == which) for which in (0, 1)]
            found = found + np.outer(*(stats.norm.pdf(x, each, noise) for each in sums))
        return found / 2 ** len(units)

    with_unit, without = density([1.0, *others]), density([0.0, *others])
    for p, q in ((with_unit, without), (without, with_unit)):
        delta = float(np.maximum(p - np.exp(epsilon) * q, 0).sum() * cell)
        assert epsilon_of(priced(noise, 2), delta) >= epsilon


def test_an_epoch_composes_with_everything_else():
    besides = [LaplaceDpEvent(10.0), GaussianDpEvent(9.0)]
    alone = epsilon_of(priced(1.0, 20, 3), 1e-6)
    all_of_it = epsilon_of(ComposedDpEvent([priced(1.0, 20, 3), *besides]), 1e-6)
    assert alone + 0.05 < all_of_it < alone + epsilon_of(ComposedDpEvent(besides), 1e-6)
    poisson = PoissonSampling(1000, 50).compose(GaussianDpEvent(1.0), 60)
    assert epsilon_of(ComposedDpEvent([priced(1.0, 20, 3), poisson]), 1e-6) > alone


@pytest.mark.slow_cases("1.2-3", "0.6-2")
@pytest.mark.parametrize("noise, steps", [(1.0, 2), (0.6, 2), (3.0, 2), (1.2, 3)])
def test_renyi_divergences_are_bounds_of_both_directions(noise, steps):
    """log E R^α and log E R^(1-α) by quadrature; equal to the former at whole orders."""
    orders = np.array([1.25, 1.5, 2.0, 2.5, 3.0, 6.0, 9.0])
    z, gap = np.linspace(-10, 26, {2: 5001, 3: 361}[steps], retstep=True)
    chance = stats.norm.pdf(z) * gap
    ratios = functools.reduce(np.add.outer, [np.exp(z / noise - noise**-2 / 2)] * steps) / steps
    both = functools.reduce(np.multiply.outer, [chance] * steps)
    with_unit, without = (
        np.array([np.log((both * ratios**power).sum()) for power in powers]) / (orders - 1)
        for powers in (orders, 1 - orders)
    )
    found = allocation.divergences(noise, steps, orders)
    assert (found >= np.maximum(with_unit, without) - 1e-9).all()
    assert found[[2, 4, 5, 6]] == pytest.approx(with_unit[[2, 4, 5, 6]], rel=1e-6)


def test_inverse_moments_are_bounds_and_close_where_they_matter():
    z = np.linspace(-12, 12, 4001)
    chance = stats.norm.pdf(z) * (z[1] - z[0])
    ratios = (np.exp(z - 0.5)[:, None] + np.exp(z - 0.5)[None]) / 2
    powers = np.array([0.5, 1.0, 3.0, 8.0])
    exact = np.array([np.log((np.outer(chance, chance) * ratios**-power).sum()) for power in powers])
    found = allocation._log_inverse_moments(1.0, 2, powers)
    assert (found >= exact).all() and found == pytest.approx(exact, rel=2e-2)


@pytest.mark.fast_cases("5.0-1000-10", "1.0-108-19")
@pytest.mark.parametrize("noise, steps, epochs", [(1.0, 108, 19), (0.5, 10, 1), (5.0, 1000, 10), (0.2, 10, 10)])
def test_renyis_price_is_above_and_near_the_other(noise, steps, epochs):
    event = priced(noise, steps, epochs)
    assert epsilon_of(event, 1e-6) <= epsilon_of(event, 1e-6, "rdp") < 1.4 * epsilon_of(event, 1e-6)


def test_a_filter_admits_epochs():
    limit = RenyiFilter(8.0, 1e-6)
    used = limit.used(priced(1.0, 108, 19))
    assert 0.1 < used < limit.used(PoissonSampling(108, 1).compose(GaussianDpEvent(1.0), 19 * 108))
    assert limit.used(priced(1.0, 108, 38)) == pytest.approx(2 * used)


def test_what_has_no_price_is_refused():
    for accountant in ("pld", "rdp"):
        with pytest.raises(ValueError, match=f"{accountant} accountant cannot account"):
            epsilon_of(RandomAllocationDpEvent(LaplaceDpEvent(1.0), 10), 1e-6, accountant)
    with pytest.raises(ValueError, match="fails within a sampling"):
        epsilon_of(RandomAllocationDpEvent(FailingDpEvent(1e-9), 10), 1e-6)
    with pytest.raises(ValueError, match="steps_per_epoch must be"):
        to_json(RandomAllocationDpEvent(GaussianDpEvent(1.0), 0))
    assert epsilon_of(RandomAllocationDpEvent(dp_accounting.NonPrivateDpEvent(), 10), 1e-6) == np.inf


def test_the_event_is_written_and_read():
    event = priced(1.25, 7, 3)
    assert from_json(to_json(event)) == event


def test_a_history_is_priced_by_whole_epochs():
    sampling, step = RandomAllocation(100, 10), GaussianDpEvent(2.0)
    epoch = RandomAllocationDpEvent(step, 10)
    for steps, epochs in ((1, 1), (10, 1), (11, 2), (30, 3)):
        assert sampling.compose_history([(step, steps)]) == SelfComposedDpEvent(epoch, epochs)
    two = ComposedDpEvent([GaussianDpEvent(2.0), GaussianDpEvent(2.0)])
    assert sampling.price(two).event.noise_multiplier == pytest.approx(2**0.5)
