"""The client's mechanism: validation, noise of the right scale, and honest behaviour at the edges."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.news.published import PublishedGaussian
from tfdp_rec.core.mechanism.noise import words
from tfdp_rec.federated import AttentionMechanism, PureLaplace, mechanism
from tfdp_rec.federated.mechanism import l1_sensitivity, l2_sensitivity


@pytest.mark.parametrize(
    "change",
    (
        {"num_basis": 1},
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"delta": 0.0},
        {"delta": 1.0},
        {"clip_norm": 0.0},
        {"clip_norm": math.inf},
        {"padding": 1.0},
        {"padding": -0.1},
        {"activation": "sigmoid"},
        {"delta": 0.1, "calibration": PureLaplace()},
        {"padding": 0.9, "delta": 0.2},
    ),
)
def test_settings_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match="|".join(change)):
        AttentionMechanism(**({"num_basis": 3, "epsilon": 1.0} | change))


def test_attention_of_another_width_is_refused():
    with pytest.raises(ValueError, match="3 weights"):
        AttentionMechanism(3, 1.0).release([0.5, 0.5])


def test_attention_that_is_no_probability_vector_counts_as_uniform():
    """A refusal would tell that some clicks made it so."""
    bad = [[0.5, np.nan, 0.5], [0.5, -0.1, 0.6], [np.inf, 0.0, 0.0]]
    np.testing.assert_allclose(mechanism.clip([*bad, [0.2, 0.3, 0.5]], 1.0), [[1 / 3] * 3] * 3 + [[0.2, 0.3, 0.5]])
    assert np.isfinite(AttentionMechanism(3, 1.0).release(bad)).all()
    assert np.linalg.norm(mechanism.clip([[1e308] * 3], 0.5)) <= 0.5


@pytest.mark.parametrize("theta", (0.3, 1.0, 5.0))
def test_whatever_a_model_gives_is_brought_inside_the_set_the_sensitivity_is_for(theta):
    wild = np.random.default_rng(0).exponential(size=(400, 4)) * 10.0 ** np.arange(-2, 2)
    clipped = mechanism.clip(wild, theta)
    assert clipped.sum(-1).max() <= 1 + 1e-12
    gaps = clipped[:, None] - clipped[None]
    assert np.linalg.norm(gaps, axis=-1).max() <= l2_sensitivity(theta)
    assert np.abs(gaps).sum(-1).max() <= l1_sensitivity(4, theta)
    np.testing.assert_allclose(mechanism.clip(clipped, theta), clipped)


@pytest.mark.parametrize("kind, delta, spread", ((None, 1e-5, stats.norm), (PureLaplace(), 0.0, stats.laplace)))
def test_noise_has_the_stated_distribution_and_a_wrong_scale_is_seen(kind, delta, spread):
    settings = {"calibration": kind} if kind else {}
    private = AttentionMechanism(4, 3.0, delta, **settings)
    sample = private.noise((20_000, 4), words.seeded(5)).ravel()
    assert stats.kstest(sample, spread(scale=private.noise_scale).cdf).pvalue > 1e-6
    assert stats.kstest(sample, spread(scale=1.1 * private.noise_scale).cdf).pvalue < 1e-6
    columns = sample.reshape(-1, 4)
    assert np.abs(np.corrcoef(columns.T) - np.eye(4)).max() < 0.03


def test_operating_system_noise_differs_between_draws_and_is_not_reseeded_by_numpy():
    private = AttentionMechanism(4, 1.0)
    np.random.seed(0)
    first = private.noise((4,))
    np.random.seed(0)
    assert not np.allclose(first, private.noise((4,)))


def test_tails_stay_finite_at_the_extreme_words():
    extremes = np.array([0, 2**64 - 1, 1, 2**64 - 2], dtype=np.uint64)
    for draw in (words.gaussian, words.uniform):
        assert np.isfinite(draw(lambda count: extremes, (4,))).all()
    assert words.gaussian(lambda count: extremes, (4,)).min() < -8


def test_padding_mask_has_the_stated_probability():
    mask = AttentionMechanism(3, 1.0, padding=0.3).padding_mask((100_000,), words.seeded(2))
    assert stats.binomtest(int(mask.sum()), mask.size, 0.3).pvalue > 1e-6
    assert stats.binomtest(int(mask.sum()), mask.size, 0.31).pvalue < 1e-6


@pytest.mark.parametrize("activation", ("softplus", "relu"))
def test_released_vectors_are_non_negative_with_sum_one(activation):
    private = AttentionMechanism(3, 0.1, activation=activation)
    released = private.release(np.full((500, 3), 1 / 3), words.seeded(1))
    assert (released >= 0).all()
    np.testing.assert_allclose(released.sum(-1), 1.0)


def test_relu_that_leaves_nothing_answers_uniformly():
    np.testing.assert_allclose(mechanism.normalise([[-1.0, -2.0]], "relu"), [[0.5, 0.5]])


def test_infinite_epsilon_adds_nothing_and_states_nothing():
    plain = AttentionMechanism(3, math.inf, activation="relu")
    np.testing.assert_allclose(plain.release([0.5, 0.3, 0.2]), [0.5, 0.3, 0.2])
    with pytest.raises(ValueError, match="infinite"):
        plain.delta_at(1.0)


def test_a_published_calibration_has_no_guarantee_to_state():
    with pytest.raises(ValueError, match="PublishedGaussian does not give"):
        AttentionMechanism(3, 1.0, calibration=PublishedGaussian()).guarantee()
    assert AttentionMechanism(3, 1.0).guarantee() == (1.0, 1e-5)


def test_settings_round_trip_and_unknown_calibrations_are_refused():
    private = AttentionMechanism(3, 2.0, 0.0, padding=0.1, calibration=PureLaplace())
    assert AttentionMechanism.from_settings(private.settings()) == private
    with pytest.raises(ValueError, match="calibration"):
        AttentionMechanism.from_settings(private.settings() | {"calibration": "Nothing"})


@pytest.mark.parametrize("theta", (5e-324, 1e-322, 9e-7))
def test_a_clip_at_which_rounding_is_no_longer_small_is_refused(theta):
    """A bundle may name any: at 5e-324 two clipped vectors were 2.4 times as far apart as the noise was for."""
    with pytest.raises(ValueError, match="at least 1e-06"):
        AttentionMechanism(64, 2.0, clip_norm=theta, activation="relu")


@pytest.mark.parametrize("kind, delta", ((None, 1e-5), (PureLaplace(), 0.0)))
@pytest.mark.parametrize("clip_norm", (1.0, 0.3))
def test_attention_and_noise_meet_on_a_grid_that_tells_nothing_of_the_data(monkeypatch, kind, delta, clip_norm):
    monkeypatch.setattr(mechanism, "normalise", lambda values, activation: values)
    private = AttentionMechanism(3, 2.0, delta, clip_norm=clip_norm, **({} if kind is None else {"calibration": kind}))
    step = 2.0 ** (math.frexp(private.noise_scale)[1] - 21)
    for attention in ([0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3], [0.2, 0.1, 0.7]):
        steps = private.release(np.tile(attention, (1000, 1)), words.seeded(5)) / step
        assert np.array_equal(steps, np.floor(steps)) and not np.signbit(steps[steps == 0]).any()
