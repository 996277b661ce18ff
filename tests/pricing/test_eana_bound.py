"""EANA's bound against Rényi divergences integrated numerically, and its conditions."""

import itertools
import math
import subprocess
import sys

import mpmath
import numpy as np
import pytest
from dp_accounting import rdp

from tfdp_rec.sparse import eana_bound
from tfdp_rec.sparse.eana_bound import (
    eana_epsilon,
    eana_instance_epsilon,
    eana_rdp,
    eana_rdp_coordinate,
    eana_rdp_instance,
    eana_rdp_published,
)


def integrated_divergence(order, mean_p, variance_p, mean_q, variance_q):
    """D_α(P‖Q) = ln ∫ p^α q^(1-α) / (α - 1), by mpmath quadrature around the integrand's peak."""
    with mpmath.workdps(40):
        mp = [mpmath.mpf(v) for v in (mean_p, variance_p, mean_q, variance_q)]

        def log_density(x, mean, variance):
            return -((x - mean) ** 2) / (2 * variance) - mpmath.log(2 * mpmath.pi * variance) / 2

        def log_integrand(x):
            return order * log_density(x, mp[0], mp[1]) + (1 - order) * log_density(x, mp[2], mp[3])

        curvature = order / mp[1] + (1 - order) / mp[3]
        assert curvature > 0, "this divergence is infinite"
        peak = (order * mp[0] / mp[1] + (1 - order) * mp[2] / mp[3]) / curvature
        scale = 1 / mpmath.sqrt(curvature)
        top = log_integrand(peak)
        panels = [peak + scale * k for k in range(-16, 17, 2)]
        area = mpmath.quad(lambda x: mpmath.exp(log_integrand(x) - top), panels)
        return float((top + mpmath.log(area)) / (order - 1))


def both_directions(order, shift, count, sigma):
    narrow, wide = (0.0, count * sigma**2), (shift, (count + 1) * sigma**2)
    return (integrated_divergence(order, *wide, *narrow), integrated_divergence(order, *narrow, *wide))


CASES = [(2, 0.0, 2, 1.0), (2, 1.0, 5, 0.5), (3, 0.3, 3, 2.0), (5, 1.0, 40, 0.1), (7, 0.9, 7, 1.0),
         (20, 0.01, 1000, 1.0), (64, 1.0, 100, 3.0), (2, 1.0, 10**6, 0.01)]  # fmt: skip


@pytest.mark.fast_cases("2-1.0-5-0.5", "64-1.0-100-3.0", "2-1.0-1000000-0.01")
@pytest.mark.parametrize("order, shift, count, sigma", CASES)
def test_one_coordinate_is_the_larger_integrated_divergence(order, shift, count, sigma):
    wide_to_narrow, narrow_to_wide = both_directions(order, shift, count, sigma)
    bound = eana_rdp_coordinate(order, count=count, l2_norm_clip=shift, noise_stddev=sigma)
    assert bound == pytest.approx(wide_to_narrow, rel=1e-9)
    assert narrow_to_wide <= wide_to_narrow


@pytest.mark.fast_cases("2-1.0-5-0.5", "64-1.0-100-3.0", "2-1.0-1000000-0.01")
@pytest.mark.parametrize("order, shift, count, sigma", CASES)
def test_the_printed_bound_is_valid_but_not_tight(order, shift, count, sigma):
    printed = eana_rdp_published(
        order, min_count=count, max_nonzero=1, l2_norm_clip=shift, noise_stddev=sigma
    )
    formula = (order * shift**2 / (2 * (count + 1 - order) * sigma**2) + 0.5 * math.log(1 + 1 / count)
               + math.log((count + 1) / (count + 1 - order)) / (2 * (order - 1)))  # fmt: skip
    assert printed == pytest.approx(formula, rel=1e-9)
    assert printed > max(both_directions(order, shift, count, sigma))


