"""Sensitivities and calibrations against slow, obvious oracles."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism
from scipy import integrate, stats

from experiments.news.published import PublishedGaussian, PublishedLaplace
from tfdp_rec.core.claim import profiles
from tfdp_rec.core.claim.profiles import gaussian_delta
from tfdp_rec.federated.mechanism import AttentionMechanism, PureLaplace, clip, l1_sensitivity, l2_sensitivity

GRID = list(itertools.product((0.001, 0.1, 1.0, 5.0, 10.0, 20.0), (1e-6, 1e-5, 1e-3), (0.0, 0.2, 0.5, 0.9)))
CLIPS = (0.1, 0.4, 0.6, 0.8, 1.0, 3.0)


def simplex_points(num_basis, count, seed):
    """Points near vertices, faces and the middle of the simplex."""
    rng = np.random.default_rng(seed)
    concentrations = rng.choice([0.02, 0.1, 1.0, 20.0], size=count)
    points = np.array([rng.dirichlet(np.full(num_basis, c)) for c in concentrations]).reshape(-1, num_basis)
    faces = [
        np.isin(np.arange(num_basis), s) / len(s)
        for r in range(1, num_basis + 1)
        for s in itertools.combinations(range(num_basis), r)
    ]
    return np.concatenate([points, faces])


@pytest.mark.parametrize("num_basis", (2, 3, 5))
@pytest.mark.parametrize("theta", CLIPS)
def test_no_two_clipped_vectors_are_further_apart_than_the_sensitivity_and_some_reach_it(num_basis, theta):
    points = clip(simplex_points(num_basis, 300, seed=1), theta)
    gaps = points[:, None] - points[None]
    l2 = np.linalg.norm(gaps, axis=-1).max()
    l1 = np.abs(gaps).sum(axis=-1).max()
    assert l2 == pytest.approx(l2_sensitivity(theta))
    assert l1 == pytest.approx(l1_sensitivity(num_basis, theta))
    assert l2 > min(theta, 1.0) * 1.4, "the published sensitivity theta is too small"


@pytest.mark.parametrize("epsilon, delta, padding", GRID)
def test_amplification_inverts(epsilon, delta, padding):
    assert profiles.amplify(profiles.deamplify(epsilon, padding), padding) == pytest.approx(epsilon)


@pytest.mark.parametrize("sigma", (0.3, 1.0, 7.0))
@pytest.mark.parametrize("epsilon", (-1.0, 0.0, 0.5, 3.0))
def test_gaussian_delta_is_dp_accountings(sigma, epsilon):
    oracle = privacy_loss_mechanism.GaussianPrivacyLoss(sigma, sensitivity=1.4)
    assert gaussian_delta(epsilon, 1.4, sigma) == pytest.approx(
        oracle.get_delta_for_epsilon(epsilon), rel=1e-9
    )


def mixture_delta(epsilon, padding, first, second, padded, density, width):
    """h_epsilon of two padded one-dimensional releases by the trapezium rule."""
    low, high = min(first, second, padded) - width, max(first, second, padded) + width
    x = np.linspace(low, high, 200_001)
    left = padding * density(x - padded) + (1 - padding) * density(x - first)
    right = padding * density(x - padded) + (1 - padding) * density(x - second)
    return integrate.trapezoid(np.maximum(0.0, left - math.exp(epsilon) * right), x)


@pytest.mark.fast_cases(
    "1e-05-0.0-1.0", "1e-05-0.2-0.1", "1e-05-0.5-10.0", "0.001-0.0-10.0", "0.001-0.2-5.0", "0.001-0.5-0.1",
)  # fmt: skip
@pytest.mark.parametrize("epsilon", (0.1, 1.0, 5.0, 10.0))
@pytest.mark.parametrize("padding", (0.0, 0.2, 0.5))
@pytest.mark.parametrize("delta", (1e-5, 1e-3))
def test_padded_release_keeps_its_promise_on_the_line_between_two_vertices(epsilon, padding, delta):
    """The segment from one vertex of K to another is one-dimensional: the attention of B = 2, all of it."""
    private = AttentionMechanism(2, epsilon, delta, padding=padding)
    published = AttentionMechanism(2, epsilon, delta, padding=padding, calibration=PublishedGaussian())
    worst = {}
    for mechanism in (private, published):
        scale = mechanism.noise_scale
        deltas = [
            mixture_delta(epsilon, padding, first, second, padded, stats.norm(scale=scale).pdf, 9 * scale)
            for first, second in ((0.0, math.sqrt(2)), (math.sqrt(2), 0.0))
            for padded in (0.0, 0.7, math.sqrt(2))
        ]
        worst[mechanism] = max(deltas)
    assert worst[private] <= delta * (1 + 1e-4)
    assert worst[private] >= delta * 0.99, "the noise is larger than it needs to be"
    assert worst[private] == pytest.approx(private.delta_at(epsilon), rel=1e-3)
    assert worst[published] == pytest.approx(published.delta_at(epsilon), rel=1e-3)
    if epsilon >= 5.0:
        assert worst[published] > 1.2 * delta, "the test cannot see the published calibration fail"


@pytest.mark.parametrize("epsilon", (0.5, 2.0, 10.0))
@pytest.mark.parametrize("padding", (0.0, 0.3))
def test_laplace_log_ratio_is_bounded_everywhere(epsilon, padding):
    """max over outputs of log(density / density') for padded Laplace noise, at corners of K."""
    ratios = {}
    for kind in (PureLaplace(), PublishedLaplace()):
        mechanism = AttentionMechanism(3, epsilon, 0.0, padding=padding, clip_norm=0.8, calibration=kind)
        corners = clip(simplex_points(3, 0, seed=0), 0.8)
        outputs = np.array(list(itertools.product((-50.0, 0.0, 0.3, 0.56, 0.8, 50.0), repeat=3)))
        logs = -np.abs(outputs[None] - corners[:, None]).sum(-1) / mechanism.noise_scale
        with np.errstate(divide="ignore"):
            mixed = np.logaddexp(np.log(1 - padding) + logs[:, None], np.log(padding) + logs[None])
        ratios[type(kind)] = max(
            (mixed[i, pad] - mixed[j, pad]).max() for i, j, pad in itertools.product(range(len(corners)), repeat=3)
        )
    assert ratios[PureLaplace] <= epsilon * (1 + 1e-9)
    assert ratios[PublishedLaplace] > epsilon * 1.1


@pytest.mark.parametrize("epsilon, delta, padding", GRID)
@pytest.mark.parametrize("num_basis", (3, 5))
def test_whole_grid_states_no_more_privacy_than_it_gives(epsilon, delta, padding, num_basis):
    if delta >= 1 - padding:
        pytest.skip("no such mechanism")
    gaussian = AttentionMechanism(num_basis, epsilon, delta, padding=padding)
    assert gaussian.delta_at(epsilon) <= delta * (1 + 1e-9)
    pure = AttentionMechanism(num_basis, epsilon, 0.0, padding=padding, calibration=PureLaplace())
    assert pure.delta_at(epsilon) <= 1e-14


def test_the_published_calibration_gives_the_deltas_the_issue_measured():
    at_ten = AttentionMechanism(5, 10.0, 1e-5, calibration=PublishedGaussian())
    assert at_ten.delta_at(10.0) == pytest.approx(1.3e-2, rel=0.03)
    at_twenty = AttentionMechanism(5, 20.0, 1e-5, calibration=PublishedGaussian())
    assert at_twenty.delta_at(20.0) == pytest.approx(0.25, rel=0.03)
    # with the right sensitivity the classical formula still misses at epsilon = 10
    classical = math.sqrt(2 * math.log(1.25 / 1e-5)) / 10
    assert gaussian_delta(10.0, 1.0, classical) == pytest.approx(2.3e-5, rel=0.03)