@pytest.mark.slow
def test_equation_7_as_printed_is_no_divergence():
    """The paper's (7) at x = 0 is negative; the integrated divergence of that direction is not."""
    order, count = 3, 10
    printed = math.log((count + 1) ** (1 - order) * count**order / (order + count)) / (2 * (order - 1))
    assert printed < 0 < both_directions(order, 0.0, count, 1.0)[1]


def test_theorem_is_attained_by_the_worst_data_set():
    """Every touched coordinate at count C0, gradient of norm L spread over d0 coordinates."""
    order, count, sigma, shifts = 4, 12, 0.7, np.array([0.6, 0.0, 0.8])
    total = sum(both_directions(order, x, count, sigma)[0] for x in shifts)
    bound = eana_rdp(order, min_count=count, max_nonzero=3, l2_norm_clip=1.0, noise_stddev=sigma)
    assert bound == pytest.approx(total, rel=1e-9)


def test_instance_sums_its_coordinates_in_both_directions():
    order, counts, norms, sigma = 3, [4, 9, 50], [0.2, 0.7, 0.4], 0.5
    pairs = [both_directions(order, x, c, sigma) for x, c in zip(norms, counts)]
    bound = eana_rdp_instance(order, row_counts=counts, row_norms=norms, noise_stddev=sigma)
    assert bound == pytest.approx(sum(p[0] for p in pairs), rel=1e-9)
    assert sum(p[1] for p in pairs) <= bound


def test_wide_rows_equal_their_coordinates():
    rows = eana_rdp_instance(2, row_counts=[8, 5], row_norms=[0.6, 0.8], noise_stddev=1.0, width=3)
    spread = np.repeat([0.6, 0.8], 3) / math.sqrt(3)
    single = eana_rdp_instance(2, row_counts=[8] * 3 + [5] * 3, row_norms=spread, noise_stddev=1.0)
    assert rows == pytest.approx(single, rel=1e-12)


def test_instance_never_exceeds_the_theorem():
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = rng.integers(10, 500, size=rng.integers(1, 6))
        norms = rng.dirichlet(np.ones(counts.size)) ** 0.5 * rng.uniform(0.1, 1.0)
        one = eana_rdp_instance(6, row_counts=counts, row_norms=norms, noise_stddev=0.4)
        worst = eana_rdp(6, min_count=10, max_nonzero=6, l2_norm_clip=1.0, noise_stddev=0.4)
        assert one <= worst


def test_the_proofs_inequalities_hold_on_a_grid():
    """Wide-to-narrow dominates, and falls with the count: what the theorem's proof rests on."""

    def other_direction(order, x, count):
        log_term = math.log1p(1 / count) / 2 + math.log((count + 1) / (count + order)) / (2 * (order - 1))
        return order * x**2 / (2 * (count + order)) + log_term

    orders, extras = [2, 3, 4, 7, 20, 100], [0, 1, 2, 5, 30, 1000, 10**6]
    grid = itertools.product(orders, extras, [0.0, 1e-3, 0.1, 1.0, 30.0])
    for order, extra, x in grid:
        count = order + extra
        here, next_one = (eana_rdp_coordinate(order, count=c, l2_norm_clip=x, noise_stddev=1.0)
                          for c in (count, count + 1))  # fmt: skip
        assert next_one < here
        assert other_direction(order, x, count) <= here * (1 + 1e-9) + 1e-15  # the test's own logs cancel
    assert other_direction(5, 0.4, 9) == pytest.approx(both_directions(5, 0.4, 9, 1.0)[1], rel=1e-9)


def test_epsilon_is_the_best_allowed_order():
    sizes = dict(min_count=30, max_nonzero=10, l2_norm_clip=1.0, noise_stddev=0.5)
    orders = list(range(2, 31))
    expected = rdp.compute_epsilon(orders, [eana_rdp(a, **sizes) for a in orders], 1e-7)[0]
    assert eana_epsilon(delta=1e-7, **sizes) == pytest.approx(expected, rel=1e-12)
    assert eana_epsilon(delta=1e-7, published=True, **sizes) > expected


def test_epsilon_holds_as_a_tail_bound_of_the_privacy_loss():
    """δ(ε) integrated directly for one coordinate, both directions, stays below the δ asked for."""
    from scipy import integrate, stats

    count, sigma, delta = 20, 0.6, 1e-4
    epsilon = eana_epsilon(delta=delta, min_count=count, max_nonzero=1, l2_norm_clip=1.0, noise_stddev=sigma)
    narrow, wide = stats.norm(0, math.sqrt(count) * sigma), stats.norm(1, math.sqrt(count + 1) * sigma)
    for p, q in ((narrow, wide), (wide, narrow)):
        grid = np.linspace(-60, 60, 400_001)
        excess = np.maximum(0.0, p.pdf(grid) - math.exp(epsilon) * q.pdf(grid))
        assert integrate.trapezoid(excess, grid) <= delta


def test_instance_epsilon_of_uniform_rows_is_the_theorems():
    one = eana_instance_epsilon(delta=1e-6, row_counts=[50, 50], row_norms=[0.6, 0.8], noise_stddev=1.0)
    same = eana_epsilon(delta=1e-6, min_count=50, max_nonzero=2, l2_norm_clip=1.0, noise_stddev=1.0)
    assert one == pytest.approx(same, rel=1e-9)


GOOD = dict(min_count=10, max_nonzero=2, l2_norm_clip=1.0, noise_stddev=1.0)


@pytest.mark.parametrize("order, change, error, words", [
    (11, {}, ValueError, "alpha <= C0"),
    (1, {}, ValueError, "above 1"),
    (0, {}, ValueError, "above 1"),
    (2.5, {}, TypeError, "order must be an integer"),
    (True, {}, TypeError, "order must be an integer"),
    (2, {"min_count": 0}, ValueError, "alpha <= C0"),
    (2, {"min_count": 9.5}, TypeError, "min_count must be an integer"),
    (2, {"max_nonzero": 0}, ValueError, "at least 1"),
    (2, {"max_nonzero": 1.5}, TypeError, "coordinates"),
    (2, {"l2_norm_clip": -1.0}, ValueError, "l2_norm_clip"),
    (2, {"l2_norm_clip": math.inf}, ValueError, "l2_norm_clip"),
    (2, {"noise_stddev": 0.0}, ValueError, "noise_stddev"),
    (2, {"noise_stddev": math.nan}, ValueError, "noise_stddev"),
])  # fmt: skip
def test_the_theorems_conditions_are_enforced(order, change, error, words):
    for bound in (eana_rdp, eana_rdp_published):
        with pytest.raises(error, match=words):
            bound(order, **{**GOOD, **change})


@pytest.mark.parametrize("order", [10, np.int64(10)])
def test_the_largest_allowed_order_is_accepted(order):
    assert math.isfinite(eana_rdp(order, **GOOD))


def test_bad_epsilon_and_row_arguments_are_refused():
    with pytest.raises(ValueError, match="no bound under EANA"):
        eana_epsilon(delta=1e-6, **{**GOOD, "min_count": 1})
    for delta in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="delta"):
            eana_epsilon(delta=delta, **GOOD)
    with pytest.raises(ValueError, match="same length"):
        eana_rdp_instance(2, row_counts=[3, 4], row_norms=[1.0], noise_stddev=1.0)
    with pytest.raises(TypeError, match="row_counts"):
        eana_rdp_instance(2, row_counts=[3.5], row_norms=[1.0], noise_stddev=1.0)
    with pytest.raises(ValueError, match="row_norms"):
        eana_rdp_instance(2, row_counts=[3], row_norms=[-1.0], noise_stddev=1.0)
    with pytest.raises(ValueError, match="alpha <= C0"):
        eana_rdp_instance(2, row_counts=[100, 0], row_norms=[1.0, 1.0], noise_stddev=1.0)


@pytest.mark.slow
def test_module_needs_no_tensorflow():
    code = f"import sys, {eana_bound.__name__}; sys.exit(bool({{'tensorflow', 'keras'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
